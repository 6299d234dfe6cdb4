"""Prices of the sharding program, in seconds: work by roofline, conversions by their collectives.

node        flops x share / peak or bytes / bandwidth, whichever is more; a factor of 3 where gradients flow
            (the backward of a matrix product is two of them, one where a weight or an input does not learn)
weight      a weight that stays whole costs memory on every rank: a penalty per byte, so that what
            can be split is split unless splitting costs more than it is worth
conversion  the forward move's collective and, where gradients flow, the backward move's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import fx

from plait.cluster.device import busy
from plait.passes.chains import reads, writes
from plait.passes.norms import Norm
from plait.plan.problem import Choice, Key, Problem
from plait.rules.describe import Operand
from plait.rules.equation import Dims, Factor, atoms
from plait.rules.layout import Strategy
from plait.rules.moves import COLLECTIVES

Collective = Callable[[str, float], float]  # (kind, bytes) -> seconds

# A small whole weight costs as much as reading it this many times, so that a router of a few rows
# stays whole where its reduction would cost more than its bytes.
WHOLE_WEIGHT_READS = 100.0
# A matrix of at least this part of the largest weight is split if it can be: leaving it whole costs
# this many times the dearest reduction of the program.
LARGE_WEIGHT = 0.01
LARGE_WEIGHT_REDUCTIONS = 10.0
# A move reads and writes its value once beside its collective, and takes a launch or more: ties,
# and gains that no clock would see, go to the plan with fewer moves. Rows of an inner dim are
# gathered into a buffer and out of it again, in short runs.
MOVE_LAUNCHES = 4.0
COPIES, STRIDED_COPIES = 2.0, 8.0
# Of a move by rows, the part that a matmul is too short to hide: kernels take it over (plan/direct.py).
OPEN = 0.5


@dataclass(frozen=True)
class Rates:
    """Of one device: flop/s, bytes/s of its memory, seconds from one short kernel to the next."""

    flops: float
    bandwidth: float
    launch: float = 1e-6  # seconds
    in_turn: bool = False  # it moves bytes and computes in turn: a core does both

    def busy(self, flops: float, nbytes: float) -> float:
        """Seconds of a kernel."""
        return busy(flops / self.flops, nbytes / self.bandwidth, self.in_turn)


@dataclass(frozen=True)
class CostPrices:
    """`collective(kind, bytes)`: seconds for all n ranks together on the axis."""

    rates: Rates
    collective: Collective
    n: int
    largest_weight: float = 0.0  # bytes
    largest_value: float = 0.0  # bytes
    beside: float = 1.0  # of a move by rows: what is left of it beside a matmul
    matmuls: Mapping[fx.Node, float] = field(default_factory=dict)  # seconds, on the rows of one rank
    norms: Mapping[fx.Node, Norm] = field(default_factory=dict)  # what runs as one kernel
    chained: frozenset[fx.Node] = frozenset()  # element-wise operators that run together
    columns: Mapping[fx.Node, Factor] = field(default_factory=dict)  # the last dim of what they norm

    @classmethod
    def of(
        cls,
        problem: Problem,
        rates: Rates,
        collective: Collective,
        norms: Mapping[fx.Node, Norm] | None = None,
    ) -> CostPrices:
        weights, values = [0.0], [0.0]
        for choice in problem.choices.values():
            sizes = [bytes_of(d, t) for d, t in zip(choice.results, choice.dtypes, strict=True)]
            (weights if choice.weight else values).extend(sizes)
        columns = {
            norm.x: problem.choices[norm.x].results[0][-1]
            for norm in (norms or {}).values()
            if norm.x in problem.choices
        }
        return cls(rates, collective, problem.n, max(weights), max(values), norms=norms or {}, columns=columns)

    def hiding(self, problem: Problem, beside: float) -> CostPrices:
        """The same where moves by rows go beside matmuls; `beside`: what is left of a hidden one."""
        flops = {
            node: sum(2.0 * prod(f.extent for f in letters) for letters in products_of(choice))
            for node, choice in problem.choices.items()
            if choice.access is not None and not choice.weight
        }
        matmuls = {n: f / self.rates.flops / self.n**2 for n, f in flops.items() if f}
        return replace(self, beside=beside, matmuls=matmuls)

    def node(self, choice: Choice, index: int) -> float:
        strategy = choice.strategies[index]
        if choice.weight:
            return self._weight(choice, strategy)
        if choice.free or choice.access is None:
            return 0.0
        return passes_of(choice) * self._work(choice, strategy) + self._statistics(choice, strategy)

    def _weight(self, choice: Choice, strategy: Strategy) -> float:
        nbytes = bytes_of(choice.results[0], choice.dtypes[0])
        if strategy.split is None:
            if len(choice.strategies) == 1:
                return 0.0
            reads = WHOLE_WEIGHT_READS * nbytes / self.rates.bandwidth * (1 - 1 / self.n)
            if len(choice.results[0]) < 2 or nbytes < LARGE_WEIGHT * self.largest_weight:
                return reads
            dearest = self.collective("all_reduce", self.largest_value)
            return max(reads, LARGE_WEIGHT_REDUCTIONS * dearest)
        dim = strategy.split.dim(choice.results[0])
        assert dim is not None
        held = max(strategy.split.sizes(choice.results[0][dim]))
        share = held / choice.results[0][dim].size
        price = nbytes / self.rates.bandwidth * (share - 1 / self.n)
        if choice.grad and not strategy.split.disjoint(choice.results[0][dim]):
            price += self.collective("all_reduce", nbytes)
        return price

    def _work(self, choice: Choice, strategy: Strategy) -> float:
        access = choice.access
        assert access is not None
        if self.fused(choice, strategy):
            return 0.0  # in registers
        flops = sum(flops_of(letters, strategy) for letters in products_of(choice))
        node = choice.node
        read = [o for o in access.operands if reads(node, o.node, self.chained)]
        nbytes = sum(bytes_of(o.dims, dtype_of(o)) * share_of(o.dims, strategy) for o in read)
        if writes(node, self.chained):
            for dims, dtype in zip(choice.results, choice.dtypes, strict=True):
                nbytes += bytes_of(dims, dtype) * share_of(dims, strategy)
        return self.rates.busy(flops, nbytes)

    def fused(self, choice: Choice, strategy: Strategy) -> bool:
        """Whether it is the inside of a norm that runs as one kernel: whose statistic is not split."""
        norm = self.norms.get(choice.node)
        column = self.columns.get(norm.x) if norm is not None else None
        if norm is None or column is None or choice.node is norm.last:
            return False
        return strategy.split is None or not strategy.split.touches(column)

    def _statistics(self, choice: Choice, strategy: Strategy) -> float:
        """The small reductions of a statistic over a split letter: two forward, two backward."""
        if not strategy.statistics:
            return 0.0
        f = strategy.statistics[0]
        access = choice.access
        assert access is not None
        nbytes = 4.0 * prod(x.extent for x in access.operands[0].dims) / f.extent
        return (4 if choice.grad else 2) * self.collective("all_reduce", nbytes)

    def conversion(self, choice: Choice, a: Key, b: Key) -> float | None:
        """Seconds to bring the value at `choice.index` from layout `a` to layout `b`."""
        if choice.access is not None and len(choice.results) > 1:
            return None  # a tuple is converted after it is taken apart
        if choice.weight and a != "whole" and not choice.forbidden:
            return None  # a weight is stored as it is used, by the first of the programs
        kinds = COLLECTIVES.get((_kind(a), _kind(b)))
        if kinds is None:
            return None
        nbytes = bytes_of(choice.results[choice.index], choice.dtypes[choice.index])
        forward, backward = kinds
        dims = choice.results[choice.index]
        inner = _inner(a, dims) or _inner(b, dims)
        if self.beside < 1 and not inner and (matmuls := _matmuls(choice, forward)):
            seconds = self.collective(str(forward), nbytes)
            hidden = sum(self.matmuls.get(m, 0.0) for m in matmuls)
            price = self.beside * seconds + OPEN * max(0.0, seconds - hidden)
            return 2 * price if choice.grad else price  # its way back is the other move by rows
        copies = STRIDED_COPIES if inner else COPIES
        local = MOVE_LAUNCHES * self.rates.launch + copies * nbytes / self.rates.bandwidth
        price = 0.0 if (_kind(a), _kind(b)) == ("whole", "copied") else local
        if forward:
            price += self.collective(forward, nbytes)
        if choice.grad:
            price += local + (self.collective(backward, nbytes) if backward else 0.0)
        return price


def _matmuls(choice: Choice, collective: str | None) -> list[fx.Node]:
    """Those that make the terms of a sum, or read what is gathered."""
    if collective == "reduce_scatter":
        return [choice.node] if choice.access is not None and products_of(choice) else []
    readers = choice.node.users if collective == "all_gather" else ()
    return [user for user in readers if "linear" in str(user.target) or "mm" in str(user.target)]


def _inner(key: Key, dims: Dims) -> bool:
    """Whether a layout cuts a dim that is not the outermost (dims of size 1 do not count)."""
    if not key.startswith("shard("):
        return False
    first = int(key[len("shard(") :].split("/")[0].rstrip(")").split(",")[0])
    leading = next((f for f in dims if f.size > 1), None)
    order = list(dict.fromkeys(atom for f in dims for atom in atoms(f)))
    return leading is not None and order[first] not in set(atoms(leading))


def _kind(key: Key) -> str:
    return key if key.startswith("partial") else key.split("(")[0]


def bytes_of(dims: Dims, dtype: torch.dtype) -> float:
    return float(prod(f.extent for f in dims)) * dtype.itemsize


def dtype_of(operand: Operand) -> torch.dtype:
    value = operand.node.meta["val"]
    return value.dtype if isinstance(value, torch.Tensor) else torch.float32


def _cuts(strategy: Strategy, f: object) -> bool:
    return strategy.split is not None and strategy.split.touches(f)  # type: ignore[arg-type]


def _held(strategy: Strategy, f: object) -> int:
    assert strategy.split is not None
    return max(strategy.split.sizes(f))  # type: ignore[arg-type]


def share_of(dims: Dims, strategy: Strategy) -> float:
    """The part of a value that the busiest rank holds."""
    if strategy.split is None:
        return 1.0
    dim = strategy.split.dim(dims)
    return 1.0 if dim is None else _held(strategy, dims[dim]) / dims[dim].size


def products_of(choice: Choice) -> list[Dims]:
    """The letters of every matrix product that an operator is: all of a linear's."""
    access = choice.access
    assert access is not None
    if access.products:
        return list(access.products)
    if len(access.operands) < 2 or all(x.property != "sum" for x in access.letters):
        return []
    return [tuple({x.factor.root(): x.factor for x in access.letters}.values())]


def passes_of(choice: Choice) -> float:
    """An operator forward and backward, in forwards: the backward of a product is one for each operand that learns, two
    at most; of another it is two, for it reads a gradient and writes one."""
    if not choice.grad or not any(choice.learns):
        return 1.0
    return 1.0 + (min(2, sum(learns for _, learns in _factors(choice))) if products_of(choice) else 2)


def kept_by(choice: Choice) -> set[fx.Node]:
    """The operands whose values its backward reads: in a product those beside one that learns."""
    assert choice.access is not None
    if not products_of(choice):
        return {o.node for o in choice.access.operands} if any(choice.learns) else set()
    factors = _factors(choice)
    return {x for i, (x, _) in enumerate(factors) if any(y for j, (_, y) in enumerate(factors) if j != i)}


def _factors(choice: Choice) -> list[tuple[fx.Node, bool]]:
    """What a product multiplies, and whether it learns; not what is added to it."""
    assert choice.access is not None
    return [(o.node, learns) for o, learns in zip(choice.access.operands, choice.learns, strict=True) if not o.added]


def flops_of(letters: Dims, strategy: Strategy) -> float:
    """Multiplications and additions of one product on the busiest rank."""
    cut = [f for f in letters if _cuts(strategy, f)]
    share = max(_held(strategy, f) / f.size for f in cut) if cut else 1.0
    return 2.0 * share * float(prod(f.extent for f in letters))
