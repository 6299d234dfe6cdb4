"""What no graph can keep is refused by the user's own line."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from plait.capture import capture
from plait.errors import CaptureError
from tests import pretend
from tests.cases import Setup
from tests.compare import demand, discrepancies, plain


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if int(x.sum()) > 3:
            return x + 1
        return x


def test_what_runs_may_not_depend_on_a_value() -> None:
    with pytest.raises(CaptureError, match=r"test_capture_refuses\.py"):
        capture(Counts(), (torch.ones(2, 3, dtype=torch.int64),))


def test_a_forward_hook_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, args, out: out + 1)
    with pytest.raises(CaptureError, match="hook"):
        capture(model, (torch.randn(2, 3),))


def test_a_hook_of_the_backward_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_full_backward_hook(lambda module, grad_in, grad_out: None)
    with pytest.raises(CaptureError, match="hook"):
        capture(model, (torch.randn(2, 3),), training=True)


@torch.library.custom_op("plait_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: grad * 3)  # three: no other backward gives that


def of_operator(x: Tensor) -> Tensor:
    return doubled(x)


class Between(nn.Module):
    """A function between two linears."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(5, 8), nn.Linear(8, 5), function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.function(self.up(x)))  # type: ignore[operator]
        return y


def test_the_backward_of_an_operator_is_kept() -> None:
    setup = Setup(Between(of_operator), (torch.randn(3, 5),)).to(torch.float64)
    program = pretend.trace(setup, training=True)
    want = plain(setup)
    for got in pretend.run(pretend.divide(program, 2, pretend.Free(2)), setup, train=True):
        demand(discrepancies(got, want), about="an operator of the user's")


def looked_up(x: Tensor) -> Tensor:
    return x.index_select(0, torch.zeros(2, dtype=torch.int16))


def labelled(x: Tensor) -> Tensor:
    return x * nn.functional.cross_entropy(x, torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("model", "x", "words"),
    [
        (nn.Linear(5, 4), torch.randn(2, 5).double(), "linear of float64, float32"),
        (nn.LayerNorm(5), torch.randn(2, 5).double(), "layer_norm of float64, float32"),
        (Between(looked_up), torch.randn(2, 5), "index_select of float32, int16"),
        (Between(labelled), torch.randn(2, 5), "cross_entropy_loss of float32, int32"),
    ],
)
def test_dtypes_that_no_kernel_takes_are_refused(model: nn.Module, x: Tensor, words: str) -> None:
    """Tracing does not look at them: the first call would fail, on every rank for good."""
    with pytest.raises((RuntimeError, IndexError)):
        model(x)
    with pytest.raises(CaptureError, match=words):
        capture(model, (x,))


@dataclass
class Pair:
    first: Tensor
    rest: Any = None


@dataclass
class Known(Pair):
    """The same, registered."""


torch.export.register_dataclass(Known)


class Named(NamedTuple):
    first: Tensor
    rest: dict[str, Any]


class Nested(nn.Module):
    """Takes and returns one kind of container."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.down, self.kind = nn.Linear(5, 4), kind

    def forward(self, given: Any) -> Any:
        first = given if isinstance(given, Tensor) else given.first * given.rest["scale"]
        y = self.down(first)
        return self.kind(y, {"rows": [y + 1, None, 3], "scale": y.sum()})


def test_dataclasses_are_refused_until_torch_knows_them() -> None:
    x = torch.randn(2, 5)
    with pytest.raises(CaptureError, match=r"output of forward is of type Pair: .*register_dataclass\(Pair\)"):
        capture(Nested(Pair), (x,))
    with pytest.raises(CaptureError, match=r"args\[0\] is of type Pair: .*register_dataclass\(Pair\)"):
        capture(Nested(Named), (Pair(x, {"scale": 2.0}),))
    with pytest.raises(CaptureError, match=r"args\[0\]\['kept'\] is of type set: pass tensors"):
        capture(Nested(Named), ({"kept": {1}},))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.eye(5).to_sparse(), "is of layout sparse_coo: pass a plain tensor"),
        (torch.nested.nested_tensor([torch.ones(5)]), "is a nested tensor: pass a plain tensor"),
        (torch.eye(5).numpy(), "is of type ndarray: pass tensors"),
    ],
)
def test_inputs_that_are_no_plain_tensors_are_named(x: object, words: str) -> None:
    with pytest.raises(CaptureError, match=rf"the input args\[0\] {words}"):
        capture(nn.Linear(5, 5), (x,))


def test_a_module_of_torchs_that_reads_a_value_is_named() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, momentum=None))
    with pytest.raises(CaptureError, match=r"^1 \(BatchNorm1d\): what runs depends on the value"):
        capture(model.train(), (torch.randn(3, 5),), training=True)


@pytest.mark.parametrize("kind", [Known, Named])
def test_containers_come_back_as_they_are(kind: type) -> None:
    setup = Setup(Nested(kind), (kind(torch.randn(2, 5), {"scale": torch.tensor(2.0)}),)).to(torch.float64)
    program = pretend.trace(setup, training=True)
    want = plain(setup)
    assert isinstance(want.out, kind)
    for got in pretend.run(pretend.divide(program, 2, pretend.Free(2)), setup, train=True):
        assert isinstance(got.out, kind)
        got, as_lists = (replace(r, out=[r.out.first, r.out.rest]) for r in (got, want))
        demand(discrepancies(got, as_lists), about=kind.__name__)


# -- what is no operator -------------------------------------------------------------------------------


def square(x: Tensor) -> Tensor:
    return torch.eye(8) + x.mT @ x


def given_values(x: Tensor) -> Tensor:
    x.data = x * 2
    return x


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 2)
    return x


def inner_gradient(x: Tensor) -> Tensor:
    y: Tensor = torch.func.grad(lambda t: t.pow(2).sum())(x)
    return y


def spelled(x: Tensor) -> Tensor:
    return x * len(f"{x.sum():.3f}")


def addressed(x: Tensor) -> Tensor:
    return x if x.data_ptr() else -x


def checked(x: Tensor) -> Tensor:
    return torch.linalg.tensorinv(square(x).reshape(8, 2, 4), ind=1).reshape(8, 8)


def least_squares(x: Tensor) -> Tensor:
    y: Tensor = torch.linalg.lstsq(square(x), x.mT).solution.mT
    return y


def changed_by_data(x: Tensor) -> Tensor:
    y = x * 1
    y.data.mul_(2)
    return y


def changed_without_gradient(x: Tensor) -> Tensor:
    y = x * 1
    with torch.no_grad():
        y.mul_(2)
    return y


def chosen_and_changed(x: Tensor) -> Tensor:
    y = x * 1
    y[torch.argmax(y[:, 0]), :] *= 2
    return y


def packed(x: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([1]), batch_first=True)
    return rows.data


def copied(x: Tensor) -> Tensor:
    return copy.copy(x) * 2


def copied_deeply(x: Tensor) -> Tensor:
    return copy.deepcopy(x) * 2


def sparse_product(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(2).to_sparse(), x)


def sparse_value(x: Tensor) -> Tensor:
    return x.to_sparse().sum() * x


def listed(x: Tensor) -> Tensor:
    y: Tensor = x * torch.tensor([x.sum(), 1.0])[0]
    return y


def filled(x: Tensor) -> Tensor:
    y: Tensor = x * torch.full((8,), x.sum())  # type: ignore[call-overload]
    return y


def generated(x: Tensor) -> Tensor:
    return x + torch.randn(8, generator=torch.Generator().manual_seed(1))


def distributed(x: Tensor) -> Tensor:
    y: Tensor = torch.distributions.Normal(x, x.exp(), validate_args=True).log_prob(x)
    return y


def beside(x: Tensor) -> Tensor:
    return x[:1].as_strided(x.shape, (0, 1), 2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (chosen_and_changed, r"`y\[torch.*\] \*= 2`: .* choose by a tensor that has a dim"),
        (packed, r"`rows = nn\.utils\.rnn\.pack.*`: .* give the layer the padded rows"),
        (copied, r"`return copy\.copy\(x\) \* 2`: .* write x itself or x\.detach"),
        (copied_deeply, r"`return copy\.deepcopy\(x\) \* 2`: .* write x itself or x\.detach"),
        (sparse_product, r"`: a sparse tensor is not supported: make it dense"),
        (sparse_value, r"`: a sparse tensor is not supported: make it dense"),
        (listed, r"`y: Tensor = x \* torch\.tensor\(.*`: .* join them with torch\.stack"),
        (filled, r"torch\.full\(.*`: a Python number is wanted here"),
        (generated, r"randn.*: is given an object that a graph cannot keep .* torch\.manual_seed"),
        (distributed, r"torch\.distributions.*`: .* validate_args=False"),
        (given_values, r"`x\.data = x \* 2`: gives a tensor other values"),
        (hooked, r"`x\.register_hook\(.*`: the hook on a gradient would be left out"),
        (inner_gradient, r"`y: Tensor = torch\.func\.grad.*`: .* torch\.autograd\.grad is"),
        (spelled, r"`return x \* len\(.*`: .* a Python number"),
        (addressed, r"`return x if x\.data_ptr.*`: the tensor leaves torch here"),
        (beside, r"as_strided.* at .*: it goes by addresses"),
        pytest.param(
            checked, r"_linalg_check_errors.* \(inv_ex for inv\)",
            marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="this torch drops the check from its graphs"),
        ),
        (least_squares, r"lstsq.*the size of the result depends on the values"),
        (changed_by_data, "what was detached from a value that is read later"),
        (changed_without_gradient, "under no_grad a value that has a gradient and is read later"),
    ],
)
def test_what_no_graph_keeps_is_refused_by_its_line(function: object, words: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        capture(Between(function), (torch.randn(2, 5),), training=True)
    assert "test_capture_refuses.py:" in str(caught.value)


def halves(x: Tensor) -> Tensor:
    return x + x.data * 3


def solved(x: Tensor) -> Tensor:
    y: Tensor = torch.linalg.solve(torch.eye(8, dtype=x.dtype) + x.mT @ x, x.mT)
    return y.mT


def spaced(x: Tensor) -> Tensor:
    return x * torch.linspace(x.sum(), 3.0, 8, dtype=x.dtype) + torch.eye(8).to_sparse().sum().to_dense()  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("function", [halves, solved, spaced])
def test_what_has_an_operator_is_kept(function: object) -> None:
    """`x.data` is detached; a solver that raises where a matrix is singular stays one operator, and raises. The ends
    of a linspace are numbers in a call, without a gradient. What is sparse and constant is folded."""
    setup = Setup(Between(function), (torch.randn(3, 5),)).to(torch.float64)
    program = pretend.trace(setup, training=True)
    want = plain(setup)
    for got in pretend.run(pretend.divide(program, 2, pretend.Free(2)), setup, train=True):
        demand(discrepancies(got, want), about=str(function))


class Renorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 3, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rows(x)
        return y


def test_a_weight_that_forward_changes_is_named_with_the_line_and_what_to_write() -> None:
    words = r"the parameter rows\.weight at .*`y: Tensor = self\.rows\(x\)`; .* for max_norm= scale what is looked up"
    with pytest.raises(CaptureError, match=words):
        capture(Renorms(), (torch.tensor([1, 2]),))


class Converts(Between):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(nn.Identity())
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        self.down = self.down.to(self.dtype)
        y: Tensor = self.down(self.up(x))
        return y


def test_a_module_converted_in_forward_is_refused_where_that_changes_it() -> None:
    capture(Converts(torch.float32), (torch.randn(2, 5),))
    with pytest.raises(CaptureError, match=r"forward converts down\.weight, down\.bias; convert the module before"):
        capture(Converts(torch.float64), (torch.randn(2, 5),))
