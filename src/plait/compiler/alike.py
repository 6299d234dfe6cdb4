"""What the ranks' users pass to a compile: the same on every rank, or each difference is said by name."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
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


def values(agreement: Agreement, model: nn.Module) -> None:
    """Warns where the ranks' models have other values, of which each rank would take its rows: that is no model of
    anybody's. No error: a checkpoint may be loaded into it yet."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    told = agreement.tell("weights", {name: _begin(x) for name, x in named})
    names = [name for name in told[0] if any(other.get(name) != told[0][name] for other in told)]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        warnings.warn(
            f"the ranks' models have other values, and each takes its part of its own: {', '.join(names[:_SHOWN])}"
            f"{more}. Call torch.manual_seed alike on every rank before the model is made, give weights=, or load a "
            "checkpoint into what compile returns",
            stacklevel=3,
        )


_SHOWN = 4  # names


def _begin(x: torch.Tensor) -> str:
    """The first values, as text."""
    plain = type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided
    if not plain or x.is_meta or not x.numel():
        return ""
    return str(x.detach()[(0,) * (x.dim() - 1)].reshape(-1)[:4].tolist())


def _spell(value: Any) -> str:
    if isinstance(value, Cluster):
        return value.name
    if isinstance(value, Plan):
        return f"the plan {value.digest}"
    return repr(sorted(value.items()) if isinstance(value, Mapping) else value)
