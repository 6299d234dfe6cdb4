"""Describe: Program -> the factors of every value, and what every operator does with them.

The result of describing one node is an `Access`: its operands and results as dims, and the property
of every letter of its equation. From it `strategies` (plan/strategies.py) reads every legal split.

    property   a split of the letter along an axis gives
    parallel   shards of the result
    sum, max   partial results
    select     partial results (an index that may point to another rank's rows)
    stat       shards, after small reductions written out by passes/expand.py
    prefix     nothing in space; in time chunks in order, each with all rows so far
    whole      nothing: it may not be split here
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from plait.program import Program
from plait.rules.equation import ONE, SYMBOLIC, Algebra, Conflict, Dims, Factor, atoms_and_parts
from plait.rules.split import Split

if TYPE_CHECKING:
    import sympy  # half a second, and only sizes that are symbols need it


@dataclass(frozen=True)
class Letter:
    factor: Factor
    property: str  # parallel | sum | max | select | stat | prefix | whole
    reason: str = ""


@dataclass(frozen=True)
class Operand:
    """`added`: a term of the result (a bias), so one rank adds it where the result is partial."""

    node: fx.Node
    dims: Dims
    added: bool = False


# The arguments of one node on one rank: (node, split, rank) -> (args, kwargs), nodes unchanged.
Localize = Callable[[fx.Node, Split, int], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Access:
    """`carries`: groups of operands that may be partial together and make the result partial.

    `so_far`: (operand, dim) of a prefix: a chunk reads these dims from row 0 to its own last row.
    `products`: the letters of each matrix product that the operator is, where it is not one of its own letters.
    `counts`: factors whose rows a constant among the operands counts, 0, 1, ...: another share counts its own.
    """

    operands: tuple[Operand, ...]
    results: tuple[Dims, ...]
    letters: tuple[Letter, ...]
    carries: tuple[tuple[int, ...], ...] = ()
    local: Localize | None = None
    fused: tuple[Factor, Factor] | None = None  # (g, r): this operator repeats g into (g r)
    reason: str = ""  # why the operator runs whole
    so_far: tuple[tuple[int, int], ...] = ()
    products: tuple[Dims, ...] = ()
    counts: tuple[Factor, ...] = ()

    @property
    def result(self) -> Dims:
        return self.results[0]


Rule = Callable[["Describer", fx.Node], Access]

aten = torch.ops.aten
SIZES = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default)


@dataclass
class Description:
    """Everything describe found: an `Access` per call, dims per value, the free factors by name."""

    accesses: dict[fx.Node, Access]
    dims: dict[fx.Node, tuple[Dims, ...]]
    factors: dict[str, Factor] = field(default_factory=dict)
    fused: tuple[tuple[Factor, ...], ...] = ()
    symbolic: frozenset[Factor] = frozenset()
    conflicts: tuple[str, ...] = ()


class Describer:
    """Walks the graph once, in order; rules call its methods."""

    def __init__(self, table: dict[Any, Rule], constants: Mapping[str, torch.Tensor]):
        self.table = table
        self.constants = constants
        self.algebra = Algebra()
        self.dims: dict[fx.Node, tuple[Dims, ...]] = {}
        self.accesses: dict[fx.Node, Access] = {}
        self.conflicts: list[str] = []
        self._primes: dict[sympy.Symbol, int] = {}
        self._hints: dict[int, int] = {}  # stand-in -> what the size was in the example
        self._constants: dict[fx.Node, Dims] = {}  # of the node being visited

    # -- sizes -----------------------------------------------------------------------------------

    def size(self, s: Any) -> int:
        """A size as an integer; a symbol is a prime too large to divide or equal a real size."""
        if isinstance(s, fx.Node):
            s = s.meta["val"]
        if isinstance(s, int):
            return s
        expr = s.node.expr
        from sympy import nextprime

        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._primes:
                start = max(self._primes.values(), default=SYMBOLIC)
                self._primes[symbol] = int(nextprime(start + 2**20))
                self._hints[self._primes[symbol]] = _example(s, symbol)
        size = value_of(expr, self._primes)
        self._hints.setdefault(size, _example(s, expr))
        return size

    def hint(self, size: int) -> int:
        """What a stand-in was in the example; of a product, by its primes."""
        if size in self._hints:
            return self._hints[size]
        out = 1
        for prime in self._primes.values():
            while size % prime == 0:
                size, out = size // prime, out * self._hints[prime]
        return out * size

    def is_symbolic(self, f: Factor) -> bool:
        return f.size >= SYMBOLIC

    def sizes(self, node: fx.Node, index: int = 0) -> tuple[int, ...]:
        value = node.meta["val"]
        if isinstance(value, (tuple, list)):
            value = value[index]
        return tuple(self.size(s) for s in value.shape)

    # -- factors ---------------------------------------------------------------------------------

    def fresh(self, size: int) -> Factor:
        return ONE if size == 1 else Factor(size)

    def fresh_dims(self, node: fx.Node, index: int = 0) -> Dims:
        return tuple(self.fresh(s) for s in self.sizes(node, index))

    def operand(self, node: fx.Node, added: bool = False) -> Operand:
        """Constants get fresh factors at every use: a table shared by all layers ties nothing."""
        if node.op == "get_attr":
            dims = self._constants.setdefault(node, self.fresh_dims(node))
            return Operand(node, dims, added)
        return Operand(node, self.dims[node][0], added)

    def counts(self, node: fx.Node, size: int) -> bool:
        """Whether a value is the constant 0, 1, ... to `size` along its one dim."""
        if node.op != "get_attr" or size == 1 or self.constants[str(node.target)].numel() != size:
            return False
        value, dims = self.constants[str(node.target)], self.sizes(node)
        return max(dims) == size and torch.equal(value.flatten(), torch.arange(size).to(value))

    def tie(self, node: fx.Node, f: Factor, g: Factor) -> Conflict | None:
        conflict = self.algebra.unify(f, g)
        if conflict is not None:
            self.conflicts.append(f"{node.name}: {conflict}")
        return conflict

    # -- the walk --------------------------------------------------------------------------------

    def visit(self, node: fx.Node) -> None:
        self._constants = {}
        if node.op in ("placeholder", "get_attr"):
            if isinstance(node.meta.get("val"), torch.Tensor):
                self.dims[node] = (self.fresh_dims(node),)
            return
        if node.op != "call_function" or not (_tensors(node) or self._reads_values(node)):
            return
        rule = self.table.get(node.target)
        access = rule(self, node) if rule else self.whole(node, f"no equation for {node.target}")
        self._verify(node, access)
        self.accesses[node] = access
        self.dims[node] = access.results

    def whole(self, node: fx.Node, reason: str, nodes: Iterable[fx.Node] | None = None) -> Access:
        """The operator runs whole on every rank."""
        operands = tuple(self.operand(n) for n in (nodes or node.all_input_nodes) if self.dims.get(n))
        results = tuple(self.fresh_dims(node, i) for i in range(_tensors(node)))
        letters = [Letter(f, "whole", reason) for o in operands for f in o.dims]
        letters += [Letter(f, "whole", reason) for dims in results for f in dims]
        return Access(operands, results, tuple(letters), reason=reason)

    def _reads_values(self, node: fx.Node) -> bool:
        """A number made of what a tensor holds (`x.item()`), not of its sizes: it is that of the whole tensor."""
        return node.target not in SIZES and any(map(self.dims.get, node.all_input_nodes))

    def _verify(self, node: fx.Node, access: Access) -> None:
        for i, dims in enumerate(access.results):
            assert tuple(f.size for f in dims) == self.sizes(node, i), (node.format_node(), dims)


def _tensors(node: fx.Node) -> int:
    """How many tensors a node returns; 0 for sizes and scalars."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return 1
    if isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value):
        return len(value)
    return 0


def describe(program: Program, table: dict[Any, Rule]) -> Description:
    """Factors of every value of `program`; an operator without a rule in `table` is whole."""
    describer = Describer(table, program.constants)
    for node in program.graph.nodes:
        describer.visit(node)
    return _finish(describer)


def _finish(d: Describer) -> Description:
    """Name the free factors in order of appearance; collect the runs that may be split fused."""
    d.algebra.settle()
    names: dict[str, Factor] = {}
    for results in d.dims.values():
        for dims in results:
            for f in dims:
                _name(f, names)
    runs: dict[tuple[Factor, ...], None] = {}
    for access in d.accesses.values():
        if access.fused is not None:
            g, r = access.fused
            if g.root().kind == r.root().kind == "free":
                runs[(g.root(), r.root())] = None
    symbolic = frozenset(f for f in names.values() if d.is_symbolic(f))
    for f in symbolic:
        f.hint = d.hint(f.size)
    return Description(d.accesses, d.dims, names, tuple(runs), symbolic, tuple(d.conflicts))


def _name(f: Factor, names: dict[str, Factor]) -> None:
    for part in atoms_and_parts(f):
        if part.kind == "free" and part.size > 1 and not part.name:
            part.name = f"f{len(names)}"
            names[part.name] = part


def _example(s: Any, expr: sympy.Expr) -> int:
    """The value of an expression over sizes in the example call."""
    env = s.node.shape_env
    values = getattr(env, "backed_var_to_val", None) or env.var_to_val  # torch 2.13, 2.11
    return value_of(expr, values)


def value_of(expr: sympy.Expr, values: Mapping[Any, Any]) -> int:
    """An expression over sizes, where each has its value."""
    from sympy import Integer

    return int(expr.xreplace({k: Integer(int(v)) for k, v in values.items()}))


def bind(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by the names of its schema, defaults filled in."""
    bound: dict[str, Any] = {}
    for i, (name, default) in enumerate(_arguments(node.target)):
        if i < len(node.args):
            bound[name] = node.args[i]
        elif name in node.kwargs:
            bound[name] = node.kwargs[name]
        elif default is not _NONE:
            bound[name] = default
    return bound


@cache
def _arguments(target: Any) -> tuple[tuple[str, Any], ...]:
    """Names and defaults; the schema makes new objects whenever it is asked."""
    arguments = target._schema.arguments
    return tuple((a.name, a.default_value if a.has_default_value() else _NONE) for a in arguments)


_NONE = object()


def rebind(node: fx.Node, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the node with some arguments changed, by the names of its schema."""
    args, kwargs = list(node.args), dict(node.kwargs)
    names = [name for name, _ in _arguments(node.target)]
    for name, value in changes.items():
        i = names.index(name)
        if i < len(args):
            args[i] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


def resize(sizes: Sequence[Any], dims: Dims, split: Split, rank: int) -> list[Any]:
    """A size argument for one rank: the local size where the split cuts, else as it was."""
    return [
        split.size(f, rank) if split.touches(f) else s for s, f in zip(sizes, dims, strict=True)
    ]


__all__ = [
    "Access",
    "Description",
    "Letter",
    "Operand",
    "Rule",
    "bind",
    "describe",
    "rebind",
    "resize",
]
