"""Gradients, norms, clipping; randomness and modes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.cases.blocks import attend
from tests.cases.case import Setup, case, columns


class SoftMoE(nn.Module):
    """Every expert sees every token; the input's gradient needs every rank."""

    def __init__(self, e: int = 4, d: int = 8, f: int = 16) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(d), nn.Linear(d, e, bias=False)
        self.w1 = nn.Parameter(torch.randn(e, d, f) * 0.3)
        self.w2 = nn.Parameter(torch.randn(e, f, d) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        p = self.gate(h).softmax(-1)
        y = torch.einsum("btd,edf->betf", h, self.w1).relu()
        return torch.einsum("bte,betd->btd", p, torch.einsum("betf,efd->betd", y, self.w2))


@case("tp2 tp4")
def b17_gradient_needs_a_sum() -> Setup:
    return Setup(SoftMoE(), (torch.randn(2, 3, 8, requires_grad=True),), loss=columns)


def _few_tokens(t: int) -> Setup:
    return Setup(SoftMoE(), (torch.randn(1, t, 8, requires_grad=True),), loss=columns)


@case("tp4")
def b49_one_token() -> Setup:
    return _few_tokens(1)


@case("tp4")
def b49_two_tokens() -> Setup:
    return _few_tokens(2)


@case("tp4")
def b49_three_tokens() -> Setup:
    return _few_tokens(3)


class Residual(nn.Module):
    """Norms and residuals between two MLPs: what lies between the sums may be split by rows."""

    def __init__(self, d: int = 9, f: int = 14) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(d) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(d, f) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(f, d) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=False):
            x = x + down(up(norm(x)).tanh())
        return self.norms[-1](x)


@case("tp4")
def b49_rows_of_the_residual() -> Setup:
    """Five rows on four ranks."""
    return Setup(Residual(), (torch.randn(1, 5, 9, requires_grad=True),), loss=columns)


@case("tp4")
def b49_fewer_rows_than_ranks() -> Setup:
    return Setup(Residual(), (torch.randn(1, 3, 9, requires_grad=True),), loss=columns)


class HeadNorms(nn.Module):
    """Qwen3: one norm weight for all heads; each rank sees its heads' part of the gradient."""

    def __init__(self, d: int = 16, h: int = 4, kv: int = 2) -> None:
        super().__init__()
        self.hd = d // h
        self.q, self.k = nn.Linear(d, d), nn.Linear(d, kv * self.hd)
        self.v, self.o = nn.Linear(d, kv * self.hd), nn.Linear(d, d)
        self.qn, self.kn = nn.RMSNorm(self.hd), nn.RMSNorm(self.hd)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, -1, self.hd) for p in (self.q, self.k, self.v))
        q, k, v = self.qn(q).transpose(1, 2), self.kn(k).transpose(1, 2), v.transpose(1, 2)
        return self.o(attend(q, k, v).transpose(1, 2).reshape(b, t, -1))


@case("tp2 tp4")
def b19_norm_shared_by_heads() -> Setup:
    return Setup(HeadNorms(), (torch.randn(2, 5, 16),), loss=columns)


@case("tp2 tp4 pp3 tp2xpp2")
def b21_clipping() -> Setup:
    model = nn.Sequential(
        nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(),
        nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 10),
    )  # fmt: skip
    return Setup(model, (torch.randint(0, 10, (4, 3)),), loss=lambda y: y.pow(2).sum())


class Masks(nn.Module):
    """Identity weights and an input of ones: the outputs are the dropout masks themselves."""

    def __init__(self, d: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.up.weight.data, self.down.weight.data = torch.eye(d), torch.eye(d)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(self.inner(self.up(x))), self.outer(x)


@case("tp2 tp4", noise=False, exact=False)
def b22_dropout() -> Setup:
    return Setup(Masks().train(), (torch.ones(256, 64),), loss=lambda out: (out[0] + out[1]).mean())


@case("tp2 pp2", exact=False)
def b24_modes() -> Setup:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8)
    ).train()
    return Setup(model, (torch.randn(6, 8),), loss=columns)
