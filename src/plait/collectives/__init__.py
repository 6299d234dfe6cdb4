"""Collectives, every algorithm of them as a schedule that is proven, counted and run.

    from plait import collectives

    collectives.all_reduce(tensor, group, "ring")        run it
    schedule = collectives.build("ring[8]/4")            the steps, as data
    collectives.prove(schedule)                          that they are right
    collectives.ledger(schedule, 1 << 20).sent           the bytes they send
    print(collectives.explain("tree[6]"))
    collectives.choose("all_reduce", 1 << 26, range(8), "dgx-h100")    every algorithm's price, cheapest first

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
from plait.cost.comm import (  # of the room above: a user looks here for them
    Choice,
    Price,
    choose,
    price,
)

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "Choice",
    "Collective",
    "Ledger",
    "Message",
    "Price",
    "Proof",
    "Schedule",
    "Spec",
    "Transfer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "build",
    "choose",
    "closed_form",
    "compare",
    "draw",
    "explain",
    "least",
    "ledger",
    "names",
    "price",
    "prove",
    "reduce",
    "reduce_scatter",
    "supports",
]
