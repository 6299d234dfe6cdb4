"""Losses of each element by itself: cut into micro-batches, and equal to the module's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.capture import capture
from plait.passes.microbatch import find, piece
from plait.rules.aten import table
from plait.rules.describe import describe

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
    "one column for all": lambda x, y: F.mse_loss(x, y[:, :1].expand(-1, 3)),
}


class Judged(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.loss = nn.Linear(4, 3), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.inner(x), y)


@pytest.mark.parametrize("name", LOSSES)
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
