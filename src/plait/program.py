"""Program: one captured model, as data.

A `Program` is a functional `torch.fx.Graph` of ATen operators and the facts that the graph cannot
hold: which placeholder is which weight, which values are constants, how the user's inputs and
outputs are nested.

Legal nodes, in this order:

    placeholder    one per `Weight` (node.name == weight.node), then one per tensor `Input`
    get_attr       a folded constant; `program.constants[node.target]` is its tensor
    call_function  an ATen overload, a sym_size / operator.* on SymInts, `operator.getitem`,
                   or one of plait's own operators (`plait.ops`)
    output         one flat tuple: the tensor outputs, then the new value of each mutated buffer

`node.meta["val"]` is a fake tensor (or SymInt) for every node, `node.meta["stack_trace"]` and
`node.meta["nn_module_stack"]` lead back to the user's line and module.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from plait.errors import WeightError

LARGE = 2**20  # bytes of a constant

WeightKind = Literal["parameter", "buffer", "constant"]


@dataclass(frozen=True)
class Weight:
    """A parameter, a buffer, or a tensor attribute that is neither.

    `names` are all names by which the user's model knows the tensor (tied ones included), the
    first of them in `named_parameters()` order first.
    """

    node: str
    names: tuple[str, ...]
    kind: WeightKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    persistent: bool = True  # buffers only: part of state_dict()

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Input:
    """One leaf of the user's (args, kwargs): a tensor (`node` set) or a plain value."""

    path: str  # "args[0]", "kwargs['input_ids']"
    node: str | None = None
    value: Any = None


@dataclass(frozen=True)
class Output:
    """One leaf of the user's output: `index` in the flat output tuple, or a plain value."""

    index: int | None = None
    value: Any = None


@dataclass(frozen=True)
class Mutation:
    """Buffer `weight` (a placeholder's name) takes the value at `index` of the flat output."""

    weight: str
    index: int


@dataclass(frozen=True)
class Size:
    """A size that may differ from call to call: the user's name of it, its symbols in the graph.

    One symbol, but where torch needs no more than equal ranges of two dims with that name.
    """

    name: str
    symbols: frozenset[str]
    low: int = 0
    high: int | None = None  # None: no limit


@dataclass(frozen=True)
class Program:
    graph: fx.Graph
    weights: tuple[Weight, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    mutations: tuple[Mutation, ...] = ()
    unused: tuple[Weight, ...] = ()  # weights that no operator reads; kept for state_dict()
    training: bool = False  # gradients are asked for
    sizes: tuple[Size, ...] = ()  # the dynamic ones
    folded: tuple[str, ...] = ()  # tensors of the model whose values stand in constants
    sets: tuple[str, ...] = ()  # attributes that the model's forward sets
    notes: tuple[str, ...] = ()  # what capture found or gave up, for explain()
    known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # of this graph

    def weight(self, node: str) -> Weight:
        return self._by_node[node]

    @property
    def _by_node(self) -> dict[str, Weight]:
        return {w.node: w for w in self.weights}

    def differentiable(self, asked: bool = False) -> set[fx.Node]:
        """The nodes through which gradients may flow; `asked`: in calls like the example, of whose inputs only some may
        ask for one."""
        if not self.training:
            return set()
        out: set[fx.Node] = set()
        trainable = {w.node for w in self.weights if w.requires_grad}
        frozen = {w.node for w in self.weights} - trainable
        for node in self.graph.nodes:
            if not may_learn(node.meta.get("val")):
                continue
            if node.op == "placeholder":
                mine = node.name in trainable or not asked or node.meta["val"].requires_grad
                if node.name not in frozen and mine:
                    out.add(node)
            elif any(i in out for i in node.all_input_nodes):
                out.add(node)
        return out

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal graphs, shapes, dtypes and weights; constants count by their values. Of the graph as
        it is when this is first asked: a pass makes another program."""
        digest = hashlib.sha256()
        for node in self.graph.nodes:
            digest.update(f"{node.name} {node.target} {node.args} {node.kwargs}".encode())
            digest.update(_facts(node.meta.get("val")).encode())
        for w in self.weights:
            digest.update(f"{w.names} {w.shape} {w.dtype} {w.requires_grad}".encode())
        for line in self._constants:
            digest.update(line.encode())
        digest.update(str(self.training).encode())
        return digest.hexdigest()[:16]

    @property
    def compared(self) -> list[str]:
        """What ranks that captured one program say alike: its digest, then every constant."""
        return [f"program {self.digest}", *(f"constant {line}" for line in self._constants)]

    @functools.cached_property
    def _constants(self) -> list[str]:
        """A line for each: name, shape, dtype and a checksum of its values."""
        return [f"{n} {tuple(t.shape)} {t.dtype} {_contents(t)}" for n, t in self.constants.items()]

    def with_(self, **changes: Any) -> Program:
        return replace(self, **changes)


def _contents(tensor: torch.Tensor) -> str:
    """A checksum of what is large: masks of long sequences have 64 MiB."""
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    large = values.nbytes > LARGE
    return str(zlib.crc32(values)) if large else hashlib.sha256(values).hexdigest()


def _facts(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return " ".join(_facts(v) for v in value)
    if hasattr(value, "shape"):
        return f"{tuple(map(str, value.shape))} {value.dtype}"
    return str(value)


def may_learn(value: object) -> bool:
    """Whether a gradient can flow into a value: real or complex numbers."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(
        isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values
    )


def module_path(node: fx.Node) -> str:
    """The user's name of the innermost module that `node` comes from; "" at the root."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def run_whole(
    program: Program,
    state: dict[str, torch.Tensor],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run the whole graph in this process with the weights in `state` (any of a weight's names).

    Mutated buffers are written back into `state`'s tensors, as the module would.
    """
    leaves = program.in_spec.flatten_up_to((tuple(args), dict(kwargs or {})))
    bound = {w.node: _lookup(state, w) for w in program.weights}
    bound |= {i.node: leaf for i, leaf in zip(program.inputs, leaves, strict=True) if i.node}
    values = run_graph(program.graph, bound, program.constants)
    with torch.no_grad():
        for mutation in program.mutations:
            bound[mutation.weight].copy_(values[mutation.index])
    flat = [o.value if o.index is None else values[o.index] for o in program.outputs]
    return pytree.tree_unflatten(flat, program.out_spec)


def run_graph(
    graph: fx.Graph, bound: dict[str, Any], constants: dict[str, torch.Tensor]
) -> tuple[Any, ...]:
    """The flat outputs; a value is let go after its last use."""
    env: dict[fx.Node, Any] = {}
    last = {n: user for user in graph.nodes for n in user.all_input_nodes}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = bound[node.name]
        elif node.op == "get_attr":
            env[node] = constants[str(node.target)]
        elif node.op == "output":
            return tuple(fx.node.map_arg(node.args[0], env.__getitem__))
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = _callable(node.target)(*args, **kwargs)
        for used in node.all_input_nodes:
            if last[used] is node:
                del env[used]
    raise AssertionError("a graph ends with its output")


def _callable(target: Any) -> Any:
    """Capture drops copies that only change strides, so a view may have to copy."""
    return torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target


def _lookup(state: dict[str, torch.Tensor], weight: Weight) -> torch.Tensor:
    for name in weight.names:
        if name in state:
            return state[name]
    raise WeightError(f"no value for {' = '.join(weight.names)}")
