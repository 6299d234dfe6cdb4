"""The sharding program: one strategy for every operator, at the least predicted time.

An integer program with *edge marginals*. Per node a binary for each strategy; per edge a matrix
z[a, b] >= 0 whose row sums are the producer's choices of layout a and whose column sums are the
consumer's needs of layout b; per value a conversion e[a, b] >= z[a, b], paid once however many
consumers share it. This form is nearly always integral as a linear program.

Nodes that look alike share their variables (`classes.py`): any tying is feasible, since every real
edge stands in some edge class, so it can cost optimality but never correctness.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import fx

from plait.errors import PlanError
from plait.plan.classes import leaders
from plait.plan.problem import Choice, Key, Problem
from plait.rules.layout import Strategy


class Prices(Protocol):
    """What the program asks of the cost model, in seconds."""

    def node(self, choice: Choice, index: int) -> float: ...
    def conversion(self, choice: Choice, a: Key, b: Key) -> float | None: ...


@dataclass(frozen=True)
class Solution:
    strategies: dict[fx.Node, Strategy]
    seconds: float
    variables: int
    classes: int


def solve(
    problem: Problem, prices: Prices, tied: Mapping[fx.Node, int] | None = None, *, time_limit: float = 60
) -> Solution:
    """The cheapest strategies of all nodes; `tied`: the classes that share them (classes.py), without it every node
    chooses for itself."""
    builder = _Builder(problem, prices, _singletons(problem) if tied is None else tied)
    return builder.solve(time_limit)


def _singletons(problem: Problem) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(problem.choices)}


class _Builder:
    """Collects columns (costs, integrality) and rows (equalities, inequalities)."""

    def __init__(self, problem: Problem, prices: Prices, cls: Mapping[fx.Node, int]):
        self.problem, self.prices, self.cls = problem, prices, cls
        self.cost: list[float] = []
        self.integral: list[int] = []
        self.upper: list[float] = []
        self.rows: list[tuple[list[int], list[float], float, float]] = []
        self.members = Counter(cls.values())
        self.leader = leaders(cls)
        self.x = {c: self._choices(c, node) for c, node in self.leader.items()}
        self.conversions: dict[tuple[int, int, Key, Key], int] = {}
        self._edges()

    def _column(self, cost: float, integral: bool, upper: float = 1.0) -> int:
        self.cost.append(cost)
        self.integral.append(int(integral))
        self.upper.append(upper)
        return len(self.cost) - 1

    def _row(self, columns: Sequence[int], values: Sequence[float], lo: float, hi: float) -> None:
        self.rows.append((list(columns), list(values), lo, hi))

    def _choices(self, c: int, node: fx.Node) -> list[int]:
        choice = self.problem.choices[node]
        count = self.members[c]
        columns = []
        for i in range(len(choice.strategies)):
            allowed = 0.0 if i in choice.forbidden else 1.0
            columns.append(self._column(count * self.prices.node(choice, i), True, allowed))
        self._row(columns, [1.0] * len(columns), 1.0, 1.0)
        return columns

    def _edges(self) -> None:
        """One matrix of marginals per class of edges."""
        seen: dict[tuple[object, ...], None] = {}
        for edge in self.problem.edges:
            p, c = self.cls[edge.producer], self.cls[edge.consumer]
            key = (p, c, edge.result, edge.slot, edge.have, edge.need)
            if key not in seen:
                seen[key] = None
                self._edge(
                    p, c, edge.result, edge.have, edge.need, self.problem.choices[edge.producer]
                )

    def _edge(
        self,
        p: int,
        c: int,
        result: int,
        have: tuple[Key, ...],
        need: tuple[Key, ...],
        value: Choice,
    ) -> None:
        sources, sinks = _by_key(have), _by_key(need)
        z: dict[tuple[Key, Key], int] = {}
        for a in sources:
            for b in sinks:
                price = 0.0 if a == b else self.prices.conversion(value.for_result(result), a, b)
                if price is None:
                    continue
                z[a, b] = self._column(0.0, False)
                if price > 0:
                    e = self._conversion(p, result, a, b, price)
                    self._row([e, z[a, b]], [1.0, -1.0], 0.0, np.inf)
        for a, strategies in sources.items():
            columns = [z[a, b] for b in sinks if (a, b) in z]
            mine = [self.x[p][i] for i in strategies]
            self._row(columns + mine, [1.0] * len(columns) + [-1.0] * len(mine), 0.0, 0.0)
        for b, strategies in sinks.items():
            columns = [z[a, b] for a in sources if (a, b) in z]
            theirs = [self.x[c][i] for i in strategies]
            self._row(columns + theirs, [1.0] * len(columns) + [-1.0] * len(theirs), 0.0, 0.0)

    def _conversion(self, p: int, result: int, a: Key, b: Key, price: float) -> int:
        key = (p, result, a, b)
        if key not in self.conversions:
            self.conversions[key] = self._column(price * self.members[p], False)
        return self.conversions[key]

    def solve(self, time_limit: float) -> Solution:
        # Slow to import, and not every process plans.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix

        scale = 1.0 / max(max(self.cost, default=1.0), 1e-30) * 1e6
        row, column, value, lo, hi = [], [], [], [], []
        for i, (columns, values, low, high) in enumerate(self.rows):
            row += [i] * len(columns)
            column += columns
            value += values
            lo.append(low)
            hi.append(high)
        matrix = coo_matrix((value, (row, column)), shape=(len(self.rows), len(self.cost))).tocsr()
        found = milp(
            np.array(self.cost) * scale,
            constraints=LinearConstraint(matrix, lo, hi),
            integrality=self.integral,
            bounds=Bounds(0, self.upper),
            options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
        )
        if found.x is None:
            raise PlanError(f"no plan was found in {time_limit:.0f} s: {found.message}")
        chosen = {
            node: self.problem.choices[node].strategies[_argmax(found.x, self.x[c])]
            for node, c in self.cls.items()
        }
        return Solution(chosen, float(found.fun) / scale, len(self.cost), len(self.leader))


def _by_key(keys: tuple[Key, ...]) -> dict[Key, list[int]]:
    out: dict[Key, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        out[key].append(i)
    return out


def _argmax(x: np.ndarray, columns: list[int]) -> int:
    return int(np.argmax([x[i] for i in columns]))
