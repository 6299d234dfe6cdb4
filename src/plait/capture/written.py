"""Operators that are written out, so that the equation table need not know them.

    rms_norm                          pow, mean, rsqrt, mul
    einsum                            permute, view, bmm
    attention with enable_gqa         keys and values repeated, then attention
    mean cross-entropy                the sum, divided by the count of valid labels
    other losses                      of each element or row, then their sum or mean     losses.py
    what torch composes of others     these, where there is no equation for the whole
    x[mask] = one value               where(mask, value, x)
    squeeze                           of the dims that go: a rank's part of another may be of size 1
    as_strided                        elements by their places: a rank's value may lie otherwise in memory
    a region under no_grad            its operators, then detach (training only)
    detached, then changed in place   a clone of it                       detached.py
    sparse gradients                  dense ones
    linspace between tensors          between their values: in a call it gives them no gradient

`prepare` rewrites the graph as exported, before the functional form is made from it: the new nodes
need no values of their own. `decomposed` makes the functional form.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions
from torch._export.utils import _is_preservable_cia_op, _special_op_to_preserve_cia
from torch.export import ExportedProgram
from torch.export.exported_program import _decompose_exported_program

from plait.capture import losses
from plait.capture.detached import REGION, keep_apart, read_only
from plait.rules.aten import table

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
SPACED = {
    getattr(op, ends) for op in (aten.linspace, aten.logspace)
    for ends in ("Tensor_Scalar", "Scalar_Tensor", "Tensor_Tensor")
}  # fmt: skip


def prepare(module: fx.GraphModule, training: bool) -> None:
    """Rewrite the exported graph and the graphs of its regions in place."""
    for graph_module in list(module.modules()):
        if not isinstance(graph_module, fx.GraphModule):
            continue
        for node in list(graph_module.graph.nodes):
            if node.target is SDPA:
                _repeat_heads(graph_module.graph, node)
            elif node.target is aten.cross_entropy_loss.default:
                _count_labels(graph_module.graph, node)
            elif node.target is REGION and training:
                _no_grad_region(graph_module, node)
            elif node.target is REGION:
                node.update_arg(0, False)  # nobody asks for gradients; torch loses count of its arguments
            elif node.target in SPACED and training:
                _of_numbers(graph_module.graph, node)
            _dense(node)
        if training:
            keep_apart(graph_module)
        graph_module.recompile()


def decomposed(exported: ExportedProgram) -> ExportedProgram:
    """`exported.run_decompositions`, of what a model may have: that registers kernels of five hundred composites at
    every call, most of which come apart without; a small capture takes a fifth less."""
    composites, others = _tables()
    graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, fx.GraphModule)]
    called = {n.target for g in graphs for n in g.nodes if _is_composite(n.target)}
    own = {op for op in called if op.namespace != "aten"}
    made: ExportedProgram = _decompose_exported_program(
        exported, cia_to_decomp=composites | dict.fromkeys(own, _special_op_to_preserve_cia),
        python_decomp_table=dict(others), joint_loss_index=None, decompose_custom_triton_ops=False,
    )  # fmt: skip
    return made


@cache
def _tables() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What becomes of composites that do not just come apart in C++, and of other operators."""
    known = table()
    python = {op: f for op, f in _core_aten_decompositions_post_autograd().items() if op not in known}
    whole = dict.fromkeys((*known, *WHOLE), _special_op_to_preserve_cia)
    written = {
        **get_decompositions(MOVES),
        aten.rms_norm.default: rms_norm,
        aten.index_put.default: masked_put,
        aten.as_strided.default: as_strided,
        aten.squeeze.default: squeeze,
        aten.squeeze.dim: squeeze,
        aten.squeeze.dims: squeeze,
        **losses.decompositions(),
    }
    composites = {op: f for op, f in {**python, **whole, **written}.items() if _is_composite(op)}
    return composites, {op: f for op, f in written.items() if op not in composites}


def _is_composite(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and _is_preservable_cia_op(op)


# Moves that torch writes as views, permutes and flips.
MOVES = (aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle, aten.rot90, aten.block_diag)

# Composites without an equation that do not come apart either.
WHOLE = (
    aten.item.default,
    aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data,  # C++ loops over the steps
    # They raise where a matrix is singular, by an operator that a graph keeps as an effect of its own.
    aten.linalg_cholesky.default, aten.linalg_inv.default, aten.linalg_solve.default,
    aten.linalg_lu_factor.default, aten.linalg_ldl_factor.default,
)  # fmt: skip


def rms_norm(
    x: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """As torch's own composite computes it, bit for bit: in fp32, rounded once at the end."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    wide = x.to(dtype)
    dims = [-1 - i for i in range(len(shape))]
    eps = torch.finfo(dtype).eps if eps is None else eps
    y = wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def masked_put(
    x: torch.Tensor, indices: list[torch.Tensor | None], value: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """One value at every place where a mask is true: a choice for each element, or for each row."""
    masks = [i for i in indices if i is not None]
    one = all(isinstance(n, int) and n == 1 for n in value.shape)
    if accumulate or not one or len(masks) != 1 or masks[0].dtype is not torch.bool:
        return NotImplemented  # type: ignore[no-any-return]
    at = indices.index(masks[0]) if len(indices) > 1 else 0
    inner = x.dim() - at - masks[0].dim()
    mask = masks[0].reshape(*masks[0].shape, *[1] * inner) if inner else masks[0]
    return torch.where(mask, value.reshape(()), x)


def as_strided(
    x: torch.Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> torch.Tensor:
    """What it reads of `x` itself, wherever a rank has that; what lies beside it in memory is refused (lower.py)."""
    first = 0 if storage_offset is None else storage_offset - x.storage_offset()
    numbers = [*x.shape, *x.stride(), *size, *stride, first]
    order = sorted(range(x.dim()), key=lambda d: (x.stride(d), x.shape[d]), reverse=True)
    if not all(type(n) is int for n in numbers) or 0 in size or not x.permute(order).is_contiguous():
        return NotImplemented  # type: ignore[no-any-return]
    if first < 0 or first + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= x.numel():
        return NotImplemented  # type: ignore[no-any-return]
    places = torch.full((), int(first), dtype=torch.int64, device=x.device)
    for n, step in zip(size, stride, strict=True):
        places = places[..., None] + step * torch.arange(n, device=x.device)
    return x.permute(order).reshape(-1)[places.reshape(-1)].reshape(size)


def squeeze(x: torch.Tensor, dim: int | list[int] | None = None) -> torch.Tensor:
    asked = dim if isinstance(dim, (list, tuple)) else [*range(x.dim())] if dim is None else [dim] * min(1, x.dim())
    gone = [d for d in asked if isinstance(n := x.shape[d], int) and n == 1]
    if gone == dim:
        return NotImplemented  # type: ignore[no-any-return]
    return aten.squeeze.dims(x, gone)  # type: ignore[no-any-return]


def _dense(node: fx.Node) -> None:
    """Gradients of looked-up rows that are asked for as sparse tensors: ranks move, sum and keep whole ones."""
    if isinstance(node.target, torch._ops.OpOverload):
        call = arguments(node)
        for i, argument in enumerate(node.target._schema.arguments):
            if argument.name in ("sparse", "sparse_grad") and call[argument.name] is True:
                if i < len(node.args):
                    node.update_arg(i, False)
                else:
                    node.update_kwarg(argument.name, False)


def _of_numbers(graph: fx.Graph, node: fx.Node) -> None:
    node.args = fx.node.map_arg(node.args, lambda x: _call(graph, node, aten.detach.default, x))


# -- attention ---------------------------------------------------------------------------------------


def _repeat_heads(graph: fx.Graph, node: fx.Node) -> None:
    """Grouped queries: key and value heads repeated, as a model without `enable_gqa` writes it."""
    call = arguments(node)
    if not call["enable_gqa"]:
        return
    q, k, v = call["query"], call["key"], call["value"]
    repeats = q.meta["val"].shape[-3] // k.meta["val"].shape[-3]
    if repeats != 1:
        heads = k.meta["val"].dim() - 3
        k, v = (_call(graph, node, aten.repeat_interleave.self_int, x, repeats, heads) for x in (k, v))
    set_sdpa(node, call | {"key": k, "value": v})


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of a call by name, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    found = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    return {a.name: found.get(a.name, a.default_value) for a in schema.arguments}


def set_sdpa(node: fx.Node, call: dict[str, Any]) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    node.args = tuple(call[n] for n in names)
    node.kwargs = {} if call["scale"] is None else {"scale": call["scale"]}


def _call(graph: fx.Graph, before: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call in the name of the line and the module of `before`."""
    with graph.inserting_before(before):
        new = graph.call_function(target, args)
    new.meta = {k: before.meta[k] for k in KEPT_META if k in before.meta}
    return new


KEPT_META = ("stack_trace", "nn_module_stack", "torch_fn")


# -- losses ------------------------------------------------------------------------------------------


def _count_labels(graph: fx.Graph, node: fx.Node) -> None:
    """A mean over valid labels, whose count is known from the labels alone: where rows are cut, each
    part gives its term of the sum, and the count stays that of all rows."""
    call = arguments(node)
    target = call["target"]
    classes = target.meta["val"].dtype.is_floating_point  # probabilities: a mean over all rows
    if call["reduction"] != losses.MEAN or call["weight"] is not None or classes:
        return
    dtype = node.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)  # a count has more digits than a short dtype
    total = _call(graph, node, node.target, *(call | {"reduction": losses.SUM}).values())
    valid = _call(graph, node, aten.ne.Scalar, target, call["ignore_index"])
    count = _call(graph, node, aten.sum.default, valid)
    if wide != dtype:
        total = _call(graph, node, aten.to.dtype, total, wide)
    mean = _call(graph, node, aten.div.Tensor, total, count)
    if wide != dtype:
        mean = _call(graph, node, aten.to.dtype, mean, dtype)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)




# -- regions -----------------------------------------------------------------------------------------


def _no_grad_region(module: fx.GraphModule, node: fx.Node) -> None:
    """The functional form inlines the region and forgets its mode: detach what it reads, which it may write into
    something else, and what leaves it."""
    enabled, region = node.args[0], node.args[1]
    if enabled:
        return
    inner = getattr(module, str(region.target))  # type: ignore[union-attr]
    read_only(inner.graph)
    results = list(inner.graph.output_node().args[0])
    for user in list(node.users):
        result = results[user.args[1]]  # type: ignore[index]
        if _enables_grad(result) or not isinstance(user.meta.get("val"), torch.Tensor):
            continue
        with module.graph.inserting_after(user):
            detached = module.graph.call_function(aten.detach.default, (user,))
        detached.meta = {k: user.meta[k] for k in KEPT_META if k in user.meta}
        user.replace_all_uses_with(detached, delete_user_cb=detached.__ne__)


def _enables_grad(node: Any) -> bool:
    """A region with grad inside one without."""
    source = node.args[0] if isinstance(node, fx.Node) and node.args else None
    return (
        isinstance(source, fx.Node)
        and source.target is REGION
        and bool(source.args[0])
    )
