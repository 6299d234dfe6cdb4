"""ExportedProgram -> Program: weights, inputs and outputs by the user's names, tied weights once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from plait.capture.blocks import Blocks
from plait.capture.call import Call
from plait.capture.export import Export
from plait.capture.names import identity
from plait.capture.refuse import OBJECT, SIZED_BY_VALUES, WITHIN, traced_place
from plait.capture.splice import Splice
from plait.errors import CaptureError
from plait.program import Mutation, Output, Program, Size, Weight, WeightKind


def lower(
    model: torch.nn.Module, export: Export, call: Call, training: bool
) -> tuple[Program, dict[str, torch.Tensor]]:
    """Also the values of all buffers and constants that no call changes, by placeholder."""
    exported = export.program
    _refuse_other_changes(exported)
    _refuse_regions(exported.graph)
    _refuse_objects(exported)
    _refuse_sizes_of_values(exported.graph)
    _refuse_addresses(exported.graph)
    weights = _Weights(model, exported, export.blocks)
    graph = fx.Graph()
    weights.write(graph)
    inputs = _inputs(exported, call, graph, weights.env)
    names = {leaf: node.name for leaf, node in inputs.items()}
    splice = Splice(graph, weights.env, export.blocks, weights.of_member)
    for node in exported.graph.nodes:
        if node.op not in ("placeholder", "output"):
            splice.copy(node)
    outputs, mutations = _results(graph, export, weights)
    program = Program(
        graph,
        tuple(weights.live),
        call.inputs(names),
        outputs,
        call.spec,
        exported.call_spec.out_spec,
        mutations=mutations,
        unused=tuple(weights.unused),
        training=training,
        notes=export.notes,
        sets=export.sets,
        sizes=_sizes(export.call, inputs),
    )
    return program, weights.values()


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
            node, self.names, self.kind, tuple(t.shape), t.dtype, t.requires_grad, self.persistent
        )


class _Weights:
    """The placeholders of the weights. Tied weights have several in the export, and become one; the
    weights of spliced blocks have none, and are given one like that of their leader."""

    def __init__(self, model: torch.nn.Module, exported: ExportedProgram, blocks: Blocks):
        nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
        self.exported = {
            str(s.target): nodes[s.arg.name]
            for s in exported.graph_signature.input_specs
            if s.kind in WEIGHTS
        }
        # Within a proven block, constants are the numbers that its forward writes as tensors.
        self.literals = {
            str(s.target)
            for s in exported.graph_signature.input_specs
            if s.kind is InputKind.CONSTANT_TENSOR
        }
        self.name_of = {node: name for name, node in self.exported.items()}
        self.leaders = {
            item.path: item.group.leader for run in blocks.runs for item in run.items
        }
        self.groups = list(_groups(model, exported))
        specs = exported.graph_signature.output_specs
        self.changed = {str(s.target) for s in specs if s.kind is OutputKind.BUFFER_MUTATION}
        self.env: dict[fx.Node, Any] = {}
        self.live: list[Weight] = []
        self.unused: list[Weight] = []
        self.node: dict[str, fx.Node] = {}  # name -> new placeholder

    def write(self, graph: fx.Graph) -> None:
        """A placeholder per weight that is read, in the order of the groups."""
        for group in self.groups:
            holders = [self.exported[n] for n in group.names if n in self.exported]
            models = holders or [self.exported[n] for n in self._leader_names(group.names)]
            if not models:
                continue
            if not any(m.users for m in models) and not self.changed & set(group.names):
                self.unused += [group.weight(models[0].name)] if group.kind != "constant" else []
                continue
            name = holders[0].name if holders else _placeholder_name(group)
            new = graph.placeholder(name)
            new.meta["val"] = models[0].meta["val"]
            self.live.append(group.weight(new.name))
            self.env.update(dict.fromkeys(holders, new))
            self.node.update(dict.fromkeys(group.names, new))

    def of_member(self, node: fx.Node, leader: str, member: str) -> fx.Node:
        name = self.name_of.get(node, "")
        if not name.startswith(leader + ".") or name in self.literals:
            return self.env[node]  # type: ignore[no-any-return]
        return self.node[member + name[len(leader) :]]

    def values(self) -> dict[str, torch.Tensor]:
        return {
            self.node[g.names[0]].name: g.tensor.detach()
            for g in self.groups
            if g.names[0] in self.node
            and g.kind != "parameter"
            and not (g.tensor.requires_grad or g.tensor.is_meta or self.changed & set(g.names))
        }

    def _leader_names(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            path, _, rest = name.rpartition(".")
            while path and path not in self.leaders:
                path, _, part = path.rpartition(".")
                rest = f"{part}.{rest}"
            if path and f"{self.leaders[path]}.{rest}" in self.exported:
                yield f"{self.leaders[path]}.{rest}"


def _placeholder_name(group: _Group) -> str:
    """As torch.export would name it."""
    return f"{group.kind[0]}_{group.names[0].replace('.', '_')}"


def _groups(model: torch.nn.Module, exported: ExportedProgram) -> Iterator[_Group]:
    """In the order of named_parameters(), then buffers, then tensors that are neither."""
    persistent = set(model.state_dict(keep_vars=True))
    groups: dict[Any, list[tuple[str, torch.Tensor, WeightKind]]] = {}
    for name, tensor, kind in _named_tensors(model, exported):
        groups.setdefault(identity(tensor), []).append((name, tensor, kind))
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
            name = str(spec.target)
            yield name, _attribute(model, name, exported.constants[name]), "constant"


def _attribute(model: torch.nn.Module, name: str, default: torch.Tensor) -> torch.Tensor:
    """The model's own tensor of that name; a number that forward writes as a tensor has none."""
    path, _, last = name.rpartition(".")
    try:
        found = getattr(model.get_submodule(path), last, None)
    except AttributeError:
        found = None
    return found if isinstance(found, torch.Tensor) else default


# -- inputs and outputs --------------------------------------------------------------------------------


def _inputs(
    exported: ExportedProgram, call: Call, graph: fx.Graph, env: dict[fx.Node, Any]
) -> dict[int, fx.Node]:
    """A placeholder for each leaf of the call that is a tensor, by the leaf's number."""
    nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    specs = exported.graph_signature.input_specs
    names = [s.arg.name for s in specs if s.kind is InputKind.USER_INPUT]
    order = call.order(exported.call_spec.in_spec)
    found: dict[int, fx.Node] = {}
    for leaf, name in sorted(zip(order, names, strict=True)):
        if isinstance(call.leaves[leaf][1], torch.Tensor):
            new = env[nodes[name]] = graph.placeholder(name)
            new.meta["val"] = nodes[name].meta["val"]
            found[leaf] = new
    return found


def _results(
    graph: fx.Graph, export: Export, weights: _Weights
) -> tuple[tuple[Output, ...], tuple[Mutation, ...]]:
    exported = export.program
    flat = list(exported.graph.output_node().args[0])  # type: ignore[arg-type]
    pairs = list(zip(exported.graph_signature.output_specs, flat, strict=True))
    results: list[fx.Node] = []
    outputs: list[Output] = []
    mutations: list[Mutation] = []
    for spec, value in pairs:
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(value, fx.Node):
            outputs.append(Output(index=len(results)))
            results.append(weights.env[value])
        elif spec.kind is OutputKind.USER_OUTPUT:
            outputs.append(Output(value=value))
    for spec, value in pairs:
        if spec.kind is OutputKind.BUFFER_MUTATION:
            mutations.append(Mutation(weights.node[str(spec.target)].name, len(results)))
            results.append(weights.env[value])
    graph.output(tuple(results))
    ordered = [x for _, x in sorted(zip(export.order, outputs, strict=True), key=lambda pair: pair[0])]
    return tuple(ordered), tuple(mutations)


def _refuse_other_changes(exported: ExportedProgram) -> None:
    values = exported.graph.output_node().args[0]
    pairs = zip(exported.graph_signature.output_specs, values, strict=True)  # type: ignore[arg-type]
    changed = [(s, value) for s, value in pairs if s.kind in FORBIDDEN]
    if changed:
        found = ", ".join(f"{FORBIDDEN[s.kind]} {s.target} at {traced_place(value)}" for s, value in changed)
        advice = {INSTEAD.get(value.target, "write x = x + 1 for x += 1, or x.clone() first") for _, value in changed}
        raise CaptureError(f"forward changes in place: {found}; only buffers may change: {', '.join(sorted(advice))}")


def _refuse_regions(graph: fx.Graph) -> None:
    regions = [n for n in graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]
    effects = [n for n in regions if n.target is torch.ops.higher_order.with_effects]
    if effects:
        found = ", ".join(f"{n.args[1]} at {traced_place(n)}" for n in effects)
        raise CaptureError(
            f"{found}: it does something besides its result (it raises, or prints), which no graph keeps: "
            "call it outside the model, or an operator without it (inv_ex for inv)"
        )
    if regions:
        found = ", ".join(f"{n.target} at {traced_place(n)}" for n in regions)
        raise CaptureError(f"{found}: {WITHIN}")


def _refuse_objects(exported: ExportedProgram) -> None:
    specs = exported.graph_signature.input_specs
    objects = {s.arg.name for s in specs if s.kind is InputKind.CUSTOM_OBJ}
    users = [n for n in exported.graph.nodes if any(x.name in objects for x in n.all_input_nodes)]
    if users:
        found = ", ".join(f"{n.target} at {traced_place(n)}" for n in users)
        raise CaptureError(f"{found}: {OBJECT}")


def _refuse_addresses(graph: fx.Graph) -> None:
    """What reads or writes memory by where it lies: a rank's part lies otherwise (see written.as_strided)."""
    found = [f"{n.target} at {traced_place(n)}" for n in graph.nodes if n.target in BY_ADDRESS]
    if found:
        raise CaptureError(
            f"{', '.join(found)}: it goes by addresses, at sizes that may change or beside the tensor's own "
            "elements, and ranks hold parts that lie otherwise: use unfold, slices or an index"
        )


def _refuse_sizes_of_values(graph: fx.Graph) -> None:
    """Sizes that are known once a tensor's values are: no split, price or schedule can hold them."""
    known: set[Any] = set()
    found: dict[str, None] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        new = free_unbacked_symbols(value) - known if isinstance(value, torch.Tensor) else set()
        if new:
            source = node.args[0] if node.target is operator.getitem else node
            found[f"{source.target} at {traced_place(node)}"] = None
            known |= new
    if found:
        raise CaptureError(f"{', '.join(found)}: {SIZED_BY_VALUES}")


def _sizes(call: Call, inputs: dict[int, fx.Node]) -> tuple[Size, ...]:
    """Name and symbols of each dynamic size."""
    symbols: dict[str, set[str]] = {}
    for leaf, node in inputs.items():
        for dim, name in call.dims[leaf].items():
            size = node.meta["val"].shape[dim]
            if isinstance(size, torch.SymInt):
                symbols.setdefault(name, set()).add(str(size.node.expr))
    ranges = ((name, *call.ranges[name]) for name in symbols)
    return tuple(Size(name, frozenset(symbols[name]), low or 0, high) for name, low, high in ranges)


INSTEAD = {
    torch.ops.aten.embedding_renorm.default: "for max_norm= scale what is looked up, "
    "y * (max_norm / y.norm(dim=-1, keepdim=True)).clamp(max=1)"
}
WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
BY_ADDRESS = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)
FORBIDDEN = {
    OutputKind.USER_INPUT_MUTATION: "the argument",
    OutputKind.PARAMETER_MUTATION: "the parameter",
}
