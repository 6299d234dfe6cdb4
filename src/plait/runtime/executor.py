"""Executor: one rank's program as a graph module, and the call that feeds it.

An `Executable` belongs to one form of call: structure, shapes (or their dynamic pattern), dtypes,
plain values and train/eval mode. `Compiled` (compiled.py) keeps the weights, which all executables
of a model share, and picks or makes the executable of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from plait.passes import rings
from plait.passes.buckets import bucket
from plait.passes.grouped import group
from plait.passes.meanwhile import pay
from plait.passes.overlap.places import prove
from plait.passes.partition import BACK, Local
from plait.plan import owed
from plait.plan.direct import routes
from plait.plan.planner import Planned
from plait.program import Program, Size
from plait.rules.moves import Cut
from plait.runtime import direct as lowering
from plait.runtime import direct_training
from plait.runtime.fused import fuse
from plait.runtime.streams import Beside, modules
from plait.runtime.symmetric import Workspace
from plait.runtime.transport import BucketModule, Transport
from plait.runtime.trips import Trip, trip

# Where sizes are fixed on CUDA, in this order where they can. On H200 (torch 2.11) cuDNN's was the fastest at all
# of 21 shapes, there 1.1 to 2.1 times and there and back 1.2 to 1.9 times as fast as flash attention
# (bench/results/kernels.md); for each size that is new it makes a plan first.
FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attention(device: torch.device) -> AbstractContextManager[None]:
    """In which attention runs by the fastest kernel."""
    return sdpa_kernel(FASTEST, set_priority=True) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class Executable:
    planned: Planned
    local: Local
    module: fx.GraphModule
    patterns: tuple[Any, ...]  # per leaf of the call: a plain value, or a `Pattern`
    device: torch.device
    replay: Trip | None = None  # on a CUDA device
    arena: Workspace | None = None  # what direct moves write to; it lives as long as the program

    @property
    def program(self) -> Program:
        return self.planned.program

    @property
    def folded(self) -> tuple[str, ...]:
        """Tensors of the model whose values stand in this program's constants."""
        return self.planned.program.folded

    def __call__(self, weights: Mapping[str, Tensor], leaves: Sequence[Any], seed: Tensor) -> Any:
        """The user's outputs; mutated buffers in `weights` take their new values."""
        program = self.planned.program
        feed = [weights[name] for name in self._names]
        for i in self._changed:
            feed[i] = feed[i].clone()  # what the call changes afterwards, autograd may have kept for the way back
        feed += [
            x.to(self.device)
            for x, i in zip(leaves, program.inputs, strict=True)
            if i.node is not None
        ]
        if self.local.seeded:
            feed.append(seed)
        with torch.set_grad_enabled(torch.is_grad_enabled() and program.training):
            flat = self._run(feed)
        if program.mutations:
            self._keep(flat, weights)
        values = [o.value if o.index is None else flat[o.index] for o in program.outputs]
        return pytree.tree_unflatten(values, program.out_spec)

    @cached_property
    def _names(self) -> list[str]:
        return [share.weight.name for share in self.local.shares]

    @cached_property
    def _changed(self) -> list[int]:
        """Which of the shares a call changes."""
        changed = {m.weight for m in self.program.mutations}
        return [i for i, share in enumerate(self.local.shares) if share.weight.node in changed]

    def _keep(self, flat: Sequence[Any], weights: Mapping[str, Tensor]) -> None:
        """The new values of buffers."""
        by_node = {share.weight.node: share for share in self.local.shares}
        with torch.no_grad():
            for mutation in self.program.mutations:
                share = by_node[mutation.weight]
                weights[share.weight.name].copy_(share.of(flat[mutation.index], self.local.rank))

    def _run(self, feed: list[Tensor]) -> tuple[Any, ...]:
        with self.arena.in_use() if self.arena is not None else nullcontext():
            return self._steps(feed)

    def _steps(self, feed: list[Tensor]) -> tuple[Any, ...]:
        learning = torch.is_grad_enabled()
        if self.replay is None or learning != self.program.training:
            return tuple(self.module(*feed))
        with attention(self.device):
            return self.replay(feed)

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        return leaves_of(self.planned.program, self.patterns, args, kwargs)


@dataclass(frozen=True)
class Pattern:
    """A tensor input: a `Size` stands for a size that may change, within its range."""

    shape: tuple[int | Size, ...]
    dtype: torch.dtype

    def matches(self, x: Any, known: dict[str, int]) -> bool:
        """`known`: what the sizes that may change are in this call, as far as it has been read."""
        return (
            isinstance(x, Tensor)
            and x.dtype == self.dtype
            and x.dim() == len(self.shape)
            and all(_is(want, have, known) for want, have in zip(self.shape, x.shape, strict=True))
        )


def _is(want: int | Size, have: int, known: dict[str, int]) -> bool:
    if isinstance(want, int):
        return want == have
    within = want.low <= have and (want.high is None or have <= want.high)
    return within and known.setdefault(want.name, have) == have


def leaves_of(
    program: Program, patterns: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any] | None:
    """The call's leaves in the order of the program's inputs; None where it is of another form."""
    flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if spec != program.in_spec:
        try:
            flat = list(program.in_spec.flatten_up_to((tuple(args), dict(kwargs))))
        except ValueError:
            return None
    known: dict[str, int] = {}
    fits = len(flat) == len(patterns) and all(
        p.matches(x, known) if isinstance(p, Pattern) else _same(p, x)
        for p, x in zip(patterns, flat, strict=True)
    )
    return flat if fits else None


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


Arena = Callable[[int, torch.device], Workspace]  # of so many bytes on every rank


def executable(
    planned: Planned, transport: Transport, device: torch.device, arena: Arena | None = None
) -> Executable:
    """This rank's graph module: moves as submodules, constants as buffers on `device`.

    `arena` makes the memory of direct moves, which CUDA devices map of each other by themselves.
    """
    local = planned.local(transport.rank)
    if arena is None and device.type == "cuda":
        arena = transport.arena
    direct, workspace = _direct(planned, local, transport, device, arena)
    algorithms = {p.name: p.algorithm for p in planned.plan.collectives}
    root: dict[str, Any] = {name: value.to(device) for name, value in local.constants.items()}
    root |= direct
    root |= pay(local, owed.sites(planned.plan.overlaps))
    woven = any(site.of for site in local.sites.values())
    if woven:
        prove(local, planned.program.training)
    graphed = device.type == "cuda" and not local.seeded and capturable(planned.program, [local], transport)
    for name, of in bucket(local, algorithms).items():
        how = algorithms.get(f"{of[0]}{BACK}", "native")
        root[name] = BucketModule([local.sites[s] for s in of], transport, how)
    alone = _fresh(local.graph)
    beside = Beside.of(transport, device) if woven else None
    root |= modules(local.sites, beside or transport, algorithms, alone if beside is None else ())
    place(local.graph, device)
    patterns = patterns_of(planned.program)
    inputs = sum(i.node is not None for i in planned.program.inputs)
    fixed = all(isinstance(s, int) for p in patterns if isinstance(p, Pattern) for s in p.shape)
    training = planned.program.training
    if graphed and not training:
        group(local.graph)
    if graphed or (training and fixed and device.type == "cuda"):
        root |= fuse(local.graph, rows=training)
    module = fx.GraphModule(root, local.graph)
    replay: Trip | None = None
    if graphed:
        replay = trip(module, inputs, training, transport)
    return Executable(planned, local, module, patterns, device, replay, workspace)


def _direct(
    planned: Planned,
    local: Local,
    transport: Transport,
    device: torch.device,
    arena: Arena | None,
) -> tuple[dict[str, Any], Workspace | None]:
    """The modules of moves through the peers' memory, after a rewrite of the graph for kernels."""
    if arena is None or not rings.fixed(planned.program):
        return {}, None
    chosen = routes(planned.plan.overlaps)
    found = rings.find(planned.program, local)
    made, workspace = dict[str, Any](), None
    training = planned.program.training
    if chosen:
        workspace = arena(lowering.nbytes(found, chosen, transport.size), device)
        if training:
            made = direct_training.lower(local, found, chosen, workspace, transport.backward)
        else:
            made = lowering.lower(local, found, chosen, workspace)
    if not training:
        lowering.norms(local.graph)
    return made, workspace


def _fresh(graph: fx.Graph) -> set[str]:
    """The moves of what a matmul has just made for them alone."""
    made = (torch.ops.aten.linear.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return {
        str(node.target)
        for node in graph.nodes
        if node.op == "call_module"
        for x in node.all_input_nodes
        if x.target in made and len(x.users) == 1
    }


def capturable(program: Program, locals_: Sequence[Local], transport: Transport) -> bool:
    """Whether CUDA graphs may hold it: sizes are fixed, no buffer changes, and collectives, if any, can be captured."""
    return not program.sizes and not program.mutations and (transport.captures or not any(map(_talks, locals_)))


def _talks(local: Local) -> bool:
    """Whether a collective of the group is left in the program, or on its way back."""
    called = (str(n.target).split(".")[0] for n in local.graph.nodes if n.op == "call_module")
    sites = (local.sites[name] for name in called if name in local.sites)
    moves = ((site.conversion, site.grad) for site in sites)
    return any(c.forward.collective or (grad and c.backward.collective) for c, grad in moves)


def place(graph: fx.Graph, device: torch.device) -> None:
    """Factories make their tensors on the rank's device, wherever the model was captured."""
    for node in graph.nodes:
        if node.op == "call_function" and "device" in node.kwargs:
            node.update_kwarg("device", device)


def patterns_of(program: Program) -> tuple[Any, ...]:
    values = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    sizes = {symbol: size for size in program.sizes for symbol in size.symbols}
    out: list[Any] = []
    for entry in program.inputs:
        if entry.node is None:
            out.append(entry.value)
        else:
            fake = values[entry.node]
            shape = tuple(s if isinstance(s, int) else sizes[str(s)] for s in fake.shape)
            out.append(Pattern(shape, fake.dtype))
    return tuple(out)


def layouts(local: Local) -> dict[str, Cut | None]:
    """How every weight is held, by node: what another form of call must take as it is."""
    return {s.weight.node: s.cut for s in local.shares}
