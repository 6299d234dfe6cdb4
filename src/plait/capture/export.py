"""torch.export in its functional form."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from plait.capture.blocks import Blocks, Proof, opaque, prove
from plait.capture.call import Call
from plait.capture.preserve import preserved
from plait.capture.written import decompositions, prepare


def export(
    model: torch.nn.Module, call: Call, training: bool, *, blocks: bool = True
) -> tuple[ExportedProgram, Blocks]:
    """`blocks`: export only one of several equal blocks."""
    with torch.inference_mode(False), torch.set_grad_enabled(training):
        proof = prove(model, call, training, blocks=blocks)
        if proof.groups:
            try:
                return _export(model, call, training, proof)
            except Exception:  # noqa: BLE001  the full export works, or has the better message
                pass
        return _export(model, call, training, Proof())


def _export(
    model: torch.nn.Module, call: Call, training: bool, proof: Proof
) -> tuple[ExportedProgram, Blocks]:
    args, kwargs = call.example(model)
    with preserved(model), opaque(model, proof) as blocks:
        exported = torch.export.export(
            model, args, kwargs, dynamic_shapes=call.dynamic_shapes(), strict=False
        )
    prepare(exported.graph_module, training)
    return exported.run_decompositions(decompositions()), blocks
