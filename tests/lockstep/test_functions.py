"""The user's own `torch.autograd.Function`: its backward is what runs, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.capture import capture
from plait.errors import CaptureError
from plait.rules.own import COTANGENT, SLOPED
from tests import pretend
from tests.cases import Setup
from tests.compare import demand, discrepancies, plain

Function = Callable[[Tensor], Tensor]


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Reversed(torch.autograd.Function):
    """With a number among the arguments, and nothing in its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.neg() * ctx.scale, None


class Bounded(torch.autograd.Function):
    """In the newer form, with a gradient that is nought where the value is small."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.abs().sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        assert ctx.needs_input_grad == (True,)
        return torch.where(y > 0.5, grad / (y + 1), 0.0) * 3 + grad.masked_fill(x > 0, 0)


class Gated(torch.autograd.Function):
    """Two arguments, which both get a gradient that is not the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate.sigmoid())
        return x * gate.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        return 2 * grad * gate, grad * x * 5


class Masked(torch.autograd.Function):
    """Chosen by masks, in four spellings; of the gradient some read the size or the dtype alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grad.clone()
        grad[x < 0] = 0
        large = torch.where(x > 0.5, grad, torch.zeros_like(grad))
        return grad * (x < 1).type_as(grad) + large + torch.where(x > 0.8, grad, torch.tensor(0.0))


class Clipped(Straight):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1, 1)


class Centred(Straight):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(-1, keepdim=True)


class Shifted(Straight):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 1


class Unsafe(Straight):
    """What is not chosen is no gradient."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.where(grad.new_ones(()) > 0, grad, torch.tensor(1.0))


class Constant(Straight):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.ones(2, 8)


class InPlace(Straight):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.round_()


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a * b


class Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(*grad.shape[:-1], 8)


straight = Straight.apply  # bound before any capture


class Blocks(nn.Module):
    """Equal blocks, so that all but the first are spliced in."""

    def __init__(self, function: Any, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(function) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(5, 8), nn.Linear(8, 5), function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.function(self.up(x)))
        return x + y


KEPT: dict[str, Any] = {
    "straight": lambda x: straight(3 * x),
    "reversed": lambda x: Reversed.apply(x, 0.7),
    "bounded": lambda x: Bounded.apply(x),
    "masked": lambda x: Masked.apply(2 * x),
    "gated": lambda x: Gated.apply(x, x * x),
    "of halves": lambda x: Straight.apply(3 * x.bfloat16()).to(x.dtype) + x,
}


@pytest.mark.parametrize("name", KEPT)
def test_the_users_backward_is_what_runs(name: str) -> None:
    setup = Setup(Blocks(KEPT[name]), (torch.randn(3, 5),)).to(torch.float64)
    program = pretend.trace(setup, training=True)
    targets = [n.target for n in program.graph.nodes]
    assert SLOPED in targets and COTANGENT not in targets
    want = plain(setup)
    for n in (2, 3):
        divided = pretend.divide(program, n, pretend.Free(n))
        assert divided.split >= {"blocks.0.up.weight", "blocks.2.down.weight"}
        for rank, got in enumerate(pretend.run(divided, setup, train=True)):
            demand(discrepancies(got, want), about=f"{name}, rank {rank} of {n}")


REFUSED: dict[str, tuple[Any, str]] = {
    "clipped": (Clipped, "Clipped .*it computes aten.clamp.default"),
    "centred": (Centred, "Centred .*it computes aten.mean.dim"),
    "shifted": (Shifted, "Shifted .*it computes aten.add.Tensor"),
    "unsafe": (Unsafe, "Unsafe .*it computes aten.where.self"),
    "constant": (Constant, "does not depend on the gradient"),
    "in place": (InPlace, "InPlace .*changes its argument in place"),
    "halves": (lambda x: sum(Halves.apply(x)), "Halves .*2 results with gradients"),
    "wide": (Wide, r"Wide .*a gradient of \[2, 8\] for \[2, 1\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_backward_of_another_kind_is_named(name: str) -> None:
    function, words = REFUSED[name]
    model = Block(getattr(function, "apply", function))
    if name == "wide":
        model.down = nn.Linear(1, 5)
    with pytest.raises(CaptureError, match=f"(?s)the backward of .*{words}.*register_autograd"):
        capture(model, (torch.randn(2, 5),), training=True)
    assert capture(model, (torch.randn(2, 5),)).outputs, "without gradients nothing is lost"
