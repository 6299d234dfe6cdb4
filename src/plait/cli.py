"""The command line: one function per command.

    plait run smollm2 --nproc 2 --prompt "What is the capital of France?"
    plait plan ./llama --cluster dgx-h100 --tp 8
    plait explain ./llama --cluster dgx-h100 --tp 8
    plait verify package.module:function --nproc 2
    plait bench --shape llama-70b --layers 4 --tokens 8192 2048 --share 1/8 --against torch
    plait rules
    plait collectives --nproc 4 --size 64MiB
    plait calibrate

Imports are inside the commands, so that none waits for what another needs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from plait.plan.plan import Plan

_ABOUT = "Splits an ordinary PyTorch model over many devices."

app = typer.Typer(add_completion=False, no_args_is_help=True, help=_ABOUT)
collectives_app = typer.Typer(invoke_without_command=True)
app.add_typer(collectives_app, name="collectives")

Model = Annotated[
    str,
    typer.Argument(
        help="a folder, a GGUF file, a hub id, module:function, or smollm2", metavar="MODEL"
    ),
]
Nproc = Annotated[int, typer.Option(help="local processes, one for each rank", min=1, max=512)]
Pp = Annotated[int, typer.Option(help="stages of the pipeline; tensor parallelism takes the rest", min=1)]
Replicas = Annotated[int, typer.Option("--dp", help="replicas, each with a batch of its own", min=1)]
Algorithm = Annotated[str, typer.Option(help="of every collective: auto, native, ring, tree ...")]
Cluster = Annotated[str, typer.Option(help="a preset, for example dgx-h100 or dgx-h100[2x8]")]
Tp = Annotated[str, typer.Option(help="ranks of tensor parallelism, or auto")]
Stages = Annotated[str, typer.Option("--pp", help="stages of a pipeline, or auto")]
Dp = Annotated[str, typer.Option(help="replicas, or auto")]
Batch = Annotated[int, typer.Option(help="rows of the example input; a function has its own", min=1)]
Length = Annotated[int, typer.Option(help="tokens of the example input; a function has its own", min=1)]
Dtype = Annotated[str, typer.Option(help="of the weights: float32, bfloat16 ...")]
Training = Annotated[bool, typer.Option("--training", help="with gradients")]


@app.command()
def run(
    model: Model,
    nproc: Nproc = 2,
    prompt: Annotated[str | None, typer.Option(help="ask a language model")] = None,
    max_tokens: Annotated[int, typer.Option(help="of the answer, at most", min=1)] = 64,
    pp: Pp = 1,
    dp: Replicas = 1,
    algorithm: Algorithm = "auto",
) -> None:
    """Split MODEL over local processes, answer a prompt or call it; compare with one process."""
    from plait import generate, models
    from plait.asked import check_processes
    from plait.runtime.processes import launch

    check_processes(nproc, pp, dp, algorithm)
    found = models.resolve(model, say=_say)
    if prompt is not None:
        models.tokenizer(found)
    launch(generate.run, nproc, generate.Request(found, prompt, max_tokens, algorithm, pp, dp))


@app.command()
def plan(
    model: Model,
    cluster: Cluster,
    tp: Tp = "auto",
    pp: Stages = "auto",
    dp: Dp = "1",
    batch: Batch = 1,
    length: Length = 4096,
    training: Training = False,
    objective: Annotated[str, typer.Option(help="latency of a call, or throughput")] = "latency",
    micro_batches: Annotated[str, typer.Option(help="of a pipeline, or auto")] = "auto",
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved ... or auto")] = "auto",
    recompute: Annotated[str, typer.Option(help="activations: off, full or auto")] = "auto",
    outputs: Annotated[str, typer.Option(help="whole on all ranks, or the last stage's")] = "all",
    algorithm: Algorithm = "auto",
    dtype: Dtype = "bfloat16",
    save: Annotated[Path | None, typer.Option(help="write the plan as JSON")] = None,
) -> None:
    """Plan MODEL for a described machine: no processes, no devices and no weights.

    What is auto is chosen together; the front-runners stand side by side.
    """
    from plait.asked import check_file, write_file
    from plait.report import tables

    check_file("--save", save)
    options = {
        "training": training,
        "objective": objective,
        "micro_batches": _number("--micro-batches", micro_batches, "a number"),
        "schedule": schedule,
        "recompute": recompute,
        "outputs": outputs,
        "algorithm": algorithm,
    }
    made = _planned(model, cluster, (tp, pp, dp), batch, length, dtype, options)
    parts = [tables.plan_table(made, f"{model} on {made.machine}")]
    if made.choice is not None and len(made.choice.front) > 1:
        parts.append(tables.choice_table(made.choice))
    tables.show(*parts, *tables.predictions(made))
    if save is not None:
        write_file("--save", save, made.to_json())


@app.command()
def explain(
    model: Model,
    cluster: Cluster,
    tp: Tp = "auto",
    pp: Stages = "auto",
    dp: Dp = "1",
    batch: Batch = 1,
    length: Length = 4096,
    training: Training = False,
    algorithm: Algorithm = "auto",
    dtype: Dtype = "bfloat16",
) -> None:
    """Every split, every collective and what stays whole, with the reasons, name by name."""
    from plait.report.explain import explain as words

    options = {"training": training, "algorithm": algorithm}
    print(words(_planned(model, cluster, (tp, pp, dp), batch, length, dtype, options)))


@app.command()
def verify(
    model: Model,
    nproc: Nproc = 2,
    inference: Annotated[bool, typer.Option("--inference", help="outputs alone")] = False,
    batch: Batch = 2,
    length: Length = 13,
    pp: Pp = 1,
    dp: Replicas = 1,
    algorithm: Algorithm = "auto",
) -> None:
    """Compare outputs and gradients with the unsharded model, in float32; exit code 1 where any differs."""
    from plait import models
    from plait.asked import check_processes
    from plait.runtime.processes import launch
    from plait.verify import Request
    from plait.verify import verify as work

    check_processes(nproc, pp, dp, algorithm)
    found = models.resolve(model, say=_say)
    launch(work, nproc, Request(found, not inference, batch, length, algorithm, pp, dp))


@app.command()
def bench(
    model: Annotated[str, typer.Argument(help="as for `run`; or give --shape", metavar="MODEL")] = "",
    shape: Annotated[str, typer.Option(help="layers of these widths: llama-70b, tiny ...")] = "",
    layers: Annotated[int, typer.Option(help="of the shape", min=1)] = 4,
    tokens: Annotated[list[int] | None, typer.Option(help="of the call; several: a run each", min=1)] = None,
    share: Annotated[str, typer.Option(help="of a layer on each rank: 1/8; else all on all")] = "",
    chunks: Annotated[list[int] | None, typer.Option(help="rows in so many chunks each", min=1)] = None,
    without: Annotated[list[str] | None, typer.Option(help="a row to leave out, by name")] = None,
    batch: Batch = 1,
    train: Annotated[bool, typer.Option("--train", help="forward and backward")] = False,
    against: Annotated[str, typer.Option(help="torch: DTensor under torch.compile")] = "",
    nproc: Nproc = 2,
    warmup: Annotated[int, typer.Option(help="rounds that are not counted", min=1)] = 4,
    samples: Annotated[int, typer.Option(help="of every row", min=2)] = 20,
    peer_seconds: Annotated[float, typer.Option(help="for finding the peers' settings", min=0)] = 200.0,
    dtype: Annotated[str, typer.Option(help="bfloat16 on CUDA, else float32")] = "",
    cluster: Annotated[str, typer.Option(help="to plan for, instead of this machine")] = "",
    json: Annotated[Path | None, typer.Option(help="write every sample and figure")] = None,
    svg: Annotated[Path | None, typer.Option(help="write a chart")] = None,
) -> None:
    """Time MODEL or a shape in several orchestrations, in turn: what is exposed, what is hidden."""
    from plait import models
    from plait.asked import check_file
    from plait.bench import rows, shapes, sitting
    from plait.cluster import Cluster
    from plait.errors import InputError
    from plait.runtime.processes import launch

    for option, path in (("--json", json), ("--svg", svg)):
        check_file(option, path)
    if dtype:
        _dtype(dtype)
    if cluster:
        Cluster.of(cluster)
    if bool(model) == bool(shape):
        raise InputError("bench times one thing: MODEL or --shape NAME")
    part = _share(share)
    if shape:
        shapes.named(shape).share(part or nproc, nproc)
    if against not in ("", "torch"):
        raise InputError(f"--against {against}: it takes torch")
    if against and not shape:
        raise InputError(f"--against {against}: its layers are written for a --shape, and {model} is none")
    if share and not shape:
        raise InputError(f"--share {share}: of the layers of a --shape")
    rows.refuse_unknown(without or (), chunks or ())
    request = sitting.Request(
        models.resolve(model, say=_say) if model else None,
        shape, layers, part, tuple(tokens or [512]),
        tuple(chunks or ()), tuple(without or ()), batch, train, dtype, warmup, samples,
        bool(against), peer_seconds, cluster, str(json or ""), str(svg or ""),
    )  # fmt: skip
    launch(sitting.bench, nproc, request)


def _share(text: str) -> int:
    from plait.errors import InputError

    one, _, part = text.partition("/")
    if text and (one != "1" or not part.isdigit() or not int(part)):
        raise InputError(f"--share {text}: a part of a layer, for example 1/8")
    return int(part or 0)


@app.command()
def rules() -> None:
    """The equation table: every operator that can be split, and how."""
    from plait.report import tables
    from plait.rules import aten

    tables.show(tables.rules_table(aten.lines()))


@app.command()
def clusters() -> None:
    """The machines that --cluster knows."""
    from plait.cluster import presets

    print("\n".join(presets.names()))


@collectives_app.callback()
def collectives(
    context: typer.Context,
    collective: Annotated[str, typer.Option(help="all_reduce, all_gather ...")] = "all_reduce",
    size: Annotated[str, typer.Option(help="of the whole vector: 4KiB, 64MiB ...")] = "64MiB",
    nproc: Annotated[int, typer.Option(help="local processes, one for each rank", min=2, max=512)] = 4,
    rounds: Annotated[int, typer.Option(help="samples of each algorithm", min=1)] = 9,
    dry: Annotated[bool, typer.Option("--dry", help="price on --cluster, run nothing")] = False,
    cluster: Annotated[str, typer.Option(help="a preset, for --dry")] = "dgx-h100",
    ranks: Annotated[int | None, typer.Option(help="for --dry and --show", min=1)] = None,
    show: Annotated[str | None, typer.Option(help="draw the steps: ring, tree[6] ...")] = None,
) -> None:
    """Run every algorithm on this machine, or price (--dry) or draw (--show) them."""
    from plait import survey
    from plait.cluster.units import parse_size
    from plait.errors import InputError
    from plait.report import collectives as report
    from plait.report import tables

    if context.invoked_subcommand is not None:
        return
    what, nbytes = report.known(collective), parse_size(size)
    if not nbytes:
        raise InputError(f"--size {size}: there is nothing to send")
    if show is not None:
        print(report.drawn(show, what, ranks))
    elif dry:
        tables.show(report.priced(what, nbytes, report.part(cluster, ranks)))
    else:
        survey.run(what, nbytes, nproc, rounds)


@collectives_app.command("tuner-csv")
def tuner_csv(
    cluster: Cluster,
    ranks: Annotated[int | None, typer.Option(help="the first so many of the cluster", min=1)] = None,
) -> None:
    """The choice among NCCL's own algorithms, as its tuner plugin's configuration file."""
    from plait.cost.tuner import csv
    from plait.report.collectives import part

    print(csv(part(cluster, ranks)), end="")


@app.command()
def calibrate(
    nproc: Annotated[list[int] | None, typer.Option(help="processes; may be repeated", min=2)] = None,
    seconds: Annotated[float, typer.Option(help="about how long", min=1)] = 100.0,
) -> None:
    """Measure this machine's collectives, and its CUDA devices, and keep it for every later prediction and choice."""
    import torch

    from plait.cluster import stored
    from plait.runtime import calibrate as processes
    from plait.runtime import calibrate_cuda as devices

    stored.make_room(stored.cache_folder())
    measure = devices.measure if torch.cuda.is_available() else processes.measure
    found = measure(*(nproc or ()), say=_say, seconds=seconds)
    print(f"{found}\nkept in {stored.store(found)}")


def main() -> None:
    """A user's mistake is one line on the terminal, not a traceback."""
    from plait.errors import PlaitError

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, about torch's own
    try:
        app(args=_spread(sys.argv[1:], ("--tokens", "--chunks")))
    except PlaitError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _spread(words: list[str], options: Sequence[str]) -> list[str]:
    """`--tokens 8192 2048` as `--tokens 8192 --tokens 2048`."""
    out: list[str] = []
    for word in words:
        more = word.isdigit() and len(out) > 1 and out[-1].isdigit() and out[-2] in options
        out += [out[-2], word] if more else [word]
    return out


def _planned(
    model: str,
    cluster: str,
    mesh: tuple[str, str, str],
    batch: int,
    length: int,
    dtype: str,
    options: dict[str, Any],
) -> Plan:
    """A mesh of three numbers takes the cluster's first devices, any other all of them."""

    from plait import models
    from plait.api import plan as make_plan
    from plait.cluster import Cluster

    kind = _dtype(dtype)
    axes: dict[str, Any] = {}
    axes |= {name: _number(f"--{name}", n) for name, n in zip(("tp", "pp", "dp"), mesh, strict=True)}
    machine = Cluster.of(cluster)
    ranks = prod(n for n in axes.values() if isinstance(n, int))
    if "auto" not in axes.values() and ranks < machine.size:
        machine = machine.subset(range(ranks))
    found = models.resolve(model, weights=False, say=_say)
    example = models.build(found, batch=batch, length=length, device="meta", dtype=kind)
    return make_plan(
        example.model, example.args, example.kwargs, cluster=machine, **axes, **options
    )


def _dtype(name: str) -> Any:
    import torch

    from plait.errors import InputError

    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise InputError(f"--dtype {name}: it takes bfloat16, float16, float32 or float64")
    return kind


def _number(option: str, text: str, what: str = "a number of ranks") -> int | str:
    from plait.errors import InputError

    if text != "auto" and not (text.isdecimal() and int(text)):
        raise InputError(f"{option} {text}: {what} from 1, or auto")
    return text if text == "auto" else int(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
