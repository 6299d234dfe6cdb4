"""The tree of errors: a user's mistake is a `PlaitError` that is also the builtin a caller expects.

A broken invariant of our own is an `assert`, never one of these.
"""

from __future__ import annotations


class PlaitError(Exception):
    """Base of every error that Plait raises on purpose."""


class CaptureError(PlaitError, RuntimeError):
    """The model cannot be captured as a graph; names the user's line."""


class InputError(PlaitError, ValueError):
    """An argument has the wrong structure, shape, dtype or value, or differs between ranks."""


class MeshError(PlaitError, ValueError):
    """tp, pp and dp do not fit the ranks; lists what fits."""


class PlanError(PlaitError, ValueError):
    """A plan cannot be made, or does not belong to this model."""


class LaidError(PlanError):
    """Another form of call needs weights laid out otherwise than they are loaded; names them."""


class WeightError(PlaitError, KeyError):
    """Weights are missing, extra, or of another shape; lists them all."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class NotYetError(PlaitError, NotImplementedError):
    """A keyword of the contract whose part is still to come; says what works today."""


class RankError(PlaitError, RuntimeError):
    """A rank failed or did not come; names it and its message or signal."""


class CollectiveError(PlaitError, ValueError):
    """A collective was asked for with ranks, sizes, dtypes or strides that it cannot serve."""


class ScheduleError(PlaitError, ValueError):
    """A schedule is wrong; names the rank, the step and the chunk at fault."""


class ClusterError(PlaitError, ValueError):
    """A cluster cannot be described so, or has no such device, rank or preset; lists what there is."""
