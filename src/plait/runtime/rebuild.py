"""Tensors that no checkpoint holds (rotary frequencies, masks), computed again by the model's code.

A model built on the meta device never computed its non-persistent buffers. Its classes can do it
again, where a module remembers what it was made from: every argument of its constructor is an
attribute of the same name. The nearest such module around a tensor is built anew, parameters on
the meta device, and believed only if

    it has the parameters, the buffers and the plain attributes of the module it stands for, and
    builds under another random seed, or another default dtype, agree on the tensor.

Everything else is refused by name.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def recompute(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The values of those of `names` (buffers or tensor attributes) that can be computed."""
    builder = _Builder(model)
    found = {name: builder.value(name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built here have meta parameters and real buffers: `model = Model(config)`."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            meta = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            meta.__dict__.update(param.__dict__)
            self._parameters[name] = meta

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def attribute(module: nn.Module, name: str) -> torch.Tensor | None:
    """The tensor of that dotted name, or None."""
    path, _, last = name.rpartition(".")
    try:
        value = getattr(module.get_submodule(path), last, None)
    except AttributeError:
        return None
    return value if isinstance(value, torch.Tensor) else None


class _Builder:
    """Modules built again, each at most once for each seed and default dtype."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._built: dict[tuple[str, int, torch.dtype], nn.Module | None] = {}

    def value(self, name: str) -> torch.Tensor | None:
        wanted = attribute(self.model, name)
        path = self._nearest(name)
        if wanted is None or path is None:
            return None
        inner = name.removeprefix(f"{path}." if path else "")
        builds = [self._get(path, seed, torch.get_default_dtype()) for seed in (0, 1)]
        values = [attribute(m, inner) for m in builds if m is not None]
        first = values[0]
        if first is None or first.is_meta:
            return None
        if wanted.is_floating_point() and first.dtype != wanted.dtype:
            # Cast after it was made, or made in that dtype? Where both can be, both must agree.
            other = self._get(path, 0, wanted.dtype)
            made = attribute(other, inner) if other is not None else None
            if made is not None and made.dtype == wanted.dtype:
                values.append(made)
        cast = [v.detach().to(wanted.dtype) for v in values if v is not None]
        return cast[0] if all(_same(cast[0], v) for v in cast) else None

    def _nearest(self, name: str) -> str | None:
        """The innermost module around a tensor that can be built: `a.b`, `a`, then the root."""
        parts = name.split(".")[:-1]
        for i in range(len(parts), -1, -1):
            path = ".".join(parts[:i])
            if self._get(path, 0, torch.get_default_dtype()) is not None:
                return path
        return None

    def _get(self, path: str, seed: int, dtype: torch.dtype) -> nn.Module | None:
        key = (path, seed, dtype)
        if key not in self._built:
            self._built[key] = _build(self.model.get_submodule(path), seed, dtype)
        return self._built[key]


def _build(module: nn.Module, seed: int, dtype: torch.dtype) -> nn.Module | None:
    """The module from its own attributes, or None where it cannot be had or trusted."""
    arguments = _arguments(module)
    if arguments is None:
        return None
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), parameters_on_meta(), torch.device("cpu"):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            again = type(module)(**copy.deepcopy(arguments))
        except Exception:  # a constructor may want anything; then this module is not for us
            return None
        finally:
            torch.set_default_dtype(before)
    alike = _tensors(again) == _tensors(module) and _attributes(again) == _attributes(module)
    return again if alike else None


def _arguments(module: nn.Module) -> dict[str, Any] | None:
    """The constructor's arguments, read from the attributes of the same names."""
    signature = inspect.signature(type(module).__init__)
    arguments = {}
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return None
        if parameter.kind is parameter.VAR_KEYWORD or parameter.name == "device":
            continue
        value = getattr(module, parameter.name, parameter)
        if value is parameter or callable(value) or isinstance(value, torch.Tensor):
            return None
        arguments[parameter.name] = value
    return arguments


def _tensors(module: nn.Module) -> dict[str, Any]:
    """Names and shapes; not dtypes, which `.to(dtype)` changes."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {name: tuple(t.shape) for name, t in tensors}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The class and the plain attributes of every submodule."""
    return {name: (type(m), _plain_attributes(m)) for name, m in module.named_modules()}


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    values = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
    return {k: v for k, v in values.items() if _plain(v)}


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(_plain(k) and _plain(v) for k, v in value.items())
    return isinstance(value, _PLAIN)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_floating_point():
        a, b = a.nan_to_num(), b.nan_to_num()
    return a.shape == b.shape and torch.equal(a, b)
