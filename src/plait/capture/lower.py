"""ExportedProgram -> Program: weights, inputs and outputs by the user's names, tied weights once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from plait.capture.call import Call
from plait.errors import CaptureError
from plait.program import Mutation, Output, Program, Weight, WeightKind


def lower(
    model: torch.nn.Module, exported: ExportedProgram, call: Call, training: bool
) -> tuple[Program, dict[str, torch.Tensor]]:
    """Also the values of all buffers and constants that no call changes, by placeholder."""
    signature = exported.graph_signature
    holders = _Holders.of(exported)
    changed = {s.target for s in signature.output_specs if s.kind is OutputKind.BUFFER_MUTATION}
    _refuse_other_changes(exported)

    weights, values = [], {}
    for group in _groups(model, exported):
        node = holders.merge(group.names)
        if node is None:
            continue
        weights.append(group.weight(node.name))
        constant = not isinstance(group.tensor, torch.nn.Parameter) and not group.tensor.requires_grad
        if constant and group.tensor.device.type != "meta" and not changed & set(group.names):
            values[node.name] = group.tensor.detach()

    live = [w for w in weights if holders.by_name[w.names[0]].users]
    inputs = _inputs(exported, call)
    graph, env = _copy(exported.graph, [w.node for w in live] + list(inputs.values()))
    outputs, mutations = _results(graph, env, exported, {n: w.node for w in live for n in w.names})
    program = Program(
        graph,
        tuple(live),
        call.inputs(inputs),
        outputs,
        call.spec,
        exported.call_spec.out_spec,
        mutations=mutations,
        unused=tuple(w for w in weights if w not in live and w.kind != "constant"),
        training=training,
    )
    return program, values


# -- weights -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """One tensor of the model and all its names."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    kind: WeightKind
    persistent: bool

    def weight(self, node: str) -> Weight:
        t = self.tensor
        return Weight(
            node,
            self.names,
            self.kind,
            tuple(t.shape),
            t.dtype,
            requires_grad=t.requires_grad,
            persistent=self.persistent,
        )


def _groups(model: torch.nn.Module, exported: ExportedProgram) -> Iterator[_Group]:
    """In the order of named_parameters(), then buffers, then tensors that are neither."""
    persistent = set(model.state_dict(keep_vars=True))
    groups: dict[Any, list[tuple[str, torch.Tensor, WeightKind]]] = {}
    for name, tensor, kind in _named_tensors(model, exported):
        groups.setdefault(_identity(tensor), []).append((name, tensor, kind))
    for members in groups.values():
        names = tuple(name for name, _, _ in members)
        _, tensor, kind = members[0]
        yield _Group(names, tensor, kind, bool(persistent & set(names)))


def _named_tensors(
    model: torch.nn.Module, exported: ExportedProgram
) -> Iterator[tuple[str, torch.Tensor, WeightKind]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, "parameter"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer, "buffer"
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR:
            yield str(spec.target), exported.constants[str(spec.target)], "constant"


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for two names of one tensor."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass(frozen=True)
class _Holders:
    """The placeholders of the weights, by name; tied weights have several, most of them unread."""

    by_name: dict[str, fx.Node]

    @classmethod
    def of(cls, exported: ExportedProgram) -> _Holders:
        nodes = _placeholders(exported)
        specs = exported.graph_signature.input_specs
        return cls({str(s.target): nodes[s.arg.name] for s in specs if s.kind in WEIGHTS})

    def merge(self, names: tuple[str, ...]) -> fx.Node | None:
        found = [self.by_name[n] for n in names if n in self.by_name]
        for other in found[1:]:
            other.replace_all_uses_with(found[0])
        self.by_name.update({n: found[0] for n in names if found})
        return found[0] if found else None


# -- inputs and outputs --------------------------------------------------------------------------------


def _inputs(exported: ExportedProgram, call: Call) -> dict[int, str]:
    """The placeholder of each leaf of the call that is a tensor."""
    user: list[InputSpec] = [
        s for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT
    ]
    order = call.order(exported.call_spec.in_spec)
    return {
        leaf: spec.arg.name
        for leaf, spec in zip(order, user, strict=True)
        if isinstance(call.leaves[leaf][1], torch.Tensor)
    }


def _copy(old: fx.Graph, placeholders: list[str]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph of its own with these placeholders first."""
    by_name = {n.name: n for n in old.nodes if n.op == "placeholder"}
    graph, env = fx.Graph(), {}
    for name in placeholders:
        env[by_name[name]] = graph.node_copy(by_name[name])
    for node in old.nodes:
        if node.op not in ("placeholder", "output"):
            env[node] = graph.node_copy(node, env.__getitem__)
    for node in graph.nodes:
        node.meta = {k: node.meta[k] for k in KEPT_META if k in node.meta}
    return graph, env


def _results(
    graph: fx.Graph,
    env: dict[fx.Node, fx.Node],
    exported: ExportedProgram,
    holders: dict[str, str],
) -> tuple[tuple[Output, ...], tuple[Mutation, ...]]:
    flat = list(exported.graph.output_node().args[0])  # type: ignore[arg-type]
    specs = exported.graph_signature.output_specs
    results: list[fx.Node] = []
    outputs: list[Output] = []
    mutations: list[Mutation] = []
    for spec, value in zip(specs, flat, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(value, fx.Node):
            outputs.append(Output(index=len(results)))
            results.append(env[value])
        elif spec.kind is OutputKind.USER_OUTPUT:
            outputs.append(Output(value=value))
    for spec, value in zip(specs, flat, strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            mutations.append(Mutation(holders[str(spec.target)], len(results)))
            results.append(env[value])
    graph.output(tuple(results))
    return tuple(outputs), tuple(mutations)


def _refuse_other_changes(exported: ExportedProgram) -> None:
    found = [
        f"{FORBIDDEN[s.kind]} {s.target}"
        for s in exported.graph_signature.output_specs
        if s.kind in FORBIDDEN
    ]
    if found:
        raise CaptureError(
            f"forward changes in place: {', '.join(found)}; only buffers may change: "
            "write x = x + 1 for x += 1, or x.clone() first"
        )


def _placeholders(exported: ExportedProgram) -> dict[str, fx.Node]:
    return {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}


WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
KEPT_META = ("val", "stack_trace", "nn_module_stack")
FORBIDDEN = {
    OutputKind.USER_INPUT_MUTATION: "the argument",
    OutputKind.PARAMETER_MUTATION: "the parameter",
}
