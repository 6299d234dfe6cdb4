"""Clipping: the norm of all gradients of the model, of which every rank has a part."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from plait.errors import InputError
from plait.rules.moves import Cut, Step, only_own
from plait.runtime.agree import Agreement
from plait.runtime.holdings import Holdings


def clip(holdings: Holdings, agreement: Agreement, max_norm: float, norm_type: float) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, over the whole model; equal on every rank."""
    if not isinstance(norm_type, Real) or not norm_type > 0:
        raise InputError(f"norm_type is {norm_type!r}; it is a number above 0, or inf")
    if not isinstance(max_norm, (Real, Tensor)) or not max_norm >= 0:
        raise InputError(f"max_norm is {max_norm!r}; it is a number from 0, or inf")
    with agreement.guard("clip_grad_norm_"), torch.no_grad():
        total = _norm(holdings, float(norm_type))
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for _, _, grad in holdings.parameters():
            if grad is not None:
                grad.mul_(scale.to(grad.dtype))
    return total


def _norm(holdings: Holdings, p: float) -> Tensor:
    own, zero = [], _zero(holdings)
    for weight, cut, grad in holdings.parameters():
        part = None if grad is None else _counted(grad, cut, holdings.transport.rank)
        if part is not None and holdings.counts(weight):
            own.append(part)
    if p == float("inf"):
        return _total(holdings, _top(own, zero), "max")
    powers = (torch.linalg.vector_norm(g.to(zero.dtype), p).to(zero) ** p for g in own)
    return _total(holdings, sum(powers, start=zero), "sum") ** (1.0 / p)


def _zero(holdings: Holdings) -> Tensor:
    """Of the dtype to sum in, the same on every rank, also where it counts nothing."""
    dtypes = {w.dtype for w, _ in holdings.weights() if w.kind == "parameter"}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    stage = holdings.stages.device if holdings.stages is not None else torch.device("cpu")
    device = next((x.device for x in holdings.live().values()), stage)  # a stage may hold no weights
    return torch.zeros((), dtype=dtype, device=device)


def _counted(grad: Tensor, cut: Cut | None, rank: int) -> Tensor | None:
    """What this rank counts of a gradient: its own rows; whole ones count on rank 0."""
    if cut is None:
        return grad if rank == 0 else None
    return only_own(grad, cut, rank)


def _top(own: Sequence[Tensor], zero: Tensor) -> Tensor:
    top = zero
    for g in own:
        top = torch.maximum(top, g.abs().max().to(zero)) if g.numel() else top
    return top


def _total(holdings: Holdings, own: Tensor, op: str) -> Tensor:
    """Over the ranks of a stage, then over the stages."""
    total = holdings.transport.run(Step("all_reduce", op), own, None, "native")
    return total if holdings.stages is None else holdings.stages.total(total, op)
