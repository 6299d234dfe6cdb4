"""Dynamic sizes: the range that a program holds for, and calls outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.nn import functional as F

import plait
from plait.capture import capture
from plait.errors import CaptureError
from tests.cases.blocks import Net, linear

HERE = "test_sizes.py"


def diagonal(s: Net, x: Tensor) -> Tensor:
    return s.up(x).diagonal().view(2, -1)  # type: ignore[no-any-return]


def branches(s: Net, x: Tensor) -> Tensor:
    y = s.up(x) * (2 if x.size(0) >= 5 else 1)
    return y if x.size(0) != 9 else -y


def pooled(s: Net, x: Tensor) -> Tensor:
    y = s.up(x)
    return (y.softmax(0) + y.mean(0)).reshape(-1, 2) + torch.zeros(1, 2)


def alone(s: Net, x: Tensor) -> Tensor:
    y = s.up(x)
    return -y if x.size(0) > 1 else y


def padded(s: Net, x: Tensor) -> Tensor:
    """torch's own C++ reads these sizes as numbers."""
    y = F.pad(s.up(x), (0, 0, 2, 0))
    return F.interpolate(y.T[None], scale_factor=2.0)  # type: ignore[no-any-return]


def repeated(s: Net, x: Tensor) -> Tensor:
    """Heads of keys: the strides of what is repeated are the least of several multiples of the rows."""
    heads = s.up(x).view(1, -1, 3, 2).transpose(1, 2)
    return heads[:, :, None].expand(1, 3, 2, -1, 2).reshape(1, 6, -1, 2)


def program(run: Any, rows: int, size: Any = "rows") -> Any:
    return capture(Net(run, up=linear(3, 6)), (torch.randn(rows, 3),), dynamic={"args": [{0: size}]})


@pytest.mark.parametrize(
    ("run", "rows", "size", "low", "high"),
    [
        (diagonal, 6, "rows", 6, None),  # min(rows, 6) is even
        (diagonal, 8, "rows", 6, None),
        (padded, 5, "rows", 0, None),
        (repeated, 5, "rows", 0, None),
        (branches, 7, "rows", 5, 8),
        (branches, 12, "rows", 10, None),
        (branches, 4, "rows", 0, 4),
        (alone, 4, "rows", 2, None),
        (pooled, 4, "rows", 0, None),  # torch's operators ask about 1 as well, of what is the same there
        (branches, 7, Dim("rows", min=6, max=32), 6, 8),
        (branches, 7, Dim("rows", min=2, max=7), 5, 7),
    ],
)
@pytest.mark.sample(4)
def test_the_range_in_which_every_guard_holds(run: Any, rows: int, size: Any, low: int, high: int | None) -> None:
    (found,) = program(run, rows, size).sizes
    assert (found.name, found.low, found.high) == ("rows", low, high)


@pytest.mark.parametrize(
    ("run", "rows", "size", "words"),
    [
        (branches, 9, "rows", rf"'rows' can only be 9 \(.*{HERE}"),
        (diagonal, 4, "rows", rf"'rows' is limited \(.*{HERE}.*min\(6, rows\) % 2\) == 0"),
        (branches, 4, Dim("rows", min=10), "'rows' is from 10 to any number, but 4 in args"),
        (branches, 8, Dim("rows", max=7), "'rows' is from 0 to 7, but 8 in args"),
    ],
)
def test_what_is_no_range_is_refused_by_name(run: Any, rows: int, size: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s)dynamic=: .*{words}"):
        program(run, rows, size)


@pytest.mark.parametrize(
    ("run", "sizes"), [(branches, (12, 40, 7, 5, 3, 9, 12)), (alone, (12, 1, 2, 1)), (alone, (1, 2, 12, 1, 3))]
)
@pytest.mark.sample(1)
def test_a_call_outside_of_the_range_has_a_program_of_its_own(run: Any, sizes: tuple[int, ...]) -> None:
    """It was given that of the example's range, and its values without a word."""
    model = Net(run, up=linear(3, 6))
    parts = plait.compile(model, (torch.randn(sizes[0], 3),), tp=1, dynamic={"args": [{0: "rows"}]})
    for rows in sizes:
        x = torch.randn(rows, 3)
        assert torch.equal(parts(x), model(x)), rows


def test_sizes_of_one_name_that_differ_in_a_call() -> None:
    """By broadcasting the model may well take them."""
    model = Net(lambda s, x, y: s.up(x) + s.up(y), up=linear(3, 6))
    given = torch.randn(4, 3), torch.randn(4, 3)
    parts = plait.compile(model, given, tp=1, dynamic={"args": [{0: "rows"}] * 2})
    for rows in ((5, 5), (5, 1)):
        x, y = (torch.randn(n, 3) for n in rows)
        assert torch.equal(parts(x, y), model(x, y))
    with pytest.raises(CaptureError, match="broadcast|must match"):
        parts(torch.randn(5, 3), torch.randn(4, 3))
