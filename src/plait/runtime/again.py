"""Again: parts of a program that keep what comes in, and run once more for the backward.

    `segmented`     a stage's program in segments, each a checkpoint of torch's own: the graph of autograd
                    stays the same, and so do the bits of every gradient
    `Kept`          what a part has been given, and whether somebody changed it in the meantime

Dropout draws by a seed that is among the inputs, so a second run draws the same; collectives are run
again by all ranks of a group, in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from plait.errors import PlaitError
from plait.passes.partition import Local
from plait.passes.pipeline import Borders

SEGMENT = "segment"  # in a node's meta


class ChangedMeanwhile(PlaitError, RuntimeError):
    """A value that the backward needs was changed in place after its forward."""


@dataclass(frozen=True)
class Kept:
    values: tuple[Any, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Kept:
        return cls(tuple(values), _versions(values))

    def check(self, names: Sequence[str]) -> None:
        now = _versions(self.values)
        changed = [n for n, a, b in zip(names, self.versions, now, strict=True) if a != b]
        if changed:
            raise ChangedMeanwhile(
                f"{', '.join(changed)} changed in place between a forward and its backward, which "
                "runs the forward again: step the optimizer after the backward, or compile with "
                "recompute='off'"
            )


def _versions(values: Sequence[Any]) -> tuple[int, ...]:
    """What inference mode has made counts no changes."""
    return tuple(x._version if isinstance(x, Tensor) and not x.is_inference() else 0 for x in values)


def mark(local: Local, firsts: Sequence[str], program: fx.Graph) -> None:
    """Every node of a rank's program says which segment it is in; `firsts` as for stages."""
    places = Borders(tuple(firsts)).places(program)
    for node, origin in zip(local.graph.nodes, local.origins, strict=True):
        node.meta[SEGMENT] = places[origin]


def segmented(
    root: Mapping[str, Any], graph: fx.Graph, weights: Mapping[str, str]
) -> fx.GraphModule:
    """The program of a stage; runs of nodes with one mark are checkpoints.

    `weights`: their names in the user's model, by node.
    """
    whole = fx.GraphModule(dict(root), graph)
    made = split_module(whole, whole, lambda node: node.meta[SEGMENT], keep_original_order=True)
    for name, part in list(made.named_children()):
        if name.startswith("submod_") and isinstance(part, fx.GraphModule):
            setattr(made, name, Segment(part, weights))
    return made


class Segment(nn.Module):
    def __init__(self, inner: fx.GraphModule, weights: Mapping[str, str]) -> None:
        super().__init__()
        self.inner = inner
        given = [n.name for n in inner.graph.nodes if n.op == "placeholder"]
        self.names = [weights.get(name, name) for name in given]

    def forward(self, *given: Any) -> Any:
        needs = any(isinstance(x, Tensor) and x.requires_grad for x in given)
        if not (needs and torch.is_grad_enabled()):
            return self.inner(*given)
        kept = Kept.of(given)

        def run(*given: Any) -> Any:
            kept.check(self.names)
            return self.inner(*given)

        return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)
