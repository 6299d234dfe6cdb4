"""One call of the model: its arguments, bound to the names of `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from plait.errors import CaptureError
from plait.program import Input


@dataclass(frozen=True)
class Call:
    """`leaves` are the flat (args, kwargs); `shapes` is what torch.export wants as dynamic_shapes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[tuple[str, Any], ...]
    spec: pytree.TreeSpec
    shapes: dict[str, Any] | None

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic: Mapping[str, Any] | None,
    ) -> Call:
        bound = _bind(model, args, kwargs)
        shapes = _dynamic_shapes(bound, dynamic) if dynamic else None
        with_paths, spec = pytree.tree_flatten_with_path((args, kwargs))
        leaves = tuple((_spell(path), leaf) for path, leaf in with_paths)
        return cls(args, kwargs, leaves, spec, shapes)

    def order(self, spec: pytree.TreeSpec) -> list[int]:
        """Our leaves in the order of `spec`, which may have the keywords in another one."""
        numbered = pytree.tree_unflatten(list(range(len(self.leaves))), self.spec)
        return list(spec.flatten_up_to(numbered))

    def inputs(self, nodes: Mapping[int, str]) -> tuple[Input, ...]:
        """`nodes`: placeholder name of the i-th leaf, where it is a tensor."""
        return tuple(
            Input(path, node=nodes[i]) if i in nodes else Input(path, value=leaf)
            for i, (path, leaf) in enumerate(self.leaves)
        )


def _spell(path: Any) -> str:
    root, rest = path[0], path[1:]
    return ("args", "kwargs")[root.idx] + pytree.keystr(rest)


def _bind(model: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    signature = inspect.signature(model.forward)
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise CaptureError(
            f"the example inputs do not fit {type(model).__name__}.forward{signature}: {error}"
        ) from None


def _dynamic_shapes(bound: dict[str, Any], dynamic: Mapping[str, Any]) -> dict[str, Any]:
    dims: dict[str, Any] = {}

    def dim(name: Any) -> Any:
        if not isinstance(name, str):
            return name
        return dims.setdefault(name, torch.export.Dim(name))

    def shape(value: Any, names: Any) -> Any:
        if isinstance(names, Mapping):
            return {k: dim(v) for k, v in names.items()}
        return names

    return {
        name: shape(value, dynamic[name]) if name in dynamic else pytree.tree_map(lambda _: None, value)
        for name, value in bound.items()
    }
