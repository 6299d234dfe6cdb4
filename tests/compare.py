"""Comparisons: every difference between two results, with its place, its size and its numbers.

`execute` runs a setup through any callable, plain module or compiled, and keeps what came out.
`differences` lists what differs between two such runs; `demand` fails with the whole list.

float64 runs are compared a million times tighter than float32 ones: a gradient that is small, or
zero by mathematics, cannot hide a factor of N there.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.cases.case import Case, Setup

TOLERANCES = {  # rtol, atol
    torch.float32: (1e-4, 1e-5),
    torch.float64: (1e-9, 1e-11),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
}


@dataclass(frozen=True)
class Run:
    """What one forward and backward left behind."""

    out: Any
    loss: Tensor
    gradients: dict[str, Tensor | None]
    inputs: list[Tensor | None]  # the gradients of the inputs that ask for one
    buffers: dict[str, Tensor]  # after the call


def execute(
    call: Callable[..., Any],
    setup: Setup,
    gradients: Callable[[], Mapping[str, Tensor | None]] | None = None,
    buffers: Callable[[], Mapping[str, Tensor]] = dict,
) -> Run:
    """Forward, loss, backward; `gradients` reads them by name (default: inference)."""
    args, kwargs = setup.inputs()
    with torch.set_grad_enabled(gradients is not None):
        out = call(*args, **kwargs)
        loss = setup.loss(out)
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    asked = [x for x in leaves if x.requires_grad]
    if gradients is None:
        return Run(_detached(out), loss.detach(), {}, [], dict(buffers()))
    loss.backward()
    grads = dict(gradients())
    return Run(_detached(out), loss.detach(), grads, [x.grad for x in asked], dict(buffers()))


def plain(setup: Setup, train: bool = True) -> Run:
    """A copy of the unsharded module, in one process."""
    module = copy.deepcopy(setup.model)
    return execute(
        module,
        setup,
        (lambda: gradients(module)) if train else None,
        lambda: dict(module.named_buffers()),
    )


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def _detached(out: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), out)


# -- differences -------------------------------------------------------------------------------


def differences(got: Any, want: Any, where: str = "out", close: Close | None = None) -> list[str]:
    """Every place where structure, type, shape, dtype or values differ."""
    close = close or within()
    if isinstance(want, Tensor):
        return _tensors(got, want, where, close)
    if type(got) is not type(want):
        return [f"{where}: {type(got).__name__} instead of {type(want).__name__}"]
    if isinstance(want, Mapping):
        return _mappings(got, want, where, close)
    if isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return [f"{where}: {len(got)} items instead of {len(want)}"]
        pairs = enumerate(zip(got, want, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]", close)]
    return [] if got == want else [f"{where}: {got!r} instead of {want!r}"]


def _mappings(got: Any, want: Any, where: str, close: Close) -> list[str]:
    if list(got) != list(want):
        missing, extra = [k for k in want if k not in got], [k for k in got if k not in want]
        if missing or extra:
            return [f"{where}: keys missing {missing}, extra {extra}"]
        return [f"{where}: keys in another order: {list(got)} instead of {list(want)}"]
    return [line for k in want for line in differences(got[k], want[k], f"{where}[{k!r}]", close)]


def _tensors(got: Any, want: Tensor, where: str, close: Close) -> list[str]:
    if not isinstance(got, Tensor):
        return [f"{where}: {got!r} instead of a tensor of {tuple(want.shape)}"]
    if got.shape != want.shape:
        return [f"{where}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"]
    if got.dtype != want.dtype:
        return [f"{where}: {got.dtype} instead of {want.dtype}"]
    return close(got, want, where)


Close = Callable[[Tensor, Tensor, str], list[str]]


def within(
    rtol: float | None = None, atol: float | None = None, dtype: torch.dtype | None = None
) -> Close:
    """Values equal up to a tolerance, by default the one of their dtype; others bit for bit.

    `dtype`: of the model. A float64 value made of float32 ones is no better than those.
    """

    def close(got: Tensor, want: Tensor, where: str) -> list[str]:
        if not want.is_floating_point() or (rtol == 0 and atol == 0):
            return _bits(got, want, where)
        own = [TOLERANCES[d] for d in (want.dtype, dtype or want.dtype)]
        r = max(default[0] for default in own) if rtol is None else rtol
        a = max(default[1] for default in own) if atol is None else atol
        return _beyond(got, want, a + r * want.double().abs(), where)

    return close


def _beyond(got: Tensor, want: Tensor, allowed: Tensor, where: str) -> list[str]:
    g, w = got.double(), want.double()
    same = (g == w) | (g.isnan() & w.isnan())
    error = (g - w).abs()
    bad = ~same & ~(error <= allowed)
    if not bad.any():
        return []
    excess = torch.where(bad, (error / allowed).nan_to_num(nan=torch.inf, posinf=torch.inf), 0.0)
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    ratio = _ratio(g, w)
    return [
        f"{where}: {int(bad.sum())} of {bad.numel()} values differ; "
        f"at {at} {g[at].item():.9g} instead of {w[at].item():.9g}{ratio}"
    ]


def _ratio(got: Tensor, want: Tensor) -> str:
    """A constant factor between the two is worth saying: it names most faults."""
    big = want.abs() > want.abs().max() * 1e-2
    if not big.any() or not want.abs().max() > 0:
        return ""
    ratio = got[big] / want[big]
    spread = ratio.max() - ratio.min()
    return f" (all x {ratio.mean().item():.4g})" if spread < 1e-3 * ratio.abs().max() else ""


def _bits(got: Tensor, want: Tensor, where: str) -> list[str]:
    if torch.equal(got, want) or (digest(got) == digest(want)):
        return []
    bad = got != want
    return [f"{where}: {int(bad.sum())} of {bad.numel()} values are not the same bits"]


EXACT = within(0, 0)


def reference(case: Case, setup: Setup, dtype: torch.dtype) -> tuple[Run, Close]:
    """What one process gives, and how near to it another run must come."""
    want = plain(setup, case.training)
    shortest = case.inside or dtype
    if shortest in (torch.float32, torch.float64):
        return want, within(dtype=dtype)
    exact = plain(setup.to(torch.float64), case.training)  # of the same rounded values
    return want, as_good_as(vars(want), vars(exact), dtype=shortest)


def as_good_as(own: Any, exact: Any, times: float = 3.0, dtype: torch.dtype | None = None) -> Close:
    """For short dtypes: as near to the float64 result as one process comes, times a factor.

    `own` is what one process gave in the dtype itself and `exact` what it gave in float64; the
    allowance is the largest error of the former, so `want` of the comparison must be `own`.
    `dtype`: that it computed in, where a value has more digits than those it was made of.
    """
    truth = {id(a): b for a, b in zip(_leaves(own), _leaves(exact), strict=True)}

    def close(got: Tensor, want: Tensor, where: str) -> list[str]:
        if not want.is_floating_point() or where == "loss":
            return []  # made of rounded numbers that are themselves compared
        best = truth[id(want)].double()
        eps = torch.finfo(dtype or want.dtype).eps
        noise = (want.double() - best).abs().max() + eps * best.abs().max()
        return _beyond(got, best, torch.full_like(best, float(noise) * times), where)

    return close


def _leaves(tree: Any) -> list[Any]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def discrepancies(got: Run, want: Run, close: Close | None = None) -> list[str]:
    """Everything in which two runs differ."""
    pairs = [
        ("out", got.out, want.out),
        ("loss", got.loss, want.loss),
        ("gradients", got.gradients, want.gradients),
        ("input gradients", got.inputs, want.inputs),
        ("buffers", got.buffers, want.buffers),
    ]
    return [line for name, a, b in pairs for line in differences(a, b, name, close)]


def demand(*groups: Sequence[str], about: str = "") -> None:
    """Fail with every difference."""
    lines = [line for group in groups for line in group]
    assert not lines, "\n  ".join([f"{about} differs:", *lines[:30]])


# -- across ranks ------------------------------------------------------------------------------


def digest(tree: Any) -> str:
    """A hash of every bit of a tree of tensors, and of its plain values."""
    out = hashlib.sha256()
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().contiguous().flatten()
            out.update(str((leaf.dtype, tuple(leaf.shape))).encode())
            out.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        else:
            out.update(repr(leaf).encode())
    return out.hexdigest()[:16]


def unequal(reports: Sequence[Mapping[str, str]]) -> list[str]:
    """Names whose digest is not the same in every rank's report; a name may lack on some ranks."""
    lines = []
    for name in dict.fromkeys(name for report in reports for name in report):
        seen = {rank: r[name] for rank, r in enumerate(reports) if name in r}
        if len(set(seen.values())) > 1:
            lines.append(f"{name}: not the same bits on ranks {seen}")
    return lines
