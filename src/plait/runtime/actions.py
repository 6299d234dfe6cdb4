"""Actions: what a place of a pipeline does at each letter of its schedule.

Every micro-batch has a graph of its own in every stage, made of leaves: the rank's weights, the
inputs, and the values that came over a wire.

    F    receive, run the stage's program, send
    B    receive the gradients of what was sent, run the graph backwards, send those of what came
    I    B without the gradients of weights; where a stage runs again, it does so first
    W    these

While an action computes, the messages of the next one are already on their way, and the moves of
chunks within its stage; none of these is when it ends, so the order on the group is that of actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.errors import InputError
from plait.passes.late import Queue
from plait.passes.pipeline import Wire
from plait.passes.schedule import Action, Schedule
from plait.passes.trace import Reach
from plait.rules.moves import take
from plait.runtime import channel
from plait.runtime.again import Kept
from plait.runtime.channel import Channel, Incoming
from plait.runtime.executor import attention
from plait.runtime.replicas import Reduction
from plait.runtime.stages import Feed, Piece, Stages

SALT = 0x9E3779B97F4A7C15 % 2**62  # apart from the seed of the whole call: a draw per micro-batch


@dataclass
class _Open:
    """What a stage keeps of one micro-batch between its forward and its backward."""

    received: dict[Wire, Tensor]
    feed: Kept
    made: dict[str, Tensor] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)  # by flat output
    queue: Queue = field(default_factory=Queue)


class Run:
    """One call on this rank."""

    def __init__(
        self,
        stages: Stages,
        order: Schedule,
        weights: Mapping[str, Tensor],
        leaves: Sequence[Any],
        seed: Tensor,
        grad: bool,
    ) -> None:
        self.stages, self.order, self.grad, self.seed = stages, order, grad, seed
        self.specs = stages.specs(leaves, grad)
        self.given_leaves = leaves
        self.leaves = [
            _leaf(x.to(stages.device), grad and x.requires_grad) if isinstance(x, Tensor) else x
            for x in leaves
        ]
        shares = stages.local.shares
        self.held = {s.weight.node: s.weight.name for s in shares if s.weight.name in weights}
        needs = {s.weight.node: grad and s.weight.requires_grad for s in shares}
        changed = {m.weight for m in stages.program.mutations} if grad else set()
        self.weights = {
            n: _leaf(weights[w].clone() if n in changed else weights[w], needs[n])
            for n, w in self.held.items()
        }
        self.originals = {n: weights[name] for n, name in self.held.items()}
        self.results: dict[tuple[int, int], Any] = {}  # (flat, micro-batch) of this rank's stages
        self._whole: dict[int, Tensor] = {}  # inputs with the rows of all replicas, by leaf
        self._open: dict[tuple[int, int], _Open] = {}
        self._queues: dict[tuple[int, int], Queue] = {}
        self._at = {a: i for line in order.places for i, a in enumerate(line)}
        self._grads: Mapping[int, Tensor] = {}
        self._coming: Mapping[int, Iterator[tuple[Wire, Action]]] = {}
        self._posted: dict[tuple[Wire, Action], Incoming] = {}
        self.ends = frozenset[int]()  # flat outputs that have a gradient, on any replica

    # -- the schedule --------------------------------------------------------------------------------

    def perform(self, kinds: str, grads: Mapping[int, Tensor] | None = None) -> None:
        """The actions of these kinds, in order; `grads`: of flat outputs, whole, on every rank."""
        self._grads = grads or {}
        reduction = self._reduction() if grads is not None else None
        mine = [a for a in self.order.places[self.stages.channel.place] if a.kind in kinds]
        self._coming = self._arrivals(kinds)
        posted = self._post(mine[0]) if mine else {}
        for action, following in zip(mine, [*mine[1:], None], strict=True):
            coming = self._post(following) if following is not None else {}
            with attention(self.stages.device):
                self._do(action, posted)
            posted = coming
        self.ends = frozenset(self._grads if reduction is None else reduction.finish())

    def reached(self, k: int, ends: frozenset[int] | None = None) -> Reach:
        return self.stages.reached(k, self.specs, frozenset(self._grads) if ends is None else ends)

    def _reduction(self) -> Reduction | None:
        """The sum over replicas of what this rank's weights get."""
        stages = self.stages
        leaves = {n: x for n, x in self.weights.items() if x.requires_grad}
        if stages.replicas is None:
            return None
        terms = Counter(
            name
            for k in range(len(stages.pieces))
            for name, stage in self.reached(k).sources
            if stages.place(stage) == stages.channel.place
        )
        return Reduction(
            stages.replicas,
            leaves,
            terms,
            sorted(self._grads),
            len(stages.given),
            1.0 if stages.joined else 1.0 / stages.replicas.count,
            stages.gradients,
        )

    def _arrivals(self, kinds: str) -> dict[int, Iterator[tuple[Wire, Action]]]:
        """By place, what its actions of these kinds send to this one, in their order."""

        def sent(actions: Sequence[Action]) -> Iterator[tuple[Wire, Action]]:
            for action in actions:
                if action.kind in kinds:
                    yield from (m for m in self._outgoing(action) if self.stages.place(m[1].stage) == here)

        here = self.stages.channel.place
        return {place: sent(actions) for place, actions in enumerate(self.order.places) if place != here}

    def _outgoing(self, action: Action) -> Iterator[tuple[Wire, Action]]:
        """What an action sends, in its order, and who reads it."""
        k = action.piece
        stage = self.stages.pieces[k].stages[action.stage]
        if action.kind == "F":
            yield from ((wire, Action(wire.target, "F", k)) for wire in stage.sends)
        elif action.kind != "W":
            values = self.reached(k).values
            reads = (wire for wire in stage.receives if wire.value in values)
            yield from ((wire, Action(wire.source, action.kind, k)) for wire in reads)

    def _post(self, action: Action) -> dict[Wire, Incoming]:
        """The receives of an action. What comes from one place is received in the order in which it sends."""
        out = {}
        for wire in self._incoming(action):
            place = self.stages.place(_sender(wire, action).stage)
            if place == self.stages.channel.place:
                out[wire] = self._expect(wire, action, place)
                continue
            while (wire, action) not in self._posted:
                message = next(self._coming[place])
                self._posted[message] = self._expect(*message, place)
            out[wire] = self._posted.pop((wire, action))
        return out

    def _expect(self, wire: Wire, reader: Action, place: int) -> Incoming:
        spec = self.specs[reader.piece][wire.value]
        return self.stages.channel.expect(spec, place, self._tag(wire, reader), self.stages.device)

    def _incoming(self, action: Action) -> Sequence[Wire]:
        stage = self.stages.pieces[action.piece].stages[action.stage]
        match action.kind:
            case "F":
                return stage.receives
            case "W":
                return ()
        values = self.reached(action.piece).values
        return [wire for wire in stage.sends if wire.value in values]

    def _do(self, action: Action, posted: Mapping[Wire, Incoming]) -> None:
        came = {wire: incoming.wait() for wire, incoming in posted.items()}
        for wire in came:
            self._settle(_sender(wire, action))
        before = self.stages.transport.open
        match action.kind:
            case "F":
                self._forward(action, came)
            case "B":
                self._backward(action, came)
                self._pay(action)
            case "I":
                self._backward(action, came)
            case "W":
                self._pay(action)
        assert self.stages.transport.open == before, f"{action} ends while moves that it started are on their way"

    def _settle(self, sender: Action) -> None:
        self.stages.channel.settle(self.stages.place(sender.stage), self._at[sender])

    def _send(self, x: Tensor, wire: Wire, reader: Action) -> None:
        x = self.specs[reader.piece][wire.value].packed(x)
        self.stages.channel.send(x, self.stages.place(reader.stage), self._tag(wire, reader), self._at[reader])

    def _tag(self, wire: Wire, reader: Action) -> int:
        what = channel.VALUE if reader.kind == "F" else channel.GRADIENT
        return Channel.tag(what, self.stages.pieces[reader.piece].numbers[wire], reader.piece)

    # -- forward -------------------------------------------------------------------------------------

    def _forward(self, action: Action, came: Mapping[Wire, Tensor]) -> None:
        index, k = action.stage, action.piece
        piece, specs = self.stages.pieces[k], self.specs[k]
        stage = piece.stages[index]
        received = {w: came[w].requires_grad_(specs[w.value].grad) for w in stage.receives}
        feed: list[Any] = [self.weights[n] for n in stage.weights]
        feed += [self._input(piece, n, k) for n in stage.inputs]
        if stage.seeded:
            feed.append((self.seed + k * SALT) % 2**62)
        opened = _Open(received, Kept.of([*feed, *received.values()]))
        flat = self._run(opened, index, k)
        for wire, reader in self._outgoing(action):
            self._send(opened.made[wire.value], wire, reader)
        for i, value in zip(stage.results, flat[len(flat) - len(stage.results) :], strict=True):
            self.results[i, k] = value.detach() if isinstance(value, Tensor) else value
        if self.grad:
            self._open[index, k] = opened
            if self.stages.again:
                opened.made, opened.results, opened.queue = {}, {}, Queue()

    def _run(self, opened: _Open, index: int, k: int) -> Sequence[Any]:
        """A stage's program; what its backward begins with stays in `opened`."""
        piece = self.stages.pieces[k]
        stage = piece.stages[index]
        feed = opened.feed.values
        if self.stages.apart:
            feed = *feed, opened.queue
        with torch.set_grad_enabled(self.grad):
            graphed = self.grad == self.stages.program.training and index in piece.trips
            flat = piece.trips[index](feed) if graphed else piece.modules[index](*feed)
        made = dict(zip(stage.makes, flat, strict=True))
        opened.made = {w.value: made[w.value] for w in stage.sends}
        last = flat[len(flat) - len(stage.results) :]
        opened.results = {
            i: x for i, x in zip(stage.results, last, strict=True) if isinstance(x, Tensor)
        }
        return flat  # type: ignore[no-any-return]

    def _input(self, piece: Piece, name: str, k: int) -> Any:
        source = piece.feeds[name]
        if source.joined is not None:
            return self._joined(source)
        x = self.leaves[source.leaf]
        with torch.set_grad_enabled(self.grad):
            return take(x, source.cut.dim, source.cut.rows[k]) if source.cut is not None else x

    def _joined(self, source: Feed) -> Tensor:
        """An input with the rows of all replicas, fetched once."""
        if source.leaf not in self._whole:
            replicas, x = self.stages.replicas, self.leaves[source.leaf]
            assert replicas is not None and source.joined is not None
            if x.requires_grad:
                raise InputError(
                    f"step over {replicas.count} replicas: the loss divides by what it makes of all rows "
                    f"of input {source.leaf}, which asks for a gradient: give it detached"
                )
            self._whole[source.leaf] = replicas.gather(x, source.joined)
        return self._whole[source.leaf]

    # -- backward ------------------------------------------------------------------------------------

    def _backward(self, action: Action, came: Mapping[Wire, Tensor]) -> None:
        index, k = action.stage, action.piece
        stage = self.stages.pieces[k].stages[index]
        kept = self._open.pop((index, k))
        if self.stages.again:
            weights = [self.held[n] for n in stage.weights]
            values = [*stage.inputs, *["seed"] * stage.seeded, *(w.value for w in stage.receives)]
            kept.feed.check([*weights, *values])
            self._run(kept, index, k)
        self._queues[index, k] = kept.queue
        pairs = [
            (value, self._rows(i, self._grads[i], k))
            for i, value in kept.results.items()
            if i in self._grads and k in self.stages.parts(i)
        ]
        pairs += [(kept.made[wire.value], grad) for wire, grad in came.items()]
        self._gradients(action, [(t, g) for t, g in pairs if t.requires_grad])
        for wire, reader in self._outgoing(action):
            x = kept.received[wire]
            self._send(x.grad if x.grad is not None else torch.zeros_like(x), wire, reader)

    def _gradients(self, action: Action, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    def _pay(self, action: Action) -> None:
        self._queues.pop((action.stage, action.piece)).pay()

    def _rows(self, flat: int, grad: Tensor, k: int) -> Tensor:
        """A micro-batch's part of the gradient of an output."""
        given = self.stages.given[flat]
        if given.kind != "shard":
            return grad
        assert given.cut is not None
        return take(grad, given.cut.dim, given.cut.rows[k])


def _leaf(x: Tensor, grad: bool) -> Tensor:
    return x.detach().requires_grad_(grad)


def _sender(wire: Wire, reader: Action) -> Action:
    """The action whose message `reader` receives: of the stage at the other end."""
    return Action(wire.source if reader.kind == "F" else wire.target, reader.kind, reader.piece)
