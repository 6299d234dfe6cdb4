"""Forward hooks: they run at the capture, as forward does, and what they compute is in the graph.

What one keeps outside of the model (activations in a list) it would keep once, and of no values. So what
hooks see and make in the trial is watched, and a hook is refused of which something is alive after it.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from plait.errors import CaptureError

KINDS = ("_forward_pre_hooks", "_forward_hooks")
WAITS = (0.0, 0.01, 0.1)  # seconds between looks at what is still alive


@dataclass
class Hooks:
    """Those that the model had before its trial; to be put on within `preserved`."""

    seen: dict[str, list[weakref.ref[torch.Tensor]]] = field(default_factory=dict)  # by hook, in words

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            for hooks in (module.__dict__[kind] for kind in KINDS):
                for key, hook in hooks.items():
                    hooks[key] = self._watched(hook, f"{name or 'the model'} ({title(hook)})")

    def _watched(self, hook: Callable[..., Any], words: str) -> Callable[..., Any]:
        seen = self.seen.setdefault(words, [])

        def run(module: nn.Module, *args: Any) -> Any:
            with _Made(seen):
                result = hook(module, *args)
            _note(seen, (args, result))
            return result

        return run

    def refuse(self) -> None:
        """After the trial, when nothing of it is held any more."""
        for wait in WAITS if any(self.seen.values()) else ():
            kept = [words for words, refs in self.seen.items() if any(r() is not None for r in refs)]
            if not kept:
                return
            gc.collect()
            time.sleep(wait)
        if any(self.seen.values()):
            raise CaptureError(
                f"hooks keep tensors that they see: {', '.join(kept)}. A compiled model does not run them: "
                "return those tensors from forward, or remove the hooks"
            )


class _Made(TorchFunctionMode):
    """What torch makes meanwhile."""

    def __init__(self, seen: list[weakref.ref[torch.Tensor]]):
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        _note(self.seen, result)
        return result


def _note(seen: list[weakref.ref[torch.Tensor]], tree: Any) -> None:
    seen += [weakref.ref(x) for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def title(hook: Any) -> str:
    hook = getattr(hook, "func", hook)
    return getattr(hook, "__qualname__", type(hook).__qualname__)
