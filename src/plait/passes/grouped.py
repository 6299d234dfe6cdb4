"""Grouped: attention that reads each key/value head where it is, not repeated for every query head.

    k -> repeat_interleave(r) ─┐
                       q ─ attention      ->      q, k, v ─ attention, enable_gqa
    v -> repeat_interleave(r) ─┘

The equations see heads repeated (capture/written.py); kernels on CUDA read groups by themselves, with the same
bits, and nothing is written twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

SDPA = torch.ops.aten.scaled_dot_product_attention.default
REPEAT = torch.ops.aten.repeat_interleave.self_int


def group(graph: fx.Graph) -> None:
    """Rewrite every attention without a mask of its own whose keys and values are repeated alike."""
    for node in graph.nodes:
        if node.target is not SDPA:
            continue
        _, keys, values, *mask = node.args
        masked = (mask and mask[0] is not None) or node.kwargs.get("attn_mask") is not None
        k, v = _repeated(keys), _repeated(values)
        if not masked and k is not None and v is not None and k[1] == v[1]:
            node.update_arg(1, k[0])
            node.update_arg(2, v[0])
            node.update_kwarg("enable_gqa", True)


def _repeated(x: Any) -> tuple[fx.Node, int] | None:
    """What is repeated, by heads of [b, h, t, d], and how often."""
    if x.target is not REPEAT or x.args[2] != 1:
        return None
    source, times = x.args[0], x.args[1]
    return (source, times) if isinstance(source, fx.Node) and isinstance(times, int) else None
