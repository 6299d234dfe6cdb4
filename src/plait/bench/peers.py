"""Peers: PyTorch's own tensor parallelism of the same model, each form at its best setting.

    DTensor             columns and rows of the projections by hand, two all-reduces a layer
    DTensor, sequence   the residual stream cut along the sequence: gathers and reduce-scatters
    DTensor, async      the same, its matmuls and transfers interleaved by Inductor (CUDA only)

Each is tried by torch.compile in every mode that runs here, as long as there is time for it, in
processes of its own (apart.py): a mode whose kernels fail is left out, and said. Those of the fastest
mode of each form stay, and its step is timed there, in turn with the other rows, behind one that is
not counted. These plans are written for the model that `--shape` builds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from plait.bench.apart import Answer, Apart, told
from plait.bench.rows import Call, Row, clear, main_output
from plait.errors import RankError
from plait.runtime.sampler import clock

MODES = {"cuda": ("reduce-overhead", "default", "max-autotune"), "cpu": ("default",)}
AUTOTUNED = 5.0  # how many times longer than another mode it compiles
COMPILED = 128  # programs of one class that torch may keep
TRIAL = 5  # samples by which the modes of a form are compared
PATIENCE = 60.0  # seconds for one step


@dataclass(frozen=True)
class Form:
    name: str
    sequence: bool  # the residual stream is cut along the sequence
    interleaved: bool = False


FORMS = (
    Form("DTensor", sequence=False),
    Form("DTensor, sequence", sequence=True),
    Form("DTensor, async", sequence=True, interleaved=True),
)


@dataclass(frozen=True)
class Setting:
    """A form in one mode, in processes of its own, and what its step took there."""

    mode: str
    far: Apart
    trial: float

    def __call__(self) -> Any:
        return torch.from_numpy(self.far.ask("output", PATIENCE))

    def seconds(self) -> float:
        return float(self.far.ask("seconds", PATIENCE))


Open = Callable[[Form, str, float], Apart]  # a form in a mode, within so many seconds


@dataclass
class Peers:
    """`seconds` is what all trials may take together, as much for each of `sizes`; none is begun that would not
    fit."""

    device: torch.device
    seconds: float
    sizes: int = 1
    won: dict[str, str] = field(default_factory=dict)  # form -> the mode that won last
    left_out: list[str] = field(default_factory=list)  # for lack of time, or because they failed
    _spent: float = 0.0
    _longest: dict[str, float] = field(default_factory=dict)  # mode -> seconds of its longest trial
    _kept: dict[Form, Setting] = field(default_factory=dict)
    _until: float = 0.0  # of the seconds, at this size

    def rows(self, begin: Open) -> Iterator[Row]:
        """The best setting of every form; those of an earlier size are stopped."""
        self.stop()
        self._until += self.seconds / self.sizes
        tried: dict[Form, list[str]] = {}
        for form, mode in self._order():
            made = self._try(begin, form, mode)
            if made is None:
                continue
            tried.setdefault(form, []).append(f"{mode} {made.trial * 1e3:.3f} ms")
            best = self._kept.get(form)
            if best is None or made.trial < best.trial:
                self._kept[form], made = made, best
            if made is not None:
                made.far.stop()
        for form, best in self._kept.items():
            self.won[form.name] = best.mode
            yield Row(form.name, "peer", best, note=f"{best.mode} (tried {', '.join(tried[form])})")

    def stop(self) -> None:
        while self._kept:
            self._kept.popitem()[1].far.stop()

    def _order(self) -> list[tuple[Form, str]]:
        """The modes that won before, then the quick ones of every form, the slow ones last."""
        kind = self.device.type
        forms = [f for f in FORMS if kind == "cuda" or not f.interleaved]
        self.left_out += [f"{f.name}: needs CUDA" for f in FORMS if f not in forms]
        pairs = [(form, mode) for mode in MODES[kind] for form in forms]
        return sorted(pairs, key=lambda p: self.won.get(p[0].name) != p[1])

    def _try(self, begin: Open, form: Form, mode: str) -> Setting | None:
        if not self._fits(mode):
            self.left_out.append(f"{form.name} {mode}: no time left")
            return None
        start = time.monotonic()
        try:
            far = begin(form, mode, told(self._until - self._spent)[0])
            mine = median(far.ask("seconds", PATIENCE) for _ in range(TRIAL))
            return Setting(mode, far, max(told(mine)))
        except RankError as error:  # a peer that fails is left out, and said
            self.left_out.append(f"{form.name} {mode}: {error}")
            return None
        finally:
            took = time.monotonic() - start
            self._spent += took
            self._longest[mode] = max(took, self._longest.get(mode, 0.0))

    def _fits(self, mode: str) -> bool:
        """Whether a trial as long as the longest yet is over in time, as rank 0 sees it."""
        expected = self._longest.get(mode)
        if expected is None:
            slow = AUTOTUNED if mode == "max-autotune" else 1.0
            expected = slow * max(self._longest.values(), default=0.0)
        return bool(told(self._spent + expected <= self._until)[0])


def answering(form: Form, mode: str, device: torch.device, build: Callable[[], nn.Module], call: Call) -> Answer:
    """In a process of its own: the step compiled and warm, and what is asked of it."""
    step, module = compiled(form, mode, device, build, call)
    timer = clock(device)
    clear(module)
    timer.prepare([step])

    def seconds() -> float:
        for _ in range(2):  # the first for the caches, which hold another process's data
            clear(module)
            found = timer.seconds(step)
        return found

    def output() -> Any:
        clear(module)
        return main_output(step()).cpu().numpy()

    asked = {"seconds": seconds, "output": output}
    return lambda what: asked[what]()


def compiled(
    form: Form, mode: str, device: torch.device, build: Callable[[], nn.Module], call: Call
) -> tuple[Callable[[], Any], nn.Module]:
    """The step, warm, and the module that it runs."""
    torch._dynamo.config.recompile_limit = COMPILED  # all of them stay compiled, side by side
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    module = parallel(build(), mesh, form)
    step = call.of(torch.compile(module, mode=None if mode == "default" else mode, dynamic=False))
    with _interleaving(mesh) if form.interleaved else contextlib.nullcontext():
        for _ in range(3):
            clear(module)
            step()
    return step, module


@contextlib.contextmanager
def _interleaving(mesh: DeviceMesh) -> Iterator[None]:
    """Inductor's micro-pipelined tensor parallelism, while something is compiled."""
    import torch._inductor.config as config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.get_group().group_name)
    with config.patch(_micro_pipeline_tp=True):
        yield


def parallel(model: Any, mesh: DeviceMesh, form: Form) -> nn.Module:
    """`model`, a decoder of transformers, its layers cut over the mesh by DTensor."""
    layers = model.model.layers
    for i, layer in enumerate(layers):
        parallelize_module(layer, mesh, _layer(form))
        if form.sequence and i == 0:  # what the embedding gives is whole
            parallelize_module(layer, mesh, PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
            ))  # fmt: skip
    if form.sequence:
        parallelize_module(model.model.norm, mesh, SequenceParallel())
        parallelize_module(model.model.norm, mesh, PrepareModuleOutput(
            output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),), use_local_output=True
        ))  # fmt: skip
    return model  # type: ignore[no-any-return]


def _layer(form: Form) -> dict[str, Any]:
    inner: Sequence[str] = ("q_proj", "k_proj", "v_proj")
    plan: dict[str, Any] = {f"self_attn.{n}": ColwiseParallel() for n in inner}
    plan |= {f"mlp.{n}": ColwiseParallel() for n in ("gate_proj", "up_proj")}
    out = Shard(1) if form.sequence else Replicate()
    plan |= {n: RowwiseParallel(output_layouts=out) for n in ("self_attn.o_proj", "mlp.down_proj")}
    if form.sequence:
        plan |= {n: SequenceParallel() for n in ("input_layernorm", "post_attention_layernorm")}
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan["mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
    return plan

