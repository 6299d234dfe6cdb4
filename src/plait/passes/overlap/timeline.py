"""Timeline: a region's schedule marched through two resources, compute and transfers.

`script` writes down what weave.py emits, in its order: run a node on a chunk, start a move, wait
for it. `march` gives every line its time: compute runs in order, transfers run in order beside it,
a start waits for its producer, a wait for its transfer. The backward is the same script read from
its end, a wait becoming the start of the dual move. While a transfer runs, compute loses a part of
its rate to it (`Machine.loses`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx

from plait.cluster.device import Device
from plait.errors import ScheduleError
from plait.passes.overlap.arrange import stages
from plait.passes.overlap.chunks import Chunks, Form
from plait.passes.overlap.flow import Edge, Flow
from plait.passes.overlap.regions import Region, heavy, in_order
from plait.passes.overlap.weave import Key
from plait.rules.describe import Access
from plait.rules.equation import Dims, Factor
from plait.rules.layout import Layout
from plait.rules.moves import Step

Collective = Callable[[str, float], float]  # (kind, bytes of the whole value) -> seconds


@dataclass(frozen=True)
class Machine:
    """What the march needs to know of the devices. `loses`: of compute's rate, while a transfer runs."""

    device: Device
    collective: Collective
    n: int
    loses: float
    start: float  # seconds of the host to start a move and to wait for it


@dataclass(frozen=True)
class Act:
    """`run` a node on a chunk, `start` the move of an edge for a chunk, or `wait` for it."""

    kind: str
    turn: int
    node: fx.Node
    edge: Edge | None = None


@dataclass(frozen=True)
class Span:
    """`begin` to `end` seconds on `stream` (compute or comm)."""

    stream: str
    name: str
    begin: float
    end: float

    def __str__(self) -> str:
        return f"{self.stream}: {self.name} {self.begin * 1e6:.2f} {self.end * 1e6:.2f}"

    @classmethod
    def parse(cls, text: str) -> Span:
        try:
            stream, name, begin, end = text.split()
            return cls(stream.rstrip(":"), name, float(begin) / 1e6, float(end) / 1e6)
        except ValueError:
            raise ScheduleError(
                f"{text!r} is no line of a timeline; one reads like `compute: linear 0.0 12.5`, in microseconds"
            ) from None


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        return max((s.end for s in self.spans), default=0.0)

    def busy(self, stream: str) -> float:
        return sum(s.end - s.begin for s in self.spans if s.stream == stream)

    @property
    def exposed(self) -> float:
        """Seconds in which compute stands still."""
        return self.seconds - self.busy("compute")

    def __str__(self) -> str:
        return "\n".join(map(str, self.spans))

    @classmethod
    def parse(cls, text: str) -> Timeline:
        return cls(tuple(Span.parse(line) for line in text.splitlines() if line.strip()))

    def gantt(self, width: int = 72) -> str:
        """A row a stream; letters name the chunk that runs (0-9 from a name's `_c` ending)."""
        total = self.seconds or 1.0
        rows = []
        for stream in dict.fromkeys(s.stream for s in self.spans):
            row = ["."] * width
            for s in self.spans:
                if s.stream == stream and s.end > s.begin:
                    lo = min(width - 1, int(s.begin / total * width))
                    hi = max(lo + 1, int(s.end / total * width))
                    mark = s.name.rpartition("_c")[2][:1] if "_c" in s.name else "#"
                    row[lo:hi] = mark * (min(hi, width) - lo)
            rows.append(f"{stream:>8} |{''.join(row)}|")
        return "\n".join([*rows, f"{'':>8}  0{f'{total * 1e6:.1f} us':>{width - 1}}"])


def script(flow: Flow, region: Region, form: Form) -> list[Act]:
    """What the program does in the region, in order."""
    return list(_acts(flow, region, form))


def _acts(flow: Flow, region: Region, form: Form) -> Iterator[Act]:
    sites = {e.key: e for e in region.sites}
    turns = range(form.count)
    waited: set[tuple[Key, int]] = set()
    own = {0} if form.kind == "blocks" else set()  # chunk 0 is there already

    def wait(edge: Edge, turn: int) -> Iterator[Act]:
        if (edge.key, turn) not in waited and not (turn in own and region.spread_out(edge)):
            waited.add((edge.key, turn))
            yield Act("wait", turn, edge.reader, sites[edge.key])

    def send(edge: Edge, turn: int) -> Iterator[Act]:
        if not (turn in own and region.spread_out(edge)):
            yield Act("start", turn, edge.source, edge)

    for edge in sites.values():
        if edge.source not in region.members:
            for turn in turns:
                yield from send(edge, turn)
    for nodes, order in stages(flow, region, form):
        for turn in order:
            for node in nodes:
                for edge in flow.into[node]:
                    if edge.key in sites:
                        yield from wait(edge, turn)
                yield Act("run", turn, node)
                for edge in sites.values():
                    if edge.source is node:
                        yield from send(edge, turn)
    for edge in sites.values():
        for turn in turns:
            yield from wait(edge, turn)


def blocking(flow: Flow, region: Region) -> list[Act]:
    """The region whole: every move where its producer ends."""
    sites = {e.key: e for e in region.sites}
    out: list[Act] = []
    for edge in sites.values():
        if edge.source not in region.members:
            out += [Act("start", 0, edge.source, edge), Act("wait", 0, edge.reader, edge)]
    for node in region.nodes:
        out.append(Act("run", 0, node))
        for edge in sites.values():
            if edge.source is node:
                out += [Act("start", 0, node, edge), Act("wait", 0, edge.reader, edge)]
    return out


def march(
    flow: Flow, region: Region, form: Form, acts: Sequence[Act], machine: Machine, backward: bool = False
) -> Timeline:
    """The times of a script; `backward`: of its mirror image."""
    chunks = region.chunks(form, 0)
    spans: list[Span] = []
    compute = comm = 0.0
    arrival: dict[tuple[Key, int], float] = {}
    for act in reversed(acts) if backward else acts:
        mark = f"_c{act.turn}" if form.count > 1 else ""
        if act.kind == "run":
            seconds = node_seconds(flow, act.node, chunks, act.turn, machine) * (2 if backward else 1)
            shared = max(0.0, min(comm, compute + seconds) - compute)
            end = compute + seconds + machine.loses * shared
            spans.append(Span("compute", act.node.name + mark, compute, end))
            compute = end
            continue
        assert act.edge is not None
        key = (act.edge.key, act.turn)
        compute += machine.start / 2 if form.count > 1 else 0.0
        if (act.kind == "start") != backward:
            begin = max(comm, compute)
            comm = begin + move_seconds(region, act.edge, chunks, act.turn, machine, backward, form)
            arrival[key] = comm
            if comm > begin:
                spans.append(Span("comm", act.edge.source.name + mark, begin, comm))
        else:
            compute = max(compute, arrival[key])
    return Timeline((*spans, Span("compute", "end", compute, compute)))


def node_seconds(flow: Flow, node: fx.Node, chunks: Chunks, turn: int, machine: Machine) -> float:
    """One operator on one chunk on the busiest rank: matmuls in whole waves of tiles, others by bytes."""
    access, split = flow.description.accesses[node], flow.strategies[node].split

    def size(f: Factor) -> int:
        if chunks.touches(f):
            return chunks.size(f, turn)
        return max(split.sizes(f)) if split is not None and split.touches(f) else f.extent

    values = [(o.dims, _dtype(o.node)) for o in access.operands]
    values += [(dims, _dtype(node)) for dims in access.results]
    device = machine.device
    if access.products:
        return _attention_seconds(access, chunks, turn, size, device, str(values[0][1]))
    if heavy(access):
        left, right, *_ = (o.dims for o in access.operands if not o.added)
        m, n, k, batch = _matmul(left, right, access.results[0], size)
        return device.launch + device.matmul_seconds(m, n, k, str(values[0][1]), batch)
    moved = sum(prod(map(size, dims)) * dtype.itemsize for dims, dtype in values)
    if any(not o.dims for o in access.operands) and not values:
        return 0.0
    return 0.0 if _is_view(node) else device.launch + device.memory_seconds(moved)


def _attention_seconds(
    access: Access, chunks: Chunks, turn: int, size: Callable[[Factor], int], device: Device, dtype: str
) -> float:
    """By the pairs of a query and a key that are computed; scores stay on the chip."""
    *_, keys = access.products[0]
    rows, held = size(access.result[-2]), size(keys)
    if in_order(access, chunks):
        held = sum(chunks.size(keys, i) for i in range(turn + 1))
    pairs = float(rows * held)
    if access.so_far and (rows == held or device.kind == "cuda"):  # a CPU's kernel computes what a mask hides
        pairs -= rows * (rows - 1) / 2
    heads = prod(map(size, access.result[:-2]))
    flops = sum(2.0 * heads * pairs * size(letters[-2]) for letters in access.products)
    return device.launch + flops / (device.peak(dtype) * device.tiles[0].share)


def _matmul(left: Dims, right: Dims, out: Dims, size: Callable[[Factor], int]) -> tuple[int, int, int, int]:
    a, b, c = ({f.root() for f in dims if f.size > 1} for dims in (left, right, out))

    def of(factors: set[Factor]) -> int:
        return prod(map(size, factors))

    return of((a - b) & c), of((b - a) & c), of(a & b - c), of(a & b & c)


def _is_view(node: fx.Node) -> bool:
    """No kernel: the operator's schema says that its result aliases its operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def _dtype(node: fx.Node) -> torch.dtype:
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    return value.dtype if isinstance(value, Tensor) else torch.float32


def move_seconds(
    region: Region, edge: Edge, chunks: Chunks, turn: int, machine: Machine, backward: bool, form: Form
) -> float:
    at = chunks.dim(edge.dims)
    share = chunks.size(edge.dims[at], turn) / edge.dims[at].size if at is not None else 1.0
    whole = prod(f.extent for f in edge.dims) * _dtype(edge.source).itemsize
    total = 0.0
    for c in edge.moves:
        step: Step = c.backward if backward else c.forward
        if (backward and not edge.grad) or step.collective is None:
            continue
        if form.kind == "blocks" and _spread(region, edge.have, edge.need):
            total += machine.collective("all_gather", whole) / max(1, machine.n - 1)
        else:
            total += machine.collective(step.collective, share * whole)
    return total


def _spread(region: Region, *layouts: Layout) -> bool:
    return any(x.split is not None and x.split.touches(region.factor) for x in layouts)
