"""Explain: a plan in words, all of it, for `compiled.explain()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby

from plait.plan import direct
from plait.plan.owed import LATE
from plait.plan.plan import Overlapped, Placed, Plan

BITS = "bits: matmuls in pieces, and gradients that are summed over pieces, may round otherwise than in one piece"


def explain(plan: Plan) -> str:
    """What is split, every collective, what is whole and why, what it should cost."""
    return "\n".join(
        [
            f"tp={plan.tp} pp={plan.pp} dp={plan.dp} on {plan.machine}",
            f"predicted {_time(plan.seconds)} a call; one device {_time(plan.seconds_alone)}",
            *([str(plan.measured)] if plan.measured is not None else []),
            *_choice(plan),
            *([f"stages: {plan.staged}"] if plan.staged is not None else []),
            *_weights(plan),
            *_collectives(plan),
            *([f"over dp={plan.dp}, in buckets: {plan.gradients}"] if plan.gradients else []),
            *_regions(plan),
            *_whole(plan),
            *(f"note: {note}" for note in plan.notes),
        ]
    )


def _choice(plan: Plan) -> list[str]:
    if plan.choice is None:
        return []
    memory = [f"memory: {plan.choice.memory}"] if plan.choice.memory is not None else []
    lines = [plan.chosen, *(f"  {c}" for c in plan.choice.front)] if plan.chosen else []
    return lines + [f"  does not fit: {why}" for why in plan.choice.refused] + memory


def _weights(plan: Plan) -> list[str]:
    held = ", ".join(f"{b:,}" for b in plan.bytes_per_rank)
    stages = ", all stages together," if plan.pp > 1 else ""
    lines = [f"weights: {held} bytes by rank{stages} of {plan.bytes_whole:,}"]
    known = {k.name for k in plan.kept}
    cut = {name: layout for name, layout in plan.weights.items() if name not in known}
    lines += [f"  {layout}: {', '.join(names)}" for layout, names in _grouped(cut)]
    for reason, names in _grouped({str(k): k.reason for k in plan.kept}):
        lines.append(f"  whole, {reason}: {', '.join(names)}")
    if plan.kept:
        lines.append(f"  whole on every rank: {sum(k.nbytes for k in plan.kept):,} bytes in all")
    return lines + [f"  one matmul: {' + '.join(pack)}" for pack in plan.packed]


def _grouped(layouts: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    by_layout: dict[str, list[str]] = {}
    for name, layout in layouts.items():
        by_layout.setdefault(layout, []).append(name)
    return list(by_layout.items())


def _collectives(plan: Plan) -> list[str]:
    counts = Counter(p.collective for p in plan.collectives)
    summary = ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "none"
    lines = [f"collectives: {summary}"]
    for _, group in groupby(plan.collectives, key=lambda p: (p.module, p.source)):
        lines += [f"  {p}; {_beside(plan, p)}" for p in group]
    return lines


def _regions(plan: Plan) -> list[str]:
    """What can run in chunks, in what chunks it does, and why not where it does not."""
    peers = [o for o in plan.overlaps if direct.direct(o.form)]
    late = sum(o.form == LATE for o in plan.overlaps)
    regions = [o for o in plan.overlaps if o.form != LATE and o not in peers]
    cut = sum(o.form != "whole" for o in regions)
    lines = [f"regions: {cut} of {len(regions)} in chunks"] if regions else []
    beside = sum(map(_hides, peers))
    lines += [f"moves through the peers' memory: {len(peers)}, {beside} of them beside matmuls"] if peers else []
    lines += [f"moves of gradients beside gradients of weights: {late}"] if late else []
    lines += [BITS] if cut or beside else []
    staged = plan.staged
    if staged is None:
        return lines + [f"  {o}" for o in plan.overlaps]
    lines += [f"  stage {o.stage}, {o}" for o in plan.overlaps]
    _, *sizes = dict.fromkeys(staged.rows or (0,))
    known = {(o.region, o.form) for o in plan.overlaps}
    for rows, listed in zip(sizes, staged.overlaps, strict=True):  # where they run otherwise
        others = [o for o in listed if (o.region, o.form) not in known]
        lines += [f"  of {rows} rows: stage {o.stage}, {o}" for o in others]
    return lines


def _beside(plan: Plan, placed: Placed) -> str:
    """What a collective runs beside, or why beside nothing."""
    found = [o for o in plan.overlaps if o.moves(placed.name)]
    held = plan.bare.get(placed.name, "")
    cut = next((o for o in found if o.form != "whole"), None)
    if cut is not None and direct.direct(cut.form) and not _hides(cut):
        times = f"predicted {_time(cut.exposed)} instead of {_time(placed.seconds)}"
        return f"not overlapped: through the peers' memory by a kernel, {cut.form}, {times}"
    if cut is not None:
        by = "through the peers' memory, " if direct.direct(cut.form) else "in "
        how = "" if cut.form == LATE else f" {by}{cut.form}"
        return (
            f"overlapped with {cut.region}{how}, {cut.nodes} operators, predicted exposed "
            f"{_time(cut.exposed)} of the region's {_time(cut.seconds)}"
        ) + (f" ({cut.reason})" if cut.reason else "")
    if found:
        best = min(found, key=lambda o: o.seconds)
        return f"not overlapped: {'; '.join(why for why in (held, best.reason) if why)}"
    if held:
        return f"not overlapped: {held}"
    if plan.measured is not None and plan.measured.blocking:
        return f"not overlapped: {plan.measured.brief}"
    off = plan.overlap in ("off", "1")
    return "not overlapped: " + ("overlap is off" if off else "nothing around it runs in chunks")


def _hides(moved: Overlapped) -> bool:
    """Whether rows that go through the peers' memory do so beside matmuls: a kernel may move all of them."""
    return moved.nodes > 0 and all(r.direct < 1 for r in direct.routes((moved,)).values())


def _whole(plan: Plan) -> list[str]:
    return [
        f"whole on every rank, {why}: {', '.join(nodes)}" for why, nodes in _grouped(plan.whole)
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
