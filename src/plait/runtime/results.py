"""Results: what a call of a pipeline gives back. Outputs, new buffers, and gradients that several
stages add to; each goes from the places that have it to those that need it.

    outputs      put together from the micro-batches, on every rank or on those of the last stage
    buffers      the new value, to every stage that holds one
    gradients    summed in order of stage by one rank, so that every copy gets the same bits
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.passes.trace import Spec
from plait.rules.moves import assemble
from plait.runtime import channel
from plait.runtime.actions import Run
from plait.runtime.channel import Channel


def outputs(run: Run, readers: Callable[[int], Sequence[int]]) -> dict[int, Any]:
    """The flat outputs that the caller sees, whole, at the places `readers`; None elsewhere."""
    stages, out = run.stages, dict[int, Any]()
    for flat in stages.wanted():
        parts = [_part(run, flat, k, readers(flat)) for k in stages.parts(flat)]
        out[flat] = None if any(p is None for p in parts) else _whole(run, flat, parts)
    return out


def _part(run: Run, flat: int, k: int, readers: Sequence[int]) -> Any:
    stages, line = run.stages, run.stages.channel
    owner, spec = stages.place(stages.owner(flat, k)), stages.spec(run.specs, flat, k)
    tag = Channel.tag(channel.OUTPUT, flat, k)
    if line.place == owner:
        value = run.results[flat, k]
        if isinstance(value, Tensor):
            assert spec is not None
            for place in readers:
                if place != owner:
                    line.send(spec.packed(value), place, tag)
        return value
    if line.place not in readers or spec is None:
        return None
    return line.receive(spec, owner, tag, run.stages.device)


def _whole(run: Run, flat: int, parts: Sequence[Any]) -> Any:
    given = run.stages.given[flat]
    if given.kind == "shard":
        assert given.cut is not None
        return assemble(list(parts), given.cut)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    replicas = run.stages.replicas
    terms = given.kind == "partial" and run.stages.joined and isinstance(total, Tensor)
    return replicas.total(total) if terms and replicas is not None else total


def mutate(run: Run, weights: Mapping[str, Tensor]) -> None:
    """Buffers take their new values on every stage that holds them: outputs are whole, each rank keeps its rows."""
    stages, line = run.stages, run.stages.channel
    shares = {s.weight.node: s for s in stages.local.shares}
    for mutation in stages.program.mutations:
        owner, holders = stages.place(stages.owner(mutation.index, 0)), stages.holders[mutation.weight]
        tag = Channel.tag(channel.BUFFER, mutation.index)
        value, spec = None, stages.spec(run.specs, mutation.index, 0)
        assert spec is not None
        if line.place == owner:
            value = run.results[mutation.index, 0]
            for place in holders:
                if place != owner:
                    line.send(spec.packed(value), place, tag)
        elif line.place in holders:
            value = line.receive(spec, owner, tag, stages.device)
        if value is not None and line.place in holders:
            share = shares[mutation.weight]
            with torch.no_grad():
                weights[share.weight.name].copy_(share.of(value, stages.local.rank))


class Sums:
    """Gradients after the last backward. Who adds to which is known to all from the reach."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def _sources(self, ends: frozenset[int] | None = None) -> set[tuple[str, int]]:
        """(placeholder, place that adds to its gradient)."""
        return {
            (name, self.run.stages.place(stage))
            for k in range(len(self.run.stages.pieces))
            for name, stage in self.run.reached(k, ends).sources
        }

    def weights(self) -> dict[str, Tensor | None]:
        """By node, of this rank's weights."""
        out: dict[str, Tensor | None] = {}
        stages, sources = self.run.stages, self._sources(self.run.ends)
        for which, share in enumerate(stages.local.shares):
            node = share.weight.node
            holders = stages.holders[node]
            if share.weight.requires_grad and stages.channel.place in holders:
                adders = sorted(p for name, p in sources if name == node)
                out[node] = self._total(self.run.weights[node], adders, holders, which)
        return out

    def inputs(self) -> list[Tensor | None]:
        """By leaf, on every rank."""
        stages, out, sources = self.run.stages, list[Tensor | None](), self._sources()
        names: dict[int, set[str]] = {}
        for piece in stages.pieces:
            for name, source in piece.feeds.items():
                names.setdefault(source.leaf, set()).add(name)
        everywhere = range(stages.channel.pp)
        for leaf, x in enumerate(self.run.leaves):
            if not isinstance(x, Tensor) or not x.requires_grad:
                out.append(None)
                continue
            mine = names.get(leaf, set())
            adders = sorted({p for name, p in sources if name in mine})
            out.append(self._total(x, adders, everywhere, len(stages.local.shares) + leaf))
        return out

    def _total(
        self, x: Tensor, adders: Sequence[int], holders: Sequence[int], which: int
    ) -> Tensor | None:
        """The sum over `adders`, in their order, on all `holders`."""
        c, device = self.run.stages.channel, self.run.stages.device
        if not adders:
            return None
        own = x.grad if x.grad is not None else torch.zeros_like(x)
        spec = Spec(tuple(x.shape), x.dtype, False)
        root, tag, back = adders[0], Channel.tag(channel.SUM, which), Channel.tag(channel.TOTAL, which)
        if c.place == root:
            for place in adders[1:]:
                own = own + c.receive(spec, place, tag, device)
            for place in holders:
                if place != root:
                    c.send(own, place, back)
            return own
        if c.place in adders:
            c.send(own, root, tag)
        return c.receive(spec, root, back, device)
