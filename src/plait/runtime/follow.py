"""Follow: a compiled module keeps to the model that it was made from.

What capture read is compared on each call. Plain attributes are those of the user's model. `training`,
`requires_grad` and the tensors that were folded into constants are on both: the compiled module has
its own, as it has its own weights, and takes over what changes on the model; the last change counts.

    look      what programs must be captured under now, and what of it has changed
    adopt     once all ranks have agreed: onto the compiled module
    settle    once the program is there
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from plait.capture.snapshot import Change, Facts, Snapshot
from plait.capture.state import Ambient, State
from plait.errors import CaptureError
from plait.program import Program
from plait.runtime.rebuild import attribute


@dataclass(frozen=True)
class View:
    state: State
    changes: Mapping[str, Change]
    live: Snapshot
    moved: Facts  # changed on the user's model: to be put on the compiled one

    def agreed(self, changes: Mapping[str, Change]) -> View:
        """`changes` of all ranks: a stage of a pipeline does not hold what another one changed."""
        others = {n: ast.literal_eval(c[0]) for n, c in changes.items() if n not in self.changes}
        if not others:
            return self
        facts = self.state.facts
        flags = {n: v for n, v in others.items() if n.endswith(".requires_grad")}
        facts = replace(
            facts,
            flags={**facts.flags, **flags},
            contents={**facts.contents, **{n: v for n, v in others.items() if n not in flags}},
        )
        return replace(self, state=replace(self.state, facts=facts), changes=dict(changes))


@dataclass(eq=False)
class Follower:
    model: nn.Module
    device: torch.device
    training: bool
    state: State
    live: Snapshot
    folded: set[str]
    sets: set[str]
    own: Snapshot | None = None

    @classmethod
    def of(cls, model: nn.Module, program: Program, ambient: Ambient, device: torch.device) -> Follower:
        """Right after the capture of `program`."""
        folded, sets = set(program.folded), set(program.sets)
        live = Snapshot.of(model, folded, sets)
        state = State(live.facts, ambient)
        return cls(model, device, program.training, state, live, folded, sets)

    def look(self, compiled: nn.Module) -> View:
        ambient = Ambient.now(self.training, self.device)
        kept = self.own is not None and self.own.holds() and self.live.holds()
        if kept and ambient == self.state.ambient:
            return View(self.state, {}, self.live, _NOTHING)
        live = self.live if self.live.holds() else self._snapshot()
        own = Snapshot.of(compiled, self.folded, attributes=False)
        moved = _moved(self.live.facts, live.facts)
        facts = Facts(
            live.facts.attributes,
            {**live.facts.flags, **self.state.facts.flags, **own.facts.flags, **moved.flags},
            {
                **live.facts.contents,
                **self.state.facts.contents,
                **own.facts.contents,
                **moved.contents,
            },
        )
        state = State(facts, ambient)
        view = View(state, self.state.changes(state), live, moved)
        if not view.changes:
            self.settle(compiled, view, ())
        return view

    def casts_off(self) -> AbstractContextManager[None]:
        """A captured program has the casts of autocast in it."""
        if self.state.ambient.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, enabled=False)

    def adopt(self, compiled: nn.Module, view: View) -> None:
        found = {name: attribute(self.model, name) for name in view.moved.contents}
        values = {n: t for n, t in found.items() if t is not None}
        _same_sizes(compiled, values)
        put(compiled, view.moved.flags, values)

    def settle(self, compiled: nn.Module, view: View, folded: Collection[str]) -> State:
        """`folded`: by a new program. The state that it stands for."""
        more = not self.folded.issuperset(folded)
        self.folded.update(folded)
        self.live = self._snapshot() if more else view.live
        self.own = Snapshot.of(compiled, self.folded, attributes=False)
        contents = {**self.live.facts.contents, **self.own.facts.contents}
        facts = replace(view.state.facts, contents={**contents, **view.state.facts.contents})
        self.state = replace(view.state, facts=facts)
        return self.state

    def _snapshot(self) -> Snapshot:
        return Snapshot.of(self.model, self.folded, self.sets)


def _same_sizes(compiled: nn.Module, values: Mapping[str, Tensor]) -> None:
    wrong = [
        f"{name} {list(value.shape)} {value.dtype}, compiled as {list(own.shape)} {own.dtype}"
        for name, value in sorted(values.items())
        for own in [attribute(compiled, name)]
        if own is not None and (own.shape, own.dtype) != (value.shape, value.dtype)
    ]
    if wrong:
        raise CaptureError(
            f"buffers of the model changed after the compile: {'; '.join(wrong)}. Compile the model "
            "again"
        )


def put(module: nn.Module, flags: Mapping[str, bool], values: Mapping[str, Tensor]) -> None:
    """Flags and values of buffers, where the module has them."""
    for name, flag in flags.items():
        path, _, kind = name.rpartition(".")
        if kind == "training":
            _submodule(module, path).training = flag
        elif (parameter := attribute(module, path)) is not None:
            parameter.requires_grad_(flag)
    with torch.no_grad():
        for name, value in values.items():
            if (mine := attribute(module, name)) is not None:
                mine.copy_(value)


def _submodule(module: nn.Module, path: str) -> nn.Module:
    for name in path.split(".") if path else ():
        child = module._modules.get(name)
        if child is None:
            return nn.Module()  # of the model, since the compile
        module = child
    return module


def _moved(before: Facts, now: Facts) -> Facts:
    return Facts(
        {},
        {n: v for n, v in now.flags.items() if before.flags.get(n) != v},
        {n: v for n, v in now.contents.items() if before.contents.get(n) != v},
    )


_NOTHING = Facts({}, {}, {})
