"""More kinds of models cut into pretend ranks: outputs and gradients, or a refusal by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.capture import capture
from plait.errors import CaptureError
from tests import pretend, zoo_others
from tests.cases import Setup
from tests.compare import demand, discrepancies, plain, within

FULL = pytest.mark.full
SIZES = (2, 3, 4)
OFTEN = ("codegen", "deepseek_v3", "mamba", "resnet")


@pytest.fixture(autouse=True)
def grouped_products_of_any_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own takes no float64; transformers has another, which it takes when it captures."""
    moe = pytest.importorskip("transformers.integrations.moe")
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *args: False)


def _grid() -> Any:
    for i, name in enumerate(zoo_others.NAMES):
        for training in (False, True)[: 1 if name in zoo_others.REFUSED else 2]:
            for n in SIZES:
                often = name in OFTEN and training and n == SIZES[i % 3]
                yield pytest.param(name, n, training, id=f"{name}-{n}-{training}", marks=() if often else FULL)


@pytest.mark.parametrize(("name", "n", "training"), _grid())
def test_outputs_and_gradients(name: str, n: int, training: bool) -> None:
    """In float64; what the model itself rounds to float32 is compared as float32."""
    setup = Setup(*zoo_others.build(name)).to(torch.float64)
    want = plain(setup, training)
    divided = pretend.divide(pretend.trace(setup, training), n, pretend.Free(n))
    assert divided.split
    for rank, got in enumerate(pretend.run(divided, setup, training)):
        got = replace(got, buffers=want.buffers)
        demand(discrepancies(got, want, within(dtype=torch.float32)), about=f"{name}, rank {rank} of {n}")


@pytest.mark.parametrize("name", [n if n == "rwkv" else pytest.param(n, marks=FULL) for n in zoo_others.REFUSED])
def test_what_no_graph_can_keep_is_named(name: str) -> None:
    model, args, kwargs = zoo_others.build(name)
    with pytest.raises(CaptureError) as error:
        capture(model, args, kwargs, training=True)
    assert zoo_others.REFUSED[name] in str(error.value)
