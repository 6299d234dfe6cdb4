"""Grouped: attention that reads each key/value head where it is, not repeated for every query head.

    k -> repeat_interleave(r) ─┐
                       q ─ attention      ->      q, k, v ─ attention, enable_gqa
    v -> repeat_interleave(r) ─┘

The equations see heads repeated (capture/written.py); kernels on CUDA read groups by themselves, with the same
bits, and nothing is written twice.
"""

from __future__ import annotations

import torch
from torch import fx

from plait.capture.written import SDPA, arguments

REPEAT = torch.ops.aten.repeat_interleave.self_int


def group(graph: fx.Graph) -> None:
    """Rewrite every attention without a mask of its own whose keys and values are repeated alike."""
    for node in graph.nodes:
        if node.target is not SDPA:
            continue
        call = arguments(node)
        found = [_repeated(call[name]) for name in ("key", "value")]
        if call["attn_mask"] is None and found[0] is not None and found[1] is not None:
            (k, times), (v, others) = found[0], found[1]
            if times == others:
                node.update_arg(1, k)
                node.update_arg(2, v)
                node.update_kwarg("enable_gqa", True)


def _repeated(x: fx.Node) -> tuple[fx.Node, int] | None:
    """What is repeated, by heads of [b, h, t, d], and how often."""
    if x.target is not REPEAT or x.args[2] != 1:
        return None
    source, times = x.args[0], x.args[1]
    return (source, times) if isinstance(source, fx.Node) and isinstance(times, int) else None
