"""What every rank checks of a compiled case, against one process.

Functions here run on the workers: each takes the group first, then the case's id, and returns
digests that must be the same bits on every rank (`alike`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import plait
from plait.cluster import Cluster, Device, Level, Protocol, Transport
from tests.cases import CASES, Case, Mesh, Setup
from tests.compare import (
    EXACT,
    Close,
    demand,
    differences,
    digest,
    discrepancies,
    execute,
    gradients,
    plain,
    reference,
    unequal,
)

Report = dict[str, str]


def free(n: int) -> Cluster:
    """A machine on which transfers cost nothing: whatever can be split is."""
    rates = tuple((name, 1e9) for name in ("float32", "float64", "bfloat16", "float16"))
    device = Device("slow", "cpu", rates, 1e6, 2**40, 0.0)
    gloo = Transport("gloo", (Protocol("free"),), ("one_shot", "ring"))
    return Cluster("free", device, (Level("free", n, 1e18, 0.0),), (gloo,))


def compiled(case: Case, setup: Setup, mesh: Mesh, group: Any, **options: Any) -> plait.Compiled:
    """The case as a user would compile it, on a machine where splitting pays."""
    defaults: dict[str, Any] = dict(cluster=free(mesh.size), measure=False, training=case.training)
    if mesh.micro_batches is not None:
        defaults["micro_batches"] = mesh.micro_batches
    return plait.compile(
        setup.model, setup.args, setup.kwargs, tp=mesh.tp, pp=mesh.pp, group=group,
        **(defaults | options),
    )  # fmt: skip


def run(parts: plait.Compiled, setup: Setup, train: bool) -> Any:
    return execute(parts, setup, parts.gradients if train else None)


def right(group: Any, name: str, mesh: str, dtype: torch.dtype, options: dict[str, Any]) -> Report:
    """R1, on this rank."""
    case = CASES[name]
    setup = case.setup(dtype)
    want, close = reference(case, setup, dtype)
    before = digest(setup.model.state_dict())
    parts = compiled(case, setup, Mesh.parse(mesh), group, **options)
    assert digest(setup.model.state_dict()) == before, "compile changed the model"
    demand(saved(parts, setup.model), about="state_dict()")
    got = run(parts, setup, case.training)
    demand(discrepancies(replace(got, buffers=want.buffers), want, close), about=f"{name} {mesh}")
    demand(moved(parts, setup.model, want.buffers, close), about="buffers")
    assert digest(setup.model.state_dict()) == before, "a call changed the model"
    longest = max(size for p in setup.model.parameters() for size in p.shape)
    if case.splits and 1 < Mesh.parse(mesh).tp <= longest:
        chosen = parts.plan.strategies.values()
        assert any(label.startswith("split(") for label in chosen), "nothing is split"
    return report(parts, setup.model, got)


def saved(parts: plait.Compiled, model: nn.Module) -> list[str]:
    """state_dict() is the model's own, bit for bit, in its order."""
    return differences(dict(parts.state_dict()), dict(model.state_dict()), "state", EXACT)


def moved(
    parts: plait.Compiled, model: nn.Module, want: Mapping[str, Tensor], close: Close
) -> list[str]:
    """The buffers that state_dict() holds are those of the plain module after the call."""
    state, names = parts.state_dict(), set(model.state_dict())
    kept = {name: value for name, value in want.items() if name in names}
    return differences({name: state[name] for name in kept}, kept, "buffers", close)


def report(parts: plait.Compiled, model: nn.Module, got: Any) -> Report:
    """Digests of what must agree between ranks: results, gathered and replicated gradients."""
    own = dict(model.named_parameters())
    out = {"out": digest(got.out), "loss": digest(got.loss), "inputs": digest(got.inputs)}
    out |= {f"gathered {name}": digest(g) for name, g in got.gradients.items()}
    for name, p in parts.named_parameters():
        if p.shape == own[name].shape:
            out[f"replicated {name}"] = digest(p)
            out[f"its gradient {name}"] = digest(p.grad)
    return out


def alike(reports: Sequence[Report]) -> None:
    demand(unequal(reports), about="between ranks")


# -- steps --------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
}
# Adam divides by the root of a square: an error of 1e-16 in a gradient that is zero by mathematics
# moves the weight by lr * 1e-16 / 1e-8.
STEPPED = (1e-7, 1e-9)


def steps(
    group: Any, name: str, mesh: str, optimizer: str, count: int, clip: float | None
) -> Report:
    """`count` steps in float64: weights are those of one process, replicas are the same bits."""
    from tests.compare import within

    case = CASES[name]
    setup = case.setup(torch.float64)
    parts = compiled(case, setup, Mesh.parse(mesh), group)
    module = copy.deepcopy(setup.model)
    ours = OPTIMIZERS[optimizer](parts.parameters())
    theirs = OPTIMIZERS[optimizer](module.parameters())
    for _ in range(count):
        norms = [_step(setup, parts, ours, clip), _step(setup, module, theirs, clip)]
        demand(differences(*norms, "norm"), about="clipping")
    state = dict(parts.state_dict())
    demand(differences(state, dict(module.state_dict()), "state", within(*STEPPED)), about=name)
    whole = {n: p for n, p in parts.named_parameters() if p.shape == state[n].shape}
    return {n: digest(p) for n, p in whole.items()} | {"state": digest(state)}


def _step(
    setup: Setup, module: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None
) -> Tensor:
    args, kwargs = setup.inputs()
    optimizer.zero_grad()
    setup.loss(module(*args, **kwargs)).backward()
    norm = torch.zeros(())
    if clip is not None:
        own = not isinstance(module, plait.Compiled)
        norm = (
            nn.utils.clip_grad_norm_(module.parameters(), clip)
            if own
            else plait.clip_grad_norm_(module, clip)
        )
    optimizer.step()
    return norm


def clipping(group: Any, name: str, mesh: str, norm_type: float, max_norm: float) -> Report:
    """The norm and the clipped gradients are those of one process, on every rank."""
    case = CASES[name]
    setup = case.setup(torch.float64)
    parts = compiled(case, setup, Mesh.parse(mesh), group)
    module = copy.deepcopy(setup.model)
    for each in (parts, module):
        args, kwargs = setup.inputs()
        setup.loss(each(*args, **kwargs)).backward()
    got = plait.clip_grad_norm_(parts, max_norm, norm_type=norm_type)
    want = nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type=norm_type)
    demand(
        differences(got, want, "norm"),
        differences(dict(parts.gradients()), gradients(module), "clipped"),
        about=f"clip to {max_norm}, norm {norm_type}",
    )
    return {"norm": digest(got)}


def stepped(group: Any, name: str, mesh: str, schedule: str, overlap: str | int = "auto") -> Report:
    """`compiled.step` twice by a schedule: loss, outputs and gradients of one process, added up."""
    case = CASES[name]
    setup = case.setup(torch.float64)
    module = copy.deepcopy(setup.model)
    parts = compiled(case, setup, Mesh.parse(mesh), group, schedule=schedule, overlap=overlap)
    for times in (1, 2):
        want = execute(module, setup, lambda: gradients(module))
        args, kwargs = setup.inputs()
        loss, out = parts.step(*args, loss_fn=setup.loss, **kwargs)
        assert not loss.requires_grad and loss.shape == ()
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        demand(
            differences(loss, want.loss, "loss"),
            differences(out, want.out),
            differences(dict(parts.gradients()), want.gradients, "gradients"),
            differences([x.grad for x in leaves if x.requires_grad], want.inputs, "inputs"),
            about=f"{name} {mesh} {schedule}, step {times}",
        )
    got = replace(want, out=out, loss=loss, gradients=dict(parts.gradients()))
    return report(parts, setup.model, got) | {"schedule": digest(schedules(parts))}


def schedules(parts: plait.Compiled) -> list[str]:
    """How the steps of a module were run, a line each."""
    return [line for line in parts.explain().splitlines() if line.startswith("step: ")]


# -- calls --------------------------------------------------------------------------------------


def accumulated(group: Any, name: str, mesh: str) -> Report:
    """Two backwards without zeroing add up; a forward without gradients changes nothing."""
    case = CASES[name]
    setup = case.setup(torch.float64)
    want = plain(setup)
    parts = compiled(case, setup, Mesh.parse(mesh), group)
    for _ in range(2):
        args, kwargs = setup.inputs()
        setup.loss(parts(*args, **kwargs)).backward()
    with torch.no_grad():
        args, kwargs = setup.inputs()
        out = parts(*args, **kwargs)
    assert not any(x.requires_grad for x in pytree.tree_leaves(out) if isinstance(x, Tensor))
    twice = {n: None if g is None else g * 2 for n, g in want.gradients.items()}
    demand(
        differences(out, want.out),
        differences(dict(parts.gradients()), twice, "twice"),
        about=f"{name} {mesh}",
    )
    args, kwargs = setup.inputs()
    parts.step(*args, loss_fn=setup.loss, **kwargs)
    thrice = {n: None if g is None else g * 3 for n, g in want.gradients.items()}
    demand(differences(dict(parts.gradients()), thrice, "and by a step"), about=f"{name} {mesh}")
    parts.zero_grad()
    got = run(parts, setup, True)
    demand(differences(got.gradients, want.gradients, "after zero_grad"), about=name)
    return report(parts, setup.model, got)


def interleaved(group: Any, name: str, mesh: str) -> Report:
    """Two forwards open at once, their backwards in the other order, on other inputs."""
    case = CASES[name]
    first = case.setup(torch.float64)
    second = replace(first, args=_other(first.args), kwargs=_other(first.kwargs))
    want = plain(first), plain(second)
    parts = compiled(case, first, Mesh.parse(mesh), group)
    outs = []
    for setup in (first, second):
        args, kwargs = setup.inputs()
        outs.append(parts(*args, **kwargs))
    second.loss(outs[1]).backward()
    only = {n: g if g is None else g.clone() for n, g in parts.gradients().items()}
    first.loss(outs[0]).backward()
    both = {n: _sum(g, want[1].gradients[n]) for n, g in want[0].gradients.items()}
    demand(
        differences(only, want[1].gradients, "the second's"),
        differences(dict(parts.gradients()), both, "of both"),
        about=f"{name} {mesh}",
    )
    return {"gradients": digest(dict(parts.gradients()))}


def _other(tree: Any) -> Any:
    def change(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return (x.detach() * 0.7 + 0.1).requires_grad_(x.requires_grad)
        return x.flip(-1) if x.dtype != torch.bool else x

    return pytree.tree_map_only(Tensor, change, tree)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def rank_of(group: Any) -> int:
    return dist.get_rank(group)
