"""Put together attention over two parts of the keys.

With out_i the softmax-weighted values over part i and l_i its log-sum-exp:

    out = (out_1 exp(l_1) + out_2 exp(l_2)) / (exp(l_1) + exp(l_2))

which is how a later part of a causal sequence attends to the earlier parts (a full rectangle) and to
itself (a causal square), each by the device's fastest kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def merge_kernel(
    out,
    other,
    lse,
    other_lse,
    heads,
    stride_out,
    stride_other,
    tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    keep = head < heads
    one = tl.load(lse + head * tokens + token, mask=keep, other=0.0)
    two = tl.load(other_lse + head * tokens + token, mask=keep, other=0.0)
    share = 1.0 / (1.0 + tl.exp(two - one))
    index = head[:, None] * DIM + tl.arange(0, DIM)[None, :]
    a = tl.load(out + token * stride_out + index, mask=keep[:, None], other=0.0).to(tl.float32)
    b = tl.load(other + token * stride_other + index, mask=keep[:, None], other=0.0).to(tl.float32)
    merged = b + (a - b) * share[:, None]
    tl.store(out + token * stride_out + index, merged.to(out.dtype.element_ty), mask=keep[:, None])


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge `other` into `out`, both [1, h, t, d] with (h d) adjacent; lse: [1, h, t], natural log."""
    batch, heads, tokens, dim = out.shape
    assert batch == 1 and out.stride()[1:] == (dim, out.stride(2), 1) and other.stride(1) == dim
    assert lse.numel() == other_lse.numel() == heads * tokens and lse.is_contiguous()
    merge_kernel[(tokens,)](
        out,
        other,
        lse,
        other_lse,
        heads,
        out.stride(2),
        other.stride(2),
        tokens,
        HEADS=triton.next_power_of_2(heads),
        DIM=dim,
        num_warps=4,
    )
