"""Fused: chains of element-wise operators (passes/chains.py), each compiled as one by Inductor.

Chains that are alike, as those of a model's layers, are one callable, compiled when it first meets tensors of
a form. Every operator's result is rounded to its dtype as it is outside a chain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from plait.passes.chains import REDUCTIONS, chains

Compile = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
ROUNDED = {"emulate_precision_casts": True}  # of Inductor: as torch rounds outside of it


def fuse(graph: fx.Graph, compiler: Compile | None = None, training: bool = False) -> dict[str, nn.Module]:
    """Rewrite `graph`, a program of fixed sizes; the modules that it calls now."""
    made: dict[str, nn.Module] = {}
    known: dict[str, str] = {}  # how a chain reads -> its module's name
    for chain in chains(graph, REDUCTIONS if training else ()):
        text = chain.text()
        if text not in known:
            known[text] = f"fused_{len(known)}"
            made[known[text]] = Fused(chain.module(), compiler or inductor)
        chain.replace(known[text])
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
        return self.compiled[form](*inputs)

    def _compile(self, inputs: list[Tensor]) -> Callable[..., Any]:
        try:
            return self.compiler(self.chain, inputs)
        except Exception as error:  # whatever a compiler meets, the chain itself is right
            first = str(error).splitlines()[:1]
            warnings.warn(f"a chain of element-wise operators stays unfused: {first}", stacklevel=2)
            return self.chain


def inductor(chain: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    import torch._functorch.config
    import torch._inductor

    like = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    with torch._functorch.config.patch(donated_buffer=False):  # a backward may be asked for twice
        return torch._inductor.compile(chain, like, options=ROUNDED)  # type: ignore[no-any-return, arg-type]
