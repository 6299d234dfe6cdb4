"""The pool itself: results, failures, hangs, deaths; and fresh workers afterwards."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.errors import RankError
from tests.gloo.harness import Pool, RanksFailed


def total(group: Any, start: int) -> tuple[int, list[float]]:
    x = torch.full((2,), float(start + dist.get_rank(group)))
    dist.all_reduce(x, group=group)
    return dist.get_rank(group), x.tolist()


def refuse(group: Any) -> None:
    raise KeyError("nothing here")


def fail_on(group: Any, rank: int) -> None:
    if dist.get_rank(group) == rank:
        raise ValueError(f"rank {rank} will not")
    dist.barrier(group)


def die_on(group: Any, rank: int) -> None:
    if dist.get_rank(group) == rank:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
@pytest.mark.sample(2)
def test_results_come_in_order_of_rank(pool: Pool, n: int) -> None:
    expected = float(sum(10 + r for r in range(n)))
    assert pool.run(total, n, 10) == [(r, [expected] * 2) for r in range(n)]


def test_the_same_error_on_every_rank_keeps_the_workers(pool: Pool) -> None:
    pool.run(total, 2, 0)
    before = [w.process.pid for w in pool.workers]
    failures = pool.errors(refuse, 2)
    assert [f.kind for f in failures] == ["KeyError"] * 2
    assert isinstance(failures[0].error, KeyError)
    assert [w.process.pid for w in pool.workers] == before


def ended(group: Any) -> None:
    raise RankError("rank 1 failed: no more")


def test_workers_whose_group_has_ended_are_not_used_again(pool: Pool) -> None:
    pool.run(total, 2, 0)
    before = {w.process.pid for w in pool.workers}
    pool.errors(ended, 2)
    assert pool.run(total, 2, 1) == [(0, [3.0, 3.0]), (1, [3.0, 3.0])]
    assert not before & {w.process.pid for w in pool.workers}


def test_a_failure_shows_every_rank_and_where_the_others_hang() -> None:
    pool = Pool(grace=1.0)
    try:
        with pytest.raises(RanksFailed, match="rank 1 will not") as caught:
            pool.run(fail_on, 2, 1)
        assert [f.kind for f in caught.value.failures] == ["Hung", "ValueError"]
        assert "barrier" in caught.value.failures[0].traceback
        assert pool.run(total, 2, 1) == [(0, [3.0, 3.0]), (1, [3.0, 3.0])]
        with pytest.raises(RanksFailed, match="exit code -9"):
            pool.run(die_on, 2, 0)
    finally:
        pool.close()
