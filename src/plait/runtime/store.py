"""Store: what a compiled module gives out and takes in whole: its state, gradients and checkpoints.

All of it is collective: every rank comes, and each brings or takes its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.asked import check_device
from plait.errors import WeightError
from plait.program import Weight
from plait.runtime import checkpoint, saving
from plait.runtime.agree import Agreement
from plait.runtime.holdings import Holdings, part_of
from plait.runtime.sharded import Sharded, remove
from plait.runtime.weights import Loading, Tensors, locate, open_source


@dataclass(frozen=True)
class Store:
    """`names`: those of the model's own `state_dict()`, in its order."""

    holdings: Holdings
    agreement: Agreement
    names: tuple[str, ...]

    def whole(self, keep: bool) -> dict[str, Tensor]:
        """Every name of the model's, tied ones the same tensor; {} where they are not to be kept."""
        held = self.holdings
        by_name = {n: (w, cut) for w, cut in held.weights() for n in w.names}
        whole: dict[str, Tensor] = {}
        live = held.live()
        self.agreement.meet("state_dict")
        with self.agreement.guard("state_dict"), torch.no_grad():
            for name in self.names:
                weight, cut = by_name[name]
                if weight.name not in whole:
                    value = held.everywhere(weight, cut, live.get(weight.name))
                    assert value is not None
                    whole[weight.name] = value.cpu().clone() if keep else value.new_empty(0)
        return {n: whole[by_name[n][0].name] for n in self.names} if keep else {}

    def take(self, state: Mapping[str, Tensor], strict: bool) -> Any:
        """This rank's rows of whole tensors."""
        weights = self._weights()
        with self.agreement.step("load_state_dict"), torch.no_grad():
            source = Tensors(state if strict else _known(state, weights))
            self._take(locate(_within(weights, state, strict), source=source))
        missing = [n for n in self.names if n not in state]
        extra = [n for n in state if n not in self.names]
        return nn.modules.module._IncompatibleKeys(missing, extra)

    def gradients(self, device: torch.device | str) -> dict[str, Tensor | None]:
        check_device(device)
        out: dict[str, Tensor | None] = {}
        self.agreement.meet("gradients")
        with self.agreement.guard("gradients"), torch.no_grad():
            for weight, cut, own in self.holdings.parameters():
                grad = self.holdings.everywhere(weight, cut, own)
                out[weight.name] = None if grad is None else grad.to(device).clone()
        return {n: out[n] for n in self._order() if n in out}

    def _order(self) -> list[str]:
        first = {n: w.name for w in self._weights() for n in w.names}
        return list(dict.fromkeys(first[n] for n in self.names if n in first)) + [
            w.name for w in self._weights() if w.name not in self.names
        ]

    def save(self, folder: Any, optimizer: Optimizer | None, shards: bool) -> None:
        agreement = self.agreement
        agreement.meet("save")
        with agreement.step("save"):
            checkpoint.prepare(folder, makes=self.holdings.first)
            saving.check(optimizer)
        if any(agreement.tell("save", shards or optimizer is not None)):  # a stage may have nothing to optimize
            with torch.no_grad():
                saving.save(Path(folder), self._held(), optimizer, agreement, agreement.rank)
            return
        state = self.whole(self.holdings.first)
        with agreement.step("save"):
            if self.holdings.first:
                specs = {n: checkpoint.Spec(tuple(t.shape), t.dtype) for n, t in state.items()}
                checkpoint.write(Path(folder), specs, state.values())
                remove(Path(folder))

    def load(self, folder: Any, optimizer: Optimizer | None, trusted: bool, prefix: str) -> None:
        with self.agreement.step("load"), torch.no_grad():
            saving.check(optimizer)
            source = open_source(folder, trusted, prefix)
            self._take(locate(_within(self._weights(), {}, True), source=source))
            if optimizer is not None:
                if not isinstance(source, Sharded):
                    raise WeightError(f"{folder} holds no optimizer: save(folder, optimizer) writes one")
                saving.load_optimizer(source.index, self._held(), optimizer)

    def _weights(self) -> list[Weight]:
        return [w for w, _ in self.holdings.weights()]

    def _take(self, loading: Loading) -> None:
        """This rank's rows of what was found."""
        rank, live = self.holdings.transport.rank, self.holdings.live()
        held = [(w, cut) for w, cut in self.holdings.weights() if w.name in live]
        for name, value in loading.load({w.name: part_of(w, c, rank) for w, c in held}).items():
            live[name].copy_(value)

    def _held(self) -> list[saving.Held]:
        """What is saved; the ranks that hold the same rows take turns in writing them."""
        live, replicas = self.holdings.live(), self.holdings.replicas
        rank, tp = self.holdings.transport.rank, self.holdings.transport.size
        out = []
        for i, (weight, cut) in enumerate(self.holdings.weights()):
            if weight.name in live and _saved(weight):
                turn = i % replicas.count == replicas.number and (cut is not None or i % tp == rank)
                writes = turn and self.holdings.counts(weight)
                out.append(saving.Held(weight, cut, rank, live[weight.name], writes))
        return out


def _known(state: Mapping[str, Tensor], weights: Sequence[Weight]) -> dict[str, Tensor]:
    names = {n for w in weights for n in w.names}
    return {k: v for k, v in state.items() if k in names}


def _within(weights: Sequence[Weight], state: Mapping[str, Tensor], strict: bool) -> list[Weight]:
    saved = [w for w in weights if _saved(w)]
    return saved if strict else [w for w in saved if any(n in state for n in w.names)]


def _saved(weight: Weight) -> bool:
    return weight.kind == "parameter" or (weight.kind == "buffer" and weight.persistent)
