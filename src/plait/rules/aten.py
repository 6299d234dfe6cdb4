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
from plait.rules.own import SLOPED
from plait.rules.rule import Binder, Elementwise, Equation, is_tensor, outputs
from plait.rules.split import Split

aten = torch.ops.aten


def reduction(kind: str) -> Rule:
    """sum, mean, amax, ...: `* r -> *`; kind "sum" passes partial sums, others do not."""

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
        carries = ((0,),) if kind == "sum" else ()
        return Access((operand,), results, tuple(letters), carries)

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
    """`o *, o -> o *` along `dim`: the norm of each row spans the other dims."""
    bound = bind(node)
    v, g = d.operand(bound["v"]), d.operand(bound["g"])
    dim = bound["dim"] % len(v.dims)
    names = [f"d{i}" for i in range(len(v.dims))]
    binder = Binder(d, node)
    binder.bind(names, v.dims)
    binder.bind(names, g.dims)
    result = binder.result(names, d.sizes(node))
    letters = binder.letters({n: "whole" for i, n in enumerate(names) if i != dim})
    return Access((v, g), (result,), letters)


def embedding(d: Describer, node: fx.Node) -> Access:
    """`v d, * -> * d`, v selected; all but d whole where gradients are scaled by how often a row is read."""
    access = _embedding(d, node)
    if not bind(node).get("scale_grad_by_freq"):
        return access
    width = access.operands[0].dims[1]
    counted = "its reads are counted"
    letters = (x if x.factor is width else Letter(x.factor, "whole", counted) for x in access.letters)
    return replace(access, letters=tuple(letters))


_embedding = Equation("weight[v d] indices[*] -> [* d]", select="v", carry="weight")


def index(d: Describer, node: fx.Node) -> Access:
    """Rows picked by one integer tensor, or by several that broadcast: indexed dims are whole."""
    bound = bind(node)
    operand = d.operand(bound["self"])
    picks = list(bound["indices"]) + [None] * (len(operand.dims) - len(bound["indices"]))
    at = [i for i, p in enumerate(picks) if p is not None]
    indices = [d.operand(p) for p in picks if p is not None]
    if any(p.node.meta["val"].dtype in (torch.bool, torch.uint8) for p in indices):
        return d.whole(node, "a boolean index: how many rows depends on values")
    binder = Binder(d, node)
    sizes = d.sizes(node)
    width = max(len(p.dims) for p in indices)
    names = [f"i{i}" for i in reversed(range(width))]
    for p in indices:
        binder.bind(names[width - len(p.dims) :], p.dims)
    kept = [f"x{i}" for i in range(len(picks)) if picks[i] is None]
    binder.bind(kept, tuple(f for i, f in enumerate(operand.dims) if picks[i] is None))
    adjacent = at == list(range(at[0], at[-1] + 1))
    before = [f"x{i}" for i in range(at[0]) if picks[i] is None] if adjacent else []
    result = binder.result([*before, *names, *kept[len(before) :]], sizes)
    indexed = [operand.dims[i] for i in at]
    letters = (*binder.letters({}), *(Letter(f, "whole", "indexed by value") for f in indexed))
    return Access((operand, *indices), (result,), letters, ((0,),))


def gather(d: Describer, node: fx.Node) -> Access:
    """`t e, t k -> t k`: the gathered dim whole, the others parallel where the sizes agree."""
    bound = bind(node)
    x, ids = d.operand(bound["self"]), d.operand(bound["index"])
    dim = bound["dim"] % max(1, len(x.dims))
    binder = Binder(d, node)
    names = [f"d{i}" for i in range(len(x.dims))]
    loose: list[Letter] = []
    for i, name in enumerate(names):
        if i != dim and x.dims[i].size == ids.dims[i].size:
            binder.bind([name], (x.dims[i],))
        else:
            loose.append(Letter(x.dims[i], "whole", "gathered by value"))
    binder.bind(names, ids.dims)
    result = binder.result(names, d.sizes(node))
    gathered = {names[i]: "parallel" for i in range(len(names))}
    return Access((x, ids), (result,), (*binder.letters(gathered), *loose), ((0,),))


def index_select(d: Describer, node: fx.Node) -> Access:
    bound = bind(node)
    x, ids = d.operand(bound["self"]), d.operand(bound["index"])
    dim = bound["dim"] % max(1, len(x.dims))
    result = (*x.dims[:dim], *(ids.dims or d.fresh_dims(node)[dim : dim + 1]), *x.dims[dim + 1 :])
    letters = [Letter(f, "parallel") for i, f in enumerate(x.dims) if i != dim]
    letters += [Letter(f, "parallel") for f in ids.dims]
    letters.append(Letter(x.dims[dim], "whole", "indexed by value"))
    return Access((x, ids), (result,), tuple(letters), ((0,),))


def convolution(d: Describer, node: fx.Node) -> Access:
    """`b c l, o c w, o -> b o l'`: o parallel, c summed; depthwise: c parallel; l and w whole."""
    bound = bind(node)
    x, weight = d.operand(bound["input"]), d.operand(bound["weight"])
    groups = bound["groups"]
    spatial = len(weight.dims) - 2
    if bound.get("transposed") or len(x.dims) != spatial + 2:
        return d.whole(node, "a transposed or unbatched convolution")
    depthwise = groups > 1 and groups == x.dims[1].size and weight.dims[0].size == groups
    if groups > 1 and not depthwise:
        return d.whole(node, f"a convolution of {groups} groups")
    binder = Binder(d, node)
    lengths = [f"l{i}" for i in range(spatial)]
    windows = [f"w{i}" for i in range(spatial)]
    binder.bind(["b", "c", *lengths], x.dims)
    binder.bind(["c" if depthwise else "o", "one" if depthwise else "c", *windows], weight.dims)
    operands = [x, weight]
    if is_tensor(bound.get("bias")):
        operands.append(d.operand(bound["bias"], added=not depthwise))
        binder.bind(["c" if depthwise else "o"], operands[-1].dims)
    out = binder.result(
        ["b", "c" if depthwise else "o", *[f"m{i}" for i in range(spatial)]], d.sizes(node)
    )
    properties = dict.fromkeys([*lengths, *windows], "whole")
    properties["c"] = "parallel" if depthwise else "sum"
    letters = binder.letters(properties)

    def local(node: fx.Node, split: Split, rank: int) -> Any:
        return rebind(node, groups=split.size(out[1], rank)) if depthwise else rebind(node)

    return Access(tuple(operands), (out,), letters, () if depthwise else ((0,),), local)


def windows(spatial: int) -> Rule:
    """Pooling, resizing: `* l -> * m`, the last `spatial` dims whole and new, the others parallel."""

    def rule(d: Describer, node: fx.Node) -> Access:
        operand = d.operand(node.all_input_nodes[0])
        lead = len(operand.dims) - spatial
        results = tuple(
            (*operand.dims[:lead], *d.fresh_dims(node, i)[lead:]) for i in range(outputs(node))
        )
        letters = [Letter(f, "parallel") for f in operand.dims[:lead] if f.size > 1]
        for dims in (operand.dims, *results):
            letters += [Letter(f, "whole", "windows span it") for f in dims[lead:]]
        return Access((operand,), results, tuple(letters))

    rule.__doc__ = f"`* {spatial}l -> * {spatial}m`: windows of the last {spatial}, which are whole and new"
    return rule


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
    ("baddbmm.default",      added_matmul("b m n", "batch1[b m i] batch2[b i n]")),
    ("convolution conv1d.default conv2d.default conv3d.default", convolution),
    ("max_pool1d.default avg_pool1d.default adaptive_avg_pool1d.default", windows(1)),
    ("max_pool2d.default max_pool2d_with_indices.default avg_pool2d.default adaptive_avg_pool2d.default upsample_nearest2d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec", windows(2)),
    # lookups
    ("embedding.default",    embedding),
    ("index.Tensor",         index),
    ("index_select.default", index_select),
    ("gather.default",       gather),
    ("one_hot.default",      one_hot),
    # attention, norms, losses
    ("scaled_dot_product_attention.default", attention),
    ("softmax.int _softmax.default log_softmax.int _log_softmax.default", along("dim", -1, "stat")),
    ("layer_norm.default",   layer_norm),
    ("group_norm.default",   group_norm),
    ("_native_batch_norm_legit_no_training.default _native_batch_norm_legit_functional.default", batch_norm),
    ("cross_entropy_loss.default", cross_entropy),
    ("_weight_norm.default", weight_norm),
    # reductions
    ("sum.default sum.dim_IntList", reduction("sum")),
    ("mean.default mean.dim", reduction("sum")),
    ("amax.default max.default", reduction("max")),
    ("amin.default min.default", reduction("min")),
    ("max.dim min.dim var.dim var.correction std.correction prod.dim_int any.dim all.dim logsumexp.default linalg_vector_norm.default norm.ScalarOpt_dim any.default all.default prod.default", reduction("whole")),
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
    ("alias.default",        views.alias),
    ("clone.default contiguous.default detach.default lift_fresh_copy.default", views.same),
    ("zeros_like.default ones_like.default full_like.default empty_like.default", views.full_like),
    ("full.default zeros.default ones.default empty.memory_format", factory),
    ("arange.default arange.start arange.start_step", positions),
    ("new_zeros.default new_ones.default new_full.default new_empty.default", new_factory),
    # elementwise, linear in some operand
    ("add.Tensor sub.Tensor", Elementwise("self+other")),
    ("mul.Tensor",           Elementwise("self | other")),
    ("div.Tensor mul.Scalar div.Scalar neg.default", Elementwise("self")),
    ("where.self",           Elementwise("self+other")),
    ("_to_copy.default to.dtype type_as.default", Elementwise("self")),
    # elementwise
    ("add.Scalar sub.Scalar rsub.Scalar rsub.Tensor pow div.Tensor_mode div.Scalar_mode remainder fmod floor_divide maximum.default minimum.default", Elementwise()),
    ("abs.default exp.default expm1.default log.default log1p.default log2.default sqrt.default rsqrt.default reciprocal.default sin.default cos.default tan.default tanh.default atan.default asin.default acos.default sinh.default cosh.default sigmoid.default relu.default relu6.default gelu.default silu.default mish.default softplus.default elu.default selu.default celu.default leaky_relu.default hardtanh.default hardswish.default hardsigmoid.default softsign.default log_sigmoid.default logit.default erf.default erfc.default square.default sign.default floor.default ceil.default round.default round.decimals trunc.default frac.default isnan.default isinf.default isfinite.default logical_not.default bitwise_not.default nan_to_num.default atan2.default threshold.default", Elementwise()),
    ("eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__", Elementwise()),
    ("clamp clamp_min clamp_max masked_fill fill where.ScalarOther where.ScalarSelf where.Scalar lerp.Scalar lerp.Tensor addcmul.default addcdiv.default", Elementwise()),
    ("acosh asinh atanh angle copysign digamma erfinv exp2 fmax fmin hardshrink heaviside hypot i0 isneginf isposinf ldexp lgamma log10 logaddexp logaddexp2 sgn signbit sinc softshrink xlogy special_entr special_erfcx special_log_ndtr special_ndtri special_xlog1py", Elementwise()),
    ("native_dropout.default dropout.default", Elementwise()),
    ("l1_loss.default mse_loss.default kl_div.default smooth_l1_loss.default huber_loss.default soft_margin_loss.default binary_cross_entropy.default binary_cross_entropy_with_logits.default", Elementwise()),
    ("prelu.default",        prelu),
    ("_grouped_mm.default",  grouped_matmul),
)
# fmt: on


def table() -> dict[Any, Rule]:
    """Operator -> rule, for this version of torch."""
    import operator

    rules: dict[Any, Rule] = {operator.getitem: views.getitem, SLOPED: Elementwise()}
    for names, rule in _LINES:
        for overload in _overloads(names):
            rules.setdefault(overload, rule)
    fallback = getattr(getattr(torch.ops, "transformers", None), "grouped_mm_fallback", None)
    if fallback is not None:
        rules[fallback.default] = grouped_matmul
    return rules


def lines() -> tuple[tuple[str, Rule], ...]:
    """The table as it stands above, for `plait rules`."""
    return _LINES
