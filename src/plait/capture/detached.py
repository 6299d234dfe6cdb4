"""What is changed in place behind autograd's back: detached, or under no_grad.

    y = x.detach(); y += w      y is x without a history, and from then on has that of w

The functional form takes `detach` for a view: it would write w into x and detach the sum, and w would
get no gradient. A clone behind the detach keeps them apart, where nobody reads x any more; where
somebody does, x has other values and the history that it had, which no functional graph says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from plait.capture.refuse import traced_place
from plait.errors import CaptureError
from plait.program import may_learn

aten = torch.ops.aten
REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def keep_apart(module: fx.GraphModule) -> None:
    """A clone behind every such detach; CaptureError where what was changed is read later."""
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    learned = _learned(graph)
    for node in order:
        if node.target is REGION and not node.args[0]:
            _refuse_changes(module, node, order, learned)
        if node.target is not aten.detach.default:
            continue
        changes = [user for user in aliases_of(node) if writes(user)]
        root = memory_of(node)
        if not changes or root.op == "placeholder":
            continue
        learns = any(map(_learns, changes))
        if (learns or root in learned) and _read_after(changes, readers_of(root, node), order):
            raise _changed(changes[0], "what was detached from a value that is read later")
        if learns:
            with graph.inserting_after(node):
                clone = graph.call_function(aten.clone.default, (node,))
            clone.meta = dict(node.meta)
            node.replace_all_uses_with(clone, delete_user_cb=clone.__ne__)


def read_only(inner: fx.Graph) -> None:
    """What a region under no_grad reads, and does not change, has no history there; in one with grad within, it has."""
    places = [n for n in inner.nodes if n.op == "placeholder"]
    for own in places:
        value = own.meta.get("val")
        learns = isinstance(value, torch.Tensor) and may_learn(value)
        users = [u for u in own.users if not (u.target is REGION and u.args[0])]
        if not learns or not users or any(map(writes, aliases_of(own))):
            continue
        with inner.inserting_after(places[-1]):
            detached = inner.call_function(aten.detach.default, (own,))
        detached.meta = dict(own.meta)
        for user in users:
            user.replace_input_with(own, detached)


def _refuse_changes(
    module: fx.GraphModule, region: fx.Node, order: dict[fx.Node, int], learned: set[fx.Node]
) -> None:
    """Of a value with a gradient, by a region under no_grad, which is read later."""
    inner = getattr(module, str(region.args[1].target)).graph  # type: ignore[union-attr]
    given = [n for n in inner.nodes if n.op == "placeholder"]
    for x, own in zip(region.args[2:], given, strict=True):
        aliases = [own, *aliases_of(own)]
        changes = [user for user in aliases if writes(user)]
        if not changes or not isinstance(x, fx.Node) or x not in learned or memory_of(x).op == "placeholder":
            continue  # a weight that changes is refused by its name
        leaves = not set(aliases).isdisjoint(inner.output_node().all_input_nodes)
        if leaves or _read_after([region], readers_of(memory_of(x), region), order):
            raise _changed(changes[0], "under no_grad a value that has a gradient and is read later")


def _changed(node: fx.Node, what: str) -> CaptureError:
    return CaptureError(
        f"{traced_place(node)}: changes in place {what}: write x = x.detach() + y for x += y, or "
        "x.detach().clone() first; for other values with the same gradient, x + (new - x).detach()"
    )


def _read_after(changes: Iterable[fx.Node], readers: Iterable[fx.Node], order: dict[fx.Node, int]) -> bool:
    first = min(map(order.__getitem__, changes))
    return any(order[reader] > first for reader in readers)


def _learned(graph: fx.Graph) -> set[fx.Node]:
    """Values with a gradient: what parameters, and inputs that want one, are in."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            found |= {node} if isinstance(value, torch.Tensor) and value.requires_grad else set()
        elif node.target not in (aten.detach.default, REGION) and found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def aliases_of(x: fx.Node) -> Iterator[fx.Node]:
    """The operators whose result is the memory of `x`: views, and changes in place."""
    for user in x.users:
        if _access(user, x) is not None:
            yield user
            yield from aliases_of(user)


def writes(node: fx.Node) -> bool:
    return any(_access(node, x) for x in node.all_input_nodes)


def _learns(change: fx.Node) -> bool:
    """A change in place by another tensor."""
    return any(may_learn(x.meta.get("val")) for x in change.all_input_nodes if not _access(change, x))


def readers_of(root: fx.Node, detached: fx.Node) -> Iterator[fx.Node]:
    for user in root.users:
        if user is not detached:
            yield user
            if _access(user, root) is not None:
                yield from readers_of(user, detached)


def memory_of(x: fx.Node) -> fx.Node:
    """What has the memory of `x`."""
    for source in x.all_input_nodes:
        if _access(x, source) is not None:
            return memory_of(source)
    return x


def _access(node: fx.Node, x: fx.Node) -> bool | None:
    """Whether an operator writes into `x`; None: its result is memory of its own."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    values = [*node.args, *node.kwargs.values()]
    named = {a.name: a for a in schema.arguments}
    arguments = [*schema.arguments[: len(node.args)], *(named[k] for k in node.kwargs)]
    for argument, value in zip(arguments, values, strict=True):
        if value is x and argument.alias_info is not None:
            return bool(argument.alias_info.is_write)
    return None
