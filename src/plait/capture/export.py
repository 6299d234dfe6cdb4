"""torch.export in its functional form."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from plait.capture.call import Call
from plait.capture.written import decompositions, prepare


def export(model: torch.nn.Module, call: Call, training: bool) -> ExportedProgram:
    with torch.set_grad_enabled(training):
        exported = torch.export.export(
            model, call.args, call.kwargs, dynamic_shapes=call.shapes, strict=False
        )
        prepare(exported.graph_module, training)
        return exported.run_decompositions(decompositions())
