"""Capture by kinds: sizes that are values, hooks, checkpoints, casts, adapters, dynamic sizes."""

from __future__ import annotations

import functools
import gc
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import plait
from plait.capture import capture
from plait.capture.trial import Kind, Trial
from plait.errors import CaptureError
from plait.program import Program, run_whole
from tests.cases.blocks import Net, linear

HERE = r"test_capture_kinds\.py:\d+"


# -- graphs within the graph, and sizes that are values ------------------------------------------------


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return torch.cond(y.sum() > 0, lambda z: z.sin(), lambda z: z.cos(), (y,))  # type: ignore[no-any-return]


def test_cond_is_refused_by_name_and_line() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Conditional(), (torch.randn(2, 3),))
    text = str(caught.value)
    assert "cond" in text
    assert "return torch.cond(y.sum() > 0" in text
    assert "test_capture_kinds.py" in text
    assert "torch.where" in text


class Nonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1).nonzero().squeeze(-1)] * 2


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1) > 0] * 2


class Unique(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.unique(x).sum()


class Sized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(int(x.sum()), 4).sum()


@pytest.mark.parametrize("kind", [Nonzero, Masked, Unique, Sized])
@pytest.mark.sample(2)
def test_sizes_that_are_values_are_refused_by_line(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=HERE) as caught:
        capture(kind(), (torch.ones(2, 3),))
    assert "u0" not in str(caught.value), "torch's name of a symbol, in a message for a user"
    assert "where" in str(caught.value)


def test_a_loss_of_which_a_size_is_a_value_has_its_place_behind_the_model() -> None:
    def run(s: Net, x: Tensor, y: Tensor) -> Tensor:
        return F.ctc_loss(s.up(x).log_softmax(-1), y, (6, 6), (3, 2))

    args = (torch.randn(6, 2, 8), torch.randint(1, 7, (2, 3)))
    with pytest.raises(CaptureError, match=r"F\.ctc_loss\(.*: compute the loss on the outputs of the compiled model"):
        capture(Net(run, up=linear(8, 7)), args)


class Put(nn.Module):
    """One value where a mask holds: of elements, of rows, of columns."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[x < 0] = 0
        y[x.sum(-1) > 1] = x.mean()
        y[:, torch.tensor([True, False, False, True])] = 3
        y[:, x.sum(0) > 0.5] = 2
        return y


def test_what_a_mask_puts_is_chosen_for_each_element() -> None:
    x = torch.randn(5, 4)
    program = capture(Put(), (x,))
    kinds = [n.target for n in program.graph.nodes]
    assert torch.ops.aten.index_put.default not in kinds
    assert kinds.count(torch.ops.aten.where.self) == 4
    torch.testing.assert_close(run_whole(program, {}, (x,)), Put()(x))


def test_a_mask_behind_an_operator_of_several_results_is_not_judged() -> None:
    def run(s: Net, x: Tensor, mask: Tensor) -> Tensor:
        q = s.up(x)
        seen = mask.min(-1).values[:, None].clamp(max=0)  # no input's value is known
        return F.scaled_dot_product_attention(q, q, q, attn_mask=seen.chunk(2)[0])

    model, args = Net(run, up=linear(4, 4)), (torch.randn(3, 5, 4), torch.randn(2, 5, 3))
    same(capture(model, args), model, *args)


class Fields(dict[str, Any]):
    """A dict that is made in the order of its fields, and remembers what was set later as the last."""


pytree.register_pytree_node(
    Fields,
    lambda x: (list(x.values()), list(x)),
    lambda values, names: Fields(sorted(zip(names, values, strict=True))),
    flatten_with_keys_fn=lambda x: ([(pytree.MappingKey(k), v) for k, v in x.items()], list(x)),
    serialized_type_name="tests.Fields",
)


def test_results_are_found_in_a_container_that_has_an_order_of_its_own() -> None:
    def run(s: Net, x: Tensor) -> Any:
        y = s.up(x)
        out = Fields(a=y, d=(None, y * 2), c=None)
        out["b"] = y[:, :2]
        return out

    model, x = Net(run, up=linear(4, 4)), torch.randn(3, 4)
    got, want = run_whole(capture(model, (x,)), dict(model.named_parameters()), (x,)), model(x)
    assert set(got) == set(want)
    for name in want:
        torch.testing.assert_close(got[name], want[name])


# -- hooks, checkpoints, subclasses --------------------------------------------------------------------


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(linear(4, 6), nn.ReLU(), linear(6, 4)) for _ in range(4)))


def _adds(module: nn.Module, args: Any, out: Tensor) -> None:
    out.add_(1)


def test_every_hook_that_changes_values_is_named() -> None:
    model = _layers()
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[1][0].register_forward_hook(lambda module, args, out: out.sin())
    model[2].register_forward_hook(_adds)
    model.register_forward_hook(lambda module, args, kwargs, out: out * 3, with_kwargs=True)
    with pytest.raises(CaptureError, match=r"hooks on 0 .*, 1\.0 .*, 2 .*, the model .* change .*remove them"):
        capture(model, (torch.randn(2, 4),))


def test_hooks_that_make_weights_are_a_part_of_forward() -> None:
    model, x = _layers(), torch.randn(2, 4)
    model[2].register_forward_hook(lambda module, args, out: None)
    prune.random_unstructured(model[3][0], "weight", 0.5)
    before = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    same(capture(model, (x,)), model, x)
    assert before == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


@pytest.mark.parametrize("keep", [lambda a, y: y, lambda a, y: y.detach().mean(), lambda a, y: a[0]])
@pytest.mark.sample(1)
def test_hooks_that_keep_what_they_see_are_named(keep: Any) -> None:
    model, kept = _layers(), list[Any]()
    model[1].register_forward_hook(lambda module, args, out: kept.append(keep(args, out)))
    with pytest.raises(CaptureError, match=r"hooks on 1 \(.* keep tensors that they see: return"):
        capture(model, (torch.randn(2, 4),))


def test_hooks_of_all_modules_are_refused() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        with pytest.raises(CaptureError, match="every module .*remove them"):
            capture(_layers(), (torch.randn(2, 4),))
    finally:
        handle.remove()


def test_hooks_of_the_backward_matter_in_training_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_full_backward_hook(lambda module, grad_in, grad_out: None)
    model[0].weight.register_hook(lambda grad: grad * 2)
    capture(model, (torch.randn(2, 3),))
    with pytest.raises(CaptureError, match=r"0 .*0\.weight \(a hook on its gradient\)"):
        capture(model, (torch.randn(2, 3),), training=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_refused_in_training(reentrant: bool) -> None:
    def run(s: Net, x: Tensor) -> Tensor:
        return checkpoint(lambda y: s.up(y).relu(), x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    model, x = Net(run, up=linear(3, 4)), torch.randn(2, 3)
    same(capture(model, (x,)), model, x)
    with pytest.raises(CaptureError, match="checkpoints its activations.*training=False"):
        capture(model, (x,), training=True)


class Odd(torch.Tensor):
    """A tensor subclass, as libraries of quantisation make them."""


def test_weights_of_a_subclass_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(torch.randn(3, 3).as_subclass(Odd))
    with pytest.raises(CaptureError, match=r"1\.weight \(.*\) are tensor subclasses.*dequantise"):
        capture(model, (torch.randn(2, 3),))


# -- what is captured as it is -------------------------------------------------------------------------


def same(program: Program, model: nn.Module, *args: Tensor, **close: float) -> None:
    with torch.no_grad():
        got = run_whole(program, dict(model.state_dict(keep_vars=True)), args)
        want = model(*args)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, **close)


@pytest.mark.parametrize("training", [False, True])
def test_an_autocast_region_keeps_its_casts(training: bool) -> None:
    def run(s: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = s.up(x).relu()
            with torch.autocast("cpu", enabled=False):
                y = s.mid(y.float())
        return s.down(y).to(torch.float64)  # type: ignore[no-any-return]

    model = Net(run, up=linear(5, 6), mid=linear(6, 6), down=linear(6, 3)).train(training)
    x = torch.randn(2, 5)
    program = capture(model, (x,), training=training)
    values = [n.meta.get("val") for n in program.graph.nodes]
    kinds = {v.dtype for v in values if isinstance(v, Tensor)}
    assert torch.bfloat16 in kinds
    same(program, model, x)


class LowRank(nn.Module):
    """W x + scale * B A x: an adapter of any library, in its plain form."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        self.drop, self.scale, self.enabled = nn.Dropout(0.0), 2.0, True

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.scale * self.b(self.a(self.drop(x))) if self.enabled else y  # type: ignore[no-any-return]


@pytest.mark.parametrize("enabled", [True, False])
def test_adapters_learn_and_their_base_does_not(enabled: bool) -> None:
    model = nn.Sequential(LowRank(nn.Linear(5, 7), 2), nn.ReLU(), LowRank(nn.Linear(7, 3), 2))
    model[0].enabled = enabled
    program = capture(model, (x := torch.randn(2, 5),), training=True)
    learning = {w.name for w in program.weights if w.requires_grad}
    assert learning == {f"{i}.{m}.weight" for i in ((0, 2) if enabled else (2,)) for m in "ab"}
    assert {w.name for w in program.unused} == (set() if enabled else {"0.a.weight", "0.b.weight"})
    same(program, model, x)


# -- dynamic sizes -------------------------------------------------------------------------------------


def pooled(s: Net, x: Tensor, y: Tensor) -> Tensor:
    return s.up(x).mean(1) + s.up(y).amax(1) + x.size(1)


@pytest.mark.parametrize("b", [1, 2, 3])
@pytest.mark.parametrize(("t", "u"), [(1, 4), (5, 2)])
@pytest.mark.sample(2)
def test_one_program_for_every_size(b: int, t: int, u: int) -> None:
    model = Net(pooled, up=linear(3, 4))
    program = capture(
        model,
        (torch.randn(2, 7, 3), torch.randn(2, 4, 3)),
        dynamic={"args": [{0: "b", 1: "t"}, {0: "b", 1: "u"}]},
    )
    assert {s.name for s in program.sizes} == {"b", "t", "u"}
    same(program, model, torch.randn(b, t, 3), torch.randn(b, u, 3))


def test_sizes_that_are_one_have_one_name() -> None:
    def run(s: Net, x: Tensor, y: Tensor) -> Tensor:
        return s.up(x) + s.up(y)  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"dynamic=: .*give them one name"):
        capture(
            Net(run, up=linear(3, 4)),
            (torch.randn(5, 3), torch.randn(5, 3)),
            dynamic={"args": [{0: "a"}, {0: "b"}]},
        )


def _added(s: Net, x: Tensor) -> Tensor:
    return s.up(x) + torch.ones(5, 4)  # type: ignore[no-any-return]


def _asked(s: Net, x: Tensor) -> Tensor:
    y = s.up(x)  # which asks for a size of 1
    return y.relu() if x.shape[0] == 5 else y  # type: ignore[no-any-return]


def _limited(s: Net, x: Tensor) -> Tensor:
    y = s.up(x)
    return y.relu() if 4 < len(x) < 6 else y  # type: ignore[no-any-return]


LINES = [(_added, "torch.ones"), (_asked, r"x\.shape\[0\] == 5"), (_limited, "4 < len")]


@pytest.mark.parametrize(("run", "line"), LINES)
def test_a_size_of_one_value_is_named_with_the_line_that_asks(run: Any, line: str) -> None:
    with pytest.raises(CaptureError, match=rf"'rows' can only be 5 \(.*{HERE}.*{line}"):
        capture(Net(run, up=linear(3, 4)), (torch.randn(5, 3),), dynamic={"args": [{0: "rows"}]})


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        ({"y": {0: "b"}}, "forward is given no argument 'y'"),
        ({"x": {4: "b"}}, "x has 2 dims, no dim 4"),
        ({"x": {0: 3}}, "x: dim 0 is named 3, which is no identifier"),
        ({"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.STATIC}}, "x: dim 0 is left to torch: name its .*2, 3"),
        ({"x": {1: 3 * torch.export.Dim("n")}}, r"x: dim 1 is 3\*n, a size derived from another"),
        ({"x": {0: "n", 1: "n"}}, "'n' is one size but 2 in .* 3 in"),
    ],
)
def test_wrong_names_of_sizes(dynamic: dict[str, Any], words: str) -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x)

    with pytest.raises(CaptureError, match=words):
        capture(Named(), (torch.randn(2, 3),), dynamic=dynamic)


# -- inputs that are one tensor ------------------------------------------------------------------------


def test_one_tensor_given_twice_is_two_inputs() -> None:
    """The example's labels may be its tokens; those of another call are not."""

    class Minus(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.sin() - y.cos()

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    program = capture(Minus(), (x, x))
    assert all(n.users for n in program.graph.nodes if n.op == "placeholder")
    parts = plait.compile(Minus(), (x, x), tp=1)
    assert torch.equal(parts(x, y), x.sin() - y.cos())


# -- blocks that are the same ----------------------------------------------------------------------------


class Caught(nn.Module):
    """Holds its frame, and what it made, in a cycle until garbage is collected."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).relu()
        try:
            raise ValueError
        except ValueError as error:
            kept = [error]
            kept.append(kept)  # type: ignore[arg-type]
        return self.down(y)  # type: ignore[no-any-return]


def test_a_collection_in_another_thread_changes_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one runs, `gc.collect()` does nothing: one rank would see tensors that its peers do not."""
    collect, busy, found = gc.collect, iter([True]), []
    leaks = Trial._leaks

    def seen(trial: Trial, kind: Kind) -> bool:
        found.append(leaks(trial, kind))
        return found[-1]

    monkeypatch.setattr(gc, "collect", lambda: 0 if next(busy, False) else collect())
    monkeypatch.setattr(Trial, "_leaks", seen)
    gc.disable()  # what would free the cycle by itself, at a moment of its own
    try:
        capture(nn.Sequential(*(Caught() for _ in range(6))).eval(), (torch.randn(2, 4),))
    finally:
        gc.enable()
    assert found == [False]
    assert not next(busy, False), "nothing was held in a cycle"


# -- tensors kept outside of the model -----------------------------------------------------------------


@functools.lru_cache
def _cosines(n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n).cos(), torch.arange(n).sin()


class Caching(nn.Module):
    kept: ClassVar[dict[int, Tensor]] = {}

    @staticmethod
    @functools.cache
    def ramp(n: int) -> Tensor:
        return torch.arange(n) * 0.5

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        if n not in self.kept:
            self.kept[n] = torch.arange(n).square()
        return x * self.kept[n] * self.ramp(n) + _cosines(n)[0]


def test_caches_outside_of_the_model_hold_no_tensor_of_the_capture() -> None:
    """functools.cache and dicts that the first call fills: that call is the capture's own."""
    program = capture(Caching(), (torch.randn(2, 5),))
    assert len(program.constants) == 3
    assert 5 not in Caching.kept
    assert type(_cosines(5)[0]) is type(Caching.ramp(5)) is Tensor


LAST: Any = "none yet"


class Telling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global LAST, FIRST
        LAST = FIRST = x.sin()
        return LAST * 2


def test_names_outside_of_the_model_are_put_back_and_noted() -> None:
    program = capture(Telling(), (torch.randn(2, 5),))
    assert LAST == "none yet" and "FIRST" not in globals()
    (note,) = [n for n in program.notes if "forward sets" in n]
    assert f"{__name__}.LAST, {__name__}.FIRST, which a compiled model does not" in note
