"""Operands of dtypes that an operator does not take: torch would say so only when it runs.

A graph is traced without values, and several operators look at dtypes in their kernels alone. The
same call of the plain model raises at once, so a compile of it does. And operands that are sparse, which
no rank can take a part of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from plait.capture.refuse import traced_place
from plait.errors import CaptureError
from plait.program import Program

aten = torch.ops.aten
Dtypes = Sequence[torch.dtype]


def refuse_dtypes(program: Program) -> None:
    """CaptureError: names every operator whose operands no kernel takes, and the user's line."""
    wrong = []
    for node in program.graph.nodes:
        takes = _TAKES.get(node.target)
        found = [x.meta["val"].dtype for x in node.args if _is_tensor(x)] if takes else []
        if takes is not None and not takes(found):
            named = ", ".join(str(d).removeprefix("torch.") for d in found)
            wrong.append(f"{traced_place(node)}: {node.target.overloadpacket.__name__} of {named}")
    if wrong:
        raise CaptureError(f"operands of dtypes that do not go together: {'; '.join(wrong)}")


def refuse_layouts(program: Program) -> None:
    """CaptureError: sparse tensors beside a value that differs from call to call; others are folded."""
    varies: set[fx.Node] = set()
    wrong: dict[str, None] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" or not varies.isdisjoint(node.all_input_nodes):
            varies.add(node)
            met = [x.meta.get("val") for x in (node, *node.all_input_nodes) if node.op == "call_function"]
            wrong |= {traced_place(node): None for x in met if isinstance(x, Tensor) and x.layout is not torch.strided}
    if wrong:
        raise CaptureError(
            f"{'; '.join(wrong)}: a sparse tensor is not supported: make it dense before (x.to_dense()), or sum the "
            "rows that it picks (x.index_select, torch.index_add)"
        )


def _is_tensor(x: object) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), Tensor)


def _one(found: Dtypes) -> bool:
    return len(set(found)) == 1


def _norm(found: Dtypes) -> bool:
    """Weights as the input, or in float32 where that is narrower."""
    first, *others = found
    narrow = first in (torch.float16, torch.bfloat16)
    return set(others) <= {first, torch.float32 if narrow else first}


def _picks(found: Dtypes) -> bool:
    return found[-1] in (torch.int32, torch.int64)


def _adds(found: Dtypes) -> bool:
    into, index, source = found
    return into == source and index in (torch.int32, torch.int64)


def _copies(found: Dtypes) -> bool:
    into, index, source = found
    return into == source and index is torch.int64


def _no_bool(found: Dtypes) -> bool:
    return torch.bool not in found


def _labels(found: Dtypes) -> bool:
    return found[1].is_floating_point or found[1] in (torch.int64, torch.uint8)


_TAKES: dict[object, Callable[[Dtypes], bool]] = {
    aten.linear.default: _one,
    aten.mm.default: _one,
    aten.bmm.default: _one,
    aten.matmul.default: _one,
    aten.addmm.default: _one,
    aten.baddbmm.default: _one,
    aten.mv.default: _one,
    aten.dot.default: _one,
    aten.layer_norm.default: _norm,
    aten.group_norm.default: _norm,
    aten._native_batch_norm_legit_no_training.default: _norm,
    aten._native_batch_norm_legit_functional.default: _norm,
    aten.index_select.default: _picks,
    aten.index_add.default: _adds,
    aten.index_copy.default: _copies,
    aten.rsub.Scalar: _no_bool,
    aten.cross_entropy_loss.default: _labels,
}
