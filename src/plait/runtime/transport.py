"""Transport: the steps of moves (rules/moves.py) between the processes of one group.

    all_reduce       the value, in place of a copy
    gather           every rank's rows along one dim, as many as each has; assembled in global order
    reduce_scatter   each rank's rows of the sum, rows that neighbours share sent to both
    share            rows summed among their holders: a padded all-reduce

Rows travel along dim 0 of contiguous buffers, in order of rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait import collectives
from plait.collectives.group import communicator
from plait.passes.partition import Site
from plait.rules.moves import Cut, Step, assemble, count, local, only_own, take, widen
from plait.runtime.symmetric import Idle, Workspace


class Begun:
    """How many collective steps this rank has begun; or of these, how many it has not ended."""

    count = 0

    def __str__(self) -> str:
        return str(self.count)


@dataclass(frozen=True)
class Transport:
    """One rank's end of the moves over `group` (None: alone)."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    backward: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, kw_only=True)
    begun: Begun = field(default_factory=Begun, kw_only=True, compare=False)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Transport:
        if group is None:
            return cls(None, 0, 1)
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def captures(self) -> bool:
        """Whether the group's collectives on CUDA can be captured in a graph."""
        return self.group is None or "nccl" in str(dist.get_backend_config(self.group))

    @property
    def open(self) -> int:
        """Moves that are begun and not waited for yet."""
        return 0

    def arena(self, nbytes: int, device: torch.device) -> Workspace:
        """Memory that all ranks of the group map; collective."""
        return Workspace.on_group(nbytes, self.group, device)

    def in_order(self) -> AbstractContextManager[None]:
        """Around a call of a program that all ranks share. The ways back come in whatever order the
        user takes them."""
        return nullcontext() if self.group is None else communicator(self.group).in_order()

    @contextmanager
    def way_back(self, x: Tensor) -> Iterator[None]:
        """Around a step of a way back. On a device no token goes ahead of it (collectives/group.py): it would hold
        up the host at every step, and graphs have none."""
        with self.backward(), self.in_order() if x.is_cuda else nullcontext():
            yield

    def run(self, step: Step, x: Tensor, cut: Cut | None, algorithm: str) -> Tensor:
        """One step on this rank; all ranks of the group run the same steps in the same order."""
        self.begun.count += step.collective is not None
        return self.carry_out(step, x, cut, algorithm)

    def carry_out(self, step: Step, x: Tensor, cut: Cut | None, algorithm: str) -> Tensor:
        if step.collective is None:
            return local(step, x, cut, self.rank)
        if self.size == 1:
            return x
        if step.action == "all_reduce":
            return self.all_reduce(x, step.op, algorithm)
        assert cut is not None
        mine = cut.rows[self.rank]
        match step.action:
            case "share":
                whole = self.all_reduce(widen(x, cut, mine, mine), "sum", algorithm)
                return take(whole, cut.dim, mine)
            case "gather" | "gather_sum":
                if cut.disjoint:
                    return self._gather(x, cut, algorithm)
                keep = cut.own[self.rank] if step.action == "gather" else mine
                return self.all_reduce(widen(x, cut, mine, keep), "sum", algorithm)
            case "reduce_scatter":
                return self._scatter(x, cut, algorithm)
            case "reduce_scatter_own":
                return only_own(self._scatter(x, cut, algorithm), cut, self.rank)
            case "fetch":
                there = (self.rank + step.by) % self.size
                return self._exchange(x, (self.rank - step.by) % self.size, there, cut, there)
            case "deliver":
                back = (self.rank - step.by) % self.size
                return self._exchange(x, (self.rank + step.by) % self.size, back, cut, self.rank)
        raise AssertionError(step.action)

    def all_reduce(self, x: Tensor, op: str, algorithm: str, fresh: bool = False) -> Tensor:
        """`fresh`: nobody else reads `x`, so it may be summed in place."""
        mine = x if fresh and x.is_contiguous() else x.contiguous().clone()
        return collectives.all_reduce(mine, self.group, algorithm=algorithm, op=op)

    def _gather(self, x: Tensor, cut: Cut, algorithm: str) -> Tensor:
        rows = x.movedim(cut.dim, 0).contiguous()
        sizes = cut.counts()
        whole = collectives.all_gather(rows, sizes, self.group, algorithm=algorithm)
        parts = [p.movedim(0, cut.dim) for p in whole.split(list(sizes))]
        return assemble(parts, cut).contiguous()

    def _exchange(self, x: Tensor, to: int, source: int, cut: Cut, owner: int) -> Tensor:
        """Send rows to one rank and receive from another the rows that `owner` owns."""
        shape = list(x.shape)
        shape[cut.dim] = count(cut.rows[owner])
        out, x = x.new_empty(shape), x.contiguous()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=self.group, group_peer=to),
                dist.P2POp(dist.irecv, out, group=self.group, group_peer=source),
            ]
        )
        for work in works:
            work.wait()
        return out

    def _scatter(self, x: Tensor, cut: Cut, algorithm: str) -> Tensor:
        rows = x.movedim(cut.dim, 0)
        by_rank = torch.cat([take(rows, 0, ranges) for ranges in cut.rows]).contiguous()
        sizes = [count(ranges) for ranges in cut.rows]
        mine = collectives.reduce_scatter(by_rank, sizes, self.group, algorithm=algorithm)
        return mine.movedim(0, cut.dim).contiguous()


@dataclass(frozen=True)
class Still(Transport):
    """Sends nothing: what would come is random, finite and of the right size.

    A program over it does the same work as over its transport, so its time is a floor. Stale or
    zero data would not do: devices draw less power on it, and run faster than they ever will.
    """

    known: dict[Any, Tensor] = field(default_factory=dict, compare=False)

    @property
    def open(self) -> int:
        """Moves that are begun and not waited for yet."""
        return 0

    def arena(self, nbytes: int, device: torch.device) -> Workspace:
        return Idle.on_device(nbytes, self.rank, self.size, device)

    def carry_out(self, step: Step, x: Tensor, cut: Cut | None, algorithm: str) -> Tensor:
        if step.collective is None:
            return local(step, x, cut, self.rank)
        if step.action in ("all_reduce", "share"):
            return self.all_reduce(x, step.op, algorithm)
        assert cut is not None
        if step.action.startswith("reduce_scatter"):
            return take(x, cut.dim, cut.rows[self.rank])
        shape = list(x.shape)
        there = (self.rank + step.by) % self.size
        rows = {"fetch": there, "deliver": self.rank}.get(step.action)
        shape[cut.dim] = cut.size if rows is None else count(cut.rows[rows])
        return self._random(x, tuple(shape))

    def all_reduce(self, x: Tensor, op: str, algorithm: str, fresh: bool = False) -> Tensor:
        return x  # one term of the sum

    def _random(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Kept, so that making it costs no time in a later call."""
        key = shape, x.dtype, x.device
        if key not in self.known:
            made = torch.zeros(shape, dtype=x.dtype, device=x.device)
            self.known[key] = made.normal_() if x.is_floating_point() or x.is_complex() else made
        return self.known[key]


class MoveModule(nn.Module):
    """A site of the partitioned graph, with its dual on the way back."""

    def __init__(
        self,
        site: Site,
        transport: Transport,
        forward: str,
        backward: str,
        *,
        fresh: bool = False,
    ):
        super().__init__()
        self.site, self.transport, self.fresh = site, transport, fresh
        self.algorithms = (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        if self.site.grad and torch.is_grad_enabled() and x.requires_grad:
            return _Move.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]
        c = self.site.conversion
        if self.fresh and c.forward.action == "all_reduce" and not torch.is_grad_enabled():
            if self.transport.size == 1:
                return x
            return self.transport.all_reduce(x, c.forward.op, self.algorithms[0], fresh=True)
        return self.transport.run(c.forward, x, c.cut, self.algorithms[0])

    def extra_repr(self) -> str:
        return f"{self.site.conversion} of {self.site.source}"


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: MoveModule) -> Tensor:
        ctx.module = module
        c = module.site.conversion
        out = module.transport.run(c.forward, x, c.cut, module.algorithms[0])
        return out.view_as(out) if out is x else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        module = ctx.module
        c = module.site.conversion
        with module.transport.way_back(grad):
            return module.transport.run(c.backward, grad, c.cut, module.algorithms[1]), None


class BucketModule(nn.Module):
    """Weights as they come; on the way back the terms of their gradients, summed together (passes/buckets.py)."""

    def __init__(self, sites: Sequence[Site], transport: Transport, algorithm: str) -> None:
        super().__init__()
        self.sites, self.transport, self.algorithm = tuple(sites), transport, algorithm

    def forward(self, *weights: Tensor) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and any(w.requires_grad for w in weights):
            return _Bucket.apply(self, *weights)  # type: ignore[no-any-return,no-untyped-call]
        return weights

    def extra_repr(self) -> str:
        return ", ".join(site.source for site in self.sites)


class _Bucket(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: BucketModule, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.module = module
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        module: BucketModule = ctx.module
        here = [g for g in grads if g is not None]
        every = torch.cat([g.reshape(-1) for g in here])
        with module.transport.way_back(every):
            total = module.transport.run(Step("all_reduce"), every, None, module.algorithm)
        parts = iter(total.split([g.numel() for g in here]))
        return None, *(None if g is None else next(parts).view(g.shape) for g in grads)
