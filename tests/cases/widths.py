"""More feed-forward blocks: packed gates, norms, softmax and scans over a split width."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases.blocks import Net, linear, weight
from tests.cases.case import Setup, case


def between(
    inner: Callable[[Net, Tensor], Tensor], *, f: int = 12, back: int | None = None, **more: object
) -> Setup:
    """down(inner(up(x))): `inner` acts on a split width of f and leaves `back` of it."""

    def run(s: Net, x: Tensor) -> Tensor:
        return s.down(inner(s, s.up(x)))

    model = Net(run, up=linear(7, f), down=linear(back or f, 7), **more)
    return Setup(model, (torch.randn(2, 5, 7),))


@case("tp2 tp3 tp4")
def gate_interleaved() -> Setup:
    """gpt-oss: gate and up alternate, taken by strided slices."""
    return between(lambda s, y: F.silu(y[..., ::2]) * y[..., 1::2], back=6)


@case("tp2 tp3 tp4")
def gate_innermost_by_view() -> Setup:
    return between(lambda s, y: torch.mul(*y.view(2, 5, 6, 2).sigmoid().unbind(-1)), back=6)


@case("tp2 tp3 tp4")
def gate_outermost_by_view() -> Setup:
    return between(lambda s, y: y.view(2, 5, 2, 6)[:, :, 0].tanh() * y[..., 6:], back=6)


@case("tp2 tp3")
def glu_of_torch() -> Setup:
    return between(lambda s, y: F.glu(y, -1), back=6)


@case("tp2 tp3")
def gates_of_three() -> Setup:
    def inner(s: Net, y: Tensor) -> Tensor:
        a, b, c = y.chunk(3, -1)
        return a.tanh() * b + c

    return between(inner, f=18, back=6)


@case("tp2 tp3")
def parts_of_other_widths() -> Setup:
    """Mamba2's in_proj: z, x and a narrow third part go different ways."""

    def inner(s: Net, y: Tensor) -> Tensor:
        z, x, small = y.split([6, 6, 3], -1)
        return F.silu(z) * x * s.mix(small).exp()

    return between(inner, f=15, back=6, mix=linear(3, 6))


@case("tp2 tp3")
def square_weight_between() -> Setup:
    """[f, f]: both sides of one weight ask for one factor."""
    return between(lambda s, y: s.mid(y.relu()).relu() + y, mid=linear(12, 12))


@case("tp2 tp3 tp4")
def bias_of_two_squares() -> Setup:
    """One bias behind two square weights: what it is added to last is what it is made of."""
    model = Net(lambda s, x: s.b(s.a(x).relu()), a=linear(8, 8), b=linear(8, 8))
    model.b.bias = model.a.bias
    return Setup(model, (torch.randn(2, 5, 8),))


@case("tp2")
def tiled_times_repeated() -> Setup:
    """Two orders of one width: its rows are tied to one another."""
    return between(lambda s, y: y.tile(2) * y.repeat_interleave(2, -1), f=4, back=8)


@case("tp2 tp3 tp4")
def layer_norm_over_width() -> Setup:
    return between(lambda s, y: s.norm(y), norm=nn.LayerNorm(12))


@case("tp2 tp3")
def layer_norm_without_weight() -> Setup:
    return between(lambda s, y: F.layer_norm(y, (12,)) * 2)


@case("tp2 tp3")
def layer_norm_over_two_dims() -> Setup:
    return between(lambda s, y: s.norm(y.view(2, 5, 3, 4)).flatten(2), norm=nn.LayerNorm((3, 4)))


@case("tp2 tp3 tp4")
def rms_norm_written_out() -> Setup:
    def inner(s: Net, y: Tensor) -> Tensor:
        return s.scale * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5))

    return between(inner, scale=weight(12))


@case("tp2 tp3 tp4")
def norm_in_groups() -> Setup:
    """Statistics per group: groups go to ranks, none is cut."""
    return between(lambda s, y: s.norm(y.transpose(1, 2)).transpose(1, 2), norm=nn.GroupNorm(3, 12))


@case("tp2 tp3")
def norm_per_group_by_view() -> Setup:
    def inner(s: Net, y: Tensor) -> Tensor:
        return F.rms_norm(y.view(2, 5, 3, 4), (4,)).flatten(2) * s.scale

    return between(inner, scale=weight(12))


@case("tp2 tp3", flat=("up.bias",))
def instance_norm() -> Setup:
    return between(lambda s, y: F.instance_norm(y.transpose(1, 2)).transpose(1, 2))


@case("tp2 tp3 tp4")
def slopes_per_channel() -> Setup:
    """PReLU: its slopes lie along dim 1, whatever the last dim is; here both have one size."""

    def run(s: Net, x: Tensor) -> Tensor:
        return s.down(s.slopes(s.up(x)))

    parts = dict(up=nn.Conv1d(4, 7, 1), slopes=nn.PReLU(7), down=nn.Conv1d(7, 4, 1))
    return Setup(Net(run, **parts), (torch.randn(2, 4, 7),))


@case("tp2 tp3 tp4")
def softmax_over_width() -> Setup:
    return between(lambda s, y: y.softmax(-1))


@case("tp2 tp3")
def log_softmax_over_width() -> Setup:
    return between(lambda s, y: y.log_softmax(-1))


@case("tp2 tp3", flat=("up.bias",))
def softmax_over_tokens() -> Setup:
    return between(lambda s, y: y.softmax(1))


@case("tp2 tp3")
def log_sum_exp_and_extremes() -> Setup:
    def inner(s: Net, y: Tensor) -> Tensor:
        ends = y.logsumexp(-1, keepdim=True) + y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)
        return y * ends

    return between(inner)


@case("tp2 tp3")
def moments_of_width() -> Setup:
    def inner(s: Net, y: Tensor) -> Tensor:
        spread = y.var(-1, keepdim=True) + y.std(-1, keepdim=True, unbiased=False)
        return (y - y.mean(-1, keepdim=True)) / (1 + spread) + y.prod(-1, keepdim=True)

    return between(inner)


@case("tp2 tp3")
def normalize_and_cosine() -> Setup:
    def inner(s: Net, y: Tensor) -> Tensor:
        return F.normalize(y, dim=-1) * F.cosine_similarity(y, y.roll(1, 1), dim=-1)[..., None]

    return between(inner)


@case("tp2 tp3")
def running_sums() -> Setup:
    """cumsum along tokens and along the split width."""
    return between(lambda s, y: y.cumsum(1) + 0.1 * y.cumsum(-1))


@case("tp2 tp3")
def recurrence_by_hand() -> Setup:
    """A diagonal recurrence over five tokens, unrolled."""

    def inner(s: Net, y: Tensor) -> Tensor:
        h, out = torch.zeros_like(y[:, 0]), []
        for t in range(y.size(1)):
            h = s.decay.sigmoid() * h + y[:, t]
            out.append(h.tanh())
        return torch.stack(out, 1)

    return between(inner, decay=weight(12))


@case("tp2 tp3 tp4")
def causal_depthwise_conv() -> Setup:
    def inner(s: Net, y: Tensor) -> Tensor:
        return s.conv(y.transpose(1, 2))[..., : y.size(1)].transpose(1, 2) * y

    return between(inner, conv=nn.Conv1d(12, 12, 3, groups=12, padding=2))


@case("tp2 tp3")
def full_conv() -> Setup:
    return between(
        lambda s, y: s.conv(y.transpose(1, 2)).transpose(1, 2).relu(),
        conv=nn.Conv1d(12, 12, 3, padding=1),
    )


@case("tp2 tp3")
def grouped_conv() -> Setup:
    return between(
        lambda s, y: s.conv(y.transpose(1, 2)).transpose(1, 2),
        conv=nn.Conv1d(12, 6, 3, groups=3, padding=1),
        back=6,
    )


@case("tp2 tp3")
def transposed_conv() -> Setup:
    return between(
        lambda s, y: F.gelu(s.conv(y.transpose(1, 2)).transpose(1, 2)),
        conv=nn.ConvTranspose1d(12, 12, 2, stride=2),
    )


@case("tp2 tp3")
def patches_and_pooling() -> Setup:
    """A small image model: patches, a strided conv, average and max pooling, a head."""

    def run(s: Net, image: Tensor) -> Tensor:
        x = s.mix(F.gelu(s.patch(image)))
        x = torch.cat([F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 1)], 1).flatten(1)
        return s.head(x)

    parts = dict(patch=nn.Conv2d(3, 9, 2, 2), mix=nn.Conv2d(9, 6, 3, padding=1), head=linear(12, 5))
    return Setup(Net(run, **parts), (torch.randn(2, 3, 6, 6),))


@case("tp2", exact=False, flat=("conv.bias",))
def batch_norm_trains() -> Setup:
    """Running statistics move; channels are split or not, the buffers are those of one process."""

    def run(s: Net, image: Tensor) -> Tensor:
        return s.out(s.norm(s.conv(image)).relu())

    parts = dict(conv=nn.Conv2d(3, 6, 3), norm=nn.BatchNorm2d(6), out=nn.Conv2d(6, 4, 3))
    return Setup(Net(run, **parts).train(), (torch.randn(3, 3, 7, 7),))


@case("tp2 tp3")
def batch_norm_evaluates() -> Setup:
    model = nn.Sequential(nn.Linear(7, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))
    return Setup(model.eval(), (torch.randn(4, 7),))


@case("tp2 tp3")
def tokens_that_mix() -> Setup:
    """MLP-mixer: a linear over tokens, then one over channels."""

    def run(s: Net, x: Tensor) -> Tensor:
        x = x + s.t2(F.gelu(s.t1(x.transpose(1, 2)))).transpose(1, 2)
        return x + s.c2(F.gelu(s.c1(s.norm(x))))

    parts = dict(t1=linear(5, 9), t2=linear(9, 5), c1=linear(7, 12), c2=linear(12, 7))
    return Setup(Net(run, **parts, norm=nn.LayerNorm(7)), (torch.randn(2, 5, 7),))


@case("tp2 tp3", "R2")
def lstm_whole() -> Setup:
    def run(s: Net, x: Tensor) -> Tensor:
        y, (h, c) = s.rnn(x)
        return s.out(y) + h[-1][:, None, :5] * c[-1][:, None, :5]

    parts = dict(rnn=nn.LSTM(7, 6, 2, batch_first=True, bidirectional=True), out=linear(12, 5))
    return Setup(Net(run, **parts), (torch.randn(2, 4, 7),))


@case("tp2 tp3", "R2")
def gru_whole() -> Setup:
    def run(s: Net, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        y, h = s.rnn(x, h)
        return s.out(y), h

    model = Net(run, rnn=nn.GRU(7, 6), out=linear(6, 5))
    return Setup(model, (torch.randn(4, 2, 7), torch.randn(1, 2, 6)))


@case("tp2 tp3")
def bilinear_and_outer() -> Setup:
    """A product of the width with itself: one factor twice in a value."""

    def inner(s: Net, y: Tensor) -> Tensor:
        outer = y[..., :, None] * y[..., None, :]
        return outer.mean(-1) + outer.diagonal(dim1=-2, dim2=-1) + s.pair(y, y)

    return between(inner, f=6, pair=nn.Bilinear(6, 6, 6))


@case("tp2 tp3")
def gram_of_width() -> Setup:
    def inner(s: Net, y: Tensor) -> Tensor:
        gram = y.mT @ y / y.size(1)
        return y @ (gram + gram.mT).softmax(-1)

    return between(inner, f=6)


@case("tp2 tp3")
def gram_of_tokens() -> Setup:
    def inner(s: Net, y: Tensor) -> Tensor:
        near = torch.exp(-torch.cdist(y, y + 1).square() / 40)
        return near @ y

    return between(inner, f=6)
