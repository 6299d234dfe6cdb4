"""What was asked for: the keywords of `plait.compile` and `plait.plan`, and what each of them takes.

Kinds are checked here, all offenders in one error; values are checked where they are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.cluster import Cluster
from plait.collectives.algorithms import names
from plait.errors import InputError
from plait.mesh import Mesh
from plait.plan import joint, overlaps
from plait.plan.plan import Plan


def check(asked: Mapping[str, Any]) -> None:
    """InputError names every keyword of a wrong kind, with what it takes."""
    wrong = [
        f"{name} is {_spell(value)}; it takes {words}"
        for name, value in asked.items()
        for takes, words in [_TAKES[name]]
        if not takes(value)
    ]
    if wrong:
        raise InputError("\n".join(wrong))
    check_algorithms("algorithm=", asked["algorithm"])
    overlaps.check(asked["overlap"])
    names = ("objective", "micro_batches", "schedule", "recompute", "outputs")
    joint.check(*(asked[name] for name in names))


def check_device(value: Any) -> None:
    """InputError unless values can be brought there."""
    if not _device(value):
        raise InputError(f"device is {_spell(value)}; it takes {_DEVICES}")


def check_file(option: str, path: Path | None) -> None:
    """InputError, before work that takes long, unless its result can be written there."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        why = "is a folder" if path.is_dir() else f"is in no folder: there is no {path.parent}"
        raise InputError(f"{option} {path}: {why}; it takes the name of a file")


def write_file(option: str, path: Path, text: str) -> None:
    """InputError where there is no room or no right for it."""
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror or error}") from error


def check_processes(nproc: int, pp: int, dp: int, algorithm: str) -> None:
    """What all processes would refuse, said before they are started."""
    Mesh.fitting("auto", pp, dp, nproc, "--nproc")
    check_algorithms("--algorithm ", algorithm)


def check_algorithms(option: str, asked: str | Mapping[str, str]) -> None:
    """InputError for what is the name of no algorithm; whether a collective has it, its price says."""
    every = [asked] if isinstance(asked, str) else list(asked.values())
    unknown = [name for name in every if name.partition("[")[0].partition("/")[0] not in _ALGORITHMS]
    if unknown:
        raise InputError(f"{option}{', '.join(unknown)}: it takes {', '.join(_ALGORITHMS)}")


def check_sites(algorithm: str | Mapping[str, str], plan: Plan) -> None:
    """InputError where `algorithm` names collectives that the plan has not."""
    sites = {p.name for p in (*plan.collectives, *([plan.gradients] if plan.gradients else []))}
    unknown = [name for name in algorithm if name not in sites] if not isinstance(algorithm, str) else []
    if unknown:
        raise InputError(
            f"algorithm=: the plan has no collective {', '.join(unknown)}; it has "
            + (", ".join(sorted(sites)) or "none")
        )


def _spell(value: Any) -> str:
    text = repr(value)
    plain = isinstance(value, (str, int, float, type(None), torch.dtype)) and len(text) < 60
    return text if plain else f"a {type(value).__name__}"


# -- kinds ---------------------------------------------------------------------------------------------


def _several(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _named(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and all(isinstance(k, str) for k in value))


def _algorithms(value: Any) -> bool:
    parts = [*value, *value.values()] if isinstance(value, Mapping) else [value]
    return all(isinstance(x, str) for x in parts)


def _device(value: Any) -> bool:
    """Whether there is such a device here; a model is computed on it, so it is not meta."""
    try:
        device = torch.device(value) if isinstance(value, str) else value
    except RuntimeError:
        return False
    known = device is None or (isinstance(device, torch.device) and device.type in ("cpu", "cuda"))
    return known and (device is None or device.type == "cpu" or torch.cuda.is_available())


def _of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _or_none(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: value is None or isinstance(value, kinds)


def _any(value: Any) -> bool:
    return True


_ALGORITHMS = ("auto", "native", *names("all_reduce"), "hierarchical")
_DEVICES = "None, 'cpu', or 'cuda' where there is one"
_SWITCH = _of(bool), "True or False"
_LATER = _any, ""  # whoever uses it says what it takes
_TAKES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_of(nn.Module), "an nn.Module"),
    "args": (_several, "a tuple of example inputs: (x,) for one"),
    "kwargs": (_named, "None, or a dict of example inputs by name"),
    "tp": _LATER,
    "pp": _LATER,
    "dp": _LATER,
    "cluster": (_or_none(Cluster, str), "None, a plait.Cluster or a name that `plait clusters` lists"),
    "group": (_or_none(dist.ProcessGroup), "None, or a process group that this rank is in"),
    "device": (_device, _DEVICES),
    "dtype": (
        lambda x: x is None or (isinstance(x, torch.dtype) and x.is_floating_point),
        "None, or a floating-point dtype: torch.bfloat16",
    ),
    "dynamic": (_named, 'None, or names by argument and dim: {"input_ids": {0: "batch"}}'),
    "weights": (_or_none(str, os.PathLike), "None, or a safetensors file or a folder of them"),
    "training": _SWITCH,
    "plan": (_or_none(Plan), "None, or a Plan: plait.Plan.from_json(text)"),
    "objective": _LATER,
    "algorithm": (_algorithms, "'auto', the name of one, or a dict of names by collective"),
    "overlap": _LATER,
    "micro_batches": _LATER,
    "schedule": (_of(str), "'auto', or the name of one"),
    "recompute": _LATER,
    "outputs": _LATER,
    "deterministic": _SWITCH,
    "measure": _SWITCH,
}
