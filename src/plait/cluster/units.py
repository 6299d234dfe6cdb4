"""Quantities as people write them: `450GB/s`, `0.6us`, `64MiB`. GB is 1e9 bytes, GiB is 2**30.

parse_size("64MiB") == 2**26        spell_size(2**26) == "64MiB"
spell_seconds(3.2e-6) == "3.2us"    spell_rate(450e9) == "450GB/s"
"""

from __future__ import annotations

import re

from plait.errors import InputError


def parse_size(text: str | int) -> int:
    """Bytes of `4096`, `64MiB`, `64M` (binary, as collective benchmarks write it) or `1.5GB`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = match[2].lower() if match else ""
    if match is None or unit not in _SIZES:
        raise InputError(f"{text!r} is no size; write bytes, or for example 4KiB, 64MiB, 1.5GB")
    return round(float(match[1]) * _SIZES[unit])


def spell_size(nbytes: float) -> str:
    """The shortest exact spelling for whole numbers of KiB, MiB, GiB; else four digits."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _SIZES[unit.lower()]
        if nbytes >= scale:
            return f"{nbytes / scale:.4g}{unit}"
    return f"{nbytes:.4g}B"


def spell_seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g}{unit}"
    return f"{seconds * 1e6:.4g}us"


def spell_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.4g}GB/s"


_SIZES: dict[str, int] = {
    "": 1,
    "b": 1,
    **{k: 2**p for k, p in {"k": 10, "m": 20, "g": 30, "t": 40}.items()},
    **{k: 2**p for k, p in {"kib": 10, "mib": 20, "gib": 30, "tib": 40}.items()},
    **{k: 10**p for k, p in {"kb": 3, "mb": 6, "gb": 9, "tb": 12}.items()},
}
