"""Choose: which regions to cut and how, by marching the candidates through the machine.

    off      no region is cut
    C        every region that can be is cut in C chunks, or in as many as it has rows, and said
    auto     of whole, 2, 3, 4, 8 equal chunks, 4 geometric ones and the ranks' own blocks the fastest;
             whole wins unless the gain is above the noise, for a prediction is not a measurement

Regions of different factors may have nodes or moves in common; the one that gains more is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from plait.passes.overlap.arrange import arranged
from plait.passes.overlap.chunks import WHOLE, Form
from plait.passes.overlap.flow import Edge, Flow
from plait.passes.overlap.regions import Region, regions
from plait.passes.overlap.timeline import Machine, Timeline, blocking, march, script
from plait.rules.equation import atoms

COUNTS = (2, 3, 4, 8)
# Two runs of one program on one machine differ by this much (vLLM's benches: +-5 % in mixed runs;
# between two H200 hosts of a kind 4 to 10 % were measured), and the model's error is no smaller.
NOISE = 0.05


@dataclass(frozen=True)
class Candidate:
    region: Region
    form: Form
    seconds: float
    exposed: float
    whole: float  # seconds of the region in one piece
    hideable: float  # of it, seconds of transfers
    shared: bool = False  # the cores that compute also carry the transfers
    unasked: bool = False  # it would run only where chunks are asked for
    second: Candidate | None = None  # the next best form, where that gains too

    @property
    def gain(self) -> float:
        return self.whole - self.seconds

    @property
    def reason(self) -> str:
        """Why it stays whole, where it does."""
        if self.shared:
            return "transfers take the cores that compute"
        work = self.whole - self.hideable
        if self.region.most < 2 * 128 and self.gain <= 0:
            return f"too few rows ({self.region.factor.size})"
        if self.hideable > work:
            return "the transfers are longer than the compute beside them"
        part = 100 * self.gain / max(self.whole, 1e-12)
        if part < 0:
            return f"the best form, {self.form}, would lose {-part:.1f}%"
        only = ", but here chunks run only where they are asked for" if self.unasked else ""
        return f"the best form, {self.form}, would gain {part:.1f}%{only}"


def choose(
    flow: Flow, overlap: str | int, machine: Machine, n: int
) -> tuple[dict[Region, Form], list[Candidate]]:
    """The regions to cut and their forms, and what was weighed: the best form of every region."""
    if overlap == "off" or n == 1:
        return {}, []
    found = regions(flow, n)
    if isinstance(overlap, int):
        return _forced(flow, found, overlap, machine)
    known: dict[object, Candidate | None] = {}
    best = []
    for region in found:
        alike = signature(flow, region)
        if alike not in known:
            known[alike] = _best(flow, region, machine)
        if (c := known[alike]) is not None:
            best.append(replace(c, region=region))
    if machine.loses >= 1:  # what a prediction gains here is not there to be gained
        return {}, [replace(c, shared=True) for c in best]
    ranked = sorted((c for c in best if c.gain > NOISE * c.whole), key=lambda c: -c.gain)
    apart: list[Candidate] = []
    for c in ranked:
        if not _touches(c.region, (other.region for other in apart)):
            apart.append(c)
    if arranged(flow.program.graph, [c.region for c in apart]) is not None:
        return {c.region: c.form for c in apart}, best
    chosen: dict[Region, Form] = {}
    for c in ranked:
        if not _touches(c.region, chosen) and _apart(flow, chosen, c.region):
            chosen[c.region] = c.form
    return chosen, best


def _forced(
    flow: Flow, found: list[Region], count: int, machine: Machine
) -> tuple[dict[Region, Form], list[Candidate]]:
    """Regions of factors with enough rows first, then those with more sites, then those that need no order."""
    chosen: dict[Region, Form] = {}
    known: dict[object, Candidate] = {}
    weighed = []
    for region in sorted(found, key=lambda r: (-min(count, r.most), -len(r.sites), r.ordered)):
        form = next((f for f in region.forms([count]) if f.kind != "blocks"), None)
        if form is None:
            continue
        moved = {key for other in chosen for key in other.keys}  # by whichever of two regions comes first
        if not region.keys <= moved and _apart(flow, chosen, region):
            chosen[region] = form
        alike = signature(flow, region)
        if alike not in known:
            known[alike] = weigh(flow, region, form, machine)
        weighed.append(replace(known[alike], region=region))
    return chosen, weighed


def _apart(flow: Flow, chosen: Iterable[Region], region: Region) -> bool:
    """Whether all stand in one piece each, without a node in common."""
    taken = list(chosen)
    alone = not any(region.members & r.members for r in taken)
    return alone and arranged(flow.program.graph, [*taken, region]) is not None


def _touches(region: Region, others: Iterable[Region]) -> bool:
    return any(region.members & r.members or region.keys & r.keys for r in others)


def signature(flow: Flow, region: Region) -> object:
    """Equal for regions that take equal times: the layers of a model are weighed once."""
    at = {node: i for i, node in enumerate(region.nodes)}

    def sizes(node: fx.Node) -> object:
        access, split = flow.description.accesses[node], flow.strategies[node].split
        values = [o.dims for o in access.operands] + list(access.results)
        letters = {f.root(): i for i, f in enumerate(dict.fromkeys(f.root() for v in values for f in v))}
        cut = [(f.size, split.sizes(f) if split and split.touches(f) else None) for f in letters]
        mine = [i for f, i in letters.items() if region.factor in set(atoms(f))]
        return str(node.target), tuple(tuple(letters[f.root()] for f in v) for v in values), tuple(cut), tuple(mine)

    def move(edge: Edge) -> object:
        ends = at.get(edge.source, -1), at.get(edge.reader, -1)
        return (*ends, str(edge.moves), edge.grad, str(edge.source.meta["val"].dtype))

    nodes = tuple(sizes(node) for node in region.nodes)
    return nodes, tuple(map(move, region.sites)), region.rotates


def _best(flow: Flow, region: Region, machine: Machine) -> Candidate | None:
    forms = region.forms(COUNTS)
    if region.split is None and region.most >= 4:
        forms.append(Form("rows", 4, 0.5))
    if not forms:
        return None
    whole = timelines(flow, region, WHOLE, machine)
    best, *others = sorted((weigh(flow, region, f, machine, whole) for f in forms), key=lambda c: c.seconds)
    return replace(best, second=next((c for c in others if c.gain > 0), None))


def weigh(
    flow: Flow, region: Region, form: Form, machine: Machine, whole: list[Timeline] | None = None
) -> Candidate:
    """One form of one region against the region in one piece, forward and backward."""
    whole = whole or timelines(flow, region, WHOLE, machine)
    cut = timelines(flow, region, form, machine)
    return Candidate(
        region,
        form,
        sum(t.seconds for t in cut),
        sum(t.exposed for t in cut),
        sum(t.seconds for t in whole),
        sum(t.busy("comm") for t in whole),
    )


def timelines(flow: Flow, region: Region, form: Form, machine: Machine) -> list[Timeline]:
    """Of the forward and, where gradients flow, of the backward."""
    acts = blocking(flow, region) if form.count == 1 else script(flow, region, form)
    still = replace(machine, loses=0.0) if form.count == 1 else machine
    ways = (False, True) if any(e.grad for e in region.sites) else (False,)
    return [march(flow, region, form, acts, still, backward) for backward in ways]
