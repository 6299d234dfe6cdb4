"""Safetensors files, read by the rows that are wanted and written as the tensors come.

A file is eight bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, and the
tensors' bytes, row-major. It is read with `pread` into the tensor itself: no mapping of the file
counts as memory, and a part of a tensor costs its own bytes. It is written front to back, so a
model that fits on no single host can be saved one gathered tensor at a time.

    part = ((0, 4), (8, 12)), ((0, 16),)     rows 0-3 and 8-11 of a matrix of 16 columns
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, count, product
from math import prod
from pathlib import Path
from typing import Any

import torch

from plait.errors import InputError, WeightError

Ranges = tuple[tuple[int, int], ...]
Part = tuple[Ranges, ...]  # for each dim the ranges of its rows, in order

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = 50 * 10**9  # bytes of a file of several; what transformers 5 writes
_RUN = 4096  # bytes; shorter runs are cut from blocks, since a call costs as much as a page
_BLOCK = 4 * 2**20  # bytes of such a block
_MAX_HEADER = 100 * 10**6  # bytes; the format's own limit


@dataclass(frozen=True)
class Spec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def whole(shape: tuple[int, ...]) -> Part:
    return tuple(((0, n),) for n in shape)


def part_shape(part: Part) -> tuple[int, ...]:
    return tuple(sum(hi - lo for lo, hi in ranges) for ranges in part)


def take(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The part in memory of its own, even where it is the whole tensor."""
    out = torch.empty(part_shape(part), dtype=tensor.dtype, device=tensor.device)
    for ranges in product(*(_moves(dim) for dim in part)):
        source, target = tensor, out
        for dim, (lo, hi, at) in enumerate(ranges):
            source = source.narrow(dim, lo, hi - lo)
            target = target.narrow(dim, at, hi - lo)
        target.copy_(source)
    return out


def _moves(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Each range, and where it begins in the part."""
    moves, at = [], 0
    for lo, hi in ranges:
        moves.append((lo, hi, at))
        at += hi - lo
    return moves


# --- reading --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    path: Path
    offset: int
    spec: Spec


class Checkpoint:
    """The tensors of a safetensors file, or of a folder of them with or without an index."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._places: dict[str, _Place] = {}
        for file in _files(self.path):
            for name, place in _header(file):
                if name in self._places:
                    raise WeightError(
                        f"{name} is in two files: {self._places[name].path} and {place.path}"
                    )
                self._places[name] = place
        self.specs: Mapping[str, Spec] = {n: p.spec for n, p in self._places.items()}

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """A part of a tensor, in the file's dtype, read from its own rows only."""
        place = self._places[name]
        part = part if part is not None else whole(place.spec.shape)
        out = torch.empty(part_shape(part), dtype=place.spec.dtype)
        if out.numel():
            with open(place.path, "rb", buffering=0) as file:
                _read_part(file.fileno(), place, part, out)
        return out


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix != ".json" else _indexed(path)
    if (path / INDEX).is_file():
        return _indexed(path / INDEX)
    files = [path / FILE] if (path / FILE).is_file() else sorted(path.glob("*.safetensors"))
    if files:
        return files
    there = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    but = f", but {', '.join(there[:8])}" if there else ""
    what = f"holds no safetensors file{but}" if path.is_dir() else "does not exist"
    raise WeightError(f"weights {path}: {what}; weights are read from safetensors, never pickles")


def _indexed(index: Path) -> list[Path]:
    names = sorted(_files_of(index))
    absent = [n for n in names if not (index.parent / n).is_file()]
    if absent:
        raise WeightError(f"{index} names files that are not there: {', '.join(absent)}")
    return [index.parent / n for n in names]


def _files_of(index: Path) -> set[str]:
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        names = set(json.loads(index.read_text())["weight_map"].values())
        if all(isinstance(n, str) for n in names):
            return names
    raise WeightError(f"{index} is no index of safetensors files: its weight_map has a file for each name")


def _header(path: Path) -> Iterator[tuple[str, _Place]]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise WeightError(f"{path} is not a safetensors file, or is cut short")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise WeightError(f"{path} is not a safetensors file: its header is no JSON") from None
    for name, entry in _entries(path, header):
        if entry["dtype"] not in DTYPES:
            raise WeightError(f"{path}: {name} has dtype {entry['dtype']}, which is not known")
        spec = Spec(tuple(entry["shape"]), DTYPES[entry["dtype"]])
        start, end = entry["data_offsets"]
        if end - start != spec.bytes or 8 + length + end > size:
            raise WeightError(f"{path}: {name} lies at {start}:{end}, beyond its size or the file")
        yield name, _Place(path, 8 + length + start, spec)


def _entries(path: Path, header: Any) -> list[tuple[str, Any]]:
    """Those of tensors, each with what it has to have."""
    entries = dict(header) if isinstance(header, dict) else {"its header": header}
    entries.pop("__metadata__", None)
    wrong = [name for name, entry in entries.items() if not _is_entry(entry)]
    if wrong:
        lack = "has no dtype, shape and data_offsets"
        raise WeightError(f"{path} is not a safetensors file: {', '.join(wrong)} {lack}")
    return list(entries.items())


def _is_entry(entry: Any) -> bool:
    match entry:
        case {"dtype": str(), "shape": [*sizes], "data_offsets": [start, end]}:
            return all(type(n) is int and n >= 0 for n in (*sizes, start, end))
    return False


def _read_part(fd: int, place: _Place, part: Part, out: torch.Tensor) -> None:
    """Runs of consecutive bytes, straight into `out`; short ones by way of larger blocks."""
    shape, item = place.spec.shape, place.spec.dtype.itemsize
    cut = max((d for d, r in enumerate(part) if r != ((0, shape[d]),)), default=0)
    inner = prod(shape[cut + 1 :]) * item  # bytes of one row of the last dim that is cut
    ranges = part[cut] if part else ((0, 1),)
    stride = shape[cut] * inner if shape else inner
    rows = _rows(part[:cut])
    buffer = _bytes(out)
    if max(hi - lo for lo, hi in ranges) * inner >= _RUN or cut == 0:
        at = 0
        for row in _offsets(rows, shape[:cut]):
            for lo, hi in ranges:
                size = (hi - lo) * inner
                offset = place.offset + row * stride + lo * inner
                _fill(fd, buffer[at : at + size], offset)
                at += size
        return
    _read_blocks(fd, place, ranges, inner, list(_offsets(rows, shape[:cut])), stride, buffer)


def _read_blocks(
    fd: int,
    place: _Place,
    ranges: Ranges,
    inner: int,
    rows: list[int],
    stride: int,
    buffer: memoryview,
) -> None:
    """As many consecutive rows at a time as a block holds, then the columns cut from them."""
    lo, hi = ranges[0][0] * inner, ranges[-1][1] * inner
    columns = torch.cat([torch.arange(a * inner - lo, b * inner - lo) for a, b in ranges])
    out = torch.frombuffer(buffer, dtype=torch.uint8).view(len(rows), -1)
    start = 0
    while start < len(rows):
        end = start + 1
        while end < len(rows) and rows[end] == rows[end - 1] + 1:
            if (end - start + 1) * stride > _BLOCK:
                break
            end += 1
        block = torch.empty((end - start) * stride, dtype=torch.uint8)
        used = (end - start - 1) * stride + hi - lo
        _fill(fd, _bytes(block)[:used], place.offset + rows[start] * stride + lo)
        torch.index_select(block.view(end - start, stride), 1, columns, out=out[start:end])
        start = end


def _rows(part: Part) -> list[list[int]]:
    return [[i for lo, hi in ranges for i in range(lo, hi)] for ranges in part]


def _offsets(rows: list[list[int]], shape: tuple[int, ...]) -> Iterator[int]:
    """The joint row-major index of every wanted row of the outer dims."""
    for index in product(*rows):
        flat = 0
        for i, n in zip(index, shape, strict=True):
            flat = flat * n + i
        yield flat


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _fill(fd: int, buffer: memoryview, offset: int) -> None:
    while buffer:
        got = os.preadv(fd, [buffer], offset)
        assert got > 0, "the file ended although its header was checked"
        buffer, offset = buffer[got:], offset + got


# --- writing --------------------------------------------------------------------------------


def prepare(folder: str | os.PathLike[str], makes: bool) -> None:
    """Before what is long: InputError where there can be no such folder. `makes`: it is made here."""
    if not isinstance(folder, (str, os.PathLike)):
        raise InputError(f"save takes the path of a folder, not {folder!r}")
    try:
        if makes:
            Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"save to {folder}: {error.strerror}; it takes a folder that can be made") from error


def write(
    folder: str | os.PathLike[str],
    specs: Mapping[str, Spec],
    tensors: Iterable[torch.Tensor],
    *,
    shard: int = SHARD,
) -> None:
    """Write `tensors`, which come in the order of `specs`, as `model.safetensors` or as shards.

    A checkpoint that is there stays whole until the new one is: all files are complete before the
    first takes its name, no shard takes the name of an old one, and the file that readers look for
    first (the index, or the one file) changes at a stroke. Then what belonged to the old one goes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    groups = _shards(specs, shard)
    names = _names(len(groups), {p.name for p in folder.iterdir()})
    old = _shards_of(folder / INDEX)
    stream = iter(tensors)
    written: list[tuple[Path, Path]] = []
    try:
        for name, group in zip(names, groups, strict=True):
            temporary = folder / f".{name}.{os.getpid()}.part"
            written.append((temporary, folder / name))
            write_file(temporary, group, stream)
        if len(groups) > 1:
            temporary = folder / f".{INDEX}.{os.getpid()}.part"
            written.append((temporary, folder / INDEX))
            write_text(temporary, _index(specs, dict(zip(names, groups, strict=True))))
        for temporary, final in written:
            os.replace(temporary, final)
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
    other = INDEX if len(groups) == 1 else FILE
    for name in (n for n in (other, *old) if n not in names):
        (folder / name).unlink(missing_ok=True)


def _shards_of(index: Path) -> list[str]:
    """The files of an earlier save."""
    if not index.is_file():
        return []
    return sorted(n for n in _files_of(index) if Path(n).name == n)


def write_text(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, specs: Mapping[str, Spec], stream: Iterator[torch.Tensor]) -> None:
    ends = list(accumulate(s.bytes for s in specs.values()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, spec), end in zip(specs.items(), ends, strict=True):
        entry = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape)}
        header[name] = entry | {"data_offsets": [end - spec.bytes, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, spec in specs.items():
            tensor = next(stream)
            assert Spec(tuple(tensor.shape), tensor.dtype) == spec, name
            file.write(
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
        file.flush()
        os.fsync(file.fileno())


def _shards(specs: Mapping[str, Spec], limit: int) -> list[dict[str, Spec]]:
    groups: list[dict[str, Spec]] = [{}]
    used = 0
    for name, spec in specs.items():
        if groups[-1] and used + spec.bytes > limit:
            groups.append({})
            used = 0
        groups[-1][name] = spec
        used += spec.bytes
    return groups


def _names(n: int, taken: Set[str]) -> list[str]:
    """`model-00001-of-00002.safetensors`, or `model-1-...` where an old shard has that name."""
    if n == 1:
        return [FILE]
    stem = FILE.removesuffix(".safetensors")
    for save in count():
        own = f"{stem}-{save}" if save else stem
        names = [f"{own}-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]
        if not taken & set(names):
            return names
    raise AssertionError("numbers do not end")


def _index(specs: Mapping[str, Spec], groups: Mapping[str, Mapping[str, Spec]]) -> str:
    where = {name: file for file, group in groups.items() for name in group}
    total = sum(s.bytes for s in specs.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"


DTYPES = {  # the format's names
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
