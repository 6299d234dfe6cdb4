"""Cuts of captured programs against every cut there is: at most 5 % above the best possible."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn

from plait.capture import capture
from plait.cluster import Cluster
from plait.mesh import ORDERS, Mesh
from plait.passes.pipeline import split
from plait.plan import planner, staged
from plait.plan.placement import Placement
from plait.plan.stages import Line
from plait.plan.ways import divided

IMBALANCE = 0.05
MACHINE = Cluster.parse("dgx-h100[4]/100gbe")


class Skipping(nn.Module):
    """A way down and a way up; what the way down made is used again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(n, 2 * n) for n in (256, 512, 1024))
        self.up = nn.ModuleList(nn.Linear(2 * n, n) for n in (1024, 512, 256))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            kept.append(x)
            x = layer(x)
        for layer in self.up:
            x = layer(x) + kept.pop()
        return x


class TwoTowers(nn.Module):
    """An encoder, and a decoder that reads its result in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Linear(512, 512) for _ in range(5)))
        self.decoder = nn.ModuleList(nn.Linear(1024, 512) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = self.encoder(x)
        for layer in self.decoder:
            y = layer(torch.cat([y, seen], -1))
        return y


class Tied(nn.Module):
    """One table at both ends, much larger than what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4099, 256)
        self.inner = nn.Sequential(*(nn.Linear(256, 256) for _ in range(5)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(self.table(ids)) @ self.table.weight.t()


def rows(*shape: int) -> Tensor:
    return torch.zeros(shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "skips": (Skipping, (rows(512, 256),)),
    "encoder and decoder": (TwoTowers, (rows(512, 512), rows(512, 512))),
    "tied": (Tied, (torch.zeros(8, 64, dtype=torch.int64),)),
}


def stages(line: Line, bounds: tuple[int, ...], send: Callable[[float], float]) -> list[float]:
    """Seconds of every stage, what it sends counted value by value."""
    n = len(line.items)
    out = []
    for i, j in pairwise(bounds):
        crossing = sum(x.nbytes for at, x in enumerate(line.items[:j]) if x.last >= j > at)
        out.append(sum(x.seconds for x in line.items[i:j]) + (send(crossing) if j < n else 0.0))
    return out


@pytest.mark.parametrize(
    ("name", "pp", "training"),
    [
        pytest.param(name, pp, training, marks=() if (pp - 2 - training) % 3 == i else pytest.mark.full)
        for i, name in enumerate(MODELS)
        for pp in (2, 3, 4)
        for training in (False, True)
    ],
)
def test_no_cut_of_a_program_is_better(name: str, pp: int, training: bool) -> None:
    make, args = MODELS[name]
    with torch.device("meta"):
        model = make()
    program = capture(model, tuple(a.to("meta") for a in args), training=training)
    options = planner.Options(1, MACHINE.subset([0]), overlap="off")
    work = planner.lay(program, options).work(None)
    line = work.line(1.0, planner.collective(options))
    link = Placement(MACHINE, Mesh(1, pp), ORDERS[0]).link
    found = divided(line, link, MACHINE.device.memory, pp, "gpipe", 1, training)
    ways = 2 if training else 1
    legal = [i for i in range(1, len(line.items)) if not line.items[i].joined]
    every = [
        stages(line, (0, *inner, len(line.items)), lambda n: ways * link.seconds(n))
        for inner in combinations(legal, pp - 1)
    ]
    best = min(map(max, every))
    mine = stages(line, found.bounds, lambda n: ways * link.seconds(n))
    assert found.seconds == pytest.approx(mine)
    assert max(mine) <= best * (1 + IMBALANCE)


class Counting(nn.Module):
    """Counts its calls, in what no other operator reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down, self.up = nn.BatchNorm1d(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.up(self.down(self.norm(x))), self.norm.bias


def test_weights_are_where_other_forms_of_call_look_for_them() -> None:
    """What is made again needs its weights where it is read, or in the last stage, which gives it out."""
    program = capture(Counting(), (torch.randn(6, 8),), training=True)
    options = planner.Options(1, MACHINE.subset([0]), overlap="off")
    wish = staged.Wish(2, MACHINE.subset([0, 1]), 1, "gpipe", "off")
    made = staged.make(program, options, wish)
    cut = split(made.planned[0].local(0), made.staged.borders, program.graph)
    homes = [frozenset(stage.weights) for stage in cut]
    assert {"b_norm_num_batches_tracked", "p_norm_bias"} <= homes[1]
    again = staged.make(program, options, wish, homes=homes)
    assert again.staged.firsts == made.staged.firsts
