"""Wrong words, kinds and values: a PlaitError that names the keyword and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import plait
from plait.capture import capture
from plait.errors import CaptureError, ClusterError, InputError, PlaitError, WeightError

X = torch.randn(4, 6)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


# keyword, values that it does not take, what the error says besides the keyword
KEYWORDS: list[tuple[str, tuple[Any, ...], str]] = [
    ("model", (None, "smollm2", lambda x: x), "an nn.Module"),
    ("args", (X, None, "abc", 3, {"input": X}), r"\(x,\) for one"),
    ("kwargs", ([X], {3: X}, X), "by name"),
    ("tp", ("two", 2.0, True, None, -1, [2]), "a number of ranks from 1, or 'auto'"),
    ("pp", (0, True), "a number of ranks"),
    ("dp", ("x", None), "a number of ranks"),
    ("cluster", (3, ["dgx-h100"]), "plait clusters"),
    ("dynamic", (7, [("input", {0: "b"})], {0: {0: "b"}}), "by argument and dim"),
    ("training", (3, "yes", None), "True or False"),
    ("objective", ("speed", None), "latency or throughput"),
    ("algorithm", (3, None, ["ring"], {"move_1": 3}), "'auto', the name of one, or a dict"),
    ("overlap", ("on", 0, 2.5, None, True, [1]), "'auto', 'off' or a number"),
    ("micro_batches", (0, "many", 2.5, None, True, [1]), "a number from 1, or 'auto'"),
    ("schedule", ("fast", None, ["1f1b"]), "'auto'"),
    ("recompute", ("some", None, ["full"]), "auto, off or full"),
    ("outputs", ("first", None, ["all"]), "all or last"),
    ("deterministic", ("x", 1), "True or False"),
]
COMPILING: list[tuple[str, tuple[Any, ...], str]] = [
    ("group", (3, object()), "a process group"),
    ("device", ("nope", 3, "meta"), "'cpu'"),
    ("dtype", ("bf16", torch.int8), "a floating-point dtype"),
    ("weights", (3, [Path("a")]), "a safetensors file or a folder"),
    ("plan", (3, "plan.json"), r"plait.Plan.from_json\(text\)"),
    ("measure", (3, None), "True or False"),
]


def test_a_compiled_module_is_not_compiled_again() -> None:
    made = plait.compile(model(), (X,), measure=False)
    with pytest.raises(InputError, match="model is compiled already"):
        plait.compile(made, (X,))


def _cases(table: list[tuple[str, tuple[Any, ...], str]]) -> list[Any]:
    return [
        pytest.param(name, value, words, id=f"{name}-{i}")
        for name, values, words in table
        for i, value in enumerate(values)
    ]


@pytest.mark.parametrize(("name", "value", "words"), _cases(KEYWORDS))
def test_keywords_of_plan(name: str, value: Any, words: str) -> None:
    asked = {"model": model(), "args": (X,), "cluster": "dgx-h100[2]", name: value}
    with pytest.raises(PlaitError, match=f"(?s){name}.*{words}"):
        plait.plan(**asked)


@pytest.mark.parametrize(("name", "value", "words"), _cases(KEYWORDS + COMPILING))
def test_keywords_of_compile(name: str, value: Any, words: str) -> None:
    with pytest.raises(PlaitError, match=f"(?s){name}.*{words}"):
        plait.compile(**{"model": model(), "args": (X,), name: value})


def test_all_offenders_at_once() -> None:
    with pytest.raises(InputError, match="(?s)args is .*training is 'yes'.*measure is None"):
        plait.compile(model(), X, training="yes", measure=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        ({"x": 7}, r"no argument 'x'. The arguments are input\[4, 6\]"),
        ({"input": 7}, "input is given 7, and takes names by dim"),
        ({"input": "batch"}, "input is given 'batch', and takes names by dim"),
        ({"input": {0: 3}}, "dim 0 is named 3"),
        ({"input": {0: "two words"}}, "dim 0 is named 'two words', which is no identifier"),
        ({"input": {"0": "b"}}, "input has 2 dims, no dim '0'"),
        ({"input": {9: "b"}}, "input has 2 dims, no dim 9"),
        ({"input": {1.5: "b"}}, "input has 2 dims, no dim 1.5"),
        ({"input": {0: "b", 1: "b"}}, "'b' is one size but 4 in"),
        ({"input": {1: "b"}}, "'b' can only be 6"),
        ({"input": {0: Dim("b", min=0, max=1)}}, "'b' is from 0 to 1, and .*leave it out"),
    ],
)
def test_malformed_dynamic_sizes(dynamic: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=f"dynamic=: .*{words}"):
        capture(model(), (X,), dynamic=dynamic)


def test_a_plan_of_devices_speaks_of_the_cluster() -> None:
    with pytest.raises(PlaitError, match="the cluster has 2; with 2 ranks these fit: tp=1 pp=2"):
        plait.plan(model(), (X,), cluster="dgx-h100[2]", tp=3)


def test_sites_that_a_plan_has_not() -> None:
    with pytest.raises(InputError, match="no collective move_77; it has move_"):
        plait.plan(model(), (X,), cluster="dgx-h100[2]", tp=2, algorithm={"move_77": "ring"})


@pytest.mark.parametrize("asked", ["rign", {"move_1": "rign"}])
def test_what_is_no_algorithm(asked: Any) -> None:
    with pytest.raises(InputError, match="algorithm=rign: it takes auto, native, .*ring"):
        plait.plan(model(), (X,), cluster="dgx-h100[2]", tp=2, algorithm=asked)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"version": 1}', "3", 3, None])
def test_what_is_no_plan(text: Any) -> None:
    with pytest.raises(PlaitError, match="plan"):
        plait.Plan.from_json(text)
    with pytest.raises(InputError, match="takes a Plan"):
        plait.simulate(text)


def test_what_is_no_cluster() -> None:
    with pytest.raises(ClusterError, match="or the name of one, not 3"):
        plait.Cluster.of(3)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def compiled() -> plait.Compiled:
    return plait.compile(model(), (X,), training=True)


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "loss_fn": (lambda c: c.step(X, loss_fn="mse"), "loss_fn is 'mse'; it takes a function"),
    "no loss": (lambda c: c.step(X), "without loss_fn"),
    "loss of many": (lambda c: c.step(X, loss_fn=lambda out: out), r"a tensor of \[4, 6\]"),
    "loss alone": (lambda c: c.step(X, loss_fn=lambda out: torch.ones(())), "without a gradient"),
    "inference": (lambda c: torch.inference_mode()(c.step)(X, loss_fn=torch.sum), "outside of torch.inference_mode"),
    "target alone": (lambda c: c.step(X, target=X), "target= is for a loss_fn; the model's own loss takes its labels"),
    "loss of no target": (lambda c: c.step(X, loss_fn=lambda out, t: t), r"of which there are 0: .*'t'"),
    "loss of targets": (lambda c: c.step(X, target=(X, X), loss_fn=lambda out: out), "there are 2: too many"),
    "complex": (lambda c: c.step(X, loss_fn=lambda out: out.sum() * 1j), "complex; step takes a loss of one real"),
    "mode": (lambda c: c.train(3), r"train\(3\): it takes True, or False"),
    "on meta": (lambda c: c(X.to("meta")), r"args\[0\]: on the meta device"),
    "optimizer": (lambda c: c.save("nowhere/x", 3), "optimizer is 3; it takes None"),
    "optimizer of a load": (lambda c: c.load("nowhere", 3), "optimizer is 3; it takes None"),
    "save": (lambda c: c.save(3), "the path of a folder, not 3"),
    "save in a file": (lambda c: c.save(__file__), "File exists"),
    "load": (lambda c: c.load_state_dict([1]), "mapping of names to tensors, and not this list"),
    "load by number": (lambda c: c.load_state_dict({1: X}), "mapping of names"),
    "gradients": (lambda c: c.gradients("nope"), "device is 'nope'"),
    "max_norm": (lambda c: plait.clip_grad_norm_(c, "x"), "max_norm is 'x'"),
    "negative norm": (lambda c: plait.clip_grad_norm_(c, -1.0), "max_norm is -1"),
    "norm_type": (lambda c: plait.clip_grad_norm_(c, 1.0, None), "norm_type is None"),
}


@pytest.mark.parametrize("name", CALLS)
def test_methods_of_a_compiled_module(compiled: plait.Compiled, name: str) -> None:
    call, words = CALLS[name]
    with pytest.raises((InputError, WeightError), match=words):
        call(compiled)


def test_one_stage_of_several_micro_batches_is_the_last_and_refuses_as_one_piece_does() -> None:
    made = plait.compile(model(), (X,), training=True, micro_batches=2, outputs="last")
    made(X).sum().backward()
    assert all(p.grad is not None for p in made.parameters())
    with pytest.raises(InputError, match="without a gradient"):
        made.step(X, loss_fn=lambda out: out.sum().detach())


def test_where_no_line_is_the_users_the_module_is_named(compiled: plait.Compiled) -> None:
    with pytest.raises(CaptureError, match=r"^0 \(Linear\): RuntimeError: a and b must have same"):
        compiled(torch.randn(4, 7))


def test_an_error_of_the_users_loss_stays_what_it_is(compiled: plait.Compiled) -> None:
    def loss(out: Tensor) -> Tensor:
        return out[{}["rows"]]  # type: ignore[no-any-return]

    with pytest.raises(KeyError, match="rows") as caught:
        compiled.step(X, loss_fn=loss)
    assert caught.traceback[-1].path.name == "test_asked.py", "the last line of the traceback"


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.down, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.down(x))


ROWS = torch.arange(4)
OPERANDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "added": (lambda y: torch.zeros(4, 6, dtype=torch.float64).index_add(0, ROWS, y), "index_add of float64"),
    "added by": (lambda y: torch.zeros(4, 6).index_add(0, ROWS.float(), y), "index_add of float32, float32"),
    "copied": (lambda y: torch.zeros(4, 6, dtype=torch.float64).index_copy(0, ROWS, y), "index_copy of float64"),
    "from one": (lambda y: 1 - (y > 0), "rsub of bool"),
    "negative": (lambda y: -(y > 0), "on a bool tensor is not supported"),
    "minus": (lambda y: (y > 0) - (y < 0), "with two bool tensors is not supported"),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_torch_refuses_when_it_runs(name: str) -> None:
    function, words = OPERANDS[name]
    with pytest.raises((RuntimeError, IndexError)):
        Of(function)(X)
    with pytest.raises(CaptureError, match=rf"test_asked\.py.*{words}"):
        capture(Of(function), (X,))
