"""Sum of partial results, residual add and norm in one pass over the rows.

    total    = sources[0] + ... + sources[n-1]     fp32, in rank order, rounded once to the dtype
    residual = total + residual                    rounded to the dtype, as the separate operators do
    rows     = norm(residual) * weight (+ bias)    statistics in fp32

One program owns one row, so the bits of a row depend neither on the other rows nor on the number of
chunks. With one source it is a plain residual and norm. `rows` may lie in symmetric memory; then
`flags` tells the readers that all rows are there, without a launch of its own.

Bytes moved a row of d elements: (sources + 1) d read and 2 d written, which is the floor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import triton
import triton.language as tl

from plait.runtime.kernels.signals import fill_when_last

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Kind = Literal["none", "rms", "rms_rounded", "layer"]
"""`rms_rounded` rounds the normalised row to the dtype before it is scaled by the weight."""


@triton.jit
def normalise(row, weight, bias, keep, width, eps, dtype: tl.constexpr, KIND: tl.constexpr):
    """`row`, `weight` and `bias` are fp32 of one row; lanes outside `keep` hold 0."""
    if KIND == "layer":
        centred = tl.where(keep, row - tl.sum(row, axis=0) / width, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
        return centred * scale * weight + bias
    scaled = row * tl.rsqrt(tl.sum(row * row, axis=0) / width + eps)
    if KIND == "rms_rounded":
        scaled = scaled.to(dtype).to(tl.float32)
    return scaled * weight


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
    rows_out,
    start,
    cols,
    keep,
    width,
    eps,
    KIND: tl.constexpr,
):
    """From the fp32 sum of one row to its two outputs; `weight` and `residual` may be None."""
    dtype: tl.constexpr = rows_out.dtype.element_ty
    row = total.to(dtype)
    if residual is not None:
        row = (row.to(tl.float32) + residual).to(dtype)
        tl.store(residual_out + start + cols, row, mask=keep)
    if KIND == "none":
        tl.store(rows_out + start + cols, row, mask=keep)
    else:
        out = normalise(row.to(tl.float32), weight, bias, keep, width, eps, dtype, KIND)
        tl.store(rows_out + start + cols, out.to(dtype), mask=keep)


@triton.jit
def sum_norm_kernel(
    sources,
    residual,
    weight,
    bias,
    residual_out,
    rows_out,
    arrivals,
    flags,
    width,
    eps,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    keep = cols < width
    start = tl.program_id(0).to(tl.int64) * width
    total = load_row(sources[0] + start, cols, keep)
    for i in tl.static_range(1, len(sources)):
        total += load_row(sources[i] + start, cols, keep)
    old = load_row(residual + start, cols, keep) if residual is not None else None
    scale = load_row(weight, cols, keep) if weight is not None else None
    shift = load_row(bias, cols, keep) if bias is not None else 0.0
    residual_norm_row(
        total, old, scale, shift, residual_out, rows_out, start, cols, keep, width, eps, KIND
    )
    if flags is not None:
        fill_when_last(arrivals, flags)


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
    publish: tuple[Tensor, Sequence[Tensor]] | None = None,
) -> None:
    """Sum `sources` [rows, d] in order, add `residual`, norm into `rows_out`.

    `residual_out` may be `residual`. `publish`: the grid's arrival counter and the flags to fill.
    """
    rows, width = rows_out.shape
    if not rows:
        return
    assert all(t.is_contiguous() for t in (*sources, rows_out)), "rows must be contiguous"
    arrivals, flags = publish if publish is not None else (None, None)
    block = triton.next_power_of_2(width)
    sum_norm_kernel[(rows,)](
        tuple(sources),
        residual,
        weight,
        bias,
        residual_out,
        rows_out,
        arrivals,
        None if flags is None else tuple(flags),
        width,
        eps,
        BLOCK=block,
        KIND=kind,
        num_warps=warps(block),
    )


def warps(block: int) -> int:
    """32 elements a thread, at most 16 warps."""
    return min(16, max(1, block // 1024))
