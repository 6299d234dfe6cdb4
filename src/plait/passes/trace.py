"""Trace: shapes, dtypes and need of gradients of a rank's values, from a run on the meta device.

Both ends of a wire know from it what will be sent, so no message carries a header; and both know
whether a gradient comes back: `reach` walks back from the outputs that the loss depends on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from plait.passes.partition import Local, Site
from plait.rules.moves import count

READ = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool  # it requires one
    # Its dims from the outermost in memory on, where that is not the order in which they stand:
    # kernels may sum in another order, so stages get the bits of one process only if it is kept.
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, x: Tensor) -> Spec:
        return cls(tuple(x.shape), x.dtype, x.requires_grad, _order(x))

    def packed(self, x: Tensor) -> Tensor:
        """`x` as it stands in memory."""
        return x.permute(self.order) if self.order else x

    def unpacked(self, x: Tensor) -> Tensor:
        return x.permute([self.order.index(i) for i in range(x.dim())]) if self.order else x

    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.grad)


def _order(x: Tensor) -> tuple[int, ...]:
    steps: tuple[int, ...] = tuple(x.stride())
    if x.is_contiguous() or any(s == 0 and n > 1 for s, n in zip(steps, x.shape, strict=True)):
        return ()
    return tuple(sorted(range(x.dim()), key=steps.__getitem__, reverse=True))


def trace(local: Local, feed: Mapping[str, Any], grad: bool) -> dict[str, Spec]:
    """The spec of every tensor of `local`; `feed`: specs of its placeholders, plain values as such.

    Without gradients an operator that is called alike again, as in the next layer, is not run again.
    """
    env: dict[fx.Node, Any] = {}
    out: dict[str, Spec] = {}
    known: dict[Any, Any] | None = None if grad else {}
    with torch.set_grad_enabled(grad):
        for node in local.graph.nodes:
            env[node] = _value(node, local, env, feed, known)
            value = env[node]
            first = value[0] if isinstance(value, (tuple, list)) and value else value
            if isinstance(first, Tensor):
                out[node.name] = Spec.of(first)
    return out


def _value(
    node: fx.Node, local: Local, env: dict[fx.Node, Any], feed: Mapping[str, Any], known: dict[Any, Any] | None
) -> Any:
    match node.op:
        case "placeholder":
            given = feed[node.name]
            return given.meta() if isinstance(given, Spec) else given
        case "get_attr":
            return local.constants[str(node.target)].to("meta")
        case "call_module":
            x = env[node.args[0]]  # type: ignore[index]
            name, _, half = str(node.target).partition(".")
            return x if half == "wait" else _moved(x, local.sites[name], local.rank)
        case "output":
            return None
    if node.target in READ:
        return 1  # any number will do: no size depends on it
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    if known is None or (key := _call(node.target, args, kwargs)) is None:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if key not in known:
        known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[key]


def _call(target: Any, args: Any, kwargs: Any) -> Any:
    """Equal for calls that give values of one form; None where that is not known."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    key = target, _facts(args), _facts(kwargs)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _facts(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    if isinstance(x, (tuple, list)):
        return type(x), *map(_facts, x)
    if isinstance(x, dict):
        return tuple((name, _facts(v)) for name, v in x.items())
    return type(x), x


def _moved(x: Tensor, site: Site, rank: int) -> Tensor:
    """What comes out of a move: rows of the rank, or all of them."""
    shape, c = list(x.shape), site.conversion
    if c.forward.action in ("slice", "slice_own", "reduce_scatter", "reduce_scatter_own", "deliver"):
        assert c.cut is not None
        shape[c.cut.dim] = count(c.cut.rows[rank])
    elif c.forward.action == "fetch":
        assert c.cut is not None
        shape[c.cut.dim] = count(c.cut.rows[(rank + c.forward.by) % len(c.cut.rows)])
    elif c.forward.action in ("pad", "pad_own", "gather", "gather_sum"):
        assert c.cut is not None
        shape[c.cut.dim] = c.cut.size
    grad = x.requires_grad and torch.is_grad_enabled()
    return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=grad)


@dataclass(frozen=True)
class Reach:
    """`values`: those that get a gradient; `sources`: (placeholder, stage that gives it one)."""

    values: frozenset[str]
    sources: frozenset[tuple[str, int]]


def reach(
    local: Local, specs: Mapping[str, Spec], placed: Mapping[str, int], wanted: Iterable[int]
) -> Reach:
    """What gets a gradient when the flat outputs `wanted` have one."""
    output = next(iter(reversed(local.graph.nodes)))
    goals = {output.args[0][i] for i in wanted}  # type: ignore[index]
    values: set[str] = set()
    sources: set[tuple[str, int]] = set()
    for node in reversed(local.graph.nodes):
        spec = specs.get(node.name)
        if spec is None or not spec.grad:
            continue
        users = [u for u in node.users if u.name in values]
        if node in goals or users:
            values.add(node.name)
        if node.op == "placeholder":
            sources |= {(node.name, stage) for u in users for stage in _stages(u, placed, values)}
            if node in goals:
                sources.add((node.name, max(placed.values(), default=0)))
    return Reach(frozenset(values), frozenset(sources))


def _stages(node: fx.Node, placed: Mapping[str, int], values: Collection[str]) -> set[int]:
    """Where a node runs that gets a gradient; a move of a weight, with those that read it."""
    if node.name in placed:
        return {placed[node.name]}
    return {s for u in node.users if u.name in values for s in _stages(u, placed, values)}
