"""Calibrations: what a machine measured of itself, kept in the user's cache and found again.

    CACHE/plait/calibration.json         of the processes of this host; CACHE is XDG_CACHE_HOME or ~/.cache
    CACHE/plait/calibration-cuda.json    of its CUDA devices
    date, host, torch, method, rows, constants, fit error

Nothing but `detect` reads it, and it says so in the cluster's `source`.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.cluster.topology import Cluster
from plait.cluster.units import spell_rate, spell_seconds
from plait.errors import ClusterError, InputError
from plait.written import read


@dataclass(frozen=True)
class Measured:
    spelling: str  # ring[4]/4, all_gather native[4]
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Calibration:
    cluster: Cluster
    date: str
    host: str
    torch: str
    method: str
    error: float  # mean of |predicted / measured - 1| over the rows
    worst: float
    rows: tuple[Measured, ...]
    worst_at: str = ""  # the algorithm and size of the worst

    def __str__(self) -> str:
        known = sum(len(by.measured) for by in self.cluster.transports)
        fitted = (
            f"fit of {known} algorithms over {len(self.rows)} rows: mean error {self.error:.1%}, worst {self.worst:.1%}"
            + (f" ({self.worst_at})" if self.worst_at else "")
        )
        rates = self._device() if self.cluster.device.kind == "cuda" else self._path()
        first = f"{self.host}, {self.date}, torch {self.torch}: {self.method}"
        return "\n".join((first, rates, *([fitted] if self.rows else ["one device: no collectives"])))

    def _path(self) -> str:
        level, by = self.cluster.levels[0], self.cluster.transports[0]
        path = by.protocols[0]
        return (
            f"path: {spell_seconds(level.latency)} a step, {spell_seconds(path.message)} a message, "
            f"{spell_rate(level.bandwidth * path.share)} a port, {spell_rate((level.total or 0) * path.share)} "
            f"together, additions at {spell_rate(1 / by.add) if by.add else 'no cost'}"
        )

    def _device(self) -> str:
        device = self.cluster.device
        best = max(tile.share for tile in device.tiles)
        rates = ", ".join(f"{name} {best * flops / 1e12:.0f} Tflop/s" for name, flops in device.flops)
        return f"{device.name}: long matmuls {rates}, memory {spell_rate(device.bandwidth * device.memory_share)}"

    def to_json(self) -> str:
        data = asdict(self) | {"cluster": json.loads(self.cluster.to_json())}
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> Calibration:
        try:
            data = json.loads(text)
            data["cluster"] = Cluster.from_json(json.dumps(data["cluster"]))
        except ClusterError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"this is no calibration ({type(error).__name__}: {error})") from None
        return read(Calibration, data, "calibration", ClusterError)


def cache_folder() -> Path:
    """Where this user's caches are: what was measured here, and what was converted (fetch.py)."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "plait"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"plait-{os.getuid()}"


@contextlib.contextmanager
def keeping(folder: Path) -> Iterator[None]:
    """InputError where a folder of the cache cannot be made or written."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written: {error.strerror or error}; XDG_CACHE_HOME names another place"
        ) from error


def make_room(folder: Path) -> None:
    """Before work that takes long, and whose result is to be kept there."""
    with keeping(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def path(kind: str = "cpu") -> Path:
    return cache_folder() / ("calibration.json" if kind == "cpu" else f"calibration-{kind}.json")


def store(calibration: Calibration, where: Path | None = None) -> Path:
    """Keep it in place of an older one of the same machine."""
    where = where or path(calibration.cluster.device.kind)
    with keeping(where.parent):
        where.parent.mkdir(parents=True, exist_ok=True)
        fresh = where.with_suffix(".new")
        fresh.write_text(calibration.to_json())
        fresh.replace(where)
    return where


def recall(torch_version: str, where: Path | None = None, kind: str = "cpu") -> Calibration | None:
    """This host's calibration by this torch, if there is one that can be read."""
    where = where or path(kind)
    try:
        found = Calibration.from_json(where.read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if (found.host, found.torch) == (platform.node(), torch_version) else None
