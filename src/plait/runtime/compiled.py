"""Compiled: the module that a user holds. Weights in shares, programs by form of call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.asked import check_device
from plait.capture.join import shapes
from plait.capture.loss import NO_LOSS, TARGET, Loss
from plait.capture.state import State
from plait.errors import InputError, NotYetError, WeightError
from plait.passes.microbatch import MOST
from plait.passes.partition import Share
from plait.plan.plan import Plan
from plait.program import Program, Weight
from plait.report.explain import explain
from plait.rules.moves import Cut, Step, only_own
from plait.runtime import checkpoint, gradient, optimizers, saving
from plait.runtime.actions import SALT
from plait.runtime.agree import Agreement
from plait.runtime.executor import Executable
from plait.runtime.follow import Follower
from plait.runtime.gradient import Holder
from plait.runtime.mirror import mirror, register
from plait.runtime.pipeline import Pipeline
from plait.runtime.places import Places
from plait.runtime.programs import Programs
from plait.runtime.replicas import Replicas
from plait.runtime.sharded import Sharded, remove
from plait.runtime.staging import Seat
from plait.runtime.step import Gathered, on_the_output, with_target, without_target
from plait.runtime.transport import Transport
from plait.runtime.weights import Loading, Tensors, locate, open_source

Values = Mapping[str, Tensor]  # whole buffers by name
Recompile = Callable[..., Any]  # see compiler/job.py


@dataclass
class Holdings:
    """This rank's weights: what share of each, and, until they are placed, `tensors` by name."""

    shares: dict[str, Share]
    tensors: dict[str, Tensor]
    unused: dict[str, Weight]
    seat: Seat
    stages: Places | None = None  # of a pipeline: `tensors` are those of this rank's stages

    def holds(self, name: str, rank: int) -> bool:
        """Whether that rank has what a change is about: a flag of a weight, or something else."""
        if self.stages is None:
            return True
        name = name.removesuffix(".requires_grad")
        first = next((w.name for w, _ in self.weights() if name in w.names), None)
        return first is None or self.seat.seats.of(rank)[0] in self.stages.holders[first]

    def weights(self) -> Iterator[tuple[Weight, Cut | None]]:
        for share in self.shares.values():
            yield share.weight, share.cut
        for weight in self.unused.values():
            yield weight, None


class Compiled(nn.Module):
    """The model on this rank. Made by `plait.compile`; call it as the model is called."""

    _programs: Programs
    _follower: Follower
    _holdings: Holdings
    _transport: Transport
    _agreement: Agreement
    _recompile: Recompile
    _state_names: tuple[str, ...]
    _places: dict[str, Callable[[], Tensor]]

    def __init__(
        self,
        first: Executable,
        holdings: Holdings,
        transport: Transport,
        agreement: Agreement,
        recompile: Recompile,
        follower: Follower,
    ):
        super().__init__()
        state = self.__dict__
        state["_programs"] = Programs(follower.state, first)
        state["_follower"] = follower
        state["_holdings"] = holdings
        state["_transport"] = transport
        state["_agreement"] = agreement
        state["_recompile"] = recompile
        state["_state_names"] = tuple(follower.model.state_dict(keep_vars=True))
        mirror(self, follower.model, {})
        state["_places"] = {
            weight.name: register(self, weight, holdings.tensors.pop(weight.name))
            for weight, _ in holdings.weights()
            if weight.name in holdings.tensors
        }
        self._tell_gradients()

    # -- calling -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        executable, leaves = self._executable(args, kwargs)
        if isinstance(executable, Pipeline):
            executable.refuse()
        return self._run(executable, leaves, "forward")

    def _run(
        self, executable: Any, leaves: Sequence[Any], what: str, call: Callable[..., Any] | None = None
    ) -> Any:
        agreement = self._agreement
        _refuse_meta(executable.program, leaves)
        with agreement.guard(what), self._transport.in_order(), self._follower.casts_off():
            seed = self._seed() if executable.local.seeded else torch.zeros(0)
            live = self._live()
            out = (call or executable)(live, leaves, seed)
            changed = {executable.program.weight(m.weight).name for m in executable.program.mutations}
            self._replicas.lead([x for name, x in live.items() if name in changed])
        agreement.way_back(out)
        return out

    @property
    def _replicas(self) -> Replicas:
        return self._holdings.seat.replicas

    def _seed(self) -> Tensor:
        """Of the random operators of a call: another one on every replica."""
        apart = self._replicas.number * MOST * SALT % 2**62
        return (self._agreement.seed() + apart) % 2**62

    def _tell_gradients(self) -> None:
        """Torch's own clipping, scaler and optimizers learn which weights are not whole here."""
        stages = self._holdings.stages
        staged = stages is not None and stages.channel.pp > 1
        live = self._live()
        for weight, cut in self._holdings.weights():
            own = live.get(weight.name)
            if isinstance(own, nn.Parameter) and (staged or cut is not None):
                holder = Holder(weight.name, cut, staged, self._transport, self._agreement.guard)
                optimizers.mark(own, holder)
                if own.dtype.is_floating_point or own.dtype.is_complex:
                    gradient.attach(own, holder)

    def _live(self) -> dict[str, Tensor]:
        """Weights as the module holds them now; `.to()` or an assignment may have replaced them."""
        return {name: place() for name, place in self._places.items()}

    def _executable(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss = NO_LOSS
    ) -> Any:
        """The program for this call and the call's leaves; made on all ranks if it is new."""
        follower, programs = self._follower, self._programs
        view = follower.look(self)
        number = programs.number(view.state, bool(view.changes))
        about = str(loss) if loss.asked else "forward"
        changes, number = self._agreement.call(
            args, kwargs, view.changes, number, self._holdings.holds, about
        )
        view = view.agreed(changes)
        if changes:
            follower.adopt(self, view)
        found = programs.find(number, args, kwargs, loss)
        if self._missing(found):
            made = self._make(args, kwargs, view.state, loss)
            if found is not None:
                return found
            number = programs.add(number, follower.settle(self, view, made.folded), made, loss)
            found = programs.find(number, args, kwargs, loss)
        elif changes:
            follower.settle(self, view, ())
        return found

    def _missing(self, found: Any) -> bool:
        """Whether a replica has no program for its call: then all make one, at the same points."""
        if self._replicas.count == 1:
            return found is None
        return not all(self._agreement.tell("program", found is not None))

    def _make(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], state: State, loss: Loss
    ) -> Any:
        if not loss.asked:
            return self._recompile(args, kwargs, state, self._buffers_whole(), loss)
        plain, _ = self._executable(args, without_target(kwargs))
        made = self._recompile(args, kwargs, state, self._buffers_whole(), loss, plain.cut)
        return Gathered(plain, made) if isinstance(made, str) else made

    def _buffers_whole(self) -> dict[str, Tensor]:
        """What a new program has to fold: the values here, not those of the user's model."""
        live = self._live()
        with self._agreement.guard("buffers"), torch.no_grad():
            values = {
                weight.names: self._everywhere(weight, cut, live.get(weight.name))
                for weight, cut in self._holdings.weights()
                if weight.kind == "buffer"
            }
        return {n: v for names, v in values.items() if v is not None for n in names}

    @torch.enable_grad()
    def step(self, *args: Any, target: Any = (), loss_fn: Any = None, **kwargs: Any) -> Any:
        """Forward and backward of `loss_fn(out, *target)`; returns (loss, outputs), without graphs.

        A pipeline runs its schedule. With replicas the loss is that of all their batches together.
        `target`: a tuple, or the one argument; without `loss_fn` the
        loss is the `loss` of the model's output. Gradients are added to `.grad` of parameters and
        inputs; nothing is zeroed and no optimizer steps. InputError: the loss is not one number, or
        the module was not compiled with training=True.
        """
        if not self._first.planned.program.training:
            raise InputError("step() needs gradients: compile with training=True")
        loss, kwargs = Loss(loss_fn), with_target(kwargs, target)
        loss.takes(kwargs[TARGET])
        if self._replicas.count > 1:
            own = shapes(args, kwargs)
            loss = replace(loss, every=self._agreement.all_replicas("step", own))
        elif self._alone:
            return on_the_output(self, loss, args, kwargs)
        found, leaves = self._executable(args, kwargs, loss)
        if not isinstance(found, Gathered):
            return self._run(found, leaves, "step", found.step)
        plain = found.plain
        call = partial(self._run, plain.whole(), leaves, "forward")
        value, out = on_the_output(lambda *_, **__: call(), loss, args, kwargs)
        value = self._replicas.total(value) / self._replicas.count
        return value, out if plain.reads else None

    @property
    def _alone(self) -> bool:
        """One stage, one micro-batch, one replica: nothing is to be scheduled."""
        stages = self._holdings.stages
        return stages is None or (stages.channel.pp == 1 and not self._first.cut)  # type: ignore[attr-defined]

    def train(self, mode: bool = True) -> Compiled:
        if not isinstance(mode, bool):
            raise InputError(f"train({mode!r}): it takes True, or False, which eval() is")
        return super().train(mode)

    # -- what was chosen ---------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self._first.planned.plan

    @property
    def replica(self) -> int:
        """Which of the `dp` replicas this rank belongs to, from 0: whose batch it passes."""
        return self._replicas.number

    @property
    def _first(self) -> Executable:
        return self._programs.first

    def explain(self) -> str:
        """How the model was split, every collective, what stayed whole and why, the steps so far."""
        return "\n".join([explain(self.plan), *self._programs.steps()])

    # -- weights -----------------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        rank0_only: bool = False,
    ) -> dict[str, Tensor]:
        """Every name of the model's, whole tensors on the CPU; a collective.

        `rank0_only`: the other ranks get {}. `destination` and `prefix` are for the module that this
        one is a part of; the tensors are copies, so there are no variables to keep.
        """
        by_name = {n: (w, cut) for w, cut in self._holdings.weights() for n in w.names}
        whole: dict[str, Tensor] = {}
        out: dict[str, Tensor] = {} if destination is None else destination
        live = self._live()
        keep = not rank0_only or self._is_first
        with self._agreement.guard("state_dict"), torch.no_grad():
            for name in self._state_names:
                weight, cut = by_name[name]
                if weight.name not in whole:
                    value = self._everywhere(weight, cut, live.get(weight.name))
                    assert value is not None
                    whole[weight.name] = value.cpu().clone() if keep else value.new_empty(0)
                if keep:
                    out[prefix + name] = whole[weight.name]
        return out

    @property
    def _is_first(self) -> bool:
        stages = self._holdings.stages
        first = self._transport.rank == 0 and self._replicas.number == 0
        return first and (stages is None or stages.place == 0)

    def _everywhere(self, weight: Weight, cut: Cut | None, part: Tensor | None) -> Tensor | None:
        """The whole of a weight, or of its gradient, on every rank; None where there is none."""
        whole = None if part is None else self._whole(part.detach(), cut)
        stages = self._holdings.stages
        return whole if stages is None else stages.share(weight, whole)

    def _whole(self, part: Tensor, cut: Cut | None) -> Tensor:
        if cut is None:
            return part
        return self._transport.run(Step("gather"), part, cut, "native")

    def load_state_dict(
        self, state: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> Any:
        """Every rank takes its rows of the whole tensors in `state`.

        Returns, as torch does, the names that are missing and those that are unexpected: WeightError
        lists them where `strict`, and names of another shape in any case.
        """
        weights = [w for w, _ in self._holdings.weights()]
        with self._agreement.step("load_state_dict"), torch.no_grad():
            source = Tensors(state)
            source = source if strict else Tensors(_known(state, weights))
            self._take(locate(_within(weights, state, strict), source=source))
        missing = [n for n in self._state_names if n not in state]
        extra = [n for n in state if n not in self._state_names]
        return nn.modules.module._IncompatibleKeys(missing, extra)

    def _take(self, loading: Loading) -> None:
        """This rank's rows of what was found."""
        rank, live = self._transport.rank, self._live()
        held = [(w, cut) for w, cut in self._holdings.weights() if w.name in live]
        for name, value in loading.load({w.name: part_of(w, c, rank) for w, c in held}).items():
            live[name].copy_(value)

    def _load_from_state_dict(  # type: ignore[override]
        self,
        state: Mapping[str, Tensor],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        extra: list[str],
        errors: list[str],
    ) -> None:
        """As a part of the module whose `load_state_dict` is called."""
        own = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        found = self.load_state_dict(own, strict=False)
        missing += [prefix + n for n in found.missing_keys]
        extra += [prefix + n for n in found.unexpected_keys]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Compiled:
        """What changes dtypes or devices is refused: programs were compiled for those they have."""
        changes = [
            f"{name} from {own.dtype} on {own.device} to {new.dtype} on {new.device}"
            for name, own in (*self.named_parameters(), *self.named_buffers())
            for new in [fn(own.detach().new_empty(0))]
            if (new.dtype, new.device) != (own.dtype, own.device)
        ]
        if changes:
            raise InputError(
                f"a compiled module keeps its dtypes and its device; this would change "
                f"{'; '.join(changes)}. Compile the model with dtype= or device="
            )
        super()._apply(fn, recurse)
        return self

    def gradients(self, device: torch.device | str = "cpu") -> dict[str, Tensor | None]:
        """Whole gradients by the names of the model's `named_parameters()`; a collective."""
        check_device(device)
        out: dict[str, Tensor | None] = {}
        live = self._live()
        with self._agreement.guard("gradients"), torch.no_grad():
            for weight, cut in self._holdings.weights():
                if weight.kind != "parameter":
                    continue
                own = live[weight.name].grad if weight.name in live else None
                own = None if own is None else gradient.plain(own)
                grad = self._everywhere(weight, cut, own)
                out[weight.name] = None if grad is None else grad.to(device).clone()
        return {n: out[n] for n in self._parameter_order() if n in out}

    def _parameter_order(self) -> list[str]:
        first = {n: w.name for w, _ in self._holdings.weights() for n in w.names}
        return list(dict.fromkeys(first[n] for n in self._state_names if n in first)) + [
            w.name for w, _ in self._holdings.weights() if w.name not in self._state_names
        ]

    def save(
        self,
        folder: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sharded: bool = False,
    ) -> None:
        """A checkpoint, in place of the one that is there once it is whole; all ranks must come.

        One whole safetensors checkpoint, written by rank 0; with `sharded`, or an optimizer, every rank writes
        its own rows into the folder, which all ranks share. InputError: there can be no such folder,
        or the optimizer's state is not one that can be cut for another mesh.
        """
        self._agreement.meet("save")
        with self._agreement.step("save"):
            checkpoint.prepare(folder, makes=self._is_first)
            saving.check(optimizer)
        if sharded or optimizer is not None:
            with torch.no_grad():
                saving.save(Path(folder), self._held(), optimizer, self._agreement, self._agreement.rank)
            return
        state = self.state_dict(rank0_only=True)
        with self._agreement.step("save"):
            if self._is_first:
                specs = {n: checkpoint.Spec(tuple(t.shape), t.dtype) for n, t in state.items()}
                checkpoint.write(Path(folder), specs, state.values())
                remove(Path(folder))

    def load(
        self,
        folder: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        trusted: bool = False,
        prefix: str = "",
    ) -> None:
        """What any mesh has saved, the optimizer's state included; each rank reads its own rows.

        `optimizer`: made for this module, of the same class and groups as the one that was saved; it takes
        the saved options, too. `trusted`: the folder may be one of torch.distributed.checkpoint, whose
        metadata is a pickle; its weights are read, whose names begin with `prefix`, and its optimizer's state
        is not. WeightError, InputError: names or shapes are not those of the module.
        """
        weights = [w for w, _ in self._holdings.weights()]
        with self._agreement.step("load"), torch.no_grad():
            saving.check(optimizer)
            source = open_source(folder, trusted, prefix)
            self._take(locate(_within(weights, {}, True), source=source))
            if optimizer is not None:
                if not isinstance(source, Sharded):
                    raise WeightError(f"{folder} holds no optimizer: save(folder, optimizer) writes one")
                saving.load_optimizer(source.index, self._held(), optimizer)

    def _held(self) -> list[saving.Held]:
        """What is saved; the ranks that hold the same rows take turns in writing them."""
        live, stages = self._live(), self._holdings.stages
        rank, tp, replicas = self._transport.rank, self._transport.size, self._replicas
        out = []
        for i, (weight, cut) in enumerate(self._holdings.weights()):
            if weight.name in live and _saved(weight):
                turn = i % replicas.count == replicas.number and (cut is not None or i % tp == rank)
                writes = turn and (stages is None or stages.counts(weight.name))
                out.append(saving.Held(weight, cut, rank, live[weight.name], writes))
        return out

    # -- norms -------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, over the whole model; equal on every rank."""
        if not isinstance(norm_type, Real) or not norm_type > 0:
            raise InputError(f"norm_type is {norm_type!r}; it is a number above 0, or inf")
        if not isinstance(max_norm, (Real, Tensor)) or not max_norm >= 0:
            raise InputError(f"max_norm is {max_norm!r}; it is a number from 0, or inf")
        grads = []
        live, stages = self._live(), self._holdings.stages
        for weight, cut in self._holdings.weights():
            grad = live[weight.name].grad if weight.name in live else None
            grad = None if grad is None else gradient.plain(grad)
            if weight.kind == "parameter" and grad is not None:
                counts = stages is None or stages.counts(weight.name)
                grads.append((grad, _counted(grad, cut, self._transport.rank) if counts else None))
        with self._agreement.guard("clip_grad_norm_"), torch.no_grad():
            dtypes = {w.dtype for w, _ in self._holdings.weights() if w.kind == "parameter"}
            zero = torch.zeros(
                (),
                dtype=torch.float64 if torch.float64 in dtypes else torch.float32,
                device=grads[0][0].device if grads else "cpu",
            )
            own = [part for _, part in grads if part is not None]
            total = _norm(own, float(norm_type), zero, self._transport, stages)
            scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            for grad, _ in grads:
                grad.mul_(scale.to(grad.dtype))
        return total

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What copies and pickles begin with."""
        raise NotYetError(
            "a compiled module cannot be copied or pickled: compile the model again, and take the "
            "weights over by save() or state_dict()"
        )


def _refuse_meta(program: Program, leaves: Sequence[Any]) -> None:
    pairs = zip(leaves, program.inputs, strict=True)
    empty = [i.path for x, i in pairs if isinstance(x, Tensor) and x.is_meta]
    if empty:
        raise InputError(f"{', '.join(empty)}: on the meta device, and without values")


def part_of(weight: Weight, cut: Cut | None, rank: int) -> checkpoint.Part:
    """The rows of every dim that `rank` stores."""
    part = list(checkpoint.whole(weight.shape))
    if cut is not None:
        part[cut.dim] = cut.rows[rank]
    return tuple(part)


def _known(state: Mapping[str, Tensor], weights: Sequence[Weight]) -> dict[str, Tensor]:
    names = {n for w in weights for n in w.names}
    return {k: v for k, v in state.items() if k in names}


def _within(weights: Sequence[Weight], state: Mapping[str, Tensor], strict: bool) -> list[Weight]:
    saved = [w for w in weights if _saved(w)]
    return saved if strict else [w for w in saved if any(n in state for n in w.names)]


def _saved(weight: Weight) -> bool:
    return weight.kind == "parameter" or (weight.kind == "buffer" and weight.persistent)


def _counted(grad: Tensor, cut: Cut | None, rank: int) -> Tensor | None:
    """What this rank counts of a gradient in a norm: its own rows; whole ones count on rank 0."""
    if cut is None:
        return grad if rank == 0 else None
    return only_own(grad, cut, rank)


def _norm(
    own: Sequence[Tensor], p: float, zero: Tensor, transport: Transport, stages: Places | None
) -> Tensor:
    """`zero`: of the dtype to sum in, the same on every rank, also where it counts nothing."""
    if p == float("inf"):
        top = zero
        for g in own:
            top = torch.maximum(top, g.abs().max().to(zero)) if g.numel() else top
        top = transport.run(Step("all_reduce", "max"), top, None, "native")
        return top if stages is None else stages.total(top, "max")
    total = zero
    for g in own:
        total = total + torch.linalg.vector_norm(g.to(zero.dtype), p).to(zero) ** p
    total = transport.run(Step("all_reduce"), total, None, "native")
    total = total if stages is None else stages.total(total, "sum")
    return total ** (1.0 / p)
