"""What capture read is compared on each call: the old value is never replayed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.capture.snapshot import Snapshot
from plait.errors import CaptureError


class Settings:
    def __init__(self) -> None:
        self.power = 1
        self.names = ["a"]


class Reads(nn.Module):
    """Its forward reads one thing of each kind."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)
        self.norm, self.drop = nn.BatchNorm1d(7), nn.Dropout(0.5)
        self.settings, self.loose = Settings(), SimpleNamespace(shift=0)
        self.steps, self.table, self.chosen = [1, 2], {"bias": 0.0}, {3}
        self.act: Callable[[Tensor], Tensor] = torch.relu
        self.fixed = torch.arange(3.0)
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("angles", torch.arange(3.0), persistent=False)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        y = self.drop(self.norm(self.act(self.up(x)))) * self.scale
        for step in self.steps:
            y = y + step
        y = self.down(y) ** self.settings.power + self.loose.shift + self.table["bias"]
        y = y + len(self.chosen) + len(self.settings.names)
        masked = torch.cumsum(self.mask, 0) + self.angles.cos() + self.fixed.sin()
        return y * masked if torch.is_grad_enabled() else y * masked + 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute of the class, on the instance": lambda m: setattr(m, "scale", 2.0),
    "an int instead of a bool": lambda m: setattr(m.loose, "shift", True),
    "an item of a list": lambda m: m.steps.append(5),
    "an item of a dict": lambda m: m.table.update(bias=1.5),
    "an item of a set": lambda m: m.chosen.add(9),
    "a configuration": lambda m: setattr(m.settings, "power", 2),
    "a list in a configuration": lambda m: m.settings.names.append("b"),
    "a function": lambda m: setattr(m, "act", torch.tanh),
    "a tensor, replaced": lambda m: setattr(m, "fixed", torch.ones(3)),
    "a tensor, in place": lambda m: m.fixed.add_(1),
    "a folded buffer": lambda m: m.mask.mul_(3),
    "a buffer that no file holds": lambda m: m.angles.add_(1),
    "a submodule": lambda m: setattr(m, "drop", nn.Tanh()),
    "all of it in train mode": lambda m: m.train(),
}


def model(p: float = 0.0) -> Reads:
    torch.manual_seed(3)
    made = Reads().eval()
    made.drop.p = p
    return made


def test_a_change_of_the_model_is_seen() -> None:
    """One after another, each against the model itself."""
    mine, x = model(), torch.randn(4, 5)
    compiled = plait.compile(mine, (x,), tp=1)
    for what, change in CHANGES.items():
        before = compiled(x)
        change(mine)
        got = compiled(x)
        torch.testing.assert_close(got, _no_grad(mine, x), msg=what)
        assert not torch.equal(got, before), what
    assert mine.count == 0, "capture changed the model"


def test_back_and_forth_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.compiler import source

    mine, x = model(), torch.randn(4, 5)
    mine.scale = 1.0
    compiled = plait.compile(mine, (x,), tp=1)
    made, capture = [], source.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(mine.scale)
        return capture(*args, **kwargs)

    monkeypatch.setattr(source, "capture", counted)
    for scale in (1.0, 2.0, 1.0, 2.0, float("1.0")):
        mine.scale = scale
        torch.testing.assert_close(compiled(x), _no_grad(mine, x))
    assert made == [2.0]


def _no_grad(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(module)(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["load_state_dict", "in place"])
@pytest.mark.parametrize("name", ["mask", "norm.running_mean"])
def test_buffers_are_the_compiled_modules_own(how: str, name: str) -> None:
    """Folded into a constant or not: the value is what was loaded, also in the other mode."""
    mine, x = model(), torch.randn(4, 5)
    want = copy.deepcopy(mine)
    compiled = plait.compile(mine, (x,), tp=1)
    compiled(x)
    want.get_buffer(name).add_(2)
    if how == "in place":
        compiled.get_buffer(name).add_(2)
    else:
        compiled.load_state_dict(want.state_dict())
    torch.testing.assert_close(compiled(x), _no_grad(want, x))
    assert torch.equal(compiled.state_dict()[name], want.get_buffer(name))
    torch.testing.assert_close(compiled.train()(x), _no_grad(want.train(), x))
    assert not torch.equal(mine.get_buffer(name), want.get_buffer(name)), "the model was changed"


class Whitens(nn.Module):
    """In train mode its statistics move; in eval mode they are folded."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)
        self.register_buffer("spread", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.spread.copy_(0.5 * self.spread + x.abs().mean(0))
        return self.lin(x) / (self.spread + 1e-3).sqrt()  # type: ignore[no-any-return]


def test_what_moved_in_one_mode_is_folded_in_the_other() -> None:
    mine, x = Whitens(), torch.randn(4, 5)
    want = copy.deepcopy(mine)
    compiled = plait.compile(mine, (x,), tp=1, training=True)
    for mode in (True, True, False, True, False):
        compiled.train(mode)
        torch.testing.assert_close(compiled(x), want.train(mode)(x))


def test_parts_have_modes_of_their_own() -> None:
    mine, x = model().train(), torch.randn(4, 5)
    mine.norm.eval()
    compiled = plait.compile(mine, (x,), tp=1, training=True)
    want = copy.deepcopy(mine)
    assert compiled.training
    assert not compiled.norm.training
    torch.testing.assert_close(compiled(x), want(x))
    for each in (compiled, want):
        each.norm.train()
    torch.testing.assert_close(compiled(x), want(x))
    torch.testing.assert_close(compiled.state_dict()["norm.running_mean"], want.norm.running_mean)
    assert mine.norm.training is False, "the model was changed"
    compiled.eval()
    torch.testing.assert_close(compiled(x), want.eval()(x))
    mine.norm.train()  # a change of the model is taken over
    want.norm.train()
    torch.testing.assert_close(compiled(x), want(x))
    assert compiled.norm.training


@pytest.mark.parametrize("where", ["model", "compiled"])
def test_requires_grad(where: str) -> None:
    """Frozen and thawed on either side."""
    mine, x = model(), torch.randn(4, 5)
    mine.up.requires_grad_(False)
    compiled = plait.compile(mine, (x,), tp=1, training=True)
    side = mine if where == "model" else compiled
    assert not compiled.up.weight.requires_grad
    for learns in ("up", "down"):
        compiled.zero_grad()
        side.up.requires_grad_(learns == "up")
        side.down.requires_grad_(learns == "down")
        compiled(x).sum().backward()
        got = compiled.gradients()
        assert {n for n, g in got.items() if g is not None} >= {f"{learns}.weight", f"{learns}.bias"}
        want = copy.deepcopy(mine).requires_grad_(True)
        want(x).sum().backward()
        grads = {n: p.grad for n, p in want.named_parameters()}
        for name, grad in got.items():
            frozen = name.split(".")[0] in {"up", "down"} - {learns}
            assert (grad is None) == frozen, name
            if grad is not None:
                torch.testing.assert_close(grad, grads[name])


def test_grad_mode_and_autocast() -> None:
    mine, x = model(), torch.randn(4, 5)
    compiled = plait.compile(mine, (x,), tp=1, training=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), mine(x))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), mine(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, want = compiled(x), mine(x)
            assert ours.dtype == want.dtype
            torch.testing.assert_close(ours, want, rtol=1e-2, atol=1e-2)
            assert not torch.equal(ours, compiled(x.double().float()) + 1)


def test_a_hook_that_came_later_is_refused() -> None:
    mine, x = model(), torch.randn(4, 5)
    compiled = plait.compile(mine, (x,), tp=1)
    hook = mine.up.register_forward_hook(lambda m, a, out: out + 1)
    for _ in range(2):
        with pytest.raises(CaptureError, match="hooks on up"):
            compiled(x)
    hook.remove()
    torch.testing.assert_close(compiled(x), _no_grad(mine, x))


def test_other_weights_than_were_compiled_are_refused() -> None:
    mine, x = model(), torch.randn(4, 5)
    compiled = plait.compile(mine, (x,), tp=1)
    mine.mask, mine.angles, mine.fixed = torch.ones(2), torch.ones(2), torch.ones(2)
    with pytest.raises(CaptureError, match=r"angles \[2\] .*compiled as \[3\] .*mask \[2\]"):
        compiled(x)
    mine.mask, mine.angles, mine.fixed = torch.ones(3), torch.ones(3), torch.ones(3)
    mine.up, mine.norm, mine.down = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    with pytest.raises(CaptureError, match=r"up\.weight \[8, 5\].*compiled as \[7, 5\].*down"):
        compiled(x)


# -- the snapshot ------------------------------------------------------------------------------------


class Trainer:
    """It does something: what it holds is not the model's."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.step = model, 0


def test_a_change_is_named_with_both_values() -> None:
    mine = model()
    before = Snapshot.of(mine, {"mask"})
    mine.settings.power = 3
    mine.norm.train()
    mine.up.weight.requires_grad_(False)
    mine.mask.zero_()
    assert not before.holds()
    changes = before.facts.changes(Snapshot.of(mine, {"mask"}).facts)
    assert changes.pop("mask") != ("", "")
    assert changes == {
        "settings.power": ("3", "1"),
        "norm.training": ("True", "False"),
        "up.weight.requires_grad": ("False", "True"),
    }


def test_what_is_not_a_change() -> None:
    """Steps of an optimizer, equal values, what forward sets itself, and what is no setting."""
    mine = model()
    mine.trainer = Trainer(mine)  # type: ignore[assignment]
    mine.scale = 1000.5
    before = Snapshot.of(mine, {"mask"}, {"count"})
    with torch.no_grad():
        mine.up.weight.add_(1)
        mine.norm.running_mean.add_(1)
    mine.trainer.step += 1
    assert before.holds()
    mine.scale, mine.count = float("1000.5"), 7
    mine.up.weight = nn.Parameter(torch.zeros(7, 5))
    assert not before.holds()
    assert not before.facts.changes(Snapshot.of(mine, {"mask"}, {"count"}).facts)


def test_a_change_is_seen_after_an_assignment_that_was_none() -> None:
    mine = model()
    before = Snapshot.of(mine)
    for _ in range(2):
        mine.count, mine.settings.power = mine.count, 1
        assert before.holds()
    mine.settings.power = 2
    assert not before.holds()
    mine.settings.power = 1
    assert before.holds()
    mine.register_forward_hook(lambda *_: None)
    assert not before.holds()


def test_zero_has_a_sign_and_true_is_not_one() -> None:
    mine = nn.Module()
    mine.a, mine.b, mine.c = 0.0, 1, float("nan")
    before = Snapshot.of(mine).facts
    mine.a, mine.b, mine.c = -0.0, True, float("nan")
    assert set(before.changes(Snapshot.of(mine).facts)) == {"a", "b"}


class Kind(Enum):
    FULL = "full"
    FAST = "fast"


def _one(x: Tensor) -> Tensor:
    return x


def _other(x: Tensor) -> Tensor:
    return -x


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (nn.ReLU, nn.GELU, ("GELU", "ReLU")),
        (Kind.FULL, Kind.FAST, ("Kind.FAST", "Kind.FULL")),
        (_one, _other, ("_other", "_one")),
    ],
)
def test_classes_functions_and_members_of_enums_are_what_they_are(was: Any, now: Any, said: tuple[str, str]) -> None:
    mine = nn.Module()
    mine.held = {"kind": was}
    before = Snapshot.of(mine)
    assert before.holds()
    mine.held["kind"] = now
    assert not before.holds()
    assert before.facts.changes(Snapshot.of(mine).facts) == {"held['kind']": said}
