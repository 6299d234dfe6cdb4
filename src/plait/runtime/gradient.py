"""Gradients of which a rank has a part, and what torch's own functions make of them.

A gradient is this rank's rows of a split weight, so what treats each element by itself is right on
it as it is: optimizers, `clip_grad_value_`, scaling. What looks at all elements is not, and some of
it belongs to every training loop:

    torch.linalg.vector_norm, torch._foreach_norm       torch.nn.utils.clip_grad_norm_
    torch._amp_foreach_non_finite_check_and_unscale_    torch.amp.GradScaler

So `.grad` of such a weight is a `Rows`: these functions take the part of the other ranks in, and
are collectives then; every other function gets, and gives, plain tensors. The seam is torch's
`__torch_function__`, and on the gradient alone: neither the weights nor torch are changed, and the
forward and backward passes do not pay for it. Where the ranks do not all have the same weights (the
stages of a pipeline) these functions raise: each rank would ask another number of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import InputError
from plait.rules.moves import Cut, Step, only_own
from plait.runtime.transport import Transport


@dataclass(frozen=True)
class Holder:
    """Where the rest of a weight is."""

    name: str
    cut: Cut | None  # None: it is whole, and other weights are elsewhere
    staged: bool
    transport: Transport
    guard: Callable[[str], AbstractContextManager[None]]

    def everywhere(self, x: Tensor, op: str, what: str) -> Tensor:
        if self.staged:
            raise InputError(
                f"{what} on the gradient of {self.name}: each stage of a pipeline has the gradients "
                "of its own weights only. plait.clip_grad_norm_(compiled, max_norm) takes the norm "
                "of the whole model; a gradient scaler is for float16, bfloat16 needs none"
            )
        with self.guard(what):
            return self.transport.run(Step("all_reduce", op), x, None, "native")

    def own(self, rows: Tensor) -> Tensor:
        """The rows that count here, each on one rank."""
        return rows if self.cut is None else only_own(rows, self.cut, self.transport.rank)


class Rows(Tensor):
    """A gradient of which this rank has some rows."""

    holder: Holder

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _WHOLE.get(func, func)(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved, it is a tensor like any other."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def attach(parameter: nn.Parameter, holder: Holder) -> None:
    """From its first backward on, the parameter's gradient is a `Rows`."""

    def wrap(p: Tensor) -> None:
        if type(p.grad) is Tensor:
            p.grad = rows_of(p.grad, holder)

    learns = parameter.requires_grad
    parameter.requires_grad_(True).register_post_accumulate_grad_hook(wrap)
    parameter.requires_grad_(learns)


def rows_of(grad: Tensor, holder: Holder) -> Rows:
    rows = grad.as_subclass(Rows)
    rows.holder = holder
    return rows


def plain(grad: Tensor) -> Tensor:
    return grad.as_subclass(Tensor) if isinstance(grad, Rows) else grad


# -- norms -------------------------------------------------------------------------------------------


def _vector_norm(x: Tensor, ord: float = 2, dim: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(x, Rows) or dim is not None or args or kwargs.get("keepdim"):
        return torch.linalg.vector_norm(x, ord, dim, *args, **kwargs)  # type: ignore[no-any-return]
    return _norms([x], ord, kwargs.get("dtype"))[0]


def _foreach_norm(xs: Sequence[Tensor], ord: float = 2, dtype: Any = None) -> list[Tensor]:
    return _norms(xs, ord, dtype)


def _norms(xs: Sequence[Tensor], p: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Of each whole gradient; those that are split share one collective."""
    if not (p == math.inf or 0 < p < math.inf):
        raise InputError(f"a norm of order {p} of gradients that are split: it takes 1, 2 ... or inf")
    split = [x for x in xs if isinstance(x, Rows)]
    holder = split[0].holder
    own = torch.stack([_own_norm(x.holder.own(plain(x)), p, dtype) for x in split])
    if p == math.inf:
        total = holder.everywhere(own, "max", "the norm")
    else:
        total = holder.everywhere(own**p, "sum", "the norm") ** (1 / p)
    found = iter(total.unbind())
    return [
        next(found).to(dtype or x.dtype)
        if isinstance(x, Rows)
        else torch.linalg.vector_norm(x, p, dtype=dtype)
        for x in xs
    ]


def _own_norm(x: Tensor, p: float, dtype: torch.dtype | None) -> Tensor:
    """In fp32 where narrower: the ranks' parts are still to be added."""
    wide = dtype or (torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype)
    if x.numel() == 0:
        return x.new_zeros((), dtype=wide)
    return torch.linalg.vector_norm(x, p, dtype=wide)  # type: ignore[no-any-return]


# -- scaling -----------------------------------------------------------------------------------------


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """No rank steps where one has found an infinity."""
    torch._amp_foreach_non_finite_check_and_unscale_([plain(g) for g in grads], found_inf, inv_scale)
    holder = next(g.holder for g in grads if isinstance(g, Rows))
    found_inf.copy_(holder.everywhere(found_inf, "max", "the scale of gradients"))


_WHOLE: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
