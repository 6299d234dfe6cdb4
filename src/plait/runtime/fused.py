"""Fused: chains of element-wise operators (passes/chains.py), each compiled as one by Inductor.

Chains that are alike, as those of a model's layers, are one callable, compiled when it first meets tensors of
a form. Every operator's result is rounded to its dtype as it is outside a chain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from plait.passes.chains import REDUCTIONS, chains

Compile = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
ROUNDED = {"emulate_precision_casts": True}  # of Inductor: as torch rounds outside of it


def fuse(
    graph: fx.Graph, compiler: Compile | None = None, rows: bool = False, known: dict[str, Fused] | None = None
) -> dict[str, nn.Module]:
    """Rewrite `graph`, a program of fixed sizes; the modules that it calls now, and that its own module has.

    `rows`: what reduces rows, as norms do, may stand in a chain. `known`: the chains of other graphs, by how
    they read.
    """
    made: dict[str, nn.Module] = {}
    known = {} if known is None else known
    for chain in chains(graph, REDUCTIONS if rows else ()):
        text = chain.text()
        if text not in known:
            known[text] = Fused(chain.module(), compiler or inductor)
        name = f"fused_{[*known].index(text)}"
        made[name] = known[text]
        if graph.owning_module is not None:
            graph.owning_module.add_module(name, known[text])
        chain.replace(name)
    return made


class Fused(nn.Module):
    """One chain; `forward` returns a tuple. What Inductor cannot compile runs as it is, and says so."""

    def __init__(self, chain: fx.GraphModule, compiler: Compile) -> None:
        super().__init__()
        self.chain, self.compiler = chain, compiler
        self.compiled: dict[Any, Callable[..., Any]] = {}  # by shapes, strides, dtypes and what has gradients

    def forward(self, *inputs: Tensor) -> Any:
        grad = torch.is_grad_enabled()
        form = tuple((x.shape, x.stride(), x.dtype, grad and x.requires_grad) for x in inputs)
        if form not in self.compiled:
            self.compiled[form] = self._compile(list(inputs))
        if any(learns for *_, learns in form):
            return _Chain.apply(self.compiled[form], *inputs)  # type: ignore[no-untyped-call]
        return self.compiled[form](*inputs)

    def _compile(self, inputs: list[Tensor]) -> Callable[..., Any]:
        try:
            return self.compiler(self.chain, inputs)
        except Exception as error:  # whatever a compiler meets, the chain itself is right
            first = str(error).splitlines()[:1]
            warnings.warn(f"a chain of element-wise operators stays unfused: {first}", stacklevel=2)
            return self.chain


def inductor(chain: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    import torch._inductor  # seconds

    like = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    with keeping():
        return torch._inductor.compile(chain, like, options=ROUNDED)  # type: ignore[no-any-return, arg-type]


def keeping() -> AbstractContextManager[None]:
    """Within it AOT autograd compiles, and runs, ways back that overwrite nothing; of this thread."""
    import torch._functorch.config

    return torch._functorch.config.patch(donated_buffer=False)  # type: ignore[no-any-return]


class _Chain(torch.autograd.Function):
    """A compiled chain whose way back may be asked for twice."""

    @staticmethod
    def forward(ctx: Any, compiled: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0))  # torch says what is wrong with a second way back
        ctx.own = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad():
            ctx.outs = tuple(compiled(*ctx.own))
        outs = tuple(x.detach() for x in ctx.outs)
        ctx.mark_non_differentiable(*(x for x, own in zip(outs, ctx.outs, strict=True) if not own.requires_grad))
        return outs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        pairs = [(o, g) for o, g in zip(ctx.outs, grads, strict=True) if g is not None]
        asked = [x for x in ctx.own if x.requires_grad]
        outs, given = [o for o, _ in pairs], [g for _, g in pairs]
        with keeping():
            found = torch.autograd.grad(outs, asked, given, retain_graph=kept, allow_unused=True) if pairs else ()
        if not kept:
            del ctx.outs
        back = iter(found or [None] * len(asked))
        return None, *(next(back) if x.requires_grad else None for x in ctx.own)
