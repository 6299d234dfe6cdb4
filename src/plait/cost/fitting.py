"""Calibration of prices against tables of measurements.

    fit_table(table)      one platform's own constants: the transport that takes the time measured
    fit_shared(tables)    one set of constants for all platforms, from all tables together
    held_out(table, ...)  how well a table is predicted by constants that have not seen it
    unseen(machine, ...)  the same of a whole machine: none of its tables, nor who wins there

What the topology contributes (hops, bytes of the busiest port) comes from the same readings that
price everything else; only the software's constants are fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from plait.cluster import Cluster
from plait.cluster.calibrate import Fit, fit
from plait.cluster.published import CROSSINGS, Crossing, Table
from plait.cluster.software import SHARED, Shared, launch, push, transports
from plait.cost.reading import BARE, readings

Floats = NDArray[np.float64]


def cluster_of(table: Table, shared: Shared = SHARED) -> Cluster:
    """The preset of a table with the one transport that was measured, started as it was."""
    known = {**transports(shared), "multicast": push(shared)}  # fitted, but not priced unfitted
    by = known[table.software].with_launch(launch(table.method, shared))
    return replace(Cluster.parse(table.cluster), transports=(by,))


def predict(table: Table, cluster: Cluster) -> Floats:
    """Seconds, row by row."""
    found = [r for _, r in readings(table.collective, cluster, table.algorithm)]
    return np.array([min(r.seconds(size) for r in found) for size in table.sizes])


def errors(table: Table, cluster: Cluster) -> Floats:
    """Predicted / measured - 1, row by row."""
    return np.asarray(predict(table, cluster) / np.array(table.seconds) - 1)


def fit_table(table: Table) -> tuple[Fit, Cluster]:
    """The fit of a table, and its cluster with the fitted protocols in place of the shared ones."""
    cluster = cluster_of(table)
    transport = cluster.transports[0]
    internal = ((table.form, BARE),) if table.form else ()
    alone = replace(transport, protocols=(BARE,), internal=internal)
    reading = readings(table.collective, replace(cluster, transports=(alone,)), table.algorithm)[0][
        1
    ]
    result = fit(table.rows, [(reading.latency + a, b) for a, b in reading.path.lines], table.name)
    if table.form:
        fitted = replace(transport, internal=tuple((table.form, p) for p in result.protocols))
    else:
        fitted = replace(transport, protocols=result.protocols)
    return result, replace(cluster, transports=(fitted,))


def fit_shared(tables: Sequence[Table], crossings: Sequence[Crossing] = CROSSINGS) -> Shared:
    """The constants that explain all tables best, each table with the same weight, and let those
    algorithms win that were published as the fastest."""
    low = np.log([_BOUNDS[name][0] for name in _NAMES])
    high = np.log([_BOUNDS[name][1] for name in _NAMES])

    def misfit(logs: Floats) -> Floats:
        shared = _shared(logs)
        parts = [_logs(table, shared) / np.sqrt(len(table.rows)) for table in tables]
        wrong = [_WEIGHT * lost(crossing, shared, _MARGIN) for crossing in crossings]
        return np.concatenate([*parts, *wrong, _PRIOR * (logs - first)])

    tables = [table for table in tables if table.software != "multicast"]
    first = np.clip(np.log([getattr(_START, name) for name in _NAMES]), low + 1e-6, high - 1e-6)
    found = least_squares(
        misfit,
        first,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.25,
        diff_step=1e-4,  # across the kinks where one form overtakes another
    )
    return _shared(found.x)


def held_out(table: Table, tables: Sequence[Table]) -> Floats:
    """Errors on a table of constants fitted to all the others, from a start that has seen none."""
    return errors(table, cluster_of(table, fit_shared([t for t in tables if t != table])))


def unseen(machine: str, tables: Sequence[Table]) -> dict[str, Floats]:
    """Errors on all tables of a machine, by name, of constants fitted to other machines alone."""
    elsewhere = [c for c in CROSSINGS if c.machine != machine]
    shared = fit_shared([t for t in tables if t.machine != machine], elsewhere)
    here = [t for t in tables if t.machine == machine and t.software != "multicast"]
    return {t.name: errors(t, cluster_of(t, shared)) for t in here}


def lost(crossing: Crossing, shared: Shared = SHARED, margin: float = 0.0) -> Floats:
    """By how much what should win loses below and above a crossing: logarithms, 0 where it wins
    (by the margin)."""
    made = transports(shared)
    by = tuple(made[name].with_launch(0.0) for name in crossing.software)
    cluster = replace(Cluster.parse(crossing.cluster), transports=by)

    def behind(size: int, best: str, other: str) -> float:
        times = (_seconds(cluster, size, name) for name in (best, other))
        return max(0.0, float(np.log(next(times) / next(times))) + margin)

    return np.array(
        [
            behind(crossing.low, crossing.before, crossing.after),
            behind(crossing.high, crossing.after, crossing.before),
        ]
    )


def _seconds(cluster: Cluster, size: int, name: str) -> float:
    """Of an algorithm, or of one form of the library's own: `two_shot`, `native`, `native ring`."""
    algorithm, _, form = name.partition(" ")
    found = readings("all_reduce", cluster, algorithm)
    return min(r.seconds(size) for _, r in found if not form or r.detail.startswith(f"{form}/"))


def _logs(table: Table, shared: Shared) -> Floats:
    return np.asarray(np.log(predict(table, cluster_of(table, shared)) / np.array(table.seconds)))


def _shared(logs: Floats) -> Shared:
    return Shared(**dict(zip(_NAMES, np.exp(logs).tolist(), strict=True)))


# --- what a constant may be ----------------------------------------------------------------------

# Round numbers near NCCL's own (src/graph/tuning.cc) and a kernel's: seen before any table was.
_START = Shared(
    stream=10e-6,
    torch=30e-6,
    few_base=7e-6,
    few_share=0.4,
    mid_share=0.8,
    many_base=8e-6,
    many_share=0.9,
    switch_base=15e-6,
    registered_base=8e-6,
    switch_share=0.8,
    fill=3e-6,
    hop_fill=1e-6,
    most=100e-6,
    pull_base=3e-6,
    pull_peer=1e-6,
    pull_share=0.8,
    push_step=2e-6,
    four_share=0.3,
)
_WEIGHT = 3.0  # of what should win and does not, beside a table's mean error
_PRIOR = 0.05  # of a constant e times what it was at the start: what no table tells stays there
_MARGIN = 0.02  # what should win is to win by: a tie is no victory
_NAMES = tuple(f.name for f in fields(Shared))
_BOUNDS: dict[str, tuple[float, float]] = {
    "stream": (1e-6, 5e-5),
    "torch": (1e-6, 8e-5),
    "few_base": (1e-7, 3e-5),
    "few_share": (0.1, 0.6),
    "mid_share": (0.5, 0.95),
    "many_base": (1e-7, 6e-5),
    "many_share": (0.5, 1.0),
    "switch_base": (1e-6, 3e-5),
    "registered_base": (1e-6, 3e-5),
    "switch_share": (0.5, 1.0),
    "fill": (1e-8, 5e-5),
    "hop_fill": (1e-8, 1e-5),
    "most": (1e-6, 5e-4),
    "pull_base": (1e-7, 2e-5),
    "pull_peer": (1e-7, 1e-5),
    "pull_share": (0.3, 1.0),
    "push_step": (1e-7, 1e-5),
    "four_share": (0.02, 1.0),
}
