"""`plait bench` from the command line to its files, on two ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from plait import cli
from plait.bench.apart import Apart, told
from plait.errors import RankError
from plait.runtime.processes import launch


def bench(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> dict[str, Any]:
    files = ("--json", str(folder / "b.json"), "--svg", str(folder / "b.svg"))
    few = ("--layers", "1", "--samples", "3", "--warmup", "1", "--nproc", "2")
    monkeypatch.setattr("sys.argv", ["plait", "bench", "--shape", "tiny", *few, *words, *files])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    assert (folder / "b.svg").read_text().startswith("<svg")
    found: dict[str, Any] = json.loads((folder / "b.json").read_text())
    return found


BLOCKING = ["parameter server", "blocking ring", "blocking native", "blocking best algorithm"]


def test_every_row_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    found = bench(monkeypatch, tmp_path, "--tokens", "24", "--share", "1/4")
    assert found["ranks"] == 2 and [run["tokens"] for run in found["runs"]] == [24]
    for run in found["runs"]:
        rows = {row["name"]: row for row in run["rows"]}
        assert list(rows)[:5] == ["one device", *BLOCKING]
        assert {"textbook", "overlapped", "floor"} <= set(rows) and not run["wrong"]
        for name, row in rows.items():
            assert len(row["samples"]) == 3 and row["seconds"] > 0
            assert row["p10"] <= row["seconds"] <= row["p90"]
            if row["kind"] not in ("alone", "floor"):
                assert row["efficiency"] == pytest.approx(row["speedup"] / 2)
                assert row["exposed"] == pytest.approx(row["seconds"] - run["floor"])
                assert row["error"] < 1e-3, name
        assert rows["parameter server"]["note"] == "parameter_server"
        assert rows["overlapped"]["note"] == "all whole: transfers take the cores that compute"
    assert found["environment"]["NCCL_MAX_CTAS"] == "8" and "PATH" not in found["environment"]


@pytest.mark.full
def test_forward_and_backward_against_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = bench(monkeypatch, tmp_path, "--tokens", "24", "--train", "--against", "torch")
    (run,) = found["runs"]
    assert [r["name"] for r in run["rows"] if r["kind"] == "peer"] == ["DTensor", "DTensor, sequence"]
    assert run["left_out"] == ["DTensor, async: needs CUDA"]


def work(how: str) -> Callable[[str], list[str]]:
    """What is opened on two ranks: well, or as a kernel that fails or waits for ever would have it."""
    befalls(how)

    def answer(what: str) -> list[str]:
        befalls(what)
        return told(f"{what} {dist.get_rank() + 7}")

    return answer


def befalls(how: str) -> None:
    if dist.get_rank() == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1 and how == "raises":
        raise ValueError("no such mode")
    if how == "hangs":
        time.sleep(600)


def tries(out: str) -> None:
    said: list[Any] = []
    for how, asked in (("raises", ()), ("well", ("now", "again", "dies")), ("well", ("hangs",))):
        try:
            far = Apart.start(work, how, seconds=60.0)
            for what in asked:
                said.append(far.ask(what, 2.0 if what == "hangs" else 60.0))
        except RankError as error:
            said.append(str(error))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(said))
    dist.barrier()


@pytest.mark.full
def test_what_is_done_apart_takes_no_rank_with_it(tmp_path: Path) -> None:
    launch(tries, 2, str(tmp_path / "said"))
    raised, now, again, died, hung = json.loads((tmp_path / "said").read_text())
    assert "rank 1: ValueError: no such mode" in raised  # rank 0 may say that it lost rank 1
    assert (now, again) == (["now 7", "now 8"], ["again 7", "again 8"])
    assert "rank 1: " in died and "SIGKILL" in died
    assert hung == "not done after 2 s"


def leaves() -> None:
    Apart.start(work, "well", seconds=60.0)
    raise ValueError("the rank's own")


@pytest.mark.full
def test_a_rank_that_fails_leaves_nothing_apart() -> None:
    with pytest.raises(RankError, match="ranks 0, 1 of 2 raised ValueError: the rank's own"):
        launch(leaves, 2)
