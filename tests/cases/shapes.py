"""More views, slices and copies of a split width; and what goes in and comes out of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases.blocks import Net, linear, weight
from tests.cases.case import Setup, case
from tests.cases.widths import between


@case("tp2 tp3")
def roll_of_width() -> Setup:
    return between(lambda s, y: y.roll(5, -1) * y)


@case("tp2 tp3")
def flip_of_width() -> Setup:
    return between(lambda s, y: y.flip(-1) + y)


@case("tp2 tp3")
def shift_of_width() -> Setup:
    """A factor against itself, one further: cat of a slice and a zero."""
    return between(lambda s, y: F.pad(y[..., 1:], (0, 1)) + y)


@case("tp2 tp3")
def shift_of_tokens() -> Setup:
    """RWKV: each token mixed with the one before."""

    def inner(s: Net, y: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        return y + (before - y) * s.mix

    return between(inner, mix=weight(12))


@case("tp2 tp3")
def steps_of_width() -> Setup:
    return between(lambda s, y: torch.cat([y[..., 1::3], y[..., ::3], y[..., 2::3]], -1))


@case("tp2 tp3")
def slices_that_overlap() -> Setup:
    return between(lambda s, y: y[..., :8] * y[..., 4:] + y[..., 2:10].relu(), back=8)


@case("tp2 tp3")
def halves_swapped() -> Setup:
    return between(lambda s, y: torch.cat([y[..., 6:], y[..., :6]], -1) * y)


@case("tp2 tp3")
def thirds_reordered() -> Setup:
    def inner(s: Net, y: Tensor) -> Tensor:
        a, b, c = y.split([3, 4, 5], -1)
        return torch.cat([c, a, b], -1)

    return between(inner)


@case("tp2 tp3")
def repeat_and_tile() -> Setup:
    return between(
        lambda s, y: y.repeat(1, 1, 2) + y.repeat_interleave(2, -1) + torch.tile(y, (2,)), back=24
    )


@case("tp2 tp3")
def channel_shuffle() -> Setup:
    return between(lambda s, y: y.view(2, 5, 3, 4).transpose(2, 3).reshape(2, 5, 12))


@case("tp2 tp3")
def width_against_its_transpose() -> Setup:
    """(h d) and (d h) tied by one addition: a diagonal if taken for the same."""

    def inner(s: Net, y: Tensor) -> Tensor:
        grid = y.view(2, 5, 3, 3)
        return (grid + grid.transpose(2, 3)).flatten(2)

    return between(inner, f=9)


@case("tp2 tp3")
def width_into_tokens() -> Setup:
    """Pixel shuffle: part of the width becomes tokens, and back."""

    def inner(s: Net, y: Tensor) -> Tensor:
        y = s.mid(y.view(2, 5, 3, 4).flatten(1, 2).relu())
        return y.view(2, 5, 12)

    return between(inner, mid=linear(4, 4))


@case("tp2 tp3")
def tokens_into_width() -> Setup:
    """Patch merging: two tokens become one of twice the width."""

    def run(s: Net, x: Tensor) -> Tensor:
        y = s.up(x).relu()
        y = torch.cat([y[:, ::2], y[:, 1::2]], -1)
        return s.down(s.norm(y))

    parts = dict(up=linear(7, 6), norm=nn.LayerNorm(12), down=linear(12, 5))
    return Setup(Net(run, **parts), (torch.randn(2, 6, 7),))


@case("tp2 tp3")
def windows_partitioned() -> Setup:
    """Swin: tokens to windows by view and permute, shifted by roll, and back."""

    def run(s: Net, x: Tensor) -> Tensor:
        y = s.up(x.roll((-1, -1), (1, 2)))
        y = y.view(2, 2, 2, 2, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(8, 4, 6)
        y = (y @ y.mT).softmax(-1) @ y
        y = y.view(2, 2, 2, 2, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(2, 4, 4, 6)
        return s.down(y).roll((1, 1), (1, 2))

    return Setup(Net(run, up=linear(5, 6), down=linear(6, 5)), (torch.randn(2, 4, 4, 5),))


@case("tp2 tp3")
def unfold_of_tokens() -> Setup:
    return between(lambda s, y: y.unfold(1, 3, 1).mean(-1))


@case("tp2 tp3")
def triangles_of_width() -> Setup:
    return between(lambda s, y: y @ (s.square.tril() + s.square.triu(2)), square=weight(12, 12))


@case("tp2 tp3")
def rows_by_gather() -> Setup:
    """gather, index_select, take_along_dim over the split width and over tokens."""

    def inner(s: Net, y: Tensor) -> Tensor:
        at = (torch.arange(12) * 5) % 12
        picked = y.index_select(-1, at) + y.gather(1, s.where.expand(2, 5, 12))
        return picked + y[:, [4, 0, 1, 1, 2]] + y[..., at.flip(0)]

    return between(inner, where=torch.randint(0, 5, (1, 5, 1)))


@case("tp2 tp3")
def rows_by_scatter() -> Setup:
    def inner(s: Net, y: Tensor) -> Tensor:
        out = torch.zeros(2, 4, 12, dtype=y.dtype).index_add(1, s.where, y)
        return out.scatter_add(1, s.where[:1].view(1, 1, 1).expand(2, 1, 12), y[:, :1])

    return between(inner, where=torch.tensor([3, 0, 0, 2, 3]))


@case("tp2 tp3")
def written_in_place() -> Setup:
    """The model writes into its own values; the graph must not."""

    def inner(s: Net, y: Tensor) -> Tensor:
        y = y.clone()
        y[:, 0] = 1.5
        y[..., 3:7] += 2
        y[:, -1].mul_(0.5)
        return y.relu_()

    return between(inner)


@case("tp2 tp3")
def parts_of_size_one() -> Setup:
    """Widths of one, squeezed and unsqueezed, and a linear with one output."""

    def run(s: Net, x: Tensor) -> Tensor:
        score = s.one(s.up(x).relu()).squeeze(-1)
        return s.down(s.back(score.unsqueeze(-1))) * score[..., None]

    parts = dict(up=linear(7, 12), one=linear(12, 1), back=linear(1, 6), down=linear(6, 1))
    return Setup(Net(run, **parts), (torch.randn(2, 5, 7),))


@case("tp2 tp3")
def squeezed_parts() -> Setup:
    """Squeezed, a rank's part of size 1 is still a part; with two of three columns on one rank, too."""

    def run(s: Net, x: Tensor) -> Tensor:
        return s.up(x[:1]).squeeze() @ s.down + s.up(x).squeeze((0, 1)).squeeze(-1) @ s.down  # type: ignore[no-any-return]

    return Setup(Net(run, up=linear(8, 3), down=weight(3, 5)), (torch.randn(4, 8),))


@case("tp2 tp3")
def class_token_and_positions() -> Setup:
    """ViT: a token in front, positions added, the first row read by a pooler."""

    def run(s: Net, x: Tensor) -> Tensor:
        x = torch.cat([s.cls.expand(2, -1, -1), s.up(x)], 1) + s.places
        x = x + s.down(F.gelu(s.mid(s.norm(x))))
        return s.head(x[:, 0]) + s.head(x[:, 1:].mean(1))

    parts = dict(up=linear(7, 6), mid=linear(6, 15), down=linear(15, 6), head=linear(6, 5))
    parts |= dict(cls=weight(1, 1, 6), places=weight(1, 6, 6), norm=nn.LayerNorm(6))
    return Setup(Net(run, **parts), (torch.randn(2, 5, 7),))


def block(run: Any, *args: Any, **kwargs: Any) -> Setup:
    return Setup(Net(run, up=linear(8, 12), down=linear(12, 8)), args, kwargs)


def _mlp(s: Net, x: Tensor) -> Tensor:
    return s.down(s.up(x).relu())


@case("tp2 tp3")
def input_not_contiguous() -> Setup:
    base = torch.randn(8, 5, 2)
    return block(_mlp, base.permute(2, 1, 0))


@case("tp2 tp3")
def input_expanded() -> Setup:
    return block(_mlp, torch.randn(1, 1, 8).expand(2, 5, 8))


@case("tp2 tp3")
def input_of_two_dims() -> Setup:
    return block(_mlp, torch.randn(1, 8, requires_grad=True))


@case("tp2 tp3")
def input_of_one_dim() -> Setup:
    return block(_mlp, torch.randn(8, requires_grad=True))


@case("tp2 tp3")
def input_of_four_dims() -> Setup:
    return block(_mlp, torch.randn(1, 2, 1, 8, requires_grad=True))


@case("tp2 tp3")
def inputs_that_learn() -> Setup:
    """Two inputs, one split width each, one of them unused on a path."""

    def run(s: Net, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return s.down(s.up(x).relu() * y) * z.tanh()

    inputs = [torch.randn(2, 5, n, requires_grad=True) for n in (8, 12, 8)]
    return block(run, *inputs)


@case("tp2 tp3")
def inputs_in_containers() -> Setup:
    def run(s: Net, pair: Any, *, extra: dict[str, Any], scale: float = 1.0) -> Any:
        a, b = pair
        return {"out": _mlp(s, a + b) * scale + extra["c"], "flag": extra["flag"], "none": None}

    extra = {"c": torch.randn(8), "flag": True, "unused": torch.ones(3)}
    return block(run, [torch.randn(2, 8), torch.randn(2, 8)], extra=extra, scale=0.5)


class Named(NamedTuple):
    loss: Tensor
    parts: tuple[Tensor, list[Tensor]]


@case("tp2 tp3")
def outputs_in_containers() -> Setup:
    """Nested outputs: a named tuple, a list, an input and a parameter handed through, integers."""

    def run(s: Net, x: Tensor) -> Any:
        h = s.up(x)
        y = s.down(h.relu())
        return Named(y.mean(), (h, [x, s.up.bias, y.argmax(-1), (y > 0).sum(), y[0, 0, 0]]))

    return block(run, torch.randn(2, 5, 8))


@case("tp2 tp3")
def output_is_the_split_width() -> Setup:
    """The split value itself goes out, transposed and cut: gathered, with all of its rows."""

    def run(s: Net, x: Tensor) -> tuple[Tensor, ...]:
        h = s.up(x)
        return h.mT, h[..., 2:9], h.sum(-1), s.down(h)

    return block(run, torch.randn(2, 5, 8))


@case("tp2 tp3")
def output_of_other_types() -> Setup:
    def run(s: Net, x: Tensor) -> tuple[Tensor, ...]:
        y = s.up(x)
        return (
            y.to(torch.bfloat16),
            (y > 0),
            y.round().to(torch.int64),
            y.abs().argmin(-1),
            s.down(y),
        )

    return block(run, torch.randn(2, 5, 8))


@case("tp2 tp3")
def arguments_of_other_kinds() -> Setup:
    def run(s: Net, x: Tensor, n: int, mode: str, scale: float, flag: bool = True) -> Tensor:
        for _ in range(n):
            x = x + _mlp(s, x)
        return (x.tanh() if mode == "tanh" else x) * scale if flag else x

    return block(run, torch.randn(2, 8), 3, "tanh", 1.5)


@case("tp2 tp3 tp2xpp2")
def buffers_that_move() -> Setup:
    """A counter and a running mean are updated by the call, and read by the next."""

    def run(s: Net, x: Tensor) -> Tensor:
        y = s.up(x)
        s.calls.add_(1)
        s.mean.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
        return s.down((y - s.mean).relu()) / s.calls

    buffers = dict(mean=torch.rand(12), calls=torch.ones(()))
    model = Net(run, up=linear(8, 12), down=linear(12, 8), **buffers)
    return Setup(model, (torch.randn(2, 5, 8),))


@case("tp2 tp3")
def einsum_of_many_orders() -> Setup:
    def run(s: Net, x: Tensor) -> Tensor:
        h = torch.einsum("btd,fdg->gbft", x, s.a).relu()
        y = torch.einsum("gbft,hgf->tbh", h, s.b)
        return torch.einsum("tbh,h,tbk->bkt", y, s.c, y)

    model = Net(run, a=weight(4, 8, 3), b=weight(5, 3, 4), c=weight(5))
    return Setup(model, (torch.randn(2, 5, 8),))


@case("tp2 tp3 tp4")
def few_rows_of_many() -> Setup:
    """The first token's row, the last two, and one from the middle: most ranks hold none of them."""

    def run(s: Net, x: Tensor) -> Tensor:
        y = x + s.down(F.gelu(s.up(s.norm(x))))
        return s.head(torch.cat([y[:, :1], y[:, -2:], y[:, 17].unsqueeze(1)], 1))

    parts = dict(norm=nn.LayerNorm(12), up=linear(12, 31), down=linear(31, 12), head=linear(12, 40))
    return Setup(Net(run, **parts), (torch.randn(1, 50, 12),))


@case("tp2 tp3 pp2/3")
def transforms_between_splits() -> Setup:
    """Fourier transforms of rows and of columns, of partial sums, and complex numbers at every cut."""

    def run(s: Net, x: Tensor) -> Tensor:
        z = torch.fft.rfft(s.down(s.up(x).relu()), dim=1).conj()
        z = z * torch.complex(s.gain, s.shift) + torch.polar(z.abs().exp(), z.angle())
        y = torch.fft.irfft(z.conj(), n=5, dim=1) + torch.fft.fft(s.up2(x)).imag @ s.out
        return s.down2(y.tanh()) + torch.fft.fft(s.down2(y)).conj().imag

    parts = dict(up=linear(8, 12), down=linear(12, 9, False), gain=weight(3, 9), shift=weight(3, 9))
    more = dict(up2=linear(8, 6), out=weight(6, 9), down2=linear(9, 7))
    return Setup(Net(run, **parts, **more), (torch.randn(4, 5, 8),))


@case("tp2 tp3 pp2/2")
def windows_by_strides() -> Setup:
    """Windows that overlap, read by strides of heads that lie transposed in memory; the last by an offset too."""

    def run(s: Net, x: Tensor) -> Tensor:
        heads = s.up(x).unflatten(-1, (6, 2)).transpose(1, 2).flatten(0, 1).transpose(1, 2)
        n, w, t = heads.shape
        a, b, c = heads.stride()
        windows = heads.as_strided((n, t // 2 - 1, w, 4), (a, 2 * c, b, c)).sum(-1)
        last = heads.as_strided((n, w), (a, b), heads.storage_offset() + (t - 1) * c)
        y = torch.cat([windows, last[:, None]], 1).unflatten(0, (-1, 6)).transpose(1, 2).flatten(-2)
        return s.down(y.relu())

    return Setup(Net(run, up=linear(8, 12), down=linear(12, 8)), (torch.randn(4, 8, 8),))
