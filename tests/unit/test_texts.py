"""Texts and JSON that somebody has written by hand: what is meant, or a PlaitError; no other exception."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plait.capture import capture
from plait.cluster import Cluster, stored
from plait.errors import ClusterError, InputError, PlaitError, PlanError
from plait.passes import schedule as orders
from plait.passes.overlap import chunks, races, schedule, timeline
from plait.passes.rings import Route
from plait.plan import planner
from plait.plan.measured import Measured
from plait.plan.plan import Choice, Plan
from plait.program import Program
from plait.rules.facts import Pattern
from plait.timeline import Timeline

ODD: tuple[Any, ...] = ([], {}, None, "x", -1, [[1]], {"a": 1}, True, 1.5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))  # type: ignore[no-any-return]


@cache
def planned() -> tuple[Program, Plan, planner.Options]:
    options = planner.Options(2, Cluster.of("loopback").subset(range(2)), overlap=2)
    program = capture(nn.Sequential(Block(), Block()), (torch.randn(8, 16),), {}, training=True)
    return program, planner.make(program, options).plan, options


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value within, of the first two of a list."""
    yield path
    inner = data.items() if isinstance(data, dict) else list(enumerate(data))[:2] if isinstance(data, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    data = copy.copy(data)
    data[path[0]] = changed(data[path[0]], path[1:], value)
    return data


def test_a_plan_with_a_value_of_another_type_is_refused_by_its_place() -> None:
    program, plan, options = planned()
    data = json.loads(plan.to_json())
    assert Plan.from_json(json.dumps(data)) == plan and plan.overlaps and plan.collectives
    refused = 0
    for path in places(data):
        for value in ODD:
            try:
                odd = Plan.from_json(json.dumps(changed(data, path, value)))
                planner.replay(program, odd, options).local(0)
            except PlaitError:
                refused += 1
    assert refused > 500
    with pytest.raises(PlanError, match=r"no plan: collectives\.0\.nbytes is \"many\", and should be a whole number"):
        Plan.from_json(json.dumps(changed(data, ("collectives", 0, "nbytes"), "many")))
    with pytest.raises(PlanError, match="no plan: it has, as nothing of its kind does, colour"):
        Plan.from_json(json.dumps(data | {"colour": "red"}))
    odd = Plan.from_json(json.dumps(changed(data, ("overlaps", 0, "form"), "rows none")))
    with pytest.raises(PlaitError, match="'rows none' is no form of chunks; one reads like whole"):
        planner.replay(program, odd, options)


def test_a_calibration_with_a_value_of_another_type_is_refused() -> None:
    cluster, row = Cluster.of("loopback").subset(range(2)), stored.Measured("ring[2]", 64, 1e-5)
    right = stored.Calibration(cluster, "2024-05-01", "host", "2.13", "by rows", 0.1, 0.2, (row,))
    data = json.loads(right.to_json())
    assert stored.Calibration.from_json(right.to_json()) == right
    for path in places(data):
        for value in ODD:
            with contextlib.suppress(PlaitError):
                stored.Calibration.from_json(json.dumps(changed(data, path, value)))
    for path in (("date",), ("error",), ("rows",), ("rows", 0), ("rows", 0, "nbytes"), ("cluster",), ()):
        with pytest.raises(ClusterError, match="is no calibration|is no cluster"):
            stored.Calibration.from_json(json.dumps(changed(data, path, None)))


@pytest.mark.parametrize("text", ["", "window", "window(,)", "band(1)", "causal(3)", "causal(+-3)", "diagonal"])
def test_a_mask_that_does_not_read_is_named(text: str) -> None:
    with pytest.raises(InputError, match="is no mask; one reads like full"):
        Pattern.parse(text)


def test_a_mask_is_read_back_whichever_way_its_rows_are_moved() -> None:
    for offset in (-3, 0, 3):
        assert all(Pattern.parse(str(p)) == p for p in (Pattern("causal", (), offset), Pattern("band", (1, 2), offset)))


TEXTS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "trace": ("compute: mm ?f (r0:0-256) -> r1:0-9 !g\ncompute: record e0\npulls: wait e0", races.parse),
    "span": ("r0.3:512-1024", races.Span.parse),
    "launches": ("given: x\ncompute: f(x) -> a\ncomm: m = all_reduce[0,1](a) -> s0:m", schedule.Schedule.parse),
    "timeline of a region": ("compute: linear_c0 0.00 12.50\ncomm: move_c0 12.50 20.00", timeline.Timeline.parse),
    "form": ("parts 4/1.5", chunks.Form.parse),
    "route": ("0.5 in 2, 1 late", Route.parse),
    "order": ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", lambda text: orders.parse(text, 2)),
    "plan": ("", Plan.from_json),
    "choice": ("", Choice.from_json),
    "measurement": ("", Measured.from_json),
    "events": ("end 5.0e-06\n0.0e+00 5.0e-06 rank 0 comm | m", Timeline.parse),
}


def test_the_texts_themselves_are_read() -> None:
    assert all(parse(text) is not None for text, parse in TEXTS.values() if text)


@pytest.mark.parametrize("kind", TEXTS)
@given(data=st.data())
def test_a_text_with_something_else_in_it_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    text, parse = TEXTS[kind]
    begin, end = sorted(data.draw(st.integers(0, len(text))) for _ in range(2))
    put = data.draw(st.text(st.sampled_from("0129-.,:/ \n()[]!?FBW>eax~"), max_size=4))
    odd = text[:begin] + put + text[end:]
    with contextlib.suppress(PlaitError):
        parse(odd)
