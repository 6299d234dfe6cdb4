"""What a model's Python may write that is no operator, while it is traced.

    x.data                             x.detach(), which has the same memory
    x[t] = y, t a tensor without dims  x.index_put_([t], y)
    module.to(dtype)                   nothing, where nothing changes; else refused with the names
    x.data = y, x.register_hook(f),    refused by the line: a graph keeps none of them
    torch.func.grad(f), packed rows,
    copy.copy(x), copy.deepcopy(x)

Attributes of torch's classes stand in for these while the model runs, and for nobody but its own lines.
What it keeps meanwhile in caches of its files (functools.cache, dicts) has no values, and is dropped after.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.utils.rnn import PackedSequence

from plait.capture import chosen, losses
from plait.capture.refuse import is_standard_file, is_user_file, user_place
from plait.errors import CaptureError

_MISSING = object()


@contextlib.contextmanager
def spoken(model: nn.Module, training: bool) -> Iterator[list[str]]:
    """Around a call of `model` that is traced; yields the names of Python modules that it set to its tensors."""
    from torch._functorch import eager_transforms

    stand_ins: list[tuple[Any, str, Any]] = [
        (Tensor, "data", property(_data, _set_data)),
        (nn.Module, "_apply", _converter(model)),
        (eager_transforms, "grad_increment_nesting", _inner_gradient),
        (PackedSequence, "__new__", _packed),
        (Tensor, "__reduce_ex__", _copier(Tensor.__reduce_ex__)),
        (Tensor, "__deepcopy__", _copier(Tensor.__deepcopy__)),
        (Tensor, "__setitem__", chosen.set_item),
        (torch._C._nn, "multi_margin_loss", losses.multi_margin),
        (torch._C._nn, "multilabel_margin_loss", losses.multilabel_margin),
    ]
    if training:
        stand_ins.append((Tensor, "register_hook", _hook))
    before = [(owner, name, owner.__dict__.get(name, _MISSING)) for owner, name, _ in stand_ins]
    names = {module: dict(vars(module)) for module in _modules()}
    sets: list[str] = []
    try:
        for owner, name, value in stand_ins:
            setattr(owner, name, value)
        yield sets
    finally:
        for owner, name, value in before:
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        for module in _modules():
            sets += _put_back(module, names.get(module, {}))
            _drop_from_caches(module)


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
        f"{user_place()}: the gradient that torch.func takes in forward is not captured: write its "
        "formula out, or take it outside; that of torch.autograd.grad is, where no weight is behind it "
        "(y = x.detach().requires_grad_(), with torch.enable_grad())"
    )


def _packed(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError(
        f"{user_place()}: how many rows of a packed sequence each step has depends on the lengths' values, "
        "which is not supported: give the layer the padded rows, and choose by the lengths from what it gives "
        "(torch.gather, or torch.where over the steps)"
    )


def _copier(original: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, Any], Any]:
    def copied(x: Tensor, how: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and is_standard_file(frame.f_code.co_filename):  # copy, pickle
            frame = frame.f_back
        if type(x) not in _OF_A_TRACE or not is_user_file(frame.f_code.co_filename):
            return original(x, how)
        raise CaptureError(
            f"{user_place()}: no graph copies a tensor as Python does: write x itself or x.detach() for copy.copy(x), "
            "x.detach().clone() for copy.deepcopy(x)"
        )

    return copied


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


def _modules() -> Iterator[ModuleType]:
    """Those of the user, and of the user's libraries."""
    for module in list(sys.modules.values()):
        if is_user_file(getattr(module, "__file__", None) or "<string>"):
            yield module


def _put_back(module: ModuleType, before: Mapping[str, Any]) -> list[str]:
    """The names that have come to stand for tensors of the trace."""
    if _OF_A_TRACE.isdisjoint(map(type, vars(module).values())):
        return []
    now = [(name, value) for name, value in vars(module).items() if type(value) in _OF_A_TRACE]
    found = [name for name, value in now if before.get(name) is not value]
    for name in found:
        if name in before:
            setattr(module, name, before[name])
        else:
            delattr(module, name)
    return [f"{module.__name__}.{name}" for name in found]


def _drop_from_caches(module: ModuleType) -> None:
    """Where the model is called later, or traced once more, it makes these tensors anew."""
    values = vars(module).values()
    if _TORCHES.isdisjoint(map(id, values)):
        return
    own = [vars(x) for x in values if isinstance(x, type) and x.__module__ == module.__name__]
    for holder in (values, *(names.values() for names in own)):
        if not _CACHES.isdisjoint(map(type, holder)):
            for value in list(holder):
                _drop_from(value.__func__ if isinstance(value, staticmethod) else value)


def _drop_from(cache: Any) -> None:
    if isinstance(cache, functools._lru_cache_wrapper):
        if any(map(_traced, gc.get_referents(cache))):
            cache.cache_clear()
    elif type(cache) in _DICTS and cache is not vars(builtins):
        for key in [k for k, x in cache.items() if _traced(x)]:
            del cache[key]


def _traced(x: Any, depth: int = 3) -> bool:
    """Whether a tensor of the trace is in it."""
    kind = type(x)
    if kind in _HOLDING or kind.__name__ == "_lru_list_elem":
        return depth > 0 and any(_traced(y, depth - 1) for y in gc.get_referents(x))
    return kind in _OF_A_TRACE


def _asked_by_the_model() -> bool:
    return is_user_file(sys._getframe(2).f_code.co_filename)


_DATA: Any = torch._C.TensorBase.data
_HOOK = Tensor.register_hook
_OF_A_TRACE = {FakeTensor, FunctionalTensor}
_DICTS = {dict, OrderedDict, defaultdict}
_HOLDING = {*_DICTS, tuple, list}
_CACHES = {*_DICTS, functools._lru_cache_wrapper, staticmethod}
_TORCHES = {id(torch), id(Tensor), id(nn)}  # a module that names none of them makes no tensors
