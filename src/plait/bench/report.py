"""Report: the figures of a run as a table with a chart, as JSON and as SVG.

    overlapped   14.21   13.9-14.4  ████████████████████▒▒▒   1.4   71%

A bar is a step: dark up to the floor of the run, light what stands above it.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from plait.bench.figures import Figure, Figures, order

BAR = 24  # characters of the longest bar
_COLOURS = {
    "alone": "#8d99ae", "blocking": "#3a6ea5", "textbook": "#b08900", "overlapped": "#2a9d57",
    "forced": "#7fb069", "floor": "#6c757d", "peer": "#8e5ba6",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One model at one size: what was timed, on what, and what came of it."""

    title: str
    facts: dict[str, Any]  # tokens, share, layers ...
    figures: Figures
    left_out: Sequence[str] = ()
    wrong: Sequence[str] = ()  # rows whose output is not the model's

    @property
    def order(self) -> tuple[int, int]:
        """Of pairs of rows that lie apart, those predicted in the order in which they came, and all."""
        return order([f.row for f in self.figures.rows])

    def to_dict(self) -> dict[str, Any]:
        rows = [f.to_dict() for f in self.figures.rows]
        right, apart = self.order
        known: dict[str, Any] = {"floor": self.figures.floor, "blocking": self.figures.blocking}
        known["order"] = {"right": right, "apart": apart}
        more = {"left_out": list(self.left_out), "wrong": list(self.wrong)}
        return self.facts | known | {"rows": rows} | more


def table(run: Run) -> Table:
    made = Table(title=run.title, box=box.SIMPLE, title_justify="left", show_edge=False)
    for name in ("row", "ms", "p10-p90", "", "exposed", "hidden", "speed-up", "efficient", "predicted", "error", "how"):
        left = name in ("row", "", "how")
        made.add_column(name, justify="left" if left else "right", no_wrap=name != "how", overflow="fold")
    longest = max(f.row.seconds for f in run.figures.rows)
    for f in run.figures.rows:
        made.add_row(*_cells(f, run.figures.floor, longest))
    return made


def _cells(f: Figure, floor: float | None, longest: float) -> list[str]:
    row = f.row
    low, high = row.spread
    return [
        row.name,
        _ms(row.seconds),
        f"{_ms(low)}-{_ms(high)}",
        bar(row.seconds, floor, longest),
        _ms(f.exposed),
        _percent(f.hidden),
        "" if f.speedup is None else f"{f.speedup:.2f}x",
        _percent(f.efficiency),
        "" if row.predicted is None else f"{_ms(row.predicted)} {row.predicted / row.seconds - 1:+.0%}",
        "" if row.error is None else f"{row.error:.1e}",
        row.note,
    ]


def bar(seconds: float, floor: float | None, longest: float) -> str:
    total = max(1, round(BAR * seconds / longest))
    dark = total if floor is None else min(total, round(BAR * floor / longest))
    return "█" * dark + "▒" * (total - dark)


def summary(run: Run) -> list[str]:
    """Lines under the table: the ratios that are asked for."""
    ours, peer = run.figures.fastest("overlapped"), run.figures.fastest("peer")
    lines = []
    if ours is not None and run.figures.blocking is not None:
        ratio = run.figures.blocking / ours.row.seconds
        lines.append(f"overlapped is {ratio:.3f}x the best blocking row")
    if ours is not None and peer is not None:
        ratio = peer.row.seconds / ours.row.seconds
        lines.append(f"overlapped is {ratio:.3f}x the best peer ({peer.row.name})")
    guesses = [abs(f.row.predicted / f.row.seconds - 1) for f in run.figures.rows if f.row.predicted]
    if guesses:
        lines.append(f"predicted against measured: mean error {sum(guesses) / len(guesses):.0%}")
    right, apart = run.order
    if apart:
        lines.append(f"predicted order: right for {right} of {apart} pairs that lie apart")
    lines += [f"left out: {text}" for text in run.left_out]
    lines += [f"WRONG: {text}" for text in run.wrong]
    return lines


# --- SVG ------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, LINE = 900, 190, 170, 24


def svg(runs: Sequence[Run]) -> str:
    """A chart a run, below each other; the floor is a line through the bars."""
    parts: list[str] = []
    at = 10
    for run in runs:
        parts += _chart(run, at)
        at += LINE * (len(run.figures.rows) + 2) + 20
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{at}" '
        f'font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _chart(run: Run, top: int) -> list[str]:
    rows, floor = run.figures.rows, run.figures.floor
    scale = (WIDTH - LEFT - RIGHT) / max(f.row.seconds for f in rows)
    out = [f'<text x="10" y="{top + 16}" font-weight="bold">{html.escape(run.title)}</text>']
    for i, f in enumerate(rows):
        y = top + LINE * (i + 1) + 6
        wide, colour = f.row.seconds * scale, _COLOURS[f.row.kind]
        dark = min(wide, floor * scale) if floor is not None else wide
        out += [
            f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{html.escape(f.row.name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{wide:.1f}" height="17" fill="{colour}" opacity="0.45"/>',
            f'<rect x="{LEFT}" y="{y}" width="{dark:.1f}" height="17" fill="{colour}"/>',
            f'<text x="{LEFT + wide + 6:.1f}" y="{y + 13}">{_label(f)}</text>',
        ]
    if floor is not None:
        x, y0, y1 = LEFT + floor * scale, top + LINE, top + LINE * (len(rows) + 1)
        out.append(f'<path d="M{x:.1f} {y0}V{y1}" stroke="black" stroke-dasharray="3 3"/>')
    return out


def _label(f: Figure) -> str:
    return f"{_ms(f.row.seconds)} ms" + (f", {_percent(f.hidden)} hidden" if f.hidden is not None else "")


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.4g}"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"
