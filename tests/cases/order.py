"""Collectives: strides, order, waits, failures; caches, experts, weights that come from files."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.cases.blocks import attend
from tests.cases.case import Setup, case, columns


class Strided(nn.Module):
    """If the sum moves past the views, it is asked for a strided or expanded tensor."""

    def __init__(self, d: int = 8, f: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.c = nn.Linear(d, f), nn.Linear(f, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).relu()).transpose(1, 2)[:, ::2]
        return self.c(y.transpose(0, 1)[..., :1].expand(-1, -1, 8))


@case("tp2 tp3 pp2 tp2xpp2")
def b41_strided_and_expanded() -> Setup:
    """The loss is a sum, so that the gradient which enters has stride 0."""
    return Setup(Strided(), (torch.randn(3, 5, 8, requires_grad=True),), loss=lambda y: y.sum())


class Chain(nn.Module):
    def __init__(self, d: int = 128, layers: int = 8) -> None:
        super().__init__()
        self.u = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.d = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for u, d in zip(self.u, self.d, strict=True):
            x = (d((u(x * 1.01) + 0.1).relu()) * 0.5).sin() + x
        return x


@case("tp2 tp4")
def b43_chain_of_collectives() -> Setup:
    return Setup(Chain(), (torch.randn(64, 128),), loss=columns)


class Branches(nn.Module):
    """Two independent reductions: any order is right, but one order for all ranks."""

    def __init__(self, d: int = 64) -> None:
        super().__init__()
        self.a, self.b, self.c, self.e = (
            nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x), self.b(x)
        return self.e(self.c(left - right) + x)


@case("tp2 tp4 pp2/8 tp2xpp2/8")
def b45_independent_reductions() -> Setup:
    return Setup(Branches(), (torch.randn(16, 64),), loss=columns)


class SumOf(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.d = parts

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.d[k](x).tanh() for k in self.d)  # type: ignore[return-value]


@case("tp2 tp4")
def b46_equal_branches() -> Setup:
    """Six branches that cost the same: every rank must break the tie alike."""
    parts = nn.ModuleDict({k: nn.Linear(8, 8) for k in "zyxwvu"})
    return Setup(SumOf(parts), (torch.randn(4, 8),), loss=columns)


class Boom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        if self.fail:
            raise ValueError("bad input on this rank")
        return self.b(h)


@case("tp2 pp3")
def b47_one_rank_fails() -> Setup:
    return Setup(Boom(), (torch.randn(4, 8),), loss=columns)


class CachedDecoder(nn.Module):
    """A cache in a buffer, windows by the layer's number, and a length read from the data."""

    def __init__(self, d: int = 16, h: int = 4, kv: int = 2, layers: int = 5) -> None:
        super().__init__()
        self.h, self.kv, self.hd, self.windows = h, kv, d // h, [4, 4, None, 4, 4]
        self.q = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.o = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.kvp = nn.ModuleList(nn.Linear(d, 2 * kv * self.hd) for _ in range(layers))
        cache = torch.zeros(layers, 2, 1, kv, 32, self.hd)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        for i, (q, kv, o) in enumerate(zip(self.q, self.kvp, self.o, strict=True)):
            t, n = x.size(1), int(pos[-1]) + 1
            k, v = kv(x).view(1, t, 2, self.kv, self.hd).permute(2, 0, 3, 1, 4)
            self.cache[i, 0].index_copy_(2, pos, k.detach())
            self.cache[i, 1].index_copy_(2, pos, v.detach())
            far = (pos[:, None] - torch.arange(n)) >= (self.windows[i] or n + 1)
            queries = q(x).view(1, t, self.h, self.hd).transpose(1, 2)
            y = attend(queries, self.cache[i, 0, :, :, :n], self.cache[i, 1, :, :, :n], far * -1e9)
            x = x + o(y.transpose(1, 2).reshape(1, t, -1))
        return x


@case("tp2 tp4 pp2", "R2", training=False)
def b51_cache_with_split_heads() -> Setup:
    return Setup(CachedDecoder().eval(), (torch.randn(1, 9, 16), torch.arange(9)), loss=columns)


class SparseMoE(nn.Module):
    """A loop over experts; the last is never chosen and its code is skipped."""

    def __init__(self, e: int = 4, d: int = 8, f: int = 16, k: int = 2) -> None:
        super().__init__()
        self.k, self.gate = k, nn.Linear(d, e)
        self.gate.bias.data = torch.tensor([0.0, 0.0, 0.0, -1e4])
        self.ex = nn.ModuleList(
            nn.Sequential(nn.Linear(d, f), nn.SiLU(), nn.Linear(f, d)) for _ in range(e)
        )

    def forward(self, x: Tensor) -> Tensor:
        t = x.flatten(0, 1)
        w, i = self.gate(t).softmax(-1).topk(self.k, -1)
        w = w / w.sum(-1, keepdim=True)
        y = torch.zeros_like(t)
        for e, expert in enumerate(self.ex):
            r, c = torch.where(i == e)
            if r.numel() == 0:
                continue
            y = y.index_add(0, r, expert(t[r]) * w[r, c, None])
        return y.view_as(x)


@case("tp2 pp2", "R2", flat=("ex.3.0.weight", "ex.3.0.bias", "ex.3.2.weight", "ex.3.2.bias"))
def b52_expert_without_tokens() -> Setup:
    return Setup(SparseMoE(), (torch.randn(2, 3, 8),), loss=columns)


@case(
    "tp4",
    "R2",
    flat=tuple(f"ex.{e}.{i}.{name}" for e in (2, 3) for i in (0, 2) for name in ("weight", "bias")),
)
def b52_one_token() -> Setup:
    return Setup(SparseMoE(), (torch.randn(1, 1, 8),), loss=columns)


class Rotated(nn.Module):
    """A buffer that is in no file, and a tensor that is no buffer."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.fc = nn.Linear(d, d)
        self.register_buffer("inv_freq", 1 / 10 ** (torch.arange(d) / d), persistent=False)
        self.mask = torch.linspace(0.5, 1, d)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.size(1))[:, None] * self.inv_freq
        return self.fc(x * angle.cos() * self.mask)


@case("tp2 pp2", dtypes=(torch.float32,))
def b54_buffer_in_no_file() -> Setup:
    return Setup(Rotated(), (torch.randn(2, 5, 8),), loss=columns)


@case("tp2 tp4 pp2", noise=False)
def b55_rows_that_name_themselves() -> Setup:
    """Row i of the first weight holds i, column j of the second holds j."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Identity(), nn.Linear(8, 4, bias=False))
    model[0].weight.data = torch.arange(8.0)[:, None].expand(8, 4).clone()
    model[2].weight.data = torch.arange(8.0)[None].expand(4, 8).clone()
    return Setup(model, (torch.ones(1, 4),), loss=columns)


class OddOne(nn.Module):
    """One parameter of shape (1, 17) besides a model that splits."""

    def __init__(self, d: int = 8, f: int = 17) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)
        self.odd = nn.Parameter(torch.randn(1, f))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * self.odd)


@case("tp4 tp2xpp2")
def b56_parameter_of_one_row() -> Setup:
    return Setup(OddOne(), (torch.randn(3, 8),), loss=columns)


def _tall(*shape: int) -> Setup:
    blocks = [
        nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48), nn.LayerNorm(48))
        for _ in range(4)
    ]
    return Setup(nn.Sequential(*blocks), (torch.randn(*shape, 48),), loss=columns)


@case("tp2 tp4")
def b62_blocks_in_three_dims() -> Setup:
    """512 and 2048 wide in the wild; the widths change nothing of what is checked on a CPU."""
    return _tall(4, 16)


@case("tp2 tp4")
def b62_blocks_in_two_dims() -> Setup:
    return _tall(64)
