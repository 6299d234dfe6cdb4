"""One stack of layers on N ranks, scheduled in several ways, timed in one interleaved run.

    torchrun --nproc-per-node 2 bench/rowshard.py --tokens 8192 2048 1024 --out results.json

    nccl, two_shot      blocking all-reduces in one CUDA graph
    beside              residual stream cut by rows; each transfer beside the matmul on the other rows
    direct_a_b          the same; around attention, share a of the gathered and b of the scattered rows
                        stored and read by the kernel that sums and norms
    parts               two parts of the sequence in flight, residual cut by rows within each
    exchange            sum, norm and both transfers in one kernel on few multiprocessors
    *_floor             the same program, its transfers left out, data finite and random

hidden = (nccl - t) / (nccl - nccl_floor), also against the best blocking row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path[:0] = [
    str(Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parents[1] / "src"),
]

from stack import EPS, KIND, Layer, Shape, attend, layers_of, probe_attention, rope, rotary, swiglu
from timing import capture, interleaved, spread, start

from plait.runtime.copy_engine import Lane, Pulled
from plait.runtime.kernels.exchange import Exchange
from plait.runtime.kernels.norm import sum_norm
from plait.runtime.pieces import Linear, Ring, finish, gather_matmul, matmul_scatter
from plait.runtime.symmetric import Workspace


@dataclass
class Model:
    shape: Shape
    layers: list[Layer]
    last_norm: Tensor
    table: Tensor

    @property
    def blocks(self) -> range:
        """Attention and feed-forward in turn."""
        return range(2 * self.shape.layers)

    def norm_after(self, block: int) -> Tensor:
        layer = self.layers[block // 2]
        if block % 2 == 0:
            return layer.norm2
        return self.last_norm if block == self.blocks[-1] else self.layers[block // 2 + 1].norm

    def first(self, block: int) -> Tensor:
        layer = self.layers[block // 2]
        return layer.gate_up if block % 2 else layer.qkv

    def last(self, block: int) -> Tensor:
        layer = self.layers[block // 2]
        return layer.down if block % 2 else layer.o


class Work:
    """Intermediates of the rows lo..hi of a sequence; qkv rows of every layer are shared by all parts."""

    def __init__(self, model: Model, lo: int, hi: int, qkv: list[Tensor]) -> None:
        shape, like = model.shape, qkv[0]
        self.model, self.lo, self.hi, self.qkv = model, lo, hi, qkv
        self.gate_up = like.new_zeros(hi - lo, 2 * shape.ffn)
        self.act = like.new_zeros(hi - lo, shape.ffn)

    def into(self, block: int) -> Tensor:
        return self.gate_up if block % 2 else self.qkv[block // 2][self.lo : self.hi]

    def rotate(self, block: int) -> None:
        shape = self.model.shape
        rope(self.into(block), self.model.table, self.lo, shape.q_heads + shape.kv_heads)

    def middle(self, block: int) -> Tensor:
        """What stands between a block's two matmuls; queries and keys are rotated already."""
        if block % 2:
            swiglu(self.gate_up, self.act)
            return self.act
        return attend(self.qkv[block // 2], self.model.shape, self.lo, self.hi)


def qkv_rows(model: Model) -> list[Tensor]:
    shape = model.shape
    return [
        model.table.new_zeros(shape.tokens, shape.qkv, dtype=torch.bfloat16) for _ in model.layers
    ]


class Blocking:
    def __init__(self, model: Model, x: Tensor, reduce: Callable[[Tensor], Any], y: Tensor) -> None:
        self.model, self.x, self.reduce, self.y = model, x, reduce, y
        self.work = Work(model, 0, x.shape[0], qkv_rows(model))
        self.residual, self.out = torch.empty_like(x), torch.empty_like(x)

    def __call__(self) -> None:
        model, work = self.model, self.work
        self.residual.copy_(self.x)
        norm([self.x], None, model.layers[0].norm, None, self.out)
        for block in model.blocks:
            torch.mm(self.out, model.first(block).t(), out=work.into(block))
            if block % 2 == 0:
                work.rotate(block)
            torch.mm(work.middle(block), model.last(block).t(), out=self.y)
            self.reduce(self.y)
            norm([self.y], self.residual, model.norm_after(block), self.residual, self.out)


Shares = tuple[
    float, float, float, float
]  # direct: gather and scatter of attention, of feed-forward


@dataclass
class Part:
    """Some rows of the sequence, their residual cut among the ranks."""

    work: Work
    ring: Ring
    compute: Lane
    transfers: bool
    x: Tensor
    exchange: Exchange | None = None
    shares: Shares = (0.0, 0.0, 0.0, 0.0)
    residual: Tensor = field(init=False)
    pulled: Pulled = field(default_factory=lambda: Pulled({}, {}))
    by_flag: bool = False

    def __post_init__(self) -> None:
        self.residual = torch.empty_like(self.ring.rows.own)

    def begin(self) -> None:
        """The first norm is on all rows: every rank has the input."""
        bounds, rank = self.ring.rows.bounds, self.ring.rows.rank
        if self.transfers and self.exchange is None:
            self.ring.open(self.compute)
        with self.compute():
            norm([self.x], None, self.work.model.layers[0].norm, None, self.ring.rows.buffer.local)
            self.residual.copy_(self.x[bounds[rank] : bounds[rank + 1]])
        self.pulled = Pulled({}, {})

    def end(self) -> None:
        self.compute.after(*self.pulled.events.values())
        if self.transfers and self.exchange is None:
            self.ring.close(self.compute)

    def gathers(self, block: int) -> float:
        """The direct share of the gather before `block`; the last gather hides behind nothing."""
        if not block:
            return 0.0
        if block > self.work.model.blocks[-1]:
            return 1.0 if any(self.shares) else 0.0
        return self.shares[2 * (block % 2)]

    def scatters(self, block: int) -> float:
        return self.shares[2 * (block % 2) + 1]

    def first(self, block: int, pieces: bool = False) -> None:
        model, work = self.work.model, self.work
        with self.compute():
            if pieces and block:
                gather_matmul(
                    self.ring,
                    [Linear(model.first(block), work.into(block))],
                    self.compute,
                    self.pulled,
                    self.gathers(block),
                )
            else:
                self.compute.after(*self.pulled.events.values())
                torch.mm(self.ring.rows.buffer.local, model.first(block).t(), out=work.into(block))
            if block % 2 == 0:
                work.rotate(block)

    def rest(self, block: int, pieces: bool = False) -> None:
        ring = self.ring
        with self.compute():
            x, weight = self.work.middle(block), self.work.model.last(block)
            if pieces:
                self.pulled = matmul_scatter(
                    ring, x, weight, self.compute, self.scatters(block), by_flag=self.by_flag
                )
            else:
                torch.mm(x, weight.t(), out=ring.terms.partials.buffer.local)
                if self.transfers and self.exchange is None:
                    ring.put(self.compute, ring.collected)
                    self.pulled = ring.collect(by_flag=self.by_flag)

    def finish(self, block: int) -> None:
        weight, ring = self.work.model.norm_after(block), self.ring
        with self.compute():
            if self.exchange is not None:
                self.exchange.all_reduce_norm(
                    ring.terms.partials,
                    self.residual,
                    weight,
                    eps=EPS,
                    kind=KIND,
                    rows_out=ring.rows,
                )
                self.pulled = Pulled({}, {})
            elif self.transfers:
                self.pulled = finish(
                    ring,
                    self.residual,
                    weight,
                    None,
                    self.compute,
                    self.pulled,
                    eps=EPS,
                    kind=KIND,
                    read=self.scatters(block),
                    push=self.gathers(block + 1),
                    by_flag=self.by_flag and block < self.work.model.blocks[-1],
                )
            else:
                norm(ring.terms.sources(), self.residual, weight, self.residual, ring.rows.own)


class Sharded:
    """`cuts` are the parts' bounds; `streams` compute streams carry the parts in turn."""

    def __init__(
        self,
        model: Model,
        x: Tensor,
        workspace: Workspace,
        cuts: list[int],
        *,
        streams: int = 1,
        transfers: bool = True,
        programs: int = 0,
        shares: Shares = (0.0, 0.0, 0.0, 0.0),
        by_flag: bool = True,
    ) -> None:
        self.model, self.workspace = model, workspace
        self.pieces = transfers and not programs
        qkv, ranks, device = qkv_rows(model), workspace.ranks, x.device
        self.lanes = [Lane.beside(device, first=False) for _ in range(streams)]
        self.parts = []
        for i, (lo, hi) in enumerate(zip(cuts, cuts[1:], strict=False)):
            bounds = [(hi - lo) * r // ranks for r in range(ranks + 1)]
            ring = Ring.of(workspace, bounds, model.shape.hidden, x.dtype)
            work, lane = Work(model, lo, hi, qkv), self.lanes[i % streams]
            part = Part(work, ring, lane, transfers, x[lo:hi], shares=shares, by_flag=by_flag)
            part.exchange = Exchange(workspace, programs) if programs else None
            self.parts.append(part)

    def randomise(self) -> None:
        """What would have been pulled: finite, random, of the size that it has in a run."""
        for part in self.parts:
            part.ring.terms.staged.normal_()
            part.ring.rows.buffer.local.normal_()

    @property
    def out(self) -> Tensor:
        return torch.cat([part.ring.rows.buffer.local for part in self.parts])

    def __call__(self) -> None:
        main = Lane.current(self.parts[0].x.device)
        lanes = [*self.lanes, *(lane for p in self.parts for lane in p.ring.lanes())]
        for lane in lanes:
            lane.after(main.mark())
        for part in self.parts:
            part.begin()
        self.alone() if len(self.parts) == 1 else self.in_turn()
        for part in self.parts:
            part.end()
        for lane in lanes:
            main.after(lane.mark())

    def alone(self) -> None:
        (part,) = self.parts
        for block in self.model.blocks:
            part.first(block, self.pieces)
            part.rest(block, self.pieces)
            part.finish(block)

    def in_turn(self) -> None:
        """a: first | b: finish of the block before | a: rest | b: first | a: finish | b: rest ..."""
        a, b = self.parts
        last = self.model.blocks[-1]
        for block in self.model.blocks:
            a.first(block)
            keys = a.compute.mark()
            if block:
                b.finish(block - 1)
            a.rest(block)
            b.first(block)
            if block % 2 == 0:
                b.compute.after(keys)
            a.finish(block)
            b.rest(block, pieces=self.pieces and block == last)
        b.finish(last)


def norm(
    sources: list[Tensor], residual: Tensor | None, weight: Tensor, into: Tensor | None, out: Tensor
) -> None:
    sum_norm(sources, residual, weight, eps=EPS, kind=KIND, residual_out=into, rows_out=out)


def by_gloo(y: Tensor) -> None:
    total = y.float()
    dist.all_reduce(total)
    y.copy_(total)


def variants(
    model: Model, x: Tensor, device: torch.device, shared: bool, only: set[str]
) -> dict[str, Any]:
    import torch.distributed._symmetric_memory as symm_mem

    group, ranks, t = dist.group.WORLD, dist.get_world_size(), model.shape.tokens
    assert group is not None
    ring = Ring.nbytes(t, model.shape.hidden, x.dtype, ranks) + 262144
    half, result = [0, t // 2, t], {}

    def sharded(name: str, cuts: list[int], **options: Any) -> None:
        if only and name not in only:
            return
        workspace = Workspace.on_group(ring * (len(cuts) - 1), group, device)
        run = Sharded(model, x, workspace, cuts, **options)
        workspace.ready()
        if not options.get("transfers", True):
            run.randomise()
        result[name] = run

    def blocking(name: str, reduce: Callable[[Tensor], Any], y: Tensor) -> None:
        if not only or name in only:
            result[name] = Blocking(model, x, reduce, y)

    blocking("nccl", by_gloo if shared else dist.all_reduce, torch.empty_like(x))
    if not shared:
        y = symm_mem.empty(x.shape, dtype=x.dtype, device=device)
        symm_mem.rendezvous(y, group)
        two_shot = torch.ops.symm_mem.two_shot_all_reduce_
        blocking("two_shot", lambda y: two_shot(y, "sum", group.group_name), y)
    blocking("nccl_floor", lambda y: None, torch.empty_like(x))
    sharded("beside", [0, t])
    sharded("beside_by_event", [0, t], by_flag=False)
    for a, b in ((1.0, 1.0), (1.0, 0.25), (0.25, 1.0), (0.25, 0.25), (0.5, 0.25)):
        sharded(f"direct_{a}_{b}", [0, t], shares=(a, b, 0.0, 0.0))
    sharded("direct_1.0_1.0_by_event", [0, t], shares=(1.0, 1.0, 0.0, 0.0), by_flag=False)
    sharded("row_floor", [0, t], transfers=False)
    sharded("parts_2s", half, streams=2, by_flag=False)
    sharded("parts_2s_floor", half, streams=2, transfers=False)
    sharded("exchange", [0, t], programs=128)
    return result


def run(
    tokens: int,
    share: int,
    layers: int,
    samples: int,
    only: set[str],
    device: torch.device,
    shared: bool,
    trace: Path | None,
) -> dict[str, Any]:
    shape = Shape.llama_70b(tokens, share, layers)
    weights, last = layers_of(shape, device, dist.get_rank())
    model = Model(shape, weights, last, rotary(tokens, shape.dim, device))
    common = torch.Generator(device).manual_seed(7)
    x = torch.randn(tokens, shape.hidden, generator=common, device=device).to(torch.bfloat16)
    made = variants(model, x, device, shared, only)
    reference, rows, graphs = None, {}, {}
    for name, built in made.items():
        if shared and name == "nccl":  # gloo cannot be captured
            built()
        else:
            graphs[name] = capture(built)
            graphs[name].replay()
        torch.cuda.synchronize()
        if name.endswith("floor"):
            rows[name] = {"finite": bool(built.out.isfinite().all())}
            continue
        out = built.out.float()
        reference = out if reference is None else reference
        differ = float((out - reference).norm() / reference.norm())
        rows[name] = {"error": differ, "equal": float((out == reference).float().mean())}
    report(f"built {tokens}", rows)
    if shared:
        return {"rows": rows}
    for graph in graphs.values():
        for _ in range(3):
            graph.replay()
    first = interleaved({n: graphs[n] for n in list(graphs)[:1]}, 3)
    replays = max(1, round(15 / median(next(iter(first.values())))))
    for name, times in interleaved(graphs, samples, replays).items():
        middle, low, high = spread(times)
        rows[name] |= {"ms": middle, "p10": low, "p90": high}
    hide(rows)
    if trace is not None and tokens == 2048:
        timelines({n: graphs[n] for n in TRACED if n in graphs}, trace, tokens)
    return {"tokens": tokens, "share": share, "layers": layers, "replays": replays, "rows": rows}


TRACED = ("nccl_floor", "beside", "direct_1.0_1.0", "direct_0.25_0.25")


def timelines(graphs: dict[str, torch.cuda.CUDAGraph], folder: Path, tokens: int) -> None:
    """One line a kernel or copy of the last of three replays: start, duration, stream, name."""
    lines = []
    for name, graph in graphs.items():
        torch.cuda.synchronize()
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
        path = folder / f"raw-{dist.get_rank()}.json"
        profiler.export_chrome_trace(str(path))
        events = [
            e
            for e in json.loads(path.read_text())["traceEvents"]
            if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
        path.unlink()
        events.sort(key=lambda e: e["ts"])
        events = events[len(events) * 2 // 3 :]
        lines.append(f"== {name}")
        for e in events:
            at = e["ts"] - events[0]["ts"]
            lines.append(f"{at:9.1f} {e['dur']:7.1f} {e['args'].get('stream')} {e['name'][:48]}")
    (folder / f"timeline-{tokens}-{dist.get_rank()}.txt").write_text("\n".join(lines))


def hide(rows: dict[str, dict[str, Any]]) -> None:
    if "nccl" not in rows or "nccl_floor" not in rows:
        return
    floor, nccl = rows["nccl_floor"]["ms"], rows["nccl"]["ms"]
    best = min(rows[name]["ms"] for name in ("nccl", "two_shot") if name in rows)
    for row in rows.values():
        row["hidden"] = (nccl - row["ms"]) / (nccl - floor)
        row["hidden_of_best"] = (best - row["ms"]) / (best - floor)


def report(title: str, rows: dict[str, dict[str, Any]]) -> None:
    if dist.get_rank():
        return
    print(f"== {title}", flush=True)
    for name, row in rows.items():
        items = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(f"  {name:26s} " + "  ".join(items), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 2048, 1024])
    parser.add_argument("--share", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=21)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path, help="folder for a timeline of each graph")
    options = parser.parse_args()
    rank, ranks, device = start()
    shared = torch.cuda.device_count() < ranks
    found = probe_attention(Shape.llama_70b(512, options.share), device)
    if not rank:
        print(found, flush=True)
    results = []
    for tokens in options.tokens:
        result = run(
            tokens,
            options.share,
            options.layers,
            options.samples,
            set(options.only),
            device,
            shared,
            options.trace,
        )
        report(f"{tokens} tokens, 1/{options.share}, {ranks} ranks", result["rows"])
        results.append(result)
        if options.out and not rank:
            options.out.write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
