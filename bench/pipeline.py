"""Pipelines as predicted and as they run: seconds of a step, bubbles, order of candidates, a trace.

    python -m bench.pipeline                  prints tables; --keep writes bench/results/pipeline.md
    python -m bench.pipeline --trace FILE     also the events of one step, for ui.perfetto.dev
    python -m bench.pipeline --block 0.54     sleeps fifteen times as long, beside which the runtime's own time is small

Stages compute what they always do, and then sleep until as much time has passed as the plan predicts
for them: so several processes on one core run as devices of their own would, and what is measured is
the schedule, the messages and the runtime. `--real` sleeps nowhere: two processes of one thread each,
predicted for a core's rates of matmuls and of memory as these processes measure them. A shared core's
rate drifts by a fifth within a minute: it is measured again after every round of steps, and all are
predicted for its median. Other work on the cores makes the clock on the wall say little: beside it stand the CPU
seconds of every action, played by the schedule.

Seconds are from the first action of any place to the end of the last, medians over the steps of a
run; every candidate runs in the same processes, a step of each in turn (of those that compute the second of two).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import plait
from plait.cluster import Cluster
from plait.cluster.device import Device
from plait.passes import schedule
from plait.passes.schedule import Action, Schedule
from plait.plan.plan import Plan
from plait.runtime import pipeline as runtime
from plait.runtime.actions import Run
from plait.runtime.calibrate import SQUARE, device_of
from plait.runtime.pipeline import Pipeline
from plait.runtime.processes import launch

RESULTS = Path(__file__).parent / "results" / "pipeline.md"
ROWS, WIDTH = 32, 48
BLOCK = 0.036  # seconds that a layer of the batch sleeps forward
CLOSE = 0.03  # predictions this near each other have no order
# schedule and micro-batches; "auto" is what `plait.compile` chooses
CANDIDATES: tuple[tuple[str, int | str], ...] = (
    ("gpipe", 1), ("gpipe", 4), ("1f1b", 4), ("1f1b", 8), ("interleaved", 4), ("interleaved", 8),
    ("zero-bubble", 4), ("zero-bubble", 8), ("auto", "auto"),
)  # fmt: skip


# -- the machine and the model --------------------------------------------------------------------------


def cluster(places: int, flops: float) -> Cluster:
    """Devices of so many flops a second, and links of this host."""
    sleeper = Device("sleeper", "cpu", (("float32", flops),), 1e12, 2**34, 0.0)
    share = sleeper.tiles[0].share  # of the rate, which matmuls reach
    device = replace(sleeper, flops=(("float32", flops / share),))
    return replace(Cluster.parse(f"loopback[{places}]"), device=device)


def layers(count: int, uneven: bool, width: int = WIDTH) -> nn.Module:
    """Linear layers; `uneven`: every fourth is three times as wide inside."""
    torch.manual_seed(0)
    out: list[nn.Module] = []
    for i in range(count):
        inner = 3 * width if uneven and i % 4 == 0 else width
        out += [nn.Linear(width, inner), nn.Tanh()]
        out += [nn.Linear(inner, width)] if inner != width else []
    return nn.Sequential(*out)


def loss(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).pow(2).mean()


# -- measuring ------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """What a run takes and took on this rank."""

    each: dict[int, dict[str, float]]  # stage -> kind -> seconds
    events: list[tuple[str, float, float]]
    spent: dict[str, float]  # action -> CPU seconds of its thread, messages included


CLOCK = Clock({}, [], {})


class Timed(Run):
    """A run whose actions sleep until they have taken their time."""

    def _fill(self, action: Action, begin: float) -> None:
        wanted = CLOCK.each.get(action.stage, {}).get(action.kind, 0.0)
        time.sleep(max(0.0, begin + wanted - time.monotonic()))
        CLOCK.events.append((str(action), begin, time.monotonic()))

    def _do(self, action: Action, posted: Any) -> None:
        begin = time.thread_time()
        super()._do(action, posted)
        CLOCK.spent[str(action)] = time.thread_time() - begin

    def _run(self, opened: Any, index: int, k: int) -> Sequence[Any]:
        begin = time.monotonic()
        out = super()._run(opened, index, k)
        self._fill(Action(index, "F", k), begin)
        return out

    def _gradients(self, action: Action, pairs: Any) -> None:
        begin = time.monotonic()
        super()._gradients(action, pairs)
        self._fill(action, begin)

    def _pay(self, action: Action) -> None:
        begin = time.monotonic()
        super()._pay(action)
        if action.kind == "W":
            self._fill(action, begin)


def step_plan(parts: Any) -> Plan:
    """Of the program that a step runs, which holds the loss."""
    every = [pair for shelf in parts._programs._shelves for pair in shelf.executables]
    asked, made = next(pair for pair in every if pair[0].asked)
    assert isinstance(made, Pipeline), made.told(asked)
    return made.planned.plan


@dataclass
class Candidate:
    """A pipeline to step, what its plan says, and the steps it took: seconds, bubble, events."""

    parts: Any
    order: Schedule
    each: dict[int, dict[str, float]]
    told: dict[str, Any]
    found: list[tuple[float, float, list[Any]]] = field(default_factory=list)
    alone: list[tuple[float, float]] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Of the median step; on rank 0 of all places."""
        seconds, bubble, events = sorted(self.found, key=lambda one: one[0])[len(self.found) // 2]
        alone = sorted(self.alone)[len(self.alone) // 2]
        return self.told | {"seconds": seconds, "bubble": bubble, "events": events, "alone": alone}


def candidate(parts: Any, x: Tensor, target: Tensor, **told: Any) -> Candidate:
    """Runs a step, which makes its plan."""
    CLOCK.each = {}
    parts.step(x, target=target, loss_fn=loss)
    staged = step_plan(parts).staged
    assert staged is not None
    order = schedule.make(staged.schedule, parts.plan.pp, len(staged.rows) or 1)
    forwards = schedule.forward(order, staged.seconds)
    units = schedule.units()
    each = {s: {kind: f * units[kind] for kind in order.kinds} for s, f in enumerate(forwards)}
    told |= {
        "schedule": staged.schedule,
        "pieces": len(staged.rows) or 1,
        "predicted": schedule.seconds(order, forwards),
        "planned": staged.bubble,
    }
    return Candidate(parts, order, each, told)


def step(one: Candidate, x: Tensor, target: Tensor, sleeps: bool) -> None:
    if not sleeps:  # in a loop of its own a candidate finds its weights in the caches, not another's
        one.parts.step(x, target=target, loss_fn=loss)
    CLOCK.each = one.each if sleeps else {}
    CLOCK.events, CLOCK.spent = [], {}
    dist.barrier()
    one.parts.step(x, target=target, loss_fn=loss)
    every: list[Any] = [None] * dist.get_world_size()
    spent: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, CLOCK.events)
    dist.all_gather_object(spent, CLOCK.spent)
    one.alone.append(played(one.order, spent))
    begin = min(b for events in every for _, b, _ in events)
    end = max(e for events in every for _, _, e in events)
    busy = sum(e - b for events in every for _, b, e in events)
    one.found.append((end - begin, 1 - busy / ((end - begin) * len(every)), every))


def played(order: Schedule, spent: Sequence[dict[str, float]]) -> tuple[float, float]:
    """Seconds and bubble of a step whose actions take the CPU seconds they took, on cores of their own."""
    cpu = {name: seconds for each in spent for name, seconds in each.items()}
    seconds = schedule.play(order, lambda action: cpu[str(action)]).seconds
    return seconds, 1 - sum(cpu.values()) / (seconds * len(order.places))


def sleeping(out: str, steps: int, block: float) -> None:
    """Every candidate at this number of places; a layer of the batch takes `block` seconds forward."""
    torch.set_num_threads(1)
    runtime.Run = Timed  # type: ignore[misc]
    machine = cluster(dist.get_world_size(), 2 * ROWS * WIDTH * WIDTH / block)
    rows: list[dict[str, Any]] = []
    for uneven in (False, True):
        model, x, target = layers(12, uneven), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        told = {"layers": "uneven" if uneven else "even"}
        every = [candidate(compiled(model, x, machine, *c), x, target, asked=c[0], **told) for c in CANDIDATES]
        for _, one in product(range(steps), every):
            step(one, x, target, True)
        rows += [one.row() for one in every]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))


def real(out: str, steps: int) -> None:
    """Two stages of one thread each, for the rates of a core."""
    torch.set_num_threads(1)
    runtime.Run = Timed  # type: ignore[misc]
    width = 1024
    model, x, target = layers(8, False, width), torch.randn(512, width), torch.randn(512, width)
    host = Cluster.parse("loopback[2]")
    rates = [rate()]
    machine = replace(host, device=core(rates))
    every = [candidate(compiled(model, x, machine, *c), x, target, asked=c[0], layers="real") for c in CANDIDATES]
    for _ in range(steps):
        for one in every:
            step(one, x, target, False)
        rates.append(rate())
    machine, rows = replace(host, device=core(rates)), []
    for row in (one.row() for one in every):
        again = candidate(compiled(model, x, machine, row["schedule"], row["pieces"]), x, target)
        rows.append(row | again.told)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))


def compiled(model: nn.Module, x: Tensor, machine: Cluster, name: str, pieces: int | str) -> Any:
    return plait.compile(
        model, (x,), tp=1, pp=dist.get_world_size(), training=True, cluster=machine, measure=False,
        micro_batches=pieces, schedule=name, recompute="off",
    )  # fmt: skip


MOVED = 2**24  # floats that a pass over memory reads


def rate() -> tuple[float, float]:
    """CPU seconds of a pass over memory and of a matmul of `SQUARE`; the mean of all ranks."""
    big, square = torch.rand(MOVED), torch.rand(SQUARE, SQUARE)
    sums = torch.empty_like(big)
    stream = cpu_seconds(lambda: torch.add(big, 1.0, out=sums))
    both = torch.tensor([stream, cpu_seconds(lambda: square @ square)])
    dist.all_reduce(both)
    stream, matmul = (both / dist.get_world_size()).tolist()
    return stream, matmul


def core(rates: Sequence[tuple[float, float]]) -> Device:
    stream, matmul = (statistics.median(column) for column in zip(*rates, strict=True))
    return device_of({torch.float32: matmul}, 8 * MOVED / stream, 1)


def cpu_seconds(run: Callable[[], object], times: int = 15) -> float:
    run()
    found = []
    for _ in range(times):
        begin = time.thread_time()
        run()
        found.append(time.thread_time() - begin)
    return statistics.median(found)


# -- words ----------------------------------------------------------------------------------------------


def table(title: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"## {title}", "",
        "| layers | schedule | micro-batches | predicted ms | measured ms | error | bubble | measured |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for r in rows:
        name = r["schedule"] + (" (auto)" if r["asked"] == "auto" else "")
        error = r["seconds"] / r["predicted"] - 1
        lines.append(
            f"| {r['layers']} | {name} | {r['pieces']} | {r['predicted'] * 1e3:.1f} "
            f"| {r['seconds'] * 1e3:.1f} | {error:+.1%} | {r['planned']:.1%} | {r['bubble']:.1%} |"
        )
    return [*lines, "", *verdict(rows), ""]


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    errors = [abs(r["seconds"] / r["predicted"] - 1) for r in rows]
    bubbles = max(abs(r["bubble"] - r["planned"]) for r in rows)
    right = wrong = 0
    for a, b in combinations(rows, 2):
        apart = abs(a["predicted"] / b["predicted"] - 1) > CLOSE
        if a["layers"] == b["layers"] and apart:
            same = (a["predicted"] < b["predicted"]) == (a["seconds"] < b["seconds"])
            right, wrong = right + same, wrong + (not same)
    auto = [r["pieces"] for r in rows if r["asked"] == "auto"]
    return [
        f"Mean error {statistics.mean(errors):.1%}; pairs of candidates in the predicted order "
        f"{right} of {right + wrong} (those whose predictions are more than {CLOSE:.0%} apart); bubble off "
        f"by at most {bubbles:.1%} of the places' time; micro-batches that auto chose: {auto}.",
    ]


def beside(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where the second place is at micro-batch 0 while the first is at 1, in the first 1f1b run."""
    events = next(r["events"] for r in rows if r["schedule"] == "1f1b")
    at = {name: (b, e) for line in events for name, b, e in line}
    start = min(b for b, _ in at.values())
    one, two = at["0F1"], at["1F0"]
    overlap = min(one[1], two[1]) - max(one[0], two[0])
    words = ", ".join(
        f"{n} {1e3 * (at[n][0] - start):.1f} to {1e3 * (at[n][1] - start):.1f} ms" for n in ("0F0", "0F1", "1F0", "1F1")
    )
    return [
        f"Trace of 1f1b: {words}. The second stage is at its first micro-batch while the first stage is "
        f"at the second: {overlap * 1e3:.1f} ms together.",
    ]


def perfetto(rows: Sequence[dict[str, Any]]) -> str:
    events = next(r["events"] for r in rows if r["schedule"] == "1f1b")
    start = min(b for line in events for _, b, _ in line)
    return json.dumps(
        [
            {"name": n, "ph": "X", "pid": 0, "tid": p, "ts": 1e6 * (b - start), "dur": 1e6 * (e - b)}
            for p, line in enumerate(events)
            for n, b, e in line
        ]
    )


def head(load: str) -> list[str]:
    return [
        "# Pipelines, predicted and measured",
        "",
        "`python -m bench.pipeline --keep`: a step of twelve linear layers (every fourth three times as wide where",
        "uneven), stages that sleep for as long as the plan says they compute, gloo on loopback; the median step.",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} x {platform.processor() or platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}. {load}",
        "",
    ]


def rows_of(target: Any, places: int, *asked: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "rows.json")
        launch(target, places, out, *asked)
        return json.loads(Path(out).read_text())  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--block", type=float, default=BLOCK, help="seconds that a layer of the batch sleeps forward")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--trace", default="")
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    lines: list[str] = []
    busy = os.getloadavg()[0]
    for places in asked.places:
        rows = rows_of(sleeping, places, asked.steps, asked.block)
        busy = max(busy, os.getloadavg()[0])
        lines += [*table(f"{places} stages that sleep", rows), *beside(rows), ""]
        told(lines, busy, asked.keep)
        if asked.trace:
            Path(asked.trace).write_text(perfetto(rows))
    if asked.real:
        rows = rows_of(real, 2, asked.steps)
        lines += table("2 stages that compute, one thread each", rows)
        alone = [r | dict(zip(("seconds", "bubble"), r["alone"], strict=True)) for r in rows]
        lines += table("The same by the CPU seconds of every action, played by the schedule", alone)
        told(lines, max(busy, os.getloadavg()[0]), asked.keep)


def told(lines: Sequence[str], busy: float, keep: bool) -> None:
    """What is known so far."""
    load = f"Load average {busy:.0f} on {os.cpu_count()} cores: other work ran meanwhile." if busy > 5 else ""
    text = "\n".join([*head(load), *lines])
    print(text, flush=True)
    if keep:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
