"""Small models of odd kinds as pretend ranks: outputs and gradients, and what has to be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.capture import capture
from plait.errors import CaptureError
from tests import pretend
from tests.cases import Setup
from tests.cases.blocks import Net, linear, weight
from tests.compare import demand, discrepancies, plain

Made = tuple[nn.Module, tuple[Any, ...], str]  # with the names of weights that have to be split


def learned(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


# -- detached, then changed in place -------------------------------------------------------------------


def _detached(s: Net, x: Tensor) -> Tensor:
    y = s.up(x).detach()
    y[:, 2:5].mul_(s.scale)
    y += s.shift
    return y @ s.down  # type: ignore[no-any-return]


def _no_grad(s: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = s.up(x) * 2
    y = y.to(x.dtype)
    y += s.shift
    return (y + s.up(x)) @ s.down  # type: ignore[no-any-return]


def _of(run: Callable[..., Tensor]) -> Made:
    parts = dict(up=linear(8, 12), scale=weight(3), shift=weight(12), down=weight(12, 5))
    return Net(run, **parts), (learned(5, 8),), "up.weight down"


def _read_later(s: Net, x: Tensor) -> Tensor:
    y = s.up(x)
    z = y.detach()
    z += s.shift
    return (z * y) @ s.down  # type: ignore[no-any-return]


def test_what_was_detached_and_changed_is_not_read() -> None:
    model, args, _ = _of(_read_later)
    with pytest.raises(CaptureError, match="in place what was detached .* read later"):
        capture(model, args, training=True)


# -- weights whose two dims are one --------------------------------------------------------------------


def _residuals() -> Made:
    def run(s: Net, x: Tensor) -> Tensor:
        x = x + s.a(x).tanh()
        x = x + torch.addmm(s.c, x, s.b).relu()
        x = x + s.conv(x.t()[None])[0].t().tanh()
        return x @ s.out  # type: ignore[no-any-return]

    parts = dict(a=linear(8, 8), b=weight(8, 8), c=weight(8), conv=nn.Conv1d(8, 8, 3, padding=1), out=weight(8, 5))
    return Net(run, **parts), (learned(5, 8),), "a.weight b conv.weight out"


def _head_of_the_width() -> Made:
    """A dense of the model's width before a vocabulary that is also the embedding."""

    def run(s: Net, ids: Tensor) -> Tensor:
        return F.linear(s.norm(F.gelu(s.dense(s.table(ids)))), s.table.weight)

    parts = dict(table=nn.Embedding(17, 12), dense=linear(12, 12), norm=nn.LayerNorm(12))
    return Net(run, **parts), (torch.randint(0, 17, (2, 5)),), "dense.weight table.weight"


# -- windows -------------------------------------------------------------------------------------------


def _grouped_convolutions() -> Made:
    convs = (
        nn.Conv2d(6, 12, 3, padding=1, groups=3), nn.ReLU(), nn.Conv2d(12, 24, 3, groups=12), nn.ReLU(),
        nn.Conv2d(24, 12, 3, groups=6, stride=2),
    )  # fmt: skip
    return nn.Sequential(*convs), (learned(2, 6, 9, 9),), "0.weight 2.weight 4.weight"


def _transposed_convolutions() -> Made:
    convs = (
        nn.Conv1d(6, 12, 3), nn.ReLU(), nn.ConvTranspose1d(12, 9, 3, stride=2, output_padding=1), nn.ReLU(),
        nn.ConvTranspose1d(9, 6, 2, groups=3), nn.Conv1d(6, 5, 3, padding=1, padding_mode="circular"),
    )  # fmt: skip
    return nn.Sequential(*convs), (learned(2, 6, 9),), "0.weight 2.weight 4.weight"


def _without_a_batch() -> Made:
    convs = (nn.Conv1d(6, 12, 3, padding=1), nn.ReLU(), nn.Conv1d(12, 5, 3), nn.ReflectionPad1d(2))
    return nn.Sequential(*convs), (learned(6, 9),), "0.weight 2.weight"


def _norms_of_images() -> Made:
    parts = (
        nn.Conv2d(3, 12, 3), nn.InstanceNorm2d(12, affine=True), nn.ReLU(), nn.Conv2d(12, 12, 1),
        nn.LocalResponseNorm(3), nn.AdaptiveMaxPool2d(3), nn.Conv2d(12, 5, 1),
    )  # fmt: skip
    return nn.Sequential(*parts), (learned(2, 3, 6, 6),), "0.weight 3.weight 6.weight"


def _norms_by_constants() -> Made:
    """Vectors that do not vary, which torch's kernels read by address."""

    def run(s: Net, x: Tensor) -> Tensor:
        ones, zeros = torch.ones(12).to(x), torch.zeros(12).to(x)
        y = F.batch_norm(s.a(x), zeros, ones) + F.batch_norm(s.a(x), None, None, ones * 0.5, training=True)
        return F.group_norm(y, 3, ones * 2, zeros) @ s.out  # type: ignore[no-any-return]

    return Net(run, a=linear(8, 12), out=weight(12, 3)), (learned(5, 8),), "a.weight out"


def _resized() -> Made:
    def run(s: Net, x: Tensor) -> Tensor:
        x = F.pixel_shuffle(s.a(x), 2)
        modes = ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
        return s.b(sum(F.interpolate(x, size=(7, 5), mode=mode) for mode in modes))  # type: ignore[no-any-return]

    return Net(run, a=nn.Conv2d(3, 24, 1), b=nn.Conv2d(6, 5, 1)), (learned(2, 3, 4, 4),), "a.weight b.weight"


def _unfolded() -> Made:
    def run(s: Net, x: Tensor) -> Tensor:
        rows = F.unfold(s.a(x), 3, padding=1).transpose(1, 2) @ s.up
        return F.fold((rows.tanh() @ s.down).transpose(1, 2), (6, 6), 3, padding=1)

    return Net(run, a=nn.Conv2d(3, 4, 1), up=weight(36, 20), down=weight(20, 27)), (learned(2, 3, 6, 6),), "a.weight up"


# -- weights that are computed, repeated, or have odd names --------------------------------------------


def _norms_of_weights() -> Made:
    norms = (nn.utils.parametrizations.weight_norm(linear(12, 12), dim=dim) for dim in (-2, 1, None, -1))
    return nn.Sequential(linear(8, 12), nn.Tanh(), *norms), (learned(5, 8),), "2.parametrizations.weight.original1"


def _repeated() -> Made:
    def run(s: Net, x: Tensor) -> Tensor:
        y = s.a(x).view(5, 6, 2)
        y = torch.cat([y.repeat_interleave(r, 1, output_size=6 * r) for r in (1, 2)], 1)
        return y.flatten(1) @ s.out  # type: ignore[no-any-return]

    return Net(run, a=linear(8, 12), out=weight(36, 3)), (learned(5, 8),), "a.weight out"


def _names_of_graphs() -> Made:
    def run(s: Net, x: Tensor) -> Tensor:
        getattr(s, "class").add_(1.0)
        return s.graph["out"](s.graph["in"](x).relu() * s.code * getattr(s, "class"))  # type: ignore[no-any-return]

    parts = nn.ModuleDict({"in": linear(8, 12), "out": linear(12, 5)})
    model = Net(run, graph=parts, code=weight(12))
    model.register_buffer("class", torch.randn(12))
    return model, (learned(5, 8),), "graph.in.weight graph.out.weight"


# -- written by index, and chosen ------------------------------------------------------------------------


def _scattered() -> Made:
    def run(s: Net, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        y = s.a(x)
        out = y.new_zeros(7, 12).index_add(0, rows, y, alpha=0.5).index_copy(0, rows, y.tanh() * 2)
        out = out.index_fill(0, rows[:1], 0.5).index_put((rows,), y, accumulate=True)
        wide = y.new_zeros(5, 20).scatter(1, columns, y).scatter_add(1, columns, y * 0.3)
        wide = wide.scatter_reduce(1, columns, y, "amax")
        return wide @ s.wide + out[:5] @ s.out  # type: ignore[no-any-return]

    inputs = (learned(5, 8), torch.randperm(7)[:5], torch.stack([torch.randperm(20)[:12] for _ in range(5)]))
    return Net(run, a=linear(8, 12), wide=weight(20, 4), out=weight(12, 4)), inputs, "a.weight wide out"


def _assigned() -> Made:
    def run(s: Net, x: Tensor) -> Tensor:
        y = s.a(x)
        wide = y.new_zeros(5, 20)
        wide[:, 4:16], wide[1:, 0], wide[:] = y, y[1:, 3], wide + 1
        y[1:4] = y[1:4].tanh() * s.scale
        y[0] += 1
        y[::2].copy_(s.b(x)[:3])
        return torch.cat([y @ s.out, wide @ s.wide], 1)

    parts = dict(a=linear(8, 12), b=linear(8, 12), scale=weight(12), wide=weight(20, 4), out=weight(12, 4))
    return Net(run, **parts), (learned(5, 8),), "a.weight b.weight out"


def _recurrent() -> Made:
    def run(s: Net, x: Tensor) -> Any:
        y, (h, c) = s.first(x @ s.a)
        z, g = s.second(y.transpose(0, 1))
        return s.last(z)[0] @ s.out, h, c, g

    parts = dict(
        a=weight(8, 6), first=nn.LSTM(6, 7, 2, batch_first=True, bidirectional=True, proj_size=3),
        second=nn.GRU(6, 5), last=nn.RNN(5, 12, nonlinearity="relu"), out=weight(12, 3),
    )  # fmt: skip
    return Net(run, **parts), (learned(5, 4, 8),), "a"


def _chosen() -> Made:
    def run(s: Net, x: Tensor) -> Tensor:
        y = s.a(x)
        low, high = y.detach().aminmax(dim=1)  # torch 2.11 has no derivative of it
        best = y.kthvalue(2, 1).values + y.median(1).values + y.mode(1).values + low - high
        return torch.diag_embed(best).sum(-1) @ s.out + y.view(2, 5, 3, 4).diagonal(0, -2, -1)[:, 0]  # type: ignore[no-any-return]

    return Net(run, a=linear(8, 12), out=weight(12, 3)), (learned(2, 5, 8),), "a.weight out"


# -- buffers of several names --------------------------------------------------------------------------


def _norm_at_two_places() -> Made:
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(linear(6, 8), norm, nn.Tanh(), linear(8, 8), norm, linear(8, 5)).train()
    return model, (learned(7, 6),), "0.weight 3.weight 1.weight 1.running_mean"


KINDS: dict[str, Callable[[], Made]] = {
    "detached, changed in place": lambda: _of(_detached),
    "without gradients, changed in place": lambda: _of(_no_grad),
    "square weights of residuals": _residuals,
    "square weight of a head": _head_of_the_width,
    "grouped convolutions": _grouped_convolutions,
    "transposed convolutions": _transposed_convolutions,
    "convolutions without a batch": _without_a_batch,
    "norms of images": _norms_of_images,
    "norms by constants": _norms_by_constants,
    "resized": _resized,
    "unfolded": _unfolded,
    "norms of weights": _norms_of_weights,
    "repeated": _repeated,
    "names of graphs": _names_of_graphs,
    "scattered": _scattered,
    "assigned": _assigned,
    "recurrent": _recurrent,
    "chosen": _chosen,
    "a norm at two places": _norm_at_two_places,
}


@pytest.mark.parametrize(("kind", "n"), [(kind, 2 + i % 2) for i, kind in enumerate(KINDS)])
@pytest.mark.sample(12)
def test_outputs_gradients_and_splits(kind: str, n: int) -> None:
    torch.manual_seed(0)
    model, args, split = KINDS[kind]()
    setup = Setup(model, args).to(torch.float64)
    want = plain(setup)
    divided = pretend.divide(pretend.trace(setup, True), n, pretend.Free(n))
    assert set(split.split()) <= divided.split, divided.plan()
    for rank, got in enumerate(pretend.run(divided, setup, True)):
        demand(discrepancies(got, want), about=f"{kind}, rank {rank} of {n}\n{divided.plan()}\n")


def test_gradients_that_are_asked_for_as_sparse_are_dense() -> None:
    def run(s: Net, ids: Tensor, sparse: bool) -> Tensor:
        rows = F.embedding(ids, s.table, sparse=sparse)
        columns = ids.sort(1).indices[..., None]
        return (rows.tanh() @ s.out).gather(1, columns, sparse_grad=sparse)  # type: ignore[no-any-return]

    model, ids = Net(run, table=weight(7, 12), out=weight(12, 1)), torch.randint(0, 7, (3, 5))
    sparse, dense = (Setup(model, (ids, kind)).to(torch.float64) for kind in (True, False))
    divided = pretend.divide(pretend.trace(sparse, True), 2, pretend.Free(2))
    for got in pretend.run(divided, sparse, True):
        demand(discrepancies(got, plain(dense)))
