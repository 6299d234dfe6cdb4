"""All-reduce in two hops by a kernel: sum the own share from every rank, store it to every rank.

    program i:   barrier with program i of every rank        the terms are written
                 for each block of the own share:            load n, sum in rank order in fp32, store n
                 barrier with program i of every rank        every share is stored

The sum is in place: share r of all ranks' buffers is read and written by rank r alone. `programs`
is the share of the multiprocessors; fewer leave more to a matmul beside it and take longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from plait.runtime.kernels.signals import meet

if TYPE_CHECKING:
    from plait.runtime.symmetric import Buffer, Workspace

BLOCK, WARPS = 4096, 16
PROGRAMS = 64  # at most as many as multiprocessors: they wait for each other across ranks


@triton.jit
def two_shot_kernel(data, flags, first, last, RANK: tl.constexpr, BLOCK: tl.constexpr):
    RANKS: tl.constexpr = len(data)
    dtype: tl.constexpr = data[RANK].dtype.element_ty
    meet(flags, 0, RANK)
    begin = first + tl.program_id(0) * BLOCK
    while begin < last:
        index = begin + tl.arange(0, BLOCK)
        keep = index < last
        total = tl.load(data[0] + index, mask=keep, other=0.0).to(tl.float32)
        for rank in tl.static_range(1, RANKS):
            total += tl.load(data[rank] + index, mask=keep, other=0.0).to(tl.float32)
        for step in tl.static_range(RANKS):
            tl.store(data[(RANK + step) % RANKS] + index, total.to(dtype), mask=keep)
        begin += tl.num_programs(0) * BLOCK
    meet(flags, 1, RANK)


class TwoShot:
    """The flags of two-shot all-reduces; all calls of one instance are in one order on every rank."""

    def __init__(self, workspace: Workspace, programs: int = PROGRAMS) -> None:
        self.programs = programs
        self.flags = workspace.buffer((2, programs, workspace.ranks), torch.int32, fill=0)

    def all_reduce(self, data: Buffer) -> None:
        """Sum `data` over the ranks, in place on all of them."""
        size = data.local.numel()
        assert size < 2**31, "split tensors of 2^31 elements and more"
        share = -(-size // len(data.on) // 8) * 8  # whole 16-byte words of a 2-byte dtype
        first, last = min(size, data.rank * share), min(size, (data.rank + 1) * share)
        two_shot_kernel[(self.programs,)](
            data.on, self.flags.on, first, last, RANK=data.rank, BLOCK=BLOCK, num_warps=WARPS
        )
