"""What a call of a compiled module costs besides its program, by layers: microseconds of the host, the best of calls.

python bench/calls.py

Llama of width 64 in one process, so that nothing is agreed with others: a meeting of ranks is in bench/watch.py.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")  # for this folder, whose kernels.py is no package

import plait
from plait.runtime.executor import Executable
from plait.runtime.processes import launch

LAYERS = (4, 32, 80)
CALLS = 200


def besides(layers: int) -> float:
    """Microseconds of a call outside of the program."""
    from transformers import LlamaConfig, LlamaModel

    width = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "num_attention_heads": 2}
    model = LlamaModel(LlamaConfig(**width, num_hidden_layers=layers, use_cache=False)).eval()
    x = torch.randn(1, 16, 64)
    compiled = plait.compile(model, (), {"inputs_embeds": x}, tp=1, pp=1, measure=False)
    inside, whole = Executable._run, []
    spent = 0.0

    def timed(self: Executable, feed: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        out = inside(self, feed)
        spent = time.perf_counter() - start
        return out

    Executable._run = timed  # type: ignore[method-assign]
    for _ in range(CALLS):
        start = time.perf_counter()
        compiled(inputs_embeds=x)
        whole.append(time.perf_counter() - start - spent)
    Executable._run = inside  # type: ignore[method-assign]
    return 1e6 * min(whole)


def main() -> None:
    for layers in LAYERS:
        print(f"{layers} layers: {besides(layers):.0f} us", flush=True)


if __name__ == "__main__":
    launch(main, 1)
