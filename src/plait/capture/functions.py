"""A user's `torch.autograd.Function`, kept in a graph that autograd differentiates.

An export keeps the operators of the forward alone. So `apply` is made to run the forward, then the
user's own backward for a gradient that is a mark, and to tie the two together:

    y = forward(x).detach();  g = cotangent(y);  dx = backward(g);  y = sloped(y, x, dx)

`write_out` proves of the operators between `g` and `dx`, by the equation table, that they are
element-wise and linear in `g`. Then `dx` is `g * slope`, the slope what they give for ones:

    y = sloped(y, x, slope)      forward: y      backward: dx = dy * slope

which is element-wise itself, split and chunked like any other operator. A backward of another kind is
refused by name, with the operator that stands in the way.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import _SingleLevelFunction
from torch.export import ExportedProgram
from torch.utils import checkpoint

from plait.capture.clean import same_sizes
from plait.capture.refuse import traced_place
from plait.errors import CaptureError
from plait.passes.fold import FILLS
from plait.program import may_learn
from plait.rules import aten as equations
from plait.rules import views
from plait.rules.describe import bind
from plait.rules.own import COTANGENT, SLOPED
from plait.rules.rule import Elementwise

aten = torch.ops.aten


def lost(name: str, reason: str) -> CaptureError:
    """`name`: of a Function, or of several."""
    return CaptureError(
        f"the backward of {name} would be lost: {reason}; a graph keeps a backward that is "
        "one factor for each element. Write the forward so that autograd gives the same gradient "
        "(x + (f(x) - x).detach() for a straight-through f), make it an operator "
        "(torch.library.custom_op and register_autograd), or capture with training=False"
    )


def title(cls: type) -> str:
    try:
        return f"{cls.__qualname__} ({inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]})"
    except (OSError, TypeError):
        return f"{cls.__qualname__} ({cls.__module__})"


def belongs_to_an_operator(cls: type) -> bool:
    """A backward that torch.library.register_autograd gave to an operator: the graph keeps the
    operator, and with it this backward."""
    return cls.__module__ == torch._library.autograd.__name__


# -- while the model's Python runs ---------------------------------------------------------------------


@contextlib.contextmanager
def traced(training: bool) -> Iterator[None]:
    """`apply` of every Function, also where a model has bound it to a name long before."""
    def apply(cls: Any, *args: Any) -> Any:
        known = belongs_to_an_operator(cls) or cls.__module__ == checkpoint.__name__
        if known or not training or not torch.is_grad_enabled():
            return super(_SingleLevelFunction, cls).apply(*args)
        return _both_ways(cls, args)

    base: Any = _SingleLevelFunction
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


class Context:
    """What a Function's forward and backward get as `ctx`."""

    def __init__(self, cls: type, args: tuple[Any, ...]) -> None:
        self.function = cls
        self.needs_input_grad = tuple(isinstance(x, Tensor) and may_learn(x) for x in args)
        self.saved_tensors: tuple[Any, ...] = ()
        self.constant: set[int] = set()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        self.constant |= set(map(id, outputs))

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise lost(title(self.function), "it changes its argument in place")


def _both_ways(cls: Any, args: tuple[Any, ...]) -> Any:
    ctx = Context(cls, args)
    with torch.no_grad():
        if cls.setup_context is _SingleLevelFunction.setup_context:
            results = cls.forward(ctx, *args)
        else:
            results = cls.forward(*args)
            cls.setup_context(ctx, args, results)
    several = isinstance(results, tuple)
    outputs = list(results) if several else [results]
    with_gradient = [
        i
        for i, y in enumerate(outputs)
        if isinstance(y, Tensor) and may_learn(y) and id(y) not in ctx.constant
    ]
    if len(with_gradient) > 1:
        raise lost(title(cls), f"it has {len(with_gradient)} results with gradients")
    for i in with_gradient:
        outputs[i] = _tied(ctx, outputs, i, args)
    return tuple(outputs) if several else outputs[0]


def _tied(ctx: Context, outputs: list[Any], at: int, args: tuple[Any, ...]) -> Tensor:
    """The output as one whose gradient goes to the arguments by the user's backward."""
    cls: Any = ctx.function
    y: Tensor = outputs[at].detach()  # the forward may give back what it was given
    grad = COTANGENT(y, title(cls))
    with torch.no_grad():
        given = [grad if i == at else _zeros(x) for i, x in enumerate(outputs)]
        back = cls.backward(ctx, *given)
    back = back if isinstance(back, tuple) else (back,)
    for x, dx in zip(args, back, strict=False):
        if not isinstance(x, Tensor) or not isinstance(dx, Tensor) or not may_learn(x):
            continue
        if not x.shape == y.shape == dx.shape:
            shapes = " for ".join(str(list(t.shape)) for t in (dx, y))
            raise lost(title(cls), f"it gives a gradient of {shapes}")
        y = SLOPED(y, x, dx)
    return y


def _zeros(x: Any) -> Any:
    return torch.zeros_like(x) if isinstance(x, Tensor) else None


# -- in the exported graph -----------------------------------------------------------------------------


def write_out(exported: ExportedProgram) -> None:
    """Every mark becomes a one for each element, and what was computed from it the slope."""
    graph = exported.graph
    marked: dict[fx.Node, fx.Node] = {}  # value -> the mark that it depends on
    zeros = set(_zero_constants(exported))
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target is COTANGENT:
            marked[node] = node
            continue
        _without_templates(node, marked)
        if _is_zero(node, zeros):
            zeros.add(node)
        given = [x for x in node.all_input_nodes if x in marked]
        if node.target is SLOPED:
            if not given:
                raise lost(_function_of(node), "it does not depend on the gradient")
        elif given:
            mark = marked[node] = marked[given[0]]
            if not _linear(node, given, mark.meta["val"].shape, zeros):
                raise lost(str(mark.args[1]), f"it computes {node.target}")
    for node in marked:
        _of_ones(graph, node)


def _function_of(sloped: fx.Node) -> str:
    """A mark may be unused, and gone: the line has to do."""
    return f"the Function at {traced_place(sloped)}"


def _linear(node: fx.Node, given: list[fx.Node], shape: Any, zeros: set[fx.Node]) -> bool:
    """Whether it is element-wise, and linear in what depends on the gradient."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not same_sizes(value.shape, shape):
        return False
    rule = _RULES.get(node.target)
    if rule is views.same:
        return True
    bound = bind(node) if isinstance(rule, Elementwise) else {}
    names = {name for name, x in bound.items() if x in given}
    if node.target in _CHOICES:
        others = [bound[name] for name in _CHOICES[node.target] if name not in names]
        nought = all(x in zeros if isinstance(x, fx.Node) else x == 0 for x in others)
        return nought and not names & {"mask", "condition"}
    floats = all(may_learn(x.meta["val"]) for x in (*given, node))
    return floats and any(names == set(group) for group in getattr(rule, "carry", ()))


def _zero_constants(exported: ExportedProgram) -> Iterator[fx.Node]:
    """`torch.tensor(0.0)`, as an export keeps it."""
    names = exported.graph_signature.inputs_to_lifted_tensor_constants
    for node in exported.graph.nodes:
        value = exported.constants[names[node.name]] if node.name in names else None
        if isinstance(value, Tensor) and not value.is_meta and not value.any():
            yield node


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    if node.target in FILLS:
        return bool(FILLS[node.target](node.args) == 0)
    return node.target in _KEEPS_ZERO and node.args[0] in zeros


def _without_templates(node: fx.Node, marked: dict[fx.Node, fx.Node]) -> None:
    """A gradient of which only the size and the dtype are read: those of the result will do."""
    if node.target not in _TEMPLATES:
        return
    position = _TEMPLATES[node.target]
    template = node.args[position]
    if not isinstance(template, fx.Node) or template not in marked:
        return
    dtype = node.meta["val"].dtype
    if node.target is aten.type_as.default:
        node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": dtype}
        return
    node.update_arg(position, marked[template].args[0])
    node.kwargs = node.kwargs | {"dtype": dtype}


def _of_ones(graph: fx.Graph, node: fx.Node) -> None:
    """The value of a node where the gradient is one everywhere, in dims of size 1."""
    if node.target is COTANGENT:
        y = node.args[0].meta["val"]  # type: ignore[union-attr]
        node.target, node.args = aten.full.default, ([1] * y.dim(), 1)
        node.kwargs = {"dtype": y.dtype, "device": y.device}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    with torch.no_grad(), node.meta["val"].fake_mode:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


_RULES = equations.table()
_KEEPS_ZERO = {
    aten.lift_fresh_copy.default, aten.detach.default, aten.alias.default, aten.clone.default,
    aten._to_copy.default, aten.expand.default, aten.view.default,
}  # fmt: skip
_TEMPLATES: dict[Any, int] = {aten.type_as.default: 1} | {
    fill: 0
    for name in ("zeros", "ones", "full", "empty")
    for fill in (getattr(aten, f"{name}_like").default, getattr(aten, f"new_{name}").default)
}
# Of which one operand is taken; the others have to be zero.
_CHOICES: dict[Any, tuple[str, ...]] = {
    aten.where.self: ("self", "other"),
    aten.where.ScalarOther: ("self", "other"),
    aten.where.ScalarSelf: ("self", "other"),
    aten.masked_fill.Scalar: ("self", "value"),
}
