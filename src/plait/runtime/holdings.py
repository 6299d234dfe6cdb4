"""Holdings: the weights of a compiled module on this rank, and what all ranks' parts make together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.passes.partition import Share
from plait.program import Weight
from plait.rules.moves import Cut, Step
from plait.runtime import checkpoint, gradient, optimizers
from plait.runtime.gradient import Holder
from plait.runtime.mirror import register
from plait.runtime.places import Places
from plait.runtime.replicas import Replicas
from plait.runtime.staging import Seat
from plait.runtime.transport import Transport

Values = Mapping[str, Tensor]  # whole buffers by name


@dataclass
class Holdings:
    """What share of each weight is here, and, until they are placed, `tensors` by name."""

    shares: dict[str, Share]
    tensors: dict[str, Tensor]
    unused: dict[str, Weight]
    seat: Seat
    stages: Places | None = None  # of a pipeline: `tensors` are those of this rank's stages
    places: dict[str, Callable[[], Tensor]] = field(default_factory=dict)  # in the module
    none: tuple[nn.Parameter, Holder] | None = None  # see `no_rows`

    def place(self, module: nn.Module, guard: Callable[[str], AbstractContextManager[None]]) -> None:
        """From now on the tensors are the module's."""
        for weight, _ in self.weights():
            value = self.tensors.pop(weight.name, None)
            if value is not None:
                place = register(module, weight, value)
                if self.stages is None or self.stages.holds(weight.name):
                    self.places[weight.name] = place
                else:
                    assert isinstance(value, nn.Parameter)
                    self.none = value, Holder(weight.name, None, True, self.transport, guard)
                    optimizers.mark(*self.none)

    def live(self) -> dict[str, Tensor]:
        """Weights as the module holds them now; `.to()` or an assignment may have replaced them."""
        return {name: place() for name, place in self.places.items()}

    def weights(self) -> Iterator[tuple[Weight, Cut | None]]:
        for share in self.shares.values():
            yield share.weight, share.cut
        for weight in self.unused.values():
            yield weight, None

    def parameters(self) -> Iterator[tuple[Weight, Cut | None, Tensor | None]]:
        """Each with the gradient of this rank's part."""
        live = self.live()
        for weight, cut in self.weights():
            if weight.kind == "parameter":
                grad = live[weight.name].grad if weight.name in live else None
                yield weight, cut, None if grad is None else gradient.plain(grad)

    def holds(self, name: str, rank: int) -> bool:
        """Whether that rank has what a change is about: a flag of a weight, or something else."""
        if self.stages is None:
            return True
        name = name.removesuffix(".requires_grad")
        first = next((w.name for w, _ in self.weights() if name in w.names), None)
        return first is None or self.seat.seats.of(rank)[0] in self.stages.holders[first]

    # -- who else has what ---------------------------------------------------------------------------

    @property
    def transport(self) -> Transport:
        return self.seat.transport

    @property
    def replicas(self) -> Replicas:
        return self.seat.replicas

    @property
    def first(self) -> bool:
        """The one rank that keeps and writes what is whole."""
        leads = self.transport.rank == 0 and self.replicas.number == 0
        return leads and (self.stages is None or self.stages.place == 0)

    @property
    def staged(self) -> bool:
        return self.stages is not None and self.stages.channel.pp > 1

    def counts(self, weight: Weight) -> bool:
        """Whether a weight that several stages hold counts at this one."""
        return self.stages is None or self.stages.counts(weight.name)

    def everywhere(self, weight: Weight, cut: Cut | None, part: Tensor | None) -> Tensor | None:
        """The whole of a weight, or of its gradient, on every rank; None where there is none."""
        whole = None if part is None else self._whole(part.detach(), cut)
        return whole if self.stages is None else self.stages.share(weight, whole)

    def _whole(self, part: Tensor, cut: Cut | None) -> Tensor:
        if cut is None:
            return part
        return self.transport.run(Step("gather"), part, cut, "native")

    def buffers(self) -> dict[str, Tensor]:
        """Whole, by all their names; a collective."""
        live = self.live()
        with torch.no_grad():
            values = {
                weight.names: self.everywhere(weight, cut, live.get(weight.name))
                for weight, cut in self.weights()
                if weight.kind == "buffer"
            }
        return {n: v for names, v in values.items() if v is not None for n in names}

    def way_back(self) -> None:
        """A stage that trains nothing has a gradient of no rows: what is done to gradients ends there as elsewhere."""
        if self.none is not None and self.none[0].requires_grad:
            value, holder = self.none
            value.grad = gradient.rows_of(torch.zeros_like(value), holder)

    def tell_gradients(self, guard: Callable[[str], AbstractContextManager[None]]) -> None:
        """Torch's own clipping, scaler and optimizers learn which weights are not whole here."""
        live = self.live()
        for weight, cut in self.weights():
            own = live.get(weight.name)
            if isinstance(own, nn.Parameter) and (self.staged or cut is not None):
                holder = Holder(weight.name, cut, self.staged, self.transport, guard)
                optimizers.mark(own, holder)
                if own.dtype.is_floating_point or own.dtype.is_complex:
                    gradient.attach(own, holder)


def no_rows(weights: Iterable[Weight], here: Collection[str]) -> dict[str, checkpoint.Part]:
    """An optimizer cannot be made of no parameters: a stage that trains nothing has no rows of the last weight
    that learns, as a rank of tensor parallelism may have none of a weight of few."""
    learn = [w for w in weights if w.kind == "parameter" and w.requires_grad and w.shape]
    if not learn or any(w.name in here for w in learn):
        return {}
    last = learn[-1]
    return {last.name: ((), *checkpoint.whole(last.shape[1:]))}


def part_of(weight: Weight, cut: Cut | None, rank: int) -> checkpoint.Part:
    """The rows of every dim that `rank` stores."""
    part = list(checkpoint.whole(weight.shape))
    if cut is not None:
        part[cut.dim] = cut.rows[rank]
    return tuple(part)
