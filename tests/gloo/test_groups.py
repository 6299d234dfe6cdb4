"""Groups that a pipeline makes for its stages, where its ranks are a part of the world."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import plait
from tests.gloo.harness import Pool


def after_other_pasts(group: Any) -> bool:
    """Some ranks have made more groups before, as a user's script may."""
    for _ in range((0, 2, 1, 1)[dist.get_rank(group)]):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 5))
    x = torch.randn(4, 6)
    compiled = plait.compile(model, (x,), tp=2, pp=2, group=group, cluster="loopback[4]")
    torch.testing.assert_close(compiled(x), model(x))
    return True


def test_stages_of_a_part_of_the_world_meet(pool: Pool) -> None:
    pool.run(rank_of, 5)  # a world of more than four
    assert pool.run(after_other_pasts, 4) == [True] * 4


def how_many_groups(group: Any) -> list[int]:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
    x = torch.ones(4, 6)
    counts = []
    for tp, pp in ((2, 2), (2, 2), (4, 1), (2, 2)):
        torch.manual_seed(0)
        compiled = plait.compile(model, (x,), tp=tp, pp=pp, group=group, cluster="loopback[4]")
        torch.testing.assert_close(compiled(x), model(x))
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_a_second_compile_takes_the_groups_of_the_first(pool: Pool) -> None:
    for counts in pool.run(how_many_groups, 4):
        assert len(set(counts)) == 1, counts


def rank_of(group: Any) -> int:
    return dist.get_rank(group)
