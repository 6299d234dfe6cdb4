"""Fold: evaluate once, on the CPU, what depends on no parameter, no input and no symbolic size.

Values are kept *spread*: along a dim in which a value does not vary its stride is 0, so a mask
[b, 1, s, s] costs s*s, and element-wise operators compute only what differs. What is stored has
size 1 there; an `expand` restores the size for the users that need it, but for vectors, which are small.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from plait.program import Program

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default

MAX_BYTES = 2**27  # of one constant, and of one value on the way: two masks of 8192 x 8192


def fold(program: Program, values: dict[str, torch.Tensor]) -> Program:
    """`values`: the placeholders that never change, by name."""
    folder = _Folder(program, values)
    for node in list(program.graph.nodes):
        folder.visit(node)
    folded = {n.name for n in folder.known if n.op == "placeholder" and folder.folds(n)}
    names = tuple(name for w in program.weights if w.node in folded for name in w.names)
    folder.store()
    return drop_unused(program.with_(constants=folder.constants, folded=names))


def drop_unused(program: Program) -> Program:
    """Without dead nodes, constants and weights (these go to `unused`)."""
    graph = program.graph
    graph.eliminate_dead_code()
    live, dead = [], []
    weights = {w.node for w in program.weights}
    changed = {m.weight for m in program.mutations}
    for node in list(graph.nodes):
        if node.op == "placeholder":
            if not node.users and node.name in weights - changed:
                dead.append(node.name)
                graph.erase_node(node)
        elif node.op == "get_attr":
            live.append(str(node.target))
    return program.with_(
        weights=tuple(w for w in program.weights if w.node not in dead),
        unused=program.unused + tuple(
            w for w in program.weights if w.node in dead and w.kind != "constant"
        ),
        constants={name: program.constants[name] for name in live},
    )


class _Folder:
    def __init__(self, program: Program, values: dict[str, torch.Tensor]):
        self.graph = program.graph
        self.constants = dict(program.constants)
        self.known: dict[fx.Node, Any] = {}
        self.values = values
        self.loadable = {w.node for w in program.weights if w.kind == "buffer" and w.persistent}
        self._seen: dict[Any, Any] = {}
        self._stored: dict[Any, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder" and node.name in self.values:
            self.known[node] = spread(self.values[node.name].detach().cpu())
        elif node.op == "get_attr":
            self.known[node] = spread(self.constants[str(node.target)])
        elif node.op == "call_function" and self._foldable(node):
            value = self._evaluate(node)
            if value is not None:
                self.known[node] = value

    def _foldable(self, node: fx.Node) -> bool:
        if not isinstance(node.target, torch._ops.OpOverload) and node.target not in PLAIN:
            return False
        tags = getattr(node.target, "tags", ())
        return torch.Tag.nondeterministic_seeded not in tags and all(
            n in self.known for n in node.all_input_nodes
        )

    def _evaluate(self, node: fx.Node) -> Any:
        """Equal calls are evaluated once: every layer of some models makes its own mask."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._operand)
        key = (node.target, _hashable(args), _hashable(kwargs))
        if key not in self._seen:
            # The operands are kept beside the value: their ids are in the key.
            self._seen[key] = (evaluate(node, args, dict(kwargs)), args, kwargs)
        return self._seen[key][0]

    def _operand(self, node: fx.Node) -> Any:
        return self.known[node]

    def folds(self, placeholder: fx.Node) -> bool:
        """Whether its value will stand in a constant, which does not follow it."""
        if placeholder.name in self.loadable:
            return any(u in self.known for u in placeholder.users)
        return bool(placeholder.users)

    # -- what is stored ------------------------------------------------------------------------------

    def store(self) -> None:
        """A get_attr in place of every known value that an unknown one reads."""
        stored: dict[int, fx.Node] = {}
        for node, value in self.known.items():
            users = [u for u in node.users if u not in self.known]
            if not users or node.op == "get_attr" or not isinstance(value, torch.Tensor):
                continue
            if node.op == "placeholder" and node.name in self.loadable:
                continue  # read as it is: load_state_dict() may still change it
            if id(value) not in stored:
                stored[id(value)] = self._constant(node, compact(value))
            constant, full = stored[id(value)], None
            for user in users:
                if not _broadcasts(user, node, constant):
                    full = full or self._full(constant, node, value)
                    user.replace_input_with(node, full)
                else:
                    user.replace_input_with(node, constant)

    def _constant(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        key = _content(value)
        if key is not None and key in self._stored:
            return self._stored[key]
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value.clone(memory_format=torch.contiguous_format)
        with self.graph.inserting_before(next(n for n in self.graph.nodes if n.op != "placeholder")):
            get = self.graph.create_node("get_attr", name, name=name)
        get.meta = dict(node.meta, val=_like(node.meta["val"], value.shape))
        if key is not None:
            self._stored[key] = get
        return get

    def _full(self, constant: fx.Node, node: fx.Node, value: torch.Tensor) -> fx.Node:
        """A vector as it is: torch's batch norms read theirs by address, whatever the strides."""
        sizes = list(node.meta["val"].shape)
        if list(constant.meta["val"].shape) == sizes:
            return constant
        if value.dim() == 1:
            return self._constant(node, value)
        with self.graph.inserting_before(_after_placeholders(node)):
            wide = self.graph.call_function(aten.expand.default, (constant, sizes))
        wide.meta = dict(node.meta)
        return wide


# -- spread values ------------------------------------------------------------------------------------


def evaluate(node: fx.Node, args: Any, kwargs: dict[str, Any], sizes: Any = None) -> Any:
    """The value of `node`, spread; None when it would be too large. `sizes`: those of the result."""
    target, val = node.target, node.meta["val"]
    if sizes is None and isinstance(val, torch.Tensor):
        sizes = val.shape
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    with torch.no_grad():
        if target in FILLS:
            return torch.full((), FILLS[target](args), dtype=val.dtype).expand(sizes)
        if torch.Tag.pointwise in getattr(target, "tags", ()) or target in ELEMENTWISE:
            return _elementwise(target, args, kwargs)
        large = sizes is not None and math.prod(sizes) * val.element_size() > MAX_BYTES
        if large and target not in VIEWS:
            return None
        value = RELAID.get(target, target)(*args, **kwargs)
    return spread(value) if isinstance(value, torch.Tensor) and target not in VIEWS else value


def _elementwise(target: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    sizes = torch.broadcast_shapes(*(t.shape for t in tensors))
    varies = [False] * len(sizes)
    for t in tensors:
        for i, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            varies[len(sizes) - t.dim() + i] |= size > 1 and stride != 0
    if math.prod(size for size, v in zip(sizes, varies, strict=True) if v) > MAX_BYTES:
        return None
    small = [_narrow(a, varies) if isinstance(a, torch.Tensor) else a for a in args]
    return spread(target(*small, **kwargs).expand(sizes))


def _narrow(t: torch.Tensor, varies: list[bool]) -> torch.Tensor:
    for i, v in enumerate(varies[len(varies) - t.dim() :]):
        t = t if v or t.shape[i] == 1 else t.narrow(i, 0, 1)
    return t


def spread(value: torch.Tensor) -> torch.Tensor:
    """The same value with stride 0 along every dim in which it does not vary."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if size < 2 or stride == 0:
            continue
        first = value.narrow(dim, 0, 1)
        small = compact(value)  # without the dims already found
        if not torch.equal(small.narrow(dim, 1, 1), small.narrow(dim, 0, 1)):
            continue  # most dims that vary are known by their first two rows
        if bool((small == small.narrow(dim, 0, 1)).all()):
            value = first.expand(value.shape)
    return value


def compact(value: torch.Tensor) -> torch.Tensor:
    """Size 1 along every dim of stride 0."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if size > 1 and stride == 0:
            value = value.narrow(dim, 0, 1)
    return value


# -- helpers ------------------------------------------------------------------------------------------


def _broadcasts(user: fx.Node, node: fx.Node, constant: fx.Node) -> bool:
    """Whether `user` gives the same with `constant`, of size 1 in some dims, in place of `node`."""
    if user.target is SDPA:
        return _is_mask_of(user, node) and _same(constant, node, dims=(-2, -1))
    if torch.Tag.pointwise not in getattr(user.target, "tags", ()):
        return False
    shapes = [
        (constant if n is node else n).meta["val"].shape
        for n in user.all_input_nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    ]
    sizes = user.meta["val"].shape
    return len(sizes) == max(map(len, shapes)) and all(
        any(len(s) >= i and _is(s[-i], sizes[-i]) for s in shapes)
        for i in range(1, len(sizes) + 1)
    )


def _is_mask_of(user: fx.Node, node: fx.Node) -> bool:
    """Read as the mask of an attention alone, which broadcasts over batch and heads."""
    return node not in user.args[:3]


def _same(a: fx.Node, b: fx.Node, dims: tuple[int, ...]) -> bool:
    return all(_is(a.meta["val"].shape[d], b.meta["val"].shape[d]) for d in dims)


def _is(a: Any, b: Any) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(a.node.expr == b.node.expr)


def _like(val: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    return val.new_empty(tuple(shape))


def _content(value: torch.Tensor) -> Any:
    """Equal for equal small constants: they are stored once."""
    if value.numel() > 1024:
        return None
    return value.dtype, value.shape, repr(value.tolist())


def _after_placeholders(node: fx.Node) -> fx.Node:
    while node.op in ("placeholder", "get_attr"):
        node = node.next
    return node


def _hashable(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return id(x)
    if isinstance(x, (tuple, list)):
        return tuple(_hashable(y) for y in x)
    if isinstance(x, dict):
        return tuple((k, _hashable(v)) for k, v in x.items())
    return (type(x), x)


# -- the tables ---------------------------------------------------------------------------------------

PLAIN = {operator.getitem}
VIEWS = {
    aten.expand.default,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.permute.default,
    aten.transpose.int,
}
# A spread value has other strides than the one that was captured: a view of it may need a copy.
RELAID: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}
ELEMENTWISE = {aten._to_copy.default, aten.clone.default, aten.masked_fill.Scalar}
FILLS: dict[Any, Callable[[Any], Any]] = {
    aten.full.default: lambda args: args[1],
    aten.full_like.default: lambda args: args[1],
    aten.new_full.default: lambda args: args[2],
    aten.scalar_tensor.default: lambda args: args[0],
    **{
        op: lambda args: 0
        for op in (
            aten.zeros.default,
            aten.zeros_like.default,
            aten.new_zeros.default,
            aten.empty.memory_format,
            aten.empty_like.default,
            aten.new_empty.default,
        )
    },
    **{
        op: lambda args: 1
        for op in (aten.ones.default, aten.ones_like.default, aten.new_ones.default)
    },
}
