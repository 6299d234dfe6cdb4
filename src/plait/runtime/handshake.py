"""What a kernel that sums and norms does beside its own rows: far memory, and flags of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Reach:
    """Rows first to last that are read from, or stored to, other ranks' memory by the kernel."""

    tensors: Sequence[Tensor]  # as `sources`, or the other ranks' copies of `rows_out`
    first: int
    last: int


@dataclass(frozen=True)
class Handshake:
    """Flags that the kernel itself fills and drains, before the first row and after the last."""

    arrivals: Tensor  # int32, 0 between launches
    enter_fills: Sequence[Tensor] = ()
    enter_drains: Sequence[Tensor] = ()
    leave_fills: Sequence[Tensor] = ()
    leave_drains: Sequence[Tensor] = ()

    def arguments(self) -> tuple[tuple[Tensor, ...] | None, ...]:
        flags = (self.enter_fills, self.enter_drains, self.leave_fills, self.leave_drains)
        return tuple(tuple(group) or None for group in flags)
