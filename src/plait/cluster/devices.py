"""The devices that presets are made of: vendors' data sheets, dense rates without sparsity.

What a long matmul reaches of them by tile shape is an estimate within 10 % for the shapes of
transformer layers (docs/cost-model.md); memory is what the driver leaves to one process.
"""

from __future__ import annotations

from plait.cluster.device import Device, Tile

# Hopper: fitted to 78 matmuls of a 70B layer's shapes, 256 to 8192 rows, bf16, back to back in a graph on an H200
# (torch 2.11, CUDA 13, bench/results/h200x2/2026-11-30-matmul.json): 6.5 % mean error, 24 % at most.
_HOPPER = (Tile(128, 256, 0.78), Tile(256, 80, 0.77), Tile(160, 112, 0.77), Tile(192, 96, 0.77))
_AMPERE = (Tile(128, 256, 0.85), Tile(128, 128, 0.78), Tile(64, 128, 0.6), Tile(64, 64, 0.4))


def _gpu(
    name: str,
    rates: tuple[float, float, float, float],  # bf16, fp8, tf32, fp32, in TFLOP/s; 0: none
    bandwidth: float,  # TB/s
    gib: float,
    units: int,
    tiles: tuple[Tile, ...] = _HOPPER,
    fill: int = 306,
) -> Device:
    dtypes = ("bfloat16", "float8_e4m3fn", "tf32", "float32")
    return Device(
        name,
        "cuda",
        tuple((dtype, rate * 1e12) for dtype, rate in zip(dtypes, rates, strict=True) if rate),
        bandwidth * 1e12,
        int(gib * 2**30),
        launch=2e-6,  # between nodes of one CUDA graph
        units=units,
        tiles=tiles,
        fill=fill,
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("v100", (125, 0, 0, 15.7), 0.9, 32, 80, _AMPERE, 256),
        _gpu("a100-pcie", (312, 0, 156, 19.5), 1.935, 79, 108, _AMPERE, 256),
        _gpu("a100", (312, 0, 156, 19.5), 2.039, 79, 108, _AMPERE, 256),
        _gpu("h100-pcie", (756, 1513, 378, 51), 2.0, 79, 114),
        _gpu("h100", (989, 1979, 494, 67), 3.35, 79, 132),
        _gpu("h200", (989, 1979, 494, 67), 4.8, 139, 132),
        _gpu("b200", (2250, 4500, 1125, 75), 8.0, 178, 148),
        _gpu("gb200", (2500, 5000, 1250, 80), 8.0, 184, 152),
        # one process on a core of a server CPU; `plait calibrate` measures the machine at hand
        Device(
            "cpu",
            "cpu",
            (("float32", 1.0e11), ("bfloat16", 2.0e11)),
            1.5e10,
            8 * 2**30,
            launch=5e-6,
        ),
    )
}
