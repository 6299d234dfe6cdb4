"""Operators of Plait's own that stand in a captured Program, beside those of ATen.

    sloped(y, x, slope)      * , *, * -> *      y; its gradient goes to y, and times slope to x
    cotangent(y, name)       the gradient of y, while the backward of `name` is traced
                             (capture/functions.py); a Program has none of these
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("plait", "FRAGMENT")
_POINTWISE = (torch.Tag.pointwise,)
_library.define("sloped(Tensor y, Tensor x, Tensor slope) -> Tensor", tags=_POINTWISE)
_library.define("cotangent(Tensor y, str name) -> Tensor")

SLOPED = torch.ops.plait.sloped.default
COTANGENT = torch.ops.plait.cotangent.default


def _sloped(y: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    return y.clone()


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    _, x, slope = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(slope)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    (slope,) = ctx.saved_tensors
    return grad, (grad * slope).to(ctx.dtype), None


_library.impl("sloped", _sloped, "CompositeExplicitAutograd")
torch.library.register_fake("plait::sloped", lambda y, x, slope: torch.empty_like(y), lib=_library)
torch.library.register_fake("plait::cotangent", lambda y, name: torch.empty_like(y), lib=_library)
torch.library.register_autograd("plait::sloped", _gradient, setup_context=_keep, lib=_library)
