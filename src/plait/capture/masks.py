"""Attention masks of a Program: recognised, and dropped where they say nothing of their own.

A constant mask is judged by its value. A mask made from symbolic sizes alone is evaluated at a few
lengths, longer than every number in it (a window of 4096 looks causal at 100), and has to have one
pattern at all of them. What depends on the user's input stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from plait.capture.clean import same_sizes
from plait.capture.written import SDPA, arguments, set_sdpa
from plait.passes.fold import drop_unused, evaluate, spread
from plait.program import Program
from plait.rules.describe import value_of
from plait.rules.facts import Pattern, pattern_of

aten = torch.ops.aten


def recognise_masks(program: Program) -> Program:
    masks = _Masks(program)
    for node in program.graph.nodes:
        if node.op == "get_attr":
            masks.mark_constant(node)
        elif node.target is SDPA:
            masks.attention(node)
    return drop_unused(program)


class _Masks:
    def __init__(self, program: Program):
        self.constants = program.constants
        self.found: dict[fx.Node, tuple[Pattern, bool] | None] = {}

    def mark_constant(self, node: fx.Node) -> None:
        """Eager attention adds its mask, or fills by it: the pattern is a fact of the constant."""
        value = self.constants[str(node.target)]
        if value.dim() < 2 or min(value.shape[-2:]) < 2 or any(s != 1 for s in value.shape[:-2]):
            return
        found = pattern_of(value)
        if found is not None and found[0].kind != "full":
            node.meta["mask"] = str(found[0])
        elif value.dtype is torch.bool and (inverse := pattern_of(~value)) is not None:
            node.meta["mask"] = f"not {inverse[0]}"

    def attention(self, node: fx.Node) -> None:
        call = arguments(node)
        if call["attn_mask"] is None:
            if call["is_causal"]:
                node.meta["mask"] = "causal"
            return
        found = self._pattern(call)
        if found is None:
            return
        pattern, pure = found
        rows, cols = (call[x].meta["val"].shape[-2:-1] for x in ("query", "key"))
        node.meta["mask"] = str(pattern)
        if pattern == Pattern("full") and pure:
            set_sdpa(node, call | {"attn_mask": None})
        elif pattern == Pattern("causal") and pure and same_sizes(rows, cols):
            set_sdpa(node, call | {"attn_mask": None, "is_causal": True})

    def _pattern(self, call: dict[str, Any]) -> tuple[Pattern, bool] | None:
        mask = call["attn_mask"]
        if mask not in self.found:
            q, k = call["query"].meta["val"].shape[-2], call["key"].meta["val"].shape[-2]
            self.found[mask] = self._judge(mask, q, k)
        return self.found[mask]

    def _judge(self, mask: fx.Node, q: Any, k: Any) -> tuple[Pattern, bool] | None:
        """A learned bias beside a mask changes weights, not who is seen."""
        if mask.target is aten.add.Tensor:
            for term in mask.all_input_nodes:
                found = self._by_value(term, q, k)
                if found is not None and found[0].kind != "full":
                    return found[0], False
        return self._by_value(mask, q, k)

    def _by_value(self, mask: fx.Node, q: Any, k: Any) -> tuple[Pattern, bool] | None:
        slice_ = _made_of_sizes(mask)
        if slice_ is None:
            return None
        found = set()
        for sizes in _trials(slice_, self.constants):
            value = _at(slice_, sizes, self.constants)
            if value is None:
                return None
            rows, cols = _size(q, sizes), _size(k, sizes)
            found.add(pattern_of(value.expand(*value.shape[:-2], rows, cols)))
        return found.pop() if len(found) == 1 else None


# -- masks made of symbolic sizes ---------------------------------------------------------------------


def _made_of_sizes(mask: fx.Node) -> list[fx.Node] | None:
    """All nodes that `mask` is computed from, in order; None where one is a weight or an input, or has several
    results, which are not followed."""
    found: dict[fx.Node, None] = {}

    def walk(node: fx.Node) -> bool:
        if node in found:
            return True
        value = node.meta.get("val")
        is_size = not isinstance(value, torch.Tensor)
        several = isinstance(value, (tuple, list))
        if several or node.op == "placeholder" or (node.op == "call_function" and _random(node)):
            return False
        if not is_size and not all(walk(n) for n in node.all_input_nodes):
            return False
        found[node] = None
        return True

    return list(found) if walk(mask) else None


def _random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _trials(nodes: list[fx.Node], constants: dict[str, torch.Tensor]) -> Iterator[dict[Any, int]]:
    """Sizes for the symbols of `nodes`: none, or three sets, the last beyond every number."""
    symbols = sorted({s for n in nodes for s in _symbols(n.meta.get("val"))}, key=str)
    if not symbols:
        yield {}
        return
    beyond = max(_numbers(nodes, constants), default=0)
    for start in (6, 23, beyond + 9):
        yield {s: start + 2 * i for i, s in enumerate(symbols)}


def _symbols(val: Any) -> set[Any]:
    sizes = val.shape if isinstance(val, torch.Tensor) else (val,)
    return {s for x in sizes if isinstance(x, torch.SymInt) for s in x.node.expr.free_symbols}


def _numbers(nodes: list[fx.Node], constants: dict[str, torch.Tensor]) -> Iterator[int]:
    for node in nodes:
        for leaf in torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs))):
            if isinstance(leaf, (int, float)) and abs(leaf) < 2**31:
                yield int(abs(leaf))
        if node.op == "get_attr":
            value = constants[str(node.target)]
            yield from map(int, value.shape)
            if not value.dtype.is_floating_point and value.dtype is not torch.bool and value.numel():
                yield int(value.abs().max())


def _size(size: Any, sizes: dict[Any, int]) -> int:
    if isinstance(size, int):
        return size
    return value_of(size.node.expr, sizes)


def _at(
    nodes: list[fx.Node], sizes: dict[Any, int], constants: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """The last of `nodes` at these sizes; None when it would be too large."""
    env: dict[fx.Node, Any] = {}
    for node in nodes:
        val = node.meta.get("val")
        if node.op == "get_attr":
            env[node] = spread(constants[str(node.target)])
        elif not isinstance(val, torch.Tensor):
            env[node] = _size(val, sizes) if isinstance(val, torch.SymInt) else val
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = evaluate(node, args, dict(kwargs), [_size(s, sizes) for s in val.shape])
            if env[node] is None:
                return None
    return env[nodes[-1]]  # type: ignore[no-any-return]
