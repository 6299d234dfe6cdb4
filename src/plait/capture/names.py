"""Names of weights: those that torch's own modules of a graph cannot have (`graph`, `code`, `in`), and two of one."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.export import ExportedProgram


def renamed(
    exported: ExportedProgram, step: Callable[[ExportedProgram], ExportedProgram]
) -> ExportedProgram:
    """What `step` makes of it under names that fit, under the model's own again."""
    taken = {*exported.state_dict, *exported.constants}
    others = {name: _other(name, taken) for name in sorted(taken) if _unfit(name)}
    made = step(_rename(exported, others))
    return _rename(made, {other: name for name, other in others.items()})


def identity(tensor: Tensor) -> Any:
    """Equal for two names of one tensor."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _unfit(name: str) -> bool:
    """Whether a part is a keyword of Python, or the first one an attribute that a graph's module has."""
    parts = name.split(".")
    return parts[0] in _ATTRIBUTES or any(map(keyword.iskeyword, parts))


def _other(name: str, taken: set[str]) -> str:
    other = "w_" + name.replace(".", "_")
    while other in taken:
        other += "_"
    taken.add(other)
    return other


def _rename(exported: ExportedProgram, names: Mapping[str, str]) -> ExportedProgram:
    signature = exported.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        spec.target = names.get(spec.target or "", spec.target)
    for values in (exported.state_dict, exported.constants):
        for name in names.keys() & values.keys():
            values[names[name]] = values.pop(name)
    return exported


_ATTRIBUTES = {*dir(fx.GraphModule(nn.Module(), fx.Graph()))} - {*dir(nn.Module())}
