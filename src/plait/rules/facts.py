"""Facts about attention masks, found in their values."""

from __future__ import annotations

import torch

from plait.program import Program

SDPA = torch.ops.aten.scaled_dot_product_attention.default


def recognise_masks(program: Program) -> Program:
    graph = program.graph
    for node in graph.nodes:
        if node.target is not SDPA or len(node.args) < 4 or node.args[3] is None:
            continue
        mask = node.args[3]
        if mask.target is torch.ops.aten.expand.default:
            mask = mask.args[0]
        if mask.op != "get_attr":
            continue
        value = program.constants[mask.target]
        allowed = value if value.dtype is torch.bool else value > -1e30
        q, k = node.args[0].meta["val"].shape[-2], node.args[1].meta["val"].shape[-2]
        allowed = allowed.expand(*allowed.shape[:-2], q, k)
        args = list(node.args)
        if allowed.all():
            args[3] = None
            node.meta["mask"] = "full"
        elif q == k and torch.equal(allowed, torch.ones(q, k, dtype=torch.bool).tril().expand_as(allowed)):
            args[3:] = [None, args[4] if len(args) > 4 else 0.0, True]
            node.meta["mask"] = "causal"
        node.args = tuple(args)
    graph.eliminate_dead_code()
    used = {n.target for n in graph.nodes if n.op == "get_attr"}
    return program.with_(constants={k: v for k, v in program.constants.items() if k in used})
