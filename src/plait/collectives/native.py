"""`native`: the backend's own collective, as one more algorithm.

Tensors come here contiguous: gloo's all_reduce, reduce and broadcast read a strided tensor wrongly
and say nothing. Uneven parts are padded to the longest, which no backend's own all_gather or
reduce_scatter does by itself; all_to_all takes uneven parts as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.collectives.run import ReduceOp

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_GLOO_ADDS = (  # ProcessGroupGloo.cpp: GENERATE_ALL_TYPES
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
)
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Group = dist.ProcessGroup


def reduces(dtype: torch.dtype, backend: str) -> bool:
    """Can the backend add up this dtype?"""
    return backend != "gloo" or dtype in _GLOO_ADDS or dtype in (torch.complex64, torch.complex128)


def all_reduce(vector: Tensor, op: ReduceOp, group: Group) -> None:
    dist.all_reduce(vector, _OPS[op], group=group)


def reduce(vector: Tensor, op: ReduceOp, root: int, group: Group) -> None:
    dist.reduce(vector, op=_OPS[op], group=group, group_dst=root)


def broadcast(vector: Tensor, root: int, group: Group) -> None:
    dist.broadcast(_bytes(vector), group=group, group_src=root)


def all_gather(mine: Tensor, parts: Sequence[int], group: Group) -> Tensor:
    """`parts`: the elements of every rank's part."""
    longest = max(parts)
    everything = mine.new_empty(longest * len(parts))
    _ALL_GATHER(_bytes(everything), _bytes(_padded(mine, longest)), group=group)
    if min(parts) == longest:
        return everything
    rows = everything.view(len(parts), longest)
    return torch.cat([row[:part] for row, part in zip(rows, parts, strict=True)])


def reduce_scatter(
    vector: Tensor, parts: Sequence[int], op: ReduceOp, rank: int, group: Group
) -> Tensor:
    longest = max(parts)
    if min(parts) < longest:
        split = torch.split(vector, list(parts))
        vector = torch.cat([_padded(part, longest) for part in split])
    mine = vector.new_empty(longest)
    _REDUCE_SCATTER(mine, vector, _OPS[op], group=group)
    return mine[: parts[rank]]


def all_to_all(
    vector: Tensor, sent: Sequence[int], received: Sequence[int], group: Group
) -> Tensor:
    came = vector.new_empty(sum(received))
    size = vector.element_size()
    into, out = [part * size for part in received], [part * size for part in sent]
    dist.all_to_all_single(_bytes(came), _bytes(vector), into, out, group=group)
    return came


def _bytes(vector: Tensor) -> Tensor:
    """Whatever the dtype: what is not added up is only bytes."""
    return vector.view(torch.uint8)


def _padded(part: Tensor, length: int) -> Tensor:
    if part.numel() == length:
        return part
    return torch.nn.functional.pad(part, (0, length - part.numel()))
