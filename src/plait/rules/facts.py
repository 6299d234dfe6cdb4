"""Facts about attention masks, found in their values.

A pattern says which keys a query may see; i is the query's row, j the key's:

    full            every key
    causal          j <= i
    window(w)       i - w < j <= i                    sliding window
    chunk(c)        floor(i / c) * c <= j <= i        attention within blocks
    band(l,r)       i - l <= j <= i + r               local attention, both ways
    causal(o), ...  the same with i + o for i         queries at the end of the keys

`node.meta["mask"]` of an attention is its pattern, and of a constant mask as well ("not causal": a
boolean mask that is true where the key is hidden). A mask that says nothing beyond `full` or
`causal` is dropped: an explicit one would cost the fast kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from plait.errors import InputError

HIDDEN = -1e9  # additive masks: at this or less a key's weight is zero beside any score


@dataclass(frozen=True)
class Pattern:
    """`offset` is added to the query's row."""

    kind: str
    sizes: tuple[int, ...] = ()
    offset: int = 0

    def __str__(self) -> str:
        numbers = [*map(str, self.sizes)] + ([f"{self.offset:+d}"] if self.offset else [])
        return self.kind + (f"({','.join(numbers)})" if numbers else "")

    @classmethod
    def parse(cls, text: str) -> Pattern:
        match = re.fullmatch(r"(\w+)(?:\((\d{1,9}(?:,\d{1,9})*)?,?([+-]\d{1,9})?\))?", text)
        sizes = tuple(map(int, match[2].split(","))) if match and match[2] else ()
        if match is None or match[1] not in KINDS or len(sizes) != SIZES.get(match[1], 0):
            raise InputError(f"{text!r} is no mask; one reads like full, causal(+3), window(4), chunk(4) or band(2,3)")
        return cls(match[1], sizes, int(match[3] or 0))

    def allowed(self, rows: int, cols: int) -> torch.Tensor:
        """bool [rows, cols]: whether the query may see the key."""
        i = torch.arange(self.offset, rows + self.offset, dtype=torch.int32)[:, None]
        j = torch.arange(cols, dtype=torch.int32)
        return KINDS[self.kind](i, j, *self.sizes).expand(rows, cols)


def pattern_of(mask: torch.Tensor) -> tuple[Pattern, bool] | None:
    """The pattern of a mask [..., q, k], and whether it says nothing else.

    Boolean: true where the key is seen. Otherwise added to the scores: `HIDDEN` or less hides.
    """
    if mask.dim() < 2:
        return None
    if mask.dtype is torch.bool:
        seen, pure = mask, True
    elif mask.dtype.is_floating_point:
        seen = mask > max(HIDDEN, torch.finfo(mask.dtype).min / 2)
        pure = not bool(mask.masked_fill(~seen, 0).any())
    else:
        return None
    seen = seen.reshape(-1, *seen.shape[-2:])
    if seen.shape[0] > 1 and not bool((seen == seen[:1]).all()):
        return None
    for guess in _guesses(seen[0]):
        if torch.equal(guess.allowed(*seen.shape[-2:]), seen[0]):
            return guess, pure
    return None


def _guesses(seen: torch.Tensor) -> Iterator[Pattern]:
    """What the first row and the first column fit; to be compared with the whole."""
    rows, cols = seen.shape
    down, right = int(seen[:, 0].sum()), int(seen[0].sum())  # who sees key 0, what query 0 sees
    if (down, right) == (rows, cols):
        yield Pattern("full")
    for offset in dict.fromkeys((0, cols - rows)):
        reach = right - 1 - offset
        if reach == 0 and down == rows:
            yield Pattern("causal", offset=offset)
        elif reach == 0 and down + offset > 0:
            yield Pattern("window", (down + offset,), offset)
            yield Pattern("chunk", (down + offset,), offset)
        elif reach > 0 and down < rows and right < cols:
            yield Pattern("band", (down - 1 + offset, reach), offset)


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "full": lambda i, j: (j >= 0) & (i == i),
    "causal": lambda i, j: j <= i,
    "window": lambda i, j, w: (j <= i) & (j > i - w),
    "chunk": lambda i, j, c: (j <= i) & (j >= torch.div(i, c, rounding_mode="floor") * c),
    "band": lambda i, j, left, right: (j >= i - left) & (j <= i + right),
}
SIZES = {"window": 1, "chunk": 1, "band": 2}  # numbers of a kind
