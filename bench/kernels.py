"""Kernels and transports one by one, in CUDA graphs, the slower rank.

torchrun --nproc-per-node 2 bench/kernels.py --out kernels.json --sections norm oneshot ...

norm       residual + norm, and sum of two + residual + norm, against the bandwidth of long streams, and against
           a kernel that does nothing but read and write as many bytes
attention  cuDNN's and flash attention, there, and there and back
oneshot    all-reduce + residual + norm of few rows, 100 in a chain, against its parts
signals    put and wait there and back, by stream and by kernel
copies     pulls and pushes by the copy engine
reduce     all-reduces of large tensors: two-shot kernel, torch's two-shot, NCCL
matmul     matmuls of a layer by number of rows
row        one row-parallel matmul with its all-reduce, in chunks
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path[:0] = [
    str(Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parents[1] / "src"),
]

from timing import capture, chain, interleaved, start

from plait.runtime.copy_engine import Lane
from plait.runtime.kernels.norm import sum_norm
from plait.runtime.kernels.oneshot import OneShot
from plait.runtime.kernels.twoshot import TwoShot
from plait.runtime.pieces import COPIED, Coming, Ring
from plait.runtime.symmetric import KernelSignals, StreamSignals, Workspace

BF16 = torch.bfloat16
EPS = 1e-5
KIND: Any = "rms_rounded"
H = 8192
STREAM = 1024  # elements of one program of a kernel that only streams
# heads, key/value heads, queries, keys, width of a head
ATTENTIONS = (
    *((8, 1, rows, rows, 128) for rows in (128, 512, 1024, 2048, 4096, 8192)),
    (8, 1, 2048, 2048, 64),
    (32, 8, 2048, 2048, 64),
    (8, 8, 4096, 4096, 256),
    (32, 8, 1024, 1024, 80),
    (8, 1, 1, 4096, 128),
)
Table = dict[str, Any]


def group() -> Any:
    return dist.group.WORLD


def norm(device: torch.device) -> Table:
    table: Table = {}
    a, b = (torch.randn(2**28, device=device).to(BF16) for _ in range(2))
    us = chain(
        lambda i: torch.neg(a, out=b), 4
    )  # copy_ would go by the copy engine, which is slower
    bandwidth = 4 * a.numel() / us * 1e-3
    table["read and write GB/s"] = bandwidth
    a = b = torch.empty(0)
    weight = torch.ones(H, device=device, dtype=BF16)
    for rows in (1, 128, 512, 1024, 4096, 8192):
        sets = max(1, min(6, 2**30 // (rows * H * 2 * 5)))
        made = [
            [torch.randn(rows, H, device=device).to(BF16) for _ in range(5)] for _ in range(sets)
        ]
        for sources in (1, 2):

            def step(i: int, n: int = sources, m: Any = made) -> None:
                x, y, old, residual, out = m[i % len(m)]
                sum_norm(
                    [x, y][:n], old, weight, eps=EPS, kind=KIND, residual_out=residual, rows_out=out
                )

            def streamed(i: int, n: int = sources, m: Any = made) -> None:
                x, y, old, residual, out = m[i % len(m)]
                grid = (out.numel() // STREAM,)
                stream_kernel[grid]((x, y)[:n], old, residual, out, STREAM, num_warps=4)

            us, plain = chain(step, 24), chain(streamed, 24)
            floor = (sources + 3) * rows * H * 2 / bandwidth * 1e-3
            table[f"{rows} rows, {sources} sources"] = {
                "us": us,
                "floor": floor,
                "share": floor / us,
                "streamed": plain,
                "share of streamed": plain / us,
            }
    return table


@triton.jit
def stream_kernel(sources, old, first, second, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads what a sum with its residual reads, and writes as much as it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(old + at)
    for i in tl.static_range(len(sources)):
        total += tl.load(sources[i] + at)
    tl.store(first + at, total)
    tl.store(second + at, -total)


def attention(device: torch.device) -> Table:
    table: Table = {}
    for heads, groups, rows, keys, width in ATTENTIONS:
        shapes = ((rows, heads), (keys, groups), (keys, groups))
        q, k, v = (torch.randn(1, n, h, width, device=device).to(BF16).transpose(1, 2) for n, h in shapes)
        for train in (False, True) if rows > 1 else (False,):
            leaves = [x.detach().requires_grad_(train) for x in (q, k, v)]
            down = torch.randn_like(q)

            def step(i: int, given: Any = leaves, down: Tensor = down, train: bool = train) -> None:
                square = given[0].shape[2] == given[1].shape[2]
                out = F.scaled_dot_product_attention(*given, is_causal=square, enable_gqa=True)
                if train:
                    torch.autograd.grad(out, given, down)

            row = {}
            for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
                with sdpa_kernel(backend):
                    row[name] = chain(step, 4)
            what = "there and back" if train else "there"
            label = f"{heads} heads, {groups} k|v, {rows} x {keys}, {width} wide, {what}"
            table[label] = row | {"flash / cudnn": row["flash"] / row["cudnn"]}
    return table


def oneshot(device: torch.device) -> Table:
    import torch.distributed._symmetric_memory as symm_mem

    table: Table = {}
    workspace = Workspace.on_group(64 << 20, group(), device)
    shot = OneShot(workspace, 128, H, BF16)
    workspace.ready()
    weight = torch.ones(H, device=device, dtype=BF16)
    if dist.get_backend() != "gloo":
        shared = symm_mem.empty((128, H), dtype=BF16, device=device)
        symm_mem.rendezvous(shared, group())
        shared.normal_()
    for rows in (1, 4, 16, 32, 64, 128):
        x, residual, r2, out = (torch.randn(rows, H, device=device).to(BF16) for _ in range(4))

        def fused(
            i: int,
            early: bool = False,
            x: Tensor = x,
            residual: Tensor = residual,
            r2: Tensor = r2,
            out: Tensor = out,
        ) -> None:
            shot.all_reduce_norm(
                x, residual, weight, eps=EPS, kind=KIND, residual_out=r2, rows_out=out, early=early
            )

        def alone(
            i: int, x: Tensor = x, residual: Tensor = residual, r2: Tensor = r2, out: Tensor = out
        ) -> None:
            sum_norm([x], residual, weight, eps=EPS, kind=KIND, residual_out=r2, rows_out=out)

        row = {
            "fused": chain(fused, 100),
            "fused early": chain(lambda i, f=fused: f(i, True), 100),
            "sum only": chain(lambda i, x=x, o=out: shot.all_reduce_norm(x, rows_out=o), 100),
            "norm alone": chain(alone, 100),
        }
        if dist.get_backend() != "gloo":
            part = shared[:rows]

            def torch_parts(
                i: int,
                part: Tensor = part,
                residual: Tensor = residual,
                r2: Tensor = r2,
                out: Tensor = out,
            ) -> None:
                y = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", group().group_name)
                sum_norm([y], residual, weight, eps=EPS, kind=KIND, residual_out=r2, rows_out=out)

            row["torch one-shot + norm"] = chain(torch_parts, 100)
        table[f"{rows} rows"] = row
    return table


def signals(device: torch.device) -> Table:
    table: Table = {}
    workspace = Workspace.on_group(4 << 20, group(), device)
    data = workspace.buffer((H,), BF16, fill=0)
    channels = {
        n: workspace.channel(signals=s())
        for n, s in (("stream", StreamSignals), ("kernel", KernelSignals))
    }
    there = workspace.channel(signals=StreamSignals())
    workspace.ready()
    peer = (workspace.rank + 1) % workspace.ranks
    into = torch.zeros(H, device=device, dtype=BF16)
    for name, channel in channels.items():
        back = channel if name == "kernel" else there

        def meet(i: int, one: Any = channel, two: Any = back) -> None:
            c = (one, two)[i % 2]  # two channels in turn: the rule of reuse
            c.put()
            c.wait()

        def pull(i: int, m: Any = meet) -> None:
            m(i)
            into.copy_(data.on[peer])

        table[f"put + wait by {name}"] = chain(meet, 100)
        table[f"put + wait + pull of 16 KiB by {name}"] = chain(pull, 100)
    table["pull of 16 KiB"] = chain(lambda i: into.copy_(data.on[peer]), 100)
    table["kernel alone (norm of a row)"] = chain(
        lambda i: sum_norm(
            [into[None]], None, into, eps=EPS, kind=KIND, residual_out=None, rows_out=into[None]
        ),
        100,
    )
    return table


def copies(device: torch.device) -> Table:
    table: Table = {}
    size = 64 << 20
    workspace = Workspace.on_group(size + 4096, group(), device)
    data = workspace.buffer((size,), torch.uint8, fill=1)
    workspace.ready()
    local = torch.ones(size, dtype=torch.uint8, device=device)
    peer = data.on[(workspace.rank + 1) % workspace.ranks]
    for mib in (0.25, 1, 4, 16, 64):
        n = int(mib * 2**20)
        row = {}
        for name, step in (
            ("pull", lambda i, n=n: local[:n].copy_(peer[:n])),
            ("push", lambda i, n=n: peer[:n].copy_(local[:n])),
        ):
            us = chain(step, 20)
            row |= {f"{name} us": us, f"{name} GB/s": n / us * 1e-3}
        table[f"{mib} MiB"] = row
    return table


def reduce(device: torch.device) -> Table:
    import torch.distributed._symmetric_memory as symm_mem

    table: Table = {}
    for rows in (128, 512, 2048, 8192):
        workspace = Workspace.on_group(rows * H * 2 + (8 << 20), group(), device)
        partials = workspace.buffer((rows, H), BF16, fill=0)
        shots = {p: TwoShot(workspace, p) for p in (16, 32, 64, 128)}
        workspace.ready()
        length = 10
        row = {
            f"two-shot, {p} programs": chain(lambda i, s=s: s.all_reduce(partials), length)
            for p, s in shots.items()
        }
        if dist.get_backend() != "gloo":
            y = symm_mem.empty((rows, H), dtype=BF16, device=device)
            symm_mem.rendezvous(y, group())
            y.zero_()
            row["torch two-shot"] = chain(
                lambda i, y=y: torch.ops.symm_mem.two_shot_all_reduce_(
                    y, "sum", group().group_name
                ),
                length,
            )
            row["nccl"] = chain(lambda i, y=y: dist.all_reduce(y), length)
        table[f"{rows} rows ({rows * H * 2 >> 20} MiB)"] = row
    return table


def matmul(device: torch.device) -> Table:
    table: Table = {}
    shapes = {"qkv": (1280, H), "o": (H, 1024), "gate_up": (7168, H), "down": (H, 3584)}
    for name, (n, k) in shapes.items():
        weights = [torch.randn(n, k, device=device).to(BF16) / k**0.5 for _ in range(4)]
        row = {}
        for rows in (256, 512, 1024, 2048, 4096, 8192):
            x, y = (
                torch.randn(rows, k, device=device).to(BF16),
                torch.empty(rows, n, device=device, dtype=BF16),
            )
            us = chain(
                lambda i, x=x, y=y, w=weights: torch.mm(x, w[i % 4].t(), out=y), 12, samples=7
            )
            row[rows] = {"us": us, "TFLOP/s": 2 * rows * n * k / us * 1e-6}
        table[name] = row
    return table


def row(device: torch.device) -> Table:
    """Rows 8192, columns 8192, K 16384 a rank; chunk bounds in blocks of 128 rows."""
    rows, inner, table, alive = 8192, 16384, {}, []
    x = torch.randn(rows, inner, device=device).to(BF16)
    weight = torch.randn(H, inner, device=device).to(BF16) / 128
    y = torch.empty(rows, H, device=device, dtype=BF16)
    graphs = {"matmul": capture(lambda: torch.mm(x, weight.t(), out=y))}
    if dist.get_backend() != "gloo":
        graphs["nccl"] = capture(lambda: (torch.mm(x, weight.t(), out=y), dist.all_reduce(y)))
    torch.mm(x, weight.t(), out=y)
    total = y.float()
    dist.all_reduce(total)
    total = total.to(BF16)
    for blocks in (
        [32, 32],
        [16] * 4,
        [33, 31],
        [33, 16, 11, 4],
        [33, 16, 8, 7],
        [33, 16, 8, 4, 3],
    ):
        for beside in (False, True):
            chunked = Chunked(x, weight, blocks, device, beside)
            alive.append(chunked)  # a graph does not keep the memory that it uses
            name = "-".join(map(str, blocks)) + (", sums beside" if beside else "")
            graphs[name] = capture(chunked)
            graphs[name].replay()
            torch.cuda.synchronize()
            out = torch.cat([r.rows.buffer.local for r in chunked.rings])
            table[f"equal {name}"] = float((out == total).float().mean())
    for name, times in interleaved(graphs, 15, 2).items():
        table[name] = {"us": median(times) * 1e3}
    alone = table["matmul"]["us"]
    for value in table.values():
        if isinstance(value, dict):
            value["of matmul"] = value["us"] / alone
    return table


class Chunked:
    """matmul of chunk c, then the sum of chunk c - 1 while chunk c's terms are pulled."""

    def __init__(
        self, x: Tensor, weight: Tensor, blocks: list[int], device: torch.device, beside: bool
    ) -> None:
        ranks = dist.get_world_size()
        sizes = [b * 128 for b in blocks]
        bounds = [tuple(s * r // ranks for r in range(ranks + 1)) for s in sizes]
        nbytes = sum(Ring.nbytes(b, H, BF16) for b in bounds) + 65536
        self.workspace = Workspace.on_group(nbytes, group(), device)
        self.rings = [Ring.of(self.workspace, b, H, BF16) for b in bounds]
        self.workspace.ready()
        self.chunks, self.weight = x.split(sizes), weight
        self.sums = Lane.beside(device) if beside else None

    def __call__(self) -> None:
        compute = Lane.current(self.weight.device)
        sums = self.sums or compute
        if self.sums is not None:
            sums.after(compute.mark())
        for ring in self.rings:
            ring.open(compute)
        pending: list[tuple[Ring, Coming]] = []
        gathered: list[tuple[Ring, Coming]] = []
        for ring, chunk in zip(self.rings, self.chunks, strict=True):
            torch.mm(chunk, self.weight.t(), out=ring.terms.partials.buffer.local)
            for rank in ring.rows.others:
                ring.send(compute, rank, 0, *ring.copied(rank, COPIED))
            pending.append((ring, ring.collect(COPIED)))
            if len(pending) > 1 or self.sums is not None:
                gathered.append(self.finish(*pending.pop(0), sums))
        gathered += [self.finish(*item, sums) for item in pending]
        if self.sums is not None:
            compute.after(sums.mark())
        for ring, coming in gathered:
            ring.near.drain(list(coming.values()))
            ring.close(compute)

    def finish(self, ring: Ring, coming: Coming, lane: Lane) -> tuple[Ring, Coming]:
        with lane():
            ring.near.drain(list(coming.values()))
            sum_norm(
                ring.terms.sources(),
                None,
                None,
                eps=0.0,
                kind="none",
                residual_out=None,
                rows_out=ring.rows.own,
            )
        return ring, ring.hand_on(lane, COPIED)


SECTIONS = {f.__name__: f for f in (norm, attention, oneshot, signals, copies, reduce, matmul, row)}


def show(table: Table, indent: int = 2) -> None:
    for name, value in table.items():
        if isinstance(value, dict) and all(isinstance(v, float) for v in value.values()):
            print(
                " " * indent
                + f"{name!s:34s} "
                + "  ".join(f"{k} {v:.4g}" for k, v in value.items())
            )
        elif isinstance(value, dict):
            print(" " * indent + str(name))
            show(value, indent + 2)
        else:
            print(" " * indent + f"{name!s:34s} {value:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rank, _, device = start()
    results = {}
    for name in options.sections:
        begin = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin[0].record()
        results[name] = SECTIONS[name](device)
        begin[1].record()
        torch.cuda.synchronize()
        if not rank:
            print(f"== {name} ({begin[0].elapsed_time(begin[1]) / 1000:.1f} s)")
            show(results[name])
            sys.stdout.flush()
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
