"""More positions: rotary of every kind, ALiBi, T5's buckets, tables of biases."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.cases.blocks import Net, attend, heads, linear, merge, weight
from tests.cases.case import Setup, case

H, D = 6, 4  # heads and their width
Parts = tuple[Tensor, Tensor, Tensor]


def separate(run: Callable[..., Tensor], t: int = 5, **more: object) -> Setup:
    """q, k, v, o of six heads of four, and whatever else `run` needs."""
    parts = dict(q=linear(12, 24), k=linear(12, 24), v=linear(12, 24), o=linear(24, 12))
    return Setup(Net(run, **parts, **more), (torch.randn(2, t, 12),))


def three(s: Net, x: Tensor) -> Parts:
    return heads(s.q(x), H), heads(s.k(x), H), heads(s.v(x), H)


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def angles(t: int, width: int) -> Tensor:
    return torch.arange(t)[:, None] / 7.0 ** (torch.arange(width) / width)


@case("tp2 tp3 tp4")
def rotary_half() -> Setup:
    def run(s: Net, x: Tensor) -> Tensor:
        angle = torch.cat([angles(x.size(1), D // 2)] * 2, -1)
        q, k, v = three(s, x)
        q, k = (y * angle.cos() + rotate_half(y) * angle.sin() for y in (q, k))
        return s.o(merge(attend(q, k, v)))

    return separate(run)


@case("tp2 tp3 tp4")
def rotary_interleaved() -> Setup:
    """Pairs are neighbours: strided slices, stack, flatten."""

    def turn(y: Tensor, angle: Tensor) -> Tensor:
        a, b = y[..., ::2], y[..., 1::2]
        c, s = angle.cos(), angle.sin()
        return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)

    def run(s: Net, x: Tensor) -> Tensor:
        angle = angles(x.size(1), D // 2)
        q, k, v = three(s, x)
        return s.o(merge(attend(turn(q, angle), turn(k, angle), v)))

    return separate(run)


@case("tp2 tp3", "R2")
def rotary_complex() -> Setup:
    def turn(y: Tensor, spin: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * spin).flatten(-2)

    def run(s: Net, x: Tensor) -> Tensor:
        angle = angles(x.size(1), D // 2).to(x.dtype)
        spin = torch.polar(torch.ones_like(angle), angle)
        q, k, v = three(s, x)
        return s.o(merge(attend(turn(q, spin), turn(k, spin), v)))

    return separate(run)


@case()
def rotary_on_a_part() -> Setup:
    def run(s: Net, x: Tensor) -> Tensor:
        angle = torch.cat([angles(x.size(1), 1)] * 2, -1)
        q, k, v = three(s, x)

        def turn(y: Tensor) -> Tensor:
            front, rest = y[..., :2], y[..., 2:]
            return torch.cat([front * angle.cos() + rotate_half(front) * angle.sin(), rest], -1)

        return s.o(merge(attend(turn(q), turn(k), v)))

    return separate(run)


@case("tp2 tp3 tp4", flat=("k.bias",))
def alibi_in_a_buffer() -> Setup:
    def run(s: Net, x: Tensor) -> Tensor:
        distance = torch.arange(x.size(1))[None] - torch.arange(x.size(1))[:, None]
        return s.o(merge(attend(*three(s, x), s.slopes[:, None, None] * distance)))

    return separate(run, slopes=2.0 ** -torch.arange(1.0, H + 1))


@case("tp2 tp3 tp4", flat=("k.bias",))
def alibi_computed_per_call() -> Setup:
    def run(s: Net, x: Tensor) -> Tensor:
        slopes = torch.pow(2.0, -torch.arange(1, H + 1, device=x.device))
        bias = slopes.view(1, H, 1, 1) * torch.arange(x.size(1)).view(1, 1, 1, -1)
        return s.o(merge(attend(*three(s, x), bias)))

    return separate(run)


@case("tp2 tp3 tp4", flat=("k.bias",))
def t5_buckets() -> Setup:
    def run(s: Net, x: Tensor) -> Tensor:
        n = torch.arange(x.size(1))[None] - torch.arange(x.size(1))[:, None]
        far = 2 + (n.abs().clamp(min=1).float().log() / math.log(8) * 2).long().clamp(max=1)
        bucket = torch.where(n.abs() < 2, n.abs(), far) + (n > 0) * 4
        bias = s.rel(bucket).permute(2, 0, 1)[None]
        return s.o(merge(attend(*three(s, x), bias, causal=False)))

    return separate(run, t=7, rel=nn.Embedding(8, H))


@case("tp2 tp3", flat=("k.bias",))
def swin_bias_table() -> Setup:
    """A table of a parameter, indexed by constants, reshaped to a bias per head."""

    def run(s: Net, x: Tensor) -> Tensor:
        t = x.size(1)
        at = (torch.arange(t)[:, None] - torch.arange(t)[None] + t - 1).flatten()
        bias = s.table[at].view(t, t, H).permute(2, 0, 1).contiguous()
        return s.o(merge(attend(*three(s, x), bias[None], causal=False)))

    return separate(run, table=weight(9, H))


@case("tp2 tp3 pp2/3 tp2xpp2/2")
def rows_counted_beside_an_index() -> Setup:
    """`x[arange(b), last]`, and the same of every head: read, and written."""

    def run(s: Net, x: Tensor, last: Tensor) -> Tensor:
        rows, heads = torch.arange(x.size(0)), torch.arange(5)
        y = s.up(x).view(3, 7, 5, 4)
        y = torch.index_put(y, (rows[:, None], last[:, None], heads), y[rows[:, None], last[:, None] // 2, heads].exp())
        picked = y.transpose(1, 2)[:, heads, torch.tensor([0, 3, -1, 2, 2])]
        return s.down(y[rows, last].flatten(1).relu()) + s.down(picked.flatten(1).tanh())

    return Setup(Net(run, up=linear(8, 20), down=linear(20, 8)), (torch.randn(3, 7, 8), torch.tensor([6, 0, -2])))
