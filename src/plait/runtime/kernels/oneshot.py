"""All-reduce of few rows, residual add and norm in one kernel and one hop.

Every rank pushes its rows into the slots of all others, waits for theirs, sums in rank order in fp32,
adds the residual and norms. There are no flags and no barriers: a slot is filled with `EMPTY` before,
and an element that differs from `EMPTY` has arrived (a store of 16 bytes arrives in whole elements).

    turn t, row i:   push -> slots[t % 2][rank][i] of every peer
                     poll    slots[t % 2][p][i] until no element is EMPTY, then write EMPTY back

Two banks are enough: a peer pushes turn t+2 only after it saw this rank's push of turn t+1, which this
rank issued after it had read and emptied turn t. The turn of a row is counted on the device, so a
captured graph may hold any number of these kernels and be replayed any number of times. Rows are
independent: calls with different numbers of rows can follow each other.

`EMPTY` is all ones, which is a NaN in every float format; a NaN with these bits is sent as the NaN
one below. Bytes a rank: (n-1) rows d out and in, against 2 (n-1)/n of a two-shot. Programs wait for
each other across ranks, so no more rows are taken than there are multiprocessors (`ROWS`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from plait.runtime.kernels.norm import Kind, load_row, residual_norm_row, warps

if TYPE_CHECKING:
    from torch import Tensor

    from plait.runtime.symmetric import Buffer, Workspace

EMPTY = -1
ROWS = 128  # at most as many as multiprocessors, so that every row's program is resident


@triton.jit
def missing(words):
    return tl.max((words == -1).to(tl.int32), axis=0) != 0


@triton.jit
def one_shot_kernel(
    x,
    residual,
    weight,
    bias,
    slots,
    turns,
    residual_out,
    rows_out,
    width,
    eps,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    CAPACITY: tl.constexpr,
    EARLY: tl.constexpr,
):
    RANKS: tl.constexpr = len(slots)
    dtype: tl.constexpr = x.dtype.element_ty
    word: tl.constexpr = slots[RANK].dtype.element_ty
    row = tl.program_id(0)
    start = row.to(tl.int64) * width
    cols = tl.arange(0, BLOCK)
    keep = cols < width
    scale = load_row(weight, cols, keep) if weight is not None else None
    shift = load_row(bias, cols, keep) if bias is not None else 0.0
    if EARLY:
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turns + row)
    bank = (turn & 1) * RANKS
    mine = tl.load(x + start + cols, mask=keep, other=0.0).to(word, bitcast=True)
    mine = tl.where(mine == -1, -2, mine).to(word)
    for step in tl.static_range(1, RANKS):
        place = slots[(RANK + step) % RANKS]
        place += ((bank + RANK) * CAPACITY + row).to(tl.int64) * width
        tl.store(place + cols, mine, mask=keep)
    old = load_row(residual + start, cols, keep) if residual is not None else None
    # Ask for every rank's words before any is needed; poll again only those that are not here.
    words = ()
    for rank in tl.static_range(RANKS):
        place = slots[RANK] + ((bank + rank) * CAPACITY + row).to(tl.int64) * width
        if rank == RANK:
            words += (mine,)
        else:
            words += (tl.load(place + cols, mask=keep, other=0, volatile=True),)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        got = words[rank]
        if rank != RANK:
            place = slots[RANK] + ((bank + rank) * CAPACITY + row).to(tl.int64) * width
            while missing(got):
                got = tl.load(place + cols, mask=keep, other=0, volatile=True)
            tl.store(place + cols, tl.full([BLOCK], -1, word), mask=keep)
        total += got.to(dtype, bitcast=True).to(tl.float32)
    tl.store(turns + row, turn + 1)
    out = residual_norm_row(
        total, old, scale, shift, residual_out, start, cols, keep, width, eps, dtype, KIND
    )
    tl.store(rows_out + start + cols, out, mask=keep)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


class OneShot:
    """The slots and turns of one-shot all-reduces of up to `rows` rows of `width` elements.

    All calls of one instance are in one order on every rank (one stream each).
    """

    def __init__(self, workspace: Workspace, rows: int, width: int, dtype: torch.dtype) -> None:
        if rows > ROWS:
            raise ValueError(
                f"one-shot takes at most {ROWS} rows, {rows} asked; use two-shot above"
            )
        word = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        self.slots: Buffer = workspace.buffer((2, workspace.ranks, rows, width), word, fill=EMPTY)
        self.turns = torch.zeros(rows, dtype=torch.int32, device=self.slots.local.device)
        self.rank, self.capacity, self.width = workspace.rank, rows, width
        workspace.on_reset(self.turns.zero_)

    def all_reduce_norm(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        eps: float = 0.0,
        kind: Kind = "none",
        residual_out: Tensor | None = None,
        rows_out: Tensor,
        early: bool = False,
    ) -> None:
        """Sum `x` [rows, width] over the ranks, then as `sum_norm`.

        `early`: start beside the end of the kernel before (programmatic dependent launch).
        """
        rows, width = x.shape
        assert width == self.width, (width, self.width)
        assert rows <= self.capacity, (rows, self.capacity)
        block = triton.next_power_of_2(width)
        one_shot_kernel[(rows,)](
            x,
            residual,
            weight,
            bias,
            self.slots.on,
            self.turns,
            residual_out,
            rows_out,
            width,
            eps,
            RANK=self.rank,
            BLOCK=block,
            KIND=kind,
            CAPACITY=self.capacity,
            EARLY=early,
            num_warps=warps(block),
            **({"launch_pdl": True} if early else {}),
        )
