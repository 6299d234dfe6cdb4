"""Join: the batches of all replicas as one batch, so that a loss of it can be captured.

Along which dim of each input they join is what the equations of a replica's own program say. Where
they cannot tell (a batch of one row), it is dim 0 of whatever has as many rows there as the first input.
Either way the equations of the joined program have the last word: they must find the batch in
these dims and in no others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.errors import InputError
from plait.passes.microbatch import Batch, Joined, Uncut, find
from plait.program import Program
from plait.rules.describe import Description
from plait.rules.described import described
from plait.rules.equation import Dims, atoms
from plait.rules.split import Split

Shapes = Sequence[Sequence[int] | None]  # by leaf of a call; None: no tensor
Along = list[int | None]  # by leaf: the dim that holds the batch


def shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[int] | None]:
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return [list(x.shape) if isinstance(x, Tensor) else None for x in leaves]


def along(program: Program) -> Along | None:
    """Where a replica's own program has the batch, if its equations know."""
    d = described(program)
    found = find(program, d, 2)
    return _along(program, d, found.split) if isinstance(found, Batch) else None


def _along(program: Program, d: Description, split: Split) -> Along:
    dims = _inputs(program, d)
    return [None if x is None else split.dim(x) for x in dims]


def _inputs(program: Program, d: Description) -> list[Dims | None]:
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    found = [nodes[i.node] if i.node is not None else None for i in program.inputs]
    return [d.dims[n][0] if n is not None and n in d.dims else None for n in found]


@dataclass(frozen=True)
class Join:
    """`dims`: where the batch is, by leaf; `every`: the shapes of each replica's leaves."""

    dims: Along
    every: Sequence[Shapes]

    @classmethod
    def of(cls, told: Sequence[Along | None], every: Sequence[Shapes]) -> Join:
        """`told`: what the equations of each replica say. InputError: the batches do not join."""
        known = next((t for t in told if t is not None), None)
        made = cls(known if known is not None else _rows_of_dim_0(every), every)
        made._check()
        return made

    def _check(self) -> None:
        wrong = []
        for leaf, dim in enumerate(self.dims):
            rest = [_without(shapes[leaf], dim) for shapes in self.every]
            if any(r != rest[0] for r in rest):
                each = ", ".join(f"{s[leaf]} on replica {r}" for r, s in enumerate(self.every))
                where = "nowhere" if dim is None else f"in dim {dim} alone"
                wrong.append(f"  input {leaf}: {each}; they may differ {where}")
        if wrong:
            raise InputError(
                "\n".join(
                    ["step: the batches of the replicas do not join", *wrong,
                     "pad them to one length, or call backward on a loss of each replica's own"]
                )
            )  # fmt: skip

    @property
    def rows(self) -> tuple[int, ...]:
        """Of every replica."""
        leaf, dim = next((i, d) for i, d in enumerate(self.dims) if d is not None)
        return tuple(s[leaf][dim] for s in self.every)  # type: ignore[index]

    @property
    def possible(self) -> bool:
        return any(d is not None for d in self.dims)

    def example(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """A call with as many rows as all replicas have together: one replica's, again and again."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        total = sum(self.rows)
        widened = [
            x if dim is None else _again(x, dim, total)
            for x, dim in zip(leaves, self.dims, strict=True)
        ]
        return pytree.tree_unflatten(widened, spec)  # type: ignore[no-any-return]

    def rest(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """A digest of the inputs without a batch: all replicas pass the same."""
        digest = hashlib.sha256()
        for x, dim in zip(pytree.tree_leaves((tuple(args), dict(kwargs))), self.dims, strict=True):
            if dim is None and isinstance(x, Tensor) and not x.is_meta:
                flat = x.detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def found(self, program: Program, number: int) -> Joined | Uncut:
        """The batch of the joined program, where its equations see it in the same dims."""
        d, total = described(program), sum(self.rows)
        leaf, dim = next((i, n) for i, n in enumerate(self.dims) if n is not None)
        dims = _inputs(program, d)[leaf]
        free = [f for f in atoms(dims[dim]) if f.size == total] if dims is not None else []
        if not free:
            return Uncut(f"dim {dim} of input {leaf} is not one factor of the joined batch")
        joined = Joined(free[0].name, self.rows, number)
        batch = find(program, d, len(self.rows), factor=joined.factor, rows=joined.sizes)
        if isinstance(batch, Uncut):
            return batch
        seen = _along(program, d, batch.split)
        if seen != self.dims:
            return Uncut(f"the joined batch is in dims {seen} of the inputs, not in {self.dims}")
        return joined


def _rows_of_dim_0(every: Sequence[Shapes]) -> Along:
    """Of every tensor with as many rows as the first one, on each replica."""
    first = [next((s[0] for s in shapes if s), None) for shapes in every]
    return [
        0 if all(s[leaf] and s[leaf][0] == n for s, n in zip(every, first, strict=True)) else None  # type: ignore[index]
        for leaf in range(len(every[0]))
    ]


def _without(shape: Sequence[int] | None, dim: int | None) -> Sequence[int] | None:
    return shape if shape is None or dim is None else [*shape[:dim], *shape[dim + 1 :]]


def _again(x: Tensor, dim: int, total: int) -> Tensor:
    index = torch.arange(total, device=x.device) % x.shape[dim]
    return x.detach().index_select(dim, index).requires_grad_(x.requires_grad)
