"""`plait verify`, on each rank: outputs and gradients of the split model against the unsharded one.

A line for each output and each parameter, worst first among those that differ. The loss is a sum of
squares in which every element of every output has a weight of its own, so that no error cancels.
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


@dataclass(frozen=True)
class Line:
    """One comparison."""

    name: str
    same: bool
    difference: float
    note: str = ""

    def __str__(self) -> str:
        word = "same" if self.same else "DIFFERENT"
        return (
            f"{word:9}  {self.name}  largest difference {self.difference:.1e}  {self.note}".rstrip()
        )


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
    """Every output, then every parameter's gradient if it is a training run."""
    example = models.build(request.model, batch=request.batch, length=request.length)
    reference = models.whole(request.model).float()
    compiled = compile_model(
        reference,
        example.args,
        example.kwargs,
        training=request.training,
        algorithm=request.algorithm,
        pp=request.pp,
        dp=request.dp,
    )
    with torch.set_grad_enabled(request.training):
        for replica in range(request.dp):
            args, kwargs = of_replica((example.args, example.kwargs), replica)
            theirs = reference(*args, **kwargs)
            if request.training:
                torch.autograd.backward(loss(theirs) / request.dp)
            if replica == compiled.replica:
                ours = compiled(*args, **kwargs)
                yield from _outputs(ours, theirs)
    if request.training:
        torch.autograd.backward(loss(ours))
        mine = compiled.gradients()
        lines = list(_gradients(mine, reference))
        if not all(line.same for line in lines):
            lines = list(_gradients(mine, reference, _exact(reference, example, request.dp)))
        yield from lines


def _exact(reference: nn.Module, example: models.Example, dp: int) -> dict[str, Tensor | None]:
    """The gradients in float64, where the model's operators know it."""
    module = copy.deepcopy(reference).double()
    module.zero_grad()
    inputs = pytree.tree_map(
        lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x,
        (example.args, example.kwargs),
    )
    try:
        for replica in range(dp):
            args, kwargs = of_replica(inputs, replica)
            torch.autograd.backward(loss(module(*args, **kwargs)) / dp)
    except RuntimeError:
        return {}
    return {name: parameter.grad for name, parameter in module.named_parameters()}


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
            total = total + (x.double() * weight).pow(2).mean()
    return total


def _outputs(ours: Any, theirs: Any) -> Iterator[Line]:
    a, b = dict(_named(ours)), dict(_named(theirs))
    if a.keys() != b.keys():
        yield Line("the structure of the output", False, float("inf"), f"{list(a)} for {list(b)}")
        return
    for name in b:
        yield _line(f"output{name}", a[name], b[name])


def _gradients(
    ours: dict[str, Tensor | None], reference: nn.Module, exact: Mapping[str, Tensor | None] | None = None
) -> Iterator[Line]:
    for name, parameter in reference.named_parameters():
        a, b = ours.get(name), parameter.grad
        if a is None or b is None:
            note = "no gradient" if a is None and b is None else "a gradient on one side only"
            yield Line(f"gradient of {name}", (a is None) == (b is None), 0.0, note)
            continue
        yield _line(f"gradient of {name}", a, b, (exact or {}).get(name))


def _line(name: str, a: Tensor, b: Tensor, exact: Tensor | None = None) -> Line:
    """`exact`: in float64. What one process has lost to rounding, any order of sums may lose."""
    if a.shape != b.shape or a.dtype != b.dtype:
        note = f"{a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
        return Line(name, False, float("inf"), note)
    a, b = a.detach().double(), b.detach().double()
    difference = float((a - b).abs().max()) if b.numel() else 0.0
    if models.close(a, b) or exact is None:
        return Line(name, models.close(a, b), difference)
    lost = float((b - exact).abs().max())
    same = float((a - exact).abs().max()) <= NOISE * lost
    return Line(name, same, difference, f"one process is {lost:.1e} from float64")



def _named(outputs: Any) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in pytree.tree_leaves_with_path(outputs):
        if isinstance(leaf, Tensor):
            yield pytree.keystr(path), leaf
