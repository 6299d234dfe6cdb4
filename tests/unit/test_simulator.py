"""Simulation: contention that nobody wrote down, thousands of ranks in seconds, timelines that parse."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster import Cluster, Level, Protocol, Transport
from plait.cluster.presets import DEVICES
from plait.cluster.software import STEPWISE
from plait.collectives.algorithms import build, names
from plait.collectives.ledger import ledger
from plait.collectives.schedule import COLLECTIVES, Spec
from plait.cost.comm import price
from plait.cost.flow import flow, flow_of, wide
from plait.cost.simulator import simulate
from plait.errors import CollectiveError, InputError, ScheduleError
from plait.timeline import Event, Task, Timeline, play


def flat(n: int, *outer: Level, fused: bool = True, add: float = 0.0) -> Cluster:
    by = Transport("test", (Protocol("p"),), STEPWISE, fused=fused, add=add)
    return Cluster("flat", DEVICES["cpu"], (Level("wire", n, 1e9, 1e-6), *outer), (by,))


# --- against the price ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("algorithm", names("all_reduce"))
@pytest.mark.parametrize("nbytes", [840, 840 * 2**10, 840 * 2**16])
def test_price_and_events_agree_where_nothing_contends(algorithm, n, nbytes):
    """The same; crossing trees within 7 %; in pieces, whose order the price simplifies, 0.9 to 1.4."""
    cluster = flat(n)
    whole = price("all_reduce", nbytes, range(n), cluster, f"{algorithm}[{n}]")
    near = 0.07 if algorithm == "double_tree" else 0.006
    assert simulate(f"{algorithm}[{n}]", nbytes, cluster).end == pytest.approx(
        whole.seconds, rel=near
    )
    best = price("all_reduce", nbytes, range(n), cluster, algorithm)
    assert 0.9 < best.seconds / simulate(best.detail, nbytes, cluster).end < 1.4


@pytest.mark.parametrize(
    "spelling", ["ring[16]", "hierarchical[2x8: ring, two_shot]", "two_shot[16]"]
)
@pytest.mark.parametrize("nbytes", [2**10, 2**20, 2**26])
def test_price_and_events_agree_over_two_levels(spelling, nbytes):
    cluster = Cluster.parse("dgx-h100[2x8]")
    found = simulate(spelling, nbytes, cluster, transport="nccl").end
    wanted = price("all_reduce", nbytes, range(16), cluster, spelling, transport="nccl").seconds
    assert wanted == pytest.approx(found, rel=0.05)


@settings(max_examples=40)
@given(
    n=st.integers(2, 9),
    algorithm=st.sampled_from(names("all_reduce")),
    pieces=st.integers(1, 3),
    nbytes=st.integers(1, 10**7),
)
def test_no_run_beats_the_bound_and_both_engines_move_the_same_bytes(n, algorithm, pieces, nbytes):
    cluster, spec = flat(n), str(Spec(algorithm, (n,), pieces=pieces))
    events = simulate(spec, nbytes, cluster)
    steps = simulate(spec, nbytes, cluster, engine="steps")
    least = price("all_reduce", nbytes, range(n), cluster, spec).bound_seconds
    assert events.end >= 0.99 * least
    assert steps.end >= 0.99 * least
    assert sum(events.loads.values()) == pytest.approx(sum(steps.loads.values()), rel=1e-6)


# --- contention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8, 16, 64])
def test_the_parameter_servers_master_saturates_by_itself(n):
    size = 10**8  # a tenth of a second on one port
    found = simulate(f"parameter_server[{n}]", size, flat(n))
    assert found.end == pytest.approx(2 * (n - 1) * size / 1e9, rel=0.001)
    assert found.loads["wire 0 in"] == found.loads["wire 0 out"] == (n - 1) * size
    assert found.busiest.startswith("wire 0")


def test_hosts_with_one_port_share_it():
    size, hosts = 8 * 10**6, 2
    many = flat(4, Level("net", hosts, 1e9, 1e-6))
    one = flat(4, Level("net", hosts, 1e9, 1e-6, ports=1))
    spelling = "all_to_all two_shot[8]"
    free, shared = (simulate(spelling, size, cluster).end for cluster in (many, one))
    # 4 ranks send 4 blocks of an eighth each out of the host; over 4 ports, or all over one
    assert free == pytest.approx(max(3, 4) / 8 * size / 1e9, rel=0.01)
    assert shared == pytest.approx(16 / 8 * size / 1e9, rel=0.01)


def test_a_bus_is_shared_by_all():
    level = Level("wire", 4, 1e9, 1e-6, total=1e9)
    bus = replace(flat(4), levels=(level,))
    found = simulate("ring[4]", 4 * 10**6, bus)
    assert found.end == pytest.approx(6 * 4 * 10**6 / 1e9, rel=0.01)  # 2(N-1)S, all of it
    assert found.busiest == "wire bus 0"


def test_ranks_choose_the_links():
    hosts = Cluster.parse("dgx-h100[2x8]")
    near = simulate("ring[2]", 2**26, hosts, ranks=[0, 1], transport="nccl")
    far = simulate("ring[2]", 2**26, hosts, ranks=[0, 8], transport="nccl")
    assert far.end > 4 * near.end
    assert all("ib-ndr" in link for link in far.loads)


def test_additions_take_their_time():
    size, add = 10**6, 2e-9
    fused = simulate("parameter_server[4]", size, flat(4)).end
    slow = simulate("parameter_server[4]", size, flat(4, fused=False, add=add)).end
    assert slow - fused == pytest.approx(3 * size * add, rel=0.01)


@pytest.mark.parametrize(
    "spelling", ["ring[5]", "tree[6]/3", "all_gather two_shot[4]", "halving_doubling[6]"]
)
def test_loads_are_the_ledgers(spelling):
    schedule = build(spelling)
    size = 12_347  # divides by nothing
    counted = ledger(schedule, size)
    loads = simulate(schedule, size, flat(schedule.n)).loads
    for rank in range(schedule.n):
        assert loads.get(f"wire {rank} out", 0) == counted.sent[rank]
        assert loads.get(f"wire {rank} in", 0) == counted.received[rank]


# --- thousands of ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "levels", "spelling"),
    [
        ("ring", (5,), "ring[5]"),
        ("parameter_server", (6,), "parameter_server[6]"),
        ("tree", (7,), "tree[7]"),
        ("hierarchical", (3, 4), "hierarchical[3x4: ring, ring]"),
        ("hierarchical", (1, 4), "ring[4]"),
    ],
)
def test_wide_schedules_are_the_schedules(algorithm, levels, spelling):
    assert transfers(wide(algorithm, levels)) == transfers(flow(build(spelling)))


def transfers(made):
    steps = []
    for stage in made.stages():
        of = np.arange(len(stage.route.source)) if stage.of is None else stage.of
        ends = stage.route.source[of], stage.route.target[of], stage.chunk, stage.adds[of]
        steps.append(sorted(zip(*(a.tolist() for a in ends), strict=True)))
    return steps


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n", [2, 3, 6, 8])
def test_a_flow_has_the_transfers_of_its_schedule(collective, n):
    specs = [Spec(name, (n,), collective, pieces=p) for name in names(collective) for p in (1, 3)]
    if n == 6:
        specs.append(Spec("hierarchical", (2, 3), collective, ("ring", "two_shot")))
    for spec in specs:
        schedule, made = build(spec), flow_of(spec)
        steps = [sorted((a, b, c, op == "add") for a, b, c, op in step) for step in schedule.steps]
        assert transfers(made) == steps == transfers(flow(schedule)), str(spec)
        places = {(a, c) for step in steps for a, _, c, _ in step}
        places |= {(b, c) for step in steps for _, b, c, _ in step}
        assert made.held.tolist() == sorted(a * made.chunks + c for a, c in places), str(spec)


@pytest.mark.full
def test_thousands_of_ranks_take_seconds():
    big = Cluster.preset("dgx-h100", 4096)
    begin = time.process_time()
    hierarchical = simulate(
        wide("hierarchical", (512, 8)), 2**30, big, transport="nccl", record=False
    )
    tree = simulate(wide("tree", (4096,)), 2**30, big, transport="nccl", record=False)
    server = simulate(wide("parameter_server", (4096,)), 2**20, big, transport="nccl", record=False)
    assert time.process_time() - begin < 30
    ports = 8 * 50e9 * 0.96 * 0.74
    assert hierarchical.end > 2 * 511 / 512 * 2**30 / ports
    assert tree.end > hierarchical.end
    assert server.busiest == "ib-ndr 0.0 in" or server.busiest == "ib-ndr 0.0 out"


def test_what_has_no_wide_form_says_what_has():
    with pytest.raises(ScheduleError, match="hierarchical"):
        wide("double_tree", (4096,))
    with pytest.raises(CollectiveError, match="steps"):
        simulate(wide("ring", (4,)), 1, flat(4), engine="events")
    with pytest.raises(CollectiveError, match="8 ranks and is to run on 4"):
        simulate("ring[8]", 1, flat(4))
    with pytest.raises(CollectiveError, match="no transport mpi"):
        simulate("ring[4]", 1, flat(4), transport="mpi")


# --- timelines ------------------------------------------------------------------------------------


def test_a_timeline_parses_back():
    made = simulate("ring[3]/2", 6000, flat(3)).timeline
    assert len(made.events) == 3 * 2 * 2 * 2
    again = Timeline.parse(str(made))
    assert str(again) == str(made)
    assert again.lanes == ("rank 0", "rank 1", "rank 2")
    assert made.events[0].name == "step 0: 0 -> 1 chunk 4 add" or "add" in made.events[0].name


@pytest.mark.parametrize("line", ["", "1 2 lane", "a b lane | x", "1 | x"])
def test_what_is_no_event_is_refused(line):
    with pytest.raises(InputError, match="begin end lane"):
        Event.parse(line)


def test_a_lane_runs_in_order_and_waits():
    made = play(
        [
            Task("a", "compute", 2.0),
            Task("b", "compute", 1.0),
            Task("send a", "comm", 3.0, after=("a",)),
            Task("c", "compute", 1.0, after=("send a",)),
        ]
    )
    assert {e.name: (e.begin, e.end) for e in made.events} == {
        "a": (0, 2),
        "b": (2, 3),
        "send a": (2, 5),
        "c": (5, 6),
    }
    assert made.end == 6
    assert made.busy("compute") == 4
    assert made.exposed("comm", under=["compute"]) == pytest.approx(2)
    assert made.utilisation("comm") == pytest.approx(0.5)


def test_one_lane_slows_another_while_both_run():
    tasks = [Task("matmul", "compute", 10.0), Task("all_reduce", "comm", 4.0)]
    made = play(tasks, slow={("compute", "comm"): 1.25})
    ends = {e.name: e.end for e in made.events}
    assert ends["all_reduce"] == pytest.approx(4.0)
    assert ends["matmul"] == pytest.approx(4.0 + (10.0 - 4.0 / 1.25))


def test_four_equal_chunks_hide_three_quarters():
    """FACTS of overlap: hidden = 1 - 1/C for equal chunks of one matmul and its reduction."""
    for chunks in (2, 4, 8):
        tasks = [Task(f"m{i}", "compute", 1.0) for i in range(chunks)]
        tasks += [Task(f"r{i}", "comm", 0.5, after=(f"m{i}",)) for i in range(chunks)]
        hidden = 1 - (play(tasks).end - chunks) / (0.5 * chunks)
        assert hidden == pytest.approx(1 - 1 / chunks)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([Task("a", "x", 1.0, ("b",)), Task("b", "x", 1.0)], ["wait for each other", "a after b"]),
        ([Task("a", "x", 1.0), Task("a", "x", 1.0)], ["named twice: a"]),
        ([Task("a", "x", -1.0, ("z",))], ["not there: z", "negative length: a"]),
    ],
)
def test_tasks_that_cannot_be_played(tasks, words):
    with pytest.raises(InputError) as caught:
        play(tasks)
    for word in words:
        assert word in str(caught.value)
