"""Losses written out as one number for each element or row, and what is made of these.

A reduction inside an operator hides how its terms are weighted. Written beside it, a sum over rows is
cut like any other, and a mean over valid labels divides by a count that the labels alone give:

    mse, l1, kl_div, ...    loss(x, y), then sum or mean
    nll                     -x[target] * weight[target], then sum, or sum / sum of weight[target]
    cross-entropy           log_softmax, then nll, where classes have weights or labels are shares
    margins of classes      while the model is traced: torch's own way adds labels that do not count, and gives a
                            margin of zero a gradient
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def decompositions() -> dict[Any, Callable[..., Any]]:
    return {
        aten.nll_loss_nd.default: nll,
        aten.cross_entropy_loss.default: cross_entropy,
        **{loss: partial(_reduced, loss) for loss in OF_ELEMENTS},
    }


OF_ELEMENTS = (
    aten.l1_loss.default,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.kl_div.default,
)


def _reduced(loss: Any, *args: Any, **kwargs: Any) -> Any:
    names = [a.name for a in loss._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    how = given.pop("reduction", MEAN)
    if how == NONE:
        return NotImplemented  # it stays as it is
    each = loss(**given, reduction=NONE)
    return each.mean() if how == MEAN else each.sum()


def nll(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Tensor:
    """`b c *, b * -> b *`: c gathered by the labels."""
    labels = _Labels(x, target, weight, ignore_index)
    return labels.reduced(labels.masked(-labels.pick(x)), reduction)


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """By class weights, or of labels that are shares of every class; else it stays as it is."""
    shares = target.is_floating_point()
    if weight is None and not shares:
        return NotImplemented
    dim = min(1, x.dim() - 1)
    logs = x.log_softmax(dim)
    wide = 1.0 if weight is None else weight.reshape(-1, *[1] * (x.dim() - dim - 1))
    smooth = label_smoothing / x.shape[dim]
    if shares:
        each = -(logs * (target * (1 - label_smoothing) + smooth) * wide).sum(dim)
        return each if reduction == NONE else each.mean() if reduction == MEAN else each.sum()
    labels = _Labels(x, target, weight, ignore_index)
    each = labels.masked(-labels.pick(logs)) * (1 - label_smoothing)
    if smooth:
        each = each + torch.where(labels.valid, -(logs * wide).sum(dim), 0) * smooth
    return labels.reduced(each, reduction)


def multi_margin(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    """For `torch._C._nn.multi_margin_loss`; x: `b c` or `c`."""
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1, 1)
    short = (margin - rows.gather(1, labels) + rows).relu() ** p
    wide = short if weight is None else short * weight[labels]
    others = torch.arange(x.shape[-1], device=x.device) != labels
    return _over_rows(torch.where(others, wide, 0).sum(1) / x.shape[-1], target.shape, reduction)


def multilabel_margin(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """For `torch._C._nn.multilabel_margin_loss`; x and target: `b c` or `c`, and labels count up to the first -1."""
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1, x.shape[-1])
    valid = (labels == -1).cumsum(1) == 0
    classes = torch.where(valid, labels, 0)
    own = (valid[:, None] & (classes[:, None] == torch.arange(x.shape[-1], device=x.device)[:, None])).any(-1)
    short = (1 - rows.gather(1, classes)[:, :, None] + rows[:, None]).relu()
    each = torch.where(valid[:, :, None] & ~own[:, None], short, 0).sum((1, 2)) / x.shape[-1]
    return _over_rows(each, x.shape[:-1], reduction)


def _over_rows(each: Tensor, shape: torch.Size, how: int) -> Tensor:
    return each.reshape(shape) if how == NONE else each.mean() if how == MEAN else each.sum()


class _Labels:
    """Which rows count, and how much."""

    def __init__(self, x: Tensor, target: Tensor, weight: Tensor | None, ignored: int) -> None:
        self.dim = min(1, x.dim() - 1)
        self.valid = target != ignored
        self.classes = torch.where(self.valid, target, 0)
        self.scale = None if weight is None else weight[self.classes]

    def pick(self, x: Tensor) -> Tensor:
        return x.gather(self.dim, self.classes.unsqueeze(self.dim)).squeeze(self.dim)

    def masked(self, each: Tensor) -> Tensor:
        return torch.where(self.valid, each if self.scale is None else each * self.scale, 0)

    def reduced(self, each: Tensor, how: int) -> Tensor:
        """A count has more digits than a short dtype."""
        if how == NONE:
            return each
        if how == SUM:
            return each.sum()
        wide = torch.promote_types(each.dtype, torch.float32)
        count = self.valid if self.scale is None else torch.where(self.valid, self.scale, 0)
        return (each.sum(dtype=wide) / count.sum(dtype=wide)).to(each.dtype)
