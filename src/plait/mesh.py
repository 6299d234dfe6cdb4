"""Mesh: how many ranks each axis gets, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.errors import MeshError, NotYetError


@dataclass(frozen=True)
class Mesh:
    tp: int
    pp: int = 1
    dp: int = 1

    @classmethod
    def of(cls, tp: int | str, pp: int | str, dp: int, ranks: int) -> Mesh:
        """`auto` takes what the others leave; tp * pp * dp must be the number of ranks."""
        for name, value in (("tp", tp), ("pp", pp), ("dp", dp)):
            if value != "auto" and (not isinstance(value, int) or value < 1):
                raise MeshError(f"{name}={value!r}: it takes a number of ranks from 1, or 'auto'")
        rest = 1 if pp == "auto" else int(pp)
        found = cls(ranks // (rest * dp) if tp == "auto" else int(tp), rest, dp)
        if found.tp * found.pp * found.dp != ranks:
            raise MeshError(
                f"tp={found.tp} x pp={found.pp} x dp={found.dp} is "
                f"{found.tp * found.pp * found.dp} "
                f"ranks, the group has {ranks}; with {ranks} ranks these fit: {_fits(ranks)}"
            )
        return found


def _fits(ranks: int) -> str:
    return ", ".join(f"tp={t} pp={ranks // t}" for t in range(1, ranks + 1) if ranks % t == 0)


def refuse_what_is_coming(**options: Any) -> None:
    """Keywords of the contract whose part is still to come take the value that means none."""
    wrong = [
        f"{name}={value!r}: {_COMING[name][1]} is still to come; {name} takes "
        + " or ".join(map(repr, _COMING[name][0]))
        for name, value in options.items()
        if value not in _COMING[name][0]
    ]
    if wrong:
        raise NotYetError("\n".join(wrong))


_COMING: dict[str, tuple[tuple[Any, ...], str]] = {
    "pp": (("auto", 1), "pipeline parallelism"),
    "dp": ((1,), "data parallelism"),
    "micro_batches": (("auto", 1), "a pipeline's micro-batches"),
    "schedule": (("auto",), "a pipeline's schedule"),
    "outputs": (("all", "last"), "outputs on the last stage alone"),
}
