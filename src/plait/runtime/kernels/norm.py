"""Sum of partial results, residual add and norm in one pass over the rows.

    total    = sources[0] + ... + sources[n-1]     fp32, in rank order, rounded once to the dtype
    residual = total + residual                    rounded to the dtype, as the separate operators do
    rows     = norm(residual) * weight (+ bias)    statistics in fp32

One program owns one row, so the bits of a row depend neither on the other rows nor on the number of
chunks. With one source it is a plain residual and norm. `rows` may lie in symmetric memory; a
`Handshake` waits for the terms and tells the readers of the rows, without launches of their own.

Terms may lie on other ranks (`far`) and rows be stored there (`push`): then the kernel is the transfer
too, as long as the link takes, but without the latencies of a copy and its signals.

Bytes moved a row of d elements: (sources + 1) d read and 2 d written, which is the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from plait.runtime.handshake import Handshake, Reach
from plait.runtime.kernels.signals import enter, leave

Kind = Literal["none", "rms", "rms_rounded", "layer"]
"""`rms_rounded` rounds the normalised row to the dtype before it is scaled by the weight."""


@triton.jit
def normalise(row, weight, bias, keep, width, eps, dtype: tl.constexpr, KIND: tl.constexpr):
    """`row`, `weight` and `bias` are fp32 of one row; lanes outside `keep` hold 0."""
    if KIND == "layer":
        row = tl.where(keep, row - tl.sum(row, axis=0) / width, 0.0)
    row *= tl.rsqrt(tl.sum(row * row, axis=0) / width + eps)
    if KIND == "rms_rounded":
        row = row.to(dtype).to(tl.float32)
    row *= weight
    if KIND == "layer":
        row += bias
    return row


@triton.jit
def load_row(pointer, cols, keep):
    return tl.load(pointer + cols, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def residual_norm_row(
    total,
    residual,
    weight,
    bias,
    residual_out,
    start,
    cols,
    keep,
    width,
    eps,
    dtype: tl.constexpr,
    KIND: tl.constexpr,
):
    """From the fp32 sum of one row to its norm; `residual`, where it is kept and `weight` may be None."""
    row = total.to(dtype)
    if residual is not None:
        row = (row.to(tl.float32) + residual).to(dtype)
    if residual_out is not None:
        tl.store(residual_out + start + cols, row, mask=keep)
    if KIND != "none":
        row = normalise(row.to(tl.float32), weight, bias, keep, width, eps, dtype, KIND).to(dtype)
    return row


@triton.jit
def sum_row(sources, start, cols, keep):
    total = load_row(sources[0] + start, cols, keep)
    for i in tl.static_range(1, len(sources)):
        total += load_row(sources[i] + start, cols, keep)
    return total


@triton.jit(do_not_specialize=["far_first", "far_last", "push_first", "push_last"])
def sum_norm_kernel(
    sources,
    far,
    residual,
    weight,
    bias,
    residual_out,
    rows_out,
    pushed,
    arrivals,
    enter_fills,
    enter_drains,
    leave_fills,
    leave_drains,
    far_first,
    far_last,
    push_first,
    push_last,
    width,
    eps,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    keep = cols < width
    # Rows whose terms are far away come first: they take longest.
    row = (tl.program_id(0) + far_first) % tl.num_programs(0)
    start = row.to(tl.int64) * width
    old = load_row(residual + start, cols, keep) if residual is not None else None
    scale = load_row(weight, cols, keep) if weight is not None else None
    shift = load_row(bias, cols, keep) if bias is not None else 0.0
    if arrivals is not None:
        enter(enter_fills, enter_drains)
    if far is None:
        total = sum_row(sources, start, cols, keep)
    else:
        if (row >= far_first) & (row < far_last):
            total = sum_row(far, start, cols, keep)
        else:
            total = sum_row(sources, start, cols, keep)
    dtype: tl.constexpr = rows_out.dtype.element_ty
    out = residual_norm_row(
        total, old, scale, shift, residual_out, start, cols, keep, width, eps, dtype, KIND
    )
    tl.store(rows_out + start + cols, out, mask=keep)
    if pushed is not None:
        if (row >= push_first) & (row < push_last):
            for i in tl.static_range(len(pushed)):
                tl.store(pushed[i] + start + cols, out, mask=keep)
    if arrivals is not None:
        leave(arrivals, enter_drains, leave_fills, leave_drains)


def sum_norm(
    sources: Sequence[Tensor],
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float,
    kind: Kind,
    residual_out: Tensor | None,
    rows_out: Tensor,
    far: Reach | None = None,
    push: Reach | None = None,
    shake: Handshake | None = None,
) -> None:
    """Sum `sources` [rows, d] in order, add `residual`, keep it in `residual_out`, norm into `rows_out`.

    `residual_out` may be `residual`, or None: the sum is not kept. `far`: rows whose terms are read
    from there instead; `push`: rows that are stored there too.
    """
    rows, width = rows_out.shape
    if not rows:
        return
    assert all(t.is_contiguous() for t in (*sources, rows_out)), "rows must be contiguous"
    block = triton.next_power_of_2(width)
    sum_norm_kernel[(rows,)](
        tuple(sources),
        tuple(far.tensors) if far else None,
        residual,
        weight,
        bias,
        residual_out,
        rows_out,
        tuple(push.tensors) if push else None,
        shake.arrivals if shake else None,
        *(shake.arguments() if shake else (None,) * 4),
        far.first if far else 0,
        far.last if far else 0,
        push.first if push else 0,
        push.last if push else 0,
        width,
        eps,
        BLOCK=block,
        KIND=kind,
        num_warps=warps(block),
    )


def warps(block: int) -> int:
    """32 elements a thread, at most 16 warps; one rule for all kernels, so that their bits agree."""
    return min(16, max(1, block // 1024))
