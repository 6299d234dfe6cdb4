"""Sharded checkpoints: every rank writes the rows that it owns, and reads those that it needs.

    checkpoint.json                for every tensor its dtype, shape, and the files and rows of its parts
    shard-3-00001.safetensors      what rank 1 wrote in save 3

The index takes its name last, when all files are complete, and names the files of its own save only:
a save that is interrupted leaves the one before as it was. Tensors are named `model/<weight>` and
`optimizer/<state>/<weight>`; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.errors import WeightError
from plait.rules.equation import Ranges
from plait.rules.moves import count, put, take
from plait.runtime import checkpoint
from plait.runtime.checkpoint import DTYPES, NAMES, Checkpoint, Part, Spec, part_shape, whole

INDEX, VERSION = "checkpoint.json", 1
MODEL, OPTIMIZER = "model/", "optimizer/"
_SHARD = re.compile(r"shard-(\d+)-\d+\.safetensors")


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor of `spec`."""

    spec: Spec
    part: Part
    rows: Tensor

    def said(self) -> dict[str, Any]:
        return {"dtype": NAMES[self.spec.dtype], "shape": self.spec.shape, "part": self.part}


# --- writing --------------------------------------------------------------------------------


def number(folder: Path) -> int:
    """Of a save to come: that of no file that is there."""
    found = [int(m[1]) for p in _files(folder) if (m := _SHARD.fullmatch(p.name))]
    return max(found, default=0) + 1


def write_shard(folder: Path, save: int, rank: int, pieces: Mapping[str, Piece]) -> str:
    """This rank's file; its name, or "" where there is nothing to write."""
    if not pieces:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"shard-{save}-{rank:05}.safetensors"
    specs = {key: Spec(part_shape(p.part), p.spec.dtype) for key, p in pieces.items()}
    checkpoint.write_file(folder / name, specs, (p.rows for p in pieces.values()))
    return name


def write_index(folder: Path, told: list[tuple[str, dict[str, Any]]], optimizer: Any) -> None:
    """`told`: of every rank, its file and what is in it. What belonged to an earlier save goes."""
    tensors: dict[str, Any] = {}
    for file, pieces in told:
        for key, said in pieces.items():
            entry = tensors.setdefault(key, {k: said[k] for k in ("dtype", "shape")} | {"parts": []})
            entry["parts"].append({"file": file, "part": said["part"]})
    index = {"version": VERSION, "tensors": tensors, "optimizer": optimizer}
    temporary = folder / f".{INDEX}.{os.getpid()}.part"
    try:
        checkpoint.write_text(temporary, json.dumps(index))
        os.replace(temporary, folder / INDEX)
    finally:
        temporary.unlink(missing_ok=True)
    kept = {file for file, _ in told}
    for path in _files(folder):
        old = _SHARD.fullmatch(path.name) and path.name not in kept
        if old or path.name in (checkpoint.FILE, checkpoint.INDEX):
            path.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """After another kind of save into the same folder."""
    (folder / INDEX).unlink(missing_ok=True)
    for path in _files(folder):
        if _SHARD.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


# --- reading --------------------------------------------------------------------------------


@dataclass
class Index:
    """A folder's index, read; its files are opened when they are read from."""

    folder: Path
    tensors: Mapping[str, Any]
    optimizer: Any
    _open: dict[str, Checkpoint] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: str | os.PathLike[str]) -> Index:
        path = Path(folder) / INDEX
        try:
            data = json.loads(path.read_text())
        except ValueError:
            raise WeightError(f"{path} is no JSON, or is cut short") from None
        if data.get("version") != VERSION:
            raise WeightError(f"{path} is of version {data.get('version')}; this plait reads {VERSION}")
        files = {p["file"] for entry in data["tensors"].values() for p in entry["parts"]}
        absent = sorted(f for f in files if not (path.parent / f).is_file())
        if absent:
            raise WeightError(f"{path} names files that are not there: {', '.join(absent)}")
        return cls(path.parent, data["tensors"], data["optimizer"])

    def spec(self, key: str) -> Spec:
        entry = self.tensors[key]
        return Spec(tuple(entry["shape"]), DTYPES[entry["dtype"]])

    def read(self, key: str, part: Part | None = None) -> Tensor:
        spec = self.spec(key)
        part = part if part is not None else whole(spec.shape)
        out = torch.empty(part_shape(part), dtype=spec.dtype)
        there = 0
        for saved in self.tensors[key]["parts"]:
            there += self._place(out, key, saved["file"], _part(saved["part"]), part, spec)
        if there < out.numel():
            raise WeightError(f"{self.folder}: {key} has {there} of the {out.numel()} elements wanted")
        return out

    def _place(self, out: Tensor, key: str, file: str, saved: Part, want: Part, spec: Spec) -> int:
        """Put what one file has of `want` into `out`; how many elements."""
        all_rows = whole(spec.shape)
        dim = next((d for d, r in enumerate(saved) if r != all_rows[d]), 0)
        assert all(r == all_rows[d] for d, r in enumerate(saved) if d != dim), "one dim is cut"
        if not spec.shape:
            out.copy_(self._file(file).read(key))
            return 1
        both = _common(saved[dim], want[dim])
        if not both:
            return 0
        here = tuple(_within(saved[dim], both) if d == dim else r for d, r in enumerate(want))
        block = self._file(file).read(key, here)
        put(out, block, dim, _within(want[dim], both))
        return block.numel()

    def _file(self, name: str) -> Checkpoint:
        if name not in self._open:
            self._open[name] = Checkpoint(self.folder / name)
        return self._open[name]


class Sharded:
    """The weights of a sharded checkpoint: a `weights.Source`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.index = Index.of(folder)
        names = [k.removeprefix(MODEL) for k in self.index.tensors if k.startswith(MODEL)]
        self.specs: Mapping[str, Spec] = {n: self.index.spec(MODEL + n) for n in names}

    def __str__(self) -> str:
        return str(self.index.folder)

    def read(self, name: str, part: Part | None = None) -> Tensor:
        return self.index.read(MODEL + name, part)


def is_sharded(folder: str | os.PathLike[str]) -> bool:
    return (Path(folder) / INDEX).is_file()


def _part(data: Any) -> Part:
    return tuple(tuple((int(lo), int(hi)) for lo, hi in ranges) for ranges in data)


def _common(a: Ranges, b: Ranges) -> Ranges:
    """What both hold, in pieces that lie in one range of each."""
    return tuple(
        (max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b if max(x[0], y[0]) < min(x[1], y[1])
    )


def _within(rows: Ranges, some: Ranges) -> Ranges:
    """Where the rows `some` stand among `rows`, which hold them."""
    return tuple(_positions(rows, some))


def _positions(rows: Ranges, some: Ranges) -> Iterator[tuple[int, int]]:
    for lo, hi in some:
        at = next(i for i, (first, last) in enumerate(rows) if first <= lo and hi <= last)
        begin = count(rows[:at]) + lo - rows[at][0]
        yield begin, begin + hi - lo


def own_rows(held: Ranges, own: Ranges, dim: int, x: Tensor) -> Tensor:
    """Of `x`, whose rows along `dim` are `held`, those that this rank owns."""
    return x if held == own else take(x, dim, _within(held, own))
