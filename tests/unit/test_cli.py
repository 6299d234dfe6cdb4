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
def sized(n):
    return nn.Linear(n, n), (torch.randn(2, n),)
def broken():
    return {}["weights"], ()
def lone():
    return nn.Linear(3, 3)
"""


PLAN = ("plan", "climodel:f", "--cluster", "dgx-h100[2]")


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "climodel.py").write_text(MODULE)
    (tmp_path / "cliwrong.py").write_text("x = 1\nimport nowhere_to_be_found\n")
    (tmp_path / "cliodd.py").write_text("def f(:\n")
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
        (("collectives", "--size", "99999TiB"), "4 processes need twice that each, and this machine has"),
        (("collectives", "--dry", "--cluster", "{"), "'{' is no cluster"),
        (("collectives", "--show", "ring[0]"), "ring[0]"),
        (("collectives", "tuner-csv", "--cluster", "loopback"), "loopback has no NCCL"),
        (("plan", "climodel:g", "--cluster", "dgx-h100"), "module 'climodel' has no 'g'"),
        (("plan", "climodel:f", "--cluster", "nowhere"), "nowhere"),
        (("plan", "climodel:MODEL", "--cluster", "dgx-h100"), "module 'climodel' has no 'MODEL'"),
        (("plan", "climodel:nn", "--cluster", "dgx-h100"), "is of type module, and no function"),
        (("plan", "climodel:sized", "--cluster", "dgx-h100"), "argument: 'n': it is called without any"),
        (("plan", "climodel:broken", "--cluster", "dgx-h100"), "climodel.py:9: `return {}[\"weights\"], ()`: KeyError"),
        (("plan", "climodel:lone", "--cluster", "dgx-h100"), "lone() returns Linear"),
        (("plan", "cliwrong:f", "--cluster", "dgx-h100"), "cliwrong.py:2: `import nowhere_to_be_found`: Module"),
        (("plan", "cliodd:f", "--cluster", "dgx-h100"), "cliodd.py:1: `def f(:`: SyntaxError"),
        (("run", "climodel:f", "--prompt", "Why?"), "climodel:f has no tokenizer"),
        (("bench", "--shape", "tiny", "--without", "ring"), "--without 'ring': it takes parameter server, blocking"),
        (("bench", "--shape", "tiny", "--chunks", "2", "--without", "4 chunks"), "overlapped, 2 chunks, floor"),
        (("bench", "climodel:f", "--share", "1/8"), "--share 1/8: of the layers of a --shape"),
        (("collectives", "--size", "0"), "--size 0: there is nothing to send"),
        (("collectives", "--dry", "--size", "0"), "--size 0: there is nothing to send"),
        (("bench", "climodel:f", "--against", "torch"), "written for a --shape, and climodel:f is none"),
        ((*PLAN, "--tp", "2", "--pp", "0"), "--pp 0: a number of ranks from 1, or auto"),
        ((*PLAN, "--micro-batches", "\N{SUPERSCRIPT TWO}"), "a number from 1, or auto"),
        (("collectives", "--show", "ring[4]", "--ranks", "3"), "--ranks 3: ring[4] is one of 4 ranks"),
        (("plan", "climodel:f", "--cluster", "dgx-h100", "--tp", "some"), "--tp some: a number"),
        ((*PLAN, "--tp", "3", "--pp", "auto"), "the cluster has 2; with 2 ranks these fit: tp=1 pp=2"),
        ((*PLAN, "--micro-batches", "few"), "--micro-batches few: a number from 1, or auto"),
        ((*PLAN, "--dtype", "int8"), "--dtype int8: it takes bfloat16"),
        ((*PLAN, "--save", "no/plan.json"), "--save no/plan.json: is in no folder: there is no no"),
        ((*PLAN, "--save", "."), "--save .: is a folder"),
        (("plan", ":f", "--cluster", "dgx-h100"), "a function is spelled module:function"),
        (("verify", "climodel:f", "--nproc", "2", "--pp", "3"), "--nproc has 2"),
        (("run", "climodel:f", "--nproc", "3", "--dp", "2"), "--nproc has 3"),
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


def test_a_mesh_that_cannot_be_is_told_from_one_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--tp 2` alone takes the others of the 8 devices as stages, of which this model has three."""
    assert call(monkeypatch, "plan", "climodel:f", "--cluster", "dgx-h100", "--tp", "2") == 1
    error = capsys.readouterr().err
    assert "no mesh that was asked for can run on dgx-h100[8]; tp=1 pp=1 dp=1 can, on 1 of its" in error
    assert "tp=2 pp=4 dp=1: 4 stages: the model has 3 operators" in error


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
        ("run", "climodel:f", "--nproc", "100000"),
        (*PLAN, "--batch", "0"),
    ],
)
def test_a_number_out_of_range_names_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert call(monkeypatch, *words) == 2
    assert words[-2] in capsys.readouterr().err
