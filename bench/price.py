"""How right are the prices? Every published table three ways, and who wins where it was published.

python bench/price.py                   prints, and writes bench/results/price.md
python bench/price.py --quick           without the held-out fits (they take three minutes)

own       the table's own constants fitted: mean error, and the worst above 64 KiB
shared    one set of constants for all machines (plait/cluster/software.py)
held out  that set fitted again without the table, from a start that has seen none
unseen    that set fitted again without any table or crossing of the same machine
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from plait.cluster import Cluster
from plait.cluster.published import TABLES, Table
from plait.cluster.software import SHARED, transports
from plait.cluster.units import spell_size
from plait.cost.comm import price
from plait.cost.fitting import cluster_of, errors, fit_shared, fit_table, held_out, unseen
from plait.cost.flow import wide
from plait.cost.simulator import simulate

RESULTS = Path(__file__).parent / "results" / "price.md"


Held = dict[str, dict[str, Sequence[float]]]  # "held out", "unseen" -> table -> its errors
NOTHING: Held = {"held out": {}, "unseen": {}}
PRICED = tuple(table for table in TABLES if table.software != "multicast")
MACHINES = tuple(dict.fromkeys(table.machine for table in PRICED))


def without_table(table: Table) -> Sequence[float]:
    return list(held_out(table, TABLES))


def without_machine(machine: str) -> dict[str, Sequence[float]]:
    return {name: list(found) for name, found in unseen(machine, TABLES).items()}


def hold_out() -> Held:
    with ProcessPoolExecutor() as pool:
        alone = pool.map(without_table, PRICED)
        machines = pool.map(without_machine, MACHINES)
        return {
            "held out": {table.name: found for table, found in zip(PRICED, alone, strict=True)},
            "unseen": {name: found for part in machines for name, found in part.items()},
        }


def mean(errors: Sequence[float]) -> str:
    return f"{np.abs(errors).mean():.1%}"


def tables(held: Held) -> list[str]:
    lines = [
        "| table | how | sizes | own: mean | worst > 64 KiB | shared: mean | held out | unseen |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for table in TABLES:
        fitted, cluster = fit_table(table)
        own = abs(errors(table, cluster))
        big = [e for e, size in zip(own, table.sizes, strict=True) if size > 2**16]
        outs = [mean(f[table.name]) if table.name in f else "-" for f in held.values()]
        shared = mean(list(errors(table, cluster_of(table)))) if table in PRICED else "-"
        how = f"{table.software} {table.algorithm}, {table.method}"
        row = (
            table.name,
            how,
            str(len(own)),
            f"{fitted.mean:.1%}",
            f"{max(big):.1%}",
            shared,
            *outs,
        )
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    return lines


def machines(held: Held) -> list[str]:
    """Of every machine that no constant has seen: the mean over its tables."""
    lines = ["| machine | tables | unseen: mean |", "|---|---:|---:|"]
    for machine in MACHINES if held["unseen"] else ():
        found = [np.abs(held["unseen"][t.name]).mean() for t in PRICED if t.machine == machine]
        lines.append(f"| {machine} | {len(found)} | {np.mean(found):.1%} |")
        print(lines[-1], flush=True)
    return lines


def rows(table: Table, held: Held) -> list[str]:
    """One table in full: measured and four predictions."""
    _, own = fit_table(table)
    lines = ["| size | measured us | own | shared | held out | unseen |", "|---:|---:|---:|---:|---:|---:|"]
    outs = (found[table.name] for found in held.values())
    columns = (errors(table, own), errors(table, cluster_of(table)), *outs)
    for (size, seconds), *found in zip(table.rows, *columns, strict=True):
        cells = " | ".join(f"{e:+.0%}" for e in found)
        lines.append(f"| {spell_size(size)} | {seconds * 1e6:.1f} | {cells} |")
    return lines


# --- who wins ---------------------------------------------------------------------------------------


def on(machine: str, *software: str) -> Cluster:
    made = transports(SHARED)
    by = tuple(made[name].with_launch(0.0) for name in software)
    return replace(Cluster.parse(machine), transports=by)


def crossings(label: Callable[[float], str]) -> str:
    """Where the label changes over sizes from 1 KiB to 16 GiB, four sizes an octave."""
    found: list[str] = []
    last = ""
    for k in range(40, 137):
        now = label(2 ** (k / 4))
        if now != last:
            found.append(now if not last else f"{now} from {spell_size(2 ** (k / 4))}")
            last = now
    return ", ".join(found)


def faster(cluster: Cluster, *algorithms: str) -> Callable[[float], str]:
    def label(size: float) -> str:
        return min(
            algorithms,
            key=lambda a: price("all_reduce", size, cluster.ranks, cluster, a).seconds,
        )

    return label


def form(machine: str) -> Callable[[float], str]:
    cluster = on(machine, "nccl")
    return lambda size: price("all_reduce", size, cluster.ranks, cluster, "native").detail.split(
        "/"
    )[0]


def winners() -> list[str]:
    lines = ["| what | published | here |", "|---|---|---|"]
    for what, published, label in WINNERS:
        lines.append(f"| {what} | {published} | {crossings(label)} |")
        print(lines[-1], flush=True)
    return lines


WINNERS: Sequence[tuple[str, str, Callable[[float], str]]] = (
    (
        "2 H100, kernels",
        "one-shot always (vLLM)",
        faster(on("dgx-h100[2]", "symmetric"), "one_shot", "two_shot"),
    ),
    (
        "4 H100, kernels",
        "two-shot from 512 KiB (vLLM)",
        faster(on("dgx-h100[4]", "symmetric"), "one_shot", "two_shot"),
    ),
    (
        "8 H100, kernels",
        "two-shot from 256 KiB (vLLM)",
        faster(on("dgx-h100", "symmetric"), "one_shot", "two_shot"),
    ),
    (
        "8 H100, kernel or NCCL with NVLS",
        "NCCL from 8 MiB (TensorRT-LLM); 4 MB 37:50 us, 16 MB 125:121, 64 MB 468:316 (vLLM)",
        faster(on("dgx-h100+nvls", "symmetric", "nccl"), "two_shot", "native"),
    ),
    (
        "2 H200, kernel or NCCL, no NVLS",
        "two-shot at 8, 32 and 128 MiB (measured)",
        faster(on("dgx-h200[2]", "symmetric", "nccl"), "two_shot", "native"),
    ),
    (
        "4 V100 on PCIe, push one-shot or NCCL",
        "equal near 200 KB",
        faster(on("pcie3[4]", "push", "nccl"), "one_shot", "native"),
    ),
    ("8 H100, NCCL's form", "ring up to 1 MiB, NVLS from 2 MiB", form("dgx-h100+nvls")),
    (
        "2 x 8 H100, NCCL's form, NVLS off",
        "ring from 32 MiB (NCCL's constants)",
        form("dgx-h100[2x8]"),
    ),
    ("4 x 8 H100", "ring from 1 GiB (NCCL's constants)", form("dgx-h100[4x8]")),
    (
        "5 x 8 H100, RoCE",
        "ring at 1 GB, 190 against 150 GB/s (measured)",
        form("dgx-h100[5x8]/roce"),
    ),
    ("8 x 8 H100", "ring from 2 GiB (NCCL's constants)", form("dgx-h100[8x8]")),
    ("16 x 8 H100", "ring from 4 GiB (NCCL's constants)", form("dgx-h100[16x8]")),
)


def asymptotes() -> list[str]:
    """Bus bandwidth of a 16 GiB all-reduce against vendors' bars (GTC24 S62129, GTC25 S72583)."""
    lines = ["| machine | published GB/s | here |", "|---|---:|---:|"]
    for machine, published in BARS:
        cluster = Cluster.parse(machine)
        found = price("all_reduce", 2**34, cluster.ranks, cluster, "native").seconds
        bus = 2**34 * 2 * (cluster.size - 1) / cluster.size / found / 1e9
        lines.append(f"| {machine} | {published} | {bus:.0f} |")
        print(lines[-1], flush=True)
    return lines


BARS = (
    ("pcie4[4]", "24"),
    ("pcie5[4]", "48"),
    ("dgx-a100", "232"),
    ("dgx-h100", "370"),
    ("dgx-h100+nvls", "480"),
    ("dgx-b200", "700"),
    ("dgx-b200+nvls", "850"),
    ("gb200-nvl72[32]", "680"),
    ("gb200-nvl72[32]+nvls", "850"),
    ("dgx-a100[4x8]", "192"),
    ("dgx-h100[4x8]", "380"),
)


def simulations() -> list[str]:
    lines = ["| schedule, 1 GiB | ranks | seconds | to simulate, CPU s |", "|---|---:|---:|---:|"]
    big = Cluster.preset("dgx-h100", 4096)
    for algorithm, levels in (
        ("hierarchical", (512, 8)),
        ("ring", (4096,)),
        ("tree", (4096,)),
        ("parameter_server", (4096,)),
    ):
        what = wide(algorithm, levels)
        begin = time.process_time()
        end = simulate(what, 2**30, big, transport="nccl", record=False).end
        lines.append(f"| {what.name} | {what.n} | {end:.4g} | {time.process_time() - begin:.1f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="without the held-out fits")
    parser.add_argument(
        "--refit", action="store_true", help="print the shared constants fitted afresh"
    )
    options = parser.parse_args()
    if options.refit:
        print(fit_shared(TABLES))
        return
    held = NOTHING if options.quick else hold_out()
    parts = [
        f"# Prices against measurements, {datetime.now(UTC):%Y-%m-%d}",
        "Made by `python bench/price.py`. Errors are |predicted / measured - 1|.",
        *tables(held),
        "",
        "## Machines that no constant has seen",
        *machines(held),
        "",
        "## Who wins",
        *winners(),
        "",
        "## Long vectors",
        *asymptotes(),
        "",
        "## Thousands of ranks",
        *simulations(),
    ]
    if options.quick:
        return
    for name in ("8xH200 NVLS", "8xA100", "4x8xB200 EFA", "8xGB200 MNNVL"):
        parts += ["", f"## {name}", *rows(next(t for t in TABLES if t.name == name), held)]
    RESULTS.write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
