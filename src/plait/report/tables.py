"""Tables for the terminal: what `plait run`, `plait plan` and `plait rules` print."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType
from typing import TypeVar, cast

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plait.collectives import Collective, build, least, ledger
from plait.plan.plan import Choice, Kept, Placed, Plan

Row = TypeVar("Row", bound=Hashable)


@dataclass(frozen=True)
class Outcome:
    """What `plait run` found; `unit` is a token or a call."""

    model: str
    plan: Plan
    memory: Sequence[int]  # bytes of weights by rank
    memory_alone: int
    seconds: float
    seconds_alone: float
    unit: str
    same: bool
    claim: str
    detail: str


def run_table(outcome: Outcome) -> Table:
    """How the model was split, what was sent, memory and time against one process, the claim."""
    table = plan_table(outcome.plan, f"{outcome.model} on {len(outcome.memory)} processes")
    table.add_section()
    memory = by_rank(outcome.memory, size)
    table.add_row(
        "memory", "of weights, by rank", "", f"{memory}; one process {size(outcome.memory_alone)}"
    )
    ratio = outcome.seconds / outcome.seconds_alone if outcome.seconds_alone else float("nan")
    ours, alone = duration(outcome.seconds), duration(outcome.seconds_alone)
    table.add_row("time", f"per {outcome.unit}", "", f"{ours}; one process {alone}: {ratio:.3g} times as long")
    answer = "yes" if outcome.same else "no"
    detail = f" ({outcome.detail})" if outcome.detail else ""
    table.add_row("check", f"{outcome.claim}: {answer}{detail}", "", "")
    return table


def plain(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table of these columns; those in `right` are set to the right."""
    table = Table(title=title, box=box.SIMPLE, title_justify="left", show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def plan_table(plan: Plan, title: str) -> Table:
    """The weights' layouts and the collectives; repeated layers in one row."""
    table = plain(title, "what", "how", "times", "bytes", right=["times"])
    whole = {k.name: k for k in plan.kept}
    for (name, layout, nbytes), count in counted(
        (pattern(n), *_held(whole[n])) if n in whole else (pattern(n), _share(how, plan), 0)
        for n, how in (dict(plan.weights) | {k: "" for k in whole if k not in plan.weights}).items()
    ):
        table.add_row(name, layout, str(count), size(count * nbytes) if nbytes else "")
    weights = by_rank(plan.bytes_per_rank, size)
    who = "by rank" if plan.staged is None else "by rank, all stages together"
    table.add_row("all weights", who, "", f"{weights} of {size(plan.bytes_whole)}")
    table.add_section()
    if plan.staged is not None:
        crossing = plan.staged.crossing
        sent = f"{by_rank(crossing, size)} at a cut{_each(plan)}" if crossing else ""
        table.add_row("stages", str(plan.staged), str(plan.pp), sent)
        table.add_section()
    for (what, how, each), count in counted(map(_collective, plan.collectives)):
        table.add_row(what, how, str(count), f"{size(each)} each, {size(each * count)} in all")
    sent = f"{_sent(plan)}{_each(plan)}"
    table.add_row("all collectives", "sent " + who, str(len(plan.collectives)), sent)
    if plan.whole:
        table.add_section()
    reasons = counted(reason for reason in plan.whole.values())
    for reason, count in reasons:
        table.add_row("whole on every rank", reason, str(count), "")
    return table


def _held(kept: Kept) -> tuple[str, int]:
    return f"whole: {kept.reason}", kept.nbytes


def choice_table(choice: Choice) -> Table:
    """The front-runners side by side, the winner first: seconds of a call, and where they go."""
    table = Table(title="front-runners", box=box.SIMPLE, title_justify="left", show_edge=False)
    table.add_column("mesh")
    table.add_column("schedule")
    parts = [k for k in choice.winner.parts if any(k in c.spent for c in choice.front)]
    for column in ("a call", *parts, "per result", "memory"):
        table.add_column(column, justify="right")
    for c in choice.front:
        mesh, _, how = c.name.partition(f"dp={c.dp} ")
        table.add_row(
            f"{mesh}dp={c.dp}",
            escape(how),
            duration(c.seconds),
            *(duration(c.parts[k]) if k in c.spent else "-" for k in parts),
            duration(c.period),
            size(c.memory),
        )
    return table


def rules_table(lines: Iterable[tuple[str, object]]) -> Table:
    """The equation table, a row for each rule."""
    table = Table(box=box.SIMPLE, show_edge=False)
    table.add_column("operators", overflow="fold", ratio=1)
    table.add_column("equation", overflow="fold", ratio=1)
    for names, rule in lines:
        table.add_row(escape(names.replace(".default", "")), escape(_spelled(rule)))
    return table


def predictions(plan: Plan) -> Iterator[str]:
    """The lines under a plan's table: what it should cost on the described machine."""
    yield f"predicted {duration(plan.seconds)} a call on {plan.machine}"
    yield f"one device {duration(plan.seconds_alone)}"
    spent = sum(p.seconds for p in plan.collectives)
    hidden = any(o.form != "whole" for o in plan.overlaps)
    yield f"collectives {duration(spent)}, " + ("if none of it were hidden" if hidden else "which is part of it")
    if plan.measured is not None:
        yield str(plan.measured)
    if plan.chosen:
        yield plan.chosen
    if plan.choice is not None:
        if plan.choice.memory is not None:
            yield f"memory: {plan.choice.memory}"
        yield from (f"does not fit: {why}" for why in plan.choice.refused)
    yield from (f"note: {note}" for note in plan.notes)


def show(*parts: Table | str) -> None:
    """To the terminal, in its own width; wide enough for a line elsewhere."""
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console = Console(width=160, highlight=False)
    console.print()
    for part in parts:
        console.print(part)


def _share(layout: str, plan: Plan) -> str:
    """`shard(f7) on dim 0` -> `dim 0 in 2 equal parts`, or `dim 0 as 6 + 3` of what is split.

    Where heads are split apart from those that they share: `dim 0 as 5 + 4 query heads`, `dim 0 as
    heads 0:2 | 1:3 of 3, head 1 on ranks 0 and 1`.
    """
    found = re.fullmatch(r"shard\((.*)\) on dim (\d+)(?:, (heads .*))?", layout)
    if found is None or found[1] not in plan.splits:
        return layout
    if found[3]:
        return f"dim {found[2]} as {found[3]}"
    unit = " query heads" if "*" in found[1] else ""
    bounds = [int(b) for b in plan.splits[found[1]].split(": ")[1].split()]
    parts = [b - a for a, b in pairwise(bounds)]
    how = (
        f"in {len(parts)} equal parts"
        if len(set(parts)) == 1
        else f"as {' + '.join(map(str, parts))}{unit}"
    )
    return f"dim {found[2]} {how}"


def _collective(placed: Placed) -> tuple[str, str, int]:
    where = pattern(placed.module) or "the model"
    return f"{placed.collective} in {where}", placed.algorithm, placed.nbytes


def _each(plan: Plan) -> str:
    """What a pipeline's bytes are of."""
    return ", of each micro-batch" if plan.staged is not None else ""


def _sent(plan: Plan) -> str:
    """Counted from the schedules; of the backend's own algorithms, the least that any sends."""
    total = [0.0] * plan.tp
    for placed in plan.collectives:
        total = [a + b for a, b in zip(total, _sent_by(placed, plan.tp), strict=True)]
    bound = "at least " if any(p.algorithm == "native" for p in plan.collectives) else ""
    return bound + by_rank(total, size)


def _sent_by(placed: Placed, ranks: int) -> Sequence[float]:
    if placed.algorithm == "native":
        return [least(cast(Collective, placed.collective), ranks).busiest * placed.nbytes] * ranks
    name = placed.algorithm if "[" in placed.algorithm else f"{placed.algorithm}[{ranks}]"
    return ledger(build(f"{placed.collective} {name}"), placed.nbytes).sent


def _spelled(rule: object) -> str:
    """An equation's text, or what a function that is a rule says of itself."""
    return (rule.__doc__ or "").split("\n")[0] if isinstance(rule, FunctionType) else str(rule)


# --- words ----------------------------------------------------------------------------------


def pattern(name: str) -> str:
    """`model.layers.17.mlp` -> `model.layers.*.mlp`: one row for what repeats."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def counted(rows: Iterable[Row]) -> list[tuple[Row, int]]:
    """Each different row once, in order, with how often it comes."""
    return list(Counter(rows).items())


def by_rank(values: Sequence[float], word: Callable[[float], str]) -> str:
    words = [word(v) for v in values]
    return words[0] if len(set(words)) == 1 else " / ".join(words)


def size(count: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError(seconds)
