"""`plait collectives`: every algorithm on this machine, timed in turns and counted."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from plait.cluster import Cluster
from plait.cluster.presets import host_memory
from plait.cluster.units import spell_size
from plait.collectives.algorithms import names
from plait.collectives.measure import measure, private_loopback
from plait.collectives.schedule import Collective
from plait.errors import InputError
from plait.report.collectives import measured, notes
from plait.report.tables import show
from plait.runtime.processes import launch, world


def run(collective: Collective, size: int, nproc: int, rounds: int) -> None:
    """On local processes, in a network of their own where the system allows it."""
    check_memory(size, nproc)
    private = private_loopback()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    launch(survey, nproc, collective, size, rounds, private)


def check_memory(size: int, nproc: int) -> None:
    """InputError if so many processes cannot hold the vector and what comes from another."""
    have = host_memory()
    if 2 * nproc * size > have:
        raise InputError(
            f"--size {spell_size(size)}: {nproc} processes need twice that each, and this machine "
            f"has {spell_size(have)}; nearest: {spell_size(have // (2 * nproc) >> 20 << 20)}"
        )


def survey(collective: Collective, size: int, rounds: int, private: bool) -> None:
    """Every algorithm on the ranks of this world, all of them in every round; rank 0 prints."""
    torch.set_num_threads(1)
    group, _ = world("gloo")
    ranks = dist.get_world_size(group)
    asked = ["native", *names(collective)]
    found = measure(asked, size, group, rounds=rounds, collective=collective)
    if dist.get_rank(group) == 0:
        cluster = Cluster.of(None, kind="cpu").subset(range(ranks))
        show(measured(found, cluster), *notes(found, cluster, private))
    dist.barrier(group)
