"""A case cut into n pretend ranks in this process, by a plan of our choice, and run in lockstep.

The plan comes from the planner with prices that a machine would not have: `Free` (moves cost
nothing, so everything that can be split is), or `Dice(seed)` (every strategy and every move has a
random price, so that over the seeds every legal layout meets every other).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from plait.capture import capture
from plait.passes.partition import Local, partition
from plait.passes.pretend import run_pretend, scatter
from plait.plan.prices import CostPrices, Rates
from plait.plan.problem import Choice, Key, build
from plait.plan.sharding import Prices, Solution, solve
from plait.program import Program
from plait.rules.aten import table
from plait.rules.describe import Description, describe
from plait.rules.layout import Layout
from plait.rules.moves import put
from tests.cases import Setup
from tests.compare import Run


class Free(CostPrices):
    """Moves cost nothing, not even their launches and copies; work and whole weights cost what they do."""

    def __init__(self, n: int) -> None:
        super().__init__(Rates(1e9, 1e9), lambda kind, nbytes: 0.0, n)

    def conversion(self, choice: Choice, a: Key, b: Key) -> float | None:
        return None if super().conversion(choice, a, b) is None else 0.0


class Dice:
    """Every strategy and every legal move has a random price; the same seed, the same prices."""

    def __init__(self, n: int, seed: int) -> None:
        self.legal = Free(n)
        self.dice = random.Random(seed)

    def node(self, choice: Choice, index: int) -> float:
        return self.dice.random()

    def conversion(self, choice: Choice, a: Key, b: Key) -> float | None:
        price = self.legal.conversion(choice, a, b)
        return None if price is None else self.dice.random() * 0.5


@dataclass(frozen=True)
class Divided:
    """A program and what became of it."""

    program: Program
    description: Description
    solution: Solution
    grads: set[fx.Node]
    locals: tuple[Local, ...]

    @property
    def split(self) -> set[str]:
        """The names of the weights that ranks hold in parts."""
        return {s.weight.name for s in self.locals[0].shares if s.cut is not None}

    def plan(self) -> str:
        """A line a node: its strategy and its factors."""
        return "\n".join(
            f"{node.name}: {s.label}  {_row(s.operands)} -> {_row(s.results)}"
            for node, s in self.solution.strategies.items()
        )


def trace(setup: Setup, training: bool) -> Program:
    return capture(setup.model, setup.args, setup.kwargs, training=training)


def divide(program: Program, n: int, prices: Prices) -> Divided:
    """The program of every rank."""
    description = describe(program, table())
    grads = program.differentiable()
    solution = solve(build(program, description, n), prices)
    ranks = tuple(
        partition(program, description, solution.strategies, grads, rank) for rank in range(n)
    )
    return Divided(program, description, solution, grads, ranks)


class _OfEachRank(Sequence[Tensor]):
    """The inputs, as other leaves each time they are read: once a rank."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.inputs, self.given = inputs, list[list[Tensor]]()

    def __iter__(self) -> Iterator[Tensor]:
        fresh = [x.detach().clone().requires_grad_(x.requires_grad) for x in self.inputs]
        self.given.append(fresh)
        return iter(fresh)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: Any) -> Any:
        return self.inputs[i]


def run(divided: Divided, setup: Setup, train: bool, seed: int = 0) -> list[Run]:
    """Forward and backward of all ranks: what each would see, gradients and buffers gathered."""
    program, ranks = divided.program, divided.locals
    args, kwargs = setup.inputs()
    leaves, _ = pytree.tree_flatten((args, kwargs))
    tensors = [x for i, x in zip(program.inputs, leaves, strict=True) if i.node is not None]
    inputs = _OfEachRank(tensors)
    parts = scatter(ranks, values(setup, program))
    with torch.set_grad_enabled(train):
        flat = run_pretend(ranks, parts, inputs, seed)
    outs = [_unflatten(program, out) for out in flat]
    buffers = [_buffers(setup, program, out) for out in flat]
    losses = [setup.loss(out) for out in outs]
    if train:
        torch.stack(losses).sum().backward()
    gradients = _gradients(divided, setup, parts) if train else [{}] * len(ranks)
    return [
        Run(
            pytree.tree_map_only(Tensor, Tensor.detach, outs[r]),
            losses[r].detach(),
            gradients[r],
            [x.grad for x in inputs.given[r] if x.requires_grad] if train else [],
            buffers[r],
        )
        for r in range(len(ranks))
    ]


def values(setup: Setup, program: Program) -> dict[str, Tensor]:
    """Every weight's value in the model, by its first name."""
    model = setup.model
    found: dict[str, Any] = {}
    for w in program.weights:
        owner, _, leaf = w.name.rpartition(".")
        found[w.name] = getattr(model.get_submodule(owner), leaf)
    return found


def _unflatten(program: Program, flat: Sequence[Any]) -> Any:
    leaves = [o.value if o.index is None else flat[o.index] for o in program.outputs]
    return pytree.tree_unflatten(leaves, program.out_spec)


def _buffers(setup: Setup, program: Program, flat: Sequence[Any]) -> dict[str, Tensor]:
    """The buffers after the call: what the program says is new, the rest as it was."""
    moved = {program.weight(m.weight).name: flat[m.index] for m in program.mutations}
    return {name: moved.get(name, buffer).detach() for name, buffer in setup.model.named_buffers()}


def _gradients(
    divided: Divided, setup: Setup, parts: Sequence[dict[str, Tensor]]
) -> list[dict[str, Any]]:
    """By rank: its whole gradients, and those of which it holds a part, put together."""
    names = [name for name, _ in setup.model.named_parameters()]
    out: list[dict[str, Any]] = [dict.fromkeys(names) for _ in parts]
    for share in divided.locals[0].shares:
        if not share.weight.requires_grad:
            continue
        mine = [part[share.weight.name].grad for part in parts]
        cut = share.cut
        if cut is not None and any(g is not None for g in mine):
            whole = torch.zeros(share.weight.shape, dtype=share.weight.dtype)
            for g, rows in zip(mine, cut.rows, strict=True):
                if g is not None:
                    put(whole, g, cut.dim, rows)
            mine = [whole] * len(mine)
        for rank, g in enumerate(mine):
            out[rank][share.weight.name] = g
    return out


def _row(layouts: Sequence[Layout]) -> str:
    return ", ".join(map(str, layouts))
