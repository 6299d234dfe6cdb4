"""Random models: operators of every kind composed by dice, with sizes that seldom divide.

A model is a recipe, made from a seed by trying operators on the values made so far; what eager
refuses is not taken. Every recipe prints on a few lines, one an operator, so that a failure can be
read. The handed cases hold kinds that somebody thought of; these hold what nobody did.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.case import Setup

LIMIT = 4000  # elements of a value: larger ones are not made
SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12)


class Recipe(nn.Module):
    """`steps`: (name, inputs by index, call with the module's own weights)."""

    def __init__(self, seed: int, length: int = 8, batch: int = 0) -> None:
        super().__init__()
        self.dice = random.Random(seed)
        self.batch = batch
        self.weights = nn.ParameterList()
        self.kept = 0
        self.steps: list[tuple[str, tuple[int, ...], tuple[int, ...], Callable[..., Tensor]]] = []
        self.args = self._inputs()
        made: list[Tensor] = list(self.args)
        tries = 0
        while len(self.steps) < length and tries < 20 * length:
            tries += 1
            name, make = self.dice.choice(OPERATORS)
            self.weights = nn.ParameterList(list(self.weights)[: self.kept])
            try:
                with torch.no_grad():
                    inputs, call = make(self, made)
                    weights = tuple(range(self.kept, len(self.weights)))
                    out = call(*(made[i] for i in inputs), *(self.weights[w] for w in weights))
                    good = 0 < out.numel() <= LIMIT and bool(out.isfinite().all())
            except (RuntimeError, IndexError, ValueError, TypeError):
                good = False
            if not good or out.abs().max() > 1e4:
                continue
            self.kept = len(self.weights)
            self.steps.append((name, inputs, weights, call))
            made.append(out)
        self.weights = nn.ParameterList(list(self.weights)[: self.kept])
        used = {i for _, inputs, _, _ in self.steps for i in inputs}
        self.outputs = [i for i in range(len(self.args), len(made)) if i not in used]

    def _inputs(self) -> tuple[Tensor, ...]:
        pick = self.dice.choice
        b, t = self.batch or pick((1, 2, 3)), pick((3, 4, 5, 6))
        return tuple(torch.randn(b, t, pick((4, 6, 8, 9, 12)), dtype=torch.float64) for _ in "ab")

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        made = list(args)
        for _, inputs, weights, call in self.steps:
            made.append(call(*(made[i] for i in inputs), *(self.weights[w] for w in weights)))
        return tuple(made[i] for i in self.outputs)

    def weight(self, *shape: int) -> None:
        """One more weight, which the operator's call takes after its inputs."""
        self.weights.append(nn.Parameter(torch.randn(*shape, dtype=torch.float64) * 0.5))

    def __repr__(self) -> str:
        lines = [f"{name}({', '.join(f'v{i}' for i in inputs)})" for name, inputs, _, _ in self.steps]
        first = len(self.args)
        shapes = [f"v{i}: {tuple(x.shape)}" for i, x in enumerate(self.args)]
        return "\n".join([*shapes, *(f"v{first + i} = {x}" for i, x in enumerate(lines))])


def recipe(seed: int, length: int = 8, batch: int = 0) -> Setup:
    """The model of a seed with its call; `batch`: rows of dim 0 of its inputs, 0 for any."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Recipe(seed, length, batch)
        args = tuple(x.requires_grad_() for x in model.args)
        return Setup(model, args)


# --- operators: (recipe, values) -> (inputs, call) ------------------------------------------------

Made = tuple[tuple[int, ...], Callable[..., Tensor]]


def _last(r: Recipe, made: list[Tensor]) -> int:
    """Mostly a young value: long chains find more than wide ones."""
    n = len(made)
    return r.dice.choice([n - 1, n - 1, r.dice.randrange(n)])


def unary(call: Callable[[Tensor], Tensor]) -> Callable[[Recipe, list[Tensor]], Made]:
    return lambda r, made: ((_last(r, made),), call)


def over_a_dim(call: Callable[[Tensor, int], Tensor]) -> Callable[[Recipe, list[Tensor]], Made]:
    def make(r: Recipe, made: list[Tensor]) -> Made:
        i = _last(r, made)
        dim = r.dice.randrange(-made[i].dim(), made[i].dim())
        return (i,), lambda x: call(x, dim)

    return make


def linear(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    o = r.dice.choice(SIZES)
    r.weight(o, made[i].size(-1))
    if r.dice.random() < 0.5:
        r.weight(o)
    return (i,), F.linear


def matmul(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    shape = made[i].shape
    mates = [j for j, y in enumerate(made) if y.dim() >= 2 and y.size(-2) == shape[-1]]
    mirrored = [j for j, y in enumerate(made) if y.dim() >= 2 and y.size(-1) == shape[-1]]
    if mates and r.dice.random() < 0.5:
        return (i, r.dice.choice(mates)), torch.matmul
    return (i, r.dice.choice(mirrored)), lambda x, y: x @ y.transpose(-1, -2)


def binary(call: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Recipe, list[Tensor]], Made]:
    def make(r: Recipe, made: list[Tensor]) -> Made:
        i = _last(r, made)
        mates = []
        for j, y in enumerate(made):
            try:
                torch.broadcast_shapes(made[i].shape, y.shape)
                mates.append(j)
            except RuntimeError:
                continue
        return (i, r.dice.choice(mates)), call

    return make


def weighted(call: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Recipe, list[Tensor]], Made]:
    """With a weight that broadcasts."""

    def make(r: Recipe, made: list[Tensor]) -> Made:
        i = _last(r, made)
        shape = list(made[i].shape)[r.dice.randrange(max(made[i].dim(), 1)) :]
        shape = [n if r.dice.random() < 0.8 else 1 for n in shape]
        r.weight(*shape)
        return (i,), call

    return make


def view(r: Recipe, made: list[Tensor]) -> Made:
    """Merge or split dims, in or out of order."""
    i = _last(r, made)
    shape = list(made[i].shape)
    at = r.dice.randrange(len(shape))
    if len(shape) > 1 and r.dice.random() < 0.4 and at + 1 < len(shape):
        new = [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]
    elif r.dice.random() < 0.2:
        new = [-1, shape[-1]]
    else:
        n = shape[at]
        parts = [k for k in range(2, n) if n % k == 0]
        k = r.dice.choice(parts)
        new = [*shape[:at], k, n // k, *shape[at + 1 :]]
    return (i,), lambda x: x.reshape(new)


def permute(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    order = list(range(made[i].dim()))
    r.dice.shuffle(order)
    return (i,), lambda x: x.permute(order)


def narrow(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    dim = r.dice.randrange(made[i].dim())
    n = made[i].size(dim)
    start = r.dice.randrange(n)
    stop = r.dice.randrange(start + 1, n + 1)
    step = r.dice.choice((1, 1, 1, 2))
    index = [slice(None)] * made[i].dim()
    index[dim] = slice(start, stop, step)
    return (i,), lambda x: x[tuple(index)]


def select(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    dim = r.dice.randrange(made[i].dim())
    at = r.dice.randrange(made[i].size(dim))
    return (i,), lambda x: x.select(dim, at)


def cat(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    dim = r.dice.randrange(made[i].dim())

    def fits(y: Tensor) -> bool:
        x = made[i]
        return x.dim() == y.dim() and all(
            a == b for d, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if d != dim
        )

    mates = [j for j, y in enumerate(made) if fits(y)]
    picked = (i, *(r.dice.choice(mates) for _ in range(r.dice.choice((1, 1, 2)))))
    return picked, lambda *xs: torch.cat(xs, dim)


def gated(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    even = [d for d, n in enumerate(made[i].shape) if n % 2 == 0]
    dim = r.dice.choice(even)

    def call(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim)
        return F.silu(a) * b

    return (i,), call


def halves_turned(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    n = made[i].size(-1)

    def call(x: Tensor) -> Tensor:
        return x * 0.3 + torch.cat([-x[..., n // 2 :], x[..., : n // 2]], -1)

    return (i,), call


def pieces(r: Recipe, made: list[Tensor]) -> Made:
    """Uneven pieces, put together in another order."""
    i = _last(r, made)
    dim = r.dice.randrange(made[i].dim())
    n = made[i].size(dim)
    cut = r.dice.randrange(1, n)

    def call(x: Tensor) -> Tensor:
        a, b = x.split([cut, n - cut], dim)
        return torch.cat([b * 2, a.tanh()], dim)

    return (i,), call


def taken(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    dim = r.dice.randrange(made[i].dim())
    rows = torch.tensor([r.dice.randrange(made[i].size(dim)) for _ in range(r.dice.choice(SIZES))])
    return (i,), lambda x: x.index_select(dim, rows)


def indexed(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    rows = torch.tensor([r.dice.randrange(made[i].size(0)) for _ in range(r.dice.choice(SIZES))])
    return (i,), lambda x: x[rows]


def looked_up(r: Recipe, made: list[Tensor]) -> Made:
    """An embedding of ids that are made from values."""
    i = _last(r, made)
    r.weight(7, r.dice.choice(SIZES))
    return (i,), lambda x, w: F.embedding((x.detach()[..., 0] * 3).long().remainder(7), w)


def attention(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    x = made[i]
    if x.dim() != 4 or _overlaps(x):
        raise ValueError
    causal = r.dice.random() < 0.5
    mates = [j for j, y in enumerate(made) if y.shape == x.shape]
    ks = (r.dice.choice(mates), r.dice.choice(mates))
    return (i, *ks), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _overlaps(x: Tensor) -> bool:
    """As windows do: torch's kernel gives such a query's result memory that it does not fill."""
    reach = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) + 1
    return 0 not in x.stride() and reach < x.numel()


def normed(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    last = r.dice.choice((1, 1, 2))
    shape = list(made[i].shape)[-last:]
    r.weight(*shape)
    if r.dice.random() < 0.5:
        return (i,), lambda x, w: F.layer_norm(x, shape, w)
    return (i,), lambda x, w: F.rms_norm(x, shape, w, 1e-5)


def masked(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    a, b = made[i].shape[-2:]
    low = torch.ones(a, b, dtype=torch.bool).tril()
    return (i,), lambda x: x.masked_fill(~low, 0.0)


def convolved(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    if made[i].dim() != 3:
        raise ValueError
    c, o, k = made[i].size(1), r.dice.choice((2, 4, 6)), r.dice.choice((1, 2, 3))
    r.weight(o, c, k)
    return (i,), lambda x, w: F.conv1d(x, w, padding=k // 2)


def summed(call: Callable[..., Tensor]) -> Callable[[Recipe, list[Tensor]], Made]:
    def make(r: Recipe, made: list[Tensor]) -> Made:
        i = _last(r, made)
        dim, keep = r.dice.randrange(-made[i].dim(), made[i].dim()), r.dice.random() < 0.5
        return (i,), lambda x: call(x, dim, keepdim=keep)

    return make


def repeated(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    dim = r.dice.randrange(made[i].dim())
    n = r.dice.choice((2, 3))
    return (i,), lambda x: x.repeat_interleave(n, dim)


def expanded(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    dim = r.dice.randrange(made[i].dim() + 1)
    n = r.dice.choice((2, 3))
    merge = r.dice.random() < 0.5 and dim < made[i].dim()

    def call(x: Tensor) -> Tensor:
        y = x.unsqueeze(dim).expand(*x.shape[:dim], n, *x.shape[dim:])
        return y.flatten(dim, dim + 1) if merge else y

    return (i,), call


def padded(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    pads = [r.dice.choice((0, 1, 2)) for _ in range(2 * r.dice.choice((1, 2)))]
    return (i,), lambda x: F.pad(x, pads, value=0.5)


def einsum(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    if made[i].dim() != 3:
        raise ValueError
    mates = [j for j, y in enumerate(made) if y.dim() == 3 and y.size(0) == made[i].size(0)]
    spelled = r.dice.choice(
        ["abc,ade->acde", "abc,abd->acd", "abc,acd->abd", "abc,abc->ab", "abc,adc->abd", "abc,dbc->ad"]
    )
    return (i, r.dice.choice(mates)), lambda x, y: torch.einsum(spelled, x, y)


def grouped(r: Recipe, made: list[Tensor]) -> Made:
    """A weight for each row of a batch dim, as mixtures of experts have."""
    i = _last(r, made)
    if made[i].dim() < 3:
        raise ValueError
    r.weight(made[i].size(-3), made[i].size(-1), r.dice.choice(SIZES))
    return (i,), torch.matmul


def scattered(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    n = made[i].size(0)
    rows = torch.tensor([r.dice.randrange(5) for _ in range(n)])
    return (i,), lambda x: x.new_zeros(5, *x.shape[1:]).index_add(0, rows, x)


def best(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    k = r.dice.randrange(1, made[i].size(-1) + 1)
    return (i,), lambda x: x.topk(k, -1).values


def sequenced(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    dim = r.dice.randrange(made[i].dim())
    return (i,), lambda x: x.sort(dim).values


def windows(r: Recipe, made: list[Tensor]) -> Made:
    i = _last(r, made)
    dim = r.dice.randrange(made[i].dim())
    size = r.dice.choice((1, 2, 3))
    return (i,), lambda x: x.unfold(dim, size, 1)


OPERATORS: list[tuple[str, Callable[[Recipe, list[Tensor]], Made]]] = [
    *[("linear", linear)] * 8,
    *[("view", view)] * 6,
    *[("permute", permute)] * 4,
    *[("matmul", matmul)] * 3,
    ("narrow", narrow),
    ("narrow", narrow),
    ("select", select),
    ("cat", cat),
    ("cat", cat),
    ("gated", gated),
    ("gated", gated),
    ("halves_turned", halves_turned),
    ("pieces", pieces),
    ("taken", taken),
    ("indexed", indexed),
    ("looked_up", looked_up),
    ("attention", attention),
    ("attention", attention),
    ("normed", normed),
    ("normed", normed),
    ("masked", masked),
    ("convolved", convolved),
    ("repeated", repeated),
    ("expanded", expanded),
    ("padded", padded),
    ("einsum", einsum),
    ("grouped", grouped),
    ("scattered", scattered),
    ("best", best),
    ("sequenced", sequenced),
    ("windows", windows),
    ("add", binary(torch.add)),
    ("add", binary(torch.add)),
    ("mul", binary(torch.mul)),
    ("maximum", binary(torch.maximum)),
    ("where", binary(lambda x, y: torch.where(x > 0, x, y))),
    ("scale", weighted(torch.mul)),
    ("bias", weighted(torch.add)),
    ("relu", unary(F.relu)),
    ("gelu", unary(F.gelu)),
    ("tanh", unary(torch.tanh)),
    ("plus", unary(lambda x: x + 1.5)),
    ("minus", unary(lambda x: 1 - x * 2)),
    ("square", unary(lambda x: x * x * 0.1)),
    ("bmm_self", unary(lambda x: x @ x.transpose(-1, -2))),
    ("triu", unary(torch.triu)),
    ("diagonal", unary(lambda x: x.diagonal(0, -2, -1))),
    ("flip", over_a_dim(lambda x, d: x.flip(d))),
    ("roll", over_a_dim(lambda x, d: x.roll(1, d))),
    ("cumsum", over_a_dim(lambda x, d: x.cumsum(d))),
    ("softmax", over_a_dim(lambda x, d: x.softmax(d))),
    ("log_softmax", over_a_dim(lambda x, d: x.log_softmax(d))),
    ("normalize", over_a_dim(lambda x, d: F.normalize(x + 0.1, dim=d))),
    ("sum", summed(torch.sum)),
    ("mean", summed(torch.mean)),
    ("amax", summed(torch.amax)),
    ("logsumexp", summed(torch.logsumexp)),
    ("std", summed(lambda x, d, keepdim: (x * x + 1).mean(d, keepdim=keepdim).rsqrt())),
]
