"""The bench's arithmetic, shapes and pictures, without a process group."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch

from plait import cli
from plait.bench import report, shapes
from plait.bench.figures import Timed, figures, hidden, order
from plait.bench.peers import Peers
from plait.errors import InputError
from plait.rules.moves import Cut, Step
from plait.runtime.transport import Still

MS = 1e-3


def timed(name: str, kind: Any, *ms: float, predicted: float | None = None) -> Timed:
    return Timed(name, kind, tuple(x * MS for x in ms), predicted)


ROWS = [
    timed("one device", "alone", 20.0, 22.0, 21.0),
    timed("parameter server", "blocking", 18.0, 18.0, 18.0),
    timed("ring", "blocking", 16.0, 15.0, 17.0, predicted=0.020),
    timed("textbook", "textbook", 17.0),
    timed("overlapped", "overlapped", 13.0, 14.0, 12.0, predicted=0.013),
    timed("floor", "floor", 12.0),
    timed("floor of overlapped", "floor", 12.5),
    timed("DTensor", "peer", 15.0),
]


def test_exposed_hidden_speedup_and_efficiency() -> None:
    found = figures(ROWS, 2)
    assert found.floor == pytest.approx(12 * MS) and found.blocking == pytest.approx(16 * MS)
    ours = found.named("overlapped")
    assert ours.exposed == pytest.approx(1 * MS)
    assert ours.hidden == pytest.approx(3 / 4)  # of the fastest blocking row's 4 ms
    assert ours.speedup == pytest.approx(21 / 13) and ours.efficiency == pytest.approx(21 / 26)
    assert found.named("ring").hidden == pytest.approx(0.0)
    assert found.named("textbook").hidden == pytest.approx(-1 / 4)
    assert found.named("parameter server").exposed == pytest.approx(6 * MS)


def test_a_peer_has_no_floor_of_ours_and_one_device_no_speedup() -> None:
    found = figures(ROWS, 2)
    peer, alone = found.named("DTensor"), found.named("one device")
    assert peer.hidden is None and peer.exposed is None and peer.speedup == pytest.approx(21 / 15)
    assert alone.speedup is None and alone.hidden is None
    assert found.named("floor of overlapped").hidden is None
    assert found.named("floor").efficiency == pytest.approx(21 / 12 / 2), "what could be reached"


def test_deciles_of_few_samples_are_within_them() -> None:
    assert timed("a", "blocking", 10, 12, 30).spread == pytest.approx((10 * MS, 30 * MS))
    low, high = timed("b", "blocking", *range(1, 21)).spread
    assert 1 * MS < low < high < 20 * MS


def test_where_nothing_is_exposed_nothing_can_be_hidden() -> None:
    assert hidden(1.0, blocking=2.0, floor=2.0) is None
    assert hidden(1.0, blocking=None, floor=2.0) is None
    assert hidden(2.5, blocking=3.0, floor=2.0) == pytest.approx(0.5)


def test_predicted_order_counts_pairs_that_lie_apart() -> None:
    a = timed("a", "blocking", 10, 10.1, 10.2, predicted=0.010)
    b = timed("b", "forced", 12, 12.1, 12.2, predicted=0.011)
    c = timed("c", "textbook", 14, 14.1, 14.2, predicted=0.0105)
    near = timed("d", "overlapped", 11.9, 12.1, 12.4, predicted=0.050)
    alone = timed("e", "alone", 30, 30, 30, predicted=0.001)
    assert order([a, b, c, alone]) == (2, 3)  # b and c are the wrong way round
    assert order([b, near]) == (0, 0)


def test_a_table_a_chart_and_lines() -> None:
    run = report.Run("tiny & small", {"tokens": 8}, figures(ROWS, 2), ["async: needs CUDA"])
    assert report.table(run).row_count == len(ROWS)
    assert report.bar(18 * MS, 12 * MS, 18 * MS) == "█" * 16 + "▒" * 8
    lines = report.summary(run)
    assert "overlapped is 1.231x the best blocking row" in lines
    assert "overlapped is 1.154x the best peer (DTensor)" in lines
    assert "predicted against measured: mean error 13%" in lines
    assert "left out: async: needs CUDA" in lines
    picture = ET.fromstring(report.svg([run, run]))
    texts = [e.text for e in picture.iter() if e.tag.endswith("text")]
    assert texts.count("tiny & small") == 2 and "13 ms, 75% hidden" in texts
    told = run.to_dict()
    assert told["blocking"] == pytest.approx(16 * MS) and told["order"] == {"right": 1, "apart": 1}
    rows = told["rows"]
    assert [r["name"] for r in rows] == [r.name for r in ROWS]
    assert rows[4]["hidden"] == pytest.approx(0.75) and len(rows[4]["samples"]) == 3


def test_a_share_keeps_the_hidden_size() -> None:
    part = shapes.named("llama-70b").share(8, 2)
    assert (part.hidden, part.heads, part.groups, part.ffn, part.dim) == (8192, 16, 2, 7168, 128)
    assert shapes.named("llama-70b").share(2, 2) == shapes.named("llama-70b")


@pytest.mark.parametrize(
    ("name", "part", "ranks", "words"),
    [
        ("smollm2-135m", 8, 2, "heads 9, groups 3 do not divide; these fit: 1/2, 1/3, 1/6"),
        ("tiny", 2, 4, "4 ranks hold more than the layer; these fit: 1/4, 1/8, 1/16"),
    ],
)
def test_a_share_that_does_not_divide(name: str, part: int, ranks: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        shapes.named(name).share(part, ranks)


def test_a_shape_that_is_not_known() -> None:
    with pytest.raises(InputError, match="--shape large: no such shape; there are tiny,"):
        shapes.named("large")


def test_several_sizes_behind_one_option() -> None:
    typed = "bench --tokens 8 16 32 --nproc 2 --samples 20"
    spread = "bench --tokens 8 --tokens 16 --tokens 32 --nproc 2 --samples 20"
    assert " ".join(cli._spread(typed.split(), ["--tokens"])) == spread


CUT = Cut(1, 5, (((0, 3),), ((3, 5),)), (((0, 3),), ((3, 5),)))


@pytest.mark.parametrize(
    ("step", "rows", "want"),
    [
        (Step("all_reduce"), 5, 5),
        (Step("gather"), 2, 5),
        (Step("reduce_scatter"), 5, 2),
        (Step("fetch", by=1), 2, 3),
        (Step("deliver", by=1), 3, 2),
        (Step("slice"), 5, 2),
    ],
)
def test_what_would_come_is_finite_and_of_its_size(step: Step, rows: int, want: int) -> None:
    still = Still(None, 1, 2)
    x = torch.randn(3, rows)
    got = still.run(step, x, CUT, "ring")
    assert got.shape == (3, want) and got.isfinite().all() and got.std() > 0
    assert still.run(step, x, CUT, "ring").equal(got), "made once"


def test_trials_of_peers_that_won_come_first_and_slow_ones_last() -> None:
    peers = Peers(torch.device("cuda"), 60.0)
    first = [(form.name, mode) for form, mode in peers._order()]
    assert [mode for _, mode in first[:3]] == ["reduce-overhead"] * 3
    assert [mode for _, mode in first[-3:]] == ["max-autotune"] * 3
    peers.won["DTensor, async"] = "default"
    assert next((f.name, m) for f, m in peers._order()) == ("DTensor, async", "default")
    assert len(peers._order()) == 9 and not peers.left_out
