"""Calibration of a price: the constants that a table of measurements asks for, on its own platform.

    fitted(table) -> Cluster    the table's cluster, whose transport runs what was measured in that time

What the topology contributes (hops, bytes of the busiest port) comes from the same readings that price
everything else; only the protocols are fitted.
"""

from __future__ import annotations

from dataclasses import replace

from plait.cluster import Cluster, Protocol, Transport
from plait.cluster.calibrate import Fit, fit
from plait.cluster.presets import LAUNCH
from plait.cluster.published import Table
from plait.cost.comm import Reading, price, readings


def cluster_of(table: Table) -> Cluster:
    """The preset of a table, with collectives started as the table's were."""
    return Cluster.parse(table.cluster).with_launch(LAUNCH[table.method])


def fit_table(table: Table) -> tuple[Fit, Cluster]:
    """The fit of a table, and its cluster with the fitted protocols in place of the preset's."""
    cluster = cluster_of(table)
    transport, reading = _bare(table, cluster)
    result = fit(table.rows, [(reading.latency + a, b) for a, b in reading.lines])
    return result, _with(cluster, transport, table, result.protocols)


def errors(table: Table, cluster: Cluster) -> tuple[float, ...]:
    """Predicted / measured - 1, row by row."""
    return tuple(
        price(table.collective, size, cluster.ranks, cluster, table.algorithm).seconds / seconds - 1
        for size, seconds in table.rows
    )


def _bare(table: Table, cluster: Cluster) -> tuple[Transport, Reading]:
    """The reading of what was measured, by a transport that costs nothing but hops and line rate."""
    neutral = (Protocol("bare"),)
    internal = ((table.form, neutral[0]),) if table.form else ()
    for transport in cluster.transports:
        if table.form and not transport.internal:
            continue
        if not table.form and table.algorithm not in transport.algorithms:
            continue
        if table.form or transport.reach is not None or len(cluster.transports) == 1:
            bare = replace(transport, protocols=neutral, internal=internal)
            alone = replace(cluster, transports=(bare,))
            found = readings(table.collective, alone, table.algorithm)
            return transport, found[0][1]
    raise AssertionError(f"{table.name}: no transport of {cluster} runs {table.algorithm}")


def _with(
    cluster: Cluster, transport: Transport, table: Table, protocols: tuple[Protocol, ...]
) -> Cluster:
    if table.form:
        changed = replace(transport, internal=tuple((table.form, p) for p in protocols))
    else:
        changed = replace(transport, protocols=protocols)
    return replace(cluster, transports=(changed,))
