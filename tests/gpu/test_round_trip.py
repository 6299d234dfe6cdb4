"""Training programs in CUDA graphs against themselves outside of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.runtime import round_trip
from plait.runtime.round_trip import RoundTrip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.relu(self.first(x))
        return self.second(h), h.square(), self.frozen(x.detach()).sum(-1)


def made() -> tuple[Model, RoundTrip, Callable[[Tensor], Any]]:
    torch.manual_seed(0)
    model = Model().cuda()
    names = list(dict(model.named_parameters()))

    def run(*feed: Tensor) -> Any:
        weights = dict(zip(names, feed[:-1], strict=True))
        return torch.func.functional_call(model, weights, (feed[-1],))

    trip = RoundTrip(run, 1)
    return model, trip, lambda x: trip([*model.parameters(), x])


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = [p.grad for p in model.parameters() if p.requires_grad] + [x.grad]
    for p in (*model.parameters(), x):
        p.grad = None
    return [torch.zeros(()).cuda() if g is None else g for g in found]


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, want, strict=True))


def inputs() -> list[Tensor]:
    return [torch.randn(8, 64, device="cuda", requires_grad=True) for _ in range(8)]


LOSSES: list[Callable[..., Tensor]] = [
    lambda a, b, c: a.sin().sum(),
    lambda a, b, c: a.sin().sum() + b.sum(),
    lambda a, b, c: b.sum(),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_of_an_optimizer_are_the_same(loss: Any) -> None:
    model, trip, call = made()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for x in inputs():
        loss(*model(x)).backward()
        want = gradients(model, x)
        loss(*call(x)).backward()
        got = gradients(model, x)
        for p, g in zip([p for p in model.parameters() if p.requires_grad], got, strict=False):
            p.grad = g if g.dim() else None
        optimizer.step()
        optimizer.zero_grad()
        assert same(got, want)
    assert trip._graphs is not None
    assert all(way.graph is not None for way in trip._graphs.ways.values())


def test_every_set_of_outputs_has_a_way_back_of_its_own() -> None:
    model, trip, call = made()
    for i, x in enumerate(inputs() * 2):
        loss = LOSSES[i % 3]
        loss(*model(x)).backward()
        want = gradients(model, x)
        loss(*call(x)).backward()
        assert same(gradients(model, x), want)
    assert trip._graphs is not None and len(trip._graphs.ways) == 3


def test_calls_that_are_open_keep_what_they_have() -> None:
    """Two ways there before two ways back; one way back that is asked for twice; one never asked for."""
    model, trip, call = made()
    xs = inputs()
    for x in xs[:4]:
        call(x)[0].sum().backward()
        gradients(model, x)
    want = []
    for x in xs[4:6]:
        model(x)[0].sin().sum().backward()
        want.append(gradients(model, x))
    outs = [call(x)[0] for x in xs[4:6]]
    assert trip._graphs is not None and trip._graphs.open
    for x, out, grads in zip(xs[4:6], outs, want, strict=True):
        out.sin().sum().backward()
        assert same(gradients(model, x), grads)
    assert not trip._graphs.open
    x = xs[4]
    loss = call(x)[0].sin().sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert same(gradients(model, x), want[0])
    assert trip._graphs.open
    loss.backward()
    assert not trip._graphs.open
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    kept = call(xs[6])
    assert trip._graphs.open
    del kept, loss
    gc.collect()
    assert not trip._graphs.open


def test_gradients_are_the_callers_own() -> None:
    model, _, call = made()
    xs = inputs()
    for x in xs[:4]:
        call(x)[0].sum().backward()
    model.zero_grad()
    for x in xs[4:6]:  # the second is added to the first
        call(x)[0].sin().sum().backward()
    got = gradients(model, xs[4])[:-1]
    for x in xs[4:6]:
        model(x)[0].sin().sum().backward()
    want = gradients(model, xs[4])[:-1]
    assert same(got, want)


def test_without_room_there_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trip, "room", lambda: False)
    _, trip, call = made()
    for x in inputs():
        call(x)[0].sum().backward()
    assert trip._graphs is None


def test_what_cannot_be_captured_runs_as_it_is() -> None:
    weight = torch.randn(4, 4, device="cuda", requires_grad=True)

    def run(weight: Tensor, x: Tensor) -> tuple[Tensor]:
        return (x @ weight * float(x.sum().item() > 0),)

    trip = RoundTrip(run, 1)
    for i in range(6):
        x = torch.full((2, 4), 1.0 if i % 2 else -1.0, device="cuda")
        weight.grad = None
        (out,) = trip([weight, x])
        out.sum().backward()
        assert bool((weight.grad != 0).any()) == (i % 2 == 1)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.rand(1, device="cuda")  # torch's generator does not take itself for one that is captured
