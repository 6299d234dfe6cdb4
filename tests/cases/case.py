"""What a case is: a small model that breaks sharding systems, and where it must be right.

A case is built anew, with the same seed, wherever it is needed: only its id travels to a worker.
Noise on every parameter keeps faults from hiding behind zero biases and norm weights of one; the
loss is never constant after a norm; sizes are odd where the kind of fault allows.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Mesh:
    """`tp2`, `pp3`, `tp2xpp2`, and micro-batches behind a slash: `pp2/4`."""

    tp: int = 1
    pp: int = 1
    micro_batches: int | None = None

    @property
    def size(self) -> int:
        return self.tp * self.pp

    @property
    def pipeline(self) -> bool:
        return self.pp > 1

    @classmethod
    def parse(cls, text: str) -> Mesh:
        found = re.fullmatch(r"(?:tp(\d+))?x?(?:pp(\d+))?(?:/(\d+))?", text)
        assert found is not None, f"no mesh: {text!r}"
        tp, pp, pieces = found.groups()
        return cls(int(tp or 1), int(pp or 1), int(pieces) if pieces else None)

    def __str__(self) -> str:
        axes = [f"{name}{n}" for name, n in (("tp", self.tp), ("pp", self.pp)) if n > 1]
        return "x".join(axes or ["tp1"]) + (f"/{self.micro_batches}" if self.micro_batches else "")


def probe(out: Any) -> Tensor:
    """A loss that weighs every element of every floating output differently."""
    leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
    learned = [x for x in leaves if x.requires_grad]  # none without gradients
    return torch.stack([_weigh(x) for x in learned or leaves]).sum()


def _weigh(x: Tensor) -> Tensor:
    x = x if x.dtype == torch.float64 else x.float()
    weights = torch.arange(1, x.numel() + 1, dtype=x.dtype).cos().view(x.shape)
    return (x * weights).sum() + (x * x).mean()


def columns(out: Tensor) -> Tensor:
    """The columns weighed against each other, squared: the handed cases' loss."""
    out = out if out.dtype == torch.float64 else out.float()
    weights = torch.arange(1, out.size(-1) + 1, dtype=out.dtype).cos()
    return (out * weights).sum(-1).pow(2).mean()


@dataclass(frozen=True)
class Setup:
    """A model, an example call, and the loss that closes it."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] = probe

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments as fresh leaves: a second run starts with no gradient."""
        args, kwargs = pytree.tree_map_only(Tensor, _fresh, (self.args, self.kwargs))
        return args, kwargs

    def to(self, dtype: torch.dtype) -> Setup:
        def cast(x: Tensor) -> Tensor:
            return _like(x, x.detach().to(dtype)) if x.is_floating_point() else x

        args, kwargs = pytree.tree_map_only(Tensor, cast, (self.args, self.kwargs))
        model = copy.deepcopy(self.model).to(dtype)
        return replace(self, model=model, args=args, kwargs=kwargs)


def _fresh(x: Tensor) -> Tensor:
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return _like(x, copy.copy_(x.detach()) if 0 not in x.stride() else x.detach())


def _like(x: Tensor, copy: Tensor) -> Tensor:
    return copy.requires_grad_(x.requires_grad)


@dataclass(frozen=True)
class Case:
    id: str
    build: Callable[[], Setup]
    meshes: tuple[Mesh, ...]
    right: Literal["R1", "R2"] = "R1"  # R2: an error at compile time on every rank is right too
    noise: bool = True  # on every parameter
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    inside: torch.dtype | None = None  # that it computes in, where it is shorter than its own
    splits: bool = True  # some weight must be split where transfers are free
    training: bool = True
    flat: tuple[str, ...] = ()  # parameters whose gradient is zero by mathematics, or None
    exact: bool = True  # ranks agree bit for bit and with one process: False for random operators

    def setup(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Setup:
        """The case's model and call; the same on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            setup = self.build()
            if self.noise:
                shake(setup.model)
            return setup if dtype == torch.float32 else setup.to(dtype)


def shake(model: nn.Module) -> None:
    """Noise on every parameter and floating buffer, so that none is zero, one or constant."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.1)


CASES: dict[str, Case] = {}


def case(
    meshes: str = "tp2 tp3", right: Literal["R1", "R2"] = "R1", **fields: Any
) -> Callable[[Callable[[], Setup]], Callable[[], Setup]]:
    """Register a builder under its own name."""

    def register(build: Callable[[], Setup]) -> Callable[[], Setup]:
        assert build.__name__ not in CASES, build.__name__
        parsed = tuple(Mesh.parse(text) for text in meshes.split())
        CASES[build.__name__] = Case(build.__name__, build, parsed, right, **fields)
        return build

    return register
