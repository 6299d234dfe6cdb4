"""Compiled: the module that a user holds. Weights in shares, programs by form of call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.errors import InputError, NotYetError
from plait.passes.partition import Share
from plait.plan.plan import Plan
from plait.program import Weight
from plait.report.explain import explain
from plait.rules.moves import Cut, Step, only_own
from plait.runtime import checkpoint
from plait.runtime.agree import Agreement
from plait.runtime.executor import Executable
from plait.runtime.places import Places
from plait.runtime.transport import Transport
from plait.runtime.weights import Tensors, locate

Recompile = Callable[[Sequence[Any], Mapping[str, Any], bool], Executable]
PROGRAMS = 16  # forms of call that are kept


@dataclass
class Holdings:
    """This rank's weights: what share of each, and, until they are placed, `tensors` by name."""

    shares: dict[str, Share]
    tensors: dict[str, Tensor]
    unused: dict[str, Weight]
    stages: Places | None = None  # of a pipeline: `tensors` are those of this rank's stages

    def weights(self) -> Iterator[tuple[Weight, Cut | None]]:
        for share in self.shares.values():
            yield share.weight, share.cut
        for weight in self.unused.values():
            yield weight, None


class Compiled(nn.Module):
    """The model on this rank. Made by `plait.compile`; call it as the model is called."""

    _programs: dict[bool, list[Executable]]
    _holdings: Holdings
    _transport: Transport
    _agreement: Agreement
    _recompile: Recompile
    _state_names: tuple[str, ...]
    _places: dict[str, Callable[[], Tensor]]

    def __init__(
        self,
        first: Executable,
        holdings: Holdings,
        transport: Transport,
        agreement: Agreement,
        recompile: Recompile,
        state_names: Sequence[str],
        mode: bool,
    ):
        super().__init__()
        state = self.__dict__
        state["_programs"] = {mode: [first]}
        state["_holdings"] = holdings
        state["_transport"] = transport
        state["_agreement"] = agreement
        state["_recompile"] = recompile
        state["_state_names"] = tuple(state_names)
        state["_places"] = {
            weight.name: _register(self, weight, holdings.tensors.pop(weight.name))
            for weight, _ in holdings.weights()
            if weight.name in holdings.tensors
        }
        nn.Module.train(self, mode)

    # -- calling -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        agreement = self._agreement
        executable, leaves = agreement.call(self._executable, args, kwargs, self.training)
        with agreement.guard("forward"):
            seed = agreement.seed() if executable.local.seeded else torch.zeros(0)
            return executable(self._live(), leaves, seed)

    def _live(self) -> dict[str, Tensor]:
        """Weights as the module holds them now; `.to()` or an assignment may have replaced them."""
        return {name: place() for name, place in self._places.items()}

    def _executable(self, args: Sequence[Any], kwargs: Mapping[str, Any], mode: bool) -> Executable:
        """The program for this form of call, made on all ranks if it is new."""
        known = self._programs.setdefault(mode, [])
        for executable in known:
            leaves = _leaves(executable, args, kwargs)
            if leaves is not None and executable.accepts(leaves):
                return executable
        made = self._recompile(args, kwargs, mode)
        known.append(made)
        del known[:-PROGRAMS]
        return made

    def step(self, *args: Any, target: Any = (), loss_fn: Any = None, **kwargs: Any) -> Any:
        """Forward and backward; returns (loss, outputs). Neither steps nor zeroes an optimizer."""
        out = self(*args, **kwargs)
        if loss_fn is not None:
            targets = target if isinstance(target, tuple) else (target,)
            loss = loss_fn(out, *targets)
        else:
            loss = _own_loss(out)
        loss.backward()
        return loss.detach(), out

    # -- what was chosen ---------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self._first.planned.plan

    @property
    def _first(self) -> Executable:
        return next(programs[0] for programs in self._programs.values() if programs)

    def explain(self) -> str:
        """How the model was split, every collective, and what stayed whole and why."""
        return explain(self.plan)

    # -- weights -----------------------------------------------------------------------------------

    def state_dict(self, *args: Any, rank0_only: bool = False, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Every name of the model's, whole tensors on the CPU; a collective.

        `rank0_only`: the other ranks get {}.
        """
        by_name = {n: (w, cut) for w, cut in self._holdings.weights() for n in w.names}
        whole: dict[str, Tensor] = {}
        out: dict[str, Tensor] = {}
        live = self._live()
        with self._agreement.guard("state_dict"), torch.no_grad():
            for name in self._state_names:
                weight, cut = by_name[name]
                if weight.name not in whole:
                    value = self._everywhere(weight, cut, live.get(weight.name))
                    assert value is not None
                    keep = not rank0_only or self._is_first
                    whole[weight.name] = value.cpu().clone() if keep else value.new_empty(0)
                out[name] = whole[weight.name]
        return out if not rank0_only or self._is_first else {}

    @property
    def _is_first(self) -> bool:
        stages = self._holdings.stages
        return self._transport.rank == 0 and (stages is None or stages.place == 0)

    def _everywhere(self, weight: Weight, cut: Cut | None, part: Tensor | None) -> Tensor | None:
        """The whole of a weight, or of its gradient, on every rank; None where there is none."""
        whole = None if part is None else self._whole(part.detach(), cut)
        stages = self._holdings.stages
        return whole if stages is None else stages.share(weight, whole)

    def _whole(self, part: Tensor, cut: Cut | None) -> Tensor:
        if cut is None:
            return part
        return self._transport.run(Step("gather"), part, cut, "native")

    def load_state_dict(
        self, state: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> Any:
        """Every rank takes its rows of the whole tensors in `state`."""
        weights = [w for w, _ in self._holdings.weights()]
        with self._agreement.step("load_state_dict"), torch.no_grad():
            source = Tensors(state) if strict else Tensors(_known(state, weights))
            loading = locate(_within(weights, state, strict), source=source)
            rank = self._transport.rank
            live = self._live()
            held = [(w, cut) for w, cut in self._holdings.weights() if w.name in live]
            parts = {w.name: part_of(w, cut, rank) for w, cut in held}
            for name, value in loading.load(parts).items():
                live[name].copy_(value)
        return nn.modules.module._IncompatibleKeys([], [])

    def gradients(self, device: torch.device | str = "cpu") -> dict[str, Tensor | None]:
        """Whole gradients by the names of the model's `named_parameters()`; a collective."""
        out: dict[str, Tensor | None] = {}
        live = self._live()
        with self._agreement.guard("gradients"), torch.no_grad():
            for weight, cut in self._holdings.weights():
                if weight.kind != "parameter":
                    continue
                own = live[weight.name].grad if weight.name in live else None
                grad = self._everywhere(weight, cut, own)
                out[weight.name] = None if grad is None else grad.to(device).clone()
        return {n: out[n] for n in self._parameter_order() if n in out}

    def _parameter_order(self) -> list[str]:
        first = {n: w.name for w, _ in self._holdings.weights() for n in w.names}
        return list(dict.fromkeys(first[n] for n in self._state_names if n in first)) + [
            w.name for w, _ in self._holdings.weights() if w.name not in self._state_names
        ]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """One whole safetensors checkpoint, written by rank 0; all ranks must come."""
        self._agreement.meet("save")
        state = self.state_dict(rank0_only=True)
        with self._agreement.step("save"):
            if self._is_first:
                specs = {n: checkpoint.Spec(tuple(t.shape), t.dtype) for n, t in state.items()}
                checkpoint.write(Path(folder), specs, state.values())

    # -- norms -------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, over the whole model; equal on every rank."""
        grads = []
        live, stages = self._live(), self._holdings.stages
        for weight, cut in self._holdings.weights():
            grad = live[weight.name].grad if weight.name in live else None
            if weight.kind == "parameter" and grad is not None:
                counts = stages is None or stages.counts(weight.name)
                grads.append((grad, _counted(grad, cut, self._transport.rank) if counts else None))
        with self._agreement.guard("clip_grad_norm_"), torch.no_grad():
            dtypes = {w.dtype for w, _ in self._holdings.weights() if w.kind == "parameter"}
            zero = torch.zeros(
                (),
                dtype=torch.float64 if torch.float64 in dtypes else torch.float32,
                device=grads[0][0].device if grads else "cpu",
            )
            own = [part for _, part in grads if part is not None]
            total = _norm(own, float(norm_type), zero, self._transport, stages)
            scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            for grad, _ in grads:
                grad.mul_(scale.to(grad.dtype))
        return total

    def __deepcopy__(self, memo: Any) -> Any:
        raise NotYetError("a compiled module cannot be copied; compile the model again")


def _leaves(e: Executable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """The call's leaves in the order of the program's inputs, or None: another structure."""
    flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if spec == e.planned.program.in_spec:
        return flat
    try:
        return list(e.planned.program.in_spec.flatten_up_to((tuple(args), dict(kwargs))))
    except ValueError:
        return None


def _register(root: nn.Module, weight: Weight, value: Tensor) -> Callable[[], Tensor]:
    """Put a weight where the model has it, under all its names; returns how to read it there."""
    if weight.kind == "constant":
        return lambda: value
    places = []
    for name in weight.names:
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            child = at._modules[part]
            assert child is not None
            at = child
        if weight.kind == "parameter":
            assert isinstance(value, nn.Parameter)
            at.register_parameter(last, value)
        else:
            at.register_buffer(last, value, persistent=weight.persistent)
        table = at._parameters if weight.kind == "parameter" else at._buffers
        places.append(partial(_read, table, last))
    return places[0]


def _read(table: dict[str, Any], name: str) -> Tensor:
    value = table[name]
    assert isinstance(value, Tensor)
    return value


def part_of(weight: Weight, cut: Cut | None, rank: int) -> checkpoint.Part:
    """The rows of every dim that `rank` stores."""
    part = list(checkpoint.whole(weight.shape))
    if cut is not None:
        part[cut.dim] = cut.rows[rank]
    return tuple(part)


def _known(state: Mapping[str, Tensor], weights: Sequence[Weight]) -> dict[str, Tensor]:
    names = {n for w in weights for n in w.names}
    return {k: v for k, v in state.items() if k in names}


def _within(weights: Sequence[Weight], state: Mapping[str, Tensor], strict: bool) -> list[Weight]:
    saved = [w for w in weights if w.kind == "parameter" or (w.kind == "buffer" and w.persistent)]
    return saved if strict else [w for w in saved if any(n in state for n in w.names)]


def _own_loss(out: Any) -> Tensor:
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if not isinstance(loss, Tensor):
        raise InputError("step() without loss_fn needs a model that returns its loss as `loss`")
    return loss


def _counted(grad: Tensor, cut: Cut | None, rank: int) -> Tensor | None:
    """What this rank counts of a gradient in a norm: its own rows; whole ones count on rank 0."""
    if cut is None:
        return grad if rank == 0 else None
    return only_own(grad, cut, rank)


def _norm(
    own: Sequence[Tensor], p: float, zero: Tensor, transport: Transport, stages: Places | None
) -> Tensor:
    """`zero`: of the dtype to sum in, the same on every rank, also where it counts nothing."""
    if p == float("inf"):
        top = zero
        for g in own:
            top = torch.maximum(top, g.abs().max().to(zero)) if g.numel() else top
        top = transport.run(Step("all_reduce", "max"), top, None, "native")
        return top if stages is None else stages.total(top, "max")
    total = zero
    for g in own:
        total = total + torch.linalg.vector_norm(g.to(zero.dtype), p).to(zero) ** p
    total = transport.run(Step("all_reduce"), total, None, "native")
    total = total if stages is None else stages.total(total, "sum")
    return total ** (1.0 / p)
