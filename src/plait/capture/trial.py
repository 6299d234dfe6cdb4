"""The trial: the model's Python run once on fake tensors, before anything is exported.

It proves which blocks are the same, so that only one of each kind is exported (blocks.py splices the
rest), and it sees what an export forgets (forgotten.py).

The proof. Candidates are the outermost modules of one class whose own tensors have equal names and
metadata. Every torch function that a block calls is an *entry*: the function and its operands,
spelled `local`, `own name` or `argument i`, constants by type and value; so is every guard on a
symbolic size. The entries of all blocks of a kind form a tree. A block walks down it; while its next
entry is there, the recorded result is handed back and nothing is computed; where it is not, the
block leaves the common path and is run. Two blocks are the same iff they end at one step with the
same results. No hash stands for a record, and no attribute is read.

Blocks that follow one another with nothing between them make a *run*, which is exported as one
operator: the results of each but the last are met by the next alone.

A step proves nothing when a tensor went another way than through arguments and results: changed in
place, kept for later, taken from outside. Such blocks are exported in full.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from plait.capture.forgotten import Forgotten
from plait.capture.refuse import asked_in_python, user_place

Entry = tuple[Any, ...]
Forward = Callable[..., Any]

PLAIN = {
    bool, int, float, complex, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
WAITS = (0.0, 0.01, 0.1)  # seconds between looks at what is still alive
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass
class Step:
    """What an entry led to, and the entries that came after it."""

    made: tuple[int, ...] = ()  # ids of the tensors that it made
    result: Any = None  # None: not kept, to be computed each time
    impure: str = ""  # why nothing is proven from here on
    after: dict[Entry, Step] = field(default_factory=dict)
    ends: dict[Entry, list[str]] = field(default_factory=dict)  # blocks that return the same here


@dataclass
class Kind:
    """Candidates that may be the same, and the tree of what they did."""

    members: dict[str, nn.Module]
    roots: dict[Entry, Step] = field(default_factory=dict)
    inner: dict[int, torch.Tensor] = field(default_factory=dict)  # made in a block, by id
    kept: list[Any] = field(default_factory=list)  # others whose ids stand in entries
    leaked: bool = False

    def groups(self, calls: Counter[str]) -> Iterator[list[str]]:
        """Blocks proven the same, the first called first."""
        stack = list(self.roots.values())
        while stack:
            step = stack.pop()
            stack.extend(step.after.values())
            for paths in step.ends.values():
                yield [p for p in paths if calls[p] == 1]


class Frame:
    """One block that is running."""

    def __init__(self, kind: Kind, path: str, module: nn.Module, leaves: list[Any]):
        self.kind, self.path = kind, path
        self.given = [x for x in leaves if isinstance(x, torch.Tensor)]
        self.arguments: dict[int, int] = {}
        for i, tensor in enumerate(self.given):
            self.arguments.setdefault(id(tensor), i)
        self.own = {id(t): (name, t) for name, t in own_tensors(module)}
        self.made: set[int] = set()
        self.impure = ""
        self.step = Step()

    def outer(self) -> list[torch.Tensor]:
        """What the block may not change in place."""
        return self.given + [t for _, t in self.own.values()]

    def advance(self, step: Step) -> None:
        self.step = step
        self.made.update(step.made)
        self.impure = self.impure or step.impure

    def spell(self, x: Any) -> Any:
        """An operand, as every block of the kind would spell it."""
        kind = type(x)
        if kind in PLAIN:
            return (kind, x)
        if isinstance(x, torch.Tensor):
            return self._spell_tensor(x)
        if isinstance(x, (tuple, list)):
            return (kind, *map(self.spell, x))
        if isinstance(x, dict):
            return (kind, *((k, self.spell(v)) for k, v in x.items()))
        if kind is slice:
            return (kind, self.spell(x.start), self.spell(x.stop), self.spell(x.step))
        if isinstance(x, SYMBOLIC):
            return (kind, x.node.expr)
        self.kind.kept.append(x)
        return (kind, id(x))

    def _spell_tensor(self, x: torch.Tensor) -> Any:
        key = id(x)
        if key in self.arguments:
            return ("argument", self.arguments[key])
        if key in self.own:
            return ("own", self.own[key][0])
        if key in self.made:
            return ("local", key)
        self.impure = self.impure or "it reads a tensor that is neither its own nor an argument"
        self.kind.kept.append(x)
        return ("outer", key)


@dataclass
class Visit:
    """A call of a candidate, in order, and who met its results: other visits, or None outside."""

    path: str
    follows: bool  # nothing was computed since the visit before
    met_by: set[int | None] = field(default_factory=set)


class Trial(TorchFunctionMode):
    """Active around one call of the model, whose candidates' forward is `block`."""

    def __init__(self, kinds: list[Kind], forgotten: Forgotten):
        super().__init__()
        self.kinds, self.forgotten = kinds, forgotten
        self.by_module = {id(m): (k, p) for k in kinds for p, m in k.members.items()}
        self.visits: list[Visit] = []
        self.frame: Frame | None = None
        self.guards: list[tuple[Any, str]] = []  # with the line that asks
        self.branches: list[tuple[Any, bool]] = []  # of the model's own Python, with the answer
        self._computed = True
        self._handed_out: dict[int, tuple[int, torch.Tensor]] = {}  # by id: visit, tensor

    def groups(self) -> list[list[str]]:
        """After the call; the results of the call must have been let go."""
        self._handed_out.clear()
        calls = Counter(v.path for v in self.visits)
        sound = [k for k in self.kinds if not k.leaked and not self._leaks(k)]
        return [group for kind in sound for group in kind.groups(calls)]

    def runs(self, groups: list[list[str]]) -> Iterator[list[str]]:
        """The members of `groups` in the order of their calls, cut where something lies between."""
        place = {v.path: i for i, v in enumerate(self.visits)}
        leader = {p: g[0] for g in groups for p in g[1:]}
        run: list[int] = []
        for i, visit in enumerate(self.visits):
            if visit.path not in leader:
                continue
            joins = run[-1:] == [i - 1] and visit.follows and self.visits[i - 1].met_by <= {i}
            # A member's result stands for its leader's: the leader's own must not be met here.
            if joins and i not in self.visits[place[leader[visit.path]]].met_by:
                run.append(i)
                continue
            if run:
                yield [self.visits[j].path for j in run]
            run = [i]
        if run:
            yield [self.visits[j].path for j in run]

    # -- one torch function --------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        frame = self.frame
        getter = getattr(func, "__name__", "") == "__get__"
        if frame is None:
            if not getter:
                self._computed = True
                self.meet(None, args, kwargs)
                self.forgotten.look()
            return func(*args, **kwargs)
        if getter:
            value = func(*args, **kwargs)
            if not isinstance(value, torch.Tensor):
                return value  # read from metadata, which is equal where the entries are
        entry = (func, _modes(), frame.spell(args), frame.spell(kwargs))
        return self._walk(frame, entry, lambda: func(*args, **kwargs))

    def guard(self, expression: Any, result: Any) -> None:
        self.guards.append((expression, user_place()))
        if asked_in_python():
            self.branches.append((expression, bool(result)))
        if self.frame is not None:
            self._walk(self.frame, ("guard", expression, bool(result)), lambda: None)

    def _walk(self, frame: Frame, entry: Entry, run: Callable[[], Any]) -> Any:
        step = frame.step.after.get(entry)
        if step is not None and step.result is not None:
            frame.advance(step)
            return step.result
        self.frame = None  # guards of the operator itself are no entries
        try:
            if step is None:
                step, result = self._first(frame, run)
                frame.step.after[entry] = step
            else:
                result = run()
        finally:
            self.frame = frame
        frame.advance(step)
        return result

    def _first(self, frame: Frame, run: Callable[[], Any]) -> tuple[Step, Any]:
        self.forgotten.look()
        versions = [t._version for t in frame.outer()]
        result = run()
        step = Step()
        if versions != [t._version for t in frame.outer()]:
            step.impure = "it changes in place a tensor that it did not make"
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if not tensors or any(id(t) in frame.arguments or id(t) in frame.own for t in tensors):
            return step, result
        step.result = result
        step.made = tuple(map(id, tensors))
        frame.kind.inner.update((id(t), t) for t in tensors)
        return step, result

    # -- one block -------------------------------------------------------------------------------------

    def block(self, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        """The forward of a candidate."""
        kind, path = self.by_module[id(module)]
        self.visits.append(Visit(path, not self._computed))
        if self.frame is not None:
            return forward(*args, **kwargs)
        self.meet(len(self.visits) - 1, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        frame = Frame(kind, path, module, leaves)
        frame.impure = _odd(leaves, "it is given a")
        with torch._C.DisableTorchFunction():
            about = [*map(_metadata, frame.given)]
        entry = (str(spec), *map(frame.spell, leaves), *about)
        frame.advance(kind.roots.setdefault(entry, Step()))
        self.frame = frame
        try:
            result = forward(*args, **kwargs)
        finally:
            self.frame = None
            self._computed = False
        with torch._C.DisableTorchFunction():
            if any(x is not y for x, y in zip(pytree.tree_leaves((args, kwargs)), leaves, strict=False)):
                frame.impure = frame.impure or "it changes a list or a dict that it is given"
            return self._leave(frame, result)

    def _leave(self, frame: Frame, result: Any) -> Any:
        """Hands out fresh tensors: what was made inside is known by its id, and not met outside."""
        leaves, spec = pytree.tree_flatten(result)
        frame.impure = frame.impure or _odd(leaves, "it returns a")
        entry = (str(spec), *map(frame.spell, leaves))
        storages = {_storage(t) for t in frame.outer()}
        fresh: dict[int, torch.Tensor] = {}
        for x in leaves:
            if isinstance(x, torch.Tensor) and id(x) not in frame.arguments:
                if _storage(x) in storages:
                    frame.impure = frame.impure or "it returns a view of what it was given"
                if id(x) not in fresh:
                    fresh[id(x)] = _fresh(x)
                    self._handed_out[id(fresh[id(x)])] = len(self.visits) - 1, fresh[id(x)]
        self.forgotten.backward_of(leaves)
        if not frame.impure:
            frame.step.ends.setdefault(entry, []).append(frame.path)
        return pytree.tree_unflatten([fresh.get(id(x), x) for x in leaves], spec)

    # -- tensors on side ways ----------------------------------------------------------------------------

    def meet(self, visit: int | None, *operands: Any) -> None:
        """Tensors that are read outside all blocks, or given to one."""
        for x in pytree.tree_leaves(operands):
            if isinstance(x, torch.Tensor):
                for kind in self.kinds:
                    kind.leaked |= id(x) in kind.inner
                if id(x) in self._handed_out:
                    self.visits[self._handed_out[id(x)][0]].met_by.add(visit)

    def _leaks(self, kind: Kind) -> bool:
        """Whether something else holds a tensor made in a block, once the tree lets go of them."""
        alive = [weakref.ref(t) for t in kind.inner.values()]
        kind.inner.clear()
        stack = list(kind.roots.values())
        while stack:
            step = stack.pop()
            step.result = None
            stack.extend(step.after.values())
        for wait in WAITS:
            if not any(ref() is not None for ref in alive):
                return False
            # An exception caught inside holds its frames in a cycle. While another thread collects, this does
            # nothing, and what is seen alive then would make this rank's program another than its peers'.
            gc.collect()
            time.sleep(wait)
        return any(ref() is not None for ref in alive)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _modes() -> Entry:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )


def _metadata(t: torch.Tensor) -> Entry:
    sizes = (*t.shape, *t.stride())
    return (
        tuple(s if isinstance(s, int) else s.node.expr for s in sizes),
        t.dtype,
        t.device,
        t.requires_grad,
    )


def _odd(leaves: list[Any], where: str) -> str:
    for x in leaves:
        if not isinstance(x, (torch.Tensor, *SYMBOLIC)) and type(x) not in PLAIN:
            return f"{where} {type(x).__name__}"
    return ""


def _storage(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def _fresh(t: torch.Tensor) -> torch.Tensor:
    new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return new.requires_grad_().clone() if t.requires_grad else new
