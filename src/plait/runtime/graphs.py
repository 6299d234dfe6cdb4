"""Replay: a whole step in one CUDA graph, so that no time goes into launching kernels.

Captured at the second call of a form (the first one warms libraries and communicators up) on a
stream of its own; every rank captures at the same call, so collectives meet in the same order.
Inputs are copied into the graph's own tensors, outputs out of them: nothing that a caller holds is
overwritten by the next replay.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

WARM_UP = 2  # calls before the capture: autotuned libraries settle, communicators connect


@dataclass
class Replay:
    """`run(*feed)` returns a flat tuple; `feed` are the weights, then `inputs` tensors."""

    run: Callable[..., tuple[Any, ...]]
    inputs: int  # how many of the last of `feed` differ from call to call
    group: dist.ProcessGroup | None = None  # whose collectives are captured
    calls: int = 0  # until now
    _graph: torch.cuda.CUDAGraph | None = None
    _feed: list[Tensor] = field(default_factory=list)
    _fixed: tuple[int, ...] = ()
    _results: tuple[Any, ...] = ()
    open: ClassVar[bool] = False  # what it gives does not lie in the graph

    def __call__(self, feed: Sequence[Tensor]) -> tuple[Any, ...]:
        if self._graph is None or self._fixed != addresses(self._weights(feed)):
            self.calls += 1
            if self.calls <= WARM_UP:
                return self.run(*feed)
            self._capture(feed)
        assert self._graph is not None
        for mine, theirs in zip(self._own(self._feed), self._own(feed), strict=True):
            mine.copy_(theirs, non_blocking=True)
        self._graph.replay()
        return tuple(x.clone() if isinstance(x, Tensor) else x for x in self._results)

    def _own(self, feed: Sequence[Tensor]) -> Sequence[Tensor]:
        return feed[len(feed) - self.inputs :]

    def _weights(self, feed: Sequence[Tensor]) -> Sequence[Tensor]:
        return feed[: len(feed) - self.inputs]

    def _capture(self, feed: Sequence[Tensor]) -> None:
        weights = self._weights(feed)
        self._feed = [*weights, *(x.clone() for x in self._own(feed))]
        self._fixed = addresses(weights)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run(*self._feed)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, stream):
            self._results = self.run(*self._feed)
        end_before(self.group, self)

    def end(self) -> None:
        """Let go of the graph."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._results = None, ()


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """What is launched inside becomes `graph`. Where it cannot, the device is as it was: torch goes back to the
    stream of before, and tells its generator of the end, only where a capture succeeds; every later draw of a
    random number was refused."""
    with torch.cuda.stream(torch.cuda.current_stream()):
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        except RuntimeError:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                torch.empty(1, device="cuda").zero_()  # a graph of nothing is warned of
            raise


def addresses(weights: Sequence[Tensor]) -> tuple[int, ...]:
    """Where they lie: moved weights need another capture."""
    return tuple(x.data_ptr() for x in weights)


# -- the end of a group -----------------------------------------------------------------------------


class Ends(Protocol):
    def end(self) -> None: ...


# of a group: what holds graphs with its collectives
_held: WeakKeyDictionary[dist.ProcessGroup, list[weakref.ref[Ends]]] = WeakKeyDictionary()


def end_before(group: dist.ProcessGroup | None, holder: Ends) -> None:
    """`holder` ends when `group` is about to be shut down: NCCL waits until no graph has collectives of it, and the
    module that has the graph may live as long as the script that destroys the group. torch tells nobody of
    a shutdown, so its method is wrapped, once."""
    if group is None:
        return
    _held.setdefault(group, []).append(weakref.ref(holder))
    shutdown = dist.ProcessGroup.shutdown
    if getattr(shutdown, "ends_graphs", False):
        return

    def wrapped(group: dist.ProcessGroup) -> None:
        holders = [holder for ref in _held.pop(group, []) if (holder := ref()) is not None]
        if holders:
            torch.cuda.synchronize()
        for holder in holders:
            holder.end()
        shutdown(group)

    wrapped.ends_graphs = True  # type: ignore[attr-defined]
    dist.ProcessGroup.shutdown = wrapped  # type: ignore[assignment, method-assign]
