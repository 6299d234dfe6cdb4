"""Matmuls that share an input: which are packed, that they then run as one, and that nothing else changes.

Every model is planned so that whatever can be packed is, cut into pretend ranks whose weights lie as a
compiled module lays them, and run forward and backward against the unsharded module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.capture import capture
from plait.cluster import Cluster
from plait.passes import ops
from plait.passes.partition import Local
from plait.plan import packing, planner
from plait.plan.plan import Plan
from plait.plan.planner import Planned
from plait.program import Program
from plait.report.explain import explain
from plait.runtime.checkpoint import Spec
from plait.runtime.weights import rooms
from tests import pretend, zoo
from tests.cases import Setup
from tests.compare import demand, discrepancies, plain, within
from tests.gloo.prove import free

aten = torch.ops.aten
NARROW = ("mixtral", "qwen3moe")  # grouped matmuls know no float64
PACKED = {  # matmuls that share an input, by how many, in a layer of each kind
    "llama": {3: 2, 2: 2},
    "gpt2": {},  # packed in the model, and its weights lie the other way
    "bert": {3: 2},
    "phi3": {},
}


def packed(program: Program, n: int, overlap: str | int = "off") -> Planned:
    """Whatever can be packed is, and whatever can be split is."""
    with patch.object(packing.Clock, "together", lambda *_: 0.0):
        return planner.make(program, planner.Options(n, free(n), overlap=overlap))


def laid(local: Local, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of one rank as a compiled module lays them."""
    specs = {name: Spec(tuple(x.shape), x.dtype) for name, x in parts.items()}
    out = dict(parts)
    for name, room in rooms(specs, local.runs).items():
        with torch.no_grad():
            room.copy_(parts[name])
        out[name] = nn.Parameter(room, requires_grad=parts[name].requires_grad)
    return out


def run(planned: Planned, setup: Setup, n: int, train: bool) -> list[Any]:
    """Of every rank; packed matmuls must find their weights in one run."""
    ranks = tuple(planned.local(rank) for rank in range(n))
    solution: Any = SimpleNamespace(strategies=planned.strategies)
    divided = pretend.Divided(planned.program, planned.description, solution, planned.grads, ranks)
    scattered = pretend.scatter

    def scatter(locals_: Sequence[Local], tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        return [laid(*pair) for pair in zip(locals_, scattered(locals_, tensors), strict=True)]

    def joined(parts: Sequence[Tensor]) -> Tensor | None:
        found = real(parts)
        assert found is not None or not parts, "weights of one pack lie apart"
        return found

    real = ops.joined
    with patch.object(pretend, "scatter", scatter), patch.object(ops, "joined", joined):
        return pretend.run(divided, setup, train)


def merged(local: Local) -> Iterator[int]:
    for node in local.graph.nodes:
        if node.target is ops.packed_linear:
            yield len(node.args[1])


GRID = [
    pytest.param(
        name, n, train, id=f"{name}-{n}-{'gradients' if train else 'outputs'}",
        marks=() if (n, train) == ((2, True), (3, False), (3, True), (2, False))[i % 4] else pytest.mark.full,
    )
    for i, name in enumerate(zoo.NAMES)
    for n in (2, 3)
    for train in (False, True)
]  # fmt: skip


@pytest.mark.parametrize(("name", "n", "train"), GRID)
def test_models(name: str, n: int, train: bool) -> None:
    model, args, kwargs = zoo.build(name)
    setup = Setup(model, args, kwargs).to(torch.float32 if name in NARROW else torch.float64)
    planned = packed(pretend.trace(setup, train), n)
    found = list(merged(planned.local(0)))
    assert Counter(found) == Counter(map(len, planned.plan.packed))
    if name in PACKED:
        assert Counter(found) == PACKED[name], planned.plan.packed
    want = plain(setup, train)
    for rank, got in enumerate(run(planned, setup, n, train)):
        demand(discrepancies(got, want, within(dtype=torch.float32)), about=f"rank {rank} of {n}")


# -- which ---------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Matmuls of one value: with and without a bias, one weight for two values, and one of two inputs."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 7), nn.Linear(width, 5)
        self.c, self.d = nn.Linear(width, 3, bias=False), nn.Linear(width, 9, bias=False)
        self.tied = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tied(self.tied(x)) + x
        parts = [self.a(x), self.c(x), self.b(x), self.d(x), self.a(y), self.b(y), self.c(y)]
        return torch.cat([p.relu() for p in parts], -1)


def test_what_is_packed() -> None:
    model = Shared().double()
    setup = Setup(model, (torch.randn(3, 12, dtype=torch.float64),), {})
    planned = packed(pretend.trace(setup, True), 1)
    # x is read by tied, c and d, y by c alone: the weights of a pack are multiplied together or not at all
    assert planned.plan.packed == (("tied.weight", "c.weight", "d.weight"), ("a.weight", "b.weight"))
    assert sorted(merged(planned.local(0))) == [2, 2, 3]
    assert planned.local(0).runs[0] == ("tied.weight", "c.weight", "d.weight")
    (got,) = run(planned, setup, 1, True)
    demand(discrepancies(got, plain(setup)))


def test_a_plan_keeps_its_packs() -> None:
    model, args, kwargs = zoo.build("llama")
    program = capture(model, args, kwargs)
    planned = packed(program, 2)
    read = Plan.from_json(planned.plan.to_json())
    again = planner.replay(program, read, planner.Options(2, free(2)))
    assert str(again.local(1).graph) == str(planned.local(1).graph)
    assert "one matmul: model.layers.0.mlp.gate_proj.weight + model.layers.0.mlp.up_proj.weight" in explain(read)
    unpacked = planner.replay(program, replace(read, packed=()), planner.Options(2, free(2)))
    assert not list(merged(unpacked.local(0)))


def test_a_weight_that_was_moved_is_multiplied_apart() -> None:
    x, whole = torch.randn(2, 3, 8), torch.randn(10, 8)
    weights = list(whole.split([6, 4]))
    together = ops.packed_linear(x, weights)
    assert together[0]._base is together[1]._base is not None
    moved = ops.packed_linear(x, [weights[0], weights[1].clone()])
    assert moved[1].is_contiguous()
    for got, want in zip(moved, together, strict=True):
        torch.testing.assert_close(got, want)
    assert ops.joined([weights[1], weights[0]]) is None
    assert ops.joined([weights[0][:, :4], weights[1][:, :4]]) is None


@pytest.mark.parametrize("reached", [[0], [1], [0, 1]])
def test_what_no_loss_reaches_has_no_gradient(reached: list[int]) -> None:
    sizes = {"a": Spec((3, 4), torch.float64), "b": Spec((2, 4), torch.float64)}
    room = rooms(sizes, [("a", "b")])
    weights = [nn.Parameter(room[n].normal_()) for n in "ab"]
    apart = [nn.Parameter(w.detach().clone()) for w in weights]
    shifts = [nn.Parameter(s) for s in torch.randn(5, dtype=torch.float64).split([3, 2])]
    alone = [nn.Parameter(s.detach().clone()) for s in shifts]
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    ways = [x.clone().requires_grad_() for _ in range(2)]
    together = ops.packed_linear(ways[0], weights, shifts)
    single = [nn.functional.linear(ways[1], w, b) for w, b in zip(apart, alone, strict=True)]
    for out in (together, single):
        torch.stack([out[i].cos().sum() for i in reached]).sum().backward()
    pairs = [*zip(weights, apart, strict=True), *zip(shifts, alone, strict=True), ways]
    for got, want in pairs:
        assert (got.grad is None) == (want.grad is None)
        if got.grad is not None:
            torch.testing.assert_close(got.grad, want.grad)


class Matmuls(TorchDispatchMode):
    """How many run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_gradients_of_one_side_alone_are_one_matmul() -> None:
    """A stage's backward may be in two halves, and neither does the other's work."""
    room = rooms({"a": Spec((3, 4), torch.float32), "b": Spec((2, 4), torch.float32)}, [("a", "b")])
    weights = [nn.Parameter(room[n].normal_()) for n in "ab"]
    x = torch.randn(5, 4, requires_grad=True)
    out = sum(y.sum() for y in ops.packed_linear(x, weights))
    for asked in ([x], weights):
        with Matmuls() as counted:
            torch.autograd.grad(out, asked, retain_graph=True)  # type: ignore[arg-type]
        assert counted.count == 1


def test_a_change_between_the_ways_is_noticed() -> None:
    room = rooms({"a": Spec((3, 4), torch.float32), "b": Spec((2, 4), torch.float32)}, [("a", "b")])
    a, b = (nn.Parameter(room[n].normal_()) for n in "ab")
    out = ops.packed_linear(torch.randn(5, 4, requires_grad=True), [a, b])
    with torch.no_grad():
        b.zero_()
    with pytest.raises(RuntimeError, match="modified (by an )?in-?place"):
        sum(x.sum() for x in out).backward()  # type: ignore[union-attr]


def decoder(width: int, inner: int, rows: int, dtype: torch.dtype) -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=inner, num_hidden_layers=1,
        num_attention_heads=width // 128, num_key_value_heads=width // 1024, head_dim=128,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype).eval()
    return capture(model, (torch.zeros(1, rows, dtype=torch.int64),), {"use_cache": False})


def test_packs_are_decided_by_price() -> None:
    """By the last waves of tiles on 132 units; a core has no waves, and gains where reading x is much of the work."""
    gpus = Cluster.of("dgx-h200").subset(range(2))
    many = planner.make(decoder(8192, 7168, 8192, torch.bfloat16), planner.Options(2, gpus)).plan
    assert sorted(map(len, many.packed)) == [2, 3]
    full = planner.make(decoder(8192, 7168, 16384, torch.bfloat16), planner.Options(2, gpus)).plan
    assert not full.packed, "waves are full without"
    cores = planner.Options(2, Cluster.of("loopback").subset(range(2)))
    on_cores = planner.make(decoder(2048, 2048, 256, torch.float32), cores).plan
    assert not any("gate" in name or "q_proj" in name for pack in on_cores.packed for name in pack)


def test_one_gather_feeds_one_matmul() -> None:
    from plait.passes.rings import find

    wide = decoder(8192, 7168, 8192, torch.bfloat16)
    with patch.object(packing.Clock, "together", lambda *_: 0.0):
        planned = planner.make(wide, planner.Options(2, Cluster.of("dgx-h200").subset(range(2))))
    (ring,) = find(wide, planned.local(0)).rings.values()
    assert [len(e.matmuls) for e in ring if e.kind == "gather"] == [1, 1, 1]
    assert all(o.form.startswith("ring") for o in planned.plan.overlaps)
