"""From measured seconds to the constants of a transport: a pure function, fitted by relative error.

    fit(rows, lines)    rows: (bytes, seconds); lines: what the topology says of the same collective
                        at line rate, (latency, seconds a byte) of every critical path

A protocol costs base + latency + moved bytes (cluster/transport.py). Few rows justify few
constants: from one line (base, share) over a window or a fill to two protocols, that form is
taken whose errors, in units of the noise between two readings of the same machine, and number of
constants are least together (Akaike's measure).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from plait.cluster.transport import Protocol, moved

Floats = NDArray[np.float64]
Rows = Sequence[tuple[float, float]]
Lines = Sequence[tuple[float, float]]
Form = tuple[tuple[str, ...], ...]  # the constants that each protocol has


@dataclass(frozen=True)
class Fit:
    protocols: tuple[Protocol, ...]
    errors: tuple[float, ...]  # predicted / measured - 1, row by row

    @property
    def mean(self) -> float:
        return float(np.mean(np.abs(self.errors)))

    @property
    def worst(self) -> float:
        return float(np.max(np.abs(self.errors)))

    def __str__(self) -> str:
        names = " or ".join(p.name for p in self.protocols)
        error = f"mean error {self.mean:.1%}, worst {self.worst:.1%}"
        return f"{names}: {error} over {len(self.errors)} sizes"


def fit(rows: Rows, lines: Lines = ((0.0, 1.0),), name: str = "fitted") -> Fit:
    """The protocols that explain the rows."""
    sizes, seconds = np.array(rows, float).T
    assert (seconds > 0).all(), rows
    assert (sizes > 0).all(), rows
    problem = _Problem(sizes, seconds, np.array(lines, float))
    forms = [form for form in _FORMS if sum(map(len, form)) < max(len(rows), 3)]
    solved = [(form, problem.solve(form)) for form in forms]
    form, constants = min(solved, key=lambda s: problem.misfit(*s) + 2 * sum(map(len, s[0])))
    return Fit(
        problem.protocols(form, constants, name),
        tuple((problem.predicted(form, constants) / seconds - 1).tolist()),
    )


@dataclass(frozen=True)
class _Problem:
    sizes: Floats
    seconds: Floats
    lines: Floats  # [line, (latency, seconds a byte)]

    def solve(self, form: Form) -> Floats:
        """The best constants of several starts: all in logarithms, between bounds."""
        names = [name for protocol in form for name in protocol]
        low, high = np.log([self._bounds(name) for name in names]).T
        found = [
            least_squares(
                lambda logs: np.log(self.predicted(form, logs) / self.seconds),
                low + (high - low) * start,
                bounds=(low, high),
                loss="soft_l1",
                f_scale=2 * NOISE,
            )
            for start in _starts(len(names))
        ]
        return np.array(min(found, key=lambda f: f.cost).x)

    def misfit(self, form: Form, logs: Floats) -> float:
        errors = np.log(self.predicted(form, logs) / self.seconds) / NOISE
        return float((errors**2).sum())

    def predicted(self, form: Form, logs: Floats) -> Floats:
        each = [self._by(p) for p in self.protocols(form, logs, "")]
        return np.asarray(np.min(each, axis=0))

    def _by(self, p: Protocol) -> Floats:
        start = self.lines[:, 0].max()
        paths = self.lines[:, :1] + self.lines[:, 1:] * self.sizes / p.share
        return np.asarray(p.base + start + moved(paths.max(axis=0) - start, p))

    def protocols(self, form: Form, logs: Floats, name: str) -> tuple[Protocol, ...]:
        made, values = [], iter(np.exp(logs).tolist())
        for i, names in enumerate(form):
            constants = {key: next(values) for key in names}
            if "window" in constants:
                constants["window"] *= constants["base"]
            label = name if len(form) == 1 else f"{name}-{'ab'[i]}"
            made.append(Protocol(label, **constants))
        return tuple(made)

    def _bounds(self, name: str) -> tuple[float, float]:
        if name == "share":
            return 1e-4, 1.0
        if name == "window":  # as a part of the base
            return 1e-3, 1.0
        return 1e-8, float(self.seconds.max())


def _starts(dimensions: int) -> Floats:
    """A handful of points spread over the unit cube, always the same."""
    return np.random.default_rng(7).uniform(0.05, 0.95, (12, dimensions))


# --- the forms, simplest first -------------------------------------------------------------------

NOISE = 0.05  # relative, between two readings of the same machine
_LINE = ("base", "share")
_FORMS: tuple[Form, ...] = (
    (_LINE,),
    ((*_LINE, "window"),),
    ((*_LINE, "fill", "most"),),
    (_LINE, _LINE),
    ((*_LINE, "window"), _LINE),
    (_LINE, (*_LINE, "fill", "most")),
)
