"""Small models that break sharding systems: the handed cases (b01 ...) and more of each kind.

`CASES[id].setup()` builds one; `tests/gloo/prove.py` runs it on every rank against one process.
"""

from __future__ import annotations

from tests.cases import (
    attentions,
    fused,
    gradients,
    mixtures,
    order,
    partials,
    positions,
    shapes,
    splits,
    stages,
    training,
    vocabulary,
    widths,
)
from tests.cases.case import CASES, Case, Mesh, Setup

ROOMS = (
    splits, vocabulary, gradients, stages, order,  # the handed cases
    fused, positions, attentions, widths, mixtures, partials, shapes, training,  # more of each kind
)  # fmt: skip

__all__ = ["CASES", "ROOMS", "Case", "Mesh", "Setup"]
