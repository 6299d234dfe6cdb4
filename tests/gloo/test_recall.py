"""Plans that are kept from one start to the next: found by what they are made of, and by nothing less."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.plan import joint, planner, staged
from tests.gloo.harness import Pool


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 6))


def starts(group: Any, folder: str, changes: list[dict[str, Any]], spoil: bool = False) -> list[str]:
    """For each start after the first, which differs from it by `changes`: what was planned in it."""
    x, n = torch.ones(4, 8), dist.get_world_size(group)
    options: dict[str, Any] = {"group": group, "cluster": f"loopback[{n}]"}
    want = model()(x)
    with mock.patch.dict(os.environ, {"PLAIT_PLAN_CACHE": folder}):
        first = plait.compile(model(), (x,), **options)
        dist.barrier(group)
        if spoil and dist.get_rank(group) == 0:
            for path in Path(folder).iterdir():
                path.write_text(path.read_text()[:-40])
        out = []
        for change in changes:
            said: list[str] = []
            with watched(said):
                again = plait.compile(model(), (x,), **{**options, **change})
            torch.testing.assert_close(again(x).detach(), want.detach())
            if not change:
                assert again.plan.digest == first.plan.digest
                assert again.explain() == first.explain(), (again.explain(), first.explain())
            out.append(" ".join(said))
            dist.barrier(group)
    return out


@contextlib.contextmanager
def watched(said: list[str]) -> Iterator[None]:
    """Tells what plans: the joint search, the layouts, the stages."""

    def telling(name: str, real: Any) -> Any:
        def tell(*args: Any, **kwargs: Any) -> Any:
            said.append(name)
            return real(*args, **kwargs)

        return tell

    with contextlib.ExitStack() as stack:
        for room, name in ((joint, "search"), (planner, "make"), (staged, "make")):
            stack.enter_context(mock.patch.object(room, name, telling(name, getattr(room, name))))
        yield


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"training": True}], ids=str)
@pytest.mark.sample(2)
def test_a_second_start_plans_nothing(pool: Pool, tmp_path: Path, mesh: dict[str, Any]) -> None:
    changes = [mesh, mesh]
    for planned in pool.run(starts, 2, str(tmp_path), changes):
        assert planned[1] == "", planned
    assert len(list(tmp_path.glob("*.json"))) == 2  # the first of all asked for nothing of `mesh`


def test_what_a_plan_is_made_of_is_in_its_key(pool: Pool, tmp_path: Path) -> None:
    changes = [{}, {"overlap": "off"}, {"measure": False}, {"cluster": "pcie4[2]"}, {"objective": "throughput"}, {}]
    first, *_ = pool.run(starts, 2, str(tmp_path), changes)
    assert [bool(planned) for planned in first] == [False, True, True, True, True, False], first


def test_a_file_that_is_not_whole_is_planned_again(pool: Pool, tmp_path: Path) -> None:
    first, *_ = pool.run(starts, 2, str(tmp_path), [{}], True)
    assert first[0]


def test_a_folder_that_cannot_be_made_keeps_nothing(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, *_ = pool.run(starts, 2, str(tmp_path / "file" / "plans"), [{}])
    assert first[0]


def with_a_plan(group: Any, folder: str) -> int:
    x = torch.ones(4, 8)
    options: dict[str, Any] = {"group": group, "cluster": "loopback[2]"}
    given = plait.compile(model(), (x,), **options).plan
    with mock.patch.dict(os.environ, {"PLAIT_PLAN_CACHE": folder}):
        plait.compile(model(), (x,), plan=given, **options)
    return len(list(Path(folder).iterdir()))


def test_a_plan_that_was_given_is_not_kept(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(with_a_plan, 2, str(tmp_path)) == [0, 0]
