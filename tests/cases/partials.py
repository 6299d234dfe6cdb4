"""More functions of a sum over ranks: which may wait for the sum, and which may not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cases.blocks import Net, linear, weight
from tests.cases.case import Setup, case


def after(end: Callable[[Net, Tensor, Tensor], object], **more: object) -> Setup:
    """end(r, x) where r = down(relu(up(x))) is a partial sum, without a bias."""

    def run(s: Net, x: Tensor) -> object:
        return end(s, s.down(s.up(x).relu()), x)

    model = Net(run, up=linear(8, 12), down=linear(12, 8, False), **more)
    return Setup(model, (torch.randn(3, 5, 8),))


@case("tp2 tp3")
def partial_times_partial() -> Setup:
    return after(lambda s, r, x: r * r.roll(1, 1) + r * s.other(x.relu()), other=linear(8, 8))


@case("tp2 tp3")
def partial_over_its_sum() -> Setup:
    return after(lambda s, r, x: r / (r.sum(-1, keepdim=True).abs() + 2))


@case("tp2 tp3", training=False)
def partial_over_nothing() -> Setup:
    """Infinite, with the sign of the sum; of its parts' signs it would be nan."""

    def end(s: Net, r: Tensor, x: Tensor) -> Tensor:
        none = (x * 0).abs()
        return torch.stack([(r / 0.0).sign(), (r * torch.inf).sign(), (r / none).sign(), (r * none.rsqrt()).sign()])

    return after(end)


@case("tp2 tp3")
def partial_minus_its_mean() -> Setup:
    return after(lambda s, r, x: (r - r.mean(-1, keepdim=True)) * 3 - r.mean())


@case("tp2 tp3 pp2 pp2/3")
def number_of_a_sum() -> Setup:
    """`item()` reads a value: that of the whole sum, before or after the ranks or the stages are done with it."""
    return after(lambda s, r, x: s.last(r * x.sum().item() + r.abs().sum().item() + r), last=linear(8, 6))


@case("tp2 tp3")
def sums_of_two_blocks() -> Setup:
    """A parallel block: both sums and the residual meet in one addition."""

    def end(s: Net, r: Tensor, x: Tensor) -> Tensor:
        return x + r + s.down2(s.up2(x).tanh()) - 2 * x

    return after(end, up2=linear(8, 9), down2=linear(9, 8))


@case("tp2 tp3")
def bias_by_broadcast() -> Setup:
    """Constants, scalars and parameters added in shapes that broadcast."""

    def end(s: Net, r: Tensor, x: Tensor) -> Tensor:
        return ((r + s.a) + s.b + 0.5) * 2 + torch.add(r, s.c, alpha=3) - torch.rsub(r, 1.5)

    return after(end, a=weight(8), b=weight(5, 1), c=weight(1))


@case("tp2 tp3")
def partial_under_a_mask() -> Setup:
    """where with a whole or a partial other side; masked_fill with zero and with one."""

    def end(s: Net, r: Tensor, x: Tensor) -> Tensor:
        mask = x > 0
        a = torch.where(mask, r, 0.0) + torch.where(mask, x, r) + torch.where(mask, r, -r)
        return a + r.masked_fill(mask, 0.0) + r.masked_fill(mask, 1.0)

    return after(end)


@case("tp2 tp3")
def partial_by_order() -> Setup:
    def end(s: Net, r: Tensor, x: Tensor) -> Tensor:
        a = torch.maximum(r, x) + torch.minimum(r, -r) + r.clamp(-0.2, 0.3) + r.sign() * x
        return a + r.sort(-1)[0] + r.topk(2, -1)[0].sum(-1, keepdim=True) + r.median(-1, True)[0]

    return after(end)


@case("tp2 tp3")
def partial_joined_with_whole() -> Setup:
    """cat and stack of a partial and a whole; then a linear over both."""

    def end(s: Net, r: Tensor, x: Tensor) -> Tensor:
        joined = torch.cat([r, x, s.token.expand(3, 5, 8)], 1)
        return s.out(joined).relu() + torch.stack([r, x], 2).flatten(1, 2).sum(1, keepdim=True)

    return after(end, token=weight(1, 1, 8), out=linear(8, 8))


@case("tp2 tp3")
def partial_through_moves() -> Setup:
    """Moves alone: transposed, flipped, rolled, sliced, padded, picked, expanded."""

    def end(s: Net, r: Tensor, x: Tensor) -> Tensor:
        a = r.transpose(0, 1).flip(-1).roll((1, 2), (0, 2))[:, 1:, ::3]
        b = F.pad(r[0, :, :3], (1, 0))[None].expand(2, -1, -1)
        return torch.cat([a.reshape(5, 6), b.permute(1, 0, 2).reshape(5, 8)], 1) + r[1, 2, 3]

    return after(end)


@case("tp2 tp3")
def partial_into_two_linears() -> Setup:
    """One sum feeds a linear without and one with a bias, and a norm."""

    def end(s: Net, r: Tensor, x: Tensor) -> Tensor:
        return s.a(r) + s.b(r) * F.layer_norm(r, (8,))

    return after(end, a=linear(8, 8, False), b=linear(8, 8))


@case("tp2 tp3")
def partial_summed_away() -> Setup:
    """Reductions of a sum to a vector, a scalar and a number of two kinds."""

    def end(s: Net, r: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return r.sum(1), r.mean(), r.pow(2).sum(), r.abs().amax(), r.sum((0, 2))

    return after(end)


@case("tp2 tp3")
def partial_against_itself() -> Setup:
    return after(lambda s, r, x: r @ r.mT + r @ x.mT + torch.einsum("btd,bsd->bts", x, r) * 2)


@case("tp2 tp3")
def partial_as_an_index() -> Setup:
    """Integers made from a sum: only the sum itself may be asked."""

    def end(s: Net, r: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        best = r.argmax(-1)
        return s.table(best) + r, best, r > x

    return after(end, table=torch.nn.Embedding(8, 8))


@case("tp2 tp3")
def partial_in_two_types() -> Setup:
    """A cast between the parts and the sum."""
    return after(lambda s, r, x: r.double() * 2 + r.float() + r.to(torch.float64).exp())


@case("tp2 tp3")
def partial_out_twice() -> Setup:
    """The sum itself is an output, as is its negative and a view of it."""
    return after(lambda s, r, x: {"r": r, "again": r, "minus": -r, "turned": r.mT, "x": x})


@case("tp2 tp3")
def gradient_is_cut() -> Setup:
    """detach between the parts: one path carries values only."""

    def end(s: Net, r: Tensor, x: Tensor) -> Tensor:
        return r + (r - x).detach() * s.scale + (r.sigmoid() - r.sigmoid().detach())

    return after(end, scale=weight(8))


@case("tp2 tp3")
def no_grad_inside() -> Setup:
    def end(s: Net, r: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = r.norm(dim=-1, keepdim=True) + 1
        return r / size

    return after(end)


@case("tp2 tp3")
def losses_inside() -> Setup:
    """Losses of a split width, of a sum, and a mean over both."""

    def run(s: Net, x: Tensor, y: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        h = s.up(x).tanh()
        z = s.down(h)
        loss = F.mse_loss(z, y) + F.l1_loss(h, torch.ones_like(h)) * 0.1
        loss = loss + F.kl_div(z.log_softmax(-1), y.softmax(-1), reduction="batchmean")
        return loss + F.cross_entropy(z.flatten(0, 1), label.flatten()), z

    model = Net(run, up=linear(8, 12), down=linear(12, 7))
    inputs = torch.randn(2, 5, 8), torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    return Setup(model, inputs, loss=lambda out: out[0])


@case("tp2 tp3")
def cross_entropy_of_many_forms() -> Setup:
    """Weights of classes, probabilities, nll on log-softmax, logits of three dims, BCE."""

    def run(s: Net, ids: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        z = s.head(s.emb(ids))
        flat, y = z.flatten(0, 1), label.flatten()
        return (
            F.cross_entropy(flat, y, weight=s.classes),
            F.cross_entropy(flat, flat.detach().roll(1, 0).softmax(-1)),
            F.nll_loss(F.log_softmax(flat, -1), y, reduction="none"),
            F.cross_entropy(z.mT, label, reduction="sum"),
            F.binary_cross_entropy_with_logits(z, (z > 0).to(z.dtype)),
        )

    parts = dict(emb=torch.nn.Embedding(11, 6), head=linear(6, 11), classes=torch.rand(11) + 0.5)
    return Setup(Net(run, **parts), (torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 5))))


@case("tp2 tp3 pp2 pp2/3")
def arithmetic_on_numbers_of_sums() -> Setup:
    """Python computes with what `item()` and `tolist()` read, and makes tensors of it again."""

    def end(s: Net, r: Tensor, x: Tensor) -> Tensor:
        a, b = (r.abs().sum((0, 1)) + 1).tolist()[:2]
        y = r * (x.sum().item() * 2 + 1) + torch.full((8,), r.sum().item() / 3) * a
        return s.last(y * torch.tensor(b * 0.5))  # type: ignore[no-any-return]

    return after(end, last=linear(8, 6))


@case("tp2 tp3", noise=False)
def margins_of_classes() -> Setup:
    """Of small integers, so that margins are zero often; labels behind the first -1 do not count."""

    def run(s: Net, x: Tensor, labels: Tensor, several: Tensor) -> object:
        y, z = s.up(x), s.down(s.up(x).relu())
        return [
            loss
            for how in ("none", "mean", "sum")
            for loss in (
                F.multi_margin_loss(y, labels, reduction=how),
                F.multi_margin_loss(z[0], labels[0], p=2, margin=3.0, weight=s.share, reduction=how),
                F.multilabel_margin_loss(z, several, reduction=how),
                F.multilabel_margin_loss(y[0, :7], several[1], reduction=how),
            )
        ]

    model = Net(run, up=linear(8, 12), down=linear(12, 7), share=torch.arange(1.0, 8))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-1, 2, p.shape))
    several = torch.tensor([[0, 6, -1, 2, 2, 2, 2], [-1] * 7, [3, 1, 0, 2, 4, 6, 5]])
    return Setup(model, (torch.randint(-2, 3, (3, 8)).float(), torch.tensor([6, 0, 3]), several))
