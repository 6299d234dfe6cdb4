"""Collectives, every algorithm of them as a schedule that is proven, counted and run.

    from plait import collectives

    collectives.all_reduce(tensor, group, "ring")        run it
    schedule = collectives.build("ring[8]/4")            the steps, as data
    collectives.prove(schedule)                          that they are right
    collectives.ledger(schedule, 1 << 20).sent           the bytes they send
    print(collectives.explain("tree[6]"))

docs/collectives.md has the algorithms, the bounds and their derivations.
"""

from plait.collectives.algorithms import ALGORITHMS, build, names, supports
from plait.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce,
    reduce_scatter,
)
from plait.collectives.check import Proof, prove
from plait.collectives.explain import draw, explain
from plait.collectives.ledger import Ledger, closed_form, compare, least, ledger
from plait.collectives.schedule import (
    COLLECTIVES,
    Collective,
    Message,
    Schedule,
    Spec,
    Transfer,
)

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "Collective",
    "Ledger",
    "Message",
    "Proof",
    "Schedule",
    "Spec",
    "Transfer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "build",
    "closed_form",
    "compare",
    "draw",
    "explain",
    "least",
    "ledger",
    "names",
    "prove",
    "reduce",
    "reduce_scatter",
    "supports",
]
