"""SmolLM2's shapes, one forward, Plait against DTensor's `parallelize_module` with plans by hand.

    python bench/dtensor.py --nproc 2 --tokens 512

Same processes, same run, interleaved; each sample is the slower rank's, the figure is the median.
DTensor cannot cut 9 query heads over 2 or 4 ranks, so its plans are the two that remain: attention
whole on every rank, or its projections cut and gathered. The faster of them counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import plait
from plait.runtime.processes import launch


def build(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=False,  # DTensor would have to cut both uses alike
    )
    return LlamaForCausalLM(config).eval()


def by_hand(model: Any, ranks: int, *, attention: bool) -> Any:
    mesh = init_device_mesh("cpu", (ranks,))
    gathered = {"output_layouts": Replicate()}
    plan: dict[str, Any] = {"lm_head": ColwiseParallel(**gathered)}
    for i in range(len(model.model.layers)):
        at = f"model.layers.{i}"
        plan |= {f"{at}.mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
        plan[f"{at}.mlp.down_proj"] = RowwiseParallel()
        if attention:
            plan |= {f"{at}.self_attn.{n}_proj": ColwiseParallel(**gathered) for n in "qkvo"}
    return parallelize_module(model, mesh, plan)


def run(tokens: int, layers: int, samples: int, out: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    ids = torch.randint(0, 49152, (1, tokens), generator=torch.Generator().manual_seed(1))
    model = build(layers)
    rows: dict[str, Callable[[], Any]] = {}
    for name, options in VARIANTS.items():
        compiled = plait.compile(model, (ids,), {"use_cache": False}, tp=ranks, pp=1, **options)
        rows[name] = lambda c=compiled: c(ids, use_cache=False)
    for name, attention in (("dtensor mlp", False), ("dtensor mlp + attention", True)):
        peer = by_hand(build(layers), ranks, attention=attention)
        rows[name] = lambda p=peer: p(ids, use_cache=False)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        for name, row in rows.items():
            error = (row().logits - want).abs().max().item()
            assert error < 1e-3, f"{name} is wrong by {error}"
        times: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(samples):
            for name, row in rows.items():
                times[name].append(slowest(row))
    if dist.get_rank() == 0:
        report({n: statistics.median(t) for n, t in times.items()}, ranks, tokens, layers, out)


def slowest(call: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def report(medians: dict[str, float], ranks: int, tokens: int, layers: int, out: str) -> None:
    peer = min(t for n, t in medians.items() if n.startswith("dtensor"))
    found = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, torch {torch.__version__}, gloo, 1 thread a rank",
        "ranks": ranks,
        "tokens": tokens,
        "layers": layers,
        "seconds": medians,
        "times the faster DTensor plan": {n: round(peer / t, 3) for n, t in medians.items()},
    }
    print(json.dumps(found, indent=1))
    if out:
        Path(out).write_text(json.dumps(found, indent=1) + "\n")


VARIANTS: dict[str, dict[str, Any]] = {
    "plait": {},
    "plait, overlap off": {"overlap": "off"},
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    launch(run, asked.nproc, asked.tokens, asked.layers, asked.samples, asked.out)
