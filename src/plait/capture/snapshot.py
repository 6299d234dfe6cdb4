"""Snapshot: what capture reads from a module and no graph holds, and whether it is still so.

    attributes   plain values and containers of every submodule, of the objects that they hold
                 (configurations), and which submodules, hooks and parameters there are
    flags        `training` of every submodule, `requires_grad` of every parameter
    contents     digests of the tensors that were folded into constants

Taking one walks the whole module. `holds()` is for every call: it asks each dict for its version, as torch's own
guards do, and compares entries by identity only where one has moved; about a third of a microsecond a module. It
does not look at what a tensor holds, only at its version.
What no walk reaches: globals, closures, attributes of classes, and objects without `__dict__`.
"""

from __future__ import annotations

import hashlib
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from enum import Enum
from itertools import chain
from operator import attrgetter, eq, is_
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version

from plait.capture.hooks import BACKWARD, FORWARD

Change = tuple[str, str]  # what it is now, what it was
LARGE = 10_000  # entries: a longer container is data, and known by its identity and its length


@dataclass(frozen=True)
class Facts:
    """By the names of the model: `layers.0.scale`, `layers.0.training`, `head.weight.requires_grad`."""

    attributes: Mapping[str, Any]
    flags: Mapping[str, bool]
    contents: Mapping[str, str]

    def changes(self, new: Facts) -> dict[str, Change]:
        """What `new` has otherwise; contents are compared where both have read them."""
        shared = self.contents.keys() & new.contents.keys()
        pairs = [(self.attributes, new.attributes), (self.flags, new.flags)]
        pairs += [({n: x.contents[n] for n in shared} for x in (self, new))]  # type: ignore[list-item]
        return {
            name: (_spell(b.get(name, _NOTHING)), _spell(a.get(name, _NOTHING)))
            for a, b in map(tuple, pairs)
            for name in sorted(a.keys() | b.keys())
            if not _same(a.get(name, _NOTHING), b.get(name, _NOTHING))
        }


@dataclass(frozen=True, eq=False)
class Snapshot:
    facts: Facts
    _flat: _Flat

    @classmethod
    def of(
        cls,
        module: nn.Module,
        folded: Collection[str] = (),
        without: Collection[str] = (),
        *,
        attributes: bool = True,
    ) -> Snapshot:
        """`folded`: names of tensors in constants; `without`: of attributes that forward sets."""
        walk = _Walk(frozenset(folded), frozenset(without), attributes)
        walk.module("", module)
        return cls(Facts(walk.attributes, walk.flags, walk.contents), walk.flat())

    def holds(self) -> bool:
        """False where something was assigned or changed in place, if only to an equal value."""
        return self._flat.unchanged()


@dataclass(eq=False)
class _Flat:
    """Everything that was walked, as the same objects one after another."""

    dicts: InitVar[list[dict[Any, Any]]]
    lists: list[list[Any]]
    sets: list[set[Any]]
    large: list[Any]
    parameters: list[Tensor]
    tensors: list[Tensor]
    versions: list[int] = field(init=False)  # of `filled`: other ones after each assignment, even of the same value

    def __post_init__(self, dicts: list[dict[Any, Any]]) -> None:
        self.empty = [d for d in dicts if not d]  # most: hooks that nobody has registered
        self.filled = [d for d in dicts if d]
        self.versions = self._versions()
        self.entries, self.rest = [*self._entries()], [*self._rest()]
        self.members = [set(s) for s in self.sets]

    def unchanged(self) -> bool:
        if any(self.empty):
            return False
        versions = self._versions()
        if versions != self.versions:
            if not _alike(self._entries(), self.entries):
                return False
            self.versions = versions
        return _alike(self._rest(), self.rest) and all(map(eq, self.sets, self.members))

    def _versions(self) -> list[int]:
        return [*map(dict_version, self.filled)]

    def _entries(self) -> Iterator[list[Any]]:
        yield [*map(len, self.filled)]
        yield [*chain.from_iterable(self.filled)]
        yield [*chain.from_iterable(map(dict.values, self.filled))]

    def _rest(self) -> Iterator[list[Any]]:
        yield [*map(len, self.lists), *map(len, self.large)]
        yield [*chain.from_iterable(self.lists)]
        yield [*map(_REQUIRES_GRAD, self.parameters)]
        yield [*map(_version, self.tensors)]


def _alike(now: Iterable[list[Any]], then: Iterable[list[Any]]) -> bool:
    return all(
        len(a) == len(b) and (all(map(is_, a, b)) or _plainly(a, b)) for a, b in zip(now, then, strict=True)
    )


def _plainly(now: list[Any], then: list[Any]) -> bool:
    """Equal lists of lengths, versions or names: these may be other objects."""
    kinds = (int, str)
    return all(
        a is b or (type(a) is type(b) and type(a) in kinds and a == b)
        for a, b in zip(now, then, strict=True)
    )


class _Walk:
    def __init__(self, folded: frozenset[str], without: frozenset[str], all_attributes: bool) -> None:
        self.folded, self.without, self.all_attributes = folded, without, all_attributes
        self.attributes: dict[str, Any] = {}
        self.flags: dict[str, bool] = {}
        self.contents: dict[str, str] = {}
        self.seen: dict[int, str] = {}
        self.dicts: list[dict[Any, Any]] = []
        self.lists: list[list[Any]] = []
        self.sets: list[set[Any]] = []
        self.large: list[Any] = []
        self.parameters: list[Tensor] = []
        self.tensors: list[Tensor] = []

    def flat(self) -> _Flat:
        return _Flat(self.dicts, self.lists, self.sets, self.large, self.parameters, self.tensors)

    # -- modules -------------------------------------------------------------------------------------

    def module(self, path: str, module: nn.Module) -> None:
        self.seen[id(module)] = path
        self.attributes[path] = type(module) if self.all_attributes else None
        self.flags[_join(path, "training")] = module.training
        self.dicts.append(module.__dict__)
        if self.all_attributes:
            for name, value in module.__dict__.items():
                if name not in _APART:
                    self.value(_join(path, name), value)
            for name in _HOOKS:
                self._hooks(path, name, module.__dict__.get(name))
        for name, tensor in self._table(module._parameters):
            self._parameter(_join(path, name), tensor)
        for name, tensor in self._table(module._buffers):
            self._tensor(_join(path, name), tensor)
        for name, child in self._table(module._modules):
            self._child(_join(path, name), child)

    def _table(self, table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        if table:
            self.dicts.append(table)
            yield from list(table.items())

    def _hooks(self, path: str, name: str, hooks: dict[int, Any] | None) -> None:
        if hooks is not None:
            self.dicts.append(hooks)
            for number, hook in enumerate(hooks.values()):
                self.attributes[f"{_join(path, name)}[{number}]"] = hook

    def _child(self, path: str, child: nn.Module | None) -> None:
        if child is None or id(child) in self.seen:
            self.attributes[path] = None if child is None else _Again(self.seen[id(child)])
        else:
            self.module(path, child)

    def _parameter(self, path: str, tensor: Tensor | None) -> None:
        if self.all_attributes:
            self.attributes[path] = tensor is not None
        if tensor is not None:
            self.flags[_join(path, "requires_grad")] = tensor.requires_grad
            self.parameters.append(tensor)

    def _tensor(self, path: str, tensor: Tensor | None, always: bool = False) -> None:
        if self.all_attributes:
            self.attributes[path] = tensor is not None
        if tensor is not None and (always or path in self.folded) and _has_values(tensor):
            self.contents[path] = digest(tensor)
            self.tensors.append(tensor)

    # -- attributes ----------------------------------------------------------------------------------

    def value(self, path: str, value: Any, inside: bool = False) -> None:
        """`inside` a container, where a constant that is made of a tensor has no name."""
        if path in self.without:
            return
        if isinstance(value, Tensor):
            self._tensor(path, value, inside)
        elif isinstance(value, _PLAIN) or value is None:
            self.attributes[path] = value
        elif id(value) in self.seen:
            self.attributes[path] = _Again(self.seen[id(value)])
        elif isinstance(value, nn.Module):
            self.module(path, value)
        else:
            self._object(path, value)

    def _object(self, path: str, value: Any) -> None:
        self.seen[id(value)] = path
        kind = type(value)
        if isinstance(value, (dict, list, tuple, set)) and len(value) > LARGE:
            self.large.append(value)
            self.attributes[path] = value
            self.attributes[f"{path}.len"] = len(value)
        elif isinstance(value, dict):
            self._items(path, value, f"{path}[{{!r}}]")
        elif isinstance(value, (list, tuple)):
            self.attributes[path] = kind, len(value)
            if isinstance(value, list):
                self.lists.append(value)
            for i, item in enumerate(value):
                self.value(f"{path}[{i}]", item, inside=True)
        elif isinstance(value, set):
            self.sets.append(value)
            self.attributes[path] = frozenset(value)
        elif not isinstance(value, _NAMED) and _is_data(value):
            self._items(path, vars(value), f"{path}.{{}}")
            self.attributes[path] = kind
        else:
            self.attributes[path] = value

    def _items(self, path: str, held: dict[Any, Any], spelling: str) -> None:
        self.dicts.append(held)
        self.attributes[path] = type(held), len(held)
        for name, item in list(held.items()):
            self.value(spelling.format(name), item, inside=True)


# -- helpers -----------------------------------------------------------------------------------------


def digest(tensor: Tensor) -> str:
    """Of its values, shape and dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    found = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _is_data(x: Any, within: frozenset[int] = frozenset()) -> bool:
    """An object that holds plain values and other data: a configuration. One that holds modules,
    tensors, files or locks does something, and is known by its identity."""
    if x is None or isinstance(x, (*_PLAIN, set, frozenset, type, FunctionType)) or id(x) in within:
        return True
    within |= {id(x)}
    if isinstance(x, dict):
        return all(_is_data(v, within) for v in x.values())
    if isinstance(x, (list, tuple)):
        return all(_is_data(v, within) for v in x)
    room = type(x).__module__.split(".")[0]
    theirs = room == "torch" or room in sys.stdlib_module_names
    if theirs and not isinstance(x, _HOLDERS):
        return False
    inner = getattr(x, "__dict__", None)
    return type(inner) is dict and all(_is_data(v, within) for v in inner.values())


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout is torch.strided


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@dataclass(frozen=True)
class _Again:
    """What is also there under another name."""

    name: str


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, float):  # neither -0.0 nor nan is what == says
        return repr(a) == repr(b)
    return type(a) is type(b) and isinstance(a, _COMPARED) and bool(a == b)


def _spell(x: Any) -> str:
    """The same text on every rank: without addresses."""
    if x is _NOTHING:
        return "not there"
    if (isinstance(x, (*_PLAIN, frozenset)) and not isinstance(x, type)) or x is None:
        return repr(x)
    if isinstance(x, Enum):
        return str(x)
    if isinstance(x, _Again):
        return x.name or "the model"
    if isinstance(x, tuple):
        return f"{x[0].__qualname__} of {x[1]}"
    return str(getattr(x, "__qualname__", type(x).__qualname__))


_NOTHING = object()
_REQUIRES_GRAD = attrgetter("requires_grad")
_PLAIN = (
    bool, int, float, complex, str, bytes, slice, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_NAMED = (type, FunctionType, Enum)  # each is what it is, whatever its own attributes are
_COMPARED = (*_PLAIN, tuple, frozenset, _Again)
_HOLDERS = (SimpleNamespace, Namespace)
_HOOKS = (*FORWARD, *BACKWARD)
_APART = {
    "training", "_parameters", "_buffers", "_modules", *_HOOKS,
    "_non_persistent_buffers_set", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_is_full_backward_hook",
}  # fmt: skip
