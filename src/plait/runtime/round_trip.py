"""Round trips: a training program in CUDA graphs, one of the way there and one of each way back.

    call 1, 2    the program as it is; libraries and communicators warm up
    call 3       capture of the way there, replay
    a way back   as autograd runs it, once for each set of outputs that have a gradient; then captured, replayed

The graphs own what they compute with: inputs and gradients are copied in, outputs and gradients out. What the way
there keeps for the way back is in the graph's memory too, so while a call is open, that is while somebody may
still ask for its way back, others run the program as it is. Whether they do is each rank's own affair: the same
collectives are run in the same order either way, and no capture runs any.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.runtime.graphs import WARM_UP, addresses, capturing, end_before

Grads = tuple[Tensor | None, ...]
ROOM = 2.2  # times what calls were seen to take: for the graphs, and for calls outside of them


@dataclass
class RoundTrip:
    """`run(*feed)` returns a flat tuple; `feed` are the weights, then `inputs` tensors. `backward`: around a
    way back, in which ranks wait for each other."""

    run: Callable[..., tuple[Any, ...]]
    inputs: int  # how many of the last of `feed` differ from call to call
    backward: Callable[[], AbstractContextManager[None]] = nullcontext
    group: dist.ProcessGroup | None = None  # whose collectives are captured
    calls: int = 0  # until now
    _graphs: _Graphs | None = None
    _loose: bool = False  # there is no room for graphs, or something in the program does not go into one

    def __call__(self, feed: Sequence[Tensor]) -> tuple[Any, ...]:
        if self._graphs is not None and not self._graphs.of(feed):
            self._graphs, self.calls = None, 0  # moved weights, or others that learn
        self.calls += 1
        if self._graphs is None and self.calls > WARM_UP and not self._loose:
            self._graphs = self._capture(feed)
            self._loose = self._graphs is None
        if self._graphs is None or self.open:
            return self.run(*feed)
        return _There.apply(self._graphs, *feed)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def open(self) -> bool:
        """Whether somebody may still ask for the way back."""
        return self._graphs is not None and self._graphs.open

    def _capture(self, feed: Sequence[Tensor]) -> _Graphs | None:
        if not room():
            return None
        try:
            made = _Graphs.capture(self.run, feed, len(feed) - self.inputs, self.backward)
            end_before(self.group, made)
            return made
        except RuntimeError as error:
            warnings.warn(f"the program runs outside of CUDA graphs: {str(error).splitlines()[0]}", stacklevel=2)
            return None


def room() -> bool:
    """Whether what was allocated at most, until now, beside what is there now, fits in twice more."""
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return free > ROOM * (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())


class _Call:
    """Whoever holds it may ask for the way back."""


@dataclass(eq=False)
class _Graphs:
    feed: list[Tensor]  # leaves of their own: over the weights' memory, and copies of the inputs
    fixed: int  # how many are weights
    stream: torch.cuda.Stream
    backward: Callable[[], AbstractContextManager[None]]
    there: torch.cuda.CUDAGraph
    outs: tuple[Any, ...] = ()
    ways: dict[tuple[bool, ...], _Way] = field(default_factory=dict)
    call: weakref.ref[_Call] | None = None

    @classmethod
    def capture(
        cls, run: Callable[..., tuple[Any, ...]], feed: Sequence[Tensor], fixed: int,
        backward: Callable[[], AbstractContextManager[None]],
    ) -> _Graphs:  # fmt: skip
        # `data`: what optimizers write to the weights is no news to what autograd has kept of them
        own = [x.data if i < fixed else x.data.clone() for i, x in enumerate(feed)]
        leaves = [mine.requires_grad_(x.requires_grad) for mine, x in zip(own, feed, strict=True)]
        stream = torch.cuda.Stream()
        made = cls(leaves, fixed, stream, backward, torch.cuda.CUDAGraph())
        with capturing(made.there, stream):
            made.outs = tuple(run(*leaves))
        return made

    def of(self, feed: Sequence[Tensor]) -> bool:
        """Whether `feed` has the same weights, and wants the same gradients."""
        same = addresses(self.feed[: self.fixed]) == addresses(feed[: self.fixed])
        return same and all(a.requires_grad == b.requires_grad for a, b in zip(self.feed, feed, strict=True))

    def end(self) -> None:
        """Let go of what is captured."""
        self.there.reset()
        for way in self.ways.values():
            if way.graph is not None:
                way.graph.reset()

    @property
    def open(self) -> bool:
        return self.call is not None and self.call() is not None

    def go(self, feed: Sequence[Tensor]) -> tuple[Any, ...]:
        for mine, theirs in zip(self.feed[self.fixed :], feed[self.fixed :], strict=True):
            mine.data.copy_(theirs, non_blocking=True)
        self.there.replay()
        return tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in self.outs)

    def back(self, given: Grads) -> Grads:
        which = tuple(g is not None for g in given)
        if which not in self.ways:
            self.ways[which] = _Way([g.detach().clone() for g in given if g is not None], which)
        return self.ways[which].run(self, [g for g in given if g is not None])


@dataclass
class _Way:
    """One way back: of the outputs `which` have a gradient."""

    given: list[Tensor]
    which: tuple[bool, ...]
    graph: torch.cuda.CUDAGraph | None = None
    found: Grads = ()
    runs: int = 0
    loose: bool = False

    def run(self, graphs: _Graphs, given: Sequence[Tensor]) -> Grads:
        for mine, theirs in zip(self.given, given, strict=True):
            mine.copy_(theirs, non_blocking=True)
        self.runs += 1
        if self.runs > 1 and self.graph is None and not self.loose:
            self._capture(graphs)
        if self.graph is None:
            return self._gradients(graphs)
        self.graph.replay()
        return tuple(None if g is None else g.clone() for g in self.found)

    def _capture(self, graphs: _Graphs) -> None:
        graph, pool = torch.cuda.CUDAGraph(), graphs.there.pool()
        try:
            with capturing(graph, graphs.stream, pool):
                self.found = self._gradients(graphs)
            self.graph = graph
        except RuntimeError as error:
            self.loose = True
            warnings.warn(f"a way back runs outside of CUDA graphs: {str(error).splitlines()[0]}", stacklevel=2)

    def _gradients(self, graphs: _Graphs) -> Grads:
        """Of every leaf, in their order; the graph of autograd stays, for the next time."""
        leaves = [x for x in graphs.feed if x.requires_grad]
        outs = [x for x, here in zip(graphs.outs, self.which, strict=True) if here]
        found = iter(torch.autograd.grad(outs, leaves, self.given, retain_graph=True, allow_unused=True))
        return tuple(next(found) if x.requires_grad else None for x in graphs.feed)


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, *feed: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.graphs, ctx.call = graphs, _Call()
        ctx.save_for_backward(torch.empty(0))  # torch says what is wrong with a second way back
        graphs.call = weakref.ref(ctx.call)
        outs = graphs.go(feed)
        pairs = zip(outs, graphs.outs, strict=True)
        ctx.mark_non_differentiable(*(x for x, own in pairs if isinstance(x, Tensor) and not own.requires_grad))
        return outs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        graphs: _Graphs = ctx.graphs
        with graphs.backward():
            found = graphs.back(given)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None
        return None, *found
