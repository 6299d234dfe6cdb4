"""Runs without values in which dynamic sizes stay symbols."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dispatch.python import enable_python_dispatcher


@contextlib.contextmanager
def symbols() -> Iterator[None]:
    """Composites run in Python, as in an export: in C++ some read a size as a number, which fixes it."""
    with enable_python_dispatcher(), minima():
        yield


@contextlib.contextmanager
def minima() -> Iterator[None]:
    """The least of 4 s and 8 s is 4 s, for a size s. torch 2.11 does not see it, and takes its own question whether
    it is for a limit of s."""
    import sympy  # slow to import, and not of every process
    from torch.utils._sympy.functions import Min

    s = sympy.Symbol("s", positive=True, integer=True)
    if Min(4 * s, 8 * s) == 4 * s:
        yield
        return
    made = Min.__new__

    def least(cls: Any, *terms: Any, **assumptions: Any) -> Any:
        kept: list[Any] = []
        for term in map(sympy.sympify, terms):
            if not any((term - other).is_nonnegative for other in kept):
                kept = [other for other in kept if not (other - term).is_nonnegative] + [term]
        return made(cls, *kept, **assumptions)

    Min.__new__ = least  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Min.__new__
