"""Mirror: the names of the model's modules and weights, in the compiled module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from plait.program import Weight


class Part(nn.Module):
    """In the place of a module of the model. Only the whole is loaded: rows are the whole's affair."""

    def _load_from_state_dict(self, *args: Any) -> None:
        pass


def mirror(own: nn.Module, model: nn.Module, made: dict[nn.Module, nn.Module]) -> None:
    """A module in the place of each of the model's, with its flag: `.train()` and `.eval()` of parts."""
    made[model] = own
    own.training = model.training
    for name, child in model._modules.items():
        if child is not None:
            new = child not in made
            own._modules[name] = made.setdefault(child, Part())
            if new:
                mirror(made[child], child, made)


def register(root: nn.Module, weight: Weight, value: Tensor) -> Callable[[], Tensor]:
    """Put a weight where the model has it, under all its names; returns how to read it there."""
    if weight.kind == "constant":
        return lambda: value
    places: list[Callable[[], Any]] = []
    for name in weight.names:
        *path, last = name.split(".")
        at = root
        for part in path:
            child = at._modules.get(part)
            assert child is not None, name
            at = child
        if weight.kind == "parameter":
            assert isinstance(value, nn.Parameter)
            at.register_parameter(last, value)
        else:
            at.register_buffer(last, value, persistent=weight.persistent)
        table = at._parameters if weight.kind == "parameter" else at._buffers
        places.append(partial(table.__getitem__, last))
    return places[0]
