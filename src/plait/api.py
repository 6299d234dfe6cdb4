"""The order of a compile: capture, describe, plan, partition, load, run; written only here."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.asked import check, check_sites
from plait.capture import capture
from plait.capture.join import Join, along
from plait.capture.loss import Loss, with_loss
from plait.capture.state import Ambient, State, around, posed
from plait.cluster import Cluster
from plait.cluster.presets import grow
from plait.errors import CaptureError, InputError, PlanError
from plait.mesh import ORDERS, Mesh, Seats
from plait.passes.microbatch import Joined, Uncut, why_uncut
from plait.passes.schedule import SCHEDULES
from plait.plan import joint, planner, staged
from plait.plan.plan import Choice, Plan, program_digest
from plait.plan.planner import Held, Laid, Planned
from plait.program import Program
from plait.runtime.agree import Agreement
from plait.runtime.compiled import Compiled, Holdings, Values, part_of
from plait.runtime.executor import Executable, executable, layouts
from plait.runtime.follow import Follower
from plait.runtime.processes import world
from plait.runtime.staging import Seat, Staging
from plait.runtime.weights import locate, open_source


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
    `plait clusters` spells it; None: the one at hand, by what `plait calibrate` measured unless `measure=False`.
    `dynamic`: `{"input_ids": {0: "batch"}}`, sizes that one program serves. `weights`: a safetensors file or folder for
    a model on meta. `plan`: a saved one. `objective`: "latency" or "throughput". `algorithm`: "auto", one name, or
    `{site: name}`. `overlap`: "auto", "off" or a number of chunks. `micro_batches`, `schedule`, `outputs` ("all"
    or "last"): of a pipeline. `recompute`: activations are kept for the backward ("off"), computed again in it
    ("full"), or again only where they would not fit a device ("auto"). `deterministic`: no algorithm that orders
    its sums by itself. Raises on every rank: CaptureError, MeshError, PlanError (does not fit the memory),
    WeightError, InputError, NotYetError.
    """
    check(locals())
    if group is None:
        group, _ = world()
    ranks = dist.get_world_size(group) if group is not None else 1
    meshes = Mesh.fitting(tp, _stages(pp, overlap), dp, ranks)
    place = _device(model, device, group)
    source = _Source(model, dtype, args, kwargs, dynamic, training, place)
    agreement = Agreement(group, place)
    ambient = replace(Ambient.now(training, place), grad=training)
    with agreement.step("compile"):
        program = source.capture(ambient)
        follower = Follower.of(model, program, ambient, place)
    folded = follower.state.facts.contents
    agreement.same("compile", [f"{name}: {folded[name]}" for name in sorted(folded)])
    machine = Cluster.of(cluster, measured=measure)
    options = planner.Options(1, machine, algorithm, objective, deterministic, overlap)
    schedules = joint.allowed(schedule, joint.RUNS)
    again = joint.recompute(recompute)
    ask = joint.Ask(meshes, machine, options, micro_batches, schedules, recompute=again, outputs=outputs)
    chosen = _chosen(program, ask, agreement, plan)
    pieces = chosen.pieces if micro_batches == "auto" and chosen.mesh.pp == 1 else micro_batches
    seat = Seat.of(chosen.seats, group, agreement, place)
    staging = Staging.of(seat, machine, pieces, schedule, recompute, outputs, chosen.alone(training))
    job = _Job(
        source, chosen.options(options), seat, agreement, place, plan, staging, chosen.laid
    )
    first = job.build(program)
    check_sites(algorithm, first.planned.plan)
    agreement.divide(seat.seats.replicas())
    with agreement.step("load"):
        holdings = _load(model, program, first, job, weights, dtype)
    return Compiled(first, holdings, seat.transport, agreement, job.again(first), follower)


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
    device's memory; `Plan.choice` lists the front-runners. It may ask for more than `compile` runs
    yet: replicas, any schedule. Raises CaptureError, MeshError (no mesh of
    all devices has these numbers) and PlanError (it does not fit: names the smallest number of
    devices of this kind that would do).
    """
    check(locals())
    machine = Cluster.of(cluster)
    ask = joint.Ask(
        Mesh.fitting(tp, _stages(pp, overlap), dp, machine.size, "the cluster"),
        machine,
        planner.Options(1, machine, algorithm, objective, deterministic, overlap),
        micro_batches,
        joint.allowed(schedule, tuple(SCHEDULES)),
        recompute=joint.recompute(recompute),
        outputs=outputs,
    )
    with _uncollected():
        program = capture(model, args, kwargs, dynamic=dynamic, training=training)
        made = staged.settle(program, ask, joint.search(program, ask))
    check_sites(algorithm, made)
    return made


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


@dataclass(frozen=True)
class _Source:
    """Where programs come from: the user's model and how it was asked for."""

    model: nn.Module
    dtype: torch.dtype | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    dynamic: Mapping[str, Any] | None
    training: bool
    device: torch.device

    def capture(self, ambient: Ambient) -> Program:
        """The model as it is now."""
        model = _retyped(self.model, self.dtype)
        with around(model, ambient, self.device):
            return capture(
                model,
                self.args,
                self.kwargs,
                dynamic=self.dynamic,
                training=self.training and ambient.grad,
            )

    def capture_again(self, state: State, values: Values) -> Program:
        """In another state and with the buffers of the compiled module; the model keeps its own."""
        with posed(self.model, state.facts.flags, values):
            return self.capture(state.ambient)


@dataclass(frozen=True)
class _Job:
    """One compile on one rank."""

    source: _Source
    options: planner.Options
    seat: Seat
    agreement: Agreement
    device: torch.device
    saved: Plan | None = None
    staging: Staging | None = None  # of a pipeline
    laid: Laid | None = None  # by the joint choice, of the whole batch

    def build(self, program: Program, first: Any = None, joined: Joined | None = None) -> Any:
        """What runs the program on this rank; `first` holds the weights that it must take."""
        if self.staging is not None:
            return self.staging.build(
                program, self.options, self.agreement, self.device, self.saved, first, joined
            )
        fixed = None if first is None else layouts(first.local)
        return executable(self.plan(program, fixed), self.seat.transport, self.device)

    def plan(self, program: Program, fixed: Held | None = None) -> Planned:
        """Rank 0's plan on every rank; all ranks must have captured the same program."""
        self.agreement.same("compile", [f"program {program_digest(program)}"])
        if self.saved is not None and fixed is None:
            return planner.replay(program, self.saved, self.options)
        mine: Planned | None = None
        text = ""
        with self.agreement.step("plan"):
            if self.agreement.plans:
                laid = self.laid if fixed is None else None
                mine = planner.make(program, self.options, fixed, laid)
                mine = replace(mine, plan=replace(mine.plan, dp=self.seat.seats.mesh.dp))
                text = mine.plan.to_json()
        chosen = Plan.from_json(self.agreement.broadcast("plan", text))
        return mine if mine is not None else planner.replay(program, chosen, self.options)

    def again(self, first: Executable) -> Any:
        """Programs for other forms of call, with the weights as they are loaded."""

        def recompile(
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
            state: State,
            values: Values,
            loss: Loss,
            cut: bool = False,
        ) -> Any:
            """`cut`: the plain program of a step runs in micro-batches, and so should this one."""
            source = replace(self.source, args=args, kwargs=kwargs)
            if loss.asked:
                source = replace(source, model=with_loss(source.model, loss), dynamic=None)
            program: Program | None = None
            joined: Joined | None = None
            reason = ""
            with self.agreement.step("compile"):
                try:
                    program = source.capture_again(state, values)
                    reason = why_uncut(program) if cut else ""
                    _same_weights(first.planned.program, program)
                except CaptureError as error:
                    if not loss.asked:
                        raise
                    reason = str(error)
            if loss.every is not None:
                program, joined, reason = self._join(source, program, loss, state, values, reason)
            if loss.asked:
                self.agreement.same("compile", [reason])
            if program is None or reason:
                return reason
            return self.build(program, first, joined)

        return recompile

    def _join(
        self,
        source: _Source,
        own: Program | None,
        loss: Loss,
        state: State,
        values: Values,
        reason: str,
    ) -> tuple[Program | None, Joined | None, str]:
        """The program of all replicas' batches together, or why there is none."""
        agreement, program = self.agreement, None
        failed = next(filter(None, agreement.all_replicas("join", reason if own is None else "")), "")
        if failed:
            return None, None, failed
        told = agreement.all_replicas("join", along(own) if own is not None else None)
        with agreement.step("join"):
            join = Join.of(told, loss.every)
        if not join.possible:
            return None, None, "no input has a dim that holds the batch"
        args, kwargs = source.args, source.kwargs or {}
        rest = agreement.all_replicas("join", join.rest(args, kwargs))
        if len(set(rest)) > 1:
            raise InputError("step: inputs without a batch differ between replicas; pass the same")
        found: Joined | Uncut = Uncut("")
        with agreement.step("join"):
            args, kwargs = join.example(args, kwargs)
            try:
                program = replace(source, args=args, kwargs=kwargs).capture_again(state, values)
                found = join.found(program, self.seat.replicas.number)
            except CaptureError as error:
                found = Uncut(str(error))
        if isinstance(found, Uncut):
            return None, None, found.reason
        return program, found, ""


def _load(
    model: nn.Module, program: Program, first: Any, job: _Job, weights: Any, dtype: Any
) -> Holdings:
    source = open_source(weights) if weights is not None else None
    loading = locate(program.weights, model=model, source=source, unused=program.unused)
    shares = {s.weight.name: s for s in first.local.shares}
    unused = {w.name: w for w in program.unused}
    parts = {n: part_of(s.weight, s.cut, job.seat.transport.rank) for n, s in shares.items()}
    parts |= {n: part_of(w, None, job.seat.transport.rank) for n, w in unused.items()}
    places = job.staging.places(first, job.device) if job.staging is not None else None
    if places is not None:
        parts = {n: part for n, part in parts.items() if places.holds(n)}
    tensors: dict[str, Tensor] = loading.load(
        parts, device=job.device, dtype=dtype, runs=first.local.runs
    )
    for weight in (*program.weights, *program.unused):
        if weight.kind == "parameter" and weight.name in tensors:
            value = tensors[weight.name]
            tensors[weight.name] = nn.Parameter(value, requires_grad=weight.requires_grad)
    return Holdings(shares, tensors, unused, job.seat, places)


def _same_weights(before: Program, now: Program) -> None:
    """A compiled module has its weights already: another program of it has to take them."""
    held = {n: w for w in (*before.weights, *before.unused) for n in w.names}
    wrong = [
        f"{w.name} {list(w.shape)} {w.dtype}, compiled as "
        + (f"{list(old.shape)} {old.dtype}" if old is not None else "nothing")
        for w in now.weights
        if w.kind != "constant"
        for old in [held.get(w.name)]
        if old is None or (old.shape, old.dtype) != (w.shape, w.dtype)
    ]
    if wrong:
        raise CaptureError(
            f"the weights of the model changed after the compile: {'; '.join(wrong)}. Compile the "
            "model again"
        )


def _retyped(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model as capture should see it where parameters are to have another dtype.

    A copy whose floating-point parameters are of `dtype` and hold no values; buffers keep theirs.
    """
    if dtype is None:
        return model
    memo: dict[int, Any] = {}
    for p in model.parameters():
        if p.is_floating_point() and p.dtype != dtype:
            empty = torch.empty_like(p, dtype=dtype)  # its pages are never touched
            memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo) if memo else model


def _stages(pp: int | str, overlap: str | int) -> int | str:
    """Chunks that are asked for leave one stage: a pipeline runs without them."""
    return 1 if pp == "auto" and isinstance(overlap, int) and overlap > 1 else pp


@dataclass(frozen=True)
class _Chosen:
    """What decides how a program is run, the same on every rank."""

    mesh: Mesh
    choice: Choice | None = None
    pieces: int | str = "auto"
    recompute: str = "off"
    laid: Laid | None = None  # on rank 0, of a choice that was made just now

    @property
    def seats(self) -> Seats:
        return Seats(self.mesh, self.choice.winner.order if self.choice is not None else ORDERS[0])

    def alone(self, training: bool) -> bool:
        """Whether one stage of one micro-batch runs as it is: it keeps what its backward needs, and shares
        its gradients with no replica."""
        return self.recompute == "off" and not (training and self.mesh.dp > 1)

    def options(self, asked: planner.Options) -> planner.Options:
        """Of one tensor-parallel group."""
        tp, machine = self.mesh.tp, asked.cluster
        group = machine.subset(range(tp)) if machine.size >= tp else machine
        return replace(asked, tp=tp, cluster=group, choice=self.choice)


def _chosen(program: Program, ask: joint.Ask, agreement: Agreement, saved: Plan | None) -> _Chosen:
    """The saved plan's, the only one, or rank 0's choice, which every rank's plan records."""
    if saved is not None:
        mesh = Mesh(saved.tp, saved.pp, saved.dp)
        if mesh not in ask.meshes:
            raise PlanError(
                f"the plan is for {mesh}; of the ranks at hand these can be made: "
                + ", ".join(map(str, ask.meshes))
            )
        kept = saved.staged.recompute if saved.staged is not None else "off"
        return _Chosen(mesh, pieces=saved.micro_batches, recompute=kept)
    if len(ask.meshes) == 1 and not (program.training and ask.meshes[0].pp == 1):
        return _Chosen(ask.meshes[0])
    agreement.same("compile", [f"program {program_digest(program)}"])
    laid, text = None, ""
    with agreement.step("plan"):
        if agreement.leads:
            size = ask.meshes[0].size
            machine = grow(ask.cluster, size).subset(range(size))
            found = joint.search(program, replace(ask, cluster=machine))
            laid, text = found.laid, found.choice.to_json()
    choice = Choice.from_json(agreement.broadcast("plan", text))
    best = choice.winner
    mesh = Mesh(best.tp, best.pp, best.dp)
    return _Chosen(mesh, choice, best.micro_batches, best.recompute, laid)


def _device(
    model: nn.Module, device: torch.device | str | None, group: dist.ProcessGroup | None
) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = {p.device for p in model.parameters()} or {torch.device("cpu")}
    where = next(iter(found))
    if where.type != "meta":
        return where
    if group is not None and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


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
