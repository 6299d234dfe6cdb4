"""Forward hooks: refused where they change what forward gives, or keep what they see.

Those that only make a weight of others before the forward (pruning, weight_norm as it was), or that wait for
somebody to ask (transformers installs some on the first call), are in the trial what they are in a call. So
what hooks see, make and give is watched there; one is refused of which something is alive after it.
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

FORWARD = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
WAITS = (0.0, 0.01, 0.1)  # seconds between looks at what is still alive


@dataclass
class Hooks:
    """Those that the model had before its trial; to be put on within `preserved`."""

    seen: dict[str, list[weakref.ref[torch.Tensor]]] = field(default_factory=dict)  # by hook, in words
    change: dict[str, None] = field(default_factory=dict)

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            for hooks in (module.__dict__[kind] for kind in FORWARD):
                for key, hook in hooks.items():
                    hooks[key] = self._watched(hook, f"{name or 'the model'} ({title(hook)})")

    def _watched(self, hook: Callable[..., Any], words: str) -> Callable[..., Any]:
        seen = self.seen.setdefault(words, [])

        def run(module: nn.Module, *args: Any) -> Any:
            given = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            versions = [x._version for x in given]
            with _Made(seen):
                result = hook(module, *args)
            if result is not None or versions != [x._version for x in given]:
                self.change[words] = None
            _note(seen, (args, result))
            return result

        return run

    def refuse(self) -> None:
        """After the trial, when nothing of it is held any more."""
        for wait in WAITS:
            if not self._keep():
                break
            gc.collect()
            time.sleep(wait)
        found = [
            f"hooks on {', '.join(names)} {what}"
            for names, what in (
                (self.change, "change what forward gives: remove them, or write what they do into forward"),
                (self._keep(), "keep tensors that they see: return these from forward, or remove the hooks"),
            )
            if names
        ]
        if found:
            raise CaptureError("; ".join(found))

    def _keep(self) -> list[str]:
        return [words for words, refs in self.seen.items() if any(r() is not None for r in refs)]


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
