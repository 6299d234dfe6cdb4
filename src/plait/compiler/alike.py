"""What the ranks' users pass to a compile: the same on every rank, or each difference is said by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from plait.capture.call import spell
from plait.cluster import Cluster
from plait.plan.plan import Plan
from plait.program import Program
from plait.runtime.agree import Agreement, facts
from plait.runtime.processes import members


@contextlib.contextmanager
def told(group: Any) -> Iterator[None]:
    """A mistake that is found before the ranks agree on anything is told to those that wait to."""
    try:
        yield
    except Exception:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise
        with Agreement(members(group)[0], torch.device("cpu")).step("compile"):
            raise


def keywords(agreement: Agreement, asked: Mapping[str, Any]) -> None:
    """Of `plait.compile`; but for what may be a rank's own: its device, and where its files lie."""
    own = ("model", "args", "kwargs", "group", "device", "weights")
    with agreement.step("compile"):  # of which another rank may be told a mistake
        said = [f"{name}={_spell(value)}" for name, value in asked.items() if name not in own]
    agreement.same("compile", said)


def captured(program: Program, args: Any, kwargs: Any) -> list[str]:
    """What a program was made of, by the names of the user's model and call."""
    leaves, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs or {})))
    return [
        *(f"{spell(path)}: {facts(x)}" for path, x in leaves),
        *(f"{w.name}: {w.shape} {w.dtype}{'' if w.requires_grad else ', without gradient'}" for w in program.weights),
    ]


def _spell(value: Any) -> str:
    if isinstance(value, Cluster):
        return value.name
    if isinstance(value, Plan):
        return f"the plan {value.digest}"
    return repr(sorted(value.items()) if isinstance(value, Mapping) else value)
