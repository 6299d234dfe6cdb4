"""The equation table of ATen: one line an operator, helpers first, the table at the end.

How to read a line: `rule.py`. The structure of dims is learned in `views.py`. What stands in no line,
runs whole on every rank, and the report says so; it is never guessed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from plait.rules import views
from plait.rules.describe import Access, Describer, Letter, Rule, bind, rebind, resize
from plait.rules.equation import Factor, product
from plait.rules.facts import Pattern
from plait.rules.lookups import assign, embedding, gather, index, index_put, index_select, scatter
from plait.rules.own import SLOPED
from plait.rules.rule import Binder, Elementwise, Equation, Scaled, is_tensor, outputs
from plait.rules.split import Split
from plait.rules.windows import convolution, patches, unfold, windows

aten = torch.ops.aten


def reduction(kind: str, linear: bool = False) -> Rule:
    """sum, mean, amax, ...: `* r -> *`; what is linear passes partial sums, others do not."""

    def rule(d: Describer, node: fx.Node) -> Access:
        bound = bind(node)
        operand = d.operand(bound["self"])
        rank = len(operand.dims)
        which = bound.get("dim")
        which = range(rank) if which is None or which == [] else which
        gone = {i % rank for i in ([which] if isinstance(which, int) else which)} if rank else set()
        keep = bool(bound.get("keepdim", False))
        sizes = iter(d.sizes(node))
        result: list[Factor] = []
        letters: list[Letter] = []
        for i, f in enumerate(operand.dims):
            if i not in gone:
                result.append(f)
                next(sizes)
            elif keep:
                result.append(d.fresh(next(sizes)))
            if f.size > 1:
                letters.append(Letter(f, kind if i in gone else "parallel"))
        results = (tuple(result),) * max(1, outputs(node))
        carries = ((0,),) if linear else ()
        return Access((operand,), results, tuple(letters), carries)

    rule.__doc__ = f"* r -> *   r {kind}" + (", partial self passes" if linear else "")
    return rule


def along(dim: str, default: int, kind: str) -> Rule:
    def rule(d: Describer, node: fx.Node) -> Access:
        bound = bind(node)
        operand = d.operand(bound["self"])
        rank = len(operand.dims)
        at = bound.get(dim, default)
        at = at % rank if rank else 0
        sizes = d.sizes(node)
        result = list(operand.dims)
        letters = [
            Letter(f, kind if i == at else "parallel", f"{node.target} spans it")
            for i, f in enumerate(operand.dims)
            if f.size > 1
        ]
        if rank and sizes[at] != result[at].size:  # topk: a new letter
            result[at] = d.fresh(sizes[at])
            letters.append(Letter(result[at], "whole", "chosen by value"))
        results = (tuple(result),) * max(1, outputs(node))
        return Access((operand,), results, tuple(letters))

    rule.__doc__ = f"* d -> * d   d, which is `{dim}`, {kind}"
    return rule


def matmul(d: Describer, node: fx.Node) -> Access:
    """`B m i, B i n -> B m n`, B broadcast; vectors lose m or n."""
    bound = bind(node)
    _, other = [name for name, value in bound.items() if is_tensor(value)]  # mm: mat2, mv: vec
    left = len(d.operand(bound["self"]).dims)
    right = len(d.operand(bound[other]).dims)
    a = {1: "i", 2: "m i"}.get(left, "* m i")
    b = {1: "i", 2: "i n"}.get(right, "* i n")
    out = " ".join(
        ["*"] * (max(left, right) > 2) + ["m"] * (left > 1) + ["n"] * (right > 1)
    )
    text = f"self[{a}] {other}[{b}] -> [{out}]"
    return Equation(text, sum="i", carry=f"self | {other}")(d, node)


def added_matmul(out: str, factors: str) -> Rule:
    """`addmm`, `baddbmm`: a product and a term that broadcasts against it from the right."""

    def rule(d: Describer, node: fx.Node) -> Access:
        rank = len(d.operand(bind(node)["self"]).dims)
        term = " ".join(out.split()[len(out.split()) - rank :])
        first = factors.split("[")[0]
        text = f"self[{term}] {factors} -> [{out}]"
        return Equation(text, sum="i", added="self", carry=first)(d, node)

    rule.__doc__ = f"self[* or less] {factors} -> [{out}]   i sum, self added once"
    return rule


def attention(d: Describer, node: fx.Node) -> Access:
    """`b h q d, b h k d, b h k e, [b h q k] -> b h q e`: d and k whole; heads and batch parallel.

    Where no query sees a key behind its own row, k is a prefix. With enable_gqa the key/value heads are
    `g` where the query heads are `(g r)`.
    """
    access = _attention(d, node) if not bind(node).get("enable_gqa") else _grouped_queries(d, node)
    if access.reason:
        return access
    query, key = access.operands[0].dims, access.operands[1].dims[-2]
    products = ((*query, key), (*access.result, key))
    return _in_order(node, query[-2], key, replace(access, products=products))


def _grouped_queries(d: Describer, node: fx.Node) -> Access:
    bound = bind(node)
    q, k = d.operand(bound["query"]), d.operand(bound["key"])
    g, h = k.dims[-3], q.dims[-3]
    r = d.fresh(h.size // g.size)
    conflict = d.tie(node, h, product((g, r)))
    if conflict:
        return d.whole(node, str(conflict))
    text = "query[* h q d] key[* g k d] value[* g k e] attn_mask[* q k] -> [* h q e]"
    access = Equation(text, whole="d k")(d, node)
    letters = (*access.letters, Letter(r, "whole", "query heads of one key/value head"))
    return Access(access.operands, access.results, letters)


_attention = Equation(
    "query[* q d] key[* k d] value[* k e] attn_mask[* q k] -> [* q e]", whole="d k"
)


def _in_order(node: fx.Node, query: Factor, key: Factor, access: Access) -> Access:
    """A causal attention over one sequence is a prefix; over two, its mask goes by position."""
    bound, same = bind(node), query.root() is key.root()
    mask, causal = bound["attn_mask"], bool(bound["is_causal"])
    if not same and causal:
        letters = (replace(x, property="whole") if x.factor is query else x for x in access.letters)
        return replace(access, letters=tuple(letters))
    if not same or bound["dropout_p"] or not (causal or _sees_no_later(node, mask)):
        return access
    letters = (replace(x, property="prefix") if x.factor is key and x.property == "whole" else x
               for x in access.letters)
    so_far = [(i, len(o.dims) - (2 if i < 3 else 1)) for i, o in enumerate(access.operands) if i > 0]
    return replace(access, letters=tuple(letters), so_far=tuple(so_far))


def _sees_no_later(node: fx.Node, mask: Any) -> bool:
    """A constant mask by which every query sees itself and no later key."""
    if not isinstance(mask, fx.Node) or mask.op != "get_attr" or "mask" not in node.meta:
        return False
    pattern = Pattern.parse(node.meta["mask"])
    return pattern.kind in ("causal", "window", "chunk") and pattern.offset == 0


def layer_norm(d: Describer, node: fx.Node) -> Access:
    """`* d, d, d -> * d`, d stat: whole, or two small sums across its parts."""
    bound = bind(node)
    count = len(bound["normalized_shape"])
    names = [f"d{i}" for i in range(count)]
    binder = Binder(d, node)
    operands = [d.operand(bound["input"])]
    rank = len(operands[0].dims)
    lead = [f"b{i}" for i in range(rank - count)]
    binder.bind([*lead, *names], operands[0].dims)
    for name in ("weight", "bias"):
        if is_tensor(bound.get(name)):
            operands.append(d.operand(bound[name]))
            binder.bind(names, operands[-1].dims)
    results = tuple(
        binder.result([*lead, *names], d.sizes(node, i))
        if i == 0
        else binder.result([*lead, *["one"] * count], d.sizes(node, i))
        for i in range(max(1, outputs(node)))
    )
    kind = "stat" if count == 1 and len(results) == 1 else "whole"
    letters = binder.letters(dict.fromkeys(names, kind))
    return Access(tuple(operands), results, letters)


def group_norm(d: Describer, node: fx.Node) -> Access:
    """`b (g c) l, (g c), (g c) -> b (g c) l`: groups parallel, what is inside one whole."""
    bound = bind(node)
    operand = d.operand(bound["input"])
    groups = bound["num_groups"]
    channel = operand.dims[1]
    operands = [operand]
    binder = Binder(d, node)
    names = ["b", "c", *[f"l{i}" for i in range(len(operand.dims) - 2)]]
    binder.bind(names, operand.dims)
    for name in ("weight", "bias"):
        if is_tensor(bound.get(name)):
            operands.append(d.operand(bound[name]))
            binder.bind(["c"], operands[-1].dims)
    g, inside = d.fresh(groups), d.fresh(channel.size // groups)
    conflict = d.tie(node, channel, product((g, inside)))
    if conflict:
        return d.whole(node, str(conflict))
    result = binder.result(names, d.sizes(node))
    letters = binder.letters(dict.fromkeys(names[2:], "whole"))
    letters = (*letters, Letter(inside, "whole", "one group's statistics span it"))

    def local(node: fx.Node, split: Split, rank: int) -> Any:
        return rebind(node, num_groups=split.size(g, rank))

    return Access(tuple(operands), (result,), letters, (), local)


def prelu(d: Describer, node: fx.Node) -> Access:
    """`b c *, c -> b c *`: a slope for each channel, which is dim 1, or one for all."""
    x, slope = (d.operand(bind(node)[name]) for name in ("self", "weight"))
    names = [f"d{i}" for i in range(len(x.dims))]
    binder = Binder(d, node)
    binder.bind(names, x.dims)
    binder.bind(["d1" if f.size > 1 else "one" for f in slope.dims], slope.dims)
    return Access((x, slope), (binder.result(names, d.sizes(node)),), binder.letters({}))


def weight_norm(d: Describer, node: fx.Node) -> Access:
    """`o *, o -> o *` along `dim`: the norm of each row spans the other dims, where that is -1 all."""
    bound = bind(node)
    v, g = d.operand(bound["v"]), d.operand(bound["g"])
    dim = bound["dim"] % len(v.dims) if g.dims else None
    names = [f"d{i}" for i in range(len(v.dims))]
    binder = Binder(d, node)
    binder.bind(names, v.dims)
    binder.bind(names if g.dims else [], g.dims)
    result = binder.result(names, d.sizes(node))
    letters = binder.letters({n: "whole" for i, n in enumerate(names) if i != dim})
    return Access((v, g), (result,), letters)




def batch_norm(d: Describer, node: fx.Node) -> Access:
    """`b c l, c, c, c, c -> b c l`: all parallel by learned statistics, b and l whole by its own."""
    bound = bind(node)
    operands = [d.operand(bound["input"])]
    names = ["b", "c", *[f"l{i}" for i in range(len(operands[0].dims) - 2)]]
    binder = Binder(d, node)
    binder.bind(names, operands[0].dims)
    for name in ("weight", "bias", "running_mean", "running_var"):
        if is_tensor(bound.get(name)):
            operands.append(d.operand(bound[name]))
            binder.bind(["c"], operands[-1].dims)
    result = binder.result(names, d.sizes(node))
    rest = range(1, outputs(node))
    if not bound.get("training", False):
        empty = tuple(d.fresh_dims(node, i) for i in rest)  # statistics of this batch: none
        return Access(tuple(operands), (result, *empty), binder.letters({}))
    of_channels = tuple(binder.result(["c"], d.sizes(node, i)) for i in rest)
    own = {name: "whole" for name in names if name != "c"}
    return Access(tuple(operands), (result, *of_channels), binder.letters(own))


def cross_entropy(d: Describer, node: fx.Node) -> Access:
    """`t v, t -> `: v stat; t summed in a sum, whole in a mean (of as many as are valid)."""
    bound = bind(node)
    x, target = d.operand(bound["self"]), d.operand(bound["target"])
    if is_tensor(bound.get("weight")) or len(x.dims) != len(target.dims) + 1 or len(x.dims) < 2:
        return d.whole(node, "class weights, class probabilities or no batch")
    rest = [f"t{i}" for i in range(2, len(x.dims))]
    binder = Binder(d, node)
    binder.bind(["t", "v", *rest], x.dims)
    binder.bind(["t", *rest], target.dims)
    reduction = bound.get("reduction", 1)
    each = {0: "parallel", 2: "sum"}.get(reduction, "whole")
    result = binder.result(["t", *rest] if reduction == 0 else [], d.sizes(node))
    classes = "stat" if not rest else "whole"
    letters = binder.letters(dict.fromkeys(["t", *rest], each) | {"v": classes})
    return Access((x, target), (result,), letters)


def argmax(d: Describer, node: fx.Node) -> Access:
    """`* r -> *`: r whole."""
    bound = bind(node)
    if bound.get("dim") is None:
        return d.whole(node, "an argmax over everything")
    return reduction("whole")(d, node)


def factory(d: Describer, node: fx.Node) -> Access:
    """full, zeros, ones with a size: every dim new and parallel."""
    result = d.fresh_dims(node)
    name = "size"

    def local(node: fx.Node, split: Split, rank: int) -> Any:
        return rebind(node, **{name: resize(bind(node)[name], result, split, rank)})

    letters = tuple(Letter(f, "parallel") for f in result if f.size > 1)
    return Access((), (result,), letters, (), local)


def positions(d: Describer, node: fx.Node) -> Access:
    """arange: every rank makes all of it, for it costs nothing."""
    result = d.fresh_dims(node)
    return Access((), (result,), tuple(Letter(f, "whole", "positions") for f in result))


def one_hot(d: Describer, node: fx.Node) -> Access:
    """`* -> * v`, v new."""
    operand = d.operand(bind(node)["self"])
    v = d.fresh(d.sizes(node)[-1])
    letters = [Letter(f, "parallel") for f in operand.dims if f.size > 1]
    return Access((operand,), ((*operand.dims, v),), (*letters, Letter(v, "whole", "classes")))


def new_factory(d: Describer, node: fx.Node) -> Access:
    """Its own sizes, new and parallel; of the operand nothing is read but the dtype and device."""
    access = factory(d, node)
    template = d.operand(bind(node)["self"])
    ignored = tuple(Letter(f, "parallel") for f in template.dims if f.size > 1)
    return Access((template,), access.results, (*access.letters, *ignored), (), access.local)


def triangle(d: Describer, node: fx.Node) -> Access:
    """tril, triu: the last two dims are compared by position."""
    dims = views.source(d, node)
    n = len(dims)
    letters = tuple(
        Letter(f, "whole" if i >= n - 2 else "parallel", "compared by position")
        for i, f in enumerate(dims)
        if f.size > 1
    )
    return views.moved(d, node, dims, letters=letters)


def grouped_matmul(d: Describer, node: fx.Node) -> Access:
    """`(e n_e) i, e i o, offs -> (e n_e) o`: i summed, o parallel; rows and experts whole here."""
    x, weight, offs = (d.operand(n) for n in list(node.all_input_nodes)[:3])
    others = len(node.all_input_nodes) != 3 or bind(node).get("out_dtype") is not None
    if len(x.dims) != 2 or len(weight.dims) != 3 or others:
        return d.whole(node, "a grouped matmul of another form")
    sizes = d.sizes(node)
    binder = Binder(d, node)
    binder.bind(["n", "i"], x.dims)
    binder.bind(["e", "i", "o"], weight.dims)
    binder.bind(["e"], offs.dims)
    result = binder.result(["n", "o"], sizes)
    letters = binder.letters({"n": "whole", "e": "whole", "i": "sum"})
    return Access((x, weight, offs), (result,), letters, ((0,),))


def fourier(d: Describer, node: fx.Node) -> Access:
    """`* i -> * k` along every transformed dim: i and k whole, for each is made of all the other."""
    x = d.operand(bind(node)["self"])
    at = {i % len(x.dims) for i in bind(node)["dim"]}
    new = d.fresh_dims(node)
    result = tuple(new[i] if i in at else f for i, f in enumerate(x.dims))
    letters = [Letter(f, "parallel") for i, f in enumerate(x.dims) if i not in at and f.size > 1]
    letters += [Letter(dims[i], "whole", "transformed") for dims in (x.dims, new) for i in at]
    return Access((x,), (result,), tuple(letters), ((0,),))


def recurrent(d: Describer, node: fx.Node) -> Access:
    """`t b i, l b h -> t b k, l b h`: b parallel; time, states and weights whole."""
    bound = bind(node)
    if bound["dropout"] and bound["train"]:
        return d.whole(node, "it draws between its layers")
    hx, count = bound["hx"], len(node.meta["val"])
    if any(len(d.sizes(node, i)) != 3 for i in range(count)):
        return d.whole(node, "this torch traces its states with other shapes than it computes")
    x, *states = (d.operand(n) for n in [bound["input"], *([hx] if is_tensor(hx) else hx)])
    params = [d.operand(n) for n in bound["params"]]
    rows = ["b", "t"] if bound["batch_first"] else ["t", "b"]
    binder = Binder(d, node)
    binder.bind([*rows, "i"], x.dims)
    for i, state in enumerate(states):
        binder.bind([f"l{i}", "b", f"h{i}"], state.dims)
    for i, p in enumerate(params):
        binder.bind([f"p{i}{j}" for j in range(len(p.dims))], p.dims)
    names = [[*rows, "k"], *([f"l{i}", "b", f"h{i}"] for i in range(len(states)))]
    results = tuple(binder.result(each, d.sizes(node, i)) for i, each in enumerate(names))
    letters = binder.letters({name: "whole" for name in binder.bound if name != "b"})
    products = tuple((*x.dims[:2], *p.dims) for p in params if len(p.dims) == 2)
    return Access((x, *states, *params), results, letters, products=products)


def _overloads(names: str) -> list[Any]:
    """`add.Tensor sub` -> the overloads that this torch has; without a dot, all of a name's."""
    found = []
    for word in names.split():
        packet = getattr(aten, word.split(".")[0], None)
        if packet is None:
            continue
        wanted = [word.split(".")[1]] if "." in word else packet.overloads()
        found += [getattr(packet, o) for o in wanted if o in packet.overloads() and "out" not in o]
    return found


# fmt: off
_LINES: tuple[tuple[str, Rule], ...] = (
    # matrix products
    ("linear",               Equation("input[* i] weight[o i] bias[o] -> [* o]", sum="i", added="bias", carry="input")),
    ("mm bmm matmul mv dot", matmul),
    ("addmm.default",        added_matmul("t o", "mat1[t i] mat2[i o]")),
    ("_cdist_forward.default", Equation("x1[* m d] x2[* n d] -> [* m n]", whole="d")),
    ("baddbmm.default",      added_matmul("b m n", "batch1[b m i] batch2[b i n]")),
    ("convolution conv1d.default conv2d.default conv3d.default", convolution),
    ("max_pool1d.default avg_pool1d.default adaptive_avg_pool1d.default adaptive_max_pool1d.default upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d reflection_pad1d.default replication_pad1d.default", windows(1)),
    ("max_pool2d.default max_pool2d_with_indices.default avg_pool2d.default adaptive_avg_pool2d.default _adaptive_avg_pool2d.default adaptive_max_pool2d.default upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d reflection_pad2d.default replication_pad2d.default", windows(2)),
    ("max_pool3d.default max_pool3d_with_indices.default avg_pool3d.default adaptive_avg_pool3d.default _adaptive_avg_pool3d.default adaptive_max_pool3d.default upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d reflection_pad3d.default replication_pad3d.default", windows(3)),
    ("unfold.default",       unfold),
    ("im2col.default col2im.default", patches),
    ("grid_sampler_2d.default", Equation("input[b c h w] grid[b i j t] -> [b c i j]", whole="h w t")),
    ("_fft_r2c.default _fft_c2r.default _fft_c2c.default", fourier),
    # lookups
    ("embedding.default",    embedding),
    ("index.Tensor _unsafe_index.Tensor", index),
    ("index_select.default", index_select),
    ("gather.default",       gather),
    ("scatter.src scatter.value scatter.reduce scatter_add.default scatter_reduce.two index_add.default index_copy.default index_fill.int_Scalar", scatter),
    ("index_put.default _unsafe_index_put.default", index_put),
    ("slice_scatter.default select_scatter.default", assign),
    ("bucketize.Tensor",     Equation("self[*] boundaries[n] -> [*]", whole="n")),
    ("one_hot.default",      one_hot),
    # attention, norms, losses
    ("scaled_dot_product_attention.default", attention),
    ("softmax.int _softmax.default log_softmax.int _log_softmax.default", along("dim", -1, "stat")),
    ("_safe_softmax.default", along("dim", -1, "whole")),
    ("layer_norm.default",   layer_norm),
    ("group_norm.default",   group_norm),
    ("_native_batch_norm_legit_no_training.default _native_batch_norm_legit_functional.default _native_batch_norm_legit.no_stats", batch_norm),
    ("cross_entropy_loss.default", cross_entropy),
    ("_weight_norm.default", weight_norm),
    # reductions
    ("sum.default sum.dim_IntList", reduction("sum", linear=True)),
    ("mean.default mean.dim", reduction("sum", linear=True)),
    ("nansum.default",       reduction("sum")),
    ("amax.default max.default", reduction("max")),
    ("amin.default min.default", reduction("min")),
    ("max.dim min.dim var.dim var.correction std.correction prod.dim_int any.dim all.dim logsumexp.default linalg_vector_norm.default norm.ScalarOpt_dim any.default all.default prod.default kthvalue.default median nanmedian mode.default aminmax.default var_mean.correction std_mean.correction count_nonzero", reduction("whole")),
    ("argmax.default argmin.default", argmax),
    ("topk.default sort.default sort.stable argsort.default", along("dim", -1, "whole")),
    ("cumsum.default cumprod.default logcumsumexp.default cummax.default cummin.default", along("dim", -1, "whole")),
    # moves
    ("view.default _unsafe_view.default reshape.default", views.view),
    ("expand.default",       views.expand),
    ("repeat.default",       views.repeat),
    ("repeat_interleave.self_int", views.repeat_interleave),
    ("transpose.int t.default numpy_T.default", views.transpose),
    ("permute.default",      views.permute),
    ("unsqueeze.default",    views.unsqueeze),
    ("squeeze.dim squeeze.dims squeeze.default", views.squeeze),
    ("slice.Tensor",         views.slice_),
    ("select.int",           views.select),
    ("split.Tensor split_with_sizes.default chunk.default tensor_split.indices", views.split_with_sizes),
    ("unbind.int",           views.unbind),
    ("cat.default",          views.cat),
    ("stack.default",        views.stack),
    ("constant_pad_nd.default pad.default", views.constant_pad),
    ("flip.default",         views.along(lambda b: b["dims"], "reversed")),
    ("roll.default",         views.along(lambda b: b["dims"] or range(99), "rolled")),
    ("tril.default triu.default", triangle),
    ("diagonal.default",     views.diagonal),
    ("diag_embed.default",   views.diag_embed),
    ("alias.default",        views.alias),
    ("clone.default contiguous.default detach.default lift_fresh_copy.default _conj_physical.default resolve_conj.default resolve_neg.default", views.same),
    ("view_as_real.default", Equation("self[*] -> [* c]", whole="c", carry="self")),
    ("view_as_complex.default", Equation("self[* c] -> [*]", whole="c", carry="self")),
    ("zeros_like.default ones_like.default full_like.default empty_like.default", views.full_like),
    ("full.default zeros.default ones.default empty.memory_format", factory),
    ("arange.default arange.start arange.start_step", positions),
    ("new_zeros.default new_ones.default new_full.default new_empty.default", new_factory),
    # elementwise, linear in some operand
    ("add.Tensor sub.Tensor", Elementwise("self+other")),
    ("mul.Tensor",           Scaled("self | other")),
    ("div.Tensor mul.Scalar div.Scalar", Scaled("self")),
    ("neg.default",          Elementwise("self")),
    ("where.self",           Elementwise("self+other")),
    ("complex.default",      Elementwise("real+imag")),
    ("_to_copy.default to.dtype type_as.default", Elementwise("self")),
    ("copy.default",         Elementwise("src")),
    # elementwise
    ("add.Scalar sub.Scalar rsub.Scalar rsub.Tensor pow div.Tensor_mode div.Scalar_mode remainder fmod floor_divide maximum.default minimum.default", Elementwise()),
    ("abs.default exp.default expm1.default log.default log1p.default log2.default sqrt.default rsqrt.default reciprocal.default sin.default cos.default tan.default tanh.default atan.default asin.default acos.default sinh.default cosh.default sigmoid.default relu.default relu6.default gelu.default silu.default mish.default softplus.default elu.default selu.default celu.default leaky_relu.default hardtanh.default hardswish.default hardsigmoid.default softsign.default log_sigmoid.default logit.default erf.default erfc.default square.default sign.default floor.default ceil.default round.default round.decimals trunc.default frac.default isnan.default isinf.default isfinite.default logical_not.default bitwise_not.default nan_to_num.default atan2.default threshold.default", Elementwise()),
    ("eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__", Elementwise()),
    ("clamp clamp_min clamp_max masked_fill fill where.ScalarOther where.ScalarSelf where.Scalar lerp.Scalar lerp.Tensor addcmul.default addcdiv.default", Elementwise()),
    ("acosh asinh atanh angle copysign polar.default digamma erfinv exp2 fmax fmin hardshrink heaviside hypot i0 isneginf isposinf ldexp lgamma log10 logaddexp logaddexp2 sgn signbit sinc softshrink xlogy special_entr special_erfcx special_log_ndtr special_ndtri special_xlog1py", Elementwise()),
    ("native_dropout.default dropout.default", Elementwise()),
    ("l1_loss.default mse_loss.default kl_div.default smooth_l1_loss.default huber_loss.default soft_margin_loss.default binary_cross_entropy.default binary_cross_entropy_with_logits.default", Elementwise()),
    ("prelu.default",        prelu),
    ("_grouped_mm.default",  grouped_matmul),
    ("lstm.input gru.input rnn_tanh.input rnn_relu.input", recurrent),
)
# fmt: on


def table() -> dict[Any, Rule]:
    """Operator -> rule, for this version of torch."""
    import operator

    rules: dict[Any, Rule] = {operator.getitem: views.getitem, SLOPED: Elementwise()}
    for names, rule in _LINES:
        for overload in _overloads(names):
            rules.setdefault(overload, rule)
    return rules | dict.fromkeys(grouped(), grouped_matmul)


def grouped() -> tuple[Any, ...]:
    """Matmuls of rows by group."""
    fallback = getattr(getattr(torch.ops, "transformers", None), "grouped_mm_fallback", None)
    return (*_overloads("_grouped_mm.default"), *([fallback.default] if fallback is not None else []))


def lines() -> tuple[tuple[str, Rule], ...]:
    """The table as it stands above, for `plait rules`."""
    return _LINES
