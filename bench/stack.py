"""A stack of Llama-shaped layers by hand: weights of one rank's share, and its operators.

Used by benchmarks as the thing that is scheduled in different ways; every schedule calls the same
kernels. The residual add, the sum of partial terms and the norm are plait's own kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.runtime.kernels.attention import merge

EPS = 1e-5
KIND: Any = "rms_rounded"


@dataclass(frozen=True)
class Shape:
    tokens: int
    layers: int = 4
    hidden: int = 8192
    q_heads: int = 8  # of one rank
    kv_heads: int = 1
    dim: int = 128
    ffn: int = 3584

    @property
    def qkv(self) -> int:
        return (self.q_heads + 2 * self.kv_heads) * self.dim

    @property
    def attended(self) -> int:
        return self.q_heads * self.dim

    @classmethod
    def llama_70b(cls, tokens: int, share: int, layers: int = 4) -> Shape:
        """The part of one rank when `share` of them hold a layer."""
        return cls(tokens, layers, 8192, 64 // share, max(1, 8 // share), 128, 28672 // share)


@dataclass(frozen=True)
class Layer:
    norm: Tensor
    qkv: Tensor
    o: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor


def layers_of(shape: Shape, device: torch.device, rank: int) -> tuple[list[Layer], Tensor]:
    """Random layers of one rank's share and the last norm's weight, which all ranks have alike."""
    own = torch.Generator(device).manual_seed(100 + rank)
    common = torch.Generator(device).manual_seed(1)

    def weight(out: int, inner: int) -> Tensor:
        w = torch.randn(out, inner, generator=own, device=device, dtype=torch.bfloat16)
        return w.mul_(1 / math.sqrt(inner))

    def scale() -> Tensor:
        w = torch.rand(shape.hidden, generator=common, device=device) + 0.5
        return w.to(torch.bfloat16)

    layers = [
        Layer(
            scale(),
            weight(shape.qkv, shape.hidden),
            weight(shape.hidden, shape.attended),
            scale(),
            weight(2 * shape.ffn, shape.hidden),
            weight(shape.hidden, shape.ffn),
        )
        for _ in range(shape.layers)
    ]
    return layers, scale()


def rotary(tokens: int, dim: int, device: torch.device) -> Tensor:
    """[t, 2, dim / 2]: cosines, then sines."""
    inverse = 500000.0 ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angles = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * inverse
    return torch.stack((angles.cos(), angles.sin()), dim=1).contiguous()


@triton.jit
def rope_kernel(qkv, table, first, stride, heads, HEADS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head, col = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    keep = head < heads
    place = qkv + token * stride + head * (2 * HALF) + col
    a = tl.load(place, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=keep, other=0.0).to(tl.float32)
    angle = table + (first + token) * (2 * HALF) + col
    cos, sin = tl.load(angle), tl.load(angle + HALF)
    tl.store(place, (a * cos - b * sin).to(qkv.dtype.element_ty), mask=keep)
    tl.store(place + HALF, (b * cos + a * sin).to(qkv.dtype.element_ty), mask=keep)


def rope(qkv: Tensor, table: Tensor, first: int, heads: int) -> None:
    """Rotate the first `heads` heads of each row of `qkv`, whose first row is token `first`."""
    half = table.shape[-1]
    rope_kernel[(qkv.shape[0],)](
        qkv,
        table,
        first,
        qkv.stride(0),
        heads,
        HEADS=triton.next_power_of_2(heads),
        HALF=half,
        num_warps=4,
    )


@triton.jit
def swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = col < width
    gate = tl.load(gate_up + row * 2 * width + col, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + col, mask=keep, other=0.0).to(tl.float32)
    act = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * width + col, act.to(out.dtype.element_ty), mask=keep)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    rows, width = out.shape
    swiglu_kernel[(rows, triton.cdiv(width, 2048))](gate_up, out, width, BLOCK=2048, num_warps=8)


def heads_of(qkv: Tensor, shape: Shape, which: str) -> Tensor:
    """q, k or v of the packed rows as [1, h, t, d]."""
    q, kv = shape.attended, shape.kv_heads * shape.dim
    start, width = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[which]
    part = qkv[:, start : start + width]
    return part.unflatten(1, (width // shape.dim, shape.dim)).transpose(0, 1).unsqueeze(0)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, lse: bool) -> tuple[Tensor, Tensor]:
    """[1, h, t, d] with (h d) adjacent and, if asked for, its log-sum-exp."""
    if not q.is_cuda:
        return by_hand(q, k, v, causal)
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    if GROUPED is False:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    result = op(q, k, v, None, lse, 0.0, causal, False)
    return result[0], result[1]


def by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (t.float().repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q.float() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -math.inf)
    out = (scores.softmax(-1) @ v).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(-1)


GROUPED: bool | None = None  # whether the attention kernel takes fewer kv heads; found by trying


def probe_attention(shape: Shape, device: torch.device) -> str:
    """Try grouped heads, and log-sum-exp merging, against fp32; a line that says what was found."""
    global GROUPED
    torch.manual_seed(0)
    qkv = torch.randn(512, shape.qkv, device=device, dtype=torch.bfloat16)
    q, k, v = (heads_of(qkv, shape, w) for w in "qkv")
    kk, vv = (t.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    ref = torch.nn.functional.scaled_dot_product_attention(q.float(), kk, vv, is_causal=True)

    def error(out: Tensor) -> float:
        return float((out.float() - ref).norm() / ref.norm())

    try:
        GROUPED = True
        grouped = error(attention(q, k, v, True, False)[0])
    except RuntimeError as problem:
        grouped = str(problem).splitlines()[0]
    if not (isinstance(grouped, float) and grouped < 1e-2):
        GROUPED = False
    whole = error(attention(q, k, v, True, False)[0])
    parts = torch.cat([attend(qkv, shape, 0, 256), attend(qkv, shape, 256, 512)])
    merged = error(parts.unflatten(1, (shape.q_heads, shape.dim)).transpose(0, 1).unsqueeze(0))
    return f"attention: grouped {grouped}, whole {whole:.2e}, in two parts {merged:.2e}"


def attend(qkv: Tensor, shape: Shape, first: int, last: int) -> Tensor:
    """Causal attention of rows first..last over all rows up to each; [last - first, h d]."""
    q = heads_of(qkv[first:last], shape, "q")
    k, v = heads_of(qkv[first:last], shape, "k"), heads_of(qkv[first:last], shape, "v")
    out, lse = attention(q, k, v, True, first > 0)
    if first:
        k, v = heads_of(qkv[:first], shape, "k"), heads_of(qkv[:first], shape, "v")
        merge(out, lse, *attention(q, k, v, False, True))
    return out.squeeze(0).transpose(0, 1).flatten(1)
