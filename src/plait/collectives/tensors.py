"""The collectives on tensors, without gradients: from a request to contiguous buffers and back.

A tensor that is not contiguous is copied, and copied back where it is written. Booleans are added
up as "any", and a complex number is two real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.collectives import native
from plait.collectives.group import Communicator, communicator
from plait.collectives.request import (
    Algorithm,
    Chooser,
    Request,
    Sizes,
    check_timeout,
    request,
    writable,
)
from plait.collectives.run import Blocks, Flat, ReduceOp
from plait.collectives.schedule import Collective, Schedule, offsets
from plait.errors import CollectiveError


@dataclass(frozen=True)
class Terms:
    """With whom, how, and how long at most."""

    group: dist.ProcessGroup | None = None
    algorithm: Algorithm = "auto"
    chooser: Chooser | None = None
    timeout: float | None = None

    @property
    def rank(self) -> int:
        return communicator(self.group).rank

    @property
    def size(self) -> int:
        return communicator(self.group).size

    def ask(
        self,
        collective: Collective,
        tensor: Tensor,
        op: str | None = None,
        root: int | None = None,
        sizes: Sizes = None,
        written: bool = False,
    ) -> tuple[Communicator, Request]:
        """This rank's request; where it makes none, the other ranks are told before it raises."""
        here = communicator(self.group)
        try:
            check_timeout(collective, self.timeout)
            key = self._key(collective, tensor, op, root, sizes)
            asked = here.asked.get(key)
            if asked is None:
                how = self.algorithm, self.chooser
                asked = request(collective, tensor, (here.rank, here.size), how, op, root, sizes)
                _check_dtype(asked, here.backend(tensor.device.type))
                here.remember(key, asked)
            if written and not (tensor.is_contiguous() or writable(tensor)):
                raise CollectiveError(
                    f"{collective}: elements of the tensor share memory (shape "
                    f"{tuple(tensor.shape)}, strides {tensor.stride()}), so it cannot be written; "
                    "give it memory of its own with .clone(memory_format=torch.contiguous_format)"
                )
        except Exception as error:  # a chooser's own, too: the others must not wait
            here.refuse(collective, error)
            raise
        return here, asked

    def _key(
        self, collective: Collective, tensor: Tensor, op: str | None, root: int | None, sizes: Sizes
    ) -> tuple[Any, ...] | None:
        """What the request is made of; None where that has no key: a chooser may change its mind,
        and True and 1.0 look like 1."""
        plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided
        if not plain or self.chooser is not None or not (root is None or type(root) is int):
            return None
        rows: Sizes = None
        if sizes is not None:
            if not isinstance(sizes, list | tuple) or any(type(row) is not int for row in sizes):
                return None
            rows = tuple(sizes)  # type: ignore[assignment]
        if not isinstance(self.algorithm, str | Schedule):
            return None
        where = tensor.device.type
        return collective, tensor.dtype, tensor.shape, where, op, root, rows, self.algorithm


def _check_dtype(asked: Request, backend: str) -> None:
    if asked.schedule is None and asked.op and not native.reduces(asked.dtype, backend):
        raise CollectiveError(
            f"{asked.collective}: {backend} does not add {asked.dtype}; algorithm='ring' does"
        )


def all_reduce(tensor: Tensor, op: str, terms: Terms) -> Tensor:
    here, asked = terms.ask("all_reduce", tensor, op, written=True)
    vector = _vector(tensor)
    with here.call(asked, tensor.device, terms.timeout):
        _carry_out(here, asked, vector)
    return _written(tensor, vector)


def broadcast(tensor: Tensor, root: int, terms: Terms) -> Tensor:
    here, asked = terms.ask("broadcast", tensor, root=root, written=True)
    vector = _vector(tensor)
    with here.call(asked, tensor.device, terms.timeout):
        _carry_out(here, asked, vector)
    return _written(tensor, vector) if here.rank != root else tensor


def reduce(tensor: Tensor, root: int, op: str, terms: Terms) -> Tensor:
    here, asked = terms.ask("reduce", tensor, op, root, written=True)
    vector = _vector(tensor)
    if here.rank == root:
        with here.call(asked, tensor.device, terms.timeout):
            _carry_out(here, asked, vector)
        return _written(tensor, vector)
    with (
        here.pool.borrow(vector.numel(), vector.dtype, vector.device) as partial,
        here.call(asked, tensor.device, terms.timeout),
    ):
        _carry_out(here, asked, partial.copy_(vector))
    return tensor


def all_gather(tensor: Tensor, sizes: Sizes, terms: Terms) -> Tensor:
    here, asked = terms.ask("all_gather", tensor, sizes=sizes)
    mine = _vector(tensor)
    with here.call(asked, tensor.device, terms.timeout):
        if asked.schedule is None and here.size > 1:
            here.token(str(asked))
            everything = native.all_gather(mine, asked.parts, here.group)
        else:
            everything = mine.new_empty(sum(asked.parts))
            _part(everything, asked, here.rank).copy_(mine)
            _carry_out(here, asked, everything)
    return _shaped(everything, asked, sum(asked.rows))


def reduce_scatter(tensor: Tensor, sizes: Sizes, op: str, terms: Terms) -> Tensor:
    here, asked = terms.ask("reduce_scatter", tensor, op, sizes=sizes)
    vector = _vector(tensor)
    with here.call(asked, tensor.device, terms.timeout):
        if asked.schedule is None and here.size > 1:
            here.token(str(asked))
            kind, parts = _op(asked), asked.parts
            mine = native.reduce_scatter(vector, parts, kind, here.rank, here.group)
        else:
            with here.pool.borrow(vector.numel(), vector.dtype, vector.device) as partial:
                _carry_out(here, asked, partial.copy_(vector))
                mine = _part(partial, asked, here.rank).clone()
    return _shaped(mine, asked, asked.rows[here.rank])


def all_to_all(tensor: Tensor, sizes: Sizes, terms: Terms) -> Tensor:
    here, asked = terms.ask("all_to_all", tensor, sizes=sizes)
    n, rank, parts = here.size, here.rank, asked.parts
    vector = _vector(tensor)
    sent, received = parts[rank * n : (rank + 1) * n], parts[rank::n]
    with here.call(asked, tensor.device, terms.timeout):
        if asked.schedule is None and n > 1:
            here.token(str(asked))
            came = native.all_to_all(vector, sent, received, here.group)
        else:
            came = vector.new_empty(sum(received))
            leaving = torch.split(vector, list(sent))
            _exchange(here, asked, leaving, torch.split(came, list(received)))
    return _shaped(came, asked, sum(asked.rows[rank::n]))


def _exchange(
    here: Communicator, asked: Request, leaving: Sequence[Tensor], coming: Sequence[Tensor]
) -> None:
    """An all_to_all by its schedule, between blocks that lie wherever they do on each rank."""
    n, rank, parts = here.size, here.rank, asked.parts
    coming[rank].copy_(leaving[rank])
    if asked.schedule is None or n == 1:
        return
    blocks = {rank * n + d: leaving[d] for d in range(n) if d != rank}
    blocks |= {s * n + rank: coming[s] for s in range(n) if s != rank}
    for block in _passing(asked.schedule, rank):
        blocks[block] = leaving[0].new_empty(parts[block])
    begins = offsets(parts)
    memory = Blocks({begins[b]: tensor for b, tensor in blocks.items() if parts[b]})
    here.perform(asked.schedule, memory, sum(parts), leaving[0], str(asked), parts)


# --- in and out -----------------------------------------------------------------------------------


def _carry_out(here: Communicator, asked: Request, vector: Tensor) -> None:
    """An all_reduce, reduce or broadcast in place, or any other by its schedule."""
    if here.size == 1:
        return
    if asked.schedule is not None:
        parts = asked.parts if asked.sizes else None
        total, words = vector.numel(), str(asked)
        here.perform(asked.schedule, Flat(vector), total, vector, words, parts, _op(asked))
        return
    here.token(str(asked))
    if asked.collective == "all_reduce":
        native.all_reduce(vector, _op(asked), here.group)
    elif asked.collective == "reduce":
        native.reduce(vector, _op(asked), asked.root or 0, here.group)
    else:
        native.broadcast(vector, asked.root or 0, here.group)


def _op(asked: Request) -> ReduceOp:
    """Booleans travel as bytes of 0 and 1, whose sum is "any"."""
    if asked.dtype == torch.bool and asked.op == "sum":
        return "max"
    return asked.op or "sum"


def _vector(tensor: Tensor) -> Tensor:
    """The tensor's numbers side by side; its own memory, if they are so there."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    flat = (plain.view(torch.uint8) if plain.dtype == torch.bool else plain).view(-1)
    return flat.as_strided(flat.shape, (1,))  # one number alone may have any stride


def _written(tensor: Tensor, vector: Tensor) -> Tensor:
    """The tensor, with the numbers of the vector in it."""
    held = _typed(vector, tensor.dtype).view(tensor.shape)
    if tensor.is_contiguous() and held.data_ptr() == tensor.data_ptr():
        torch.autograd.graph.increment_version(tensor)  # transfers write where autograd looks not
    else:
        tensor.detach().copy_(held)
    return tensor


def _part(vector: Tensor, asked: Request, rank: int) -> Tensor:
    """The rank's own part of a vector."""
    begin = offsets(asked.parts)[rank]
    return vector[begin : begin + asked.parts[rank]]


def _shaped(vector: Tensor, asked: Request, rows: int) -> Tensor:
    return _typed(vector, asked.dtype).view(rows, *asked.shape)


def _typed(vector: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(vector.view(-1, 2))
    return vector.view(dtype)


@lru_cache(maxsize=256)
def _passing(schedule: Schedule, rank: int) -> frozenset[int]:
    """The blocks of an all_to_all that pass through a rank on their way between two others."""
    n, pieces = schedule.n, schedule.chunks // schedule.n**2
    blocks = {t.chunk // pieces for _, t in schedule.transfers() if t.target == rank}
    return frozenset(b for b in blocks if b // n != rank and b % n != rank)
