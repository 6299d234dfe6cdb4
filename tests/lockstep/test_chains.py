"""Element-wise operators in chains: the same values, fewer calls, and the order of everything else."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from plait.capture import capture
from plait.cluster import Cluster
from plait.passes.chains import Chain, chains, computes, joins
from plait.passes.grouped import group
from plait.plan import planner
from plait.runtime.fused import Fused, fuse

aten = torch.ops.aten


class Layer(nn.Module):
    """Rotated heads, grouped attention, a gated feed-forward."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 48), nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotated(self.q(x).view(1, -1, 4, 8).transpose(1, 2), cos, sin)
        k, v = self.kv(x).view(1, -1, 2, 2, 8).transpose(1, 3).unbind(2)
        k = rotated(k, cos, sin)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


@pytest.fixture
def local() -> tuple[fx.Graph, list[Tensor]]:
    """One rank's graph of the whole model, and what feeds it."""
    model = Model().eval()
    xs = [torch.randn(1, 6, 32), torch.randn(6, 8), torch.randn(6, 8)]
    captured = capture(model, tuple(xs), {}, dynamic=None, training=False)
    planned = planner.make(captured, planner.Options(1, Cluster.of("dgx-h200").subset([0])))
    local = planned.local(0)
    state = dict(model.named_parameters())
    feed = [state[share.weight.name].detach() for share in local.shares]
    return local.graph, [*feed, *xs]


def run(graph: fx.Graph, modules: Any, feed: list[Tensor]) -> Tensor:
    graph.lint()
    with torch.no_grad():
        return fx.GraphModule(modules, graph)(*feed)[0]  # type: ignore[no-any-return]


def as_it_is(chain: fx.GraphModule, inputs: list[Tensor]) -> Any:
    return chain


def test_layers_share_chains_and_values_stay(local: tuple[fx.Graph, list[Tensor]]) -> None:
    graph, feed = local
    want = run(copy.deepcopy(graph), {}, feed)
    calls = [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    heavy = [n.name for n in calls if not joins(n)]
    group(graph)
    made = fuse(graph, as_it_is)
    assert torch.equal(run(graph, made, feed), want)
    calls = [n for n in graph.nodes if n.op == "call_module"]
    assert (len(calls), len(made)) == (6, 2), "two chains a layer, the same in every layer"
    assert all(len(m.compiled) == 1 for m in made.values())  # type: ignore[union-attr, arg-type]
    assert [n.name for n in graph.nodes if n.name in heavy] == heavy
    left = [n for n in graph.nodes if computes(n)]
    assert {n.target for n in left} == {aten.add.Tensor}, "the additions stand alone between matmuls"


class Normed(nn.Module):
    """A norm written out, in two precisions, and one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.double()
        wide = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        y: Tensor = self.norm(self.inner(self.scale * wide.float()) + x) * 2
        return y


def test_norms_join_chains_in_training() -> None:
    model, x = Normed(), torch.randn(3, 8)
    captured = capture(model, (x,), {}, dynamic=None, training=True)
    planned = planner.make(captured, planner.Options(1, Cluster.of("dgx-h200").subset([0])))
    seen: list[list[bool]] = []

    def note(chain: fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append([x.requires_grad for x in inputs])
        return chain

    def gradients(graph: fx.Graph, modules: Any) -> list[Tensor]:
        state = dict(model.named_parameters())
        feed = [state[share.weight.name] for share in planned.local(0).shares]
        (out,) = fx.GraphModule(modules, graph)(*feed, x)
        return list(torch.autograd.grad(out.square().sum(), feed))

    want = gradients(planned.local(0).graph, {})
    graph = planned.local(0).graph
    made = fuse(graph, note, rows=True)
    left = [n.target for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert left == [aten.linear.default] and len(made) == 2
    for have, wanted in zip(gradients(graph, made), want, strict=True):
        assert torch.equal(have, wanted)
    run(graph, made, [state.detach() for state in (*model.parameters(), x)])
    assert len(seen) == 4 and not any(map(any, seen[2:])), "with gradients and without are compiled apart"


def test_the_way_back_of_a_chain_may_be_asked_for_twice() -> None:
    model, x = Normed(), torch.randn(3, 8)
    captured = capture(model, (x,), {}, dynamic=None, training=True)
    planned = planner.make(captured, planner.Options(1, Cluster.of("dgx-h200").subset([0])))
    graph = planned.local(0).graph
    made = fuse(graph, as_it_is, rows=True)
    state = dict(model.named_parameters())
    feed = [state[share.weight.name] for share in planned.local(0).shares]
    (out,) = fx.GraphModule(dict(made), graph)(*feed, x)
    loss = out.square().sum()
    first = torch.autograd.grad(loss, feed, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, feed)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, feed)


def test_micro_batches_share_chains() -> None:
    """A chain of two graphs is compiled once, and gradients keep their bits."""
    torch.manual_seed(0)
    feed = [torch.randn(size).requires_grad_() for size in ((3, 8), (8,), (8, 8))]

    def stage() -> fx.GraphModule:
        graph = fx.Graph()
        x, scale, weight = (graph.placeholder(name) for name in ("x", "scale", "weight"))
        for _ in range(2):
            x = graph.call_function(aten.tanh.default, (graph.call_function(aten.mul.Tensor, (x, scale)),))
            x = graph.call_function(aten.mm.default, (x, weight))
        graph.output((x,))
        return fx.GraphModule({}, graph)

    def compiler(chain: fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled.append(chain.code)
        return chain

    want = torch.autograd.grad(stage()(*feed)[0].square().sum(), feed)
    compiled: list[str] = []
    known: dict[str, Fused] = {}
    for module in (stage(), stage()):
        fuse(module.graph, compiler, known=known)
        module.recompile()
        got = torch.autograd.grad(module(*feed)[0].square().sum(), feed)
        assert all(map(torch.equal, got, want))
    assert len(compiled) == len(known) == 1


def test_groups_are_read_once(local: tuple[fx.Graph, list[Tensor]]) -> None:
    graph, feed = local
    want = run(copy.deepcopy(graph), {}, feed)
    group(graph)
    attentions = [n for n in graph.nodes if "attention" in n.name]
    assert attentions and all(n.kwargs["enable_gqa"] for n in attentions)
    graph.eliminate_dead_code()
    assert not [n for n in graph.nodes if n.target is aten.repeat_interleave.self_int]
    torch.testing.assert_close(run(graph, {}, feed), want)


def test_heads_repeated_apart_stay_repeated() -> None:
    graph = fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    keys = graph.call_function(aten.repeat_interleave.self_int, (k, 2, 1))
    values = graph.call_function(aten.repeat_interleave.self_int, (v, 4, 1))
    graph.output((graph.call_function(aten.scaled_dot_product_attention.default, (q, keys, values)),))
    group(graph)
    feed = [torch.randn(1, n, 3, 8) for n in (4, 2, 1)]
    assert run(graph, {}, feed).shape == (1, 4, 3, 8)


def test_what_a_compiler_refuses_runs_as_it_is(local: tuple[fx.Graph, list[Tensor]]) -> None:
    graph, feed = local

    def refuse(chain: fx.GraphModule, inputs: list[Tensor]) -> Any:
        raise RuntimeError("no such thing")

    want = run(copy.deepcopy(graph), {}, feed)
    made = fuse(graph, refuse)
    with pytest.warns(UserWarning, match="stays unfused.*no such thing"):
        assert torch.equal(run(graph, made, feed), want)


def test_a_form_is_compiled_once() -> None:
    seen: list[Any] = []

    def count(chain: fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append([x.stride() for x in inputs])
        return chain

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.neg.default, (graph.call_function(aten.exp.default, (x,)),)),))
    (chain,) = chains(graph)
    assert isinstance(chain, Chain)
    fused = Fused(chain.module(), count)
    for x_ in (torch.randn(4, 6), torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(4, 6).double()):
        assert torch.equal(fused(x_)[0], -x_.exp())
    assert len(seen) == 3


def test_random_operators_and_factories_join_no_chain() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    noise = graph.call_function(aten.rand_like.default, (x,))
    ones = graph.call_function(aten.full.default, ([2], 1.0))
    y = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.add.Tensor, (x, noise)), ones))
    graph.output((y,))
    assert not joins(noise) and not joins(ones)
    (chain,) = chains(graph)
    assert [n.target for n in chain.nodes] == [aten.add.Tensor, aten.mul.Tensor]
    assert set(chain.inputs) == {x, noise, ones}
