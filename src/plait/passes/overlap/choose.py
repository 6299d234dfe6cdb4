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

from plait.passes.overlap.chunks import WHOLE, Form
from plait.passes.overlap.flow import Flow
from plait.passes.overlap.regions import Region, regions
from plait.passes.overlap.timeline import Machine, Timeline, blocking, march, script
from plait.passes.overlap.weave import arranged

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

    @property
    def gain(self) -> float:
        return self.whole - self.seconds

    @property
    def reason(self) -> str:
        """Why it stays whole, where it does."""
        work = self.whole - self.hideable
        if self.region.most < 2 * 128 and self.gain <= 0:
            return f"too few rows ({self.region.factor.size})"
        if self.hideable > work:
            return "the transfers are longer than the compute beside them"
        return f"the best form, {self.form}, would gain {100 * self.gain / max(self.whole, 1e-12):.1f}%"


def choose(
    flow: Flow, overlap: str | int, machine: Machine, n: int
) -> tuple[dict[Region, Form], list[Candidate]]:
    """The regions to cut and their forms, and what was weighed: the best form of every region."""
    if overlap == "off" or n == 1:
        return {}, []
    found = regions(flow, n)
    if isinstance(overlap, int):
        return _forced(flow, found, overlap, machine)
    best = [c for r in found if (c := _best(flow, r, machine)) is not None]
    chosen: dict[Region, Form] = {}
    for c in sorted(best, key=lambda c: -c.gain):
        if c.gain > NOISE * c.whole and _fits(flow, chosen, c.region):
            chosen[c.region] = c.form
    return chosen, best


def _forced(
    flow: Flow, found: list[Region], count: int, machine: Machine
) -> tuple[dict[Region, Form], list[Candidate]]:
    """Regions of factors with enough rows first, then those with more sites."""
    chosen: dict[Region, Form] = {}
    weighed = []
    for region in sorted(found, key=lambda r: (-min(count, r.most), -len(r.sites))):
        forms = [f for f in region.forms([count]) if f.kind != "blocks"]
        if forms and _fits(flow, chosen, region):
            chosen[region] = forms[0]
            weighed.append(weigh(flow, region, forms[0], machine))
    return chosen, weighed


def _fits(flow: Flow, chosen: Iterable[Region], region: Region) -> bool:
    taken = list(chosen)
    mine = {e.key for e in region.sites}
    if any(region.members & r.members or mine & {e.key for e in r.sites} for r in taken):
        return False
    return arranged(flow.program.graph, [*taken, region]) is not None


def _best(flow: Flow, region: Region, machine: Machine) -> Candidate | None:
    forms = region.forms(COUNTS)
    if region.split is None and region.most >= 4:
        forms.append(Form("rows", 4, 0.5))
    if not forms:
        return None
    return min((weigh(flow, region, f, machine) for f in forms), key=lambda c: c.seconds)


def weigh(flow: Flow, region: Region, form: Form, machine: Machine) -> Candidate:
    """One form of one region against the region in one piece, forward and backward."""
    whole, cut = timelines(flow, region, WHOLE, machine), timelines(flow, region, form, machine)
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
