"""What forward makes of numbers alone has values while it is traced, for its Python to look at.

    positions = torch.arange(x.shape[1])
    if (positions.diff() == 1).all():        the way of a plain call, in every call

torch traces without values, and refuses such a line. So beside each such tensor stands one with values, of which
the same functions make the next; a size that is a symbol, an argument or a weight gives none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

LARGEST = 2**20  # elements: what is longer is not looked at


class Constants(TorchFunctionMode):
    """Active around one call of the model that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0  # functions
        self._values: Any = WeakIdKeyDictionary()  # by tensor: its values, and its version that has them

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.seen += 1
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        known = [x for x in tensors if x in self._values and self._values[x][1] == x._version]
        if not known:
            result = func(*args, **kwargs)
            if (func in _LIKE or (func in _MADE and not tensors)) and _plain(leaves):
                self._keep(result, lambda: _made(func, args, kwargs, result))
            return result
        all_known = len(known) == len(tensors) and _plain(leaves)
        if func in _READS and all_known:
            return self._of_values(func, args, kwargs)
        versions = {x: x._version for x in known}
        result = func(*args, **kwargs)
        changed = [x for x in known if x._version != versions[x]]
        if all_known and (changed or any(isinstance(x, Tensor) for x in pytree.tree_leaves(result))):
            same = [(y, value) for x in changed for y, value in self._sharing(x, versions[x])]
            if self._keep(result, lambda: self._of_values(func, args, kwargs)):
                self._values.update({y: (value, y._version) for y, value in same})
        return result

    def _of_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        def change(x: Any) -> Any:
            if isinstance(x, Tensor):
                return self._values[x][0]
            return torch.device("cpu") if isinstance(x, torch.device) else x

        args, kwargs = pytree.tree_map(change, (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            return func(*args, **kwargs)

    def _keep(self, result: Any, make: Callable[[], Any]) -> bool:
        results = pytree.tree_leaves(result)
        if any(isinstance(x, Tensor) and not _small(x) for x in results):
            return False
        try:
            values = pytree.tree_leaves(make())
        except Exception:  # of another device, a mode: it has no values then
            return False
        for x, value in zip(results, values, strict=True):
            if isinstance(x, Tensor) and _stands_for(value, x):
                self._values[x] = value, x._version
        return True

    def _sharing(self, changed: Tensor, version: int) -> list[tuple[Tensor, Tensor]]:
        """All that shares memory with it, and had values before."""
        storage = self._values[changed][0].untyped_storage()._cdata
        return [
            (x, value)
            for x, (value, then) in self._values.items()
            if then == version and value.untyped_storage()._cdata == storage
        ]


def _plain(leaves: list[Any]) -> bool:
    """No size is a symbol."""
    inner = [y for x in leaves for y in (x if isinstance(x, tuple) else (x,))]
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return not any(isinstance(x, symbols) for x in inner)


def _small(x: Tensor) -> bool:
    return all(type(n) is int for n in x.shape) and x.numel() <= LARGEST


def _stands_for(value: Any, x: Tensor) -> bool:
    return (
        type(value) is Tensor and value.shape == x.shape and value.dtype == x.dtype and value.device.type == "cpu"
    )


def _made(func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> Tensor:
    with _disable_current_modes(), torch.no_grad():
        if func not in _LIKE:
            return func(*args, **{k: v for k, v in kwargs.items() if k != "device"})  # type: ignore[no-any-return]
        given: Any = kwargs.get("fill_value", args[-1])
        fill: Any = given if _LIKE[func] is None else _LIKE[func]
        return torch.full(tuple(result.shape), fill, dtype=result.dtype)


_MADE = {torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.linspace, torch.tensor}
_LIKE: dict[Any, int | None] = {
    torch.zeros_like: 0, torch.ones_like: 1, torch.full_like: None,
    Tensor.new_zeros: 0, Tensor.new_ones: 1, Tensor.new_full: None,
}  # fmt: skip
_READS = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__,
    Tensor.item, Tensor.tolist, Tensor.is_nonzero, torch.is_nonzero, torch.equal, Tensor.equal,
    torch.allclose, Tensor.allclose,
}  # fmt: skip
