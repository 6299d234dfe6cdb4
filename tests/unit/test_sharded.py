"""Sharded checkpoints without processes: rows, interrupted saves, and folders that are pickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import plait
from plait.errors import WeightError
from plait.runtime.checkpoint import Part, Spec, take, whole
from plait.runtime.sharded import Index, Piece, write_index, write_shard
from tests.unit.test_saving import completes

SHAPE = (6, 5)


@st.composite
def cuts(draw: Any) -> list[Part]:
    """Of a matrix: the rows of each of some ranks, along one dim, in one range or several."""
    dim, ranks = draw(st.integers(0, 1)), draw(st.integers(1, 4))
    owner = draw(st.lists(st.integers(0, ranks - 1), min_size=SHAPE[dim], max_size=SHAPE[dim]))
    parts = []
    for rank in range(ranks):
        rows = tuple((i, i + 1) for i, r in enumerate(owner) if r == rank)
        part = list(whole(SHAPE))
        part[dim] = rows
        if rows:
            parts.append(tuple(part))
    return parts


@settings(max_examples=60)
@given(cuts(), cuts())
def test_rows_of_one_mesh_are_read_by_another(
    tmp_path_factory: pytest.TempPathFactory, saved: list[Part], wanted: list[Part]
) -> None:
    folder = tmp_path_factory.mktemp("sharded")
    x = torch.arange(30.0).view(SHAPE)
    told = []
    for rank, part in enumerate(saved):
        piece = Piece(Spec(SHAPE, x.dtype), part, take(x, part))
        told.append((write_shard(folder, 1, rank, {"model/x": piece}), {"model/x": piece.said()}))
    write_index(folder, told, None)
    index = Index.of(folder)
    for part in (*wanted, whole(SHAPE)):
        assert torch.equal(index.read("model/x", part), take(x, part))


def trained(steps: int) -> tuple[plait.Compiled, torch.optim.Optimizer]:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    parts = plait.compile(nn.Linear(3, 2), (x,), tp=1, training=True, measure=False)
    optimizer = torch.optim.Adam(parts.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        parts(x).pow(2).sum().backward()
        optimizer.step()
    return parts, optimizer


@pytest.mark.parametrize(
    ("at", "what"),
    [
        pytest.param(at, what, marks=() if i == at else pytest.mark.full)
        for i, what in enumerate(("replace", "fsync", "unlink"))
        for at in range(3)
    ],
)
@pytest.mark.sample(1)
def test_an_interrupted_save_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, at: int
) -> None:
    old, optimizer = trained(1)
    old.save(tmp_path, optimizer)
    new, news = trained(3)
    done = completes(lambda: new.save(tmp_path, news), monkeypatch, what, at)
    read, optimizer = trained(0)
    read.load(tmp_path, optimizer)
    (step,) = {s["step"].item() for s in optimizer.state.values()}
    assert step in ({3.0} if done else {1.0, 3.0})
    want = dict((old if step == 1.0 else new).state_dict())
    assert all(torch.equal(v, want[n]) for n, v in read.state_dict().items())
    new.save(tmp_path, news)  # what the interrupted one left is in nobody's way
    assert len(list(tmp_path.glob("shard-*"))) == 1 and len(list(tmp_path.iterdir())) == 2


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    x = torch.ones(SHAPE)
    half: Part = (((0, 3),), ((0, 5),))
    piece = Piece(Spec(SHAPE, x.dtype), half, take(x, half))
    file = write_shard(tmp_path, 1, 0, {"model/x": piece})
    write_index(tmp_path, [(file, {"model/x": piece.said()})], None)
    with pytest.raises(WeightError, match="model/x has 15 of the 30 elements"):
        Index.of(tmp_path).read("model/x")
    (tmp_path / file).unlink()
    with pytest.raises(WeightError, match="names files that are not there: shard-1-00000"):
        Index.of(tmp_path)


def test_pickled_folders_are_read_only_when_trusted(tmp_path: Path) -> None:
    parts, _ = trained(1)
    state = {f"model.{n}": v * 2 for n, v in parts.state_dict().items()} | {"step": 7}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(WeightError, match="trusted=True"):
        parts.load(tmp_path)
    with pytest.raises(WeightError, match="the source has them all under 'model.'"):
        parts.load(tmp_path, trusted=True)
    parts.load(tmp_path, trusted=True, prefix="model.")
    assert all(torch.equal(v, state[f"model.{n}"]) for n, v in parts.state_dict().items())
