"""Packed matmuls in a compiled module: one run of memory, and parameters, checkpoints and training as ever."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

import plait
from plait.plan import packing
from tests import zoo
from tests.cases import Setup
from tests.compare import EXACT, demand, differences, gradients, within
from tests.gloo.harness import Pool


def packed(group: Any, folder: str, n: int) -> None:
    model, args, kwargs = zoo.build("qwen2")  # biases, three key/value heads
    setup = Setup(model, args, kwargs).to(torch.float64)
    model, state = setup.model, setup.model.state_dict()
    empty = copy.deepcopy(model).to("meta")
    with patch.object(packing.Clock, "together", lambda *_: 0.0):
        made = plait.compile(
            empty, setup.args, setup.kwargs, tp=n, group=group, training=True, weights=folder, device="cpu"
        )
    own = dict(made.named_parameters())
    assert sorted(map(len, made.plan.packed)) == [2, 2, 3, 3]
    for pack in made.plan.packed:
        parts = [own[name] for name in pack]
        assert len({p.untyped_storage().data_ptr() for p in parts}) == 1
        memory = parts[0].untyped_storage().nbytes()
        assert sum(p.nbytes for p in parts) == memory, "kept twice"
    demand(differences(made.state_dict(), dict(state), "state", EXACT), about="loaded")
    for _ in range(2):  # the second time from weights that an optimizer has changed
        for module in (model, made):
            module.zero_grad()
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
            setup.loss(module(*setup.args, **setup.kwargs)).backward()
            if module is made:
                close = within(dtype=torch.float32)
                demand(differences(made.gradients(), gradients(model), "gradients", close))
            optimizer.step()
    assert own[made.plan.packed[0][0]].untyped_storage().data_ptr() == memory_of(made, 0)
    made.load_state_dict(state)
    demand(differences(made.state_dict(), dict(state), "state", EXACT), about="loaded again")


def memory_of(made: Any, pack: int) -> int:
    name = made.plan.packed[pack][-1]
    return int(dict(made.named_parameters())[name].untyped_storage().data_ptr())


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_packed_model(pool: Pool, tmp_path: Path, n: int) -> None:
    model, _, _ = zoo.build("qwen2")
    save_file({k: v.clone() for k, v in model.double().state_dict().items()}, tmp_path / "model.safetensors")
    pool.run(packed, n, str(tmp_path), n)
