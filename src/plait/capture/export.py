"""torch.export in its functional form."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from plait.capture import chosen
from plait.capture.blocks import Blocks, Proof, opaque, prove
from plait.capture.call import Call
from plait.capture.functions import traced, write_out
from plait.capture.generated import generated_when_read
from plait.capture.names import identity, renamed
from plait.capture.preserve import on_meta, preserved, swap_tensors, to_meta
from plait.capture.python import spoken
from plait.capture.questions import Questions
from plait.capture.refuse import explained, refuse_fixed, refuse_model
from plait.capture.written import decomposed, prepare
from plait.errors import CaptureError
from plait.passes.symbolic import minima


@dataclass(frozen=True)
class Export:
    program: ExportedProgram
    call: Call  # with what the trial found of its dynamic sizes
    blocks: Blocks
    notes: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()  # attributes that forward sets
    order: tuple[int, ...] = ()  # which result of the call each result of the graph is


def export(model: torch.nn.Module, call: Call, training: bool, *, blocks: bool = True) -> Export:
    """`blocks`: export only one of several equal blocks."""
    refuse_model(model, training)
    questions = Questions()
    with torch.inference_mode(False), torch.set_grad_enabled(training):
        while True:
            try:
                return _tried(model, call, training, questions, blocks)
            except CaptureError as error:
                if not questions.give_in(error):
                    last = questions.error or error
                    raise last from last.__cause__


def _tried(model: torch.nn.Module, call: Call, training: bool, questions: Questions, blocks: bool) -> Export:
    with explained():
        proof = prove(model, call, training, questions, blocks=blocks)
        if alone := call.outside(proof.ranges):  # the program is of this size, and others have their own
            call = call.fixed(alone)
            proof = prove(model, call, training, questions, blocks=blocks)
    refuse_fixed(proof.ranges, proof.places)
    call = call.with_ranges(proof.ranges)
    sets = tuple(c for c in proof.changed if c.split(".")[-1] not in ("_buffers", "_parameters"))
    notes = questions.notes()
    if sets:
        notes += (f"forward sets {', '.join(sets)}, which a compiled model does not",)
    with explained(proof.places), minima() if any(call.dims) else nullcontext():
        if proof.groups:
            try:
                return replace(_export(model, call, training, questions, proof, notes), sets=sets)
            except Exception as error:  # the full export works, or has the better message
                notes += (f"every block was exported by itself: {error}",)
        return replace(_export(model, call, training, questions, Proof(), notes), sets=sets)


@generated_when_read()
def _export(
    model: torch.nn.Module, call: Call, training: bool, questions: Questions, proof: Proof, notes: tuple[str, ...]
) -> Export:
    args, kwargs = call.example(model)
    with (
        preserved(model), opaque(model, proof) as blocks, traced(training), spoken(model, training),
        questions.answered(),
    ):  # fmt: skip
        if on_meta(model):
            swap_tensors(model, to_meta)
        exported = torch.export.export(
            model, args, kwargs, dynamic_shapes=call.dynamic_shapes(), strict=False
        )
    _share_buffers(exported)
    chosen.copy(exported.graph_module)
    prepare(exported.graph_module, training)
    order = _order(exported)
    exported = renamed(exported, decomposed)
    write_out(exported)
    chosen.look_up(exported.graph)
    return Export(exported, call, blocks, notes, order=order)


def _share_buffers(exported: ExportedProgram) -> None:
    """One placeholder for a buffer of several names (a batch norm at two places): what one use writes the next
    reads, and torch traces no inputs that share memory where one of them is changed."""
    nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    first: dict[Any, fx.Node] = {}
    for spec in list(exported.graph_signature.input_specs):
        if spec.kind is not InputKind.BUFFER:
            continue
        node, name = nodes[spec.arg.name], str(spec.target)
        kept = exported.state_dict.get(name, exported.constants.get(name))
        if kept is None or (leader := first.setdefault(identity(kept), node)) is node:
            continue
        node.replace_all_uses_with(leader)
        exported.graph.erase_node(node)
        exported.graph_signature.input_specs.remove(spec)


def _order(exported: ExportedProgram) -> tuple[int, ...]:
    """Decompositions pack the results once more, and a container may hold them in another order then: that of its
    fields, where forward had set them in one of its own."""
    kinds = [s.arg for s in exported.graph_signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    none = [i for i, x in enumerate(kinds) if isinstance(x, ConstantArgument) and x.value is None]
    sent = [None if i in none else i for i in range(len(kinds))]
    came = pytree.tree_leaves(pytree.tree_unflatten(sent, exported.call_spec.out_spec))
    left = iter(none)
    return tuple(next(left) if i is None else i for i in came)
