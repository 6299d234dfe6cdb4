"""Repeated blocks: found, proven the same, exported once.

`prove` runs the trial. During the export the forward of every proven block is replaced. The first of
a group, the leader, has its arguments and results pass through a marker. The others, its members,
compute nothing: a run of members that follow one another is one operator, emitted by the last, and
their parameters are out of sight. Markers and runs are `plait::block(operands, like, tag)`, whose
results look like `like`:

    leader    enter(arguments) ... its operators ... leave(results)
    run       run(all arguments that come from outside the run)

splice.py then writes the leader's operators in place of each member, with the member's operands.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils import _pytree as pytree

from plait.capture import sizes
from plait.capture.call import Call, Range
from plait.capture.forgotten import Forgotten
from plait.capture.functions import traced
from plait.capture.hooks import Hooks
from plait.capture.preserve import (
    on_meta,
    preserved,
    replaced_forwards,
    swap_tensors,
    to_meta,
)
from plait.capture.python import spoken
from plait.capture.questions import Questions
from plait.capture.refuse import refuse_outputs
from plait.capture.trial import Kind, Trial, own_tensors
from plait.passes.symbolic import symbols

MIN_MEMBERS = 3  # with fewer blocks of a kind, the proof costs more than it saves

_library = torch.library.Library("plait", "DEF")
_library.define("block(Tensor[] operands, Tensor[] like, str tag) -> Tensor[]")


@torch.library.register_fake("plait::block", lib=_library)  # type: ignore[untyped-decorator]
def _block(operands: list[torch.Tensor], like: list[torch.Tensor], tag: str) -> list[torch.Tensor]:
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like
    ]


BLOCK = torch.ops.plait.block.default


# -- the proof -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """Groups of blocks that are the same, by path, the first one called first."""

    groups: tuple[tuple[str, ...], ...] = ()
    runs: tuple[tuple[str, ...], ...] = ()
    ranges: Mapping[str, Range] = field(default_factory=dict)  # of the dynamic sizes
    places: Mapping[str, str] = field(default_factory=dict)  # a line that asks about each of them
    changed: tuple[str, ...] = ()  # attributes that forward sets


def prove(
    model: nn.Module, call: Call, training: bool, questions: Questions, *, blocks: bool = True
) -> Proof:
    """Run the trial; raises a CaptureError for what an export would forget."""
    hooks = Hooks()
    proof = _tried(model, call, training, questions, _kinds(model) if blocks else [], hooks)
    hooks.refuse()
    return proof


def _tried(
    model: nn.Module, call: Call, training: bool, questions: Questions, kinds: list[Kind], hooks: Hooks
) -> Proof:
    forgotten = Forgotten(training)
    trial = Trial(kinds, forgotten)
    forwards = {
        m: functools.partial(trial.block, m, m.forward) for k in kinds for m in k.members.values()
    }
    forwards = {m: _as_forward(f) for m, f in forwards.items()}
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, static_shapes=True, allow_non_fake_inputs=True)
    with preserved(model), replaced_forwards(forwards):
        args, kwargs = _fake(call, model, mode)
        if on_meta(model):
            swap_tensors(model, to_meta)
        swap_tensors(model, mode.from_tensor)  # so that nothing is computed or changed
        hooks.watch(model)
        asked = sizes.asked(call, (args, kwargs))
        _watch_guards(env, trial)
        failed: Exception | None = None
        try:
            with (
                preserved(model) as changed,
                mode,
                _exporting(),
                forgotten.watching(),
                traced(training),
                questions.answered(),
                trial,
                spoken(model, training) as names,
                symbols() if asked else contextlib.nullcontext(),
            ):
                outputs = model(*args, **kwargs)
        except Exception as error:  # whatever the user's code raises: the export raises it again
            failed = error
        if failed is not None:
            if questions.open:
                raise failed
            return Proof(ranges=call.ranges)
        refuse_outputs(outputs)
        forgotten.backward_of(pytree.tree_leaves(outputs))
        trial.meet(None, outputs)
    forgotten.refuse()
    del outputs
    groups = [g for g in trial.groups() if len(g) >= MIN_MEMBERS]
    return Proof(
        tuple(map(tuple, groups)),
        tuple(map(tuple, trial.runs(groups))),
        sizes.ranges(asked, env, trial.branches, call.ranges),
        sizes.places(asked, trial.guards),
        (*changed, *names),
    )


def _as_forward(block: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return block(args, kwargs)

    return forward


def _kinds(model: nn.Module) -> list[Kind]:
    """The outermost modules of which there are several alike."""
    keys = {name: _likeness(m) for name, m in model.named_modules() if name and _is_block(m)}
    counts: dict[Any, int] = {}
    for key in keys.values():
        counts[key] = counts.get(key, 0) + 1
    kinds: dict[Any, Kind] = {}

    def walk(name: str, module: nn.Module) -> None:
        key = keys.get(name)
        if key is not None and counts[key] >= MIN_MEMBERS:
            kinds.setdefault(key, Kind({})).members[name] = module
            return
        for child, m in module.named_children():
            walk(f"{name}.{child}".lstrip("."), m)

    walk("", model)
    return [k for k in kinds.values() if len(k.members) >= MIN_MEMBERS]


def _is_block(module: nn.Module) -> bool:
    containers = (nn.ModuleList, nn.ModuleDict)
    return bool(module._modules) and not isinstance(module, containers)


def _likeness(module: nn.Module) -> Any:
    own = tuple(
        (name, tuple(t.shape), t.dtype, t.device, t.stride(), t.requires_grad)
        for name, t in own_tensors(module)
    )
    return type(module), own


def _fake(call: Call, model: nn.Module, mode: FakeTensorMode) -> tuple[Any, Any]:
    """The call with fake tensors, of symbolic sizes where the call has them."""

    def fake(path: str, x: Any, dims: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        kinds = [DimDynamic.DYNAMIC if d in dims else DimDynamic.STATIC for d in range(x.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=kinds)  # type: ignore[var-annotated]
        from torch._dynamo.source import ConstantSource  # slow to import, and not of every process

        source = ConstantSource(path)
        return mode.from_tensor(x, static_shapes=False, symbolic_context=context, source=source)

    example = pytree.tree_leaves(call.example(model))
    leaves = [
        fake(path, x, dims)
        for (path, _), x, dims in zip(call.leaves, example, call.dims, strict=True)
    ]
    return pytree.tree_unflatten(leaves, call.spec)  # type: ignore[no-any-return]


def _watch_guards(env: ShapeEnv, trial: Trial) -> None:
    evaluate = env.evaluate_expr

    def watched(expression: Any, *args: Any, **kwargs: Any) -> Any:
        result = evaluate(expression, *args, **kwargs)
        trial.guard(expression, result)
        return result

    env.evaluate_expr = watched  # type: ignore[assignment,method-assign]


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """What the model's code asks for, answered as during the export."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = {f: getattr(torch.compiler, f) for f in flags if hasattr(torch.compiler, f)}
    try:
        for flag in before:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)


# -- the export ----------------------------------------------------------------------------------------


@dataclass
class Group:
    """What the leader's forward tells those of the members."""

    leader: str
    tensors: list[torch.Tensor] = field(default_factory=list)  # its results, marked
    # per leaf of the result: ("result", i), ("argument", i) or ("value", x)
    leaves: list[tuple[str, Any]] = field(default_factory=list)
    spec: Any = None

    def results(self, given: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        sources: dict[str, list[torch.Tensor]] = {"argument": given, "result": tensors}
        leaves = [x if kind == "value" else sources[kind][x] for kind, x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Item:
    """One member in a run; `operands`: ("outer", i), or ("before", i): of the member before it."""

    path: str
    group: Group
    operands: tuple[tuple[str, int], ...]


@dataclass
class Run:
    items: list[Item] = field(default_factory=list)
    outer: list[torch.Tensor] = field(default_factory=list)

    def add(self, path: str, group: Group, given: list[torch.Tensor]) -> None:
        before = {id(t): i for i, t in enumerate(self.items[-1].group.tensors if self.items else [])}
        self.items.append(Item(path, group, tuple(self._source(t, before) for t in given)))

    def _source(self, t: torch.Tensor, before: dict[int, int]) -> tuple[str, int]:
        if id(t) in before:
            return "before", before[id(t)]
        for i, known in enumerate(self.outer):
            if known is t:
                return "outer", i
        self.outer.append(t)
        return "outer", len(self.outer) - 1


@dataclass
class Blocks:
    """The record of an export: groups and runs by the numbers in the operators' tags."""

    groups: list[Group] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


@contextlib.contextmanager
def opaque(model: nn.Module, proof: Proof) -> Iterator[Blocks]:
    """To be used within `preserved`: the members' tensors are taken out of the model."""
    blocks = Blocks()
    forwards: dict[nn.Module, Any] = {}
    group_of: dict[str, Group] = {}
    for number, (first, *members) in enumerate(proof.groups):
        group = Group(first)
        blocks.groups.append(group)
        group_of.update((path, group) for path in members)
        leader = model.get_submodule(first)
        forwards[leader] = _leader(number, group, leader.forward)
    for number, paths in enumerate(proof.runs):
        run = Run()
        blocks.runs.append(run)
        for path in paths:
            last = number if path == paths[-1] else None
            forwards[model.get_submodule(path)] = _member(run, path, group_of[path], last)
    for path in group_of:
        model.get_submodule(path).__dict__.update(_parameters={}, _buffers={})
    for path in group_of:
        model.get_submodule(path).__dict__["_modules"] = {}
    with replaced_forwards(forwards):
        yield blocks


def _leader(number: int, group: Group, forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = _distinct(leaves)
        entered = BLOCK(given, given, f"enter {number}")
        swap = {id(t): e for t, e in zip(given, entered, strict=True)}
        args, kwargs = pytree.tree_unflatten([swap.get(id(x), x) for x in leaves], spec)
        outs, group.spec = pytree.tree_flatten(forward(*args, **kwargs))
        arguments = {id(e): i for i, e in enumerate(entered)}
        tensors = [t for t in _distinct(outs) if id(t) not in arguments]
        group.tensors = list(BLOCK(tensors, tensors, f"leave {number}"))
        places = {id(t): i for i, t in enumerate(tensors)}
        group.leaves = [_leaf(x, arguments, places) for x in outs]
        return group.results(given, group.tensors)

    return run


def _leaf(x: Any, arguments: dict[int, int], results: dict[int, int]) -> tuple[str, Any]:
    if id(x) in arguments:
        return "argument", arguments[id(x)]
    return ("result", results[id(x)]) if id(x) in results else ("value", x)


def _member(run: Run, path: str, group: Group, last: int | None) -> Any:
    """`last`: the number of the run, for its last member, which emits it."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = _distinct(pytree.tree_leaves((args, kwargs)))
        run.add(path, group, given)
        tensors = group.tensors
        if last is not None:
            tensors = list(BLOCK(run.outer, tensors, f"run {last}"))
        return group.results(given, tensors)

    return forward


def _distinct(leaves: list[Any]) -> list[torch.Tensor]:
    return list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())
