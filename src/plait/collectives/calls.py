"""The collectives as differentiable functions of tensors.

    all_reduce(tensor, group, "ring")              plain tensors in place, as torch.distributed
    y = all_reduce(x, group, "ring")               x takes part in autograd: a new tensor

Without autograd, `all_reduce`, `broadcast` and `reduce` write into the tensor and return it. A
tensor that requires grad is left as it is, since a graph may hold it, and the result is new.

Gradients are those of torch.distributed.nn: every rank's loss counts, and the gradient of a
collective is the sum over ranks of what comes back. So the gradient of an all_reduce is the
all_reduce of the gradients, that of an all_gather a reduce_scatter, and so on; all ranks must run
the same backwards. Only sums have gradients.

`algorithm`: a name (`ring`, `tree/8`), a spelling (`hierarchical[2x4: ring, two_shot]`), a
Schedule, `native` (the backend's own), or `auto`, which is what `chooser(collective, bytes, ranks)`
says, or `native`. `timeout`: seconds, on gloo; the group's own unless given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from plait.collectives import tensors
from plait.collectives.request import Algorithm, Chooser, Sizes
from plait.collectives.schedule import Collective, Schedule, Spec, balanced
from plait.collectives.tensors import Terms
from plait.errors import CollectiveError

Group = dist.ProcessGroup | None


def all_reduce(
    tensor: Tensor,
    group: Group = None,
    algorithm: Algorithm = "auto",
    *,
    op: str = "sum",
    chooser: Chooser | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The sum (max, min) of all ranks' tensors, the same bits on every rank."""
    terms = Terms(group, algorithm, chooser, timeout)
    if _recorded(tensor, op):
        return _apply(_AllReduce, tensor, terms)
    return tensors.all_reduce(tensor, op, terms)


def reduce_scatter(
    tensor: Tensor,
    sizes: Sequence[int] | None = None,
    group: Group = None,
    algorithm: Algorithm = "auto",
    *,
    op: str = "sum",
    chooser: Chooser | None = None,
    timeout: float | None = None,
) -> Tensor:
    """This rank's rows of the sum of all ranks' tensors: `sizes[rank]` rows of dim 0, after those
    of the ranks before it. Without sizes the rows are shared out evenly, the first ranks one more.
    """
    terms = Terms(group, algorithm, chooser, timeout)
    if _recorded(tensor, op):
        return _apply(_ReduceScatter, tensor, sizes, terms)
    return tensors.reduce_scatter(tensor, sizes, op, terms)


def all_gather(
    tensor: Tensor,
    sizes: Sequence[int] | None = None,
    group: Group = None,
    algorithm: Algorithm = "auto",
    *,
    chooser: Chooser | None = None,
    timeout: float | None = None,
) -> Tensor:
    """All ranks' rows, joined along dim 0. `sizes`: the rows of every rank, where they differ."""
    terms = Terms(group, algorithm, chooser, timeout)
    if _recorded(tensor):
        return _apply(_AllGather, tensor, sizes, terms)
    return tensors.all_gather(tensor, sizes, terms)


def broadcast(
    tensor: Tensor,
    root: int = 0,
    group: Group = None,
    algorithm: Algorithm = "auto",
    *,
    chooser: Chooser | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The root's tensor on every rank; `root` is a rank of the group."""
    terms = Terms(group, algorithm, chooser, timeout)
    if _recorded(tensor):
        return _apply(_Broadcast, tensor, root, terms)
    return tensors.broadcast(tensor, root, terms)


def reduce(
    tensor: Tensor,
    root: int = 0,
    group: Group = None,
    algorithm: Algorithm = "auto",
    *,
    op: str = "sum",
    chooser: Chooser | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The sum of all ranks' tensors on the root; the other ranks' tensors stay as they are."""
    terms = Terms(group, algorithm, chooser, timeout)
    if _recorded(tensor, op):
        return _apply(_Reduce, tensor, root, terms)
    return tensors.reduce(tensor, root, op, terms)


def all_to_all(
    tensor: Tensor,
    sizes: Sequence[Sequence[int]] | None = None,
    group: Group = None,
    algorithm: Algorithm = "auto",
    *,
    chooser: Chooser | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Block d of this rank's rows goes to rank d; what comes is joined in order of source.

    `sizes[source][destination]`: the rows of every block, the same table on every rank. Without
    it, every rank shares its rows out evenly.
    """
    terms = Terms(group, algorithm, chooser, timeout)
    if _recorded(tensor):
        return _apply(_AllToAll, tensor, sizes, terms)
    return tensors.all_to_all(tensor, sizes, terms)


# --- gradients ------------------------------------------------------------------------------------


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, terms: Terms) -> Tensor:
        ctx.terms = terms
        return tensors.all_reduce(_fresh(tensor), "sum", terms)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(_AllReduce, grad, ctx.terms), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sizes, terms: Terms) -> Tensor:
        mine = tensors.reduce_scatter(tensor, sizes, "sum", terms)
        ctx.terms, ctx.sizes = terms, sizes
        if sizes is None:  # what was shared out evenly may come back uneven
            ctx.sizes = balanced(tensor.shape[0], terms.size)
        return mine

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(_AllGather, grad, ctx.sizes, _dual(ctx.terms, "all_gather")), None, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sizes, terms: Terms) -> Tensor:
        ctx.terms, ctx.sizes = terms, sizes
        return tensors.all_gather(tensor, sizes, terms)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        terms = _dual(ctx.terms, "reduce_scatter")
        return _apply(_ReduceScatter, grad, ctx.sizes, terms), None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, terms: Terms) -> Tensor:
        ctx.terms, ctx.root = terms, root
        return tensors.broadcast(_fresh(tensor), root, terms)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = _apply(_Reduce, grad, ctx.root, _dual(ctx.terms, "reduce"))
        here = total if ctx.terms.rank == ctx.root else torch.zeros_like(total)
        return here, None, None


class _Reduce(Function):
    """Off the root, the result is the tensor as it was, and has no gradient: it is not the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, terms: Terms) -> Tensor:
        ctx.terms, ctx.root = terms, root
        return tensors.reduce(_fresh(tensor), root, "sum", terms)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(_Broadcast, grad, ctx.root, _dual(ctx.terms, "broadcast")), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sizes, terms: Terms) -> Tensor:
        came = tensors.all_to_all(tensor, sizes, terms)
        even = [balanced(tensor.shape[0], terms.size)] * terms.size
        table = even if sizes is None else sizes
        ctx.terms, ctx.sizes = terms, [list(column) for column in zip(*table, strict=True)]
        return came

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(_AllToAll, grad, ctx.sizes, ctx.terms), None, None


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    result = function.apply(*arguments)
    assert isinstance(result, Tensor)
    return result


def _recorded(tensor: Tensor, op: str = "sum") -> bool:
    """Does autograd record the call?"""
    if not (isinstance(tensor, Tensor) and torch.is_grad_enabled() and tensor.requires_grad):
        return False
    if op != "sum":
        text = f"only a sum has a gradient, not {op!r}; detach the tensor, or use torch.no_grad()"
        raise CollectiveError(text)
    return True


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _dual(terms: Terms, collective: Collective) -> Terms:
    """The same algorithm for the collective that takes gradients back."""
    algorithm = terms.algorithm
    if isinstance(algorithm, Schedule):
        if algorithm.spec is None:
            text = f"{algorithm} has no spelling, so no algorithm for its gradient, {collective}"
            raise CollectiveError(text)
        return replace(terms, algorithm=str(replace(algorithm.spec, collective=collective)))
    if "[" in algorithm:
        spec = replace(Spec.parse(algorithm), collective=collective)
        return replace(terms, algorithm=str(spec))
    return terms
