"""ExportedProgram -> Program: weights, inputs and outputs named, tied weights merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from plait.capture.call import Call
from plait.program import Mutation, Output, Program, Weight, WeightKind

KINDS: dict[InputKind, WeightKind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


def lower(
    model: torch.nn.Module, exported: ExportedProgram, call: Call, training: bool
) -> tuple[Program, dict[str, torch.Tensor]]:
    """Also the values of the buffers and constants that may be folded, by placeholder."""
    signature = exported.graph_signature
    nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    specs = [s for s in signature.input_specs if s.kind in KINDS]
    tensors = dict(_named_tensors(model)) | {
        s.target: exported.constants[s.target] for s in specs if s.target in exported.constants
    }
    persistent = set(model.state_dict(keep_vars=True))
    mutated = {s.target for s in signature.output_specs if s.kind == OutputKind.BUFFER_MUTATION}

    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(_identity(tensor), []).append(name)
    kinds = {s.target: KINDS[s.kind] for s in specs}
    placeholders = {s.target: nodes[s.arg.name] for s in specs}

    weights, unused, values = [], [], {}
    renamed: dict[fx.Node, fx.Node] = {}
    for names in groups.values():
        holders = [placeholders[n] for n in names if n in placeholders]
        if not holders:
            continue
        first = holders[0]
        for other in holders[1:]:
            other.replace_all_uses_with(first)
        tensor = tensors[names[0]]
        weight = Weight(
            first.name,
            tuple(names),
            kinds[next(n for n in names if n in kinds)],
            tuple(tensor.shape),
            tensor.dtype,
            requires_grad=tensor.requires_grad,
            persistent=any(n in persistent for n in names),
        )
        live = bool(first.users)
        (weights if live else unused).append(weight)
        if live:
            renamed[first] = first
        if weight.kind != "parameter" and tensor.device.type != "meta" and not mutated & set(names):
            values[first.name] = tensor.detach()

    user = [s.arg.name for s in signature.input_specs if s.kind == InputKind.USER_INPUT and s.arg.name in nodes]
    tensor_leaves = [i for i, (_, leaf) in enumerate(call.leaves)]
    by_leaf = {}
    user_specs = [s for s in signature.input_specs if s.kind == InputKind.USER_INPUT]
    for i, s in zip(tensor_leaves, user_specs, strict=True):
        if isinstance(call.leaves[i][1], torch.Tensor):
            by_leaf[i] = s.arg.name

    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for w in weights:
        env[nodes[w.node]] = graph.node_copy(nodes[w.node])
    for i in sorted(by_leaf):
        env[nodes[by_leaf[i]]] = graph.node_copy(nodes[by_leaf[i]])
    out = None
    for n in exported.graph.nodes:
        if n.op == "output":
            out = n
        elif n.op != "placeholder":
            env[n] = graph.node_copy(n, lambda m: env[m])
    flat = list(out.args[0])
    outputs, mutations, results = [], [], []
    user_out = [(s, v) for s, v in zip(signature.output_specs, flat) if s.kind == OutputKind.USER_OUTPUT]
    for s, v in user_out:
        if isinstance(v, fx.Node):
            outputs.append(Output(index=len(results)))
            results.append(env[v])
        else:
            outputs.append(Output(value=v))
    by_name = {n: w.node for w in weights for n in w.names}
    for s, v in zip(signature.output_specs, flat):
        if s.kind == OutputKind.BUFFER_MUTATION:
            mutations.append(Mutation(by_name.get(s.target, placeholders[s.target].name), len(results)))
            results.append(env[v])
    graph.output(tuple(results))
    program = Program(
        graph,
        tuple(weights),
        call.inputs({i: by_leaf[i] for i in by_leaf}),
        tuple(outputs),
        call.spec,
        exported.call_spec.out_spec,
        mutations=tuple(mutations),
        unused=tuple(unused),
        training=training,
    )
    return program, values


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _identity(tensor: torch.Tensor) -> Any:
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
