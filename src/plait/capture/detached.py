"""What is detached and then changed in place by a value that learns.

    y = x.detach(); y += w      y is x without a history, and from then on has that of w

The functional form takes `detach` for a view: it would write w into x and detach the sum, and w would
get no gradient. A clone behind the detach keeps them apart, where nobody reads x any more; where
somebody does, x has changed and has not learned, which no functional graph says.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from plait.capture.refuse import traced_place
from plait.errors import CaptureError

aten = torch.ops.aten


def keep_apart(graph: fx.Graph) -> None:
    """A clone behind every such detach; CaptureError where what was detached is read later."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in order:
        if node.target is not aten.detach.default:
            continue
        changes = [user for user in _aliases(node) if _learns(user)]
        root = _root(node)
        if not changes or root.op == "placeholder":
            continue
        first = min(map(order.__getitem__, changes))
        if any(order[u] > first for u in _readers(root, node)):
            raise CaptureError(
                f"{traced_place(changes[0])}: changes in place what was detached from a value that is "
                "read later: write x = x.detach() + y for x += y, or x.detach().clone() first"
            )
        with graph.inserting_after(node):
            clone = graph.call_function(aten.clone.default, (node,))
        clone.meta = dict(node.meta)
        node.replace_all_uses_with(clone, delete_user_cb=clone.__ne__)


def _aliases(x: fx.Node) -> Iterator[fx.Node]:
    """The operators whose result is the memory of `x`: views, and changes in place."""
    for user in x.users:
        if _access(user, x) is not None:
            yield user
            yield from _aliases(user)


def _learns(node: fx.Node) -> bool:
    """A change in place by another tensor."""
    written = [x for x in node.all_input_nodes if _access(node, x)]
    others = [x for x in node.all_input_nodes if x not in written and _floats(x)]
    return bool(written and others)


def _readers(root: fx.Node, detached: fx.Node) -> Iterator[fx.Node]:
    for user in root.users:
        if user is not detached:
            yield user
            if _access(user, root) is not None:
                yield from _readers(user, detached)


def _root(x: fx.Node) -> fx.Node:
    """What has the memory of `x`."""
    for source in x.all_input_nodes:
        if _access(x, source) is not None:
            return _root(source)
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


def _floats(x: fx.Node) -> bool:
    value = x.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
