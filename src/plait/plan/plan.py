"""Plan: what the compiler chose, frozen, as JSON; read back it makes the same programs.

Strategies are spelled by node (`linear_3: split(f7)`), splits by their bounds (`f7: 0 8 16`), so a
plan reads without the program it belongs to. `program` is the digest of that program: a plan is
refused for any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from plait.errors import PlanError
from plait.passes.partition import BACK
from plait.passes.pipeline import Borders
from plait.plan.measured import Measured
from plait.written import parse, read

VERSION = 1


@dataclass(frozen=True)
class Placed:
    """One collective of the program, in one direction: what is asked and how it is done.

    `name` is the site (`move_3`, `move_3.backward`), `nbytes` the whole value, `seconds` predicted.
    """

    name: str
    collective: str
    nbytes: int
    algorithm: str
    seconds: float
    source: str
    module: str

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return (
            f"{self.name}: {self.collective} of {self.source}{where}, {self.nbytes} bytes, "
            f"{self.algorithm}, {self.seconds * 1e6:.1f} us"
        )


@dataclass(frozen=True)
class Second:
    """The form of a region that is predicted to come second, where it gains on blocking too."""

    form: str
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Overlapped:
    """A region of operators around collectives, and how it is cut in time (passes/overlap).

    `form` is whole where it is not, for the `reason`. Seconds are predicted, of the region alone:
    as it runs, in one piece, and those in which compute stands still.
    """

    region: str
    form: str
    sites: tuple[str, ...]
    nodes: int
    seconds: float
    whole: float
    exposed: float
    reason: str = ""
    stage: int = 0  # of a pipeline
    second: Second | None = None

    @property
    def swapped(self) -> Overlapped:
        """As the second form has it, which takes the place of the first."""
        if self.second is None:
            return self
        first = Second(self.form, self.seconds, self.exposed)
        form, seconds, exposed = self.second.form, self.second.seconds, self.second.exposed
        return replace(self, form=form, seconds=seconds, exposed=exposed, second=first)

    def moves(self, name: str) -> bool:
        """Whether a collective is one of its: `sites` say those of both directions, or of one (`move_3.backward`)."""
        return name in self.sites or name.removesuffix(BACK) in self.sites

    def __str__(self) -> str:
        why = f"; {self.reason}" if self.reason else ""
        return (
            f"{self.region}: {self.form}, {self.nodes} operators, {self.seconds * 1e6:.1f} us of "
            f"{self.whole * 1e6:.1f} us, exposed {self.exposed * 1e6:.1f} us{why}"
        )


@dataclass(frozen=True)
class Kept:
    """A weight that is whole on every rank, and why."""

    name: str
    nbytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.nbytes:,} bytes"


@dataclass(frozen=True)
class Staged:
    """A pipeline: micro-batches, cuts and schedule (plan/staged.py).

    The plan's own strategies are those of the first micro-batch, `strategies` those of further
    sizes. Seconds are of one micro-batch, forward and backward, in every stage.
    """

    program: str  # digest of the whole batch's program
    rows: tuple[int, ...]  # of every micro-batch; () for one
    factor: str
    firsts: tuple[str, ...]  # the first operator of every stage but the first
    light: tuple[str, ...]  # operators that every stage repeats
    schedule: str
    seconds: tuple[float, ...]
    best: float  # the least time of the slowest stage that any cut reaches
    crossing: tuple[float, ...]  # bytes over every cut
    bubble: float
    strategies: tuple[Mapping[str, str], ...] = ()
    memory: tuple[float, ...] = ()  # bytes of a rank of every stage, at most
    recompute: str = "off"
    segments: tuple[str, ...] = ()  # of what runs again: the first operators of all but the first
    overlaps: tuple[tuple[Overlapped, ...], ...] = ()  # as the plan's own, of further sizes
    modules: tuple[str, ...] = ()  # of the user's, that `firsts` are in

    @property
    def borders(self) -> Borders:
        return Borders(self.firsts, frozenset(self.light))

    def __str__(self) -> str:
        within = dict(zip(self.firsts, self.modules, strict=False))
        places = [f"{name} in {m}" if (m := within.get(name)) else name for name in self.firsts]
        cuts = f", cut before {', '.join(places)}" if places else ""
        again = f", run again in {len(self.segments) + 1} segments" if self.recompute != "off" else ""
        count = len(self.rows) or 1
        return f"{self.schedule} with {count} micro-batch{'es' * (count > 1)}{cuts}{again}"


@dataclass(frozen=True)
class Candidate:
    """One way to use the devices, as it was weighed: ranks by axis, micro-batches, schedule.

    `seconds`: of a call; `period`: between the results of calls that follow one another, over all
    replicas. `parts` sum up to `seconds`. `memory`: bytes of the fullest rank. `order`: the axes,
    outermost first.
    """

    tp: int
    pp: int
    dp: int
    order: str
    micro_batches: int
    schedule: str
    recompute: str
    seconds: float
    period: float
    memory: float
    parts: Mapping[str, float]
    stages: tuple[float, ...] = ()  # seconds of one micro-batch in each, sends included

    @property
    def spent(self) -> dict[str, float]:
        """The parts that are more than what adding up many numbers leaves."""
        return {k: v for k, v in self.parts.items() if abs(v) > 1e-9 * self.seconds}

    @property
    def name(self) -> str:
        """`tp=4 pp=2 dp=1 1f1b[8]`, the number of micro-batches in brackets."""
        again = " recomputed" if self.recompute != "off" else ""
        mesh = f"tp={self.tp} pp={self.pp} dp={self.dp}"
        return f"{mesh} {self.schedule}[{self.micro_batches}]{again}"

    def __str__(self) -> str:
        parts = ", ".join(f"{k} {v * 1e3:.4g}" for k, v in self.spent.items())
        gib = self.memory / 2**30
        return f"{self.name}: {self.seconds * 1e3:.4g} ms ({parts}), {gib:.3g} GiB a rank"


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank in training, as predicted, with activations `kept` and computed `again`.

    `recompute`: what is done, `off` or `full`; `asked`: by the user, or by the `limit` of a device.
    """

    limit: float
    kept: float
    again: float
    recompute: str
    asked: bool

    def __str__(self) -> str:
        kept, again, limit = (f"{b / 2**30:.3g} GiB" for b in (self.kept, self.again, self.limit))
        if self.recompute == "off":
            why = "as asked" if self.asked else f"they fit the {limit} of a device"
            return f"activations are kept, {why}: {kept} a rank, {again} if recomputed"
        why = "as asked" if self.asked else f"kept they would not fit the {limit} of a device"
        return f"activations are recomputed, {why}: {again} a rank, {kept} if kept"


@dataclass(frozen=True)
class Choice:
    """What the joint choice weighed (plan/joint.py): the winner first, then the best of other meshes.

    `refused`: meshes that do not fit the memory, and why.
    """

    program: str  # digest of the program that was weighed
    front: tuple[Candidate, ...]
    weighed: int
    reason: str
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    memory: Memory | None = None  # of a program to be trained

    @property
    def winner(self) -> Candidate:
        return self.front[0]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Choice:
        return parse(cls, text, "choice")


@dataclass(frozen=True)
class Plan:
    """`weights`: layout of each weight; `whole`: operators that run whole, with the reason."""

    program: str
    tp: int
    pp: int
    dp: int
    cluster: str
    training: bool
    objective: str
    strategies: Mapping[str, str]
    splits: Mapping[str, str]
    weights: Mapping[str, str]
    collectives: tuple[Placed, ...]
    whole: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[Kept, ...] = ()  # weights that every rank has all of
    bytes_per_rank: tuple[int, ...] = ()  # parameters and buffers
    bytes_whole: int = 0
    seconds: float = 0.0  # one call, predicted
    seconds_alone: float = 0.0  # the same on one device, predicted
    notes: tuple[str, ...] = ()
    overlap: str = "off"  # as it was asked for
    overlaps: tuple[Overlapped, ...] = ()
    staged: Staged | None = None  # of a pipeline
    times: tuple[tuple[str, float, float], ...] = ()  # operators: seconds forward and backward
    gradients: Placed | None = None  # their sum over replicas
    packed: tuple[tuple[str, ...], ...] = ()  # weights whose matmuls are one (passes/pack.py)
    choice: Choice | None = None  # where more than one mesh, schedule or cut in time was weighed
    measured: Measured | None = None  # where overlap was predicted to gain, and ranks were there to try it
    bare: Mapping[str, str] = field(default_factory=dict)  # collectives beside which nothing can run, and why

    @property
    def machine(self) -> str:
        """The cluster as it is spelled, or by its name where it is spelled as all of its data."""
        return str(json.loads(self.cluster)["name"]) if self.cluster.startswith("{") else self.cluster

    @property
    def micro_batches(self) -> int:
        return len(self.staged.rows) or 1 if self.staged is not None else 1

    @property
    def chosen(self) -> str:
        """Why this mesh and no other, in a line; empty where nothing was compared."""
        if self.choice is None or len(self.choice.front) == 1:
            return ""
        rough = abs(self.choice.winner.seconds - self.seconds) > 0.01 * self.seconds
        woven = any(o.form != "whole" for o in self.overlaps)
        without = "chunks" if woven and self.staged is not None else "fused norms and graph launches"
        how = f" (compared without {without})" if rough else ""
        return f"chosen of {self.choice.weighed}{how}: {self.choice.reason}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            data: dict[str, Any] = json.loads(text)
            version = data.pop("version")
        except KeyError:
            raise PlanError("this is not a plan: it has no version") from None
        except (ValueError, AttributeError, TypeError) as error:
            raise PlanError(f"this is not a plan: {error}") from error
        if version != VERSION:
            raise PlanError(f"the plan is of version {version}; this plait reads {VERSION}")
        return read(cls, data, "plan")
