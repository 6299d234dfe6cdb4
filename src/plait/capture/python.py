"""What a model's Python may write that is no operator, while it is traced.

    x.data                             x.detach(), which has the same memory
    module.to(dtype)                   nothing, where nothing changes; else refused with the names
    x.data = y, x.register_hook(f),    refused by the line: a graph keeps none of them
    torch.func.grad(f)

Attributes of torch's classes stand in for these while the model runs, and for nobody but its own lines.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plait.capture.refuse import is_user_file, user_place
from plait.errors import CaptureError

_MISSING = object()


@contextlib.contextmanager
def spoken(model: nn.Module, training: bool) -> Iterator[None]:
    """Around a call of `model` that is traced."""
    from torch._functorch import eager_transforms

    stand_ins: list[tuple[Any, str, Any]] = [
        (Tensor, "data", property(_data, _set_data)),
        (nn.Module, "_apply", _converter(model)),
        (eager_transforms, "grad_increment_nesting", _inner_gradient),
    ]
    if training:
        stand_ins.append((Tensor, "register_hook", _hook))
    before = [(owner, name, owner.__dict__.get(name, _MISSING)) for owner, name, _ in stand_ins]
    try:
        for owner, name, value in stand_ins:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _data(x: Tensor) -> Tensor:
    return x.detach() if _asked_by_the_model() else _DATA.__get__(x)  # type: ignore[no-any-return]


def _set_data(x: Tensor, value: Tensor) -> None:
    if not _asked_by_the_model():
        _DATA.__set__(x, value)
        return
    raise CaptureError(
        f"{user_place()}: gives a tensor other values, which no graph keeps: give them a name (y = ...), "
        "and what the next call is to read a buffer"
    )


def _hook(x: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    if not _asked_by_the_model():
        return _HOOK(x, hook)
    raise CaptureError(
        f"{user_place()}: the hook on a gradient would be left out: multiply in forward by what it "
        "multiplies by, or make it an operator (torch.library.custom_op and register_autograd)"
    )


def _inner_gradient() -> Any:
    raise CaptureError(
        f"{user_place()}: the gradient that torch.func takes in forward is not captured; that of "
        "torch.autograd.grad is (y = x.detach().requires_grad_(), with torch.enable_grad())"
    )


def _converter(model: nn.Module) -> Callable[..., nn.Module]:
    def convert(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
        changed = [name for name, x in tensors if change(x) is not x]
        if changed:
            path = next((f"{name}." for name, m in model.named_modules() if m is module and name), "")
            raise CaptureError(
                f"{user_place()}: forward converts {', '.join(path + name for name in changed)}; convert "
                "the module before the compile, or its value where it is used (x.to(dtype))"
            )
        return module

    return convert


def _asked_by_the_model() -> bool:
    return is_user_file(sys._getframe(2).f_code.co_filename)


_DATA: Any = torch._C.TensorBase.data
_HOOK = Tensor.register_hook
