"""Messages of stages as NCCL carries them: no tags, and what is begun on a line between two ranks holds up the rest.

Values are proven by running on gloo without tags, where messages from one rank to another match in their order. That
nobody waits for ever is proven of what every rank begins and waits for: a line is a stream, on which a message
moves when both its ends have come to it, and its first one blocks the host until the other end is there too.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import plait
from plait.runtime import channel, staging
from plait.runtime.channel import Ways
from tests.cases import Mesh
from tests.compare import digest
from tests.gloo import prove
from tests.gloo.harness import Pool

Line = tuple[int, int]  # from rank to rank


@dataclass
class Record:
    """What this rank began, ("send" | "recv", line) in order, and where it waited for which of these."""

    group: Any
    begun: list[tuple[str, Line]] = field(default_factory=list)
    host: list[tuple[str, int]] = field(default_factory=list)  # ("begin" | "wait", index in `begun`)

    def begin(self, kind: str, x: torch.Tensor, group: Any, there: int) -> Any:
        me = dist.get_rank(self.group)
        self.host.append(("begin", len(self.begun)))
        self.begun.append((kind, (me, there) if kind == "send" else (there, me)))
        index, start = len(self.begun) - 1, ISEND if kind == "send" else IRECV
        peer = {"group_dst": there} if kind == "send" else {"group_src": there}
        return Handle(self, index, start(x, group=group, tag=0, **peer))


ISEND, IRECV = dist.isend, dist.irecv


@dataclass
class Handle:
    record: Record
    index: int
    inner: Any

    def wait(self) -> None:
        self.record.host.append(("wait", self.index))
        self.inner.wait()


def apart(group: Any, device: torch.device) -> Ways:
    every = np.arange(dist.get_world_size(group))[None]
    return Ways(*(staging._own_group(group, every, use) for use in (" up", " down")))


class Long(nn.Module):
    """What the first layer makes, the last stage of four reads: on two places, after more of the others' messages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        first = h = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            h = torch.tanh(layer(h))
        return h * first


def long(group: Any, name: str, mesh: str, schedule: str) -> prove.Report:
    torch.manual_seed(0)
    model, x = Long().double(), torch.randn(8, 8, dtype=torch.float64)
    shape = Mesh.parse(mesh)
    parts = plait.compile(
        copy.deepcopy(model), (x,), tp=1, pp=shape.pp, group=group, training=True, measure=False,
        micro_batches=shape.micro_batches or 1, schedule=schedule, cluster=prove.free(shape.size),
    )  # fmt: skip
    loss, _ = parts.step(x, loss_fn=_weighed)
    want = _weighed(model(x))
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    for key, grad in parts.gradients().items():
        torch.testing.assert_close(grad, model.get_parameter(key).grad)
    return {"loss": digest(loss)}


def _weighed(out: Tensor) -> Tensor:
    return (out * torch.linspace(1, 2, 8, dtype=out.dtype)).pow(2).mean()


def without_tags(group: Any, name: str, mesh: str, schedule: str) -> tuple[prove.Report, Any]:
    record, prove_it = Record(group), long if name == "long" else prove.stepped
    with (
        patch.object(staging, "_ways", apart),
        patch.object(channel.dist, "isend", lambda x, group, group_dst, tag: record.begin("send", x, group, group_dst)),
        patch.object(channel.dist, "irecv", lambda x, group, group_src, tag: record.begin("recv", x, group, group_src)),
    ):
        report = prove_it(group, name, mesh, schedule)
    return report, (record.begun, record.host)


CASES = [
    ("long", "pp2/4", "interleaved"),
    ("b28_skip_connection", "pp2/4", "1f1b"),
    ("b28_skip_connection", "pp3/4", "zero-bubble"),
    pytest.param("b29_encoder_decoder", "pp3/4", "1f1b", marks=pytest.mark.full),
    pytest.param("b31_tied_over_stages", "pp2/4", "interleaved", marks=pytest.mark.full),
    pytest.param("b28_skip_connection", "pp4/4", "gpipe", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "mesh", "schedule"), CASES)
def test_messages_need_no_tags_and_no_line_locks(pool: Pool, name: str, mesh: str, schedule: str) -> None:
    answers = pool.run(without_tags, Mesh.parse(mesh).size, name, mesh, schedule)
    prove.alike([report for report, _ in answers])
    ranks = [record for _, record in answers]
    sent, got = (Counter(line for begun, _ in ranks for k, line in begun if k == kind) for kind in ("send", "recv"))
    assert sent == got
    assert locked(ranks, lambda line: line) == []
    assert locked(ranks, lambda line: line[0] < line[1]) == []  # a communicator that was made with its group has one
    if schedule == "1f1b":  # one line for both directions, as a group has, would lock
        assert locked(ranks, lambda line: (min(line), max(line)))


def locked(ranks: Sequence[Any], stream: Any) -> list[Any]:
    """A circle of things that wait for each other, or nothing."""
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_edges_from(edges(ranks, stream))
    try:
        return list(nx.find_cycle(graph))
    except nx.NetworkXNoCycle:
        return []


def edges(ranks: Sequence[Any], stream: Any) -> Iterator[tuple[Any, Any]]:
    """What has to happen before what: a call of the host, a line's opening, a message's move."""
    opened: set[Any] = set()
    for rank, (begun, host) in enumerate(ranks):
        number: dict[tuple[str, Line], int] = defaultdict(int)
        moves: list[Any] = []
        last: dict[Any, Any] = {}
        waited: Any = None
        before: Any = None
        for what, index in host:
            if what == "wait":
                now = ("waited", rank, index, len(moves))
                yield moves[index], now
                if waited is not None:
                    yield waited, now
                waited = now
                continue
            kind, line = begun[index]
            move, call = ("move", line, number[kind, line]), ("call", rank, index)
            number[kind, line] += 1
            moves.append(move)
            if before is not None:
                yield before, call
            before, on = call, (rank, stream(line))
            if on not in opened:  # both ends make it together, and their hosts wait for that
                opened.add(on)
                before = ("open", stream(line))
                yield call, before
            yield call, move
            if waited is not None:
                yield waited, move
            if on in last:
                yield last[on], move
            last[on] = move
