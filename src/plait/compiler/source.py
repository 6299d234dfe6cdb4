"""Source: where programs come from, the user's model and how it was asked for."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.capture import capture
from plait.capture.state import Ambient, State, around, posed
from plait.compiler.alike import captured
from plait.errors import CaptureError
from plait.program import Program
from plait.runtime.agree import Agreement
from plait.runtime.follow import Follower
from plait.runtime.holdings import Values


@dataclass(frozen=True)
class Source:
    """Where programs come from: the user's model and how it was asked for."""

    model: nn.Module
    dtype: torch.dtype | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    dynamic: Mapping[str, Any] | None
    training: bool
    device: torch.device

    def first(self, agreement: Agreement) -> tuple[Program, Follower]:
        """The same program on all ranks, and what follows the model's state from now on."""
        ambient = replace(Ambient.now(self.training, self.device), grad=self.training)
        with agreement.step("compile"):
            program = self.capture(ambient)
            follower = Follower.of(self.model, program, ambient, self.device)
        agreement.same("compile", captured(program, self.args, self.kwargs))
        folded = follower.state.facts.contents
        agreement.same("compile", [f"{name}: {folded[name]}" for name in sorted(folded)])
        return program, follower

    def capture(self, ambient: Ambient) -> Program:
        """The model as it is now."""
        model = _retyped(self.model, self.dtype)
        with around(model, ambient, self.device):
            return capture(
                model,
                self.args,
                self.kwargs,
                dynamic=self.dynamic,
                training=self.training and ambient.grad,
            )

    def capture_again(self, state: State, values: Values) -> Program:
        """In another state and with the buffers of the compiled module; the model keeps its own.

        Of a call that no program serves with other sizes as well, a program for its sizes alone.
        """
        with posed(self.model, state.facts.flags, values):
            try:
                return self.capture(state.ambient)
            except CaptureError:
                if not self.dynamic:
                    raise
                return replace(self, dynamic=None).capture(state.ambient)


def _retyped(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model as capture should see it where parameters are to have another dtype.

    A copy whose floating-point parameters are of `dtype` and hold no values; buffers keep theirs.
    """
    if dtype is None:
        return model
    memo: dict[int, Any] = {}
    for p in model.parameters():
        if p.is_floating_point() and p.dtype != dtype:
            empty = torch.empty_like(p, dtype=dtype)  # its pages are never touched
            memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo) if memo else model


def device_of(
    model: nn.Module, device: torch.device | str | None, group: dist.ProcessGroup | None
) -> torch.device:
    """Where the program runs: as asked, where the model is, or the rank's own device."""
    if device is not None:
        return torch.device(device)
    found = {p.device for p in model.parameters()} or {torch.device("cpu")}
    where = next(iter(found))
    if where.type != "meta":
        return where
    if group is not None and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
