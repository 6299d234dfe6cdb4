"""The proof: every schedule has one, and no broken schedule has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.collectives import COLLECTIVES, Schedule, Transfer, build, names, prove
from plait.collectives.check import Orders, run_programs
from plait.collectives.posting import Add, Copy, Done, Recv, Send, Wait, compile_rank
from plait.errors import ScheduleError

SLOW = settings(max_examples=60)


@st.composite
def spellings(draw: st.DrawFn, most: int = 64) -> str:
    collective = draw(st.sampled_from(COLLECTIVES))
    pieces = draw(st.integers(1, 3))
    if draw(st.booleans()):
        n = draw(st.integers(1, most // 4 if collective == "all_to_all" else most))
        name = draw(st.sampled_from(names(collective)))
        return f"{collective} {name}[{n}]/{pieces}@{draw(st.integers(0, n - 1))}"
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3).filter(lambda s: len(s) > 1))
    inner = [draw(st.sampled_from(names(collective))) for _ in sizes]
    levels = "x".join(map(str, sizes))
    return f"{collective} hierarchical[{levels}: {', '.join(inner)}]/{pieces}"


@SLOW
@given(spellings())
def test_every_schedule_has_a_proof(spelling: str) -> None:
    prove(build(spelling))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_algorithm_at_every_small_n(collective: str) -> None:
    for name in names(collective):
        for n in range(1, 10):
            prove(build(f"{collective} {name}[{n}]"))


@SLOW
@given(spellings(16), st.integers(2, 8), st.booleans())
def test_no_number_of_slots_deadlocks(spelling: str, slots: int, ahead: bool) -> None:
    schedule = build(spelling)
    ranks = range(schedule.n)
    run_programs(schedule, [compile_rank(schedule, r, slots, ahead) for r in ranks], Orders())


# --- what a proof finds out ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 12])
def test_where_one_rank_adds_the_sum_is_rounded_once(n: int) -> None:
    for name in ("one_shot", "two_shot", "parameter_server", "sharded_server"):
        assert prove(build(f"{name}[{n}]")).accumulation == "fp32"
    for name in ("ring", "recursive_doubling", "halving_doubling", "binomial"):
        assert prove(build(f"{name}[{n}]")).accumulation == ("fp32" if n == 2 else "wire")


@pytest.mark.parametrize("n", [3, 4, 5, 7, 8, 12])
def test_whose_bits_depend_on_the_size(n: int) -> None:
    for name in ("one_shot", "two_shot", "parameter_server", "tree", "recursive_doubling"):
        assert prove(build(f"{name}[{n}]/3")).size_free
    assert not prove(build(f"ring[{n}]")).size_free


# --- broken schedules ----------------------------------------------------------------------------


def oracle(schedule: Schedule) -> bool:
    """Does the schedule do what it should? A plain run with counted contributions."""
    held = {
        (rank, chunk): Counter({rank: 1})
        for rank in range(schedule.n)
        for chunk in range(schedule.chunks)
        if schedule.starts_with(rank, chunk)
    }
    for step in schedule.steps:
        arrived: dict[tuple[int, int], Counter[int]] = {}
        for t in step:
            if (t.source, t.chunk) not in held:
                return False
            cell, came = (t.target, t.chunk), held[t.source, t.chunk]
            before = arrived.get(cell, held.get(cell, Counter()))
            arrived[cell] = came + (before if t.op == "add" else Counter())
        held |= arrived
    summed = schedule.collective in ("all_reduce", "reduce_scatter", "reduce")
    everyone = Counter(range(schedule.n))
    return all(
        held.get((rank, chunk)) == (everyone if summed else Counter({schedule.owner(chunk): 1}))
        for rank in range(schedule.n)
        for chunk in range(schedule.chunks)
        if schedule.ends_with(rank, chunk)
    )


def with_steps(schedule: Schedule, steps: list[list[Transfer]]) -> Schedule:
    return replace(schedule, spec=None, steps=tuple(map(tuple, steps)))


def places(schedule: Schedule) -> list[tuple[int, int]]:
    return [(i, j) for i, step in enumerate(schedule.steps) for j in range(len(step))]


def dropped(schedule: Schedule) -> Iterator[Schedule]:
    for i, j in places(schedule):
        steps = [list(step) for step in schedule.steps]
        del steps[i][j]
        yield with_steps(schedule, steps)


def doubled(schedule: Schedule) -> Iterator[Schedule]:
    """The transfer once more: in its own step, and in every other."""
    for i, j in places(schedule):
        for k in range(len(schedule.steps)):
            steps = [list(step) for step in schedule.steps]
            steps[k].append(steps[i][j])
            yield with_steps(schedule, steps)


def redirected(schedule: Schedule) -> Iterator[Schedule]:
    for i, j in places(schedule):
        transfer = schedule.steps[i][j]
        for target in range(schedule.n):
            if target != transfer.target:
                steps = [list(step) for step in schedule.steps]
                steps[i][j] = transfer._replace(target=target)
                yield with_steps(schedule, steps)


def swapped(schedule: Schedule) -> Iterator[Schedule]:
    """Two transfers in each other's step; two of a step with each other's chunk, or target."""
    spots = places(schedule)
    for a, (i, j) in enumerate(spots):
        for k, m in spots[a + 1 :]:
            one, two = schedule.steps[i][j], schedule.steps[k][m]
            pairs = [(two, one)]
            if i == k:
                pairs = [
                    (one._replace(chunk=two.chunk), two._replace(chunk=one.chunk)),
                    (one._replace(target=two.target), two._replace(target=one.target)),
                ]
            for first, second in pairs:
                steps = [list(step) for step in schedule.steps]
                steps[i][j], steps[k][m] = first, second
                yield with_steps(schedule, steps)


def refused(schedule: Schedule) -> bool:
    try:
        prove(schedule)
    except ScheduleError as error:
        return "rank" in str(error) and "chunk" in str(error)
    return False


SMALL = [
    f"{collective} {name}[{n}]"
    for collective in COLLECTIVES
    for name in names(collective)
    for n in (2, 3, 4)
]
SMALL += ["ring[3]/2", "tree[5]", "hierarchical[2x2: ring, one_shot]", "double_tree[5]/2"]


@pytest.mark.parametrize("spelling", SMALL)
def test_a_dropped_or_doubled_transfer_is_refused(spelling: str) -> None:
    schedule = build(spelling)
    for mutate in (dropped, doubled):
        for wrong in mutate(schedule):
            assert refused(wrong), (mutate.__name__, wrong.steps)


@pytest.mark.parametrize("spelling", SMALL)
def test_swapped_and_redirected_transfers_are_refused(spelling: str) -> None:
    """Left out are exactly the mutants that a plain run finds right as well: two turns of a
    pairwise exchange may change places, and a sum may reach its root by another rank."""
    schedule = build(spelling)
    for mutate in (swapped, redirected):
        for other in mutate(schedule):
            if not oracle(other):
                assert refused(other), (mutate.__name__, other.steps)


@SLOW
@given(spellings(12), st.randoms(use_true_random=False))
def test_mutants_of_larger_schedules_are_refused(spelling: str, random: object) -> None:
    schedule = build(spelling)
    spots = places(schedule)
    assume(spots)
    pick = getattr(random, "choice")  # noqa: B009
    (i, j), (k, m) = pick(spots), pick(spots)
    one, two = schedule.steps[i][j], schedule.steps[k][m]
    target = pick(range(schedule.n))
    for change in ("drop", "double", "redirect", "swap"):
        steps = [list(step) for step in schedule.steps]
        if change == "drop":
            del steps[i][j]
        elif change == "double":
            steps[k].append(one)
        elif change == "redirect":
            steps[i][j] = one._replace(target=target)
        else:
            steps[i][j], steps[k][m] = two, one
        mutant = with_steps(schedule, steps)
        if change in ("drop", "double") or not oracle(mutant):
            assert refused(mutant), (change, one, two)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([[(0, 1, 0, "add")]], "rank 0, chunk 0: at the end lacks rank 1"),
        (
            [[(0, 1, 0, "add")], [(1, 0, 0, "add")]],
            "step 1, chunk 0: adds the contribution of rank 0",
        ),
        (
            [[(0, 1, 0, "copy")], [(1, 0, 0, "copy")]],
            "step 1, chunk 0: 1 -> 0 chunk 0 copy: the target",
        ),
        ([[(0, 0, 0, "add")]], "rank 0, step 0, chunk 0: 0 -> 0 chunk 0 add: sends to itself"),
        ([[(0, 2, 0, "add")]], "ranks are 0..1"),
        ([[(0, 1, 3, "add")]], "chunks are 0..0"),
        ([[(0, 1, 0, "add"), (0, 1, 0, "add")]], "rank 1, step 0, chunk 0: is sent twice"),
        ([[(0, 1, 0, "add"), (0, 1, 0, "copy")]], "has several writers"),
    ],
)
def test_the_error_names_rank_step_and_chunk(steps: list[list[tuple]], words: str) -> None:
    made = tuple(tuple(Transfer(*t) for t in step) for step in steps)
    with pytest.raises(ScheduleError) as error:
        prove(Schedule("all_reduce", 2, 1, made))
    assert words in str(error.value)


def test_sums_in_another_order_on_another_rank_are_refused() -> None:
    """Rank 2 adds (0 + 1) + 2 at once; ranks 0 and 1 are sent 0 + (1 + 2)."""
    add, copy = "add", "copy"
    steps = (
        (Transfer(2, 1, 0, add),),
        (Transfer(1, 0, 0, add),),
        (Transfer(0, 1, 0, copy),),
    )
    other = Schedule("all_reduce", 3, 1, steps)
    with pytest.raises(ScheduleError, match="rank 2, chunk 0: at the end lacks"):
        prove(other)
    both = (
        (Transfer(0, 2, 0, add), Transfer(1, 2, 0, add), Transfer(2, 1, 0, add)),
        (Transfer(1, 0, 0, add),),
        (Transfer(0, 1, 0, copy),),
    )
    with pytest.raises(ScheduleError, match="another order"):
        prove(Schedule("all_reduce", 3, 1, both))


# --- broken instructions -------------------------------------------------------------------------


def programs(spelling: str) -> tuple[Schedule, list[list[object]]]:
    schedule = build(spelling)
    return schedule, [list(compile_rank(schedule, rank, 2)) for rank in range(schedule.n)]


def test_waiting_for_the_send_before_posting_the_receive_deadlocks() -> None:
    schedule, wrong = programs("recursive_doubling[2]")
    for program in wrong:
        send = next(i for i in program if isinstance(i, Send))
        program.remove(Done(send.message))
        program.insert(program.index(send) + 1, Done(send.message))
    with pytest.raises(ScheduleError, match=r"deadlock: .*done step 0: 0 .*done step 0: 1 "):
        run_programs(schedule, wrong, Orders())


def test_adding_before_the_wait_is_refused() -> None:
    schedule, wrong = programs("ring[3]")
    wait = next(i for i in wrong[0] if isinstance(i, Wait))
    wrong[0].remove(wait)
    with pytest.raises(ScheduleError, match="rank 0, step 0, chunk 1: is not there in slot 0"):
        run_programs(schedule, wrong, Orders())


def test_writing_what_is_being_sent_is_refused() -> None:
    schedule, wrong = programs("recursive_doubling[2]")
    wrong[0] = [i for i in wrong[0] if not isinstance(i, Done)]
    with pytest.raises(ScheduleError, match="is written while it is sent: step 0: 0 -> 1"):
        run_programs(schedule, wrong, Orders())


def test_receiving_into_what_is_being_sent_is_refused() -> None:
    schedule, wrong = programs("ring[3]")
    copy = next(i for i in wrong[0] if isinstance(i, Recv) and i.message.op == "copy")
    wrong[0].remove(copy)
    wrong[0].insert(1, copy)
    with pytest.raises(ScheduleError, match="is written while it is sent"):
        run_programs(schedule, wrong, Orders())


def test_sending_what_is_being_received_is_refused() -> None:
    schedule, wrong = programs("ring[3]")
    copies = (i.message for i in wrong[0] if isinstance(i, Recv) and i.slot is None)
    passed_on = next(m for m in copies if any(isinstance(i, Send) and i.message.chunks == m.chunks
                                              and i.message.step > m.step for i in wrong[0]))  # fmt: skip
    wrong[0].remove(Wait(passed_on))
    wrong[0].append(Wait(passed_on))
    with pytest.raises(ScheduleError, match=f"is read while it is received: {re.escape(str(passed_on))}"):
        run_programs(schedule, wrong, Orders())


def test_two_messages_in_one_slot_are_refused() -> None:
    schedule, wrong = programs("ring[3]")
    adds = [i for i in wrong[0] if isinstance(i, Recv) and i.slot is not None]
    wrong[0][wrong[0].index(adds[1])] = replace(adds[1], slot=adds[0].slot)
    with pytest.raises(ScheduleError, match="slot 0 still holds another message"):
        run_programs(schedule, wrong, Orders())


def test_receiving_in_another_order_than_it_was_sent_is_refused() -> None:
    schedule, wrong = programs("ring[3]")
    first, second = (i for i in wrong[0] if isinstance(i, Recv) and i.slot is not None)
    a, b = wrong[0].index(first), wrong[0].index(second)
    wrong[0][a], wrong[0][b] = second, first
    with pytest.raises(ScheduleError, match="receives from rank 2 in another order"):
        run_programs(schedule, wrong, Orders())


def mutants(program: Sequence[object]) -> Iterator[tuple[str, list[object]]]:
    """Every instruction left out, doubled, behind the next one, or with another place or operand."""
    for i, line in enumerate(program):
        before, rest = [*program[:i]], [*program[i + 1 :]]
        yield f"{line} left out", [*before, *rest]
        yield f"{line} doubled", [*before, line, line, *rest]
        if rest:
            yield f"{line} late", [*before, rest[0], line, *rest[1:]]
        if isinstance(line, Recv):
            for slot in {None, 0, 1} - {line.slot}:
                yield f"{line} into {slot}", [*before, replace(line, slot=slot), *rest]
        if isinstance(line, Copy):
            yield f"{line} from another slot", [*before, replace(line, slot=line.slot + 1), *rest]
        if isinstance(line, Add):
            yield f"{line} turned", [*before, replace(line, left=line.right, right=line.left), *rest]
            into = "sum" if line.into == "mine" else "mine"
            yield f"{line} into {into}", [*before, replace(line, into=into), *rest]


@pytest.mark.parametrize(
    "spelling",
    ["ring[3]", "tree[3]", "one_shot[3]", "two_shot[3]", "recursive_doubling[2]", "halving_doubling[4]",
     "parameter_server[3]", "all_gather ring[3]", "reduce_scatter ring[3]", "broadcast binomial[4]"],
)  # fmt: skip
def test_a_fault_in_a_program_is_refused_or_changes_nothing(spelling: str) -> None:
    """Whoever takes a mutant must end with the values that the steps promise, and with nothing left open."""
    schedule, right = programs(spelling)
    orders = Orders()
    wanted = run_programs(schedule, right, orders)
    ends = {cell for cell in wanted if schedule.ends_with(*cell)}
    refused = 0
    for rank in range(schedule.n):
        for what, program in mutants(right[rank]):
            try:
                ended = run_programs(schedule, [*right[:rank], program, *right[rank + 1 :]], orders)
            except ScheduleError:
                refused += 1
                continue
            if any(ended.get(cell) != wanted[cell] for cell in ends):
                refused += 1  # by the comparison that a proof ends with
                continue
            assert " late" in what or " into " in what or " turned" in what, f"rank {rank}: {what} passes"
    assert refused > 20


def test_a_sum_that_is_added_to_something_is_refused() -> None:
    """A run takes what lies in the accumulator, and a proof must not take this rank's own."""
    schedule, wrong = programs("ring[2]")
    rank, at = next((r, i) for r in (0, 1) for i, x in enumerate(wrong[r]) if getattr(x, "right", "") == "mine")
    wrong[rank][at] = replace(wrong[rank][at], right="sum")
    with pytest.raises(ScheduleError, match=f"rank {rank}, chunk .: has its sum as what is added"):
        run_programs(schedule, wrong, Orders())


def test_sums_take_their_operands_in_order_of_rank() -> None:
    for rank in range(4):
        adds = [i for i in compile_rank(build("one_shot[4]"), rank) if isinstance(i, Add)]
        order = [adds[0].left, *(add.right for add in adds)]
        ranks = [rank if operand == "mine" else operand.message.source for operand in order]
        assert ranks == [0, 1, 2, 3]
        assert [add.into for add in adds] == ["sum", "sum", "mine"]
