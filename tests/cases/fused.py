"""More fused orders of q, k and v, and other numbers of query heads to a key/value head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cases.blocks import Net, attend, heads, linear, merge
from tests.cases.case import Setup, case

H, D = 6, 4  # heads and their width; the model's width is 24
Parts = tuple[Tensor, Tensor, Tensor]


def fused(split: Callable[[Net, Tensor], Parts], rows: int = 3 * H * D, t: int = 5) -> Setup:
    """One packed projection, taken apart by `split` into q, k, v: [b, h, t, d]."""

    def run(s: Net, x: Tensor) -> Tensor:
        return s.o(merge(attend(*split(s, s.qkv(x)))))

    model = Net(run, qkv=linear(H * D, rows), o=linear(H * D, H * D))
    return Setup(model, (torch.randn(2, t, H * D),))


@case("tp2 tp3 tp4")
def qkv_interleaved_per_head() -> Setup:
    """GPT-NeoX: rows (h [q + k + v])."""

    def split(s: Net, y: Tensor) -> Parts:
        q, k, v = y.view(*y.shape[:2], H, 3 * D).chunk(3, -1)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    return fused(split)


@case()
def qkv_per_head_then_three() -> Setup:
    """Rows (h 3 d), taken apart by select."""

    def split(s: Net, y: Tensor) -> Parts:
        y = y.view(*y.shape[:2], H, 3, D).transpose(1, 2)
        return y[:, :, :, 0], y[:, :, :, 1], y[:, :, :, 2]

    return fused(split)


@case()
def qkv_three_then_heads() -> Setup:
    """ViT of timm: rows (3 h d), permuted and unbound."""

    def split(s: Net, y: Tensor) -> Parts:
        q, k, v = y.reshape(*y.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    return fused(split)


@case("tp2 tp3 tp4")
def qkv_of_width_by_head_by_three() -> Setup:
    """Rows (d h 3): the head is neither outermost nor innermost."""

    def split(s: Net, y: Tensor) -> Parts:
        q, k, v = y.view(*y.shape[:2], D, H, 3).permute(4, 0, 3, 1, 2)
        return q, k, v

    return fused(split)


@case()
def kv_before_q() -> Setup:
    def split(s: Net, y: Tensor) -> Parts:
        k, v, q = y.split([8, 8, 24], -1)
        return heads(q, H), heads(k, 2), heads(v, 2)

    return fused(split, rows=8 + 8 + 24)


@case("tp2 tp3")
def fused_by_group() -> Setup:
    """Falcon and Megatron: rows (g [r q-heads + k + v])."""

    def split(s: Net, y: Tensor) -> Parts:
        y = y.view(*y.shape[:2], 3, 4, D)
        q, k, v = y[..., :2, :], y[..., 2, :], y[..., 3, :]
        return q.flatten(2, 3).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    return fused(split, rows=3 * 4 * D)


@case("tp2 tp3")
def one_kv_head_by_index() -> Setup:
    """Falcon 7B: rows (h + 1 + 1) d, the last two taken by a constant index."""

    def split(s: Net, y: Tensor) -> Parts:
        y = y.view(*y.shape[:2], H + 2, D)
        q, k, v = y[..., :-2, :], y[..., [-2], :], y[..., [-1], :]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    return fused(split, rows=(H + 2) * D)


@case("tp2 tp3", flat=("k.bias",))
def gate_packed_with_q() -> Setup:
    """Qwen3-Next: q and an output gate share rows, per head."""

    def run(s: Net, x: Tensor) -> Tensor:
        q, gate = s.q(x).view(*x.shape[:2], H, 2 * D).chunk(2, -1)
        k, v = heads(s.k(x), 3), heads(s.v(x), 3)
        y = attend(q.transpose(1, 2), k, v)
        return s.o(merge(y) * gate.flatten(2).sigmoid())

    parts = dict(q=linear(24, 48), k=linear(24, 12), v=linear(24, 12), o=linear(24, 24))
    return Setup(Net(run, **parts), (torch.randn(2, 5, 24),))


def grouped(h: int, g: int, run: Callable[..., Tensor], t: int = 5) -> Setup:
    parts = dict(q=linear(10, h * D), k=linear(10, g * D, False), v=linear(10, g * D))
    model = Net(run, **parts, o=linear(h * D, 10))
    model.h, model.g = h, g
    return Setup(model, (torch.randn(2, t, 10),))


def _by_repeat(s: Net, x: Tensor) -> Tensor:
    return s.o(merge(attend(heads(s.q(x), s.h), heads(s.k(x), s.g), heads(s.v(x), s.g))))


def _by_expand(s: Net, x: Tensor) -> Tensor:
    def spread(y: Tensor) -> Tensor:
        b, g, t, d = y.shape
        return y[:, :, None].expand(b, g, s.h // g, t, d).reshape(b, s.h, t, d)

    k, v = spread(heads(s.k(x), s.g)), spread(heads(s.v(x), s.g))
    return s.o(merge(F.scaled_dot_product_attention(heads(s.q(x), s.h), k, v, is_causal=True)))


def _by_enable_gqa(s: Net, x: Tensor) -> Tensor:
    q, k, v = heads(s.q(x), s.h), heads(s.k(x), s.g), heads(s.v(x), s.g)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return s.o(merge(y))


def _by_grouped_product(s: Net, x: Tensor) -> Tensor:
    """No repeat at all: q as [b, g, (r t), d] against k as [b, g, t, d]."""
    b, t, _ = x.shape
    q = heads(s.q(x), s.h).reshape(b, s.g, -1, D)
    k, v = heads(s.k(x), s.g), heads(s.v(x), s.g)
    y = ((q @ k.mT / 2).softmax(-1) @ v).view(b, s.h, t, D)
    return s.o(merge(y))


def _tiled(s: Net, x: Tensor) -> Tensor:
    """Heads of one group are not neighbours: the kv heads are tiled, (r g)."""
    k, v = (heads(p(x), s.g).repeat(1, s.h // s.g, 1, 1) for p in (s.k, s.v))
    return s.o(merge(attend(heads(s.q(x), s.h), k, v)))


@case("tp2 tp3 tp4")
def groups_six_over_two() -> Setup:
    return grouped(6, 2, _by_repeat)


@case("tp2 tp3 tp4")
def groups_nine_over_three() -> Setup:
    return grouped(9, 3, _by_expand)


@case("tp2 tp3 tp4")
def groups_nine_over_three_native() -> Setup:
    return grouped(9, 3, _by_enable_gqa)


@case("tp2 tp3 tp4")
def groups_fifteen_over_five() -> Setup:
    return grouped(15, 5, _by_expand)


@case("tp2 tp3 tp4")
def groups_ten_over_two_by_product() -> Setup:
    return grouped(10, 2, _by_grouped_product)


@case("tp2 tp3 tp4")
def groups_eight_over_two_tiled() -> Setup:
    return grouped(8, 2, _tiled)


@case("tp2 tp4")
def groups_eight_over_one_native() -> Setup:
    return grouped(8, 1, _by_enable_gqa)


@case("tp2 tp3", flat=("q.weight", "q.bias", "k.weight"))
def one_token_groups() -> Setup:
    return grouped(6, 3, _by_expand, t=1)
