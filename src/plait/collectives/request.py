"""What a call asks for, checked on this rank and spelled so that ranks can compare it.

    all_reduce sum of float32[3, 4] by ring[4]
    all_gather of bfloat16[*, 8] in rows (3, 0, 5) by native

Every rank must ask for the same. What differs by right, this rank's own rows, is in `sizes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import get_args

import torch
from torch import Tensor

from plait.collectives.algorithms import build, names
from plait.collectives.run import ReduceOp
from plait.collectives.schedule import Collective, Schedule, Spec, balanced, whole
from plait.errors import CollectiveError

Algorithm = str | Schedule
Chooser = Callable[[Collective, int, int], Algorithm]  # (collective, bytes, ranks)
Sizes = Sequence[int] | Sequence[Sequence[int]] | None
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
PARTED = ("reduce_scatter", "all_gather", "all_to_all")  # cut in rows, along dim 0


@dataclass(frozen=True)
class Request:
    collective: Collective
    dtype: torch.dtype
    shape: tuple[int, ...]  # without dim 0 where `sizes` are rows
    op: ReduceOp | None
    root: int | None
    sizes: tuple[int, ...] | None  # rows of each rank; all_to_all: of each (source, destination)
    schedule: Schedule | None  # None: the backend's own

    @property
    def row(self) -> int:
        """Numbers in a row, or in the whole tensor; a complex one is two."""
        return prod(self.shape) * (2 if self.dtype.is_complex else 1)

    @property
    def rows(self) -> tuple[int, ...]:
        return self.sizes or ()

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The numbers of each part; of a vector without parts, of the whole."""
        return tuple(rows * self.row for rows in self.sizes or (1,))

    def __str__(self) -> str:
        return self._words

    @cached_property
    def _words(self) -> str:
        what: list[str] = [self.collective, *([self.op] if self.op else [])]
        rows = ["*"] if self.sizes is not None else []
        dims = ", ".join([*rows, *map(str, self.shape)])
        what.append(f"of {str(self.dtype).removeprefix('torch.')}[{dims}]")
        if self.sizes is not None:
            what.append(f"in rows {self.sizes}")
        if self.root is not None:
            what.append(f"at rank {self.root}")
        return " ".join([*what, "by", self.schedule.spelling if self.schedule else "native"])


def request(
    collective: Collective,
    tensor: Tensor,
    ranks: tuple[int, int],
    how: tuple[Algorithm, Chooser | None],
    op: str | None = None,
    root: int | None = None,
    sizes: Sizes = None,
) -> Request:
    """The request of rank `ranks[0]` of `ranks[1]`; CollectiveError or ScheduleError if none."""
    rank, n = ranks
    _check_tensor(collective, tensor, op)
    if root is not None and not (type(root) is int and 0 <= root < n):
        raise CollectiveError(f"{collective}: root {root!r} is none of the ranks 0..{n - 1}")
    rows = _rows(collective, tensor, rank, n, sizes) if collective in PARTED else None
    shape = tuple(tensor.shape[1:] if rows is not None else tensor.shape)
    asked = Request(collective, tensor.dtype, shape, op, root, rows, None)  # type: ignore[arg-type]
    return replace(asked, schedule=_schedule(asked, n, *how))


def nbytes(asked: Request, n: int) -> int:
    """The size S of a request: the whole vector; for all_to_all the most that one rank sends."""
    count = sum(asked.parts)
    if asked.collective == "all_to_all":
        count = max(sum(asked.parts[r * n : (r + 1) * n]) for r in range(n))
    return count * asked.dtype.itemsize // (2 if asked.dtype.is_complex else 1)


def check_timeout(collective: str, timeout: float | None) -> None:
    fine = isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0
    if timeout is not None and not fine:
        text = f"a timeout is a number of seconds above 0, or None for the group's; got {timeout!r}"
        raise CollectiveError(f"{collective}: {text}")


# --- the tensor ----------------------------------------------------------------------------------


def _check_tensor(collective: str, tensor: Tensor, op: str | None) -> None:
    if not isinstance(tensor, Tensor):
        raise CollectiveError(f"{collective}: takes a tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise CollectiveError(f"{collective}: takes a dense tensor with data; this one is {kind}")
    if op is None:
        return
    if op not in get_args(ReduceOp):
        raise CollectiveError(f"{collective}: op {op!r} is none of {', '.join(get_args(ReduceOp))}")
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 2:
        text = f"{tensor.dtype} cannot be added up; reduce it in bfloat16 or float32"
        raise CollectiveError(f"{collective}: {text}")
    if tensor.is_complex() and op != "sum":
        raise CollectiveError(f"{collective}: complex numbers have no {op}; only sum")


def writable(tensor: Tensor) -> bool:
    """No two elements share a place in memory, as those of an expanded tensor do."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


# --- rows ----------------------------------------------------------------------------------------


def _rows(collective: str, tensor: Tensor, rank: int, n: int, sizes: Sizes) -> tuple[int, ...]:
    if tensor.dim() == 0:
        raise CollectiveError(f"{collective}: cuts along dim 0, which a scalar tensor has not")
    if sizes is not None and not isinstance(sizes, Sequence):
        raise CollectiveError(f"{collective}: sizes are a list, not {type(sizes).__name__}")
    have = tensor.shape[0]
    if collective == "all_gather":
        rows = _listed(collective, sizes, n) if sizes is not None else (have,) * n
        expected = rows[rank]
    elif collective == "reduce_scatter":
        rows = _listed(collective, sizes, n) if sizes is not None else balanced(have, n)
        expected = sum(rows)
    else:
        rows = _table(sizes, n) if sizes is not None else balanced(have, n) * n
        expected = sum(rows[rank * n : (rank + 1) * n])
    if have != expected:
        text = f"rank {rank} has {have} rows, and by sizes {sizes} it should have {expected}"
        raise CollectiveError(f"{collective}: {text}")
    return rows


def _listed(collective: str, sizes: Sizes, n: int) -> tuple[int, ...]:
    assert sizes is not None
    rows = tuple(sizes)
    if len(rows) != n or not all(whole(r, least=0) for r in rows):
        text = f"takes {n} sizes, one a rank and none below 0; got {list(rows)}"
        raise CollectiveError(f"{collective}: {text}")
    return tuple(r for r in rows if isinstance(r, int))


def _rightful(row: Sequence[object]) -> bool:
    return all(whole(size, least=0) for size in row)


def _table(sizes: Sizes, n: int) -> tuple[int, ...]:
    assert sizes is not None
    rows = [tuple(row) if isinstance(row, Sequence) else () for row in sizes]
    if len(rows) != n or not all(len(row) == n and _rightful(row) for row in rows):
        text = f"takes {n} x {n} sizes, by source and destination, none below 0; got {list(sizes)}"
        raise CollectiveError(f"all_to_all: {text}")
    return tuple(size for row in rows for size in row)


# --- the algorithm -------------------------------------------------------------------------------


def _schedule(
    asked: Request, n: int, algorithm: Algorithm, chooser: Chooser | None
) -> Schedule | None:
    if algorithm == "auto":
        if chooser is not None and not callable(chooser):
            text = f"a chooser is a function of (collective, bytes, ranks), not {chooser!r}"
            raise CollectiveError(f"{asked.collective}: {text}")
        chosen = chooser(asked.collective, nbytes(asked, n), n) if chooser else "native"
        return None if chosen == "auto" else _schedule(asked, n, chosen, None)
    if algorithm == "native":
        return None
    if isinstance(algorithm, Schedule):
        return _fitting(asked, n, algorithm)
    if not isinstance(algorithm, str):
        kind = type(algorithm).__name__
        raise CollectiveError(f"{asked.collective}: an algorithm is a name or a Schedule, not {kind}")
    if "[" in algorithm:
        spec = Spec.parse(algorithm)
        if spec.collective == "all_reduce" and not algorithm.strip().startswith("all_reduce"):
            spec = replace(spec, collective=asked.collective)
        if not spec.root and asked.root:
            spec = replace(spec, root=asked.root)
        return _fitting(asked, n, build(spec))
    name, _, pieces = algorithm.partition("/")
    if name == "hierarchical":
        text = f"say its levels, for example hierarchical[2x{max(1, n // 2)}: ring, tree]"
        raise CollectiveError(f"{asked.collective}: hierarchical has levels: {text}")
    if name not in names(asked.collective) or (pieces and not re.fullmatch("[0-9]{1,9}", pieces)):
        known = ", ".join(("auto", "native", *names(asked.collective), "hierarchical[...]"))
        raise CollectiveError(f"{asked.collective}: no algorithm {algorithm!r}; there are {known}")
    count = int(pieces) if pieces else _pieces(name, asked.collective, nbytes(asked, n))
    return build(Spec(name, (n,), asked.collective, pieces=count, root=asked.root or 0))


def _fitting(asked: Request, n: int, schedule: Schedule) -> Schedule:
    wrong = []
    if schedule.collective != asked.collective:
        wrong.append(f"is one of {schedule.collective}, not of {asked.collective}")
    if schedule.n != n:
        wrong.append(f"is for {schedule.n} ranks, and the group has {n}")
    if asked.root is not None and schedule.root != asked.root:
        wrong.append(f"has its root at rank {schedule.root}, not {asked.root}")
    if wrong:
        raise CollectiveError(f"schedule {schedule} {' and '.join(wrong)}")
    return schedule


def _pieces(name: str, collective: Collective, size: int) -> int:
    """Pieces where only a name is given: enough to pipeline a tree, and to bound the slots."""
    if n_bytes := _PIECE.get("ring chain" if (name, collective) in _CHAINS else name):
        return max(1, min(32, size // n_bytes))
    return 1


_CHAINS = {("ring", "broadcast"), ("ring", "reduce")}
_PIECE = {  # bytes of a piece; bench/collectives.py
    "tree": 1 << 20,
    "double_tree": 1 << 20,
    "ring chain": 1 << 20,
    "parameter_server": 8 << 20,
    "one_shot": 8 << 20,
}
