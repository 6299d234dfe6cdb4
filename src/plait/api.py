"""The order of a compile: capture, describe, plan, partition, load, measure, run; written only here."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.asked import check, check_sites
from plait.capture import capture
from plait.capture.state import lasting
from plait.cluster import Cluster
from plait.compiler.alike import keywords, told, values
from plait.compiler.chosen import choose
from plait.compiler.contest import Contest
from plait.compiler.job import Job
from plait.compiler.recall import Recall
from plait.compiler.source import Source, device_of
from plait.errors import InputError
from plait.mesh import Mesh
from plait.plan import joint, overlaps, planner, staged
from plait.plan.plan import Plan
from plait.runtime.agree import Agreement
from plait.runtime.compiled import Compiled
from plait.runtime.processes import beside, members
from plait.runtime.staging import Seat, Staging
from plait.runtime.stopwatch import Stopwatch


@lasting()
def compile(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tp: int | str = "auto",
    pp: int | str = "auto",
    dp: int | str = 1,
    cluster: Cluster | str | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    dynamic: Mapping[str, Any] | None = None,
    weights: Any = None,
    training: bool = False,
    plan: Plan | None = None,
    objective: str = "latency",
    algorithm: str | Mapping[str, str] = "auto",
    overlap: str | int = "auto",
    micro_batches: str | int = "auto",
    schedule: str = "auto",
    recompute: str = "auto",
    outputs: str = "all",
    deterministic: bool = False,
    measure: bool = True,
) -> Compiled:
    """An unmodified model, split over the ranks of `group`; called as the model is called.

    `args`, `kwargs`: example inputs, the same on every rank; of one replica where `dp` makes several. `tp`, `pp`,
    `dp`: ranks by axis, together the group's; "auto" by predicted time. `cluster`: the machine to plan for, as
    `plait clusters` spells it; None: the one at hand. `measure`: by what `plait calibrate` measured of it, and the
    overlaps that are predicted to gain most are tried against blocking on these ranks; False: predicted from what is
    described alone.
    `dynamic`: `{"input_ids": {0: "batch"}}`, sizes that one program serves. `weights`: a safetensors file or folder for
    a model on meta. `plan`: a saved one. `objective`: "latency" or "throughput". `algorithm`: "auto", one name, or
    `{site: name}`. `overlap`: "auto", "off" or a number of chunks. `micro_batches`, `schedule`, `outputs` ("all"
    or "last"): of a pipeline. `recompute`: activations are kept for the backward ("off"), computed again in it
    ("full"), or again only where they would not fit a device ("auto"). `deterministic`: no algorithm that orders
    its sums by itself. Raises on every rank: CaptureError, MeshError, PlanError (does not fit the memory),
    WeightError, InputError, NotYetError.
    """
    asked = dict(locals())
    with told(group):
        _check(asked)
        group, ranks = members(group)
        where = device_of(model, device, group)
        machine = Cluster.of(cluster, measured=measure, processes=beside(ranks), kind=where.type)
        meshes = Mesh.fitting(tp, _stages(pp, overlap, machine), dp, ranks)
    agreement = Agreement(group, where)
    keywords(agreement, asked)
    source = Source(model, dtype, args, kwargs, dynamic, training, where)
    program, follower = source.first(agreement)
    if weights is None:
        values(agreement, model)
    watch = Stopwatch.of(machine.device, where) if measure else None
    options = planner.Options(1, machine, algorithm, objective, deterministic, overlap, watch=watch)
    ask = joint.Ask(
        meshes, machine, options, micro_batches, joint.allowed(schedule),
        recompute=joint.recompute(recompute), outputs=outputs,
    )  # fmt: skip
    recall = Recall.of(plan, program, ask, measure, agreement)
    plan = recall.plan()
    chosen = choose(program, ask, agreement, plan)
    seat = Seat.of(chosen.seats, group, agreement, where)
    pieces, alone = chosen.micro_batches(micro_batches), chosen.alone(training)
    staging = Staging.of(seat, machine, pieces, schedule, recompute, outputs, alone)
    job = Job(source, chosen.options(options), seat, agreement, plan, staging, chosen.laid, measure)
    contest = Contest.of(job, program)
    check_sites(algorithm, contest.first.planned.plan)
    holdings = job.load(program, contest.first, weights, contest.runs)
    first = contest.winner(holdings)
    recall.keep(first.planned.plan)
    agreement.divide(seat.seats.replicas())
    return Compiled(first, holdings, agreement, job.again(first), follower)


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str | None = None,
    tp: int | str = "auto",
    pp: int | str = "auto",
    dp: int | str = 1,
    dynamic: Mapping[str, Any] | None = None,
    training: bool = False,
    algorithm: str | Mapping[str, str] = "auto",
    objective: str = "latency",
    deterministic: bool = False,
    overlap: str | int = "auto",
    micro_batches: str | int = "auto",
    schedule: str = "auto",
    recompute: str = "auto",
    outputs: str = "all",
) -> Plan:
    """The plan for a described machine: no processes, no devices; the model may be on meta.

    `args` and `kwargs` are the batch of one replica. What is "auto" is chosen together, for the
    least seconds of a call or the least between results over all replicas (`objective`), within each
    device's memory; `Plan.choice` lists the front-runners. Raises CaptureError, MeshError (no mesh of
    all devices has these numbers) and PlanError (it does not fit: names the smallest number of
    devices of this kind that would do).
    """
    _check(locals())
    machine = Cluster.of(cluster)
    ask = joint.Ask(
        Mesh.fitting(tp, _stages(pp, overlap, machine), dp, machine.size, "the cluster"),
        machine,
        planner.Options(1, machine, algorithm, objective, deterministic, overlap),
        micro_batches,
        joint.allowed(schedule),
        recompute=joint.recompute(recompute),
        outputs=outputs,
    )
    with _uncollected():
        program = capture(model, args, kwargs, dynamic=dynamic, training=training)
        made = staged.settle(program, ask, joint.search(program, ask))
    check_sites(algorithm, made)
    return made


def _check(asked: Mapping[str, Any]) -> None:
    check(asked)
    if isinstance(asked["model"], Compiled):
        raise InputError("model is compiled already: give the module that it was made of")


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles: a graph is millions of small objects, of which few die.

    It took 1.5 of the 5 seconds that planning 32 layers takes, looking at them all again and again.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _stages(pp: int | str, overlap: str | int, machine: Cluster) -> int | str:
    """Chunks that are asked for leave one stage where a pipeline would run without them."""
    held = isinstance(overlap, int) and overlaps.held(overlap, machine.device)
    return 1 if pp == "auto" and held else pp


def clip_grad_norm_(module: Compiled, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip a compiled module's gradients by their norm over the whole model; returns the norm.

    `norm_type`: above 0, or inf. InputError: another number, or a module that is not compiled.
    """
    if not isinstance(module, Compiled):
        raise InputError(
            f"plait.clip_grad_norm_ takes a compiled module, not {type(module).__name__}; "
            "torch.nn.utils.clip_grad_norm_ takes parameters"
        )
    return module.clip_grad_norm_(max_norm, norm_type)
