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

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

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
    """One leaf of the user's output: position `index` of the flat output tuple, or a plain value."""

    index: int | None = None
    value: Any = None


@dataclass(frozen=True)
class Mutation:
    """Buffer `weight` (a placeholder's name) takes the value at `index` of the flat output."""

    weight: str
    index: int


@dataclass(frozen=True)
class Snapshot:
    """What capture read from the model and could not put in the graph; compared on each call."""

    values: tuple[tuple[str, Any], ...] = ()


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
    notes: tuple[str, ...] = ()  # what capture found or gave up, for explain()

    def weight(self, node: str) -> Weight:
        return self._by_node[node]

    @property
    def _by_node(self) -> dict[str, Weight]:
        return {w.node: w for w in self.weights}

    def with_(self, **changes: Any) -> Program:
        return replace(self, **changes)


def module_path(node: fx.Node) -> str:
    """The user's name of the innermost module that `node` comes from; "" at the root."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""
