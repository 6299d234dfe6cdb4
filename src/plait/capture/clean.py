"""Take out of a graph what computes nothing."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def clean(graph: fx.Graph, training: bool) -> None:
    for node in list(graph.nodes):
        if node.target in ASSERTIONS:
            graph.erase_node(node)
        elif node.target in COPIES or (node.target in DETACHES and not training):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten._unsafe_view.default:
            node.target = aten.view.default
    graph.eliminate_dead_code()


ASSERTIONS = {aten._assert_tensor_metadata.default}
COPIES = {aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default}
DETACHES = {aten.detach.default}
