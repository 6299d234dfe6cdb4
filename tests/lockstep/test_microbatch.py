"""Micro-batches run one after another in this process: together they give what the whole batch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from plait.capture import capture
from plait.capture.written import SDPA
from plait.passes.microbatch import WHOLE_COPY, Batch, find, piece, why_uncut
from plait.rules.aten import table
from plait.rules.describe import describe
from plait.rules.facts import Pattern
from plait.rules.moves import Cut, take
from tests.cases.blocks import Net, linear, weight
from tests.cases.case import probe
from tests.compare import demand, differences


def in_pieces(model: nn.Module, args: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    """The outputs of a batch that has to be cut: rows joined, terms added."""
    program = capture(model, args, training=True)
    description = describe(program, table())
    batch = find(program, description, count)
    assert isinstance(batch, Batch), batch
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    feed = {w.node: values[w.name] for w in program.weights}
    inputs = {i.path: (i.node, x) for i, x in zip(program.inputs, pytree.tree_leaves(args), strict=True)}
    nodes = {n.name: n for n in program.graph.nodes}
    assert batch.split.dim(description.dims[nodes[str(program.inputs[0].node)]][0]) == 0, batch.split
    gathered: list[list[Tensor]] = []
    for k in range(batch.pieces):
        part = piece(program, description, batch, k)
        for entry in part.inputs:
            name, x = inputs[entry.path.removesuffix(WHOLE_COPY)]
            split, dims = batch.split, description.dims[nodes[str(name)]][0]
            cut = Cut.of(dims, split) if split.dim(dims) is not None else None
            whole = cut is None or entry.path.endswith(WHOLE_COPY)
            feed[str(entry.node)] = x if whole or cut is None else take(x, cut.dim, cut.rows[k])
        names = [n.name for n in part.graph.nodes if n.op == "placeholder"]
        gathered.append(list(fx.GraphModule(dict(part.constants), part.graph)(*(feed[n] for n in names))))
    items = program.graph.output_node().args[0]
    together = []
    for i, parts in enumerate(zip(*gathered, strict=True)):
        item = items[i]  # type: ignore[index]
        if isinstance(item, fx.Node) and batch.layouts[item].kind == "shard":
            dim = batch.split.dim(description.dims[item][0])
            assert dim is not None
            together.append(torch.cat(parts, dim))
        else:
            partial = isinstance(item, fx.Node) and batch.layouts[item].kind == "partial"
            together.append(sum(parts) if partial else parts[0])
    return tuple(together)


def prove(model: nn.Module, *args: Tensor, count: int = 3) -> None:
    """Outputs and gradients of uneven pieces are those of the whole batch."""
    model = model.double()
    found = []
    for run in (lambda: in_pieces(model, args, count), lambda: pytree.tree_leaves(model(*args))):
        model.zero_grad()
        out = tuple(run())
        probe(out).backward()
        found.append((out, {n: p.grad for n, p in model.named_parameters()}))
    demand(differences(found[0], found[1]))


# -- transforms --------------------------------------------------------------------------------------

SHAPE = (4, 6, 8)
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda y: torch.fft.irfft(torch.fft.rfft(y, dim=1) * 2j, n=7, dim=1),
    "both": lambda y: torch.fft.fft2(y).real + torch.fft.fftn(y, dim=(1, 2)).imag,
    "there and back": lambda y: torch.fft.ifft(torch.fft.fft(y, n=9), n=8).abs(),
    "hermitian": lambda y: torch.fft.hfft(torch.fft.ihfft(y), n=8),
    "shifted": lambda y: torch.fft.fftshift(torch.fft.fft(y), dim=-1).conj().imag,
    "spectrum": lambda y: torch.stft(y.flatten(1), 14, 4, return_complex=True).abs().transpose(1, 2),
    "complex of two": lambda y: (torch.complex(y, y.sin()) * torch.polar(y.abs(), y)).angle(),
    "detached": lambda y: (torch.fft.fft(y).detach() * torch.fft.fft(y)).real,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.sample(3)
def test_transforms_of_other_dims_are_cut(name: str) -> None:
    torch.manual_seed(0)
    transform = TRANSFORMS[name]

    def run(s: Any, x: Tensor) -> Tensor:
        return transform(s.up(x)) @ s.down  # type: ignore[no-any-return]

    prove(Net(run, up=linear(6, 8), down=weight(8, 5)), torch.randn(4, 6, 6).double())


# -- rows counted beside an index ----------------------------------------------------------------------

LAST, FEW = torch.tensor([2, -1, 0, 4]), torch.tensor([[1, 3], [0, 0], [4, 2], [-1, 1]])
ROWS = torch.arange(4)


def _written(y: Tensor, last: Tensor, few: Tensor) -> Tensor:
    y = y.clone()
    y[ROWS, last] = y[:, 1] * 2
    return y.index_put((ROWS[:, None], few), y[:, :2].exp(), accumulate=True)


COUNTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "last token": lambda y, last, few: y[torch.arange(y.size(0)), last],
    "by constants": lambda y, last, few: y[ROWS, LAST - 1] + y[ROWS[:, None], FEW].sum(1),
    "some": lambda y, last, few: y[ROWS[:, None], few],
    "some columns": lambda y, last, few: y.transpose(1, 2)[ROWS[:, None], :, few],
    "of two dims": lambda y, last, few: y.unflatten(2, (2, 4))[ROWS[:, None], few, torch.arange(2)].repeat(1, 1, 2),
    "in order": lambda y, last, few: y[ROWS] + y[:, torch.arange(5)],
    "written": _written,
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.sample(3)
def test_rows_that_are_counted_are_cut(name: str) -> None:
    torch.manual_seed(0)
    pick = COUNTED[name]

    def run(s: Any, x: Tensor, last: Tensor, few: Tensor) -> Tensor:
        return pick(s.up(x), last, few) @ s.down  # type: ignore[no-any-return]

    prove(Net(run, up=linear(6, 8), down=weight(8, 5)), torch.randn(4, 5, 6).double(), LAST, FEW)


def test_attention_that_drops_behind_a_mask_is_cut() -> None:
    def run(s: Any, x: Tensor, seen: Tensor) -> Tensor:
        q = s.up(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, seen[:, None, None], dropout_p=0.1)

    args = torch.randn(4, 5, 6), torch.rand(4, 5) > 0.3
    assert not why_uncut(capture(Net(run, up=linear(6, 8)), args, training=True))


def test_a_dynamic_size_is_not_cut_and_said() -> None:
    class Last(nn.Linear):
        def forward(self, x: Tensor, last: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[torch.arange(x.size(0)), last]

    args = torch.randn(4, 5, 6), LAST
    assert not why_uncut(capture(Last(6, 8), args))
    found = why_uncut(capture(Last(6, 8), args, dynamic={"x": {0: "rows"}, "last": {0: "rows"}}))
    assert found == "dim 0 of args[0] is dynamic, and such a size is not cut"


@pytest.mark.parametrize("batched", [True, False])
def test_what_a_constant_mask_shows_is_known_of_a_piece_with_all_its_rows(batched: bool) -> None:
    seen = Pattern.parse("window(3)").allowed(5, 5)

    def run(s: Any, x: Tensor, y: Tensor) -> Tensor:
        q, k = s.up(x).unflatten(-1, (2, 4)), s.up(x if batched else y).unflatten(-1, (2, 4))
        return F.scaled_dot_product_attention(q.transpose(-2, -3), *[k.transpose(-2, -3)] * 2, seen.clone())

    args = (torch.randn(4, 5, 6),) * 2 if batched else (torch.randn(5, 6), torch.randn(1, 5, 6)[0])
    program = capture(Net(run, up=linear(6, 8)), args)
    description = describe(program, table())
    batch = find(program, description, 2)
    assert isinstance(batch, Batch), batch
    part = piece(program, description, batch, 0)
    (node,) = [n for n in part.graph.nodes if n.target is SDPA]
    access = describe(part, table()).accesses[node]
    assert node.meta.get("mask") == ("window(3)" if batched else None)
    assert bool(access.so_far) == batched


# -- rows that are sorted, and put back ----------------------------------------------------------------

E, K = 4, 2  # experts, and choices of a row


def by_group(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    pytest.importorskip("transformers.integrations.moe")
    return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)  # type: ignore[no-any-return]


def ends_of(keys: Tensor) -> Tensor:
    return torch.histc(keys.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)


def _indexed(s: Any, x: Tensor, keys: Tensor) -> Tensor:
    sorted_keys, order = keys.flatten().sort()
    y = by_group(x[order // K], s.w, ends_of(sorted_keys)).relu()
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0))
    return y[back].view(*keys.shape, -1).sum(1)


def _argsorted(s: Any, x: Tensor, keys: Tensor) -> Tensor:
    order = keys.flatten().argsort(stable=True)
    rows = x.repeat_interleave(K, 0)
    y = by_group(rows[order], s.w, ends_of(keys.flatten()[order])).tanh()
    y = y * rows[order].mean(-1, keepdim=True) + s.w[0, 0]
    return y[order.argsort()].unflatten(0, keys.shape).sum(1)


def _put(s: Any, x: Tensor, keys: Tensor) -> Tensor:
    order = keys.flatten().argsort()
    y = by_group(x.repeat_interleave(K, 0)[order], s.w, ends_of(keys.flatten()))
    return torch.zeros_like(y).index_put((order,), y).unflatten(0, keys.shape).sum(1)


ROUTED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {"indexed": _indexed, "argsorted": _argsorted, "put": _put}


def mixture(run: Callable[[Any, Tensor, Tensor], Tensor]) -> Net:
    def forward(s: Any, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return run(s, flat, s.gate(flat).topk(K)[1]).unflatten(0, x.shape[:2]) @ s.out  # type: ignore[no-any-return]

    return Net(forward, gate=linear(6, E), w=weight(E, 6, 8), out=weight(8, 5))


@pytest.mark.parametrize("bias", [0.0, 50.0], ids=["routed", "all on the same"])
@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.sample(2)
def test_rows_sorted_by_expert_are_cut(name: str, bias: float) -> None:
    torch.manual_seed(0)
    model = mixture(ROUTED[name])
    with torch.no_grad():
        model.gate.bias[:2] += bias
    prove(model, torch.randn(4, 3, 6).double())


def _of_others(s: Any, x: Tensor, keys: Tensor) -> Tensor:
    """Ends of other keys than those that are sorted."""
    order = keys.flatten().argsort()
    y = by_group(x[order // K], s.w, ends_of(s.gate(x).topk(K, largest=False)[1].flatten()))
    return y[order.argsort()].unflatten(0, keys.shape).sum(1)


def _two_orders(s: Any, x: Tensor, keys: Tensor) -> Tensor:
    order, other = keys.flatten().argsort(), keys.flatten().argsort(descending=False, stable=True)
    y = by_group(x[order // K], s.w, ends_of(keys.flatten()))
    return y[other.argsort()].unflatten(0, keys.shape).sum(1)


def _backwards(s: Any, x: Tensor, keys: Tensor) -> Tensor:
    order = keys.flatten().argsort(descending=True)
    y = by_group(x[order // K], s.w, ends_of(keys.flatten()))
    return y[order.argsort()].unflatten(0, keys.shape).sum(1)


def _beside_rows(s: Any, x: Tensor, keys: Tensor) -> Tensor:
    """Sorted rows beside others."""
    order, rows = keys.flatten().argsort(), x.repeat_interleave(K, 0)
    y = by_group(rows[order] + rows, s.w, ends_of(keys.flatten()))
    return y[order.argsort()].unflatten(0, keys.shape).sum(1)


def _not_put_back(s: Any, x: Tensor, keys: Tensor) -> Tensor:
    order = keys.flatten().argsort()
    return by_group(x[order // K], s.w, ends_of(keys.flatten())).unflatten(0, keys.shape).sum(1)


def _negative(s: Any, x: Tensor, keys: Tensor) -> Tensor:
    return _indexed(s, x, keys - 1)


def _counted(s: Any, x: Tensor, keys: Tensor) -> Tensor:
    """How many rows an expert has is asked for by another."""
    return _indexed(s, x, keys) * torch.histc(keys.double(), E, 0, E - 1)[0].detach()


def _in_places(s: Any, x: Tensor, keys: Tensor) -> Tensor:
    """Which place a row has is a number of its own."""
    order = keys.flatten().argsort()
    return _indexed(s, x, keys) + order.argsort().view(keys.shape).sum(1, keepdim=True).to(x.dtype)


@pytest.mark.parametrize(
    "run",
    [_of_others, _two_orders, _backwards, _beside_rows, _not_put_back, _negative, _counted, _in_places],
)
@pytest.mark.sample(3)
def test_what_an_order_of_their_own_would_change_is_not_cut(run: Any) -> None:
    assert why_uncut(capture(mixture(run), (torch.randn(4, 3, 6),), training=True))
