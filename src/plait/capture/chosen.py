"""Rows chosen by a number that a tensor holds.

    x[t] = y, t without dims          x.index_put_([t], y), while the model is traced
    select(x, dim, n)                 index(x, [.., t]): ranks may hold parts of x; no view begins where nobody knows
    select_scatter(x, y, dim, n)      index_put(x, [.., t], y)

What select gives is a view, and index gives a copy: what is written into it is put back, and where x is written
while it is still read it stays a view until the functional form, in which all are values of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from plait.capture.detached import aliases_of, memory_of, readers_of, writes
from plait.capture.written import KEPT_META, arguments

aten = torch.ops.aten


def set_item(x: Tensor, index: Any, value: Any) -> None:
    """For `Tensor.__setitem__`: torch asks for the numbers, which have no value while a graph is made."""
    parts = index if isinstance(index, tuple) else (index,)
    if not _by_numbers(parts):
        _SET_ITEM(x, index, value)
        return
    part = x[tuple(slice(None) if _is_number(p) else p for p in parts)]
    places: dict[int, Tensor] = {}
    for i, number in enumerate(parts):
        if _is_number(number):
            before, behind = ([p for p in some if type(p) not in _ONE] for some in (parts[:i], parts[i + 1 :]))
            from_the_end = any(p is Ellipsis for p in before)
            places[part.dim() - 1 - len(behind) if from_the_end else len(before)] = number
    rows = part.movedim(tuple(places), tuple(range(len(places))))
    put = value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    while put.dim() > part.dim() - len(places) and put.shape[0] == 1:
        put = put[0]
    rows.index_put_(tuple(places.values()), put.to(x.dtype))


def _is_number(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() == 0 and part.dtype in _INTEGERS


def _by_numbers(parts: tuple[Any, ...]) -> bool:
    """Some numbers, and nothing else that reads more than a view."""
    numbers = [part for part in parts if _is_number(part)]
    views = [p for p in parts if p is None or p is Ellipsis or type(p) in (slice, *_ONE)]
    return bool(numbers) and len(numbers) + len(views) == len(parts)


def copy(module: fx.GraphModule) -> None:
    """Rewrite the graphs as exported."""
    for graph_module in module.modules():
        if isinstance(graph_module, fx.GraphModule) and (found := _chosen(graph_module.graph, (aten.select.int,))):
            for node in found:
                _copy(graph_module.graph, node)
            graph_module.recompile()


def _chosen(graph: fx.Graph, targets: tuple[Any, ...]) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in targets and isinstance(n.args[-1], fx.Node)]


def _copy(graph: fx.Graph, node: fx.Node) -> None:
    order = {n: i for i, n in enumerate(graph.nodes)}
    aliases = [node, *aliases_of(node)]
    readers = {user for alias in aliases for user in alias.users}
    memory = memory_of(node)
    others = [order[r] for r in readers_of(memory, node) if writes(r)]
    last = max(map(order.__getitem__, readers), default=0)
    leaves = memory.op == "placeholder" and graph.output_node() in readers
    if not leaves and not any(order[node] < other < last for other in others):
        row = _look_up(graph, node)
        for write in filter(writes, aliases):
            put = _add(graph, write, aten.index_put_.default, *row.args, row)
            write.append(put)


def look_up(graph: fx.Graph) -> None:
    """Rewrite a graph in the functional form."""
    found = _chosen(graph, _CHOICES)
    for node in found:
        _look_up(graph, node)
    if found:
        for node in graph.nodes:
            node.meta["val"] = pytree.tree_map_only(Tensor, _at_the_start, node.meta.get("val"))
        graph.eliminate_dead_code()


def _look_up(graph: fx.Graph, node: fx.Node) -> fx.Node:
    call = arguments(node)
    x, number = call["self"], call["index"]
    row = _tensor(number)
    if row is None:
        device = x.meta["val"].device
        row = _add(graph, node, aten.scalar_tensor.default, number, dtype=torch.int64, device=device)
    indices = [*[None] * (call["dim"] % x.meta["val"].dim()), row]
    if node.target is aten.select.int:
        new = _add(graph, node, aten.index.Tensor, x, indices)
    else:
        new = _add(graph, node, aten.index_put.default, x, indices, call["src"])
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _add(graph: fx.Graph, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call in the name of the line and the module of `before`, with its value."""
    with graph.inserting_before(before):
        new = graph.call_function(target, args, kwargs)
    new.meta = {k: before.meta[k] for k in KEPT_META if k in before.meta}
    args, kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    with before.meta["val"].fake_mode:
        new.meta["val"] = target(*args, **kwargs)
    return new


def _tensor(number: fx.Node) -> fx.Node | None:
    """That the number was read from, where its shape is that of one."""
    if number.target not in (aten.item.default, aten._local_scalar_dense.default):
        return None
    source = number.all_input_nodes[0]
    value = source.meta["val"]
    return source if value.dim() == 0 and value.dtype in (torch.int32, torch.int64) else None


def _at_the_start(x: Tensor) -> Tensor:
    """The view of a chosen row began in memory where nobody knew; the row itself begins at its own start."""
    if not free_unbacked_symbols(x.storage_offset()) or free_unbacked_symbols((x.shape, x.stride())):
        return x
    with x.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


_SET_ITEM: Any = Tensor.__setitem__
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_ONE = (int, torch.SymInt)  # index that takes a dim away
_CHOICES = (aten.select.int, aten.select_scatter.default)
