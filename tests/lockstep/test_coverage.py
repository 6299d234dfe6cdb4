"""How much of the zoo's matrix products is split by the ordinary plan for a real machine."""

from __future__ import annotations

import pytest

from plait.capture import capture
from plait.cluster import Cluster
from plait.passes.expand import is_random
from plait.passes.rings import fixed
from plait.plan import planner
from tests import coverage, zoo

LEAST = 0.95
OFTEN = ("falcon", "mixtral")  # one key/value head; experts


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.full) for n in zoo.NAMES])
def test_nearly_all_products_are_split(name: str) -> None:
    model, args, kwargs = zoo.build(name)
    program = capture(model, args, kwargs)
    for tp in (2, 3):
        options = planner.Options(tp, Cluster.preset("dgx-h100", tp))
        strategies = planner.make(program, options).strategies
        parts = {
            "bytes of weights": coverage.weights(program, strategies),
            "operations": coverage.products(program, strategies),
        }
        for what, found in parts.items():
            part = coverage.share(found)
            assert part >= LEAST, f"tp={tp}: {part:.1%} of the {what}: {coverage.whole(found)}"


def test_what_is_whole_is_counted() -> None:
    """On one rank nothing is split, and every linear of the model is among what was counted."""
    model, args, kwargs = zoo.build("llama", layers=1)
    program = capture(model, args, kwargs)
    options = planner.Options(1, Cluster.preset("dgx-h100", 1))
    strategies = planner.make(program, options).strategies
    weights, products = coverage.weights(program, strategies), coverage.products(program, strategies)
    linears = {n for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n}
    assert {p.name for p in weights} == linears
    assert sum(p.amount for p in weights) == sum(
        p.numel() * p.element_size() for n, p in model.named_parameters() if n in linears
    )
    tokens = zoo.BATCH * zoo.SEQ
    by_weights = sum(2 * tokens * p.amount // 4 for p in weights)
    heads = 2 * 2 * tokens * zoo.SEQ * 24  # queries by keys and back, 24 wide
    assert sum(p.amount for p in products) == by_weights + heads
    assert coverage.share(weights) == coverage.share(products) == 0


def test_attention_without_dropout_draws_nothing() -> None:
    """A seed would keep a program out of a CUDA graph, and every call would wind generators back."""
    model, args, kwargs = zoo.build("llama")
    program = capture(model, args, kwargs)
    assert any("attention" in str(node.target) for node in program.graph.nodes)
    assert not any(map(is_random, program.graph.nodes))
    assert fixed(program)
