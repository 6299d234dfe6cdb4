"""One call of the model: its arguments, bound to the names of `forward`, and its dynamic sizes."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from plait.capture.preserve import on_meta
from plait.capture.refuse import refuse_inputs
from plait.errors import CaptureError
from plait.program import Input

Range = tuple[int | None, int | None]
TARGET = "plait_target"  # the keyword that a step's targets are


@dataclass(frozen=True)
class Call:
    """`leaves` are the user's (args, kwargs), flat, each with its path.

    `numbers` are the leaves' positions in the shape of forward's bound arguments; `dims` the names of
    each leaf's dynamic sizes; `ranges` what is known of these sizes.
    """

    leaves: tuple[tuple[str, Any], ...]
    spec: pytree.TreeSpec
    numbers: dict[str, Any]
    dims: tuple[dict[int, str], ...]
    ranges: dict[str, Range]

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic: Mapping[str, Any] | None,
    ) -> Call:
        with_paths, spec = pytree.tree_flatten_with_path(resolved((args, kwargs)))
        leaves = tuple((spell(path), leaf) for path, leaf in with_paths)
        refuse_inputs(leaves)
        numbered = pytree.tree_unflatten(list(range(len(leaves))), spec)
        numbers = _bind(model, *numbered)
        dims, ranges = _Dynamic(leaves, numbers).read(dynamic or {})
        return cls(leaves, spec, numbers, dims, ranges)

    def with_ranges(self, ranges: Mapping[str, Range]) -> Call:
        return replace(self, ranges={**self.ranges, **ranges})

    def outside(self, ranges: Mapping[str, Range]) -> set[str]:
        """The sizes that are not in their range here: of 0 or 1, for which another was traced, where the model
        asks for that."""
        return {
            name
            for (_, x), dims in zip(self.leaves, self.dims, strict=True)
            for dim, name in dims.items()
            if int(x.shape[dim]) < (ranges[name][0] or 0)
        }

    def fixed(self, names: Collection[str]) -> Call:
        """With these sizes as they are."""
        dims = tuple({d: n for d, n in mine.items() if n not in names} for mine in self.dims)
        return replace(self, dims=dims, ranges={n: r for n, r in self.ranges.items() if n not in names})

    def example(self, model: torch.nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) to trace with: on the model's device."""
        device = _device(model)
        leaves = [
            _example(x, device, dims) if isinstance(x, torch.Tensor) else x
            for (_, x), dims in zip(self.leaves, self.dims, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(_apart(leaves), self.spec)
        return args, kwargs

    def dynamic_shapes(self) -> dict[str, Any] | None:
        """As torch.export wants them."""
        if not self.ranges:
            return None
        sizes = {
            name: torch.export.Dim(name, min=low, max=high)
            for name, (low, high) in self.ranges.items()
        }
        shapes = [{d: sizes[n] for d, n in dims.items()} or None for dims in self.dims]
        return {k: pytree.tree_map(lambda i: shapes[i], tree) for k, tree in self.numbers.items()}

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


def resolved(tree: Any) -> Any:
    """Inputs as their memory has them: a conjugate says by a bit that it is one, which no message tells."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.resolve_conj().resolve_neg(), tree)


def spell(path: Any) -> str:
    """A leaf of (args, kwargs) as the caller would write it."""
    root, rest = path[0], path[1:]
    if rest and getattr(rest[0], "key", None) == TARGET:
        return "target" + pytree.keystr(rest[1:])
    return ("args", "kwargs")[root.idx] + pytree.keystr(rest)


def _bind(model: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    signature = inspect.signature(model.forward)
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise CaptureError(
            f"the arguments do not fit {type(model).__name__}.forward{signature}: {error}"
        ) from None


# -- the example ---------------------------------------------------------------------------------------


def _device(model: torch.nn.Module) -> torch.device | None:
    """meta if the model has a meta tensor; else that of all its tensors, None where there is none such."""
    if on_meta(model):
        return torch.device("meta")
    found = {t.device for t in (*model.parameters(), *model.buffers())}
    return found.pop() if len(found) == 1 else None


def _example(x: torch.Tensor, device: torch.device | None, dims: dict[int, str]) -> torch.Tensor:
    fake = isinstance(x, FakeTensor)
    moved = device is not None and x.device != device  # a program runs on its rank's device, whatever stood where
    small = [d for d in dims if x.shape[d] < 2]  # sizes 0 and 1 would be taken as constants
    if not (fake or moved or small):
        return x
    shape = [2 if d in small else int(s) for d, s in enumerate(x.shape)]
    new = torch.empty(shape, dtype=x.dtype, device=device if moved else x.device)
    return new.requires_grad_(x.requires_grad)


def _apart(leaves: list[Any]) -> list[Any]:
    """A tensor that is given twice is two inputs, or export would read both from one of them: another call
    may well give two tensors (labels that are the tokens in the example)."""
    out, seen = [], set[int]()
    for x in leaves:
        again = isinstance(x, torch.Tensor) and id(x) in seen
        seen.add(id(x))
        out.append(x.detach().clone().requires_grad_(x.requires_grad) if again else x)
    return out


# -- dynamic sizes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dynamic:
    """Reads `dynamic={"input_ids": {0: "batch"}}`; nested arguments are named by nested mappings."""

    leaves: tuple[tuple[str, Any], ...]
    numbers: dict[str, Any]

    def read(self, dynamic: Mapping[str, Any]) -> tuple[tuple[dict[int, str], ...], dict[str, Range]]:
        dims: list[dict[int, str]] = [{} for _ in self.leaves]
        ranges: dict[str, Range] = {}
        wrong: list[str] = []
        named = dict(self._named())
        for name, asked in dynamic.items():
            if name not in named:
                wrong.append(f"forward is given no argument {name!r}")
                continue
            for number, path, dim, size in self._sizes(named[name], asked, name, wrong):
                label, bounds = _size(size)
                if label is None or not label.isidentifier():
                    wrong.append(f"{path}: dim {dim} is {_misnamed(size)}")
                    continue
                dims[number][dim] = label
                ranges[label] = bounds if bounds != (None, None) else ranges.get(label, bounds)
                wrong += _outside(label, bounds, path, int(self.leaves[number][1].shape[dim]))
        wrong += self._unequal(dims)
        if wrong:
            given = ", ".join(f"{n}{self._about(tree)}" for n, tree in named.items())
            raise CaptureError(f"dynamic=: {'; '.join(wrong)}. The arguments are {given}")
        return tuple(dims), ranges

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Arguments by name, those of a `**kwargs` by their own."""
        for name, tree in self.numbers.items():
            yield name, tree
            if isinstance(tree, dict):
                yield from tree.items()

    def _sizes(
        self, tree: Any, asked: Any, path: str, wrong: list[str]
    ) -> Iterator[tuple[int, str, int, Any]]:
        if asked is None:
            return
        if not isinstance(asked, (Mapping, list, tuple)):
            wrong.append(f"{path} is given {asked!r}, and takes names by dim: {{0: 'batch'}}")
            return
        if not isinstance(tree, int):
            keys = asked.keys() if isinstance(asked, Mapping) else range(len(asked))
            for key in keys:
                if key not in (tree if isinstance(tree, Mapping) else range(len(tree))):
                    wrong.append(f"{path} has no {key!r}")
                    continue
                yield from self._sizes(tree[key], asked[key], f"{path}[{key!r}]", wrong)
            return
        tensor = self.leaves[tree][1]
        if not isinstance(tensor, torch.Tensor):
            wrong.append(f"{path} is {tensor!r}, which has no sizes")
            return
        items = asked.items() if isinstance(asked, Mapping) else enumerate(asked)
        for dim, size in items:
            if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
                wrong.append(f"{path} has {tensor.dim()} dims, no dim {dim!r}")
            elif size is not None and size != torch.export.Dim.STATIC:
                yield tree, path, dim % tensor.dim(), size

    def _unequal(self, dims: list[dict[int, str]]) -> list[str]:
        found: dict[str, dict[int, str]] = {}
        for (path, x), names in zip(self.leaves, dims, strict=True):
            for dim, name in names.items():
                found.setdefault(name, {})[int(x.shape[dim])] = f"{path} dim {dim}"
        return [
            f"{name!r} is one size but " + ", ".join(f"{s} in {p}" for s, p in places.items())
            for name, places in found.items()
            if len(places) > 1
        ]

    def _about(self, tree: Any) -> str:
        tensor = self.leaves[tree][1] if isinstance(tree, int) else None
        return str(list(tensor.shape)) if isinstance(tensor, torch.Tensor) else ""


def _outside(name: str, bounds: Range, path: str, given: int) -> list[str]:
    low, high = bounds
    if high is not None and high < 2:
        return [f"{name!r} is from {low or 0} to {high}, and 0 and 1 have programs of their own: leave it out"]
    if (low or 0) <= given and (high is None or given <= high):
        return []
    return [f"{name!r} is from {low or 0} to {high or 'any number'}, but {given} in {path}"]


def _misnamed(size: Any) -> str:
    hints = (torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC)
    if any(size == hint for hint in hints):
        return "left to torch: name its size ('batch'; sizes of one name are equal), and leave out those that are fixed"
    if isinstance(size, torch.export.Dim):
        return f"{size.__name__}, a size derived from another: name it by itself, or leave it out"
    return f"named {size!r}, which is no identifier"


def _size(size: Any) -> tuple[str | None, Range]:
    if isinstance(size, str):
        return size, (None, None)
    name = getattr(size, "__name__", None)
    if name is None:
        return None, (None, None)
    low, high = getattr(size, "min", None), getattr(size, "max", None)
    return name, (low, high if isinstance(high, int) and high < 2**31 else None)
