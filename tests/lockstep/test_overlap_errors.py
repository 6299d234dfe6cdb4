"""How far chunks are from the exact result: kernels of matmuls change with the number of rows, and gradients of weights
are summed over chunks in the weights' dtype, so bits may differ from those of the blocking program.

Both are compared with the module in float64, over the same values: the error of the chunks is at most half as large
again as that of the blocking program, of outputs, of gradients of inputs, of every matrix and of all gradients
together. Of one vector it is left to chance: it has few elements, and some are zero by mathematics (the bias of keys).
"""

from __future__ import annotations

import copy
from math import sqrt
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.plan import planner
from plait.report.explain import BITS, explain
from tests import pretend, zoo
from tests.cases import Setup
from tests.compare import Run, demand, plain
from tests.gloo.prove import free
from tests.lockstep.test_overlap_forced import NARROW as WITHOUT_DOUBLE

BOUND = 1.5
MATRIX = 256  # elements
LEAST = {torch.float32: 1e-9, torch.bfloat16: 1e-5}  # errors below a hundredth of a rounding are none

Parts = dict[str, tuple[float, float]]  # error and norm


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(rows: int, width: int, dtype: torch.dtype) -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(Block(width), Block(width)).to(dtype)
    return Setup(model, (torch.randn(rows, width).to(dtype).requires_grad_(),))


def ran(setup: Setup, n: int, overlap: int | str) -> Run:
    made = planner.make(pretend.trace(setup, True), planner.Options(n, free(n), overlap=overlap))
    assert bool(made.chosen) is (overlap != "off")
    ranks = tuple(made.local(rank) for rank in range(n))
    solution: Any = SimpleNamespace(strategies=made.strategies)
    divided = pretend.Divided(made.program, made.description, solution, made.grads, ranks)
    return pretend.run(divided, setup, True)[0]


def apart(run: Run, exact: Run) -> Parts:
    """By kind, of what has floating point; gradients by their weights' names too."""
    kinds = {
        "outputs": (pytree.tree_leaves(run.out), pytree.tree_leaves(exact.out)),
        "gradients of inputs": (run.inputs, exact.inputs),
        "gradients": (list(run.gradients.values()), list(exact.gradients.values())),
    }
    kinds |= {f"gradient of {n}": ([g], [exact.gradients[n]]) for n, g in run.gradients.items() if _matrix(g)}
    return {kind: _error(got, want) for kind, (got, want) in kinds.items() if any(map(_counts, want))}


def _matrix(x: Tensor | None) -> bool:
    return x is not None and x.dim() > 1 and x.numel() >= MATRIX


def _counts(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _error(got: list[Any], want: list[Any]) -> tuple[float, float]:
    pairs = [(a.double(), b) for a, b in zip(got, want, strict=True) if _counts(b)]
    return _norm([a - b for a, b in pairs]), _norm([b for _, b in pairs])


def _norm(values: list[Tensor]) -> float:
    return sqrt(sum(float(x.square().sum()) for x in values))


def compare(setup: Setup, n: int, count: int, dtype: torch.dtype) -> None:
    wide = Setup(copy.deepcopy(setup.model), setup.args, setup.kwargs).to(torch.float64)
    exact = plain(wide)
    whole, chunks = (apart(ran(setup, n, overlap), exact) for overlap in ("off", count))
    least = LEAST[dtype]
    assert whole["outputs"][0] > least * whole["outputs"][1], "there is something to be compared"
    demand(
        f"{kind}: {error / norm:.3g} in chunks, {whole[kind][0] / norm:.3g} in one piece"
        for kind, (error, norm) in chunks.items()
        if error > BOUND * max(whole[kind][0], least * norm)
    )


def test_where_bits_may_differ_is_said() -> None:
    program = pretend.trace(blocks(64, 32, torch.float32), True)
    for overlap, said in ((2, True), ("off", False)):
        made = planner.make(program, planner.Options(2, free(2), overlap=overlap))
        assert (BITS in explain(made.plan)) is said


DTYPES = (torch.float32, torch.bfloat16)
GRID = [
    pytest.param(
        rows, width, n, count, dtype, id=f"{rows}x{width}-{n}-{count}-{str(dtype).removeprefix('torch.')}",
        marks=() if count in ((2, 8) if i % 2 else (3, 4)) and n == 2 else pytest.mark.full,
    )
    for i, (rows, width) in enumerate([(64, 32), (97, 48), (512, 64), (1030, 96)])
    for n in (2, 3)
    for count in (2, 3, 4, 8)
    for dtype in DTYPES
]  # fmt: skip


@pytest.mark.parametrize(("rows", "width", "n", "count", "dtype"), GRID)
@pytest.mark.sample(4)
def test_shapes(rows: int, width: int, n: int, count: int, dtype: torch.dtype) -> None:
    compare(blocks(rows, width, dtype), n, count, dtype)


MODELS = [
    pytest.param(
        name, 2 + (i + j) % 3, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}",
        marks=() if (name, dtype) in {("llama", torch.bfloat16), ("gpt2", torch.float32)} else pytest.mark.full,
    )
    for i, name in enumerate(sorted({*zoo.NAMES} - {*WITHOUT_DOUBLE}))
    for j, dtype in enumerate(DTYPES)
]  # fmt: skip


@pytest.mark.parametrize(("name", "count", "dtype"), MODELS)
@pytest.mark.sample(2)
def test_models(name: str, count: int, dtype: torch.dtype) -> None:
    model, args, kwargs = zoo.build(name)
    compare(Setup(model, args, kwargs).to(dtype), 2, count, dtype)
