"""`plait verify`, on each rank: outputs and gradients of the split model against the unsharded one, in float32.

A line for each output, each input that asks for a gradient and each parameter. The loss is a sum of squares in
which every element of every output has a weight of its own, so that no error cancels, around a point that is not
0, so that a model whose outputs are 0 has gradients, too.

What is small is held to its own size. Where that fails, float64 tells what one process has lost to rounding: any
order of sums may lose as much, if one process has anything left (`_same`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait import models
from plait.api import compile as compile_model

NOISE = 3.0  # times the distance of one process from float64
KNOWN = 0.03  # of a value on the mean: what has lost more says nothing, and a missing part would hide
ROUNDING = 1e-7  # of the largest gradient: 2^-23, float32's

Named = dict[str, Tensor | None]


@dataclass(frozen=True)
class Line:
    """One comparison."""

    name: str
    same: bool
    difference: float
    note: str = ""
    size: float = 0.0  # of the largest element of one process

    def __str__(self) -> str:
        word = "same" if self.same else "DIFFERENT"
        size = f"largest difference {self.difference:.1e} of {self.size:.1e}"
        return f"{word:9}  {self.name}  {size}  {self.note}".rstrip()


@dataclass(frozen=True)
class Request:
    """What the user asked of `plait verify`; plain data, sent to every worker."""

    model: models.Resolved
    training: bool
    batch: int
    length: int
    algorithm: str
    pp: int = 1
    dp: int = 1


def verify(request: Request) -> None:
    """One rank; rank 0 prints, every rank exits with 1 where anything differs on any."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, about torch's own
    lines = list(compare(request))
    wrong = [line for line in lines if not line.same]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, [str(line) for line in wrong])
    if dist.get_rank() == 0:
        for line in lines:
            print(line)
        for rank, texts in enumerate(told[1:], 1):
            for text in texts:
                print(f"rank {rank}: {text}")
        count = sum(map(len, told))
        print(f"{len(lines)} compared on each of {len(told)} ranks, {count} different")
    if any(told):
        raise SystemExit(1)


def compare(request: Request) -> Iterator[Line]:
    """Every output, then every gradient if it is a training run."""
    example = models.build(request.model, batch=request.batch, length=request.length)
    reference = models.whole(request.model).float()
    inputs = _floating((example.args, example.kwargs), torch.float32)
    compiled = compile_model(
        reference,
        *inputs,
        training=request.training,
        algorithm=request.algorithm,
        pp=request.pp,
        dp=request.dp,
    )
    with torch.set_grad_enabled(request.training):
        theirs = _alone(reference, inputs, request, compiled.replica)
        ours = _split(compiled, inputs, request)
        lines = list(_lines(ours, theirs))
        if not all(line.same for line in lines):
            lines = list(_lines(ours, theirs, _exact(reference, inputs, request, compiled.replica)))
    yield from lines


def _split(compiled: Any, inputs: Any, request: Request) -> Named:
    args, kwargs = fresh = _fresh(of_replica(inputs, compiled.replica))
    found = _outputs(out := compiled(*args, **kwargs))
    if request.training:
        torch.autograd.backward(loss(out))
        found |= _inputs(fresh, 1) | _gradients(compiled.gradients())
    return found


def _alone(module: nn.Module, inputs: Any, request: Request, own: int) -> Named:
    """The outputs of one replica's batch, and the gradients of all batches."""
    found: Named = {}
    for replica in range(request.dp):
        args, kwargs = fresh = _fresh(of_replica(inputs, replica))
        out = module(*args, **kwargs)
        if request.training:
            torch.autograd.backward(loss(out) / request.dp)
        if replica == own:
            found = _outputs(out) | (_inputs(fresh, request.dp) if request.training else {})
    if request.training:
        found |= _gradients({name: p.grad for name, p in module.named_parameters()})
    return found


def _exact(reference: nn.Module, inputs: Any, request: Request, own: int) -> Named:
    """In float64, where the model's operators know it."""
    module = copy.deepcopy(reference).double()
    module.zero_grad()
    try:
        return _alone(module, _floating(inputs, torch.float64), request, own)
    except RuntimeError:
        return {}


def of_replica(inputs: Any, replica: int) -> Any:
    """A batch of its own for every replica: the same rows, from another one on."""

    def rolled(x: Any) -> Any:
        return x.roll(replica, 0) if isinstance(x, Tensor) and x.dim() and replica else x

    return pytree.tree_map(rolled, inputs)


def loss(outputs: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, (_, x) in enumerate(_named(outputs)):
        if x.is_floating_point() and x.requires_grad:
            weight = torch.arange(1, x.numel() + 1, dtype=torch.float64).add(i).cos().view_as(x)
            total = total + ((x.double() + 1) * weight).pow(2).mean()
    return total


# -- what is compared, by name -------------------------------------------------------------------------


def _outputs(out: Any) -> Named:
    return {f"output{name}": x.detach() for name, x in _named(out)}


def _inputs(inputs: Any, dp: int) -> Named:
    """Gradients of a replica's own loss."""
    asked = ((name, x) for name, x in _named(inputs) if x.requires_grad)
    return {f"gradient of input{n}": None if x.grad is None else x.grad * dp for n, x in asked}


def _gradients(grads: Mapping[str, Tensor | None]) -> Named:
    return {f"gradient of {name}": grad for name, grad in grads.items()}


def _named(tree: Any) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in pytree.tree_leaves_with_path(tree):
        if isinstance(leaf, Tensor):
            yield pytree.keystr(path), leaf


def _floating(inputs: Any, dtype: torch.dtype) -> Any:
    """The inputs with what is floating-point in that dtype, as the model's weights are."""

    def cast(x: Any) -> Any:
        floats = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().to(dtype).requires_grad_(x.requires_grad) if floats else x

    return pytree.tree_map(cast, inputs)


def _fresh(inputs: Any) -> Any:
    """Leaves of their own, without gradients."""

    def own(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    return pytree.tree_map(own, inputs)


# -- comparing -----------------------------------------------------------------------------------------


def _lines(ours: Named, theirs: Named, exact: Named | None = None) -> Iterator[Line]:
    if list(ours) != list(theirs):
        only = [*(f"{n} of the split model alone" for n in ours if n not in theirs),
                *(f"{n} of one process alone" for n in theirs if n not in ours)]  # fmt: skip
        yield Line("the structure of the output", False, float("inf"), ", ".join(only) or "another order")
    largest = max((_largest(x) for n, x in theirs.items() if x is not None and "gradient" in n), default=0.0)
    for name in theirs:
        if name in ours:
            scale = largest if name.startswith("gradient") else 0.0
            yield _line(name, ours[name], theirs[name], (exact or {}).get(name), scale)


def _line(name: str, a: Tensor | None, b: Tensor | None, exact: Tensor | None, scale: float) -> Line:
    if a is None or b is None:
        note = "no gradient" if a is None and b is None else "a gradient on one side only"
        return Line(name, (a is None) == (b is None), 0.0, note)
    if a.shape != b.shape or a.dtype != b.dtype:
        note = f"{a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
        return Line(name, False, float("inf"), note)
    a, b = _wide(a), _wide(b)
    difference = _largest(a - b)
    if models.close(a, b) or exact is None:
        return Line(name, models.close(a, b), difference, "", _largest(b))
    exact = _wide(exact)
    note = f"one process is {_largest(b - exact):.1e} from float64"
    return Line(name, _same(a, b, exact, scale), difference, note, _largest(b))


def _same(a: Tensor, b: Tensor, exact: Tensor, scale: float) -> bool:
    """Whether `a` is as near to float64 as one process's `b`, where that says anything.

    What one process knows to `KNOWN` may be `NOISE` times as far off, at the worst element and on the mean. Of
    what it knows less, only rounding beside the largest gradient passes: what is 0 by mathematics, as that of
    the bias of keys.
    """
    ours, lost = (a - exact).abs(), (b - exact).abs()
    if lost.mean() <= KNOWN * exact.abs().mean():
        return bool(ours.max() <= NOISE * lost.max() and ours.mean() <= NOISE * lost.mean())
    return max(_largest(ours), _largest(lost), _largest(exact)) <= NOISE * ROUNDING * scale


def _wide(x: Tensor) -> Tensor:
    return torch.view_as_real(x.detach().resolve_conj()).double() if x.is_complex() else x.detach().double()


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
