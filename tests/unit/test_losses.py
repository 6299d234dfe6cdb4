"""Losses of each element or row by itself: cut into micro-batches, and equal to the module's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.capture import capture, losses
from plait.capture.loss import Loss
from plait.passes.microbatch import find, piece
from plait.program import run_whole
from plait.rules.aten import table
from plait.rules.describe import describe

WEIGHT = torch.tensor([0.5, 1, 3]).double()


def classes(y: Tensor) -> Tensor:
    """Labels of which some are ignored."""
    labels = (3 * y[:, 0]).long()
    return labels.masked_fill(y[:, 1] > 0.7, -100)


def moved(labels: Tensor) -> Tensor:
    """As a decoder's inputs are made of its labels: in place."""
    out = labels.new_zeros(labels.shape)
    out[:, 1:] = labels[:, :-1].clone()
    out[:, 0] = 2
    return out.masked_fill_(out == -100, 1)


def states(x: Tensor, y: Tensor) -> Tensor:
    first = [y.new_zeros(1, len(y), 2)] * 2
    return torch.lstm(x[None], first, LSTM, False, 1, 0.0, True, False, False)[0]


LSTM = [torch.linspace(-1, 1, 24).view(8, 3).double(), torch.linspace(1, -1, 16).view(8, 2).double()]
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": F.l1_loss,
    "mse": F.mse_loss,
    "mse, summed": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "mse, each": lambda x, y: F.mse_loss(x, y, reduction="none").mean(),
    "smooth l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.3),
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.3),
    "soft margin": lambda x, y: F.soft_margin_loss(x, y.round() * 2 - 1),
    "cross entropy of bits": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "of logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.ones(3)),
    "divergence": lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean"),
    "likelihood": lambda x, y: F.nll_loss(x.log_softmax(-1), classes(y)),
    "weighted": lambda x, y: F.nll_loss(x, (3 * y[:, 0]).long(), WEIGHT, ignore_index=1),
    "of places": lambda x, y: F.nll_loss(x[:, :, None].tanh() * y[:, None], (3 * y).long()),
    "smoothed": lambda x, y: F.cross_entropy(x, classes(y), WEIGHT, label_smoothing=0.2),
    "smoothed, summed": lambda x, y: F.cross_entropy(x, classes(y), WEIGHT, reduction="sum", label_smoothing=0.2),
    "of shares": lambda x, y: F.cross_entropy(x, y.softmax(-1), WEIGHT, label_smoothing=0.2),
    "cosine": lambda x, y: F.cosine_embedding_loss(x, y, y[:, 0].round() * 2 - 1, margin=0.1),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, y.flip(1)),
    "hinge": lambda x, y: F.hinge_embedding_loss(x, y.round() * 2 - 1),
    "ranking": lambda x, y: F.margin_ranking_loss(x[:, 0], y[:, 0], y[:, 1].round() * 2 - 1),
    "counts": lambda x, y: F.poisson_nll_loss(x, y),
    "margins": lambda x, y: F.multi_margin_loss(x, (3 * y[:, 0]).long()),
    "similarity": lambda x, y: F.cosine_similarity(x, y).mean(),
    "dissimilarity": lambda x, y: 1 - F.cosine_similarity(x, y).mean(),
    "sum of a list": lambda x, y: sum([F.mse_loss(x[:, i], y[:, i]) for i in range(3)]),
    "less what labels give": lambda x, y: y.mean() - F.mse_loss(x, y) / torch.tensor(3.0) - 0.5,
    "of numbers": lambda x, y: torch.nansum((x - y).masked_fill(y > 0.6, torch.nan)) * 3 + 2,
    "of labels moved by one": lambda x, y: F.cross_entropy(x, moved((3 * y).long())[:, 1]),
    "of states": lambda x, y: states(x, y).sum(),
    "one column for all": lambda x, y: F.mse_loss(x, y[:, :1].expand(-1, 3)),
}


class Judged(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.loss = nn.Linear(4, 3), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.inner(x), y)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if i % 3 == 0 else pytest.mark.full)
        for i, n in enumerate(LOSSES)
        if n != "of states" or torch.__version__ >= "2.12"  # older ones run an LSTM whole
    ],
)
@pytest.mark.sample(3)
def test_terms_of_uneven_pieces_add_up(name: str) -> None:
    torch.manual_seed(0)
    model, x, y = Judged(LOSSES[name]).double(), torch.randn(7, 4).double(), torch.rand(7, 3).double()
    program = capture(model, (x, y), training=True)
    description = describe(program, table())
    batch = find(program, description, 3)
    assert hasattr(batch, "pieces"), batch
    total = torch.zeros((), dtype=torch.float64)
    for k in range(batch.pieces):
        part = piece(program, description, batch, k)
        begin, end = batch.split.bounds[k : k + 2]
        feed = {"p_inner_weight": model.inner.weight, "p_inner_bias": model.inner.bias}
        feed |= {"x": x[begin:end], "y": y[begin:end], "x__whole": x, "y__whole": y}
        names = [n.name for n in part.graph.nodes if n.op == "placeholder"]
        module = torch.fx.GraphModule(dict(part.constants), part.graph)
        total = total + module(*(feed[n] for n in names))[0]
    assert total.item() == pytest.approx(model(x, y).item(), rel=1e-12)
    total.backward()
    got = model.inner.weight.grad
    model.zero_grad()
    model(x, y).backward()
    torch.testing.assert_close(got, model.inner.weight.grad)


@pytest.mark.parametrize("shape", [(3,), (4, 3), (4, 3, 2), (4, 3, 2, 5)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_by_class_are_torchs_own(shape: tuple[int, ...], reduction: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).log_softmax(min(1, len(shape) - 1)), WEIGHT.float()
    labels = torch.randint(0, 3, shape[:1] + shape[2:] if len(shape) > 1 else ())
    for given in (labels, labels.masked_fill(labels == 1, -100)):
        for w in (None, weight):
            same(losses.nll, F.nll_loss, x, given, w, reduction=reduction)
        for smoothing in (0.0, 0.3):
            more: Any = {"reduction": reduction, "label_smoothing": smoothing}
            same(losses.cross_entropy, F.cross_entropy, x, given, weight, **more)
    same(losses.cross_entropy, F.cross_entropy, x, x.exp(), reduction=reduction, label_smoothing=0.3)


def same(ours: Callable[..., Tensor], torchs: Callable[..., Tensor], *args: Any, reduction: Any, **more: Any) -> None:
    how = {"none": losses.NONE, "mean": losses.MEAN, "sum": losses.SUM}[reduction]
    want = torchs(*args, reduction=reduction, **more)
    torch.testing.assert_close(ours(*args, reduction=how, **more), want, equal_nan=True)


def test_what_has_no_equation_is_composed_of_what_has() -> None:
    """Spellings of one thing are split alike, and a loop over steps stays one operator."""

    class Spelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.cell = nn.Linear(4, 6), nn.Linear(6, 4), nn.GRU(4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.clip(torch.multiply(self.up(x), 2), -1, 1)
            y = torch.subtract(torch.maximum(y, y.tanh()), torch.concat([y[..., 3:], y[..., :3]], -1))
            return self.cell(torch.hstack([self.down(y), x]))[0]  # type: ignore[no-any-return]

    model, x = Spelled(), torch.randn(2, 3, 4)
    program = capture(model, (x,))
    called = {n.target for n in program.graph.nodes if n.op == "call_function"}
    assert called <= table().keys()
    assert torch.ops.aten.gru.input in called
    torch.testing.assert_close(run_whole(program, dict(model.named_parameters()), (x,)), model(x))


MADE: dict[str, Callable[[], Any]] = {
    "a function": lambda: lambda out: out.sum(),
    "a partial": lambda: partial(F.cross_entropy, ignore_index=3, weight=WEIGHT),
    "a module": lambda: nn.CrossEntropyLoss(WEIGHT, reduction="sum"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_loss_that_is_made_alike_again_is_the_same(name: str) -> None:
    every = [Loss(make()) for make in MADE.values()]
    assert [Loss(MADE[name]()).same(other) for other in every] == [name == other for other in MADE]


def test_a_loss_that_is_made_otherwise_is_another() -> None:
    module, hooked = nn.MSELoss(), nn.MSELoss()
    hooked.register_forward_hook(lambda *_: None)
    others = [nn.MSELoss(reduction="sum"), nn.MSELoss().eval(), nn.L1Loss(), hooked]
    assert Loss(module).same(Loss(nn.MSELoss()))
    assert not any(Loss(module).same(Loss(other)) for other in others)
    weighted = partial(F.cross_entropy, weight=WEIGHT)
    apart = [partial(F.cross_entropy, weight=WEIGHT.clone()), partial(F.cross_entropy, label_smoothing=0.1)]
    assert not any(Loss(weighted).same(Loss(other)) for other in [*apart, F.cross_entropy])
