"""Mixtures of experts in dense and sorted form, adapters, and weights made from weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases.blocks import Net, linear, weight
from tests.cases.case import Setup, case

E, D, W = 6, 8, 5  # experts, width, the experts' width


def experts(run: object, **more: object) -> Setup:
    parts = dict(gate=linear(D, E, False), w1=weight(E, D, W), w2=weight(E, W, D))
    return Setup(Net(run, **parts, **more), (torch.randn(2, 3, D),))  # type: ignore[arg-type]


@case("tp2 tp3 tp4")
def experts_by_product() -> Setup:
    """All experts on all tokens by batched matmul, weighed and summed."""

    def run(s: Net, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        y = torch.bmm(torch.bmm(flat.expand(E, -1, -1), s.w1).relu(), s.w2)
        return (y * s.gate(flat).softmax(-1).T[..., None]).sum(0).view_as(x)

    return experts(run)


@case("tp2 tp3")
def experts_by_one_hot() -> Setup:
    """GShard: top-2 routing by one-hot masks and einsum."""

    def run(s: Net, x: Tensor) -> Tensor:
        w, i = s.gate(x).softmax(-1).topk(2, -1)
        route = torch.einsum("btk,btke->bte", w, F.one_hot(i, E).to(x.dtype))
        y = torch.einsum("btd,edf->btef", x, s.w1).relu()
        return torch.einsum("bte,btef,efd->btd", route, y, s.w2)

    return experts(run)


@case("tp2 tp3")
def experts_by_scatter() -> Setup:
    """Llama 4 and gpt-oss dense form: scores scattered into a table of zeros."""

    def run(s: Net, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        top, i = s.gate(flat).topk(2, -1)
        scores = torch.zeros(flat.size(0), E, dtype=x.dtype).scatter(1, i, top.softmax(-1))
        y = torch.einsum("tef,efd->ted", torch.einsum("td,edf->tef", flat, s.w1).tanh(), s.w2)
        return (y * scores[..., None]).sum(1).view_as(x)

    return experts(run)


@case("tp2 tp3")
def experts_by_gathered_weights() -> Setup:
    """Each token picks its expert's weights by index."""

    def run(s: Net, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        w, i = s.gate(flat).softmax(-1).max(-1)
        y = torch.einsum("td,tdf->tf", flat, s.w1[i]).relu()
        return (w[:, None] * torch.einsum("tf,tfd->td", y, s.w2[i])).view_as(x)

    return experts(run)


@case("tp2 tp3")
def experts_sorted() -> Setup:
    """Tokens sorted by expert with a fixed capacity: argsort, gather, scatter back."""

    def run(s: Net, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        p = s.gate(flat).softmax(-1)
        order = torch.sort(p.T, dim=-1, descending=True, stable=True)[1][:, :2]
        y = torch.bmm(torch.bmm(flat[order], s.w1).relu(), s.w2)
        y = y * p.T.gather(1, order)[..., None]
        return torch.zeros_like(flat).index_add(0, order.flatten(), y.flatten(0, 1)).view_as(x)

    return experts(run)


@case("tp2 tp3", noise=False, dtypes=(torch.float32,))
def experts_by_grouped_matmul() -> Setup:
    """Rows in the order of their experts, one of which has none; shares of the width are no whole
    number of 16 bytes, which the kernel asks for. All numbers are small integers, exact in bf16."""

    def run(s: Net, x: Tensor) -> Tensor:
        up, down = s.up.bfloat16().transpose(1, 2), s.down.bfloat16()
        h = F.grouped_mm(x.bfloat16(), up, offs=s.offs).relu()
        return F.grouped_mm(h, down, offs=s.offs).to(x.dtype)

    def signs(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape).float()

    parts = dict(up=nn.Parameter(signs(3, 40, 8)), down=nn.Parameter(signs(3, 40, 16)))
    offs, coefficients = torch.tensor([2, 2, 7], dtype=torch.int32), signs(7, 16)
    x = signs(7, 8).requires_grad_()
    return Setup(Net(run, **parts, offs=offs), (x,), loss=lambda y: (y * coefficients).sum())


@case("tp2 tp3")
def experts_with_a_shared_one() -> Setup:
    """A sigmoid-gated shared expert beside the routed, and a bias that only chooses."""

    def run(s: Net, x: Tensor) -> Tensor:
        scores = s.gate(x).sigmoid()
        keep = (scores + s.choose).topk(3, -1)[1]
        mask = torch.zeros_like(scores).scatter(-1, keep, 1.0)
        y = torch.einsum("btd,edf->btef", x, s.w1).relu()
        y = torch.einsum("bte,btef,efd->btd", scores * mask, y, s.w2)
        return y + s.shared(x) * s.switch(x).sigmoid()

    shared = nn.Sequential(linear(D, 10), nn.ReLU(), linear(10, D))
    return experts(run, shared=shared, switch=linear(D, 1), choose=torch.rand(E))


class Adapted(nn.Module):
    """A frozen linear and a low-rank path beside it."""

    def __init__(self, i: int, o: int, r: int = 3) -> None:
        super().__init__()
        self.base, self.a, self.b = linear(i, o), weight(r, i), weight(o, r)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.T) @ self.b.T * 0.7


@case("tp2 tp3 tp4", flat=("0.base.weight", "0.base.bias", "2.base.weight", "2.base.bias"))
def adapters() -> Setup:
    """LoRA-like: only the low-rank parts learn."""
    model = nn.Sequential(Adapted(8, 12), nn.GELU(), Adapted(12, 8))
    return Setup(model, (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def adapters_merged() -> Setup:
    """The low-rank product is added to the weight before it is used."""

    def run(s: Net, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, s.w1 + s.b @ s.a).relu(), s.w2)

    parts = dict(w1=weight(12, 8), w2=weight(7, 12), a=weight(2, 8), b=weight(12, 2))
    return Setup(Net(run, **parts), (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def weight_norm() -> Setup:
    """g * v / |v| by row: the norm is over the dim that is, or is not, split."""
    up = nn.utils.parametrizations.weight_norm(linear(8, 12))
    down = nn.utils.parametrizations.weight_norm(linear(12, 7))
    return Setup(nn.Sequential(up, nn.Tanh(), down), (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def weight_standardised() -> Setup:
    def run(s: Net, x: Tensor) -> Tensor:
        w = (s.w1 - s.w1.mean()) / s.w1.std()
        return F.linear(F.linear(x, w).relu(), s.w2 / s.w2.abs().amax(1, keepdim=True))

    return Setup(Net(run, w1=weight(12, 8), w2=weight(7, 12)), (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def tied_transposed() -> Setup:
    """An autoencoder: the second weight is the first, transposed."""

    def run(s: Net, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, s.w, s.b).tanh(), s.w.T)

    return Setup(Net(run, w=weight(12, 8), b=weight(12)), (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def tied_parts_of_a_weight() -> Setup:
    """Rows of one table: some embed, some project, one is a bias."""

    def run(s: Net, ids: Tensor) -> Tensor:
        x = F.embedding(ids, s.table[:7])
        return F.linear(x.tanh(), s.table[4:], s.out) + s.table[3, :1]

    return Setup(Net(run, table=weight(11, 6), out=weight(7)), (torch.randint(0, 7, (2, 5)),))


@case("tp2 tp3")
def one_linear_in_two_places() -> Setup:
    """The same weight once before and once after the split width."""

    def run(s: Net, x: Tensor) -> Tensor:
        return s.down(s.fc(s.fc(x).relu()).relu())

    return Setup(Net(run, fc=linear(8, 8), down=linear(8, 5)), (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def pruned() -> Setup:
    """A mask in a buffer and a scale per row in another: pruning and dequantisation."""

    def run(s: Net, x: Tensor) -> Tensor:
        up = F.linear(x, s.codes.to(x.dtype) * s.scale[:, None], s.bias)
        return F.linear(up.relu(), s.w2 * s.mask)

    parts = dict(codes=torch.randint(-7, 8, (12, 8), dtype=torch.int8), scale=torch.rand(12))
    parts |= dict(mask=(torch.rand(7, 12) > 0.3).float())
    return Setup(Net(run, **parts, bias=weight(12), w2=weight(7, 12)), (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def product_of_weights() -> Setup:
    """Two weights multiplied before any input: the inner dim is summed without a token."""

    def run(s: Net, x: Tensor) -> Tensor:
        return x @ (s.a @ s.b).tanh() @ s.c

    return Setup(Net(run, a=weight(8, 12), b=weight(12, 9), c=weight(9, 5)), (torch.randn(2, 8),))


@case("tp2 tp3")
def scalars_that_learn() -> Setup:
    """0-dim and one-element parameters scale partial sums and shares."""

    def run(s: Net, x: Tensor) -> Tensor:
        return s.down(s.up(x).relu() * s.a) * s.b + x * s.c.exp()

    scalars = dict(a=nn.Parameter(torch.tensor(0.7)), b=weight(1), c=weight(1, 1))
    return Setup(Net(run, up=linear(8, 12), down=linear(12, 8), **scalars), (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def layer_scale_and_depth() -> Setup:
    """A residual branch scaled per channel, and weights over the layers' outputs (scalar mix)."""

    def run(s: Net, x: Tensor) -> Tensor:
        seen = [x]
        for up, down, scale in zip(s.ups, s.downs, s.scales, strict=True):
            x = x + down(up(x).relu()) * scale
            seen.append(x)
        return (torch.stack(seen) * s.mix.softmax(0)[:, None, None, None]).sum(0)

    parts = dict(
        ups=nn.ModuleList(linear(8, 12) for _ in range(2)),
        downs=nn.ModuleList(linear(12, 8) for _ in range(2)),
        scales=nn.ParameterList(weight(8) for _ in range(2)),
        mix=weight(3),
    )
    return Setup(Net(run, **parts), (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def embedding_bag_and_sum() -> Setup:
    """Several tables looked up and added: words, positions, types, with a padding row."""

    def run(s: Net, ids: Tensor) -> Tensor:
        x = s.words(ids) + s.places(torch.arange(ids.size(1))) + s.types.weight[0]
        return s.head(s.norm(x).relu())

    parts = dict(words=nn.Embedding(11, 6, padding_idx=2), places=nn.Embedding(7, 6))
    parts |= dict(types=nn.Embedding(2, 6), norm=nn.LayerNorm(6), head=linear(6, 11))
    return Setup(Net(run, **parts), (torch.tensor([[1, 2, 10], [2, 5, 0]]),))


@case("tp2 tp3")
def table_looked_up_twice() -> Setup:
    """Ids, shifted ids, and the rows summed over a bag of tokens."""

    def run(s: Net, ids: Tensor) -> Tensor:
        x = s.emb(ids) * s.emb((ids + 3) % 11) + s.emb(ids).sum(1, keepdim=True)
        return s.head(x)

    return Setup(
        Net(run, emb=nn.Embedding(11, 6), head=linear(6, 9)), (torch.randint(0, 11, (2, 5)),)
    )
