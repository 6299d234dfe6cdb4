"""What crosses the cuts of a pipeline; each model is split by tensors too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases.case import Setup, case, columns


def _tower(rows: int) -> Setup:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    )  # fmt: skip
    return Setup(model, (torch.randn(rows, 8),), loss=columns)


@case("pp2/3 pp3/3 tp2", "R2")
def b25_last_micro_batch_smaller() -> Setup:
    return _tower(8)


@case("pp2/3 tp3", "R2")
def b25_seven_rows() -> Setup:
    return _tower(7)


@case("pp2/4", "R2")
def b25_fewer_rows_than_micro_batches() -> Setup:
    return _tower(2)


@case("pp2/4 tp4", "R2")
def b25_one_row() -> Setup:
    return _tower(1)


class SharedBuffer(nn.Module):
    """A root buffer and a root parameter, read by every layer."""

    def __init__(self, d: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.scale = nn.Parameter(torch.rand(d))
        self.register_buffer("freqs", torch.randn(16, d), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        f = self.freqs[: x.size(1)].cos()
        for layer in self.layers:
            x = x + layer(x * f) * self.scale
        return x


@case("tp2 tp3 pp2 pp4")
def b27_buffer_used_by_all_layers() -> Setup:
    return Setup(SharedBuffer(), (torch.randn(4, 6, 8),), loss=columns)


class Skip(nn.Module):
    """x0 and x1 jump over stages, and so do the integers."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, d)
        self.a, self.b, self.c, self.d = (nn.Linear(d, d) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x0 = self.emb(ids)
        x1 = self.a(x0).tanh()
        x2 = self.b(x1).tanh()
        x3 = self.c(x2 + x0).tanh()
        return self.d(x3 + x1) + F.one_hot(ids, 8).float()


@case("tp2 tp3 pp3/6 pp4/6")
def b28_skip_connection() -> Setup:
    return Setup(Skip(), (torch.randint(0, 8, (6, 5)),), loss=columns)


class EncoderDecoder(nn.Module):
    """The encoder's output feeds every decoder layer; None, a bool and a mask are arguments."""

    def __init__(self, v: int = 12, d: int = 8) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(v, d), nn.Linear(d, v, bias=False)
        self.head.weight = self.emb.weight
        make = dict(d_model=d, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.enc = nn.ModuleList(nn.TransformerEncoderLayer(**make) for _ in range(2))
        self.dec = nn.ModuleList(nn.TransformerDecoderLayer(**make) for _ in range(2))

    def forward(
        self, src: Tensor, tgt: Tensor, pad: Tensor | None = None, use_cache: bool = False
    ) -> dict[str, Any]:
        m, t = self.emb(src), self.emb(tgt)
        for layer in self.enc:
            m = layer(m, src_key_padding_mask=pad)
        for layer in self.dec:
            t = layer(t, m, memory_key_padding_mask=pad)
        return {"logits": self.head(t), "enc": m, "cache": None}


def _encoder_decoder(**kwargs: Any) -> Setup:
    ids = torch.randint(0, 12, (4, 5)), torch.randint(0, 12, (4, 3))
    return Setup(EncoderDecoder(), ids, kwargs, lambda out: out["logits"].pow(2).mean())


@case("tp2 tp3 pp2/2 pp4/4 tp2xpp2")
def b29_encoder_decoder() -> Setup:
    pad = torch.arange(5)[None] >= torch.tensor([5, 3, 4, 2])[:, None]
    return _encoder_decoder(pad=pad, use_cache=False)


@case("tp2 tp3 pp2/2 tp2xpp2")
def b29_no_mask() -> Setup:
    return _encoder_decoder(pad=None)


class TiedDeep(nn.Module):
    """Ends tied, and one module used twice."""

    def __init__(self, v: int = 12, d: int = 8) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(v, d), nn.Linear(d, v, bias=False)
        self.mid = nn.ModuleList(nn.Linear(d, d) for _ in range(4))
        self.head.weight = self.emb.weight
        self.mid[3] = self.mid[0]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.mid:
            x = x + layer(x).tanh()
        return self.head(x)


@case("tp2 tp3 pp2/4 pp3/4 pp4/4 tp2xpp2")
def b31_tied_over_stages() -> Setup:
    return Setup(TiedDeep(), (torch.randint(0, 12, (4, 5)),), loss=columns)


class TwoStreams(nn.Module):
    """Two tensors and a mask across each cut."""

    def __init__(self, d: int = 64) -> None:
        super().__init__()
        self.ls = nn.ModuleList(nn.Linear(d, d) for _ in range(8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = x.roll(1, -1)
        for layer in self.ls:
            x, y = layer(y).tanh() * mask, x
        return x + y


@case("tp2 pp4/8")
def b33_two_tensors_and_a_mask() -> Setup:
    inputs = torch.randn(32, 256, 64), torch.rand(32, 256, 1).round()
    return Setup(TwoStreams(), inputs, loss=columns)


class Up(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return (h.double() + 1).float()


class Thin(nn.Module):
    """Stages with no parameter, a change of dtype in each, a tensor made on the way."""

    def __init__(self, v: int = 20, d: int = 6) -> None:
        super().__init__()
        self.tok, self.out = nn.Embedding(v, d), nn.ReLU()
        self.ups = nn.ModuleList([Up(), Up(), Up()])

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tok(ids)
        n = torch.full((3,), float(ids.size(1)))
        for up in self.ups:
            h = up(h) / n[0]
        return self.out(h)


@case("tp2 tp3 pp2 pp3", dtypes=(torch.float32,))
def b37_stages_without_parameters() -> Setup:
    return Setup(Thin(), (torch.randint(0, 20, (4, 6)),), loss=columns)


TARGET = torch.tensor([2, 0, 1, 1, 0, 2, 2, 1])


def _classifier(reduction: str) -> Setup:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return Setup(
        model, (torch.randn(8, 8),), loss=lambda y: F.cross_entropy(y, TARGET, reduction=reduction)
    )


@case("tp2 pp2/1 pp2/2 pp2/4 pp2/8")
def b38_mean_loss() -> Setup:
    return _classifier("mean")


@case("tp3 pp2/1 pp2/2 pp2/4 pp2/8")
def b38_sum_loss() -> Setup:
    return _classifier("sum")


@case("tp2 pp2/2 pp2/4")
def b39_valid_tokens_differ() -> Setup:
    """1, 4, 6 and 0 valid labels in the rows: no mean of means, no NaN."""
    v = 7
    model = nn.Sequential(nn.Embedding(v, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, v))
    ids, labels = torch.randint(0, v, (4, 6)), torch.randint(0, v, (4, 6))
    labels[0, 1:] = labels[1, 4:] = labels[3] = -100
    return Setup(
        model,
        (ids,),
        loss=lambda y: F.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=-100),
    )
