"""Weights: every rank takes its own rows, from a checkpoint, a state dict or the live module.

    loading = locate(program.weights, model=model, source=open_source("folder"))
    tensors = loading.load(parts, device="cpu")     # {weight.name: this rank's part}

`locate` reads no values. It finds each weight under any of its names (tied weights have several)
and raises one WeightError with every key that is missing, extra, or of another shape or kind. `load` holds
at most one tensor more than what it returns.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from plait.errors import WeightError
from plait.program import Weight
from plait.runtime.checkpoint import Checkpoint, Part, Spec, part_shape, take, whole
from plait.runtime.pickled import Pickled, is_pickled
from plait.runtime.rebuild import attribute, recompute
from plait.runtime.sharded import Sharded, is_sharded


class Source(Protocol):
    """Where tensors come from; `str` of it stands in messages."""

    specs: Mapping[str, Spec]

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """A part (None: all) of a tensor, in memory of its own."""
        ...


class Tensors:
    """A state dict, or any tensors by name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], what: str = "the state dict") -> None:
        if not isinstance(tensors, Mapping) or not all(isinstance(n, str) for n in tensors):
            kind = type(tensors).__name__
            raise WeightError(f"{what} is a mapping of names to tensors, and not this {kind}")
        self._tensors, self._what = dict(tensors), what
        others = [f"{n} is {kind}" for n, t in self._tensors.items() if (kind := _no_values(t))]
        if others:
            raise WeightError(f"{what} holds what is no tensor of values: {', '.join(others)}")
        self.specs: Mapping[str, Spec] = {
            name: Spec(tuple(t.shape), t.dtype) for name, t in self._tensors.items()
        }

    def __str__(self) -> str:
        return self._what

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        tensor = self._tensors[name].detach()
        return take(tensor, part if part is not None else whole(tuple(tensor.shape)))


def _no_values(x: Any) -> str:
    if not isinstance(x, torch.Tensor) or is_traceable_wrapper_subclass(x):
        return f"a {type(x).__name__}"
    if x.is_meta:
        return "on the meta device"
    return "" if x.layout is torch.strided else f"of layout {str(x.layout).removeprefix('torch.')}"


def open_source(
    weights: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    trusted: bool = False,
    prefix: str = "",
) -> Source:
    """A safetensors file, a folder of them, a sharded checkpoint, or a state dict.

    `trusted`: a folder of torch.distributed.checkpoint is read too, which runs what is pickled in it;
    `prefix`: of the weights' names there.
    """
    if isinstance(weights, Mapping):
        return Tensors(weights)
    if is_sharded(weights):
        return Sharded(weights)
    if not is_pickled(weights):
        return Checkpoint(weights)
    if not trusted:
        raise WeightError(
            f"weights {weights} are a folder of torch.distributed.checkpoint, and to read one is to run what is "
            "pickled in it: compiled.load(folder, trusted=True) does, for a folder that you trust"
        )
    return Pickled(weights, prefix)


@dataclass(frozen=True)
class Found:
    """A weight, and the keys of a source that hold it (several where a tied one is saved twice)."""

    weight: Weight
    source: Source
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Loading:
    """Every weight found and its shape checked; nothing read yet."""

    found: tuple[Found, ...]

    def load(
        self,
        parts: Mapping[str, Part],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        runs: Sequence[Sequence[str]] = (),
    ) -> dict[str, torch.Tensor]:
        """This rank's part of each weight in `parts`, by the weight's (first) name.

        `dtype` is for floating-point parameters; otherwise each weight keeps the model's. `runs`:
        weights whose rows lie one behind the other in memory.
        """
        mine = [f for f in self.found if f.weight.name in parts]
        specs = {
            f.weight.name: Spec(part_shape(parts[f.weight.name]), _dtype(f.weight, dtype))
            for f in mine
        }
        out: dict[str, torch.Tensor] = rooms(specs, runs, device)
        for f in mine:
            name = f.weight.name
            value = self._read(f, parts[name])
            if name in out:
                out[name].copy_(value)
            else:
                out[name] = value.to(device=device, dtype=specs[name].dtype)
        return {f.weight.name: out[f.weight.name] for f in mine}

    def _read(self, found: Found, part: Part) -> torch.Tensor:
        first, *others = found.keys
        value = found.source.read(first, part)
        for key in others:
            if not _equal(value, found.source.read(key, part)):
                raise WeightError(
                    f"{found.source}: {first} and {key} differ, but the model ties them"
                )
        return value


def rooms(
    specs: Mapping[str, Spec], runs: Sequence[Sequence[str]], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Memory for the tensors of `runs`, those of a run one behind the other along dim 0."""
    out: dict[str, torch.Tensor] = {}
    for run in runs:
        rows = [specs[name].shape[0] for name in run]
        shape, dtype = (sum(rows), *specs[run[0]].shape[1:]), specs[run[0]].dtype
        whole = torch.empty(shape, dtype=dtype, device=device)
        out |= dict(zip(run, whole.split(rows), strict=True))
    return out


def _dtype(weight: Weight, dtype: torch.dtype | None) -> torch.dtype:
    wanted = dtype is not None and weight.kind == "parameter" and weight.dtype.is_floating_point
    return dtype if wanted and dtype is not None else weight.dtype


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


# --- finding --------------------------------------------------------------------------------


def locate(
    weights: Sequence[Weight],
    *,
    model: nn.Module | None = None,
    source: Source | None = None,
    unused: Sequence[Weight] = (),
) -> Loading:
    """Find every weight: in `source`, else in the live `model`, else computed by its own code.

    `unused` weights of the model may be in the source; keys that belong to nothing are refused.
    """
    everything = [*weights, *unused]
    live = Tensors(_live(everything, model), "the model")
    specs = source.specs if source is not None else {}
    found = [f for w in everything if (f := _find(w, source, live)) is not None]
    lost = _without(everything, found)
    if model is not None:
        owned = [w.name for w in lost if not _saved(w)]
        again = Tensors(recompute(model, owned), "the model's own code")
        found += [Found(w, again, (w.name,)) for w in lost if w.name in again.specs]
        lost = _without(everything, found)
    known = {name for w in everything for name in w.names}
    problems = [
        *_missing(lost, specs, source, known),
        *_extra([key for key in specs if key not in known]),
        *_misshaped(found),
        *_miskinded(found),
    ]
    if problems:
        raise WeightError("\n".join([f"the weights do not fit the model ({source or 'its own'})", *problems]))
    order = {w.node: i for i, w in enumerate(everything)}
    return Loading(tuple(sorted(found, key=lambda f: order[f.weight.node])))


def _saved(weight: Weight) -> bool:
    return weight.kind == "parameter" or (weight.kind == "buffer" and weight.persistent)


def _find(weight: Weight, source: Source | None, live: Source) -> Found | None:
    for place in (source, live):
        if place is not None:
            keys = tuple(name for name in weight.names if name in place.specs)
            if keys and (place is not live or source is None or not _saved(weight)):
                return Found(weight, place, keys)
    return None


def _without(weights: Sequence[Weight], found: Sequence[Found]) -> list[Weight]:
    there = {f.weight.node for f in found}
    return [w for w in weights if w.node not in there]


def _live(weights: Sequence[Weight], model: nn.Module | None) -> dict[str, torch.Tensor]:
    """The weights that have values in the module, under their first names."""
    if model is None:
        return {}
    tensors = {w.name: attribute(model, w.name) for w in weights}
    return {name: t for name, t in tensors.items() if t is not None and not t.is_meta}


# --- what is said when they do not fit ------------------------------------------------------


def _missing(
    lost: Sequence[Weight], specs: Mapping[str, Spec], source: Any, known: Collection[str]
) -> list[str]:
    saved = [w for w in lost if _saved(w)]
    owned = [w for w in lost if not _saved(w)]
    lines = []
    if saved and source is None:
        lines.append(f"  on the meta device and no weights= given: {_names(saved)}")
    elif saved:
        lines.append(f"  missing: {_names(saved)}")
        near = _nearest(saved, specs, known)
        lines += [f"  nearest: {near}"] if near else []
    if owned:
        kinds = {"buffer": "non-persistent buffer", "constant": "tensor attribute"}
        named = ", ".join(f"{w.name} ({kinds[w.kind]})" for w in owned)
        lines.append(
            f"  in no checkpoint, and not computable from what their modules remember: {named}; "
            "build these modules on a real device, or store their constructors' arguments as "
            "attributes of the same names"
        )
    return lines


def _nearest(lost: Sequence[Weight], specs: Mapping[str, Spec], known: Collection[str]) -> str:
    """A prefix that would explain all that is missing, or the likeliest of what is extra."""
    names = [w.name for w in lost]
    for key in specs:
        if key.endswith(names[0]) and all(
            key.removesuffix(names[0]) + name in specs for name in names
        ):
            return f"the source has them all under {key.removesuffix(names[0])!r}"
        if names[0].endswith(key):
            prefix = names[0].removesuffix(key)
            if all(n.removeprefix(prefix) in specs for n in names if n.startswith(prefix)):
                return f"the source has them without {prefix!r}"
    extra = [key for key in specs if key not in known]
    close = ((name, get_close_matches(name, extra, 1)) for name in names)
    return ", ".join(f"{name} is perhaps {found[0]}" for name, found in close if found)


def _extra(keys: Sequence[str]) -> list[str]:
    return [f"  extra: {', '.join(keys)}"] if keys else []


def _misshaped(found: Sequence[Found]) -> list[str]:
    lines = []
    for f in found:
        for key in f.keys:
            shape = f.source.specs[key].shape
            if shape != f.weight.shape:
                lines.append(f"{key} {list(shape)}, the model's is {list(f.weight.shape)}")
    return [f"  other shape: {'; '.join(lines)}"] if lines else []


def _miskinded(found: Sequence[Found]) -> list[str]:
    """What is quantised is no weight: its scale is elsewhere."""
    lines = [
        f"{key} {f.source.specs[key].dtype}, the model's is {f.weight.dtype}"
        for f in found
        for key in f.keys
        if _floats(f.source.specs[key].dtype) != _floats(f.weight.dtype)
    ]
    return [f"  other kind of numbers: {'; '.join(lines)}"] if lines else []


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _names(weights: Sequence[Weight]) -> str:
    return ", ".join(" or ".join(w.names) for w in weights)
