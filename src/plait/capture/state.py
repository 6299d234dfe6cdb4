"""State: everything that a program was captured under, and a model put into a state for a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from plait.capture.preserve import on_meta
from plait.capture.snapshot import Change, Facts
from plait.errors import CaptureError


@dataclass(frozen=True)
class Ambient:
    """What surrounds a call: whether gradients are wanted, and the dtype of autocast."""

    grad: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, training: bool, device: torch.device) -> Ambient:
        """A program that was not compiled for training has no gradients, whoever calls it."""
        kind = device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(training and torch.is_grad_enabled(), dtype)

    def __str__(self) -> str:
        return f"gradients {'on' if self.grad else 'off'}, autocast {self.autocast or 'off'}"


@dataclass(frozen=True)
class State:
    facts: Facts
    ambient: Ambient

    def changes(self, new: State) -> dict[str, Change]:
        found = self.facts.changes(new.facts)
        if self.ambient != new.ambient:
            found["around the call"] = str(new.ambient), str(self.ambient)
        return found

    def with_flags(self, flags: Mapping[str, bool]) -> State:
        return replace(self, facts=replace(self.facts, flags={**self.facts.flags, **flags}))


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """What is made here outlives the inference mode in which it is asked for."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


@contextlib.contextmanager
def posed(
    model: nn.Module, flags: Mapping[str, bool], values: Mapping[str, Tensor] | None = None
) -> Iterator[None]:
    """The model with these flags and values of buffers; put back afterwards."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    training = {m: m.training for m in modules.values()}
    grads = {p: p.requires_grad for p in parameters.values()}
    tables = [(m._buffers, dict(m._buffers)) for m in modules.values()]
    try:
        for name, module in modules.items():
            module.training = flags.get(f"{name}.training".lstrip("."), module.training)
        for name, parameter in parameters.items():
            parameter.requires_grad_(flags.get(f"{name}.requires_grad", parameter.requires_grad))
        for name, value in (values or {}).items():
            _replace(modules, name, value.detach())
        yield
    finally:
        for module, flag in training.items():
            module.training = flag
        for parameter, flag in grads.items():
            parameter.requires_grad_(flag)
        for table, held in tables:
            table.update(held)


def _replace(modules: Mapping[str, nn.Module], name: str, value: Tensor) -> None:
    """Where the model still has such a buffer; what it has instead is refused after the capture."""
    path, _, last = name.rpartition(".")
    table = modules[path]._buffers if path in modules else {}
    before = table.get(last)
    if before is not None and before.shape == value.shape:
        table[last] = value.to(before.device if not before.is_meta else value.device)


@contextlib.contextmanager
def around(model: nn.Module, ambient: Ambient, device: torch.device) -> Iterator[None]:
    """Autocast as on `device`, where the model stands while it is captured."""
    here = next((t.device.type for t in (*model.parameters(), *model.buffers())), device.type)
    if ambient.autocast is None:
        with torch.autocast(here if here != "meta" else device.type, enabled=False):
            yield
        return
    if on_meta(model):
        raise CaptureError(
            "autocast casts nothing in a model on the meta device: compile outside of it, with "
            f"dtype={ambient.autocast} for such weights"
        )
    with torch.autocast(here, dtype=ambient.autocast):
        yield
