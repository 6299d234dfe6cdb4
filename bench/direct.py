"""plait.compile of a transformers decoder, unmodified, on N GPUs: blocking and direct moves in one run.

    bench/launch.sh 300 2 bench/direct.py --tokens 8192 2048 1024 --share 8 --out results.json

    reduced     every sum an all-reduce of the group, the residual whole on every rank; blocking
    scattered   the split by rows with the group's reduce-scatters and all-gathers; blocking
    off         plait.compile(overlap="off"): the planner's own blocking split
    auto        plait.compile: what it chooses by itself
    floor       `reduced` with its transfers left out, its data finite

What is timed are replays of the CUDA graphs that plait.compile captured, interleaved; a sample is that
of the slower rank, the figure its median. hidden = (b - t) / (b - floor), b the fastest blocking row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

HERE = str(Path(__file__).resolve().parent)
sys.path[:0] = [HERE, str(Path(__file__).resolve().parents[1] / "src")]

from timing import interleaved, spread, start

# Other files here have names that libraries look for.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(HERE)]

import plait
from plait.cluster import Cluster
from plait.compiler import source
from plait.runtime.transport import Transport

BLOCKING = ("reduced", "scattered", "off")


def build(options: argparse.Namespace, ranks: int, device: torch.device) -> Any:
    """`ranks` of `share` devices' parts of the layers of Llama-70B, or of a narrower one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, share = options.width, options.share
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 7 // 2 * ranks // share,
        num_hidden_layers=options.layers,
        num_attention_heads=max(ranks, width // 128 * ranks // share),
        num_key_value_heads=max(ranks, width // 1024 * ranks // share),
        head_dim=128,
        vocab_size=32,  # so few that they stay whole: what is timed is the layers
        max_position_embeddings=16384,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@contextmanager
def without_transfers() -> Iterator[None]:
    """What comes back from the others is what a rank has itself."""
    run, reduce = Transport.run, Transport.all_reduce

    def left_out(self: Transport, step: Any, x: torch.Tensor, cut: Any, algorithm: str) -> Any:
        if step.action == "all_reduce":
            return x
        if step.action == "gather":
            return torch.cat([x] * self.size, cut.dim)
        assert step.collective is None, step
        return run(self, step, x, cut, algorithm)

    Transport.run = left_out  # type: ignore[method-assign]
    Transport.all_reduce = lambda self, x, *_, **__: x  # type: ignore[method-assign]
    try:
        yield
    finally:
        Transport.run, Transport.all_reduce = run, reduce  # type: ignore[method-assign]


def variants(model: Any, ids: torch.Tensor, few: torch.Tensor, only: set[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    ranks = dist.get_world_size()

    def add(name: str, **options: Any) -> None:
        if only and name not in only:
            return
        begin = time.perf_counter()
        compiled = plait.compile(model, (ids,), tp=ranks, pp=1, **options)
        with torch.no_grad():
            for _ in range(3):
                compiled(ids)
        made[name] = compiled
        if dist.get_rank() == 0:
            forms = sorted({o.form for o in compiled.plan.overlaps})
            asked = Counter(p.collective for p in compiled.plan.collectives)
            took = time.perf_counter() - begin
            print(f"  {name}: {took:.1f} s, {dict(asked)}, {forms}", flush=True)

    cluster = "dgx-h200"
    add("auto", cluster=cluster)
    add("off", cluster=cluster, overlap="off")
    auto = made["auto"].plan
    if any(o.form.startswith("ring") for o in auto.overlaps):
        add("scattered", plan=replace(auto, overlaps=(), overlap="off"))
    # With few rows every sum is an all-reduce, and the factors are called alike. The embedding whole.
    machine = Cluster.of(cluster).subset(range(ranks))
    reduced = plait.plan(model, (few,), tp=ranks, pp=1, cluster=machine, overlap="off")
    kept = {n: s for n, s in reduced.strategies.items() if "embed" not in n}
    reduced = replace(reduced, program=auto.program, strategies=kept)
    add("reduced", plan=reduced)
    with without_transfers():
        add("floor", plan=reduced)
    return made


def once(capture: Any) -> Any:
    """The same model captures as the same program: once is enough for all rows."""
    known: dict[Any, Any] = {}

    def captured(model: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        key = (id(model), args[0].shape)
        if key not in known:
            known[key] = capture(model, args, kwargs, **options)
        return known[key]

    return captured


def run(tokens: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    ranks = dist.get_world_size()
    model = build(options, ranks, device)
    ids = torch.randint(32, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    made = variants(model, ids, ids[:, :64], set(options.only))
    del model
    rows: dict[str, dict[str, Any]] = {name: {} for name in made}
    with torch.no_grad():
        outs = {name: c(ids).logits.float() for name, c in made.items()}
    base = outs.get("reduced", next(iter(outs.values())))
    for name, out in outs.items():
        rows[name]["error"] = float((out - base).norm() / base.norm())
        rows[name]["finite"] = bool(out.isfinite().all())
    if device.type == "cpu":  # to try the rows themselves
        return {"tokens": tokens, "share": options.share, "rows": rows, "forms": {}}
    graphs = {name: c._first.replay._graph for name, c in made.items()}
    for graph in graphs.values():
        for _ in range(3):
            graph.replay()
    name, graph = next(iter(graphs.items()))
    replays = max(1, round(15 / median(interleaved({name: graph}, 3)[name])))
    for name, times in interleaved(graphs, options.samples, replays).items():
        rows[name]["ms"], rows[name]["p10"], rows[name]["p90"] = spread(times)
    if options.repeat:
        equal = repeated(made["auto"], ids, outs["auto"], options.repeat)
        rows["auto"]["equal_replays"] = equal
    hide(rows)
    plan = made["auto"].plan
    for name, c in made.items():
        rows[name]["predicted_ms"] = c.plan.seconds * 1e3
    forms = {o.region: o.form for o in plan.overlaps}
    return {"tokens": tokens, "share": options.share, "replays": replays, "rows": rows, "forms": forms}


def repeated(compiled: Any, ids: torch.Tensor, want: torch.Tensor, times: int) -> bool:
    """Replays with random delays on each rank give the same bits."""
    chance = torch.Generator().manual_seed(dist.get_rank())
    same = True
    graph, replay = compiled._first.replay._graph, compiled._first.replay
    for turn in range(times):
        if float(torch.rand((), generator=chance)) < 0.2:
            torch.cuda._sleep(int(torch.randint(10**6, (), generator=chance)))
        graph.replay()
        if turn % 50 == 0 or turn == times - 1:
            same = same and bool(torch.equal(replay._results[0].float().view_as(want), want))
    told = torch.tensor(float(same))
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told)


def hide(rows: dict[str, dict[str, Any]]) -> None:
    blocking = [rows[name]["ms"] for name in BLOCKING if name in rows]
    if not blocking or "floor" not in rows:
        return
    best, floor = min(blocking), rows["floor"]["ms"]
    for row in rows.values():
        row["hidden"] = (best - row["ms"]) / (best - floor)
        if "reduced" in rows:
            row["hidden_of_reduced"] = (rows["reduced"]["ms"] - row["ms"]) / (
                rows["reduced"]["ms"] - floor
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 2048, 1024])
    parser.add_argument("--share", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=21)
    parser.add_argument("--repeat", type=int, default=0, help="replays with random delays")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rank, ranks, device = start()
    source.capture = once(source.capture)
    results = []
    for tokens in options.tokens:
        result = run(tokens, options, device)
        results.append(result)
        if not rank:
            print(f"== {tokens} tokens, 1/{options.share}, {ranks} ranks: {result['forms']}")
            for name, row in result["rows"].items():
                items = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
                print(f"  {name:10s} " + "  ".join(items), flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
