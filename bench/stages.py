"""A stage's micro-batches on one CUDA device: as graphs, and launched one by one from the host.

torchrun --nproc-per-node 1 bench/stages.py

Four layers of Llama-3-70B at an eighth of their width, one place, so that nothing is sent; median of interleaved steps,
what the host takes to launch them included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [
    str(Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parents[1] / "src"),
]

from timing import start

import plait
from plait.runtime import stages

CASES = ((512, 2), (4096, 2), (4096, 8))  # tokens, micro-batches
SAMPLES = 15


def shape() -> dict[str, Any]:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128}
    width = {"hidden_size": 8192, "intermediate_size": 3584, "num_hidden_layers": 4, "vocab_size": 128}
    return {**width, **heads, "use_cache": False}


def step(compiled: plait.Compiled, x: torch.Tensor, training: bool) -> None:
    with torch.set_grad_enabled(training):
        out = compiled(inputs_embeds=x).last_hidden_state
    if training:
        out.float().square().mean().backward()
        compiled.zero_grad()


def milliseconds(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    for run in steps.values():
        for _ in range(5):
            run()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(SAMPLES):
        for name, run in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: median(of) for name, of in times.items()}


def main() -> None:
    from transformers import LlamaConfig, LlamaModel

    _, _, device = start()
    graphed = stages._graphed
    for tokens, pieces in CASES:
        for training in (True, False):
            torch.manual_seed(0)
            with device:
                model = LlamaModel(LlamaConfig(**shape())).to(torch.bfloat16).train(training)
            x = torch.randn(pieces, tokens // pieces, 8192, device=device, dtype=torch.bfloat16)
            made = {}
            for name, count in (("one graph", 1), ("stages as graphs", pieces), ("stages launched", pieces)):
                stages._graphed = graphed if name != "stages launched" else lambda pieces, made, transport: made
                made[name] = plait.compile(
                    model, (), {"inputs_embeds": x}, tp=1, pp=1, training=training, device=device,
                    micro_batches=count, recompute="off", measure=False,
                )  # fmt: skip
            times = milliseconds({n: lambda c=c: step(c, x, training) for n, c in made.items()})  # type: ignore[misc]
            print(f"{tokens} tokens, {pieces} micro-batches, {'training' if training else 'inference'}")
            for name, took in times.items():
                print(f"  {name:17} {took:.2f} ms, predicted {1e3 * made[name].plan.seconds:.2f}", flush=True)
            del made, model
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
