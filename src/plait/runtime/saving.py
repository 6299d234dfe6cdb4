"""Saving: a compiled module and its optimizer, to a sharded checkpoint and from it, on any mesh.

An optimizer's state is tensors of the shape of their weight (averages), which are cut as the weight is,
and numbers (steps), which every holder of the weight has. Options of its groups are JSON. What is of another
kind is refused by name: it could not be cut for another mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.errors import InputError, WeightError
from plait.program import Weight
from plait.rules.moves import Cut
from plait.runtime import sharded
from plait.runtime.agree import Agreement
from plait.runtime.checkpoint import Part, Spec, whole
from plait.runtime.sharded import MODEL, OPTIMIZER, Index, Piece, own_rows


@dataclass(frozen=True)
class Held:
    """A weight that this rank has a part of; `writes`: it is this rank that writes that part."""

    weight: Weight
    cut: Cut | None
    rank: int  # in the tensor-parallel group
    value: Tensor
    writes: bool

    @property
    def part(self) -> Part:
        """The rows that this rank holds."""
        return self._part(self.cut.rows[self.rank] if self.cut is not None else ())

    def _part(self, rows: Any) -> Part:
        part = list(whole(self.weight.shape))
        if self.cut is not None:
            part[self.cut.dim] = rows
        return tuple(part)

    def piece(self, x: Tensor) -> Piece | None:
        """The rows of `x`, which is cut as the weight, that this rank writes."""
        if not self.writes:
            return None
        spec = Spec(self.weight.shape, x.dtype)
        if self.cut is None:
            return Piece(spec, self.part, x.detach())
        own, held = self.cut.own[self.rank], self.cut.rows[self.rank]
        rows = own_rows(held, own, self.cut.dim, x.detach())
        return Piece(spec, self._part(own), rows) if rows.numel() else None


def check(optimizer: Any) -> None:
    """InputError for what is neither an optimizer nor None."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InputError(f"optimizer is {optimizer!r}; it takes None, or a torch.optim.Optimizer")


def save(
    folder: Path, held: Sequence[Held], optimizer: Optimizer | None, agreement: Agreement, rank: int
) -> None:
    """All ranks write; rank 0 writes the index when all have."""
    pieces: dict[str, Piece] = {}
    told: dict[str, Any] = {}
    every = any(agreement.tell("save", optimizer is not None))
    with agreement.step("save"):
        for h in held:
            pieces |= _named(MODEL + h.weight.name, h.piece(h.value))
        if optimizer is not None:
            told, states = _states(held, optimizer)
            pieces |= states
        elif every and (left := [h.weight.name for h in held if h.value.requires_grad]):
            raise InputError(f"save: other ranks give an optimizer, this one none for {', '.join(left)}")
    groups = _merged([t for t in agreement.tell("save", told) if t]) if every else None
    save = agreement.tell("save", sharded.number(folder))[0]
    with agreement.step("save"):
        file = sharded.write_shard(folder, save, rank, pieces)
    said = [file, {key: piece.said() for key, piece in pieces.items()}]
    files = agreement.tell("save", said)
    with agreement.step("save"):
        if agreement.leads:
            sharded.write_index(folder, [(f, p) for f, p in files if f], groups)


def _named(key: str, piece: Piece | None) -> dict[str, Piece]:
    return {} if piece is None else {key: piece}


# --- an optimizer's state -------------------------------------------------------------------


def _states(
    held: Sequence[Held], optimizer: Optimizer
) -> tuple[dict[str, Any], dict[str, Piece]]:
    """(groups and numbers, as JSON; this rank's rows of the tensors)."""
    by_id = {id(h.value): h for h in held}
    groups, numbers = list[Any](), dict[str, Any]()
    pieces: dict[str, Piece] = {}
    wrong = _strangers(optimizer, by_id)
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k != "params"}
        wrong += [f"option {k} is a {type(v).__name__}" for k, v in options.items() if not _plain(v)]
        found = [by_id[id(p)] for p in group["params"] if id(p) in by_id]
        groups.append({"options": _told(options), "names": [h.weight.name for h in found]})
        for h in found:
            for key, x in optimizer.state.get(h.value, {}).items():
                name = h.weight.name
                if isinstance(x, Tensor) and x.shape == h.value.shape:
                    pieces |= _named(f"{OPTIMIZER}{key}/{name}", h.piece(x))
                    numbers.setdefault(name, {})[key] = None
                elif x is None or isinstance(x, bool | int | float):
                    numbers.setdefault(name, {})[key] = {"value": x, "dtype": ""}
                elif isinstance(x, Tensor) and x.dim() == 0:
                    dtype = str(x.dtype).removeprefix("torch.")
                    numbers.setdefault(name, {})[key] = {"value": x.item(), "dtype": dtype}
                else:
                    what = f"{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                    wrong.append(f"{key} of {name} is {what}, the weight here {list(h.value.shape)}")
    if wrong:
        raise InputError(
            "\n  ".join([f"save: the state of {type(optimizer).__name__} is not one that can be "
                         "cut for another mesh; save its state_dict() yourself:", *wrong])
        )  # fmt: skip
    return {"groups": groups, "numbers": numbers}, pieces


def _strangers(optimizer: Optimizer, known: Mapping[int, Held]) -> list[str]:
    given = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
    others = [p for p in given if id(p) not in known]
    return [f"a parameter {list(p.shape)} of it is none of the module" for p in others]


def _plain(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return all(map(_plain, x))
    return x is None or isinstance(x, bool | int | float | str) or (isinstance(x, Tensor) and x.dim() == 0)


def _told(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {k: _told(v) for k, v in x.items()}
    if isinstance(x, tuple | list):
        return [_told(v) for v in x]
    return x.item() if isinstance(x, Tensor) else x


def _merged(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all ranks: each tells the weights of its own stage."""
    first = told[0]["groups"]
    for rank, each in enumerate(told):
        if [g["options"] for g in each["groups"]] != [g["options"] for g in first]:
            raise InputError(f"save: the optimizer's options on rank {rank} are not those of rank 0")
    groups = [
        {
            "options": first[i]["options"],
            "names": list(dict.fromkeys(n for t in told for n in t["groups"][i]["names"])),
        }
        for i in range(len(first))
    ]
    numbers = {name: keys for t in told for name, keys in t["numbers"].items()}
    return {"groups": groups, "numbers": numbers}


# --- and back -------------------------------------------------------------------------------


def load_optimizer(index: Index, held: Sequence[Held], optimizer: Optimizer) -> None:
    """This rank's rows of the states that another mesh has saved, and the options of the groups."""
    saved = index.optimizer
    if saved is None:
        raise WeightError(f"{index.folder} holds no optimizer: save(folder, optimizer) writes one")
    by_id = {id(h.value): h for h in held}
    wrong = _strangers(optimizer, by_id)
    groups = optimizer.param_groups
    if len(groups) != len(saved["groups"]):
        wrong.append(f"{len(groups)} groups, saved were {len(saved['groups'])}")
    for i, (group, was) in enumerate(zip(groups, saved["groups"], strict=False)):
        mine = [by_id[id(p)].weight.name for p in group["params"] if id(p) in by_id]
        lost = [n for n in mine if n not in was["names"]]
        wrong += [f"group {i} has {', '.join(lost)}, saved with none of them"] if lost else []
    if wrong:
        raise InputError("\n  ".join([f"{index.folder}: another optimizer was saved:", *wrong]))
    for group, was in zip(groups, saved["groups"], strict=True):
        for key, value in was["options"].items():
            group[key] = _as(group.get(key), value)
        for p in group["params"]:
            if id(p) in by_id:  # a stage that trains nothing has an empty one
                optimizer.state[p] = dict(_state(index, by_id[id(p)], group))


def _state(index: Index, h: Held, group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    name = h.weight.name
    for key, number in index.optimizer["numbers"].get(name, {}).items():
        if number is None:
            yield key, index.read(f"{OPTIMIZER}{key}/{name}", h.part).to(h.value.device)
        elif not number["dtype"]:
            yield key, number["value"]
        else:
            there = group.get("capturable") or group.get("fused")
            device = h.value.device if there else "cpu"
            yield key, torch.tensor(number["value"], dtype=getattr(torch, number["dtype"]), device=device)


def _as(now: Any, saved: Any) -> Any:
    """A saved option as the optimizer has it: JSON knows no tuples and no tensors."""
    if isinstance(now, Tensor):
        return torch.as_tensor(saved, dtype=now.dtype, device=now.device)
    return tuple(saved) if isinstance(now, tuple) else saved
