"""Overlap on devices that do not exist: chunked programs equal whole ones, schedules are proven.

Every case is cut by dice, woven with forced chunks, and run as pretend ranks, forward and backward;
the schedules of its ranks are checked together. The checker is shown faults that it must find.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import PlanError, ScheduleError
from plait.passes.overlap.arrange import arranged
from plait.passes.overlap.check import check
from plait.passes.overlap.chunks import Form, covered, cut, spans
from plait.passes.overlap.flow import Flow
from plait.passes.overlap.regions import Region, regions
from plait.passes.overlap.schedule import COMM, Item, Launch, Schedule, Wait, schedule
from plait.passes.overlap.timeline import Span, Timeline
from plait.passes.overlap.weave import weave, within
from plait.plan import overlaps
from plait.plan.plan import Overlapped
from plait.rules.equation import Factor
from tests import pretend
from tests.cases import CASES, Case
from tests.compare import demand, discrepancies, reference

EXACT = [c for c in CASES.values() if c.exact]
NAMES = ("rows 2", "rows 3", "rows 4/0.5", "parts 4", "blocks", "whole")


def chosen(flow: Flow, n: int, count: int, blocks: bool) -> dict[Region, Form]:
    """As many regions as go together, each in `count` chunks, or in blocks where that is legal."""
    out: dict[Region, Form] = {}
    for region in regions(flow, n):
        forms = region.forms([count])
        forms = [f for f in forms if (f.kind == "blocks") == blocks] or forms
        taken = [r for r in out if r.members & region.members]
        if forms and not taken and arranged(flow.program.graph, [*out, region]) is not None:
            out[region] = forms[0]
    return out


def divided(case: Case, n: int, prices: pretend.Prices, count: int, blocks: bool) -> tuple[pretend.Divided, int]:
    program = pretend.trace(case.setup(case.dtypes[-1]), case.training)
    whole = pretend.divide(program, n, prices)
    flow = Flow(program, whole.description, whole.solution.strategies, whole.grads)
    forms = chosen(flow, n, count, blocks)
    return replace(whole, locals=tuple(weave(flow, forms, rank) for rank in range(n))), len(forms)


ALWAYS = [(2, 2, False), (3, 3, False), (2, 4, False), (2, 2, True)]


@pytest.mark.parametrize(
    ("case", "n", "count", "blocks"),
    [
        pytest.param(
            c, n, count, blocks, id=f"{c.id}-{n}-{'blocks' if blocks else count}",
            marks=() if (n, count, blocks) == ALWAYS[i % 4] else pytest.mark.full,
        )
        for i, c in enumerate(EXACT)
        for n in (2, 3)
        for count, blocks in ((2, False), (3, False), (4, False), (2, True))
    ],
)  # fmt: skip
@pytest.mark.sample(3)
def test_chunks_change_nothing(case: Case, n: int, count: int, blocks: bool) -> None:
    setup = case.setup(case.dtypes[-1])
    try:
        woven, _ = divided(case, n, pretend.Dice(n, count), count, blocks)
    except (PlanError, NotImplementedError, RuntimeError) as error:
        if case.right == "R2":
            pytest.skip(f"refused: {error}")
        raise
    want, close = reference(case, setup, case.dtypes[-1])
    for rank, got in enumerate(pretend.run(woven, setup, case.training)):
        demand(discrepancies(got, want, close), about=f"{case.id}, rank {rank} of {n}")
    schedules = [schedule(local, n) for local in woven.locals]
    check([s.twice() for s in schedules])
    for s in schedules:
        assert Schedule.parse(str(s)) == s


# -- chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", (7, 8, 31))
@pytest.mark.parametrize("text", NAMES)
def test_every_row_is_in_one_chunk(size: int, text: str) -> None:
    form = Form.parse(text)
    assert str(form) == text
    ranks = [((lo, hi),) for lo, hi in spans(size, 1 if form.kind == "parts" else 3)]
    assert covered(cut(Factor(size), form, ranks, 1 % len(ranks)))


def test_blocks_begin_with_the_own() -> None:
    ranks = [((0, 3),), ((3, 5),), ((5, 7),)]
    assert cut(Factor(7), Form("blocks"), ranks, 1).rows == (ranks[1], ranks[2], ranks[0])


def test_positions_within() -> None:
    assert within(((0, 3), (6, 9)), ((2, 7),)) == ((2, 4),)
    assert within(((4, 8),), ((0, 4),)) == ()


# -- the checker -------------------------------------------------------------------------------------


def woven() -> list[Schedule]:
    """Two ranks of a block whose sum is reduced in chunks."""
    local = divided(CASES["b01_bias_after_the_sum"], 2, pretend.Free(2), 2, False)[0].locals
    found = [schedule(x, 2) for x in local]
    assert sum(bool(x.collective) for x in found[0].launches) >= 2
    check(found)
    return found


def without(s: Schedule, index: int) -> Schedule:
    return replace(s, items=s.items[:index] + s.items[index + 1 :])


def test_every_dropped_wait_is_found() -> None:
    """One at a time; but of waits that follow each other on a stream the last covers for all."""
    ranks = woven()
    items = ranks[0].items
    waits = [i for i, x in enumerate(items) if isinstance(x, Wait) and not _covered(items, i)]
    assert len(waits) >= 3
    for i in waits:
        with pytest.raises(ScheduleError, match="may read|may still use"):
            check([without(ranks[0], i), ranks[1]])


def _covered(items: tuple[Item, ...], at: int) -> bool:
    behind = [x for x in items[at + 1 :] if x.stream == items[at].stream]
    return not behind or isinstance(behind[0], Wait)


def test_a_slot_used_too_early_is_found() -> None:
    ranks = woven()
    moves = [x for x in ranks[0].launches if x.stream == COMM]
    first, second = moves[0].writes[0], moves[1].writes[0]
    early = f"{first.partition(':')[0]}:{second.partition(':')[2]}"
    text = str(ranks[0]).replace(second, early)
    with pytest.raises(ScheduleError, match="while .* may still use"):
        check([Schedule.parse(text), ranks[1]])


def test_two_collectives_swapped_on_one_rank_are_found() -> None:
    ranks = woven()
    items = list(ranks[1].items)
    a, b, *_ = (i for i, x in enumerate(items) if isinstance(x, Launch) and x.collective)
    items[a], items[b] = items[b], items[a]
    with pytest.raises(ScheduleError, match="collective 0 is .* on rank 1 and"):
        check([ranks[0], replace(ranks[1], items=tuple(items))])


def test_a_collective_that_a_rank_leaves_out_is_a_deadlock() -> None:
    ranks = woven()
    at = next(i for i, x in enumerate(ranks[1].items) if isinstance(x, Launch) and x.collective)
    with pytest.raises(ScheduleError, match="deadlock: rank 0"):
        check([ranks[0], without(ranks[1], at)])


# Three groups of two among three ranks: `own` holds the moves of each rank in the order of launch.
GROUPS = {"a": "0,1", "b": "1,2", "c": "0,2", "d": "0,1"}


def grouped(*own: str, stream: str = "comm") -> list[Schedule]:
    def line(i: int, name: str) -> str:
        on = stream if i % 2 else "comm"
        return f"{on}: {name} = all_reduce[{GROUPS[name]}](x) -> s{i}:{name}"

    end = [f"{s}: record {s}_end\ncompute: wait {s}_end" for s in dict.fromkeys(("comm", stream))]
    texts = ["\n".join(["given: x", *(line(i, n) for i, n in enumerate(names)), *end]) for names in own]
    found = [Schedule.parse(text) for text in texts]
    assert [str(s) for s in found] == texts
    return found


def test_a_collective_that_is_left_open_at_the_end_is_found() -> None:
    ranks = woven()
    last = max(i for i, x in enumerate(ranks[0].items) if isinstance(x, Wait) and x.stream == "compute")
    with pytest.raises(ScheduleError, match="rank 0: move_.* is left open at the end"):
        check([without(ranks[0], last), ranks[1]])


def test_groups_that_overlap_have_one_order() -> None:
    check([s.twice() for s in grouped("acd", "abd", "bc")])
    with pytest.raises(ScheduleError, match="deadlock: rank 0"):
        check(grouped("ac", "ba", "cb"))  # any two agree on what they share
    with pytest.raises(ScheduleError, match="collective 0 is d on rank 1 and a on rank 0"):
        check(grouped("acd", "dba", "bc"))
    with pytest.raises(ScheduleError, match="rank 1: nothing orders a and b"):
        check(grouped("ac", "ab", "bc", stream="other"))


# -- timelines and plans -----------------------------------------------------------------------------


def test_a_timeline_is_lines() -> None:
    line = Timeline((Span("compute", "mm_c0", 0.0, 2e-6), Span("comm", "move_c0", 2e-6, 5e-6)))
    assert Timeline.parse(str(line)) == line
    assert line.exposed == pytest.approx(3e-6)
    top, below, _ = line.gantt(50).splitlines()
    assert top.count("0") == 20 and below.count("0") == 30


@pytest.mark.parametrize("wrong", ("on", 0, -2, True))
def test_overlap_takes_a_few_words(wrong: object) -> None:
    with pytest.raises(PlanError, match="'auto', 'off' or a number"):
        overlaps.check(wrong)  # type: ignore[arg-type]


def test_an_entry_says_why() -> None:
    entry = Overlapped("a..b by f1", "whole", ("move_0",), 2, 1e-6, 1e-6, 1e-6, "too few rows (7)")
    assert "whole" in str(entry) and "too few rows" in str(entry)
