"""More positions: rotary of every kind, ALiBi, T5's buckets, tables of biases."""

from __future__ import annotations

import copy
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


@case("tp2 tp3")
def rows_chosen_by_a_number() -> Setup:
    """Diffusion's timestep and a ring of past means: `x[t]` of a tensor without dims, read and written."""

    def block(s: Net, x: Tensor, t: Tensor) -> Tensor:
        return x + s.down((s.up(x) + s.table[t, 1:]).relu() * s.rate[-t])

    def run(s: Net, x: Tensor, t: Tensor) -> object:
        for part in s.blocks:
            x = part(x, t)
        with torch.no_grad():
            s.past[s.step % 3] = x.mean((0, 1))
            s.count[t - 1] += 2
            s.count[..., t].add_(s.step)
            level = s.levels[t] / t.item()
            s.step += 1
        y = s.end(x) * level
        y[t - 1, 1:, -t] = x[0, :4, 0]
        y[..., t - 4, 2:4] = 0.5
        return s.out(y), y[:, t.item() + 1], x - s.past[s.step - 1], s.count.clone()

    parts = dict(up=linear(8, 12), down=linear(12, 8), table=weight(6, 13), rate=weight(7, 12))
    blocks = [Net(block, **copy.deepcopy(parts)) for _ in range(2)]
    model = Net(run, blocks=nn.ModuleList(blocks), end=linear(8, 10), out=linear(10, 4))
    model.register_buffer("past", torch.zeros(3, 8))
    model.register_buffer("step", torch.tensor(2))
    model.register_buffer("count", torch.zeros(4, dtype=torch.long))
    model.register_buffer("levels", torch.rand(5))
    return Setup(model, (torch.randn(3, 5, 8, requires_grad=True), torch.tensor(3)))
