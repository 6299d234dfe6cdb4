"""Gradients of weights apart from those of data: together they are autograd's, each computed once."""

from __future__ import annotations

from operator import getitem

import torch
from torch import Tensor, fx

from plait.passes import late

aten = torch.ops.aten


def stage() -> fx.Graph:
    """Two products, one by a transposed weight, one weight used twice, a norm of several results; what is
    made of weights alone leaves the stage, too."""
    graph = fx.Graph()
    w, v, b, x = (graph.placeholder(n) for n in ("w", "v", "b", "x"))
    call = graph.call_function
    turned = call(aten.transpose.int, (w, 0, 1))
    both = call(aten.mul.Tensor, (turned, v))
    y = call(aten.mm.default, (x, both))
    y = call(aten.native_layer_norm.default, (y, [3], b, None, 1e-5))
    y = call(getitem, (y, 0))
    z = call(aten.cat.default, ([y, x, v],))
    graph.output((call(aten.mm.default, (z, v)), y, call(aten.exp.default, (both,)), w))
    return graph


def feed() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = {"w": (3, 3), "v": (3, 3), "b": (3,), "x": (5, 3)}
    return {
        n: torch.randn(s, generator=made, dtype=torch.float64).requires_grad_()
        for n, s in shapes.items()
    }


def loss(outs: tuple[Tensor, ...]) -> Tensor:
    return outs[0].sin().sum() + outs[1].pow(3).sum() + outs[2].cos().sum()


def test_both_halves_are_the_whole() -> None:
    plain, halves = feed(), feed()
    loss(fx.GraphModule({}, stage())(*plain.values())).backward()
    graph, queue = stage(), late.Queue()
    modules = late.defer(graph, {"w", "v", "b"})
    outs = fx.GraphModule(modules, graph)(*halves.values(), queue)
    loss(outs).backward()
    torch.testing.assert_close(halves["x"].grad, plain["x"].grad)
    assert [halves[n].grad for n in "wvb"] == [None] * 3, "the weights wait"
    queue.pay()
    for n in "wvb":
        torch.testing.assert_close(halves[n].grad, plain[n].grad)
    assert not queue.owed


def test_frozen_weights_and_no_gradients() -> None:
    plain, halves = feed(), feed()
    for values in (plain, halves):
        values["v"].requires_grad_(False)
    loss(fx.GraphModule({}, stage())(*plain.values())).backward()
    graph, queue = stage(), late.Queue()
    module = fx.GraphModule(late.defer(graph, {"w", "b"}), graph)
    with torch.no_grad():
        module(*halves.values(), queue)
    assert not queue.owed
    loss(module(*halves.values(), queue)).backward()
    queue.pay()
    for n in "wbx":
        torch.testing.assert_close(halves[n].grad, plain[n].grad)
    assert halves["v"].grad is None


def test_a_weight_alone_reaches_the_loss() -> None:
    """The first stage: nothing that came in has a gradient."""
    graph = fx.Graph()
    w, ids = graph.placeholder("w"), graph.placeholder("ids")
    graph.output((graph.call_function(aten.embedding.default, (w, ids)),))
    queue, weight = late.Queue(), torch.randn(4, 2, requires_grad=True)
    (out,) = fx.GraphModule(late.defer(graph, {"w"}), graph)(weight, torch.tensor([1, 3, 1]), queue)
    out.sum().backward()
    assert weight.grad is None
    queue.pay()
    assert weight.grad is not None
    assert weight.grad.sum(1).tolist() == [0.0, 4.0, 0.0, 2.0]
