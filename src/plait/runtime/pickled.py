"""Folders of torch.distributed.checkpoint, for users who name one as trusted: its metadata is a pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from plait.runtime.checkpoint import Part, Spec, take

METADATA = ".metadata"  # the file that torch writes last


def is_pickled(folder: str | os.PathLike[str]) -> bool:
    return (Path(folder) / METADATA).is_file()


class Pickled:
    """The tensors of such a folder: a `weights.Source`. Each is read whole, one at a time.

    `prefix`: what stands before the names of the weights; what has other names is not read.
    """

    def __init__(self, folder: str | os.PathLike[str], prefix: str = "") -> None:
        # Half a second of imports.
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._folder, self._prefix = Path(folder), prefix
        found = FileSystemReader(folder).read_metadata().state_dict_metadata
        self.specs: Mapping[str, Spec] = {
            n.removeprefix(prefix): Spec(tuple(m.size), m.properties.dtype)
            for n, m in found.items()
            if isinstance(m, TensorStorageMetadata) and n.startswith(prefix)
        }

    def __str__(self) -> str:
        return str(self._folder)

    def read(self, name: str, part: Part | None = None) -> Tensor:
        from torch.distributed.checkpoint.state_dict_loader import load

        spec = self.specs[name]
        whole = torch.empty(spec.shape, dtype=spec.dtype)
        load({self._prefix + name: whole}, checkpoint_id=self._folder, no_dist=True)
        return whole if part is None else take(whole, part)
