"""`plait bench` from the command line to its files, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait import cli


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


@pytest.mark.full
def test_forward_and_backward_against_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = bench(monkeypatch, tmp_path, "--tokens", "24", "--train", "--against", "torch")
    (run,) = found["runs"]
    assert [r["name"] for r in run["rows"] if r["kind"] == "peer"] == ["DTensor", "DTensor, sequence"]
    assert run["left_out"] == ["DTensor, async: needs CUDA"]
