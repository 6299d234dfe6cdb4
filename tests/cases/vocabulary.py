"""The vocabulary: embedding, head and loss over rows that do not divide."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases.blocks import Net, linear
from tests.cases.case import Setup, case, columns


class OddLM(nn.Module):
    """V = 11, d = 6, f = 10: nothing divides by 3 or 4."""

    def __init__(self, v: int = 11, d: int = 6, f: int = 10) -> None:
        super().__init__()
        self.emb, self.up = nn.Embedding(v, d), nn.Linear(d, f)
        self.down, self.head = nn.Linear(f, d), nn.Linear(d, v)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        return self.head(h + self.down(self.up(h).relu()))


@case("tp2 tp3 tp4 tp13", "R2")
def b13_vocabulary_does_not_divide() -> Setup:
    return Setup(OddLM(), (torch.arange(11)[None],), loss=columns)


class Tied(nn.Module):
    def __init__(self, v: int = 12, d: int = 8) -> None:
        super().__init__()
        self.emb, self.fc = nn.Embedding(v, d), nn.Linear(d, d)
        self.head = nn.Linear(d, v, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.fc(self.emb(ids)).tanh())


@case("tp2 tp3 tp5")
def b14_tied_embedding_and_head() -> Setup:
    return Setup(Tied(), (torch.tensor([[1, 5, 11, 0]]),), loss=columns)


class Loss(nn.Module):
    """The model's own loss, with ignored labels and smoothing, and its prediction."""

    def __init__(self, v: int = 10, d: int = 6, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.emb, self.head = nn.Embedding(v, d), nn.Linear(d, v)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        z = self.head(self.emb(ids)).view(-1, self.head.out_features) * self.scale
        loss = F.cross_entropy(z, labels.view(-1), ignore_index=-100, label_smoothing=0.1)
        return loss, z.argmax(-1)


IDS = torch.tensor([[1, 2, 3], [4, 9, 0]])
LABELS = torch.tensor([[9, -100, 0], [-100, -100, 4]])


@case("tp2 tp4 tp5")
def b16_cross_entropy_ignores_labels() -> Setup:
    return Setup(Loss(), (IDS, LABELS), loss=lambda out: out[0])


@case("tp2 tp4 tp5")
def b16_large_logits() -> Setup:
    """The maximum that is taken off must be the global one, or exp overflows."""
    return Setup(Loss(scale=1000.0), (IDS, LABELS), loss=lambda out: out[0])


@case("tp2 tp3 tp4")
def table_scaled_by_frequency() -> Setup:
    """A row's gradient is divided by how often the whole batch reads it."""

    def run(s: Net, ids: Tensor) -> Tensor:
        return s.down(s.up(s.emb(ids)).relu())

    emb = nn.Embedding(11, 8, padding_idx=3, scale_grad_by_freq=True)
    model = Net(run, emb=emb, up=linear(8, 13), down=linear(13, 11))
    return Setup(model, (torch.tensor([[1, 3, 3, 10], [0, 3, 9, 2], [1, 1, 9, 5]]),))


@case("tp2 tp5", noise=False, training=False)
def b16_argmax_takes_the_first() -> Setup:
    """Equal logits in every rank's share: the first global index wins."""
    model = Loss()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 1, 0, 2, 0, 2, 1, 2, 0, 2]))
    return Setup(model, (IDS, LABELS))
