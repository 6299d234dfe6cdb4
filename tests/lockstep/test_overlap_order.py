"""Chunks of a sequence in order: causal attention runs on the queries of a chunk and the keys so far.

What may be cut so is read from the operator and its mask. It is woven, run as pretend ranks forward
and backward against the module, and its schedules are proven; what looks ahead ends the region.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.passes import ops
from plait.passes.overlap.schedule import COMM, Launch, Wait, schedule
from plait.plan import planner
from plait.plan.planner import Planned
from plait.rules.facts import Pattern
from tests import pretend
from tests.cases import Setup
from tests.cases.blocks import Net, heads, linear, merge
from tests.compare import demand, differences, plain, within
from tests.gloo.prove import free
from tests.lockstep.test_overlap_forced import left_whole, prove

T, H, D = 7, 6, 24  # rows in two, three and four chunks: none of them even
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def decoder(attend: Attend, groups: int = H, batch: int = 1) -> Setup:
    """Two layers of attention and an MLP; `groups` key and value heads."""

    def run(s: Net, x: Tensor) -> Tensor:
        for layer in (s.first, s.second):
            y = layer.norm(x)
            q, k, v = heads(layer.q(y), H), heads(layer.k(y), groups), heads(layer.v(y), groups)
            x = x + layer.o(merge(attend(q, k, v)))
            x = x + layer.down(F.gelu(layer.up(x)))
        return x

    def layer() -> Net:
        narrow = 4 * groups
        return Net(
            print, norm=nn.LayerNorm(12), q=linear(12, D), k=linear(12, narrow), v=linear(12, narrow),
            o=linear(D, 12), up=linear(12, D), down=linear(D, 12),
        )  # fmt: skip

    x = torch.randn(batch, T, 12, requires_grad=True)
    return Setup(Net(run, first=layer(), second=layer()), (x,)).to(torch.float64)


def forced(setup: Setup, count: int) -> Planned:
    """Planned where matmuls alone take time, and every collective a little: residuals stay whole."""
    rates = tuple((name, 1e6) for name in ("float32", "float64"))
    machine = free(2)
    device = replace(machine.device, flops=rates, bandwidth=1e15)
    machine = replace(machine, device=device, levels=(replace(machine.levels[0], latency=1e-4),))
    return planner.make(pretend.trace(setup, True), planner.Options(2, machine, overlap=count))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.size(1) < q.size(1))


def masked(pattern: str) -> Attend:
    mask = Pattern.parse(pattern).allowed(T, T)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask.clone())


def slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal mask with numbers of its own, added to the scores."""
    later = torch.full((T, T), float("-inf")).triu(1)
    slope = torch.arange(1, H + 1)[:, None, None] * torch.arange(T) / 7
    return F.scaled_dot_product_attention(q, k, v, (later + slope).to(q.dtype), scale=0.3)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores have the sequence in two dims, so nothing cuts them."""
    scores = (q @ k.mT).masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, but the keys stand in another order than the queries."""
    return causal(q, k.flip(-2), v.flip(-2))


ORDERED: dict[str, tuple[Attend, int]] = {
    "causal": (causal, H),
    "grouped": (causal, 3),
    "groups that ranks share": (causal, 1),
    "window": (masked("window(3)"), H),
    "blocks": (masked("chunk(3)"), H),
    "slopes": (slopes, H),
}
ENDS: dict[str, Attend] = {
    "both ways": F.scaled_dot_product_attention,
    "band": masked("band(2,1)"),
    "written out": written_out,
    "turned": turned,
}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=() if i % 3 == count - 2 else pytest.mark.full)
        for i, name in enumerate(ORDERED)
        for count in (2, 3, 4)
    ],
)
def test_causal_attention_runs_in_order(name: str, count: int) -> None:
    attend, groups = ORDERED[name]
    setup = decoder(attend, groups)
    planned = forced(setup, count)
    (region,) = planned.chosen
    assert region.ordered and region.name.endswith(" in order")
    inside = [n for n in region.nodes if "attention" in n.name]
    assert len(inside) == 2, "through both layers"
    demand(list(left_whole(planned, 2, count)))
    prove(planned, setup, 2, True, plain(setup), within(dtype=torch.float64))


@pytest.mark.parametrize("name", ENDS)
def test_what_looks_ahead_ends_the_region(name: str) -> None:
    setup = decoder(ENDS[name])
    planned = forced(setup, 3)
    assert planned.chosen
    assert not any(r.ordered or "attention" in n.name for r in planned.chosen for n in r.nodes)
    prove(planned, setup, 2, True, plain(setup), within(dtype=torch.float64))


def test_rows_of_a_batch_need_no_order() -> None:
    """A batch of as many rows as chunks is cut through attention as well, without joining keys."""
    planned = forced(decoder(causal, batch=4), 4)
    (region,) = planned.chosen
    assert not region.ordered and region.most == 4


def test_a_sum_is_on_its_way_while_later_queries_attend() -> None:
    """The sum behind chunk 0's attention starts before chunk 1's attention and is awaited behind it."""
    planned = forced(decoder(causal), 2)
    items = schedule(planned.local(0), 2).items
    attends = [i for i, x in enumerate(items) if isinstance(x, Launch) and "attention" in x.name]
    sums = [i for i, x in enumerate(items) if isinstance(x, Launch) and x.stream == COMM]
    first, second, *_ = attends
    (start,) = [i for i in sums if first < i < second and items[i].collective == "all_reduce"]  # type: ignore[union-attr]
    event = items[start + 1].event  # type: ignore[union-attr]
    (arrival,) = [i for i, x in enumerate(items) if isinstance(x, Wait) and x.event == event]
    assert start < second < arrival


@pytest.mark.parametrize("rows", (1, 3, T))
def test_the_last_queries_see_the_keys_up_to_their_own(rows: int) -> None:
    q, k, v = (torch.randn(2, 3, T, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    want = causal(q, k, v)[..., -rows:, :]
    got = ops.causal_attention(q[..., -rows:, :], k, v, scale=0.5)
    grads = [torch.autograd.grad(y.cos().sum(), (q, k, v)) for y in (got, want)]
    demand(differences(got.detach(), want.detach()))
    demand(differences(grads[0], grads[1]))
