"""The sharding program: the optimum of small graphs by brute force, and tying against none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from plait.capture import capture
from plait.errors import LaidError
from plait.plan import planner
from plait.plan.classes import classes
from plait.plan.prices import CostPrices, Rates
from plait.plan.problem import Choice, Key, Problem, build
from plait.plan.sharding import Prices, solve
from plait.rules.aten import table
from plait.rules.describe import describe
from plait.runtime.executor import layouts
from tests.cases.blocks import Net, linear, weight
from tests.gloo import prove

aten = torch.ops.aten


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class Dice:
    """Prices drawn at random, the same for the same question."""

    def __init__(self, seed: int):
        self._random, self._known = random.Random(seed), dict[object, float]()
        self._legal = CostPrices(Rates(1.0, 1.0), lambda kind, nbytes: 0.0, 2)

    def node(self, choice: Choice, index: int) -> float:
        return self._draw((choice.node.name, index))

    def conversion(self, choice: Choice, a: Key, b: Key) -> float | None:
        if self._legal.conversion(choice, a, b) is None:
            return None
        return self._draw((choice.node.name, choice.index, a, b))

    def _draw(self, what: object) -> float:
        return self._known.setdefault(what, self._random.random())


def problem(model: nn.Module, x: Tensor, training: bool = False, n: int = 2) -> Problem:
    program = capture(model.eval(), (x,), training=training)
    return build(program, describe(program, table()), n)


def cost(p: Problem, prices: Prices, chosen: dict[object, int]) -> float:
    """What a choice of strategies costs: nodes, and each conversion of a value once."""
    total = sum(prices.node(c, chosen[node]) for node, c in p.choices.items())
    paid: dict[object, float] = {}
    for e in p.edges:
        a, b = e.have[chosen[e.producer]], e.need[chosen[e.consumer]]
        if a != b:
            price = prices.conversion(p.choices[e.producer].for_result(e.result), a, b)
            if price is None:
                return float("inf")
            paid[e.producer, e.result, a, b] = price
    return total + sum(paid.values())


def brute(p: Problem, prices: Prices) -> float:
    nodes = list(p.choices)
    counts = [range(len(p.choices[n].strategies)) for n in nodes]
    return min(
        cost(p, prices, dict(zip(nodes, pick, strict=True))) for pick in itertools.product(*counts)
    )


@pytest.mark.parametrize("model", [Chain, Fork])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sample(4)
def test_no_choice_is_cheaper_than_the_programs(model: type[nn.Module], seed: int) -> None:
    p, prices = problem(model(), torch.randn(2, 6)), Dice(seed)
    found = solve(p, prices)
    index = {n: p.choices[n].strategies.index(s) for n, s in found.strategies.items()}
    assert found.seconds == pytest.approx(brute(p, prices), rel=1e-6)
    assert cost(p, prices, index) == pytest.approx(found.seconds, rel=1e-6)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Chain() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("training", [False, True])
def test_layers_that_share_their_variables_lose_nothing(training: bool) -> None:
    p = problem(Blocks(), torch.randn(4, 6), training)
    prices = CostPrices.of(p, Rates(1e9, 1e9, 1e-7), lambda kind, nbytes: 1e-6 + nbytes / 1e8)
    tied, untied = solve(p, prices, classes(p)), solve(p, prices)
    assert tied.classes < untied.classes
    assert tied.seconds == pytest.approx(untied.seconds, rel=1e-6)


def test_a_block_is_split_column_then_row_with_one_reduction() -> None:
    p = problem(Chain(), torch.randn(64, 6))
    prices = CostPrices.of(p, Rates(1e6, 1e6, 1e-9), lambda kind, nbytes: 1e-6 + nbytes / 1e9)
    chosen = {n.name: s.label for n, s in solve(p, prices).strategies.items()}
    splits = {chosen[f"p_{name}_weight"] for name in ("up", "down")}
    assert len(splits) == 1
    assert splits.pop().startswith("split(")


class Columns(nn.Module):
    """Five columns that are one factor, or two, as the call has it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)

    def forward(self, x: Tensor, first: int) -> Tensor:
        y = self.up(x)
        return torch.cat([y[:, :first].tanh(), y[:, first:].cos()], -1) if first else y


def test_weights_that_another_form_of_call_cannot_take_are_named_as_the_models() -> None:
    options = planner.Options(2, prove.free(2))
    one, two = (capture(Columns(), (torch.randn(4, 6), first)) for first in (0, 1))
    held = layouts(planner.make(one, options).local(0))
    with pytest.raises(LaidError, match=r"up\.weight as it is loaded \(rows 0:3 \| 3:5 of dim 0\), up\.bias as"):
        planner.make(two, options, held)


def _eighths(s: Net, x: Tensor) -> Tensor:
    y = s.up(x).relu() @ s.down
    return y.to(torch.float8_e4m3fn).to(y.dtype) @ s.out  # type: ignore[no-any-return]


@pytest.mark.parametrize("training", [False, True])
def test_values_of_eight_bits_are_moved_and_never_summed(training: bool) -> None:
    """No device adds them; nor are their gradients, which have their dtype."""
    model = Net(_eighths, up=linear(8, 12), down=weight(12, 8), out=weight(8, 6))
    program = capture(model, (torch.randn(5, 8),), training=training)
    problem = build(program, describe(program, table()), 2)
    (cast,) = (c for c in problem.choices.values() if c.dtypes == (torch.float8_e4m3fn,))
    kinds = {layout.kind for s in cast.strategies for layout in s.results}
    assert kinds == {"whole", "shard"}


@pytest.mark.parametrize(
    ("end", "carried"),
    [
        (lambda y, x: y / 3, True),
        (lambda y, x: y * torch.arange(6.0), True),
        (lambda y, x: y / torch.arange(1.0, 7.0), True),
        (lambda y, x: y * x, True),
        (lambda y, x: y / 0.0, False),
        (lambda y, x: y * torch.inf, False),
        (lambda y, x: y / torch.arange(6.0), False),
        (lambda y, x: y / x, False),
        (lambda y, x: y * torch.where(x > 0, 2.0, x), True),
        (lambda y, x: y * torch.where(x > 0, 1.0, torch.inf), False),
        (lambda y, x: y * torch.where(x > 0, x, -torch.inf), False),
        (lambda y, x: y * x.masked_fill(x > 0, torch.inf)[:, None].view(2, 6), False),
        (lambda y, x: y * x.rsqrt().sum(-1, keepdim=True).reciprocal()[:, :1].expand(2, 6), False),
    ],
)
def test_parts_of_a_sum_are_scaled_by_what_is_finite(end: Callable[..., Tensor], carried: bool) -> None:
    down = linear(6, 6, False)
    p = problem(Net(lambda s, x: end(s.down(x), x), down=down), torch.randn(2, 6))
    scaled = [c for c in p.choices.values() if c.node.target in (aten.mul.Tensor, aten.div.Tensor)]
    assert any("carry(0)" in s.label for s in scaled[-1].strategies) == carried
