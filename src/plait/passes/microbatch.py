"""Micro-batches: a program cut in time along the factor that the equations say is a batch.

The same algebra that lays a factor along the ranks of an axis lays it along M pieces that run one
after another: values that hold the factor come in rows, a sum over it gives one term of a sum, and
everything else is whole in every piece. Between pieces nothing moves, so a factor serves only if
every operator can take its operands as they come:

    parallel            the rows of this piece
    sum, then linear    this piece's term (a loss: the pieces are added up, a mean is weighted by rows)
    sum, then affine    what is added counts in every piece for its share of the rows (1 - similarity)
    sorted, then back   the rows of this piece, in an order of its own on the way (ordered.py)
    inputs only         computed from the whole input in every piece (the count of valid labels)
    anything else       the batch is not cut; `Uncut` says which operator forbids it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from plait.passes import ordered
from plait.passes.expand import is_random
from plait.passes.partition import Emitter
from plait.passes.symbolic import symbols
from plait.program import Input, Program, module_path
from plait.rules.describe import Access, Description, bind, rebind
from plait.rules.described import described
from plait.rules.equation import Dims, Factor, atoms
from plait.rules.layout import COPIED, PARTIAL, WHOLE, Layout, Strategy, shard, split_strategy
from plait.rules.moves import Cut, take
from plait.rules.split import Split

aten = torch.ops.aten
MOST = 2**10  # pieces: a message between stages has room for as many numbers (runtime/channel.py)
WHOLE_COPY = "__whole"  # ends the name of a second placeholder: the input with all its rows


@dataclass(frozen=True)
class Uncut:
    """Why the batch runs in one piece."""

    reason: str


@dataclass(frozen=True)
class Batch:
    """How the batch is cut: `split.bounds` are the rows of every piece."""

    split: Split
    layouts: dict[fx.Node, Layout]
    strategies: dict[fx.Node, Strategy]

    @property
    def pieces(self) -> int:
        return self.split.ranks

    def rows(self, k: int) -> int:
        return self.split.bounds[k + 1] - self.split.bounds[k]

    @property
    def limit(self) -> str:
        """Why there can be no more pieces, where these are as many as there can be."""
        return f"no more than {MOST} are run" if self.pieces == MOST else "there are as many rows"


@dataclass(frozen=True)
class Joined:
    """Replicas whose batches are one batch of a program: the `rows` of each, along `factor`."""

    factor: str
    rows: tuple[int, ...]
    number: int = 0  # this replica
    pieces: int = 1  # micro-batches of each

    @property
    def all(self) -> list[range]:
        """The pieces of every replica."""
        m = self.pieces
        return [range(r * m, (r + 1) * m) for r in range(len(self.rows))]

    @property
    def own(self) -> range:
        return self.all[self.number]

    @property
    def sizes(self) -> list[int]:
        """The rows of every piece."""
        m = self.pieces
        return [n // m + (k < n % m) for n in self.rows for k in range(m)]


def find(
    program: Program, d: Description, count: int, *, factor: str = "", rows: Sequence[int] = ()
) -> Batch | Uncut:
    """The outermost factor of the inputs that can be cut into (at most) `count` pieces, or MOST.

    `factor`: that one, by name. `rows`: of every piece.
    """
    reasons = []
    for f in _candidates(program, d):
        if factor not in ("", f.name):
            continue
        if f in d.symbolic:
            reasons.append(Uncut(f"{_place(program, d, f)} is dynamic, and such a size is not cut"))
            continue
        split = Split.even((f,), min(count, f.size, MOST))
        if rows:
            split = Split((f,), tuple(accumulate(rows, initial=0)))
        found = _cut(program, d, split)
        if isinstance(found, Batch):
            return found
        reasons.append(found)
    return reasons[0] if reasons else Uncut("no input has a dim with more than one row to cut")


def why_uncut(program: Program) -> str:
    """The reason why no factor of the inputs can be cut; "" where one can."""
    found = find(program, described(program), 2)
    return found.reason if isinstance(found, Uncut) else ""


def _candidates(program: Program, d: Description) -> Iterator[Factor]:
    """Factors of the inputs, outermost dims first, that no weight has."""
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    owned = {f for w in program.weights for dim in d.dims[nodes[w.node]][0] for f in atoms(dim)}
    seen: dict[Factor, None] = {}
    dims = list(_inputs(program, d).values())
    for depth in range(max(map(len, dims), default=0)):
        for each in dims:
            if depth < len(each):
                seen.update(dict.fromkeys(f for f in atoms(each[depth]) if f not in owned))
    return iter(seen)


def _inputs(program: Program, d: Description) -> dict[str, Dims]:
    """The dims of every tensor among the inputs, by its path in the call."""
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return {i.path: d.dims[nodes[i.node]][0] for i in program.inputs if i.node is not None}


def _place(program: Program, d: Description, f: Factor) -> str:
    """Where a factor stands among the inputs."""
    every = ((path, at, dim) for path, dims in _inputs(program, d).items() for at, dim in enumerate(dims))
    return next(f"dim {at} of {path}" for path, at, dim in every if f in atoms(dim))


def _cut(program: Program, d: Description, split: Split) -> Batch | Uncut:
    """Every node's layout in time, walking the graph once."""
    weights = {w.node for w in program.weights}
    mutated = {m.index: program.weight(m.weight).name for m in program.mutations}
    batch = Batch(split, {}, {})
    ahead: set[fx.Node] = set()  # computable from the whole inputs alone
    work: set[fx.Node] = set()  # what makes something of inputs and weights
    for node in program.graph.nodes:
        if node.op == "placeholder" and node in d.dims:
            ahead |= {node} if node.name not in weights else set()
            layout = _held(d.dims[node][0], split)
            if layout is None:
                return Uncut(f"{node.name} has the batch in two of its dims")
            if _shared(d.dims[node][:1], split):
                return Uncut(f"{node.name} has rows beside those of the batch in one dim")
            batch.layouts[node] = layout
            batch.strategies[node] = Strategy("input", (), (layout,))
        elif node.op == "call_function" and node in d.accesses:
            problem = _lay(node, d.accesses[node], batch, ahead, program)
            if problem is not None:
                return Uncut(problem)
            if node not in ahead and any(s in ahead or s in work for s in node.all_input_nodes):
                work.add(node)
        elif node.op == "output":
            for i, item in enumerate(node.args[0]):  # type: ignore[arg-type]
                layout = batch.layouts.get(item, WHOLE) if isinstance(item, fx.Node) else WHOLE
                if ordered.is_ordered(layout):
                    return Uncut(f"output {i} is in the order of the whole batch")
                if i in mutated and layout.kind != "whole":
                    return Uncut(f"buffer {mutated[i]} is changed by the whole batch")
    again = [n for n in work if batch.layouts[n].kind in ("whole", "copied")]
    if 2 * len(again) > len(work):
        return Uncut(f"{len(again)} of {len(work)} operators would run whole in every piece")
    return batch


def _held(dims: Dims, split: Split) -> Layout | None:
    if not split.splittable(dims):
        return None
    return shard(split) if split.dim(dims) is not None else WHOLE


def _lay(node: fx.Node, access: Access, batch: Batch, ahead: set[fx.Node], program: Program) -> str | None:
    """Choose the node's strategy; the reason if there is none."""
    split = batch.split
    sources = [o.node for o in access.operands]
    from_inputs = all(s in ahead or s.op == "get_attr" for s in sources) and not is_random(node)
    if from_inputs:
        ahead.add(node)
    have = [batch.layouts.get(s, WHOLE) for s in sources]
    own_order = any(map(ordered.is_ordered, have))
    strategy = None if own_order else _strategy(node, access, split, have)
    terms = strategy is not None and PARTIAL in strategy.results
    if (strategy is None or terms) and from_inputs and access.operands:
        whole = (WHOLE,) * len(access.operands)
        strategy = Strategy("ahead", whole, (WHOLE,) * len(access.results))
    if strategy is None:
        rows = ordered.Ordered(split, batch.layouts, batch.strategies, program.constants, _strategy)
        strategy = rows.lay(node, access, have)
    if strategy is None:
        return f"{_where(node)} {_why(access, split, have)}"
    held = [dims for dims, r in zip(access.results, strategy.results, strict=True) if r.split]
    if _shared(held, split):
        return f"{_where(node)} has rows that belong to no micro-batch beside those that do"
    batch.strategies[node] = strategy
    batch.layouts[node] = strategy.results[0] if strategy.results else WHOLE
    return None


def _shared(values: Iterable[Dims], split: Split) -> bool:
    """Whether every piece would have some rows: their gradient is one, and would come from each."""
    return any(not split.disjoint(f) for dims in values for f in dims if split.touches(f))


def _strategy(node: fx.Node, access: Access, split: Split, have: Sequence[Layout]) -> Strategy | None:
    partial = [i for i, layout in enumerate(have) if layout == PARTIAL]
    if partial:
        return _linear(node, access, partial, have, split)
    if not any(split.touches(x.factor) for x in access.letters):
        if any(layout.kind == "shard" for layout in have):
            return None
        return Strategy("whole", (WHOLE,) * len(have), (WHOLE,) * len(access.results))
    found = split_strategy(access, split, True)
    if found is None or found.statistics:
        return None
    if any(r.kind == "partial" and r != PARTIAL for r in found.results):
        return None
    needs = zip(access.operands, have, found.operands, strict=True)
    fits = all(
        o.node.op == "get_attr" or h == need or {h.kind, need.kind} <= {"whole", "copied"}
        for o, h, need in needs
        if need != PARTIAL
    )
    return found if fits and not _adds_bias(access, found) else None


def _linear(
    node: fx.Node, access: Access, partial: list[int], have: Sequence[Layout], split: Split
) -> Strategy | None:
    """Terms of a sum go through what is linear in them, and through what adds something to them."""
    others = [i for i in range(len(have)) if i not in partial]
    if any(have[i].kind == "shard" for i in others) or _touched(access, split):
        return None
    if any(o.added for o in access.operands):
        return None
    results = (PARTIAL,) * len(access.results)
    for group in access.carries:
        if set(partial) == set(group):
            return Strategy("carry", tuple(PARTIAL if i in partial else COPIED for i in range(len(have))), results)
    adds = any(set(partial) < set(group) for group in access.carries)
    if adds or (not others and _adds_number(node)):
        return Strategy(AFFINE, tuple(PARTIAL if i in partial else WHOLE for i in range(len(have))), results)
    return None


def _adds_number(node: fx.Node) -> bool:
    number = bind(node).get("other") if node.target in ADDS else None
    return isinstance(number, (int, float)) and bool(node.meta["val"].is_floating_point())


AFFINE = "affine"
ADDS = (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar)


def _touched(access: Access, split: Split) -> bool:
    values = [o.dims for o in access.operands] + list(access.results)
    return any(split.touches(f) for dims in values for f in dims)


def _adds_bias(access: Access, found: Strategy) -> bool:
    """A whole bias would be added once a piece to a sum over pieces."""
    return any(o.added for o in access.operands) and any(r == PARTIAL for r in found.results)


def _where(node: fx.Node) -> str:
    """The operator and the module it is in."""
    name, module = str(node.target).removeprefix("aten.").split(".")[0], module_path(node)
    return f"{name} in {module}" if module else name


def _why(access: Access, split: Split, have: Sequence[Layout]) -> str:
    if any(layout == PARTIAL for layout in have):
        return "is not linear in a sum over the batch"
    reasons = [x.reason for x in access.letters if x.reason and split.touches(x.factor)]
    return f"needs the whole batch ({reasons[0]})" if reasons else "needs the whole batch"


# -- the program of one piece ---------------------------------------------------------------------


def piece(
    program: Program, d: Description, batch: Batch, k: int, like: Program | None = None
) -> Program:
    """The program of piece `k`: same nodes in the same order for every piece, smaller sizes.

    Its inputs are the rows of the piece; an input that is also needed whole comes once more, as
    `name__whole`. `like`: a piece of as many rows, whose values have these sizes too.
    """
    emitter = _Piece(program, d, batch.strategies, program.differentiable(), k, batch=batch.split)
    local = emitter.run()
    assert not local.sites and not local.seeded, "a piece needs nothing from the others"
    wholes = emitter.whole_copies()
    names = {n.name: x.name for n, (x, _) in emitter._own.items() if n.op == "placeholder"}
    assert all(names[w.node] == w.node for w in program.weights)
    inputs = [replace(i, node=names[i.node]) if i.node else i for i in program.inputs]
    for node in wholes:
        entry = next(i for i in program.inputs if i.node == node.name)
        inputs.append(Input(entry.path + WHOLE_COPY, emitter._wholes[node].name))
    out = replace(
        program, graph=local.graph, inputs=tuple(inputs), constants=local.constants,
    )  # fmt: skip
    if like is None:
        _propagate(program, out, d, batch.split, k)
    else:
        for node, other in zip(out.graph.nodes, like.graph.nodes, strict=True):
            node.meta.update({"val": other.meta["val"]} if "val" in other.meta else {})
    return out


@dataclass
class _Piece(Emitter):
    """Partition in time: the pieces never talk to each other."""

    batch: Split = field(kw_only=True)
    _wholes: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def whole_copies(self) -> list[fx.Node]:
        """The inputs that are needed whole too; the placeholders of the others go."""
        for node in [n for n, x in self._wholes.items() if not x.users]:
            self.graph.erase_node(self._wholes.pop(node))
        return [n for n in self._wholes if n.op == "placeholder"]

    def run(self) -> Any:
        self._draws = False
        return super().run()

    def _input(self, node: fx.Node) -> None:
        self._set(node, self.graph.placeholder(node.name), self.strategies[node].results[0])

    def _place_seed(self) -> None:
        """After the last input: the whole copies (the seed comes when ranks are told apart)."""
        self._draws = False
        if self._wholes:
            return
        for node in [n for n in self._own if n.op == "placeholder"]:
            if self._own[node][1].kind == "shard":
                self._wholes[node] = self.graph.placeholder(node.name + WHOLE_COPY)

    def _call(self, node: fx.Node) -> None:
        before = self.graph._root.prev
        if is_random(node):  # drawn by passes/expand.py, later
            access = self.description.accesses[node]
            xs = [self.value(o.node, WHOLE, o.dims) for o in access.operands]
            self._set(node, self.copy(node, xs), self.strategies[node].results[0])
        elif node in self.strategies and self.strategies[node].label == AFFINE:
            self._set(node, self._affine(node), PARTIAL)
        elif node in self.strategies and self.strategies[node].label == ordered.LABEL:
            self._ordered(node)
        else:
            super()._call(node)
        while before.next.op != "root":
            before = before.next
            before.meta.update({key: node.meta[key] for key in self._kept(node) if key in node.meta})

    def _kept(self, node: fx.Node) -> tuple[str, ...]:
        """Of what is known of a node; what its mask shows, too, unless the piece has some of its rows."""
        access = self.description.accesses.get(node)
        rows = [f for o in access.operands[:2] for f in o.dims[-2:-1]] if access is not None else []
        return _KEPT if any(map(self.batch.touches, rows)) else (*_KEPT, "mask")

    def _ordered(self, node: fx.Node) -> None:
        """As it is; a constant beside an order counts the rows of the piece."""
        access, results = self.description.accesses[node], self.strategies[node].results
        xs = [self.value(o.node, WHOLE, o.dims) for o in access.operands]
        if node.target is aten.index_put.default and access.operands[-1].node.op == "get_attr":
            rows = self.batch.size(access.operands[0].dims[0], self.rank)
            xs[-1] = self.constant(torch.arange(rows), "rows")
        new = self.copy(node, xs)
        if len(results) == 1:
            self._set(node, new, results[0])
        else:
            self._own[node] = (new, WHOLE)

    def _affine(self, node: fx.Node) -> fx.Node:
        """What is added to a sum over the batch, by this piece's share of the rows."""
        lo, hi = self.batch.bounds[self.rank : self.rank + 2]
        share, access = (hi - lo) / self.batch.bounds[-1], self.description.accesses[node]
        xs = [self.value(o.node, WHOLE, o.dims) for o in access.operands]
        layouts = self.strategies[node].operands
        xs = [x if a == PARTIAL else self.call(aten.mul.Tensor, x, share) for x, a in zip(xs, layouts, strict=True)]
        new = self.copy(node, xs)
        if len(xs) == 1:
            new.args, new.kwargs = rebind(new, other=bind(new)["other"] * share)
        return new

    def value(self, node: fx.Node, need: Layout, dims: Dims) -> fx.Node:
        if node.op == "get_attr":
            split = self._split_of(dims)
            return self._constant_value(node, shard(split) if split else WHOLE, dims)
        if self._in_rows(node) and self._strategy_of_current() == "ahead":
            return self._whole(node)
        return self._own[node][0]

    def _in_rows(self, node: fx.Node) -> bool:
        """Whether a piece has some of its rows only; a tuple's parts are cut alike."""
        strategy = self.strategies.get(node)
        return strategy is not None and any(r.kind == "shard" for r in strategy.results)

    def _strategy_of_current(self) -> str:
        assert self._current is not None
        found = self.strategies.get(self._current)
        return found.label if found is not None else ""

    def _split_of(self, dims: Dims) -> Split | None:
        assert self._current is not None
        found = self.strategies.get(self._current)
        split = found.split if found is not None else None
        return split if split is not None and split.dim(dims) is not None else None

    def _whole(self, node: fx.Node) -> fx.Node:
        """The value computed from whole inputs: again, beside the rows of the piece."""
        if node in self._wholes:
            return self._wholes[node]
        new = self.graph.node_copy(node, lambda n: self._whole_argument(n))
        self._wholes[node] = new
        return new

    def _whole_argument(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return self._constant_value(node, WHOLE, ())
        return self._whole(node) if self._in_rows(node) else self._own[node][0]

    def _output(self, node: fx.Node) -> None:
        (flat,) = node.args
        assert isinstance(flat, (tuple, list))
        self.graph.output(tuple(self._given(x) for x in flat))

    def _given(self, item: Any) -> Any:
        if not isinstance(item, fx.Node):
            return item
        return self._own[item][0] if item in self._own else self.scalar(item)


_KEPT = ("stack_trace", "nn_module_stack")


def _propagate(whole: Program, out: Program, d: Description, split: Split, k: int) -> None:
    """Metadata of the piece's values: the operators run on fake tensors of its sizes."""
    nodes = {n.name: n for n in whole.graph.nodes if n.op == "placeholder"}
    by_path = {i.path: nodes[i.node] for i in whole.inputs if i.node}
    sources = {w.node: (nodes[w.node], False) for w in whole.weights}
    for entry in (i for i in out.inputs if i.node):
        assert entry.node is not None
        cut = not entry.path.endswith(WHOLE_COPY)
        sources[entry.node] = by_path[entry.path.removesuffix(WHOLE_COPY)], cut
    mode = _mode(nodes.values())
    devices = [v.device for n in nodes.values() if isinstance(v := n.meta["val"], Tensor)]
    for node in out.graph.nodes:
        if node.op == "placeholder":
            source, is_cut = sources[node.name]
            value = source.meta["val"]
            node.meta["val"] = _rows(value, d.dims[source][0], split, k) if is_cut else value
        elif node.op == "get_attr":
            value = out.constants[str(node.target)]
            if mode is not None:
                value = mode.from_tensor(value, static_shapes=True)
            # constants have values, and stand as if they were where the model is: on meta, too
            node.meta["val"] = value.to(devices[0]) if devices else value
    propagate(out.graph)


def _rows(value: Tensor, dims: Dims, split: Split, k: int) -> Tensor:
    if split.dim(dims) is None:
        return value
    cut = Cut.of(dims, split)
    with torch.no_grad():
        return value.new_empty(take(value, cut.dim, cut.rows[k]).shape)


def _mode(nodes: Iterable[fx.Node]) -> Any:
    values = [n.meta.get("val") for n in nodes]
    return next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)  # type: ignore[union-attr]


def propagate(graph: fx.Graph) -> None:
    """Fill `meta["val"]` of every call from its arguments' (fake tensors or sizes)."""
    mode = _mode(n for n in graph.nodes if n.op == "placeholder")
    with torch.no_grad(), mode if mode is not None else nullcontext(), symbols():
        for node in graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                target = node.target
                if target is aten.view.default or target is aten._unsafe_view.default:
                    target = aten.reshape.default
                node.meta["val"] = target(*args, **kwargs)
