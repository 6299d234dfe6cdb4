"""Mixtures of experts, cut inside every expert (docs/design/0007-experts.md): right for every routing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import pretend, zoo
from tests.cases import Setup
from tests.compare import Run, demand, discrepancies, plain, within
from tests.lockstep.test_zoo import grouped_products_of_any_dtype  # noqa: F401

# What the weights of the routers are multiplied by, and how many of the experts then get no token.
ROUTINGS = {"as made": (1.0, 0), "more on some": (8.0, 0), "all on the same": (0.0, 3)}


def routed(setup: Setup, times: float) -> Setup:
    made = setup.to(torch.float64)
    with torch.no_grad():
        for name, weight in made.model.named_parameters():
            if name.endswith("gate.weight"):
                weight *= times
    return made


def idle(run: Run) -> int:
    """Experts of the first layer that no token came to."""
    found = next(g for n, g in run.gradients.items() if n.endswith("experts.down_proj"))
    return sum(not bool(expert.any()) for expert in found)


@pytest.mark.parametrize(("name", "n"), [("mixtral", 2), ("mixtral", 4), ("qwen3moe", 3)])
@pytest.mark.sample(1)
def test_outputs_and_gradients_whoever_gets_the_tokens(name: str, n: int) -> None:
    setup = Setup(*zoo.build(name))
    divided = pretend.divide(pretend.trace(routed(setup, 1.0), True), n, pretend.Free(n))
    assert any("experts" in weight for weight in divided.split)
    for words, (times, empty) in ROUTINGS.items():
        now = routed(setup, times)
        want = plain(now)
        assert idle(want) == empty, words
        for rank, got in enumerate(pretend.run(divided, now, True)):
            got = replace(got, buffers=want.buffers)
            demand(discrepancies(got, want, within(dtype=torch.float32)), about=f"{words}, rank {rank} of {n}")
