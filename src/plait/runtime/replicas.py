"""Replicas: gradients summed over the data-parallel copies of a rank, beside the backward.

    reduction = replicas.reduce(...)       before a backward
    hooks                                  a weight's last term of the gradient is there
    bucket                                 is launched when it is full, and all buckets before it are
    reduction.finish()                     after the backward: `.grad` of every leaf is the sum

Buckets are the same on all replicas, in the reverse of the order in which weights are used, and are
launched in that order, one after another on a line of their own (streams.py). A weight of which
this replica's loss knows nothing is zeros in its bucket: another replica's may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from plait import collectives
from plait.collectives.group import communicator
from plait.plan.gradients import BUCKET, FIRST
from plait.rules.moves import Cut, Step
from plait.runtime.streams import Handle, Line, line
from plait.runtime.transport import Transport


@dataclass(frozen=True)
class Replicas:
    """This rank's replica, and the ranks with the same weights in the others."""

    transport: Transport
    device: torch.device
    order: dict[str, int] = field(default_factory=dict)  # of use, by node; the first program's

    @property
    def number(self) -> int:
        return self.transport.rank

    @property
    def count(self) -> int:
        return self.transport.size

    @cached_property
    def _line(self) -> Line:
        return line(self.device)

    def _start(self, job: Callable[[dist.ProcessGroup], Tensor]) -> Handle:
        """Whatever the replicas tell each other goes over the one line, in one order."""
        group = self.transport.group
        assert group is not None
        self.transport.begun.count += 1

        def in_order() -> Tensor:
            with communicator(group).in_order():
                return job(group)

        return self._line.start(in_order)

    def start(self, x: Tensor, op: str = "sum", algorithm: str = "native") -> Handle:
        """An all-reduce in place, after what was started before."""
        return self._start(lambda g: collectives.all_reduce(x, g, algorithm=algorithm, op=op))

    def total(self, x: Tensor) -> Tensor:
        return x if self.count == 1 else self.start(x.detach().contiguous().clone()).wait()

    def gather(self, x: Tensor, cut: Cut) -> Tensor:
        """The rows of all replicas."""
        return self._start(lambda _: self.transport.run(Step("gather"), x, cut, "native")).wait()

    def lead(self, values: Sequence[Tensor]) -> None:
        """Replica 0's values, on all."""
        for x in values if self.count > 1 else ():
            told = x.detach().contiguous().reshape(-1).view(torch.uint8).clone()
            self._start(partial(_from_first, told)).wait()
            with torch.no_grad():
                x.copy_(told.view(x.dtype).view(x.shape))

    def used(self, nodes: Sequence[str]) -> None:
        """The order of the first program that is made holds for all."""
        if not self.order:
            self.order.update({node: i for i, node in enumerate(nodes)})

    def buckets(self, leaves: Mapping[str, Tensor]) -> list[list[str]]:
        """The nodes of every bucket, one dtype in each."""
        late = len(self.order)
        nodes = sorted(leaves, key=lambda n: (-self.order.get(n, late), n))
        out: list[list[str]] = []
        room = 0
        for node in nodes:
            x = leaves[node]
            size = x.numel() * x.element_size()
            if not out or size > room or x.dtype != leaves[out[-1][0]].dtype:
                room = BUCKET if out else FIRST
                out.append([])
            out[-1].append(node)
            room -= size
        return out


def _from_first(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.broadcast(x, 0, group, algorithm="native")


@dataclass
class _Bucket:
    nodes: list[str]
    missing: int
    flat: Tensor | None = None
    handle: Handle | None = None


class Reduction:
    """Of one backward. `terms`: how often the gradient of each leaf is added to; `ends`: the flat outputs
    that have a gradient here, of `outputs` in all."""

    def __init__(
        self,
        replicas: Replicas,
        leaves: Mapping[str, Tensor],
        terms: Mapping[str, int],
        ends: Sequence[int],
        outputs: int,
        scale: float,
        algorithm: str,
    ) -> None:
        self.replicas, self.leaves, self.scale, self.algorithm = replicas, leaves, scale, algorithm
        marks = torch.zeros(outputs, dtype=torch.int32, device=replicas.device)
        marks[list(ends)] = 1
        self._ends = replicas.start(marks, "max")
        self._terms = dict(terms)
        self._buckets = [_Bucket(nodes, len(nodes)) for nodes in replicas.buckets(leaves)]
        self._of = {node: b for b in self._buckets for node in b.nodes}
        self._next = 0
        self._hooks = [
            leaf.register_post_accumulate_grad_hook(partial(self._added, node))
            for node, leaf in leaves.items()
        ]
        for node in leaves:
            if not self._terms.get(node):
                self._complete(node)

    def _added(self, node: str, leaf: Tensor) -> None:
        self._terms[node] -= 1
        if self._terms[node] == 0:
            self._complete(node)

    def _complete(self, node: str) -> None:
        self._of[node].missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: _Bucket) -> None:
        self._next += 1
        with torch.no_grad():
            parts = [self._part(self.leaves[n]).reshape(-1) for n in bucket.nodes]
            flat = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
            if self.scale != 1.0:
                flat.mul_(self.scale)
        bucket.flat = flat
        told = torch.view_as_real(flat) if flat.is_complex() else flat
        bucket.handle = self.replicas.start(told, algorithm=self.algorithm)

    @staticmethod
    def _part(leaf: Tensor) -> Tensor:
        """What was added up; the leaf lets go of it."""
        grad, leaf.grad = leaf.grad, None
        return grad if grad is not None else torch.zeros_like(leaf)

    def finish(self) -> list[int]:
        """Wait for all; the outputs on which the loss of any replica depends."""
        for hook in self._hooks:
            hook.remove()
        while self._next < len(self._buckets):  # terms that autograd left out
            self._launch(self._buckets[self._next])
        for bucket in self._buckets:
            assert bucket.handle is not None and bucket.flat is not None
            bucket.handle.wait()
            sizes = [self.leaves[n].numel() for n in bucket.nodes]
            for node, part in zip(bucket.nodes, bucket.flat.split(sizes), strict=True):
                leaf = self.leaves[node]
                assert leaf.grad is None, f"{node} was added to after its bucket had left"
                leaf.grad = part.view(leaf.shape)
        return torch.nonzero(self._ends.wait()).reshape(-1).tolist()  # type: ignore[no-any-return]
