"""Attention with dropout, written out, so that the dropout is an operator of its own.

    softmax(q k^T * scale, hidden keys at -inf) -> native_dropout -> matmul with v
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from plait.capture.written import SDPA, arguments
from plait.program import Program

aten = torch.ops.aten


def write_out_attention_dropout(program: Program) -> Program:
    dropped = [n for n in program.graph.nodes if n.target is SDPA and arguments(n)["dropout_p"] > 0]
    if not dropped:
        return program
    constants = dict(program.constants)
    hidden = _Hidden(constants)
    for node in dropped:
        result = _attention(Writer(node), arguments(node), hidden)
        node.replace_all_uses_with(result)
        program.graph.erase_node(node)
    return program.with_(constants=constants)


class Writer:
    """Inserts calls before a node, in the name of its line and module, and knows their values."""

    def __init__(self, node: fx.Node):
        self.node = node
        self.mode = node.meta["val"].fake_mode

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.call_function(target, args, kwargs)
        values = fx.node.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            new.meta = {**self._origin(), "val": target(*values[0], **values[1])}
        return new

    def constant(self, name: str, value: torch.Tensor) -> fx.Node:
        first = next(n for n in self.node.graph.nodes if n.op != "placeholder")
        with self.node.graph.inserting_before(first):
            new = self.node.graph.create_node("get_attr", name, name=name)
        val = self.node.meta["val"].new_empty(value.shape, dtype=value.dtype)
        new.meta = {**self._origin(), "val": val}
        return new

    def _origin(self) -> dict[str, Any]:
        return {k: v for k, v in self.node.meta.items() if k in ("stack_trace", "nn_module_stack")}


class _Hidden:
    """Boolean masks that are true where a key is hidden, each made once."""

    def __init__(self, constants: dict[str, torch.Tensor]):
        self.constants = constants
        self.made: dict[Any, fx.Node] = {}

    def causal(self, write: Writer, rows: Any, cols: Any, q: fx.Node, k: fx.Node) -> fx.Node:
        if not (isinstance(rows, int) and isinstance(cols, int)):
            sizes = [write(aten.sym_size.int, x, x.meta["val"].dim() - 2) for x in (q, k)]
            device = q.meta["val"].device
            ones = write(aten.ones.default, sizes, dtype=torch.bool, device=device)
            return write(aten.logical_not.default, write(aten.tril.default, ones))
        if (rows, cols) not in self.made:
            value = torch.ones(rows, cols, dtype=torch.bool).triu(1)
            self.made[rows, cols] = self._store(write, value, "not causal")
        return self.made[rows, cols]

    def by(self, write: Writer, mask: fx.Node) -> fx.Node:
        if mask.op != "get_attr":
            return write(aten.logical_not.default, mask)
        if mask not in self.made:
            seen = mask.meta.get("mask")
            value = ~self.constants[str(mask.target)]
            self.made[mask] = self._store(write, value, f"not {seen}" if seen else None)
        return self.made[mask]

    def _store(self, write: Writer, value: torch.Tensor, mask: str | None) -> fx.Node:
        name = f"hidden_{len(self.made)}"
        self.constants[name] = value
        node = write.constant(name, value)
        if mask:
            node.meta["mask"] = mask
        return node


def _attention(write: Writer, call: dict[str, Any], hidden: _Hidden) -> fx.Node:
    q, k, v, mask = (call[x] for x in ("query", "key", "value", "attn_mask"))
    rows, cols = (x.meta["val"].shape[-2] for x in (q, k))
    scale = q.meta["val"].shape[-1] ** -0.5 if call["scale"] is None else call["scale"]
    softmax = aten.softmax.int
    last = k.meta["val"].dim() - 1
    scores = write(aten.matmul.default, q, write(aten.transpose.int, k, last - 1, last))
    scores = write(aten.mul.Tensor, scores, scale)
    if call["is_causal"]:
        causal = hidden.causal(write, rows, cols, q, k)
        scores = write(aten.masked_fill.Scalar, scores, causal, float("-inf"))
    if mask is not None and mask.meta["val"].dtype is torch.bool:
        scores = write(aten.masked_fill.Scalar, scores, hidden.by(write, mask), float("-inf"))
        softmax = aten._safe_softmax.default  # a query that sees no key gets zeros, not NaN
    elif mask is not None:
        scores = write(aten.add.Tensor, scores, mask)
        softmax = aten._safe_softmax.default
    dropped = write(aten.native_dropout.default, write(softmax, scores, last), call["dropout_p"], True)
    return write(aten.matmul.default, write(operator.getitem, dropped, 0), v)
