"""Reduce-scatter, residual add, norm and all-gather of rows in one kernel, on few multiprocessors.

    program i:   barrier with program i of every rank      all terms are written, old rows are read
                 for each own row i, i + programs, ...     load n terms from n ranks, sum in rank order,
                                                           add the residual, norm, store to n ranks
                 barrier with program i of every rank      all rows are here

Reading, summing and storing of different rows overlap, so that the link is busy all the while; each
direction of it carries 2 (n-1)/n of the rows, as in any all-reduce; `DEPTH` rows of a program are in
flight. The barriers make every call complete in itself: it needs no other signal, and a captured
graph may hold any number of calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from plait.runtime.kernels.norm import Kind, load_row, residual_norm_row, warps
from plait.runtime.kernels.signals import meet

if TYPE_CHECKING:
    from torch import Tensor

    from plait.runtime.symmetric import Rows, Workspace

PROGRAMS = 64  # at most as many as multiprocessors: they wait for each other across ranks


@triton.jit
def exchange_kernel(
    terms,
    rows_out,
    flags,
    residual,
    weight,
    bias,
    first,
    last,
    width,
    eps,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    DEPTH: tl.constexpr,
):
    RANKS: tl.constexpr = len(terms)
    dtype: tl.constexpr = rows_out[RANK].dtype.element_ty
    cols = tl.arange(0, BLOCK)
    keep = cols < width
    scale = load_row(weight, cols, keep) if weight is not None else None
    shift = load_row(bias, cols, keep) if bias is not None else 0.0
    programs = tl.num_programs(0)
    meet(flags, 0, RANK)
    row = first + tl.program_id(0)
    while row < last:
        loaded = ()
        for ahead in tl.static_range(DEPTH):
            here = row + ahead * programs
            place = here.to(tl.int64) * width + cols
            for rank in tl.static_range(RANKS):
                term = tl.load(terms[rank] + place, mask=keep & (here < last), other=0.0)
                loaded += (term,)
        for ahead in tl.static_range(DEPTH):
            here = row + ahead * programs
            inside = keep & (here < last)
            total = loaded[ahead * RANKS].to(tl.float32)
            for rank in tl.static_range(1, RANKS):
                total += loaded[ahead * RANKS + rank].to(tl.float32)
            own = (here - first).to(tl.int64) * width
            old = load_row(residual + own, cols, inside) if residual is not None else None
            out = residual_norm_row(
                total, old, scale, shift, residual, own, cols, inside, width, eps, dtype, KIND
            )
            place = here.to(tl.int64) * width + cols
            for step in tl.static_range(RANKS):
                tl.store(rows_out[(RANK + step) % RANKS] + place, out, mask=inside)
        row += DEPTH * programs
    meet(flags, 1, RANK)


class Exchange:
    """The flags of exchanges; all calls of one instance are in one order on every rank."""

    def __init__(self, workspace: Workspace, programs: int = PROGRAMS) -> None:
        self.programs = programs
        self.flags = workspace.buffer((2, programs, workspace.ranks), torch.int32, fill=0)

    def all_reduce_norm(
        self,
        terms: Rows,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None = None,
        *,
        eps: float,
        kind: Kind,
        rows_out: Rows,
    ) -> None:
        """Sum `terms` over the ranks; own rows: add to `residual` in place, norm, store everywhere."""
        rank, width = terms.rank, terms.own.shape[1]
        block = triton.next_power_of_2(width)
        exchange_kernel[(self.programs,)](
            terms.buffer.on,
            rows_out.buffer.on,
            self.flags.on,
            residual,
            weight,
            bias,
            terms.bounds[rank],
            terms.bounds[rank + 1],
            width,
            eps,
            RANK=rank,
            BLOCK=block,
            KIND=kind,
            DEPTH=max(1, 4 // len(terms.buffer.on)),
            num_warps=warps(block),
        )
