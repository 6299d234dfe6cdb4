"""Measure this machine's collectives, and make of it a Cluster whose prices are its own.

    calibration = measure(2, 4)             processes by themselves, gloo on a CPU: about a minute
    calibration.cluster                     prices as this machine; detect() finds it again
    print(calibration)                      constants, date, host, torch, method, fit error

Per number of processes, every algorithm runs at a range of sizes, all of them in every round, so
that a disturbance meets them alike; a sample is the slowest rank's, a figure the lower quartile:
processes that share cores are woken late now and then, and their medians jump between two times
(the fit's mean error was 10.4 % by medians, 7.8 % by quartiles of the same 2-core run). Of it come

    the path      latency, cost of a message, rates of a port and of the bus, rate of addition: what
                  prices an algorithm or a number of ranks that was not measured
    the measured  of each algorithm on so many ranks, its own protocols (cluster/calibrate.py)
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from scipy.optimize import least_squares

from plait.cluster import Cluster, Device, Protocol
from plait.cluster.calibrate import fit
from plait.cluster.presets import make
from plait.cluster.stored import Calibration, Measured
from plait.cluster.units import spell_size
from plait.collectives import calls
from plait.collectives.schedule import Collective, Spec
from plait.cost.flow import flow_of
from plait.cost.march import march
from plait.cost.reading import BARE, native_spelling, readings
from plait.runtime.processes import launch, world

Say = Callable[[str], None]
Floats = NDArray[np.float64]
Job = tuple[str, int]  # a spelling, bytes

SQUARE = 1024  # rows and columns of the matmuls by which a device is rated
SIZES = tuple(4**k for k in range(5, 13))  # 1 KiB to 16 MiB
METHOD = "gloo between processes of one host, float32, lower quartile over rounds of the slowest rank"


def measure(*nprocs: int, say: Say = print, seconds: float = 80.0) -> Calibration:
    """Measure with each number of processes (2 and 4 if none is given), in so many seconds."""
    counts = nprocs or (2, 4)
    device = measured_device()
    rows: list[Measured] = []
    for done, nproc in enumerate(counts):
        say(f"calibrate: {nproc} processes ({done + 1} of {len(counts)})")
        rows += collectives(_worker, nproc, seconds / len(counts))
    return conclude(rows, device)


def conclude(rows: Sequence[Measured], device: Device) -> Calibration:
    """The cluster that explains the rows; pure but for the date and the host's name."""
    return own(rows, _cluster(rows, device), "gloo", METHOD)


def own(rows: Sequence[Measured], cluster: Cluster, name: str, method: str) -> Calibration:
    """The cluster with protocols of its own for everything in `rows`, which the transport of this name ran."""
    by = cluster.transport(name)
    errors: dict[str, float] = {}
    known = []
    for spelling, table in by_spelling(rows).items():
        spec = Spec.parse(spelling)
        bare = replace(by, protocols=(BARE,), internal=(("ring", BARE),), fused=True, launch=0.0, measured=())
        part = replace(cluster.subset(range(spec.n)), transports=(bare,))
        algorithm = "native" if spec.algorithm == "native" else spelling
        alone = readings(spec.collective, part, algorithm, root=spec.root)[0][1]
        found = fit(table, alone.path.lines, "measured")
        known.append((spelling, found.protocols))
        at = (f"{spelling} {spell_size(size)}" for size, _ in table)
        errors |= zip(at, map(abs, found.errors), strict=True)
    worst_at = max(errors, key=errors.__getitem__, default="")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    transports = (replace(t, measured=tuple(known)) if t is by else t for t in cluster.transports)
    source = f"measured {now} on {platform.node()}, torch {torch.__version__}: {method}"
    return Calibration(
        replace(cluster, transports=tuple(transports), source=source),
        date=now,
        host=platform.node(),
        torch=torch.__version__,
        method=method,
        error=float(np.mean([*errors.values()])) if errors else 0.0,
        worst=errors.get(worst_at, 0.0),
        rows=tuple(rows),
        worst_at=worst_at,
    )


def by_spelling(rows: Sequence[Measured]) -> dict[str, list[tuple[float, float]]]:
    """Sizes and seconds, by spelling."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(row.spelling, []).append((float(row.nbytes), row.seconds))
    return found


# --- the device ----------------------------------------------------------------------------------


def measured_device() -> Device:
    """This CPU as one process has it: rates of matmuls and of memory."""
    big = torch.rand(2**24)
    sums = torch.empty_like(big)  # fresh pages would be measured instead
    rate = 2 * 4 * 2**24 / _best(lambda: torch.add(big, 1.0, out=sums))
    squares = {
        dtype: _best(_square(torch.rand(SQUARE, SQUARE).to(dtype)))
        for dtype in (torch.float32, torch.bfloat16)
    }
    return device_of(squares, rate, torch.get_num_threads())


def device_of(squares: Mapping[torch.dtype, float], rate: float, threads: int) -> Device:
    """The CPU on which a matmul of `SQUARE` takes these seconds, and bytes move at this rate in long streams."""
    base = make("loopback").device
    flops = {}
    for dtype, seconds in squares.items():
        moved = 3 * SQUARE**2 * dtype.itemsize / rate
        flops[dtype] = 2 * SQUARE**3 / max(seconds - moved, seconds / 2)  # noise leaves some to compute
    return replace(
        base,
        flops=tuple((str(t).removeprefix("torch."), f / base.tiles[0].share) for t, f in flops.items()),
        bandwidth=rate / base.memory_share,
        name=f"cpu, {threads} threads",
    )


def _square(a: torch.Tensor) -> Callable[[], object]:
    return lambda: a @ a


def _best(run: Callable[[], object], times: int = 7) -> float:
    run()
    samples = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin)
    return min(samples)


# --- the collectives -----------------------------------------------------------------------------


def collectives(worker: Callable[[str, float], None], nproc: int, seconds: float) -> list[Measured]:
    """What `worker`, started in so many processes, keeps."""
    with TemporaryDirectory(prefix="plait-calibrate-") as folder:
        out = Path(folder) / "rows.json"
        launch(worker, nproc, str(out), seconds)
        return [Measured(**row) for row in json.loads(out.read_text())]


def _worker(out: str, seconds: float) -> None:
    torch.set_num_threads(1)
    world("gloo")
    n = dist.get_world_size()
    # by size: after a call of 16 MiB one of 1 KiB finds its caches cold, and takes twice as long
    jobs = [(s, size) for size in SIZES for s in spellings(n)]
    keep(in_turns(jobs, _once, seconds), out)


def in_turns(jobs: Sequence[Job], once: Callable[[str, int], float], seconds: float) -> list[Measured]:
    """`once` tells the seconds of a call on this rank; as many rounds of all jobs as `seconds` allow."""
    samples: dict[Job, list[float]] = {job: [] for job in jobs}
    begin = time.perf_counter()
    turns = ((turn, i) for turn in range(_ROUNDS + 1) for i in range(len(jobs)))
    with _bar(dist.get_rank()) as show:
        for turn, i in turns:
            took = once(*jobs[i])
            passed = (time.perf_counter() - begin) / seconds
            slowest = torch.tensor([took, passed], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            samples[jobs[i]].append(float(slowest[0]))
            show(max(passed, (turn + i / len(jobs)) / (_ROUNDS + 1)))
            if turn and slowest[1] > 1:  # all ranks see the same clock, and stop together
                break
    return [
        Measured(spelling, size, _quartile(found[1:] or found))  # the first warms up
        for (spelling, size), found in samples.items()
    ]


def keep(rows: Sequence[Measured], out: str) -> None:
    """For the process that started the workers."""
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()


def _quartile(found: Sequence[float]) -> float:
    return float(np.quantile(found, 0.25))


@contextmanager
def _bar(rank: int) -> Iterator[Callable[[float], None]]:
    """Takes the part that is done; rank 0 shows it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=rank != 0) as progress:
        task = progress.add_task("measuring", total=1.0)
        yield lambda done: progress.update(task, completed=min(done, 1.0))


def natives(n: int) -> list[str]:
    """The library's own collectives on n ranks."""
    return [native_spelling(c, n) for c in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")]


def spellings(n: int) -> list[str]:
    """What is measured on n ranks."""
    made = natives(n)
    for collective, algorithm, pieces in _SCHEDULES:
        if n > 2 or algorithm not in _SAME_ON_TWO:
            made.append(str(Spec(algorithm, (n,), collective, pieces=pieces)))
    return made


def _once(spelling: str, nbytes: int) -> float:
    """Seconds of one call, all ranks starting together."""
    spec = Spec.parse(spelling)
    run = call_of(spec, torch.ones(elements(spec, nbytes)))
    dist.barrier()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def elements(spec: Spec, nbytes: int) -> int:
    """Of float32 that all ranks have together, as many on each."""
    return max(nbytes // 4 // spec.n, 1) * spec.n


def call_of(spec: Spec, whole: torch.Tensor) -> Callable[[], object]:
    """One call over so many elements; what a rank brings to an all-gather is the first of its parts."""
    how = "native" if spec.algorithm == "native" else str(spec)
    call = getattr(calls, spec.collective)
    x = whole[: len(whole) // spec.n] if spec.collective == "all_gather" else whole
    return lambda: call(x, algorithm=how)


# --- the path: constants that all rows share -----------------------------------------------------


def _cluster(rows: Sequence[Measured], device: Device) -> Cluster:
    """The loopback preset with this host's latency, rates, and cost of messages and additions."""
    plain = make("loopback")
    tables = {s: t for s, t in by_spelling(rows).items() if Spec.parse(s).algorithm != "native"}
    ceilings = _ceilings(tables)

    def machine(logs: Floats) -> Cluster:
        latency, message, share, base, add = np.exp(logs).tolist()
        level = replace(plain.levels[0], latency=latency, bandwidth=ceilings[0], total=ceilings[1])
        protocol = Protocol("tcp", base=base, message=message, share=min(share, 1.0))
        gloo = replace(
            plain.transports[0], protocols=(protocol,), internal=(("ring", protocol),), add=add
        )
        return replace(
            plain, device=device, levels=(level,), transports=(gloo,), name="loopback, measured"
        )

    def misfit(logs: Floats) -> Floats:
        cluster = machine(logs)
        gloo = cluster.transports[0]
        parts = []
        for spelling, table in tables.items():
            what = flow_of(Spec.parse(spelling))
            sizes, seconds = np.array(table).T
            part = cluster.subset(range(what.n))
            times = march(what, part, gloo, gloo.protocols[0], sizes) + gloo.protocols[0].base
            parts.append(np.log(times / seconds))
        return np.concatenate(parts)

    start = np.log([2e-5, 1e-5, 0.5, 5e-5, 1e-10])
    found = least_squares(misfit, start, loss="soft_l1", f_scale=0.2, xtol=1e-3, ftol=1e-3)
    return machine(found.x)


def _ceilings(tables: dict[str, list[tuple[float, float]]]) -> tuple[float, float]:
    """The fastest that a port (both ways together) and that all of them were seen, and a
    twentieth more: no price is below what a byte takes at these."""
    port = bus = 1e6
    for spelling, table in tables.items():
        what = flow_of(Spec.parse(spelling))
        busiest, total = what.handled(), what.total()
        port = max(port, *(busiest * size / seconds for size, seconds in table))
        bus = max(bus, *(total * size / seconds for size, seconds in table))
    return 1.05 * port, 1.05 * bus


# --- tables --------------------------------------------------------------------------------------

_ROUNDS = 25
_SAME_ON_TWO = ("recursive_doubling", "double_tree", "halving_doubling", "tree")
_SCHEDULES: tuple[tuple[Collective, str, int], ...] = (
    ("all_reduce", "ring", 1),
    ("all_reduce", "ring", 4),
    ("all_reduce", "tree", 4),
    ("all_reduce", "double_tree", 4),
    ("all_reduce", "halving_doubling", 1),
    ("all_reduce", "recursive_doubling", 1),
    ("all_reduce", "one_shot", 1),
    ("all_reduce", "two_shot", 1),
    ("all_reduce", "parameter_server", 1),
    ("all_gather", "ring", 1),
    ("all_gather", "two_shot", 1),
    ("reduce_scatter", "ring", 1),
    ("reduce_scatter", "two_shot", 1),
    ("broadcast", "binomial", 1),
)
