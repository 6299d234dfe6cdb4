"""One measured table that the fit has not seen; the others are of the full matrix (tests/unit/test_price.py)."""

from __future__ import annotations

from plait.cluster.published import TABLES, table
from plait.cost.fitting import held_out


def test_constants_that_have_not_seen_a_table_predict_it() -> None:
    seen = table("4xH100 vLLM")
    assert abs(held_out(seen, TABLES)).mean() <= 0.30
