"""Optimizers on split weights: an element-wise one is right as it is, every other one is refused.

Which one it is, is not read from its name. Before the first step of an optimizer that holds a split
weight, another of its class and settings takes two steps on small whole weights, and again on their
parts, as ranks would: where the parts do not come out as the whole does, the step raises.

The seam is `torch.optim.optimizer.register_optimizer_step_pre_hook`: torch's own, but for all optimizers
of the process. The alternative, to patch `step` of those that hold our weights, cannot know
when an optimizer is made. The hook is registered with the first split weight, looks at an optimizer
once (and again when it has more groups), and leaves those without split weights alone.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from plait.errors import InputError
from plait.runtime.gradient import Holder

_MARK = "_plait_holder"  # of a weight; a copy of the weight is no longer ours and has none
_PLAIN = (bool, int, float, str, type(None))
_SIZES = (6, 4, 3, 2, 2)  # of the small weights


def mark(parameter: nn.Parameter, holder: Holder) -> None:
    setattr(parameter, _MARK, holder)
    _watch()


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_before_step)  # type: ignore[no-untyped-call]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    groups = len(optimizer.param_groups)
    if _SEEN.get(optimizer) != groups:
        closure = bool(args or kwargs)
        for group in optimizer.param_groups:
            held = [(p, h) for p in group["params"] if (h := getattr(p, _MARK, None)) is not None]
            if held:
                _check(optimizer, group, held, closure)
        _SEEN[optimizer] = groups


_SEEN: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def _check(
    optimizer: Optimizer, group: dict[str, Any], held: list[tuple[Tensor, Holder]], closure: bool
) -> None:
    """Raise where it is not right; `held`: this group's weights of ours."""
    name = type(optimizer).__name__
    split = [(p, h) for p, h in held if h.cut is not None]
    why = ""
    with torch.random.fork_rng(devices=_cuda(held[0][0])), torch.enable_grad():
        trial = _Trial(optimizer, group, held[0][0].device, closure)
        try:
            for dims in sorted({p.dim() for p, _ in held}):
                rows = any(p.dim() == dims for p, _ in split)
                why = why or trial.compare(dims, rows, any(h.staged for _, h in held))
        except Exception as error:  # another constructor's or step's own: nothing is proven then
            why = f"a trial on small weights was not possible: {type(error).__name__}: {error}"
    if why:
        names = [h.name for _, h in (split or held)]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise InputError(
            f"{name} on weights that are split over ranks ({', '.join(names[:4])}{more}): {why}. "
            "Element-wise optimizers are right (SGD, Adam, AdamW, RMSprop, Adagrad ...); for another, "
            "compile with tp=1"
        )


def _cuda(tensor: Tensor) -> list[torch.device]:
    return [tensor.device] if tensor.is_cuda else []


class _Trial:
    """Optimizers of one class and settings, on weights of our own."""

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], device: torch.device, closure: bool
    ) -> None:
        self.optimizer, self.kind = optimizer, type(optimizer)
        self.device, self.closure = device, closure
        self.group = {k: v for k, v in group.items() if k not in ("params", "initial_lr")}
        if "lr" in self.group and not self.group["lr"] > 0:  # a warm-up starts at zero
            self.group["lr"] = 0.1
        known = inspect.signature(self.kind.__init__).parameters
        self.defaults = {k: v for k, v in optimizer.defaults.items() if k in known}
        self.random = torch.Generator().manual_seed(0)

    def compare(self, dims: int, split: bool, staged: bool) -> str:
        """What is wrong, or nothing."""
        weights, *grads = ([self._draw(_SIZES[:dims]) for _ in range(2)] for _ in range(4))
        whole = self._run(weights, grads)
        if all(torch.equal(x, y) for x, y in zip(whole, weights, strict=True)):
            return "its steps on small weights changed nothing, which proves nothing"
        if staged:
            alone = [self._run([w], [[g[i]] for g in grads])[0] for i, w in enumerate(weights)]
            if not _alike(alone, whole):
                return "a step of one weight depends on the others, which are on other ranks"
        for dim in range(dims if split else 0):
            for lo, hi in ((0, 1), (1, _SIZES[dim])):
                parts = self._run(
                    [_cut(weights[0], dim, lo, hi), weights[1]],
                    [[_cut(g[0], dim, lo, hi), g[1]] for g in grads],
                )
                if not _alike(parts, [_cut(whole[0], dim, lo, hi), whole[1]]):
                    return "a step of one element depends on others, which are on other ranks"
        return ""

    def _draw(self, sizes: Sequence[int]) -> Tensor:
        return torch.randn(tuple(sizes), generator=self.random).to(self.device)

    def _run(self, weights: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        parameters = [nn.Parameter(w.clone()) for w in weights]
        optimizer = self._made(parameters)
        for each in grads:
            for p, g in zip(parameters, each, strict=True):
                p.grad = g.clone()
            optimizer.step(*([lambda: torch.ones(())] if self.closure else []))  # type: ignore[arg-type]
        return [p.detach() for p in parameters]


    def _made(self, parameters: list[nn.Parameter]) -> Optimizer:
        groups = [{**self.group, "params": parameters}]
        try:
            return self.kind(groups, **self.defaults)
        except TypeError:  # its constructor's arguments are not its defaults
            made = self.kind.__new__(self.kind)
            Optimizer.__init__(made, groups, dict(self.optimizer.defaults))
            there = vars(made).keys()
            plain = {k: v for k, v in vars(self.optimizer).items() if isinstance(v, _PLAIN)}
            vars(made).update({k: v for k, v in plain.items() if k not in there})
            return made


def _cut(x: Tensor, dim: int, lo: int, hi: int) -> Tensor:
    return x.narrow(dim, lo, hi - lo)


def _alike(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return all(torch.allclose(g, w, 1e-4, 1e-6) for g, w in zip(got, want, strict=True))


