"""Every kernel compiles for sm_90, in every form that is used; no device is needed for it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

from triton import compile as build
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from plait.runtime.kernels import norm, oneshot, signals, twoshot

ROW, WORD, FLAG = "*bf16", "*i16", "*i32"
KINDS = [("none", None, None), ("rms", ROW, None), ("rms_rounded", ROW, None), ("layer", ROW, ROW)]


def ptx(kernel: Any, warps: int, **arguments: Any) -> str:
    """PTX of `kernel`; a string is a type, a tuple one of types, [x] the constant x."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    divisible = [["tt.divisibility", 16]]
    for i, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if value is None or isinstance(value, list):
            signature[name], constants[(i,)] = "constexpr", value[0] if value else None
        else:
            signature[name] = value
            members = value if isinstance(value, tuple) else (value,)
            for j, member in enumerate(members):
                if member.startswith("*") or name == "width":
                    aligned[(i, j) if isinstance(value, tuple) else (i,)] = divisible
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    made = build(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return str(made.asm["ptx"])


def wide(text: str) -> bool:
    """Rows are read and written in 16-byte words."""
    return "ld.global.v4.b32" in text and "st.global.v4.b32" in text


@pytest.mark.parametrize(
    ("kind", "weight", "bias", "residual", "ranks"),
    [(*kind, residual, 2) for kind in KINDS for residual in (None, ROW)] + [(*KINDS[3], ROW, 8)],
)
def test_rows(kind: str, weight: Any, bias: Any, residual: Any, ranks: int) -> None:
    common = dict(
        residual=residual,
        weight=weight,
        bias=bias,
        width="i32",
        eps="fp32",
        BLOCK=[8192],
        KIND=[kind],
    )
    rows, flags = (ROW,) * ranks, (FLAG,) * ranks
    bounds = dict.fromkeys(("far_first", "far_last", "push_first", "push_last"), "i32")
    for far, shake in product((None, rows), (None, flags)):
        assert wide(
            ptx(
                norm.sum_norm_kernel,
                8,
                sources=rows,
                far=far,
                residual_out=residual,
                rows_out=ROW,
                pushed=far and rows[1:],
                arrivals=shake and FLAG,
                enter_fills=shake,
                enter_drains=shake,
                leave_fills=shake,
                leave_drains=shake,
                **bounds,
                **common,
            )
        )
    text = ptx(
        oneshot.one_shot_kernel,
        8,
        x=ROW,
        slots=(WORD,) * ranks,
        turns=FLAG,
        residual_out=residual,
        rows_out=ROW,
        RANK=[1],
        CAPACITY=[128],
        EARLY=[ranks == 2],
        **common,
    )
    assert wide(text)
    assert "ld.volatile.global.v4.b32" in text


def test_others() -> None:
    for kernel in (signals.fill_kernel, signals.drain_kernel):
        assert "sys.cas" in ptx(kernel, 1, flags=(FLAG, FLAG))
    for ranks in (2, 4):
        ptx(
            twoshot.two_shot_kernel,
            16,
            data=(ROW,) * ranks,
            flags=(FLAG,) * ranks,
            first="i32",
            last="i32",
            RANK=[0],
            BLOCK=[4096],
        )
