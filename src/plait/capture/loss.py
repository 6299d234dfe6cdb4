"""Loss: a model and what is made of its output, as one model; how a step is captured.

The same parameters under the same names, the same signature with one keyword more, and two outputs:

    forward(*args, plait_target=(target, ...), **kwargs) -> (loss, out)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from plait.capture.call import TARGET
from plait.capture.refuse import spell
from plait.errors import InputError


@dataclass(frozen=True, eq=False)
class Loss:
    """`fn(out, *target)`, or the model's own loss where there is no `fn`; none where none is asked.

    `every`: the shapes of all replicas' inputs, where it is the loss of all of them together.
    """

    fn: Callable[..., Tensor] | None = None
    asked: bool = True
    every: Any = None

    def __post_init__(self) -> None:
        if self.fn is not None and not callable(self.fn):
            raise InputError(f"loss_fn is {self.fn!r}; it takes a function of the output and the targets")
        learned = list(self.fn.parameters()) if isinstance(self.fn, nn.Module) else []
        if learned:
            raise InputError(
                f"{self} has {len(learned)} parameters, which step would not train: make it a part "
                "of the model"
            )

    def __call__(self, out: Any, targets: Sequence[Any]) -> Tensor:
        """A tensor of one element; InputError for anything else."""
        value = _own(out) if self.fn is None else self.fn(out, *targets)
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            raise InputError(f"{_begins(self.fn)}{self} gives {_kind(value)}; step takes a loss of one real element")
        return value.reshape(())

    def takes(self, targets: Sequence[Any]) -> None:
        """InputError where `fn` cannot be called with so many targets."""
        if self.fn is None and targets:
            raise InputError(f"target= is for a loss_fn; {self} takes its labels as the model "
                "does: by their place where it calls them target")
        try:
            signature = inspect.signature(self.fn) if self.fn is not None else None
        except (TypeError, ValueError):  # it says nothing of its arguments
            return
        try:
            if signature is not None:
                signature.bind(None, *targets)
        except TypeError as error:
            raise InputError(
                f"{self}{signature} is called with the output and target=, of which there are "
                f"{len(targets)}: {error}"
            ) from None

    def __str__(self) -> str:
        if self.fn is None:
            return "the model's own loss"
        return f"loss_fn {getattr(self.fn, '__qualname__', type(self.fn).__qualname__)}"

    def same(self, other: Loss) -> bool:
        """Whether what was captured with the one stands for the other."""
        return (self.asked, self.every) == (other.asked, other.every) and _alike(self.fn, other.fn)


NO_LOSS = Loss(asked=False)  # of a plain call


def with_loss(model: nn.Module, loss: Loss) -> nn.Module:
    """`model` is not changed; it and the new module share parameters, buffers and submodules."""
    kind, inner = type(model), vars(model).get("forward")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        targets = kwargs.pop(TARGET)
        run = inner if inner is not None else super(made, self).forward
        out = run(*args, **kwargs)
        return loss(out, targets), out

    forward.__signature__ = _signature(model)  # type: ignore[attr-defined]
    body = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: Any = type(kind.__name__, (kind,), body)
    out = copy.copy(model)
    out.__class__ = made
    vars(out).pop("forward", None)
    return out


def _signature(model: nn.Module) -> inspect.Signature:
    kinds = inspect.Parameter
    own = list(inspect.signature(model.forward).parameters.values())
    rest = [p for p in own if p.kind is kinds.VAR_KEYWORD]
    target = kinds(TARGET, kinds.KEYWORD_ONLY)
    first = kinds("self", kinds.POSITIONAL_ONLY)
    return inspect.Signature([first, *(p for p in own if p not in rest), target, *rest])


def _own(out: Any) -> Any:
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if loss is None:
        raise InputError("step() without loss_fn needs a model that returns its loss as `loss`")
    return loss


def _kind(value: Any) -> str:
    """What a loss is that is none; while it is captured, its numbers have no values."""
    if isinstance(value, Tensor):
        return f"a tensor of {list(value.shape)}{', complex' * value.is_complex()}"
    if isinstance(value, (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return "a number of Python's, which has no gradient (return the tensor, not its item())"
    if isinstance(value, (tuple, list, Mapping)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}" if value is not None else "None"


def _begins(fn: Any) -> str:
    """The line where the user's function begins."""
    fn = _begins_with(fn)
    return spell(fn.__code__.co_filename, fn.__code__.co_firstlineno) if isinstance(fn, FunctionType) else ""


def _begins_with(fn: Any) -> Any:
    if isinstance(fn, partial):
        return _begins_with(fn.func)
    if isinstance(fn, nn.Module):
        return type(fn).forward
    return inspect.unwrap(getattr(fn, "__func__", fn)) if callable(fn) else fn


def _alike(a: Any, b: Any) -> bool:
    """One function, `partial` or module, or two that were made alike: what a loop writes is made anew each time."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, FunctionType):
        return a.__code__ is b.__code__ and _equal(_bound(a), _bound(b))
    if isinstance(a, partial):
        return _alike(a.func, b.func) and _equal(*([*f.args, "", *f.keywords, *f.keywords.values()] for f in (a, b)))
    if isinstance(a, nn.Module):
        return _bare(a) and _bare(b) and _equal(*([*_attributes(m), *m._buffers.values()] for m in (a, b)))
    return bool(a == b)


def _bare(module: nn.Module) -> bool:
    """Nothing hangs on it that its attributes do not tell."""
    hooks = [v for name, v in vars(module).items() if name.endswith("hooks")]
    return not module._modules and not any(hooks)


def _attributes(module: nn.Module) -> list[Any]:
    return [x for name, v in vars(module).items() if not name.startswith("_") for x in (name, v)]


def _bound(fn: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    return [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]


def _equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    plain = (int, float, str, torch.dtype)
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(
        x is y or (isinstance(x, plain) and type(x) is type(y) and x == y) for x, y in pairs
    )
