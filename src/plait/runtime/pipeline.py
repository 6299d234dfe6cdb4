"""Pipeline: the executable of one form of call, on the stages of one rank.

In the user's own loop a call is one node of his autograd graph: all micro-batches go forward, the
outputs are put together and given to every rank; backward runs all of them back and hands the
gradients of weights and inputs to autograd, which adds them up as always. `step` runs forwards and
backwards as the schedule has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from plait.capture.loss import Loss
from plait.errors import InputError, PlaitError
from plait.passes import schedule
from plait.passes.partition import Local
from plait.passes.schedule import Schedule
from plait.plan.planner import Planned
from plait.plan.staged import Pieces
from plait.program import Program
from plait.runtime import results
from plait.runtime.actions import Run
from plait.runtime.channel import Channel
from plait.runtime.executor import leaves_of, patterns_of
from plait.runtime.replicas import Replicas
from plait.runtime.results import Sums
from plait.runtime.stages import Stages, stages
from plait.runtime.transport import Transport

LOSS = 0  # the flat output of a step's program that is differentiated
UNTRAINED = "step: a loss without a gradient: it depends on no parameter or input that learns"


@dataclass(frozen=True)
class Pipeline:
    """See executor.Executable, whose place it takes."""

    planned: Planned
    stages: Stages
    patterns: tuple[Any, ...]
    guard: Any  # agreement.guard
    only_last: bool  # outputs are wanted on the last stage alone
    schedule: str

    @property
    def local(self) -> Local:
        return self.stages.local

    @property
    def program(self) -> Program:
        return self.stages.program

    @property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        return self.stages.holders

    @property
    def cut(self) -> bool:
        """Whether there is more than one micro-batch."""
        return len(self.stages.pieces) > 1

    @property
    def readers(self) -> Sequence[int]:
        """The places that get the outputs."""
        return [self.stages.last] if self.only_last else range(self.stages.channel.pp)

    @property
    def reads(self) -> bool:
        return self.stages.channel.place in self.readers

    def homes(self) -> list[frozenset[str]]:
        return self.stages.homes()

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        return leaves_of(self.program, self.patterns, args, kwargs)

    def told(self, loss: Loss) -> str:
        """How a step with this loss runs."""
        pieces = len(self.stages.pieces)
        over = f", over {self.stages.replicas.count} replicas" if self.stages.replicas else ""
        return f"{self.schedule}, {pieces} micro-batch{'es' * (pieces > 1)}{over}, cut with {loss}"

    def whole(self) -> Pipeline:
        """The same, its outputs on every rank."""
        return replace(self, only_last=False)

    # -- orders ----------------------------------------------------------------------------------------

    @cached_property
    def _order(self) -> Schedule:
        return self._make(self.schedule)

    @cached_property
    def _loop(self) -> Schedule:
        """All forwards, then all backwards."""
        places, pieces = self.stages.channel.pp, len(self.stages.pieces)
        found = schedule.loop(places, self.stages.count, pieces)
        schedule.check(found, training=True)
        return found

    def _make(self, name: str) -> Schedule:
        return schedule.make(name, self.stages.channel.pp, len(self.stages.pieces))

    def refuse(self) -> None:
        """A call whose backward could not be asked for on every rank; before any rank starts."""
        staged = self.stages.channel.pp > 1
        if self.only_last and staged and self.program.training and torch.is_grad_enabled():
            raise InputError(
                "outputs='last' leaves the other stages nothing to call backward on: "
                "train with compiled.step, or with outputs='all'"
            )

    def refuse_step(self, leaves: Sequence[Any]) -> None:
        """As `refuse`, of a step whose loss nothing learns from."""
        loss = self.stages.spec(self.stages.specs(leaves, True), LOSS, 0)
        if loss is None or not loss.grad:
            raise InputError(UNTRAINED)

    # -- the user's own loop -----------------------------------------------------------------------------

    @property
    def folded(self) -> tuple[str, ...]:
        return self.program.folded

    def __call__(self, weights: Mapping[str, Tensor], leaves: Sequence[Any], seed: Tensor) -> Any:
        """The outputs."""
        grad = torch.is_grad_enabled() and self.program.training
        run = Run(self.stages, self._loop, weights, leaves, seed, grad)
        run.perform("F")
        outs = results.outputs(run, lambda flat: self.readers)
        if grad:
            outs = _connect(run, outs, self.guard)
        self._close(run, weights)
        return self._told(outs) if self.reads else None

    def _close(self, run: Run, weights: Mapping[str, Tensor]) -> None:
        results.mutate(run, weights)
        self.stages.channel.flush()

    def _told(self, outs: Mapping[int, Any]) -> Any:
        values = [o.value if o.index is None else outs[o.index] for o in self.program.outputs]
        return pytree.tree_unflatten(values, self.program.out_spec)

    # -- by the schedule ---------------------------------------------------------------------------------

    def step(self, weights: Mapping[str, Tensor], leaves: Sequence[Any], seed: Tensor) -> Any:
        """(loss, outputs) of a program that gives them; adds to `.grad` of weights and inputs."""
        run = Run(self.stages, self._order, weights, leaves, seed, True)
        spec = self.stages.spec(run.specs, LOSS, 0)
        assert spec is not None
        with torch.no_grad():
            one = torch.ones(spec.shape, dtype=spec.dtype, device=self.stages.device)
        run.perform(self._order.kinds, {LOSS: one})
        everywhere = range(self.stages.channel.pp)
        outs = results.outputs(run, lambda flat: everywhere if flat == LOSS else self.readers)
        sums = Sums(run)
        for node, grad in sums.weights().items():
            _add(run.originals[node], grad)
        for x, grad in zip(leaves, sums.inputs(), strict=True):
            _add(x, grad)
        self._close(run, weights)
        loss, out = self._told(outs)
        return loss, out if self.reads else None


def _add(x: Tensor, grad: Tensor | None) -> None:
    """Autograd adds it, with the user's hooks, and goes on to what made an input."""
    if grad is not None:
        torch.autograd.backward([x], [grad.to(x.device)])


def _connect(run: Run, values: dict[int, Any], guard: Any) -> dict[int, Any]:
    """The outputs as results of one autograd node over this rank's weights and the inputs."""
    weights = [n for n, x in run.weights.items() if x.requires_grad]
    inputs = [i for i, x in enumerate(run.leaves) if isinstance(x, Tensor) and x.requires_grad]
    anchor = torch.zeros((), requires_grad=True)
    tensors = [i for i, x in values.items() if isinstance(x, Tensor)]
    outs = _Call.apply(
        run, guard, weights, inputs, tensors, [values[i] for i in tensors], anchor,
        *(run.originals[n] for n in weights), *(run.given_leaves[i] for i in inputs),
    )  # fmt: skip
    return values | dict(zip(tensors, outs, strict=True))


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, guard: Any, weights: list[str], inputs: list[int], tensors: list[int],
        values: list[Tensor], *leaves: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.run, ctx.guard = run, guard
        ctx.weights, ctx.inputs, ctx.tensors = weights, inputs, tensors
        outs = tuple(v.view_as(v) for v in values)
        specs = [run.stages.spec(run.specs, i, 0) for i in tensors]
        ctx.mark_non_differentiable(
            *(o for o, s in zip(outs, specs, strict=True) if s is None or not s.grad)
        )
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        run: Run = ctx.run
        if run is None:
            raise BackwardTwice("backward was called twice for one forward of a compiled module")
        ctx.run = None
        given = {i: g for i, g in zip(ctx.tensors, grads, strict=True) if g is not None}
        with ctx.guard("backward"):
            run.perform("BIW", given)
            sums = Sums(run)
            weights, inputs = sums.weights(), sums.inputs()
            run.stages.channel.flush()
        return (
            None, None, None, None, None, None, None,
            *(weights[n] for n in ctx.weights), *(_at(inputs[i], run.given_leaves[i]) for i in ctx.inputs),
        )  # fmt: skip


def _at(grad: Tensor | None, x: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(x.device)


class BackwardTwice(PlaitError, RuntimeError):
    """The values of a forward are let go with its backward."""


def pipeline(
    pieces: Pieces,
    transport: Transport,
    line: Channel,
    guard: Any,
    device: torch.device,
    only_last: bool = False,
    holders: Mapping[str, tuple[int, ...]] | None = None,
    replicas: Replicas | None = None,
) -> Pipeline:
    """This rank's stages of every micro-batch; `holders` by node, where weights are loaded."""
    name = pieces.staged.schedule
    order = schedule.make(name, line.pp, len(pieces.planned))
    alone = Replicas(Transport(None, 0, 1), device)
    made = stages(pieces, order, transport, line, device, holders, replicas or alone)
    return Pipeline(pieces.planned[0], made, _patterns(pieces, made), guard, only_last, name)


def _patterns(pieces: Pieces, made: Stages) -> tuple[Any, ...]:
    """The form of a call; of a program of all replicas' batches, with this replica's rows."""
    out = list(patterns_of(pieces.full))
    for feed in made.pieces[0].feeds.values() if pieces.joined is not None else ():
        if feed.cut is not None:
            shape = list(out[feed.leaf].shape)
            shape[feed.cut.dim] = feed.cut.size
            out[feed.leaf] = replace(out[feed.leaf], shape=tuple(shape))
    return tuple(out)
