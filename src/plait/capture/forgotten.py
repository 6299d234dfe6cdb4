"""What an export forgets without a word, found during the trial of a model to be trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from plait.capture.functions import belongs_to_an_operator, lost, title
from plait.errors import CaptureError


class Forgotten:
    """`look` at each operator, `backward_of` what was computed, then `refuse`."""

    def __init__(self, training: bool):
        self.training = training
        self.functions: dict[type, None] = {}
        self.hooked = False

    def look(self) -> None:
        """Hooks on saved tensors: checkpointing, or activations moved elsewhere."""
        if self.training and not self.hooked:
            self.hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None

    def backward_of(self, results: list[Any]) -> None:
        """Every torch.autograd.Function behind `results`."""
        if not self.training:
            return
        stack = [t.grad_fn for t in results if isinstance(t, torch.Tensor) and t.grad_fn]
        seen = set(stack)
        while stack:
            node = stack.pop()
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                cls = node._forward_cls  # type: ignore[attr-defined]
                if not belongs_to_an_operator(cls):
                    self.functions[cls] = None
            new = {n for n, _ in node.next_functions if n is not None} - seen
            seen |= new
            stack.extend(new)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Reentrant checkpointing leaves no trace where no argument needs a gradient."""
        function = torch.utils.checkpoint.CheckpointFunction
        apply = function.__dict__.get("apply")
        original = function.apply

        def watched(*args: Any) -> Any:
            self.hooked = True
            return original(*args)

        function.apply = staticmethod(watched)  # type: ignore[method-assign]
        try:
            yield
        finally:
            if apply is None:
                del function.apply
            else:
                function.apply = apply  # type: ignore[method-assign]

    def refuse(self) -> None:
        if not self.training:
            return
        if self.hooked:
            raise CaptureError(
                "the model checkpoints its activations, which a captured graph cannot keep: switch "
                "it off (model.gradient_checkpointing_disable() in transformers), or capture with "
                "training=False"
            )
        if self.functions:
            raise lost(", ".join(map(title, self.functions)), "its forward was not seen")
