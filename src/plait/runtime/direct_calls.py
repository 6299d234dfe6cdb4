"""What the modules of a lowered program do (direct.py): each is one call on a ring, on one-hop slots, or a norm.

The first argument is the ring; the order is that of the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.passes import ops
from plait.passes.rings import Route
from plait.runtime import pieces
from plait.runtime.copy_engine import Lane
from plait.runtime.pieces import COPIED, Coming, Linear, Ring


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: Any
) -> tuple[Tensor, Tensor]:
    """`ops.add_norm` as one kernel."""
    from plait.runtime.kernels.norm import sum_norm

    x, rows = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(rows)
    sum_norm(
        [flat(x)],
        None if residual is None else flat(residual.contiguous()),
        weight,
        bias,
        eps=eps,
        kind=kind,
        residual_out=None if residual is None else flat(total),
        rows_out=flat(rows),
    )
    return total, rows


def _lane(ring: Ring) -> Lane:
    return Lane.current(ring.rows.own.device)


def begin(ring: Ring) -> None:
    ring.open(_lane(ring))


def end(ring: Ring) -> None:
    ring.close(_lane(ring))


def matmul_scatter(
    ring: Ring, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, route: Route
) -> Coming:
    return pieces.matmul_scatter(ring, flat(x), weight, _lane(ring), route, bias=bias)


def scattered(ring: Ring, terms: Tensor) -> Coming:
    return pieces.scattered(ring, flat(terms), _lane(ring))


def finish(
    ring: Ring,
    source: Coming | Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    shape: tuple[int, ...] | None,
    kind: Any,
    eps: float,
    read: Route = COPIED,
    push: Route | None = None,
    keep: bool = False,
) -> tuple[Tensor | None, Coming | Tensor]:
    """(sum with the residual, where it is to `keep`; its norm, a token if it is handed on by `push`)."""
    own = ring.rows.own
    term = flat(source).contiguous() if isinstance(source, Tensor) else None
    rows = torch.empty_like(own) if push is None else None
    total = torch.empty_like(own) if keep or residual is not None else None
    coming = pieces.finish(
        ring,
        None if residual is None else flat(residual).contiguous(),
        weight,
        bias,
        _lane(ring),
        {} if isinstance(source, Tensor) else source,
        eps=eps,
        kind=kind,
        residual_out=total,
        term=term,
        rows_out=rows,
        read=read,
        push=push or COPIED,
    )
    if shape is None:
        assert isinstance(source, Tensor)
        shape = tuple(source.shape)
    whole = None if total is None else total.view(shape)
    return whole, coming if rows is None else rows.view(shape)


def published(ring: Ring, rows: Tensor) -> Coming:
    return pieces.published(ring, flat(rows), _lane(ring))


def gather_matmul(
    ring: Ring, token: Coming, *weights: Sequence[Any], shape: tuple[int, ...], route: Route
) -> tuple[Any, ...]:
    """Of each of `weights` its product; of packed ones a tuple of products."""
    rows = ring.rows.buffer.local.shape[0]
    linears, outs = list[Linear](), list[Any]()
    for facts in weights:
        apart, sizes = _linears(*facts)
        mine = [Linear(w, w.new_empty(rows, w.shape[0]), b) for w, b in apart]
        linears += mine
        products = [linear.out.view(*shape[:-1], -1) for linear in mine]
        if sizes:
            outs.append(products if len(products) > 1 else products[0].split(sizes, -1))
        else:
            outs += products
    pieces.gather_matmul(ring, linears, _lane(ring), token, route)
    return tuple(outs)


def _linears(
    weight: Any, bias: Any = None
) -> tuple[list[tuple[Tensor, Tensor | None]], list[int]]:
    """(weight, bias) of the matmuls to do, and the columns of each product of a packed one."""
    if isinstance(weight, Tensor):
        return [(weight, bias)], []
    sizes = [w.shape[0] for w in weight]
    every, shift = ops.joined(weight), ops.joined(bias or ())
    if every is None or (bias and shift is None):
        return list(zip(weight, bias or [None] * len(weight), strict=True)), sizes
    return [(every, shift)], sizes


def gathered(ring: Ring, token: Coming, *, shape: tuple[int, ...]) -> Tensor:
    """A copy: the next gather overwrites the ring's."""
    return pieces.gathered(ring, token).clone().view(shape)


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def one_shot(
    shot: Any,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    kind: Any,
    keep: bool,
) -> tuple[Tensor | None, Tensor]:
    x = x.contiguous()
    rows = torch.empty_like(x)
    total = torch.empty_like(x) if keep else None
    shot.all_reduce_norm(
        flat(x),
        None if residual is None else flat(residual).contiguous(),
        weight,
        bias,
        eps=eps,
        kind=kind,
        residual_out=None if total is None else flat(total),
        rows_out=flat(rows),
    )
    return total, rows
