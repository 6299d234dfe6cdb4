"""What no graph can keep is refused by the user's own line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plait.capture import capture
from plait.errors import CaptureError


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if int(x.sum()) > 3:
            return x + 1
        return x


def test_what_runs_may_not_depend_on_a_value() -> None:
    with pytest.raises(CaptureError, match=r"test_capture_refuses\.py"):
        capture(Counts(), (torch.ones(2, 3, dtype=torch.int64),))


def test_a_forward_hook_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, args, out: out + 1)
    with pytest.raises(CaptureError, match="hook"):
        capture(model, (torch.randn(2, 3),))
