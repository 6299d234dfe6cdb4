"""What is split, and where the sum goes: heads, fused weights, norms, partial sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases.blocks import attend, heads, merge
from tests.cases.case import Setup, case, columns


@case("tp2 tp4")
def b01_bias_after_the_sum() -> Setup:
    """Added on each rank it counts N times; divided by N its gradient is a part."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    nn.init.normal_(model[2].bias, std=3.0)
    return Setup(model, (torch.randn(4, 8),), loss=columns)


class Attention(nn.Module):
    """Four projections; key/value heads may be fewer than query heads."""

    def __init__(self, d: int, h: int, kv: int, hd: int, bias: bool = True) -> None:
        super().__init__()
        self.hd = hd
        self.q, self.k = nn.Linear(d, h * hd, bias=bias), nn.Linear(d, kv * hd, bias=bias)
        self.v, self.o = nn.Linear(d, kv * hd, bias=bias), nn.Linear(h * hd, d, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, -1, self.hd).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).transpose(1, 2).reshape(b, t, -1))


@case("tp4 tp5 tp8", "R2", flat=("k.bias",))
def b02_heads_do_not_divide() -> Setup:
    """Six heads of four: 24 features divide by 4 and by 8, the heads do not."""
    return Setup(Attention(24, 6, 6, 4), (torch.randn(2, 5, 24),), loss=columns)


@case("tp4 tp8", "R2", flat=("k.bias",))
def b03_fewer_kv_heads_than_ranks() -> Setup:
    return Setup(Attention(32, 8, 2, 4), (torch.randn(2, 5, 32),), loss=columns)


@case("tp2", "R2", flat=("k.bias",))
def b03_one_kv_head() -> Setup:
    return Setup(Attention(32, 8, 1, 4), (torch.randn(2, 5, 32),), loss=columns)


class ConstantHeads(nn.Module):
    """T5's view: the head count is written out and -1 takes the sequence."""

    def __init__(self, d: int = 16, h: int = 4, hd: int = 4) -> None:
        super().__init__()
        self.h, self.hd = h, hd
        self.q, self.k, self.v, self.o = (nn.Linear(d, h * hd, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            p(x).view(b, -1, self.h, self.hd).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        return self.o(attend(q, k, v).transpose(1, 2).reshape(b, t, -1))


@case("tp2 tp4")
def b04_head_count_in_a_view() -> Setup:
    return Setup(ConstantHeads(), (torch.randn(2, 8, 16),), loss=columns)


class Conv1D(nn.Module):
    """GPT-2's linear: weight [in, out], by addmm."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(i, o) * 0.2), nn.Parameter(torch.randn(o))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


class FusedAttention(nn.Module):
    def __init__(self, d: int = 16, h: int = 4) -> None:
        super().__init__()
        self.h, self.d = h, d
        self.c_attn, self.c_proj = Conv1D(d, 3 * d), Conv1D(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        parts = self.c_attn(x).split(self.d, dim=2)
        q, k, v = (part.view(b, t, self.h, -1).transpose(1, 2) for part in parts)
        return self.c_proj(attend(q, k, v).transpose(1, 2).reshape(b, t, self.d))


@case("tp2 tp4")
def b05_fused_qkv_in_by_out() -> Setup:
    return Setup(FusedAttention(), (torch.randn(2, 5, 16),), loss=columns)


class FusedGate(nn.Module):
    def __init__(self, d: int = 8, f: int = 16) -> None:
        super().__init__()
        self.gu, self.down = nn.Linear(d, 2 * f), nn.Linear(f, d)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gu(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


@case("tp2 tp4")
def b07_fused_gate_up() -> Setup:
    return Setup(FusedGate(), (torch.randn(2, 5, 8),), loss=columns)


class WideNorm(nn.Module):
    """q and k normed over all heads at once (OLMo2): the norm spans the split dim."""

    def __init__(self, d: int = 16, h: int = 4) -> None:
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.qn, self.kn = nn.RMSNorm(d), nn.RMSNorm(d)
        nn.init.uniform_(self.qn.weight, 0.5, 2)
        nn.init.uniform_(self.kn.weight, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        made = self.qn(self.q(x)), self.kn(self.k(x)), self.v(x)
        q, k, v = (each.view(b, t, self.h, -1).transpose(1, 2) for each in made)
        return self.o(attend(q, k, v).transpose(1, 2).reshape(b, t, -1))


@case("tp2 tp4")
def b09_norm_over_the_split_width() -> Setup:
    x = torch.randn(2, 5, 16) * torch.linspace(0.1, 3, 16)
    return Setup(WideNorm(), (x,), loss=columns)


class PerHead(nn.Module):
    """Values made per head inside the model: T5's bias, ALiBi's slopes, a gate."""

    def __init__(self, d: int = 16, h: int = 4) -> None:
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.gate, self.rel = nn.Linear(d, h), nn.Embedding(8, h)
        slopes = 2.0 ** -torch.arange(1, h + 1)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        t = x.size(1)
        q, k, v = (heads(p(x), self.h) for p in (self.q, self.k, self.v))
        distance = torch.arange(t)[:, None] - torch.arange(t)
        bias = self.rel(distance.clamp(0, 7)).permute(2, 0, 1)
        bias = bias - self.slopes[:, None, None] * distance
        y = attend(q, k, v, bias) * self.gate(x).sigmoid().transpose(1, 2)[..., None]
        return self.o(merge(y))


@case("tp2 tp4", flat=("k.bias",))
def b10_values_made_per_head() -> Setup:
    return Setup(PerHead(), (torch.randn(2, 6, 16),), loss=columns)


class AfterTheSum(nn.Module):
    """Constants, residuals and non-linear functions of a sum over ranks."""

    def __init__(self, d: int = 8, f: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        r = self.down(self.up(x).relu())
        ends = [r.amax(-1, keepdim=True), r.norm(dim=-1, keepdim=True)]
        return torch.cat([x + r, r + 7, r.abs(), r * r, 1 - r, *ends], -1)


@case("tp2 tp4")
def b11_functions_of_a_partial_sum() -> Setup:
    return Setup(AfterTheSum(), (torch.randn(4, 8),), loss=columns)
