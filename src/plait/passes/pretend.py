"""Pretend ranks: the partitioned programs of all ranks, run in lockstep in one process.

Every move is done by `moves.together`, the reference for all transports, with its dual on the way
back. So a plan is checked without processes, in a second a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from plait.passes.partition import Local
from plait.rules.moves import Conversion, take, together


class _Together(torch.autograd.Function):
    """A move of all ranks at once: n tensors in, n out."""

    @staticmethod
    def forward(ctx: Any, c: Conversion, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.conversion = c
        if c.forward.action == "identity":  # the same memory, as for ranks apart
            return tuple(x.view_as(x) for x in xs)
        return tuple(x.clone() for x in together(c.forward, xs, c.cut))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        c = ctx.conversion
        return (None, *(g.clone() for g in together(c.backward, grads, c.cut)))


def scatter(locals_: Sequence[Local], tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Each rank's part of the weights, by name; gradients follow `requires_grad` of the weight."""
    out = []
    for local in locals_:
        parts = {}
        for share in local.shares:
            whole = tensors[share.weight.name].detach()
            cut = share.cut
            part = take(whole, cut.dim, cut.rows[local.rank]) if cut else whole
            parts[share.weight.name] = part.clone().requires_grad_(share.weight.requires_grad)
        out.append(parts)
    return out


def run_pretend(
    locals_: Sequence[Local],
    weights: Sequence[dict[str, Tensor]],
    inputs: Sequence[Tensor],
    seed: int = 0,
) -> list[tuple[Any, ...]]:
    """The flat outputs of every rank. `inputs` are the tensor inputs, the same on every rank."""
    n = len(locals_)
    env: dict[str, list[Any]] = {}
    feeds = []
    for local, parts in zip(locals_, weights, strict=True):
        feed: list[Any] = [parts[share.weight.name] for share in local.shares] + list(inputs)
        feeds.append(iter([*feed, torch.tensor(seed)]))
    for nodes in zip(*(local.graph.nodes for local in locals_), strict=True):
        names = {node.name for node in nodes}
        assert len(names) == 1, f"ranks differ: {names}"
        if nodes[0].op == "output":
            return [_load(nodes[r].args[0], env, r) for r in range(n)]
        env[nodes[0].name] = _step(nodes, locals_, env, feeds)
    raise AssertionError("a graph without an output")


def _step(
    nodes: Sequence[fx.Node], locals_: Sequence[Local], env: dict[str, list[Any]], feeds: list[Any]
) -> list[Any]:
    ranks = range(len(nodes))
    first = nodes[0]
    if first.op == "placeholder":
        return [next(feeds[r]) for r in ranks]
    if first.op == "get_attr":
        return [locals_[r].constants[str(nodes[r].target)] for r in ranks]
    if first.op == "call_module":
        name, _, half = str(first.target).partition(".")
        sites = [locals_[r].sites[name] for r in ranks]
        xs = [_load(nodes[r].args[0], env, r) for r in ranks]
        if half == "wait":  # done when it was started
            return xs
        return list(
            _Together.apply(  # type: ignore[no-untyped-call]
                sites[0].conversion, *xs
            )
        )
    return [
        nodes[r].target(*_load(nodes[r].args, env, r), **_load(nodes[r].kwargs, env, r))  # type: ignore[operator]
        for r in ranks
    ]


def _load(args: Any, env: dict[str, list[Any]], rank: int) -> Any:
    return fx.map_arg(args, lambda n: env[n.name][rank])
