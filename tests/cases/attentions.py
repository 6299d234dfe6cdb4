"""More attentions: sinks, caps, windows, latents, mixed heads, other layouts, torch's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases.blocks import Net, attend, heads, linear, merge, repeat_heads, weight
from tests.cases.case import Setup, case
from tests.cases.positions import D, H, angles, rotate_half, separate, three


@case("tp2 tp3 tp4")
def sinks() -> Setup:
    """gpt-oss: a learned logit per head joins the scores and leaves after softmax."""

    def run(s: Net, x: Tensor) -> Tensor:
        q, k, v = three(s, x)
        scores = q @ k.mT / 2
        sink = s.sink.reshape(1, H, 1, 1).expand(x.size(0), -1, x.size(1), -1)
        p = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return s.o(merge(p @ v))

    return separate(run, sink=weight(H, scale=1.0))


@case()
def soft_cap_and_window() -> Setup:
    def run(s: Net, x: Tensor) -> Tensor:
        q, k, v = three(s, x)
        scores = 5 * torch.tanh(q @ k.mT / 5)
        i, j = torch.arange(x.size(1))[:, None], torch.arange(x.size(1))
        seen = (j <= i) & (j > i - 3)
        scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
        return s.o(merge(scores.softmax(-1) @ v))

    return separate(run, t=7)


@case("tp2 tp3")
def scale_per_head_and_norms() -> Setup:
    """Cosine attention of Swin v2: per-head temperature, clamped and exponentiated."""

    def run(s: Net, x: Tensor) -> Tensor:
        q, k, v = three(s, x)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        scores = scores * s.scale.clamp(max=4.0).exp()
        return s.o(merge(scores.softmax(-1) @ v))

    return separate(run, scale=weight(H, 1, 1, scale=1.0))


@case("tp2 tp3", flat=("k.bias", "pre.bias"))
def heads_that_mix() -> Setup:
    """Talking heads: a linear over the heads' dim, before and after softmax."""

    def run(s: Net, x: Tensor) -> Tensor:
        q, k, v = three(s, x)
        scores = s.pre((q @ k.mT / 2).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        p = s.post(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return s.o(merge(p @ v))

    return separate(run, pre=linear(H, H), post=linear(H, H))


@case("tp2 tp3 tp4", flat=("k.bias",))
def differential_heads() -> Setup:
    """Two softmaxes a head, subtracted, with a learned weight and a norm per head."""

    def run(s: Net, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k = (p(x).view(b, t, 3, 2, D).permute(0, 2, 3, 1, 4) for p in (s.q, s.k))
        v = s.v(x).view(b, t, 3, 2 * D).transpose(1, 2)
        p = (q @ k.mT / 2).softmax(-1)
        y = s.norm((p[:, :, 0] - s.mix.exp() * p[:, :, 1]) @ v)
        return s.o(merge(y))

    return separate(run, norm=nn.RMSNorm(2 * D), mix=nn.Parameter(torch.tensor(-0.5)))


@case("tp2 tp3")
def latent_kv() -> Setup:
    """DeepSeek: k and v from a latent, one rotary key for all heads, v narrower than k."""

    def run(s: Net, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        latent, rope = s.down(x).split([6, 2], -1)
        k, v = heads(s.up(s.norm(latent)), H).split([4, 3], -1)
        q = heads(s.q(x), H)
        angle = torch.cat([angles(t, 1)] * 2, -1)
        turn = lambda y: y * angle.cos() + rotate_half(y) * angle.sin()  # noqa: E731
        shared = turn(rope.view(b, 1, t, 2)).expand(-1, H, -1, -1)
        q = torch.cat([q[..., :4], turn(q[..., 4:])], -1)
        return s.o(merge(attend(q, torch.cat([k, shared], -1), v)))

    parts = dict(down=linear(12, 8), up=linear(6, H * 7, False), norm=nn.RMSNorm(6))
    parts |= dict(q=linear(12, H * 6), o=linear(H * 3, 12))
    return Setup(Net(run, **parts), (torch.randn(2, 5, 12),))


@case("tp2 tp3 tp4", flat=("k.bias",))
def cross_attention_with_padding() -> Setup:
    def run(s: Net, x: Tensor, memory: Tensor, pad: Tensor) -> Tensor:
        q, k, v = heads(s.q(x), H), heads(s.k(memory), H), heads(s.v(memory), H)
        mask = torch.zeros(pad.shape, dtype=x.dtype).masked_fill(pad, float("-inf"))
        return x + s.o(merge(attend(q, k, v, mask[:, None, None], causal=False)))

    parts = dict(q=linear(12, 24), k=linear(10, 24), v=linear(10, 24), o=linear(24, 12))
    pad = torch.arange(7)[None] >= torch.tensor([7, 4])[:, None]
    inputs = torch.randn(2, 3, 12), torch.randn(2, 7, 10, requires_grad=True), pad
    return Setup(Net(run, **parts), inputs)


@case("tp2 tp3", flat=("k.bias",))
def merged_batch_and_heads() -> Setup:
    """Bloom and OPT of old: [(b h), t, d] and baddbmm."""

    def run(s: Net, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.reshape(b * H, t, D) for y in three(s, x))
        bias = s.slopes[:, None, None] * torch.arange(t)
        bias = bias[None].expand(b, -1, t, -1).reshape(b * H, t, t)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=0.5)
        y = torch.bmm(scores.softmax(-1), v).view(b, H, t, D)
        return s.o(merge(y))

    return separate(run, slopes=2.0 ** -torch.arange(1.0, H + 1))


@case("tp2 tp3 tp4")
def weights_of_three_dims() -> Setup:
    """Flax: q, k, v are [i, h, d] and o is [h, d, i], by einsum."""

    def run(s: Net, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bti,ihd->bthd", x, w) for w in (s.q, s.k, s.v))
        p = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 2).softmax(-1)
        return torch.einsum("bqhd,hdi->bqi", torch.einsum("bhqk,bkhd->bqhd", p, v), s.o)

    parts = dict(q=weight(12, H, D), k=weight(12, H, D), v=weight(12, H, D), o=weight(H, D, 12))
    return Setup(Net(run, **parts), (torch.randn(2, 5, 12),))


@case("tp2 tp3", flat=("k.bias",))
def sequence_first() -> Setup:
    """[t, b, d], heads merged with the batch: fairseq's and nn.MultiheadAttention's order."""

    def run(s: Net, x: Tensor) -> Tensor:
        t, b, _ = x.shape
        q, k, v = (p(x).contiguous().view(t, b * H, D).transpose(0, 1) for p in (s.q, s.k, s.v))
        y = torch.bmm((torch.bmm(q, k.mT) / 2).softmax(-1), v)
        return s.o(y.transpose(0, 1).contiguous().view(t, b, H * D))

    return separate(run)


@case("tp2 tp3")
def linear_attention() -> Setup:
    """No softmax: a running sum over the sequence of outer products k v."""

    def run(s: Net, x: Tensor) -> Tensor:
        q, k, v = three(s, x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bhtk,bhtv->bhtkv", k, v).cumsum(2)
        norm = (q * k.cumsum(2)).sum(-1, keepdim=True)
        return s.o(merge(torch.einsum("bhtk,bhtkv->bhtv", q, state) / norm))

    return separate(run)


@case("tp2 tp3")
def every_size_is_six() -> Setup:
    """b = t = h = d = 6: a split that goes by sizes takes the wrong dim."""

    def run(s: Net, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(6, 6, 6, 1).transpose(1, 2) for p in (s.q, s.k, s.v))
        return s.o(merge(attend(q, k, v)))

    parts = dict(q=linear(6, 6), k=linear(6, 6, False), v=linear(6, 6), o=linear(6, 6))
    return Setup(Net(run, **parts), (torch.randn(6, 6, 6),))


@case("tp2 tp3 tp4")
def torch_multihead_attention() -> Setup:
    def run(s: Net, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return s.attention(x, memory, memory, need_weights=True)

    model = Net(run, attention=nn.MultiheadAttention(12, 6, batch_first=True))
    return Setup(model, (torch.randn(2, 5, 12), torch.randn(2, 7, 12)))


@case("tp2 tp3")
def torch_multihead_attention_no_weights() -> Setup:
    def run(s: Net, x: Tensor) -> Tensor:
        return s.attention(x, x, x, need_weights=False)[0]

    return Setup(Net(run, attention=nn.MultiheadAttention(12, 6)), (torch.randn(5, 2, 12),))


@case("tp2 tp3")
def torch_encoder_layer() -> Setup:
    layer = nn.TransformerEncoderLayer(12, 6, 20, 0.0, "gelu", batch_first=True, norm_first=True)
    return Setup(layer, (torch.randn(2, 5, 12),))


@case("tp2 tp3")
def torch_transformer() -> Setup:
    model = nn.Transformer(12, 6, 1, 1, 10, 0.0, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(3)
    return Setup(
        model,
        (torch.randn(2, 5, 12), torch.randn(2, 3, 12)),
        {"tgt_mask": causal, "tgt_is_causal": True},
    )


@case("tp2 tp3", flat=("k.bias",))
def kept_and_repeated_heads() -> Setup:
    """Some heads go on, some are dropped, some are used twice: a constant index over heads."""

    def run(s: Net, x: Tensor) -> Tensor:
        y = attend(*three(s, x))
        return s.o(merge(y[:, torch.tensor([0, 1, 1, 3, 5, 5])]))

    return separate(run)


@case("tp2 tp3", flat=("k.bias",))
def repeat_heads_by_gather() -> Setup:
    """Key/value heads chosen by a table that is no even repeat: heads 0 0 0 1 1 2."""

    def run(s: Net, x: Tensor) -> Tensor:
        at = torch.tensor([0, 0, 0, 1, 1, 2])
        k, v = heads(s.k(x), 3).index_select(1, at), heads(s.v(x), 3)[:, at]
        return s.o(merge(attend(heads(s.q(x), H), k, v)))

    parts = dict(q=linear(12, 24), k=linear(12, 12), v=linear(12, 12), o=linear(24, 12))
    return Setup(Net(run, **parts), (torch.randn(2, 5, 12),))


@case("tp2 tp3", flat=("k.bias",))
def two_layers_share_kv() -> Setup:
    """The second layer attends with the first layer's keys and values."""

    def run(s: Net, x: Tensor) -> Tensor:
        k, v = heads(s.k(x), 3), heads(s.v(x), 3)
        x = x + s.o(merge(attend(heads(s.q(x), H), k, v)))
        return x + s.o2(merge(attend(heads(s.q2(x), H), repeat_heads(k, H), v)))

    parts = dict(q=linear(12, 24), k=linear(12, 12), v=linear(12, 12), o=linear(24, 12))
    model = Net(run, **parts, q2=linear(12, 24), o2=linear(24, 12))
    return Setup(model, (torch.randn(2, 5, 12),))


@case("tp2 tp3", flat=("k.bias",))
def causal_over_two_sequences() -> Setup:
    """`is_causal` counts positions, though queries and keys are of different sequences."""

    def run(s: Net, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = heads(s.q(x), H), heads(s.k(memory), H), heads(s.v(memory), H)
        return s.o(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    parts = dict(q=linear(12, 24), k=linear(12, 24), v=linear(12, 24), o=linear(24, 12))
    return Setup(Net(run, **parts), (torch.randn(1, 13, 12), torch.randn(1, 13, 12)))
