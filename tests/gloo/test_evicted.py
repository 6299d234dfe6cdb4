"""Programs of a module are bounded in number: all ranks drop the same ones at the same call, and what is left of
captured graphs ends before the group does, whose collectives are in them.

There are no CUDA graphs here: what stands for one is held by a program as its graph is, and notes its end.
"""

from __future__ import annotations

import gc
import weakref
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.runtime import graphs, programs
from tests.compare import demand, differences, within
from tests.gloo.harness import Pool

KEPT = 3  # forms of call
ROWS = range(4, 10)


class Captured:
    """Of a program for so many rows."""

    def __init__(self, rows: int, told: list[str]) -> None:
        self.rows, self.told = rows, told
        weakref.finalize(self, told.append, f"{rows} dropped")

    def end(self) -> None:
        self.told.append(f"{self.rows} ended")


def called(group: Any, seed: int) -> tuple[list[str], list[int]]:
    """What became of the graphs of some calls, and of the group's end; the forms that were kept."""
    own = dist.new_group(dist.get_process_group_ranks(group))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
    dice, told = Random(seed), list[str]()
    before, most = dist.ProcessGroup.shutdown, programs.FORMS

    def shutdown(group: dist.ProcessGroup) -> None:
        told.append("shutdown")
        before(group)

    dist.ProcessGroup.shutdown = shutdown  # type: ignore[method-assign, assignment]
    synchronize, torch.cuda.synchronize = torch.cuda.synchronize, lambda: None
    programs.FORMS = KEPT
    gc.collect()
    gc.disable()  # a graph goes with its program, not when a rank happens to look for circles
    try:
        compiled = plait.compile(model, (torch.ones(ROWS[0], 6),), tp=2, group=own, cluster="loopback[2]")
        shelf = compiled._programs._shelves[0]
        known = set[int]()
        for rows in [ROWS[0], *(dice.choice(ROWS) for _ in range(20))]:
            x = torch.randn(rows, 6)
            told.append(f"call {rows}")
            demand(differences(compiled(x), model(x), close=within(dtype=torch.float32)))
            for _, made in shelf.executables:
                if id(made) not in known:
                    known.add(id(made))
                    captured = Captured(rows, told)
                    graphs.end_before(own, captured)
                    object.__setattr__(made, "replay_of_a_test", captured)
                    told.append(f"{rows} captured")
                    del captured
            known &= {id(made) for _, made in shelf.executables}
            del made
        kept = [made.replay_of_a_test.rows for _, made in shelf.executables]
        dist.destroy_process_group(own)
    finally:
        gc.enable()
        programs.FORMS = most
        torch.cuda.synchronize = synchronize
        dist.ProcessGroup.shutdown = before  # type: ignore[method-assign]
    return told[: told.index("shutdown") + 1], kept


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_graphs_go_alike_on_all_ranks_and_before_their_group(pool: Pool, seed: int) -> None:
    (told, kept), other = pool.run(called, 2, seed, timeout=120.0)
    assert other == (told, kept)
    made = [int(x.split()[0]) for x in told if x.endswith("captured")]
    dropped = [int(x.split()[0]) for x in told if x.endswith("dropped")]
    first, *others = made  # the first program has the plan, and stays with its module
    assert len(made) > 2 * KEPT and dropped == others[:-KEPT] and kept == others[-KEPT:]
    alive = 0
    for line in told:
        alive += line.endswith("captured") - line.endswith("dropped")
        assert alive <= KEPT + 2, "a program is made before one is dropped for it"
    assert told[-KEPT - 2 :] == [f"{first} ended", *(f"{rows} ended" for rows in kept), "shutdown"]
    assert sum(x.endswith("ended") for x in told) == KEPT + 1, "those that were dropped are gone"
