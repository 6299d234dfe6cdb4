"""Contest: the two choices of overlap that are predicted to gain most, against blocking, timed on the ranks themselves.

All run over the one set of weights, in turn: warm-up, then samples, of which the slowest rank's counts. Rank 0
decides, every rank's plan records it (`Plan.measured`). Nothing of the user's changes: what a call writes
is written to copies, gradients are thrown away, nothing is drawn from a generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.compiler.job import Job
from plait.errors import RankError
from plait.plan import rival
from plait.plan.measured import Measured
from plait.program import Program
from plait.runtime.executor import Executable, executable, layouts
from plait.runtime.graphs import WARM_UP
from plait.runtime.holdings import Holdings
from plait.runtime.pipeline import Pipeline
from plait.runtime.sampler import Sampler, clock

# Measuring makes further programs and calls each some ten times, which takes a second or so. The gains that are
# predicted begin at 5 %: of a call of 1 ms they pay for it after 20,000 calls.
SHORT = 1e-3
LONG = 10.0  # seconds of a call: all, four times at least, take minutes
BUDGET = 5.0  # seconds for the samples of all
SAMPLES = 5, 15  # at least, at most
SEED = 0


@dataclass(frozen=True)
class Contest:
    """`first`: what the plan says. `rivals`: the second choice, if there is one, and blocking, where there is something
    to be measured; where that cannot be, the `reason`."""

    job: Job
    first: Any
    rivals: tuple[Any, ...] = ()
    reason: str = ""

    @classmethod
    def of(cls, job: Job, program: Program) -> Contest:
        first = job.build(program)
        asked = job.measure and job.saved is None and job.options.overlap == "auto"
        if not asked or not rival.overlapped(first.planned.plan):
            return cls(job, first)
        reason = next((why for rule in REASONS if (why := rule(job, first))), "")
        return cls(job, first, () if reason else _rivals(job, first), reason)

    @property
    def runs(self) -> tuple[tuple[str, ...], ...]:
        """Weights that lie in a row for any of them."""
        return tuple(dict.fromkeys(run for each in reversed(self.all) for run in each.local.runs))

    @property
    def all(self) -> tuple[Any, ...]:
        return self.first, *self.rivals

    def winner(self, holdings: Holdings) -> Any:
        """The one that this compile goes on with; its plan says what was measured."""
        if not self.rivals and not self.reason:
            return self.first
        measured = self._measured(holdings)
        best = self.all[measured.kept if self.rivals else 0]
        plan = rival.settled(best.planned.plan, measured)
        return replace(best, planned=replace(best.planned, plan=plan))

    def _measured(self, holdings: Holdings) -> Measured:
        """As rank 0 saw it."""
        plan = self.first.planned.plan
        if not self.rivals:
            return Measured((plan.seconds, rival.seconds(plan)), reason=self.reason)
        predicted = tuple(each.planned.plan.seconds for each in self.all)
        try:
            with self.job.agreement.guard("measure"), _apart(self.job.device):
                mine = Measured.of(predicted, self._samples(holdings))
        except RankError:
            raise
        except Exception as error:  # which all ranks have met, else the next meeting raises
            said = str(error).partition("\n")[0]
            mine = Measured(predicted, reason=f"the example inputs do not run: {type(error).__name__}: {said}")
        return Measured.from_json(self.job.agreement.tell("measure", mine.to_json())[0])

    def _samples(self, holdings: Holdings) -> list[list[float]]:
        """Of all, as many as there is time for."""
        trial = Trial.of(self.job, self.first, holdings.tensors)
        steps = list(map(trial.step, self.all))
        timer = clock(self.job.device, self.job.beside)
        once = Sampler(timer, WARM_UP + 1, 1).run(steps, trial.clear)
        least, most = SAMPLES
        count = min(most, max(least, int(BUDGET / sum(t for (t,) in once))))
        return Sampler(timer, 0, count).run(steps, trial.clear)


@dataclass(frozen=True)
class Trial:
    """Calls of the example, over `weights`, of which nothing is left behind."""

    job: Job
    program: Program
    weights: Mapping[str, Tensor]  # views of the module's; copies of what calls write
    kept: Mapping[str, Tensor]  # the values of these before
    leaves: list[Any]

    @classmethod
    def of(cls, job: Job, first: Any, tensors: Mapping[str, Tensor]) -> Trial:
        program = first.program
        leaves = first.leaves(job.source.args, job.source.kwargs or {})
        assert leaves is not None, "the program is of this call"
        written = {program.weight(m.weight).name for m in program.mutations}
        kept = {name: x.detach() for name, x in tensors.items() if name in written}
        weights = {n: _alone(x, program, copy=n in written) for n, x in tensors.items()}
        inputs = [_alone(x, program) if isinstance(x, Tensor) else x for x in leaves]
        return cls(job, program, weights, kept, inputs)

    def clear(self) -> None:
        with torch.no_grad():
            for name, value in self.kept.items():
                self.weights[name].copy_(value)

    def step(self, program: Any) -> Callable[[], None]:
        """A call, and the way back where the module is to be trained."""

        def run() -> None:
            with torch.set_grad_enabled(self.program.training):
                with self.job.seat.transport.in_order():
                    out = program(self.weights, self.leaves, torch.tensor(SEED))
                ends = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
                if ends:
                    torch.autograd.backward(ends, list(map(torch.ones_like, ends)))
                for x in self._asking:
                    x.grad = None

        return run

    @cached_property
    def _asking(self) -> list[Tensor]:
        every = [*self.weights.values(), *self.leaves]
        return [x for x in every if isinstance(x, Tensor) and x.requires_grad]


def _rivals(job: Job, first: Any) -> tuple[Any, ...]:
    plan = first.planned.plan
    second, blocking = rival.second(plan), rival.unwoven(plan)
    also = [job.rewoven(first, second)] if second is not None else []
    return *also, job.rewoven(first, blocking) if blocking is not None else _cheapest(job, first)


def _cheapest(job: Job, first: Executable) -> Executable:
    fixed = layouts(first.local)
    planned = job.shared(first.program, lambda: rival.cheapest(first.planned, job.options, fixed))
    return executable(planned, job.seat.transport, job.device)


def _alone(x: Tensor, program: Program, copy: bool = False) -> Tensor:
    """The same memory, without hooks, history and `.grad`."""
    asks = x.requires_grad and program.training
    return (x.detach().clone() if copy else x.detach()).requires_grad_(asks)


@contextlib.contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """From the user's generators and autocast; a captured program has the casts in it."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.autocast(device.type, enabled=False):
        yield


# -- why nothing is measured ------------------------------------------------------------------------


def _on_the_last(job: Job, first: Any) -> str:
    """What is timed goes back through the outputs."""
    alone = isinstance(first, Pipeline) and first.only_last and first.stages.channel.pp > 1
    return "it is trained by steps, and has outputs on its last stage alone" if alone and first.program.training else ""


def _elsewhere(job: Job, first: Any) -> str:
    kind, here = job.options.cluster.device.kind, job.device.type
    return f"the plan is for {kind} devices, and these ranks have {here}" if kind != here else ""


def _without_values(job: Job, first: Any) -> str:
    leaves = first.leaves(job.source.args, job.source.kwargs or {}) or []
    pairs = zip(leaves, first.program.inputs, strict=True)
    empty = [i.path for x, i in pairs if isinstance(x, Tensor) and x.is_meta]
    return f"{', '.join(empty)}: on the meta device, and without values" if empty else ""


def _length(job: Job, first: Any) -> str:
    seconds = rival.seconds(first.planned.plan)
    if seconds < SHORT:
        return f"a call is predicted to take {seconds * 1e6:.0f} us, too short to pay for it"
    return f"a call is predicted to take {seconds:.0f} s" if seconds > LONG else ""


REASONS = (_on_the_last, _elsewhere, _without_values, _length)
