"""How much of a model's matrix products a plan splits, counted from its Program.

Work is counted from the operators' own shapes, whatever the equation table says of them, so that an
operator without an equation counts as whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from plait.program import Program
from plait.rules.describe import bind
from plait.rules.layout import Strategy

aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """A weight with its bytes, or a product with its operations."""

    name: str
    amount: int
    split: bool


def share(parts: list[Part]) -> float:
    """The part of all amounts that is split."""
    return sum(p.amount for p in parts if p.split) / sum(p.amount for p in parts)


def whole(parts: list[Part]) -> list[str]:
    return [f"{p.name} ({p.amount})" for p in parts if not p.split]


def products(program: Program, strategies: Mapping[fx.Node, Strategy]) -> list[Part]:
    """Every matrix product, with its multiplications and additions."""
    return [
        Part(node.name, _operations(node), strategies[node].split is not None)
        for node in program.graph.nodes
        if _operations(node)
    ]


def weights(program: Program, strategies: Mapping[fx.Node, Strategy]) -> list[Part]:
    """The weights of two dims or more of which an operand of a matrix product is made."""
    names = {w.node: w.name for w in program.weights if len(w.shape) > 1}
    found: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        if _operations(node):
            found.update((w, None) for x in _factors(node) for w in _made_of(x, set(names)))
    return [
        Part(names[w.name], _bytes(w.meta["val"]), strategies[w].split is not None) for w in found
    ]


def _operations(node: fx.Node) -> int:
    counts = COUNTS.get(str(getattr(node.target, "name", str)()).split(".")[0])
    if node.op != "call_function" or counts is None:
        return 0
    bound = {k: v.meta["val"] if isinstance(v, fx.Node) else v for k, v in bind(node).items()}
    return 2 * int(counts(bound, node.meta["val"]))


def _factors(node: fx.Node) -> Iterator[fx.Node]:
    """The operands of a product that are no term of its result."""
    for name, value in bind(node).items():
        term = name == "bias" or (name == "self" and "add" in str(node.target))
        if isinstance(value, fx.Node) and not term:
            yield value


def _made_of(x: fx.Node, weights: set[str]) -> list[fx.Node]:
    """The weights behind a value that no input is behind."""
    found, stack, seen = list[fx.Node](), [x], {x}
    while stack:
        node = stack.pop()
        if node.op == "placeholder":
            if node.name not in weights:
                return []
            found.append(node)
        new = set(node.all_input_nodes) - seen
        seen |= new
        stack += new
    return found


def _bytes(x: Tensor) -> int:
    return prod(x.shape) * x.dtype.itemsize


def _attention(b: dict[str, Any], out: Tensor) -> int:
    keys = b["key"].shape[-2]
    return keys * (b["query"].numel() + out.numel())


COUNTS: dict[str, Any] = {  # multiplications, by name of the operator
    "aten::linear": lambda b, out: out.numel() * b["weight"].shape[-1],
    "aten::mm": lambda b, out: out.numel() * b["self"].shape[-1],
    "aten::bmm": lambda b, out: out.numel() * b["self"].shape[-1],
    "aten::mv": lambda b, out: out.numel() * b["self"].shape[-1],
    "aten::matmul": lambda b, out: out.numel() * b["self"].shape[-1],
    "aten::addmm": lambda b, out: out.numel() * b["mat1"].shape[-1],
    "aten::baddbmm": lambda b, out: out.numel() * b["batch1"].shape[-1],
    "aten::convolution": lambda b, out: out.numel() * b["weight"][0].numel(),
    "aten::conv1d": lambda b, out: out.numel() * b["weight"][0].numel(),
    "aten::conv2d": lambda b, out: out.numel() * b["weight"][0].numel(),
    "aten::conv3d": lambda b, out: out.numel() * b["weight"][0].numel(),
    "aten::_grouped_mm": lambda b, out: out.numel() * b["self"].shape[-1],
    "transformers::grouped_mm_fallback": lambda b, out: out.numel() * b["input"].shape[-1],
    "aten::scaled_dot_product_attention": _attention,
}
