"""More of training: frozen and unused parts, checkpoints, dtypes, modules used twice."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.cases.blocks import Net, attend, heads, linear, merge, weight
from tests.cases.case import Setup, case


def _mlp(s: Net, x: Tensor) -> Tensor:
    return s.down(s.up(x).relu())


def mlp(**more: object) -> Net:
    return Net(_mlp, up=linear(8, 12), down=linear(12, 8), **more)


@case("tp2 tp3", flat=("up.weight", "down.bias"))
def frozen_parts() -> Setup:
    model = mlp()
    model.up.weight.requires_grad_(False)
    model.down.bias.requires_grad_(False)
    return Setup(model, (torch.randn(2, 5, 8),))


@case("tp2 tp3", flat=("up.weight", "up.bias", "down.weight", "down.bias"))
def frozen_but_for_the_input() -> Setup:
    """Nothing learns; the gradient still passes through."""
    return Setup(mlp().requires_grad_(False), (torch.randn(2, 5, 8, requires_grad=True),))


@case("tp2 tp3", flat=("spare.weight", "spare.bias", "alone"))
def unused_parts() -> Setup:
    return Setup(mlp(spare=linear(3, 4), alone=weight(5)), (torch.randn(2, 5, 8),))


@case("tp2 tp3", flat=("aside.weight", "aside.bias"))
def parts_under_no_grad() -> Setup:
    def run(s: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            base = s.aside(x)
        return base * _mlp(s, x)

    model = mlp(aside=linear(8, 8))
    model.run = run
    return Setup(model, (torch.randn(2, 8),))


@case("tp2 tp3", training=False)
def grad_enabled_inside() -> Setup:
    """Of no meaning where nobody asks for gradients."""

    def run(s: Net, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.enable_grad():
            h = s.up(x)
        with torch.enable_grad():
            return s.down(h.relu())

    return Setup(Net(run, up=linear(8, 12), down=linear(12, 8)), (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def written_under_no_grad() -> Setup:
    """A row and columns of buffers, which are views of them, and what is read of these later has no history."""

    def run(s: Net, x: Tensor) -> Tensor:
        h = s.up(x)
        with torch.no_grad():
            s.seen[1] = h.mean((0, 1))
            s.queue[:, 1:4] = h.detach().amax(1).mT + h.amin(1).mT
        return s.down((h - s.seen.mean(0)).relu() * s.queue.tanh().sum(-1))

    model = Net(run, up=linear(8, 12), down=linear(12, 8))
    model.register_buffer("seen", torch.randn(3, 12))
    model.register_buffer("queue", torch.randn(12, 5))
    return Setup(model, (torch.randn(3, 5, 8, requires_grad=True),))


@case("tp2 tp3", "R2")
def recomputed() -> Setup:
    """Activation checkpoints inside the model."""

    def run(s: Net, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + checkpoint(lambda y: _mlp(s, y), x, use_reentrant=False)
        return x

    return Setup(Net(run, up=linear(8, 12), down=linear(12, 8)), (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def blocks_repeated() -> Setup:
    """Universal transformer: one block, applied three times."""

    def run(s: Net, x: Tensor) -> Tensor:
        for step in range(3):
            y = s.norm(x)
            q, k, v = (heads(p(y), 3) for p in (s.q, s.k, s.v))
            x = x + s.o(merge(attend(q, k, v))) + s.steps[step]
        return x

    parts = dict(q=linear(8, 12), k=linear(8, 12, False), v=linear(8, 12), o=linear(12, 8))
    model = Net(run, **parts, norm=nn.LayerNorm(8), steps=weight(3, 8))
    return Setup(model, (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def tied_thrice() -> Setup:
    """Source, target and head share one table, scaled by the root of the width."""

    def run(s: Net, src: Tensor, tgt: Tensor) -> Tensor:
        memory = s.fc(s.emb(src) * 6**0.5).tanh().mean(1, keepdim=True)
        return s.head((s.emb2(tgt) + memory).relu() * 6**-0.5)

    emb = nn.Embedding(11, 6)
    model = Net(run, emb=emb, emb2=emb, fc=linear(6, 6), head=linear(6, 11, False))
    model.head.weight = emb.weight
    return Setup(model, (torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 3))))


@case("tp2 tp3")
def tied_bias_and_norm() -> Setup:
    """One vector is the bias of a linear and the weight of a norm."""
    model = mlp(norm=nn.LayerNorm(8))
    model.norm.weight = model.down.bias
    model.run = lambda s, x: s.norm(_mlp(s, x) + x)
    return Setup(model, (torch.randn(2, 5, 8),))


def small_lm(dtype: torch.dtype) -> Setup:
    def run(s: Net, ids: Tensor) -> Tensor:
        x = s.emb(ids)
        y = F.rms_norm(x.float(), (12,)).to(x.dtype) * s.scale
        q, k, v = (heads(p(y), 3) for p in (s.q, s.k, s.v))
        x = x + s.o(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return s.head(x + s.down(F.silu(s.up(x))))

    parts = dict(q=linear(12, 12), k=linear(12, 12, False), v=linear(12, 12), o=linear(12, 12))
    parts |= dict(emb=nn.Embedding(11, 12), up=linear(12, 18), down=linear(18, 12))
    model = Net(run, **parts, scale=weight(12), head=linear(12, 11)).to(dtype)
    return Setup(model, (torch.randint(0, 11, (2, 5)),))


@case("tp2 tp3", dtypes=(torch.bfloat16,))
def half_precision() -> Setup:
    """Compared with one process's own error, not with a fixed tolerance."""
    return small_lm(torch.bfloat16)


@case("tp2 tp3", "R2", dtypes=(torch.float32,), inside=torch.bfloat16)
def autocast_inside() -> Setup:
    """Terms of a sum are rounded as the matmul gives them. (Not to relu: it jumps where a sum is nearly zero.)"""

    def run(s: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.silu(s.up(x))
        return s.down(h.to(x.dtype))

    return Setup(Net(run, up=linear(8, 12), down=linear(12, 8)), (torch.randn(2, 5, 8),))


@case("tp2 tp3", dtypes=(torch.float32,))
def parts_in_double() -> Setup:
    """The middle of the model computes in float64."""

    def run(s: Net, x: Tensor) -> Tensor:
        return s.down(s.mid(s.up(x).double()).float())

    model = Net(run, up=linear(8, 12), mid=linear(12, 12).double(), down=linear(12, 8))
    return Setup(model, (torch.randn(2, 5, 8),))
