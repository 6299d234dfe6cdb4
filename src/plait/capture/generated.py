"""Python of graphs, generated when it is first asked for: an export makes about twenty graphs on its way, and runs
most of them by their nodes. Generating takes a seventh of a small capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen


@contextlib.contextmanager
def generated_when_read() -> Iterator[None]:
    def later(self: GraphModule) -> None:
        codegen = self.graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):  # is read as it is
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        type(self).forward = pending  # type: ignore[method-assign, assignment]

    now = GraphModule.recompile
    pending = _Pending(now)
    GraphModule.recompile = later  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GraphModule.recompile = now  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Pending:
    """`forward` of a class, every module of which has one of its own."""

    generate: Any

    def __get__(self, module: GraphModule | None, cls: type) -> Any:
        if module is None:
            return self
        self.generate(module)
        return module.forward
