"""Parts that the cases are made of: a module from a function, and attention spelled by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A module whose forward is a function: `Net(lambda s, x: s.b(s.a(x)), a=..., b=...)`."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def weight(*shape: int, scale: float = 0.3) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * scale)


def linear(i: int, o: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(i, o, bias=bias)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[b, g, t, d] -> [b, h, t, d]: each key/value head for its h / g query heads."""
    return x.repeat_interleave(heads // x.size(1), 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = True
) -> Tensor:
    """Attention by its formula; q: [b, h, t, d], k and v: [b, g, s, d]."""
    k, v = repeat_heads(k, q.size(1)), repeat_heads(v, q.size(1))
    t, s = q.size(2), k.size(2)
    scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
    if causal:
        later = torch.arange(s) > torch.arange(t)[:, None] + s - t
        scores = scores.masked_fill(later, float("-inf"))
    return (scores if bias is None else scores + bias).softmax(-1) @ v


def heads(x: Tensor, h: int) -> Tensor:
    """[b, t, (h d)] -> [b, h, t, d]"""
    return x.view(x.size(0), x.size(1), h, -1).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """[b, h, t, d] -> [b, t, (h d)]"""
    return x.transpose(1, 2).flatten(2)
