"""Compiled: the module that a user holds. Programs by form of call, over weights in shares.

    holdings.py    the weights here, and what all ranks' parts make together
    store.py       state, gradients and checkpoints, in whole
    clipping.py    the norm of all gradients
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.capture.call import TARGET, resolved
from plait.capture.join import shapes
from plait.capture.loss import NO_LOSS, Loss
from plait.capture.refuse import refuse_inputs
from plait.capture.state import State, lasting
from plait.errors import InputError, NotYetError
from plait.passes.microbatch import MOST
from plait.plan.plan import Plan
from plait.program import Program
from plait.report.explain import explain
from plait.runtime import clipping
from plait.runtime.actions import SALT
from plait.runtime.agree import Agreement
from plait.runtime.executor import Executable
from plait.runtime.follow import Follower
from plait.runtime.holdings import Holdings
from plait.runtime.mirror import mirror
from plait.runtime.pipeline import Pipeline
from plait.runtime.programs import Programs
from plait.runtime.step import Gathered, on_the_output, with_target, without_target
from plait.runtime.store import Store

Recompile = Callable[..., Any]  # see compiler/job.py


class Compiled(nn.Module):
    """The model on this rank. Made by `plait.compile`; call it as the model is called."""

    _programs: Programs
    _follower: Follower
    _holdings: Holdings
    _agreement: Agreement
    _recompile: Recompile
    _store: Store

    def __init__(
        self,
        first: Executable,
        holdings: Holdings,
        agreement: Agreement,
        recompile: Recompile,
        follower: Follower,
    ):
        super().__init__()
        state = self.__dict__
        state["_programs"] = Programs(follower.state, first)
        state["_follower"] = follower
        state["_holdings"] = holdings
        state["_agreement"] = agreement
        state["_recompile"] = recompile
        names = tuple(follower.model.state_dict(keep_vars=True))
        state["_store"] = Store(holdings, agreement, names)
        mirror(self, follower.model, {})
        holdings.place(self, agreement.guard)
        holdings.tell_gradients(agreement.guard)

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
        _refuse_odd(executable.program, leaves)
        holdings, transport = self._holdings, self._holdings.transport
        with agreement.guard(what), transport.in_order(), self._follower.casts_off():
            seed = self._seed() if executable.local.seeded else torch.zeros(0)
            live = holdings.live()
            out = (call or executable)(live, leaves, seed)
            changed = {executable.program.weight(m.weight).name for m in executable.program.mutations}
            holdings.replicas.lead([x for name, x in live.items() if name in changed])
        agreement.way_back(out, holdings.way_back)
        return out

    def _seed(self) -> Tensor:
        """Of the random operators of a call: another one on every replica."""
        apart = self._holdings.replicas.number * MOST * SALT % 2**62
        return (self._agreement.seed() + apart) % 2**62

    def _executable(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss = NO_LOSS
    ) -> Any:
        """The program for this call and the call's leaves; made on all ranks if it is new."""
        args, kwargs = resolved((tuple(args), dict(kwargs)))
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
        if self._holdings.replicas.count == 1:
            return found is None
        return not all(self._agreement.tell("program", found is not None))

    @lasting()
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
        with self._agreement.guard("buffers"):
            return self._holdings.buffers()

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
        if torch.is_inference_mode_enabled():
            raise InputError("step() needs gradients: call it outside of torch.inference_mode()")
        loss, kwargs = Loss(loss_fn), with_target(kwargs, target)
        loss.takes(kwargs[TARGET])
        if self._holdings.replicas.count > 1:
            own = shapes(args, kwargs)
            loss = replace(loss, every=self._agreement.all_replicas("step", own))
        elif self._alone:
            return on_the_output(self, loss, args, kwargs, self._agreement.guard)
        found, leaves = self._executable(args, kwargs, loss)
        if not isinstance(found, Gathered):
            found.refuse_step(leaves)
            loss_and_out = self._run(found, leaves, "step", found.step)
            self._holdings.way_back()
            return loss_and_out
        plain = found.plain
        call = partial(self._run, plain.whole(), leaves, "forward")
        value, out = on_the_output(lambda *_, **__: call(), loss, args, kwargs, self._agreement.step)
        value = self._holdings.replicas.total(value) / self._holdings.replicas.count
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
        return self._holdings.replicas.number

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
        whole = self._store.whole(not rank0_only or self._holdings.first)
        out: dict[str, Tensor] = {} if destination is None else destination
        out |= {prefix + name: value for name, value in whole.items()}
        return out

    def load_state_dict(
        self, state: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> Any:
        """Every rank takes its rows of the whole tensors in `state`.

        Returns, as torch does, the names that are missing and those that are unexpected: WeightError
        lists them where `strict`, and names of another shape in any case.
        """
        return self._store.take(state, strict)

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
        return self._store.gradients(device)

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
        self._store.save(folder, optimizer, sharded)

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
        self._store.load(folder, optimizer, trusted, prefix)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, over the whole model; equal on every rank."""
        return clipping.clip(self._holdings, self._agreement, max_norm, norm_type)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What copies and pickles begin with."""
        raise NotYetError(
            "a compiled module cannot be copied or pickled: compile the model again, and take the "
            "weights over by save() or state_dict()"
        )


def _refuse_odd(program: Program, leaves: Sequence[Any]) -> None:
    tensors = [(i.path, x) for x, i in zip(leaves, program.inputs, strict=True) if isinstance(x, Tensor)]
    if any(x.layout is not torch.strided or x.is_nested for _, x in tensors):
        refuse_inputs(tensors)
    empty = [path for path, x in tensors if x.is_meta]
    if empty:
        raise InputError(f"{', '.join(empty)}: on the meta device, and without values")
