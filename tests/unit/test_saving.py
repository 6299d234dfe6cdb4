"""A save that is cut short leaves the last good checkpoint: whole, and the only one that is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.runtime import checkpoint
from plait.runtime.checkpoint import Checkpoint, Spec, write

SPECS = {name: Spec((4, 3), torch.float32) for name in "abc"}
ONE, EACH = 10**6, 48  # bytes of a file: all tensors in one, or one in each


def tensors(value: float) -> Iterator[Tensor]:
    return (torch.full((4, 3), value) for _ in SPECS)


def values(folder: Path) -> set[float]:
    found = Checkpoint(folder)
    assert set(found.specs) == set(SPECS)
    return {v for name in SPECS for v in found.read(name).unique().tolist()}


@pytest.mark.parametrize("before", [ONE, EACH])
@pytest.mark.parametrize("after", [ONE, EACH])
def test_a_save_takes_the_place_of_another(tmp_path: Path, before: int, after: int) -> None:
    for value, shard in ((1.0, before), (2.0, after), (3.0, before), (4.0, before)):
        write(tmp_path, SPECS, tensors(value), shard=shard)
        assert values(tmp_path) == {value}
    files = {p.name for p in tmp_path.iterdir()}
    assert len(files) == (1 if before == ONE else 4), files


class Stop(BaseException):
    """As a signal that nobody handles."""


def stopping(call: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The `at`-th call, and every one after it, stops the process."""
    left = iter(range(at))

    def stop(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise Stop
        return call(*args, **kwargs)

    return stop


def completes(save: Callable[[], Any], patches: pytest.MonkeyPatch, what: str, at: int) -> bool:
    """Whether `save` gets to its end where the `at`-th `what` stops it."""
    with patches.context() as patch:
        if what == "unlink":
            patch.setattr(Path, "unlink", stopping(Path.unlink, at))
        else:
            patch.setattr(checkpoint.os, what, stopping(getattr(os, what), at))
        try:
            save()
        except Stop:
            return False
    return True


@pytest.mark.parametrize("before", [ONE, EACH])
@pytest.mark.parametrize("after", [ONE, EACH])
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("what", ["replace", "unlink", "fsync"])
def test_an_interrupted_save_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int, at: int, what: str
) -> None:
    write(tmp_path, SPECS, tensors(1.0), shard=before)
    done = completes(lambda: write(tmp_path, SPECS, tensors(2.0), shard=after), monkeypatch, what, at)
    assert values(tmp_path) == {2.0} if done else values(tmp_path) in ({1.0}, {2.0})
