"""Sitting: `plait bench` on one rank. One process group, all rows of a size in one interleaved run."""

from __future__ import annotations

import json
import os
import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait import models
from plait.bench import report, shapes
from plait.bench.apart import Answer, Apart
from plait.bench.figures import Timed, figures
from plait.bench.peers import Form, Peers, answering
from plait.bench.report import Run
from plait.bench.rows import Call, Row, Subject, alone, clear, main_output
from plait.cluster import Cluster
from plait.report.tables import show
from plait.runtime.sampler import Sampler, clock

# Variables that change how fast transfers and launches are.
TELLING = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "GLOO_", "NCCL_", "OMP_NUM_THREADS", "TORCH_NCCL_")
# Of outputs against one device's, as a part of their norm: what rounding in another order may do.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class Request:
    """What the user asked of `plait bench`; plain data, sent to every worker."""

    model: models.Resolved | None  # or, in its place, a shape
    shape: str = ""
    layers: int = 4
    share: int = 0  # 1/share of a layer on each rank; 0: a whole layer on all ranks together
    tokens: tuple[int, ...] = (512,)
    chunks: tuple[int, ...] = ()
    without: tuple[str, ...] = ()  # names of rows that are not timed
    batch: int = 1
    train: bool = False
    dtype: str = ""
    warmup: int = 4
    samples: int = 20
    against: bool = False
    peer_seconds: float = 200.0  # for finding the peers' settings
    cluster: str = ""
    json: str = ""
    svg: str = ""


@dataclass(frozen=True)
class Bed:
    """Where it runs."""

    device: torch.device
    ranks: int
    cluster: Cluster
    dtype: torch.dtype

    @classmethod
    def of(cls, request: Request) -> Bed:
        cuda = "nccl" in str(dist.get_backend_config())
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        ranks = dist.get_world_size()
        dtype = getattr(torch, request.dtype or ("bfloat16" if cuda else "float32"))
        cluster = Cluster.of(request.cluster or None, kind=device.type)
        whole = cluster.subset(range(ranks)) if cluster.size >= ranks else cluster
        return cls(device, ranks, whole, dtype)

    def facts(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": torch.cuda.get_device_name() if cuda else platform.machine(),
            "backend": str(dist.get_backend_config()),
            "torch": torch.__version__,
            "ranks": self.ranks,
            "threads": torch.get_num_threads(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "cluster": self.cluster.name,
            "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(TELLING)},
        }


def bench(request: Request) -> None:
    """Every size in turn, each written when it is known; exit code 1 where a row's output is wrong."""
    warnings.filterwarnings("ignore")  # torch's own, about torch's own
    bed = Bed.of(request)
    peers = Peers(bed.device, request.peer_seconds, len(request.tokens)) if request.against else None
    runs: list[Run] = []
    for tokens in request.tokens:
        for run in sit(request, bed, tokens, peers):
            if dist.get_rank() == 0:
                _publish(request, bed, [*runs, run])
        runs.append(run)
    if any(run.wrong for run in runs):
        raise SystemExit(1)


def sit(request: Request, bed: Bed, tokens: int, peers: Peers | None) -> Iterator[Run]:
    """All rows at one size; without the peers first, whose compilation may take all the time there is."""
    begin = time.monotonic()
    call = Call(_example(request, bed, tokens), request.train)
    subject = Subject.of(call, bed.cluster, bed.device)
    single, module = alone(call, bed.cluster, bed.device)
    rows = [single, *subject.rows(request.chunks, request.without)]
    modules: list[nn.Module] = [subject.compiled, subject.plain, module]

    def run() -> Run:
        compiled = time.monotonic() - begin
        timed = list(measure(rows, modules, request, bed))
        facts = {
            "model": request.shape or (request.model.name if request.model else ""),
            "tokens": tokens, "batch": request.batch, "share": f"1/{request.share or bed.ranks}",
            "layers": request.layers, "train": request.train, "samples": request.samples,
            "seconds_to_compile": round(compiled, 1),
            "seconds_to_measure": round(time.monotonic() - begin - compiled, 1),
        }  # fmt: skip
        left_out = list(peers.left_out) if peers is not None else []
        wrong = [
            f"{t.name} at {tokens} tokens: {t.error:.1e} of its norm"
            for t in timed
            if t.error is not None and not t.error <= TOLERANCE[bed.dtype]
        ]
        return Run(_title(facts, bed), facts, figures(timed, bed.ranks), left_out, wrong)

    yield run()
    if peers is not None:
        peers.left_out.clear()

        def opened(form: Form, mode: str, seconds: float) -> Apart:
            return Apart.start(_peer, request, tokens, form, mode, seconds=seconds)

        try:
            rows += peers.rows(opened)
            yield run()
        finally:
            peers.stop()


def _peer(request: Request, tokens: int, form: Form, mode: str) -> Answer:
    bed = Bed.of(request)
    call = Call(_example(request, bed, tokens), request.train)
    return answering(form, mode, bed.device, lambda: _example(request, bed, tokens).model, call)


def measure(
    rows: list[Row], modules: list[nn.Module], request: Request, bed: Bed
) -> Iterator[Timed]:
    """Outputs first, then times; the first row's output is what the others are held to."""

    def fresh() -> None:
        for module in modules:
            clear(module)

    errors: list[float | None] = []
    want: torch.Tensor | None = None
    for row in rows:
        fresh()
        try:
            got = main_output(row.step())
        except Exception as cause:
            raise RuntimeError(f"the row {row.name!r} ended with {type(cause).__name__}: {cause}") from cause
        got = got.to(bed.device)
        if want is None:
            want = got
        finite = bool(got.isfinite().all())
        difference = float((got - want).norm() / want.norm()) if finite else float("inf")
        assert finite or row.kind != "floor", f"{row.name}: data that is not finite"
        errors.append(None if row.kind == "floor" else difference)
    sampler = Sampler(clock(bed.device), request.warmup, request.samples)
    times = sampler.run([row.step for row in rows], fresh)
    for row, error, samples in zip(rows, errors, times, strict=True):
        yield Timed(row.name, row.kind, tuple(samples), row.predicted, error, row.note)


def _example(request: Request, bed: Bed, tokens: int) -> models.Example:
    if request.model is None:
        shape = shapes.named(request.shape).share(request.share or bed.ranks, bed.ranks)
        return shapes.example(shape, request.layers, tokens, request.train, bed.device, bed.dtype)
    found = models.build(request.model, batch=request.batch, length=tokens)
    on = {k: v.to(bed.device) if isinstance(v, torch.Tensor) else v for k, v in found.kwargs.items()}
    return replace(found, kwargs=on)


def _title(facts: dict[str, Any], bed: Bed) -> str:
    what = "forward and backward" if facts["train"] else "forward"
    return (
        f"{facts['model']}, {facts['layers']} layers, {facts['share']} a rank, {facts['tokens']} tokens, "
        f"{what}, {bed.ranks} ranks, {str(bed.dtype).removeprefix('torch.')}, {bed.device.type}"
    )


def _publish(request: Request, bed: Bed, runs: list[Run]) -> None:
    show(report.table(runs[-1]), *report.summary(runs[-1]))
    if request.json:
        data = bed.facts() | {"runs": [run.to_dict() for run in runs]}
        Path(request.json).write_text(json.dumps(data, indent=1) + "\n")
    if request.svg:
        Path(request.svg).write_text(report.svg(runs))
