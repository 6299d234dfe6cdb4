"""The model as it was, after its Python ran."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

CONTAINERS = (dict, list, set)


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[dict[str, None]]:
    """Every attribute of every module is put back; yields the names of those that had changed."""
    before = [(name, m, _copy(m.__dict__)) for name, m in model.named_modules()]
    changed: dict[str, None] = {}
    try:
        yield changed
    finally:
        for name, module, saved in before:
            now = module.__dict__
            for key in now.keys() - saved.keys():
                changed[f"{name}.{key}".lstrip(".")] = None
                del now[key]
            for key, (value, contents) in saved.items():
                if now.get(key, _MISSING) is not value:
                    changed[f"{name}.{key}".lstrip(".")] = None
                    now[key] = value
                if contents is not None and not _same(value, contents):
                    changed[f"{name}.{key}".lstrip(".")] = None
                    _refill(value, contents)


def _copy(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """With the contents of each container, which may be changed in place."""
    return {
        key: (value, value.copy() if isinstance(value, CONTAINERS) else None)
        for key, value in attributes.items()
    }


def _refill(value: Any, contents: Any) -> None:
    value.clear()
    if isinstance(value, list):
        value.extend(contents)
    else:
        value.update(contents)


def _same(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, set):
        return bool(a == b)
    left, right = (x.items() if isinstance(x, dict) else enumerate(x) for x in (a, b))
    return all(
        k is m and v is w if isinstance(k, str) else k == m and v is w
        for (k, v), (m, w) in zip(left, right, strict=True)
    )


def swap_tensors(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Parameters, buffers and tensor attributes replaced; to be used within `preserved`."""
    for module in model.modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    holder[name] = change(value)  # type: ignore[assignment]


def on_meta(model: nn.Module) -> bool:
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A buffer with data in a model without; its value is folded, its place in the trace is meta."""
    return tensor if tensor.is_meta else tensor.to("meta")


@contextlib.contextmanager
def replaced_forwards(forwards: dict[nn.Module, Any]) -> Iterator[None]:
    """`module.forward` set on each instance, and taken back."""
    missing = object()
    before = {m: m.__dict__.get("forward", missing) for m in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, forward in before.items():
            if forward is missing:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


_MISSING = object()
