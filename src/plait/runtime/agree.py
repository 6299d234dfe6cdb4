"""Agreement: what the ranks must have in common before they work together.

Every call compares structure, shapes, dtypes and plain values between the ranks, the first call the
contents too; a difference is an InputError on every rank. Failures in between are told to all by
the watch (watch.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from plait import errors
from plait.capture.call import spell
from plait.capture.snapshot import Change
from plait.errors import InputError, PlaitError
from plait.runtime.watch import Watch

Holds = Callable[[str, int], bool]  # name of a flag, rank -> whether that rank has it


class Agreement:
    """One rank's side of it; alone, everything is agreed."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        alone = group is None or dist.get_world_size(group) == 1
        self._watch = None if alone else Watch(group, device.type)
        self._called = False
        self.rank = 0 if alone else dist.get_rank(group)
        self._size = 1 if alone else dist.get_world_size(group)
        self._replicas = [list(range(self._size))]

    def divide(self, replicas: Sequence[Sequence[int]]) -> None:
        """From now on inputs are compared, and choices taken over, within each of these."""
        self._replicas = [list(ranks) for ranks in replicas]

    @property
    def leads(self) -> bool:
        """Rank 0, whose choices all others take."""
        return self.rank == 0

    @property
    def plans(self) -> bool:
        """The rank whose plans this rank's replica takes."""
        return self._mates[0] == self.rank

    @property
    def _mates(self) -> list[int]:
        return next(ranks for ranks in self._replicas if self.rank in ranks)

    def call(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        changes: Mapping[str, Change],
        program: int,
        holds: Holds,
        about: str = "",
    ) -> tuple[dict[str, Change], int]:
        """The changes of all ranks and the program that each of them has for it, else -1.

        `changes` since the last call, of what capture read; `holds` who has to know of each; `about`:
        what else is said of the call.
        """
        if self._watch is None:
            return dict(changes), program
        leaves, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        said = [about, *(f"{spell(path)}: {facts(x, not self._called)}" for path, x in leaves)]
        told = self._watch.exchange("call", [said, str(spec), dict(changes), program])
        self._compare("call", [t[0] for t in told])
        self._compare("call", [[t[1]] for t in told])
        self._called = True
        merged = _merged([t[2] for t in told], holds)
        return merged, program if all(t[3] == program for t in told) else -1

    def same(self, what: str, said: list[str]) -> None:
        """InputError, on every rank, where the ranks of a replica do not say the same."""
        if self._watch is not None:
            self._compare(what, self._watch.exchange(what, said))

    def _compare(self, what: str, told: list[Any]) -> None:
        for ranks in self._replicas:
            _refuse_different(what, {r: told[r] for r in ranks}, len(self._replicas) > 1)

    def tell(self, what: str, value: Any) -> list[Any]:
        """The value (JSON) of every rank."""
        return [value] if self._watch is None else self._watch.exchange(what, value)

    def all_replicas(self, what: str, value: Any) -> list[Any]:
        """The value (JSON) of every replica: its first rank's."""
        told = self.tell(what, value)
        return [told[ranks[0]] for ranks in self._replicas]

    def broadcast(self, what: str, value: Any) -> Any:
        """The value (JSON) of the rank that plans, on every rank of its replica."""
        return self.tell(what, value)[self._mates[0]]

    def seed(self) -> Tensor:
        """A number drawn from rank 0's default generator; all ranks' generators advance alike."""
        drawn = int(torch.randint(2**62, ()))
        return torch.tensor(self.tell("seed", drawn)[0])

    def covers(self, *groups: dist.ProcessGroup) -> None:
        """Parts of the group: their collectives are released too when a rank fails."""
        if self._watch is not None:
            self._watch.covers(*groups)

    def counted(self, begun: object) -> None:
        """`begun` spells how far this rank has come in collectives that all ranks begin alike: an
        error that all of them meet at one place leaves none of these half done."""
        if self._watch is not None:
            self._watch.place = begun

    def meet(self, what: str, timeout: float = 30.0) -> None:
        """All ranks must come within `timeout` seconds, else RankError names who did not."""
        if self._watch is not None:
            self._watch.exchange(what, None, timeout)

    def guard(self, what: str) -> AbstractContextManager[None]:
        return self._watch.guard(what) if self._watch is not None else contextlib.nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Around a part of a backward pass that waits for other ranks."""
        return self._watch.backward() if self._watch is not None else contextlib.nullcontext()

    def way_back(self, out: Any, begins: Callable[[], None]) -> None:
        """A backward pass that comes back through `out` and does not end is told to the others; `begins` is called."""
        watch = self._watch
        if watch is None or not torch.is_grad_enabled():
            return

        def enter(grad: Tensor) -> None:
            watch.enter(counted=True)
            begins()

        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(enter)

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Work of the ranks that plan: a mistake of the user's that one of them finds is everybody's."""
        found: list[PlaitError] = []
        with self.step("plan"):
            try:
                yield
            except PlaitError as error:
                found.append(error)
        told = self.tell("plan", [[type(error).__name__, str(error)] for error in found])
        for kind, text in itertools.chain(*told):
            raise found[0] if found else getattr(errors, kind, errors.PlanError)(text)

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Local work that succeeds on all ranks or raises on all."""
        if self._watch is None:
            yield
            return
        with self._watch.step(what):
            yield


def facts(leaf: Any, contents: bool = False) -> str:
    """Of one argument, as they stand in messages."""
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    said = f"{tuple(leaf.shape)} {leaf.dtype}"
    if leaf.is_meta:
        return said + " on meta"
    if leaf.layout is not torch.strided:
        return f"{said} {leaf.layout}"
    return f"{said}, contents {_digest(leaf)}" if contents else said


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _merged(told: list[dict[str, Any]], holds: Holds) -> dict[str, Change]:
    """What changed, where every rank that has it says the same."""
    merged: dict[str, Change] = {}
    wrong = []
    for name in sorted({n for t in told for n in t}):
        values = {r: t.get(name) for r, t in enumerate(told) if name in t or holds(name, r)}
        now, was = next(v for v in values.values() if v is not None)
        merged[name] = now, was
        if any(v is None or v[0] != now for v in values.values()):
            each = [f"{was if v is None else v[0]} on rank {r}" for r, v in values.items()]
            wrong.append(f"  {name}: {', '.join(each)}")
    if wrong:
        raise InputError(
            "\n".join(["call: the model is not the same on every rank", *wrong,
                       "change it on every rank, or put it back"])
        )  # fmt: skip
    return merged


def _refuse_different(what: str, told: Mapping[int, Any], replica: bool) -> None:
    first = next(iter(told))
    different = [r for r, other in told.items() if other != told[first]]
    if different:
        raise InputError(_differences(what, told, [first, *different], replica))


def _differences(what: str, told: Mapping[int, Any], shown: list[int], replica: bool) -> str:
    rows = range(max(len(t) for t in told.values()))
    values = [{r: t[i] if i < len(t) else "nothing" for r, t in told.items()} for i in rows]
    apart = [row for row in values if len(set(row.values())) > 1]
    lines = [f"{what}: the ranks do not pass the same"]
    lines += [f"  rank {r}: {row[r]}" for row in apart[:_SHOWN] for r in shown]
    lines += [f"  and {len(apart) - _SHOWN} more"] if len(apart) > _SHOWN else []
    where = f"ranks of one replica ({', '.join(map(str, told))})" if replica else "every rank"
    if what == "compile":
        lines.append(f"the same model, keywords and example inputs are compiled on {where}")
    else:
        lines.append(f"tensor-parallel ranks pass equal inputs: the same batch on {where}")
    return "\n".join(lines)


_SHOWN = 8  # differences: a model with one layer more differs in all that come after
