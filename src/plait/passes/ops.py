"""Plait's own operators: what a rank runs where an ATen operator has no local form of its own.

They are plain functions of tensors, differentiable by autograd, and stand in partitioned graphs as
call_function nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.rules.equation import Ranges
from plait.rules.moves import take

Rows = tuple[tuple[int, int, Ranges], ...]  # (dim, global size, the rows held) for each cut dim


def embedding_rows(
    weight: Tensor, ids: Tensor, padding_idx: int, size: int, rows: Ranges
) -> Tensor:
    """`v d, * -> * d` where `weight` holds only `rows` of v; other ids give zeros (a partial)."""
    local, held = local_index(ids, rows, size)
    if padding_idx >= 0:
        at, inside = local_index(torch.tensor(padding_idx), rows, size)
        padding_idx = int(at) if bool(inside) else -1
    out = torch.ops.aten.embedding(weight, local, padding_idx)
    foreign: Tensor = ~held.unsqueeze(-1)
    return torch.masked_fill(out, foreign, 0)


def local_index(ids: Tensor, rows: Ranges, size: int) -> tuple[Tensor, Tensor]:
    """Global row numbers -> (number among `rows`, or 0; whether it is one of them).

    What is no row of `size` stays as it is: the operator that reads it refuses it, on every rank, as
    the unsplit one would.
    """
    local = torch.where((ids < 0) | (ids >= size), ids, 0)
    held = torch.zeros_like(ids, dtype=torch.bool)
    offset = 0
    for lo, hi in rows:
        inside = (ids >= lo) & (ids < hi)
        local = torch.where(inside, ids - lo + offset, local)
        held = held | inside
        offset += hi - lo
    return local, held


def picked_rows(x: Tensor, target: Tensor, ignored: int, size: int, rows: Ranges) -> Tensor:
    """`t v, t -> t`: the element of each row that `target` names, 0 where another rank holds it."""
    local, held = local_index(target.masked_fill(target == ignored, 0), rows, size)
    return x.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~held, 0)


def some_rows(x: Tensor, dim: int, start: int, end: int, rows: Ranges) -> Tensor:
    """Rows `start` to `end` of a dim of which `x` holds `rows`; others are zeros (a partial)."""
    pieces = [x.narrow(dim, 0, 0)]  # a rank that holds none of them has a gradient as well
    at = 0
    for lo, hi in rows:
        first, last = max(lo, start), min(hi, end)
        if first < last:
            pieces += [_zeros(x, dim, first - start), x.narrow(dim, at + first - lo, last - first)]
            start = last
        at += hi - lo
    return torch.cat([*pieces, _zeros(x, dim, end - start)], dim)


def _zeros(x: Tensor, dim: int, count: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = count
    return x.new_zeros(shape)


def packed_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """`* i, o i, o -> * o` by each of the weights: one matmul where they lie one behind the other."""
    together = packed(weights, biases)
    if together is None:
        shifts: Sequence[Tensor | None] = biases or [None] * len(weights)
        pairs = zip(weights, shifts, strict=True)
        return tuple(torch.nn.functional.linear(x, w, b) for w, b in pairs)
    return together.apart(torch.nn.functional.linear(x, together.weight, together.bias))


@dataclass(frozen=True)
class Packed:
    """Weights, and biases, that lie one behind the other, as one; gradients come to each of them."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]
    reached: list[int]

    def apart(self, out: Tensor) -> tuple[Tensor, ...]:
        """The columns of each."""
        return _Apart.apply(out, self.sizes, self.reached)  # type: ignore[no-any-return, no-untyped-call]


def packed(weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Packed | None:
    """None where they do not: somebody has moved one of them."""
    weight, bias = joined(weights), joined(biases)
    if weight is None or (biases and bias is None):
        return None
    sizes, reached = [w.shape[0] for w in weights], list[int]()
    every = _Joined.apply(weight, reached, *weights)  # type: ignore[no-untyped-call]
    shift = _Joined.apply(bias, reached, *biases) if biases else None  # type: ignore[no-untyped-call]
    return Packed(every, shift, sizes, reached)


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """All rows of `parts` as one tensor over the same memory; None where it is not in one run."""
    if not parts or parts[0].is_meta:
        return None
    at, memory = parts[0].storage_offset(), parts[0].untyped_storage().data_ptr()
    for part in parts:
        here = part.storage_offset() == at and part.untyped_storage().data_ptr() == memory
        if not here or not part.is_contiguous():
            return None
        at += part.numel()
    first = parts[0].detach()
    return first.as_strided((sum(p.shape[0] for p in parts), *first.shape[1:]), first.stride())


class _Joined(torch.autograd.Function):
    """Rows of several as one tensor over their memory. Of those that are not `reached` there is no gradient, as
    with matmuls of their own: not zeros."""

    @staticmethod
    def forward(ctx: Any, every: Tensor, reached: list[int], *parts: Tensor) -> Tensor:
        ctx.reached, ctx.sizes = reached, [p.shape[0] for p in parts]
        return every.view_as(every)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = grad.split(ctx.sizes)
        return None, None, *(g if i in ctx.reached else None for i, g in enumerate(rows))


class _Apart(torch.autograd.Function):
    """The columns of each; on the way back it notes which of them are `reached` by the loss."""

    @staticmethod
    def forward(ctx: Any, every: Tensor, sizes: list[int], reached: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.reached, ctx.like = sizes, reached, (every.shape[:-1], every.dtype, every.device)
        return every.split(sizes, -1)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.reached[:] = [i for i, g in enumerate(grads) if g is not None]
        if not ctx.reached:
            return None, None, None
        shape, dtype, device = ctx.like
        pairs = zip(grads, ctx.sizes, strict=True)
        whole = [torch.zeros(*shape, n, dtype=dtype, device=device) if g is None else g for g, n in pairs]
        return torch.cat(whole, -1), None, None


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention of queries that are the last of the keys: each sees those up to its own."""
    from torch.nn.attention.bias import causal_lower_right  # which imports the tracer: seconds

    first = query.shape[-2] == key.shape[-2]
    mask = None if first else causal_lower_right(query.shape[-2], key.shape[-2])
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=first, scale=scale
    )


def grouped_matmul(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """`(e n_e) i, e i o, e -> (e n_e) o`: row n meets the weight of the group that it stands in.

    The kernel wants rows of whole 16 bytes, forward and backward; a share of a width need not have
    them, and is padded with zeros.
    """
    step = 16 // x.element_size()
    i, o = weight.shape[1:]
    if i % step or o % step:
        x = torch.nn.functional.pad(x, (0, -i % step))
        weight = torch.nn.functional.pad(weight, (0, -o % step, 0, -i % step))
    return torch.ops.aten._grouped_mm(x, weight, offs)[:, :o]  # type: ignore[no-any-return]


def uniform(like: Tensor, seed: Tensor, salt: int, rows: Rows) -> Tensor:
    """One number in [0, 1) an element, a function of (seed, salt, the element's global index).

    So a value that is whole draws the same numbers on every rank and one that is split draws what
    the whole one would: the split does not change the model. The mixing is splitmix64's finalizer
    (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) on 64-bit integers.
    """
    index = torch.zeros((), dtype=torch.int64, device=like.device)
    cut = {dim: (size, ranges) for dim, size, ranges in rows}
    stride = 1
    for dim in reversed(range(like.dim())):
        size, ranges = cut.get(dim, (like.shape[dim], ((0, like.shape[dim]),)))
        held = torch.cat([torch.arange(lo, hi, device=like.device) for lo, hi in ranges])
        shape = [1] * like.dim()
        shape[dim] = -1
        index = index + held.view(shape) * stride
        stride *= size
    bits = _mix(index + _mix(seed.to(like.device) + salt * 0x632BE59BD9B4E019 % 2**63))
    return ((bits >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = z * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
    z = (z ^ ((z >> 30) & (2**34 - 1))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ ((z >> 27) & (2**37 - 1))) * -7723592293110705685  # 0x94D049BB133111EB
    return z ^ ((z >> 31) & (2**33 - 1))


def dropout(x: Tensor, p: float, seed: Tensor, salt: int, rows: Rows) -> Tensor:
    """Zero with probability `p`, the rest scaled by 1 / (1 - p); drawn by global element index."""
    return native_dropout(x, p, seed, salt, rows)[0]


def native_dropout(
    x: Tensor, p: float, seed: Tensor, salt: int, rows: Rows
) -> tuple[Tensor, Tensor]:
    """`dropout`, and which elements it kept."""
    keep = uniform(x.detach(), seed, salt, rows) >= p
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    return x * (keep.to(x.dtype) * scale), keep


def drawn(name: str, seed: Tensor, salt: int, /, *args: Any, **kwargs: Any) -> Any:
    """An operator of torch's that draws, by generators in a state of its own; they are put back.

    The state is a function of (seed, salt), so every rank draws the same.
    """
    operator: Any = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part)
    if seed.is_meta:
        return operator(*args, **kwargs)
    own = int(_mix(seed.cpu() + salt * 0x632BE59BD9B4E019 % 2**63)) % 2**63
    devices = {x.device for x in args if isinstance(x, Tensor)} | {kwargs.get("device")}
    cuda = [d for d in devices if isinstance(d, torch.device) and d.type == "cuda"]
    with torch.random.fork_rng(cuda):
        torch.default_generator.manual_seed(own)
        for device in cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(own)
        return operator(*args, **kwargs)


def nll(lse: Tensor, picked: Tensor, mean: Tensor | None, target: Tensor, options: str) -> Tensor:
    """Cross-entropy from log-sum-exp, the target's logit and the mean logit.

    `options`: "reduction ignore_index label_smoothing" as text, so that the graph prints on a line.
    """
    reduction, ignored, smoothing = options.split()
    eps = float(smoothing)
    valid = target != int(ignored)
    loss = lse - picked
    if mean is not None:
        loss = (1 - eps) * loss + eps * (lse - mean)
    loss = loss.masked_fill(~valid, 0)
    match reduction:
        case "0":
            return loss
        case "1":
            return loss.sum() / valid.sum()
        case _:
            return loss.sum()


def take_rows(x: Tensor, dim: int, rows: Ranges) -> Tensor:
    """One chunk of a value: its rows along `dim`, in the order of `rows`."""
    return take(x, dim, rows)


def join_rows(parts: Sequence[Tensor], dim: int, rows: Sequence[Ranges]) -> Tensor:
    """The value from its chunks, each of which holds `rows[i]`."""
    runs: list[tuple[int, Tensor]] = []
    for part, held in zip(parts, rows, strict=True):
        pieces = (
            part.split([hi - lo for lo, hi in held], dim) if len(held) > 1 else (part,) * len(held)
        )
        runs += [(lo, piece) for (lo, _), piece in zip(held, pieces, strict=True)]
    return torch.cat([piece for _, piece in sorted(runs, key=lambda run: run[0])], dim)


def sum_terms(*terms: Tensor) -> Tensor:
    """The terms in the order given, added in fp32 where narrower: bits depend on nothing else."""
    dtype = terms[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term
    return total.to(dtype)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """`* d -> * d`: the sum of `x` and `residual`, and its norm over d, as the separate operators do.

    `kind`: "rms", "rms_rounded" (the row is rounded to its dtype before the weight), or "layer".
    """
    total = x if residual is None else residual + x
    if kind == "layer":
        return total, torch.nn.functional.layer_norm(total, weight.shape, weight, bias, eps)
    wide = total.to(torch.float32)
    rows = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if kind == "rms_rounded":
        rows = rows.to(total.dtype)
    return total, (weight * rows).to(total.dtype)
