"""The price of compute: a device's clock (cluster/device.py) applied to kernels.

kernel     max(flops at the tile's share of peak, bytes at the memory's share)  + launch; on a CPU their sum
matmul     the same in whole waves of tiles: Device.matmul_seconds
attention  two matmuls a pair of blocks, half of the pairs when causal; scores stay on the chip
"""

from __future__ import annotations

from plait.cluster.device import Device

__all__ = ["Device", "attention_seconds", "kernel_seconds"]

_ATTENTION_SHARE = 0.8  # of what a matmul of the same shape reaches: softmax between the two


def kernel_seconds(device: Device, flops: float, nbytes: float, dtype: str = "bfloat16") -> float:
    """Any kernel that reads and writes `nbytes` and does `flops` on the way, launch included."""
    if flops <= 0 and nbytes <= 0:
        return 0.0
    rate = device.peak(dtype) * max(tile.share for tile in device.tiles)
    return device.launch + device.busy(flops / rate, device.memory_seconds(nbytes))


def attention_seconds(
    device: Device,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    width: int,
    dtype: str = "bfloat16",
    *,
    kv_heads: int | None = None,
    causal: bool = False,
) -> float:
    """q: [b, h, q, d], k and v: [b, g, k, d], g key/value heads; launch included."""
    if min(batch, heads, queries, keys, width) <= 0:
        return 0.0
    half = 0.5 + 0.5 / max(queries, 1) if causal and queries == keys else 1.0
    flops = 4.0 * batch * heads * queries * keys * width * half
    element = 4 if device.kind == "cpu" else 2
    rows = 2 * heads * queries + 2 * (kv_heads or heads) * keys
    return kernel_seconds(device, flops / _ATTENTION_SHARE, element * batch * rows * width, dtype)
