"""The choice among NCCL's own forms, as a configuration of its example tuner plugin.

    allreduce,0,262143,ring,ll,-1,1,8,-1,-1
    allreduce,262144,12582911,ring,ll128,-1,1,8,-1,-1

One line a range of sizes: collective, least and most bytes, algorithm, protocol, channels, nodes,
ranks, pipelined operations, registered buffers; -1 leaves a field to NCCL. The format is that of
`ext-tuner/example` in NCCL's sources, plugin API v4 and later; bytes are those of the whole vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from plait.cluster import Cluster
from plait.collectives.schedule import COLLECTIVES
from plait.cost.comm import choose
from plait.errors import CollectiveError

HEADER = (
    "# collective,min_bytes,max_bytes,algorithm,protocol,channels,nodes,ranks,pipe_ops,reg_buff"
)


def csv(cluster: Cluster, steps_per_octave: int = 4) -> str:
    """NCCL's cheapest algorithm and protocol for every collective and size on all of `cluster`.

    Where one form overtakes another is found on a grid of that many sizes for each doubling, from
    1 KiB to 16 GiB. CollectiveError where the cluster has no NCCL.
    """
    if all(t.name != "nccl" for t in cluster.transports):
        raise CollectiveError(
            f"{cluster.name} has no NCCL to tune; its transports are "
            + ", ".join(t.name for t in cluster.transports)
        )
    lines = [f"# {cluster}", HEADER]
    for collective in filter(_NAMES.__contains__, COLLECTIVES):
        lines += _lines(collective, cluster, steps_per_octave)
    return "\n".join(lines) + "\n"


def _lines(collective: str, cluster: Cluster, steps: int) -> Iterator[str]:
    sizes = [round(2 ** (10 + i / steps)) for i in range(24 * steps + 1)]
    forms = [(size, _form(collective, size, cluster)) for size in sizes]
    runs = [(form, next(run)[0]) for form, run in groupby(forms, key=lambda pair: pair[1])]
    starts = [0, *(size for _, size in runs[1:])]
    ends = [*(start - 1 for start in starts[1:]), 2**63 - 1]
    for (form, _), low, high in zip(runs, starts, ends, strict=True):
        algorithm, protocol = form
        yield (
            f"{_NAMES[collective]},{low},{high},{algorithm},{protocol},-1,"
            f"{len(cluster.nodes)},{cluster.size},-1,-1"
        )


def _form(collective: str, nbytes: int, cluster: Cluster) -> tuple[str, str]:
    """`ring/LL128` as NCCL's plugin spells it."""
    best = choose(
        collective,
        nbytes,
        range(cluster.size),
        cluster,
        algorithm="native",
        transport="nccl",
    ).winner
    algorithm, _, protocol = best.detail.lower().partition("/")
    return algorithm, protocol or "simple"


_NAMES = {
    "all_reduce": "allreduce",
    "reduce_scatter": "reducescatter",
    "all_gather": "allgather",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
