"""Gradients: what it costs to sum them over the replicas, and in which buckets that is done.

    seconds left bare = max(the sum of a stage's gradients - its last backward, the last bucket)

A bucket is summed beside the backward of the layers before it, so the last one has nothing to hide under.
"""

from __future__ import annotations

from dataclasses import replace

from plait.mesh import Mesh
from plait.passes import schedule
from plait.plan import planner
from plait.plan.placement import Placement
from plait.plan.plan import Placed
from plait.plan.planner import Options
from plait.plan.stages import Cuts
from plait.plan.work import Work

# DistributedDataParallel's own sizes (torch 2.13, torch/nn/parallel/distributed.py).
BUCKET = 25 * 2**20  # bytes
FIRST = 2**20  # bytes of the bucket that is full first: it has the most to hide under
SITE = "gradients"


def summed(placement: Placement, options: Options, work: Work) -> Placed | None:
    """The sum of a stage's gradients over the replicas, by the algorithm that suits a bucket."""
    if placement.mesh.dp == 1 or not work.trained:
        return None
    mesh, group = placement.mesh, placement.dp
    options = replace(options, tp=mesh.dp, cluster=group.cluster, crowd=group.crowd)
    nbytes = sum(work.trained.values()) / mesh.pp
    algorithm, _ = planner.pick(options, "all_reduce", min(BUCKET, nbytes), SITE)
    _, seconds = planner.pick(options, "all_reduce", nbytes, SITE)
    return Placed(SITE, "all_reduce", round(nbytes), algorithm, seconds, "weights", "")


def bare(placed: Placed | None, cuts: Cuts) -> float:
    """The seconds of it that the last backward of the slowest stage does not hide."""
    if placed is None:
        return 0.0
    backward = max(cuts.seconds) * schedule.BACKWARD / (1 + schedule.BACKWARD)
    return max(placed.seconds - backward, placed.seconds / 10)


def room(mesh: Mesh, work: Work) -> float:
    """Bytes of the bucket that is filled while the gradients it takes are still there."""
    return min(BUCKET, sum(work.trained.values())) if mesh.dp > 1 else 0.0
