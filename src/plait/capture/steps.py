"""The order of a capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from plait.capture import square
from plait.capture.call import Call
from plait.capture.clean import clean
from plait.capture.dropout import write_out_attention_dropout
from plait.capture.dtypes import refuse_dtypes, refuse_layouts
from plait.capture.masks import recognise_masks
from plait.passes.fold import fold
from plait.program import Program


def capture(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Mapping[str, Any] | None = None,
    training: bool = False,
    blocks: bool = True,
) -> Program:
    """The model as a `Program`; the model itself is not changed and none of its parameters is kept.

    `dynamic` names sizes that may differ from call to call: `{"input_ids": {0: "batch"}}`.
    `blocks=False` exports every block of the model instead of one of each kind: slower, the same.
    """
    from plait.capture.export import export  # with sizes that are symbols: half a second of imports
    from plait.capture.lower import lower

    call = Call.of(model, tuple(args), dict(kwargs or {}), dynamic)
    exported = export(model, call, training, blocks=blocks)
    clean(exported.program.graph, training)
    program, values = lower(model, exported, call, training)
    refuse_dtypes(program)
    refuse_layouts(program)
    program = recognise_masks(fold(program, values))
    program = square.cut(program)
    return write_out_attention_dropout(program) if training else program
