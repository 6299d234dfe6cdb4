"""Step: forward and backward in one call.

A pipeline captures the loss with the model, on the whole batch; the equations say how it is cut, so
its denominator is that of the whole batch, and the schedule runs both. A loss that they cannot cut, or
that cannot be captured, runs on the gathered output: all forwards, the loss on every rank, all
backwards. Without a pipeline there is nothing to schedule, and the loss runs on the output as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from plait.capture.call import TARGET
from plait.capture.loss import Loss
from plait.errors import InputError
from plait.runtime.pipeline import UNTRAINED, Pipeline


@dataclass(frozen=True)
class Gathered:
    """In the place of a step's executable: the plain one, and why the loss is not one with it."""

    plain: Pipeline
    reason: str
    folded: tuple[str, ...] = ()

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        return self.plain.leaves(args, without_target(kwargs))

    def told(self, loss: Loss) -> str:
        replicas = self.plain.stages.replicas
        where = "gathered output" if replicas is None else "output of each replica, and is averaged"
        return f"{loss} runs on the {where}: {self.reason}"


def with_target(kwargs: Mapping[str, Any], target: Any) -> dict[str, Any]:
    return {**kwargs, TARGET: target if isinstance(target, tuple) else (target,)}


def without_target(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != TARGET}


def on_the_output(
    call: Callable[..., Any], loss: Loss, args: Sequence[Any], kwargs: Mapping[str, Any], guard: Any
) -> tuple[Tensor, Any]:
    """Forward, loss, backward. `guard`, of the agreement, tells an error of the loss to the others: they would
    wait for this rank's backward."""
    out = call(*args, **without_target(kwargs))
    with guard("step"):
        value = loss(out, kwargs[TARGET])
        if not value.requires_grad:
            raise InputError(UNTRAINED)
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach(), pytree.tree_map_only(Tensor, Tensor.detach, out)
