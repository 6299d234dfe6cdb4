"""Programs: executables, by the state that they were made for, the form of the call, and the loss
where they are steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.capture.loss import NO_LOSS, Loss
from plait.capture.state import State
from plait.runtime.executor import Executable

STATES = 16  # that are kept
FORMS = 16  # forms of call that are kept of each


@dataclass
class Shelf:
    state: State
    executables: list[tuple[Loss, Any]] = field(default_factory=list)


class Programs:
    def __init__(self, state: State, first: Executable) -> None:
        self.first = first
        self._shelves = [Shelf(state, [(NO_LOSS, first)])]
        self._now = 0

    def number(self, state: State, changed: bool) -> int:
        """Of the shelf for `state`; -1 where there is none yet. The ranks must agree on it."""
        if not changed:
            return self._now
        found = [i for i, s in enumerate(self._shelves) if not s.state.changes(state)]
        return found[-1] if found else -1

    def find(
        self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss = NO_LOSS
    ) -> Any:
        """The executable on that shelf for a call of this form, and the call's leaves; or None."""
        if number < 0:
            return None
        for own, executable in self._shelves[number].executables:
            leaves = executable.leaves(args, kwargs) if own.same(loss) else None
            if leaves is not None:
                self._now = number
                return executable, leaves
        return None

    def add(self, number: int, state: State, made: Any, loss: Loss = NO_LOSS) -> int:
        """The number of the shelf."""
        if number < 0:
            self._shelves.append(Shelf(state))
            del self._shelves[:-STATES]
            number = len(self._shelves) - 1
        shelf = self._shelves[number]
        shelf.executables.append((loss, made))
        del shelf.executables[:-FORMS]
        return number

    @contextlib.contextmanager
    def standing_in(self, other: Executable) -> Iterator[None]:
        """`other`, for the same form of call and over the same weights, in place of the first."""
        shelf = self._shelves[0]
        own, shelf.executables = shelf.executables, [(NO_LOSS, other)]
        try:
            yield
        finally:
            shelf.executables = own

    def steps(self) -> list[str]:
        """How steps run, a line each."""
        every = [pair for shelf in self._shelves for pair in shelf.executables]
        return list(dict.fromkeys(f"step: {e.told(loss)}" for loss, e in every if loss.asked))
