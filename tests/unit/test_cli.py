"""The command line without processes: planning a described machine, and one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait import cli
from plait.plan.plan import Plan

MODULE = """
import torch
from torch import nn
def f():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), (torch.randn(512, 64),)
"""


PLAN = ("plan", "climodel:f", "--cluster", "dgx-h100[2]")


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "climodel.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["plait", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    return code if isinstance(code, int) else 0


def test_plan_and_explain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("climodel:f", "--cluster", "dgx-h100", "--tp", "2", "--pp", "1")
    assert call(monkeypatch, "plan", *words, "--save", "plan.json") == 0
    shown = capsys.readouterr().out
    assert "climodel:f on dgx-h100[2]" in shown
    assert "all weights" in shown
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.tp == 2
    assert json.loads(plan.to_json())["cluster"] == "dgx-h100[2]"
    assert call(monkeypatch, "explain", *words) == 0
    assert "tp=2 pp=1 dp=1 on dgx-h100[2]" in capsys.readouterr().out


def test_collectives_priced_drawn_and_tuned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on = ("--cluster", "dgx-h100[2x8]")
    assert call(monkeypatch, "collectives", "--dry", *on, "--ranks", "8", "--size", "1MiB") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("native", "ring", "parameter_server", "halving_doubling"))
    assert call(monkeypatch, "collectives", "--show", "ring", "--ranks", "3") == 0
    assert "0      2: +1    0: +2    1: +0" in capsys.readouterr().out
    assert call(monkeypatch, "collectives", "tuner-csv", *on) == 0
    rows = [line.split(",") for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert {len(row) for row in rows} == {10}
    for name in ("allreduce", "allgather", "reducescatter", "broadcast", "reduce"):
        mine = [row for row in rows if row[0] == name]
        assert [int(b[1]) for b in mine[1:]] == [int(a[2]) + 1 for a in mine[:-1]]  # no gap
        assert all(row[3] in ("ring", "tree", "nvls") for row in mine)
        assert all(row[4] in ("ll", "ll128", "simple") for row in mine)
        assert {tuple(row[6:8]) for row in mine} == {("2", "16")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("collectives", "--collective", "sum"), "'sum' is none of all_reduce,"),
        (("collectives", "--size", "big"), "'big' is no size"),
        (("collectives", "--show", "ring[0]"), "ring[0]"),
        (("collectives", "tuner-csv", "--cluster", "loopback"), "loopback has no NCCL"),
        (("plan", "climodel:g", "--cluster", "dgx-h100"), "module 'climodel' has no 'g'"),
        (("plan", "climodel:f", "--cluster", "nowhere"), "nowhere"),
        (("plan", "climodel:f", "--cluster", "dgx-h100", "--tp", "some"), "--tp some: a number"),
        ((*PLAN, "--tp", "3", "--pp", "auto"), "the cluster has 2; with 2 ranks these fit: tp=1 pp=2"),
        ((*PLAN, "--micro-batches", "few"), "--micro-batches few: a number, or auto"),
        ((*PLAN, "--dtype", "int8"), "--dtype int8: it takes bfloat16"),
        ((*PLAN, "--save", "no/plan.json"), "--save no/plan.json: is in no folder: there is no no"),
        ((*PLAN, "--save", "."), "--save .: is a folder"),
        (("plan", ":f", "--cluster", "dgx-h100"), "a function is spelled module:function"),
        (("verify", "climodel:f", "--nproc", "2", "--pp", "3"), "--nproc has 2"),
        (("run", "climodel:f", "--nproc", "2", "--algorithm", "fast"), "--algorithm fast: it takes auto, native"),
        (("bench", "--shape", "tiny", "--json", "no/x.json"), "--json no/x.json: is in no folder"),
        (("bench", "--shape", "tiny", "--dtype", "x"), "--dtype x: it takes"),
        (("bench", "--shape", "tiny", "--cluster", "nope"), "no box is called 'nope'"),
    ],
)
def test_a_mistake_is_a_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    assert call(monkeypatch, *words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


def test_rules_and_clusters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "rules") == 0
    assert "scaled_dot_product_attention" in capsys.readouterr().out
    assert call(monkeypatch, "clusters") == 0
    assert "dgx-h100" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "--shape", "tiny", "--tokens", "0"),
        ("bench", "--shape", "tiny", "--chunks", "0"),
        ("calibrate", "--nproc", "1"),
        ("verify", "climodel:f", "--nproc", "0"),
        (*PLAN, "--batch", "0"),
    ],
)
def test_a_number_out_of_range_names_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert call(monkeypatch, *words) == 2
    assert words[-2] in capsys.readouterr().err
