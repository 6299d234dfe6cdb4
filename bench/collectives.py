"""Every algorithm on this machine's loopback, beside gloo's own all_reduce, in one run.

    python bench/collectives.py --nproc 2 4 --mib 16 64

Prints, and keeps in bench/results/, per algorithm: the median time and its ratio to gloo's own,
algorithm and bus bandwidth, bytes on the wire beside the ledger's; then what `plait.collectives.choose` takes on
this machine, by its calibration if there is one. All samples are interleaved.
The processes run in a network of their own, where the system allows it, so that the counters of
the loopback count nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from plait.cluster import Cluster
from plait.collectives import choose
from plait.collectives.measure import Measured, measure, private_loopback

ALGORITHMS = (
    *("native", "ring", "ring/2", "ring/4", "two_shot", "two_shot/2", "halving_doubling"),
    *("recursive_doubling", "one_shot", "tree", "double_tree", "binomial", "parameter_server", "sharded_server"),
)
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Options:
    sizes: tuple[int, ...]
    rounds: int
    algorithms: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=float, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    parser.add_argument("--keep", action="store_true", help="write bench/results/")
    asked = parser.parse_args()
    private = private_loopback()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    options = Options(
        tuple(int(m * 2**20) for m in asked.mib), asked.rounds, tuple(asked.algorithms)
    )
    text = [heading(private)]
    print(text[0], flush=True)
    rows: list[dict[str, object]] = []
    for nproc in asked.nproc:
        with tempfile.TemporaryDirectory() as folder:
            spawn(worker, (nproc, folder, options), nprocs=nproc)
            for size in options.sizes:
                table = json.loads((Path(folder) / f"{size}.json").read_text())
                rows += table["rows"]
                text.append(table["text"])
                print(f"\n{table['text']}", flush=True)
    if asked.keep:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"collectives-{date.today()}"
        path.with_suffix(".txt").write_text("\n\n".join(text) + "\n")
        path.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


def heading(private: bool) -> str:
    model = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x),
        platform.machine(),
    )  # fmt: skip
    load = os.getloadavg()[0]
    return (
        f"{date.today()}, {model}, {os.cpu_count()} cores, load {load:.1f} at the start, "
        f"torch {torch.__version__}, gloo on {'a private' if private else 'the shared'} loopback, "
        "float32, one thread a process; times are medians of the slowest rank, samples interleaved"
    )


def worker(rank: int, nproc: int, folder: str, options: Options) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    for size in options.sizes:
        chosen = choose("all_reduce", size, range(nproc), Cluster.of(None, kind="cpu")).algorithm
        found = measure(
            options.algorithms, size, rounds=options.rounds, extra=lambda x: dist.all_reduce(x)
        )
        if rank == 0:
            table = {"rows": rows(found), "text": f"{render(found)}\n{verdict(found, chosen)}"}
            (Path(folder) / f"{size}.json").write_text(json.dumps(table))
    dist.barrier()


def rows(found: tuple[Measured, ...]) -> list[dict[str, object]]:
    return [
        {
            "algorithm": "gloo" if m.algorithm == "extra" else m.algorithm,
            "ranks": m.ranks,
            "size": m.size,
            "seconds": m.seconds,
            "samples": m.samples,
            "wire": m.wire,
            "ledger": m.counted,
        }
        for m in found
    ]


def render(found: tuple[Measured, ...]) -> str:
    """One line an algorithm. `ratio`: the median over rounds of this one's time over gloo's."""
    gloo = next(m for m in found if m.algorithm == "extra")
    lines = [
        f"{gloo.ranks} processes, {gloo.size / 2**20:g} MiB",
        f"{'algorithm':22}{'ms':>9}{'ratio':>8}{'algbw GB/s':>12}{'busbw GB/s':>12}"
        f"{'wire bytes':>14}{'ledger':>14}{'wire/ledger':>13}",
    ]
    for m in sorted(found, key=lambda m: m.seconds):
        name = "gloo's own" if m.algorithm == "extra" else str(m.schedule or m.algorithm)
        line = f"{name:22}{m.seconds * 1e3:9.2f}{m.seconds / gloo.seconds:8.2f}"
        line += f"{m.algorithm_bandwidth / 1e9:12.2f}{m.bus_bandwidth / 1e9:12.2f}"
        wire = "" if m.wire is None else str(m.wire)
        book = "" if m.counted is None else str(m.counted)
        over = f"{m.wire / m.counted:.4f}" if m.wire and m.counted else ""
        lines.append(f"{line}{wire:>14}{book:>14}{over:>13}")
    return "\n".join(lines)


def verdict(found: tuple[Measured, ...], chosen: str) -> str:
    """What `plait.compile` would take on this machine, beside the fastest that was measured.

    Of a name, the fastest number of pieces counts.
    """
    taken = min(m.seconds for m in found if m.algorithm.split("/")[0] == chosen)
    ours = min(m.seconds for m in found if m.algorithm not in ("native", "extra"))
    gloo = next(m.seconds for m in found if m.algorithm == "extra")
    fastest = min(m.seconds for m in found if m.algorithm != "extra")
    return (
        f"fastest of ours {ours / gloo:.2f}x gloo's own; chosen on this machine: {chosen}, "
        f"{taken / fastest:.2f}x the fastest measured"
    )


if __name__ == "__main__":
    main()
