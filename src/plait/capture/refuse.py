"""What cannot be captured, said before or after the attempt in the user's own terms."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import linecache
import logging
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules import module as nn_module
from torch.utils import _pytree as pytree

from plait.capture import hooks
from plait.errors import CaptureError, PlaitError

# -- before ----------------------------------------------------------------------------------------------


def refuse_model(model: nn.Module, training: bool) -> None:
    """Hooks, wrappers and weights that a graph cannot express; all offenders at once."""
    found = [*_wrappers(model), *_hooks(model, training), *_odd_weights(model)]
    if found:
        raise CaptureError(
            f"{type(model).__name__} cannot be captured as it is: {'; '.join(found)}"
        )


def _wrappers(model: nn.Module) -> Iterator[str]:
    wrappers = {
        nn.DataParallel: "pass model.module",
        nn.parallel.DistributedDataParallel: "pass model.module",
        torch.jit.ScriptModule: "pass the module that it was scripted from",
    }
    for name, module in model.named_modules():
        for cls, advice in wrappers.items():
            if isinstance(module, cls):
                yield f"{name or 'the model'} is a {cls.__name__}: {advice}"


def _hooks(model: nn.Module, training: bool) -> Iterator[str]:
    kinds = hooks.BACKWARD if training else ()
    everywhere = [k for k in (*hooks.FORWARD, *kinds) if getattr(nn_module, f"_global{k}", None)]
    found = [
        f"{name or 'the model'} ({hooks.title(hook)})"
        for name, m in model.named_modules()
        for kind in kinds
        for hook in getattr(m, kind, {}).values()
    ] + [f"every module (torch.nn.modules.module._global{k})" for k in everywhere]
    if training:
        found += [
            f"{name} (a hook on its gradient)"
            for name, p in model.named_parameters()
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
        ]
    if found:
        yield (
            f"hooks on {', '.join(found)} would be left out: remove them, or write what they do "
            "into forward"
        )


def _odd_weights(model: nn.Module) -> Iterator[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [n for n, t in tensors if isinstance(t, nn.parameter.UninitializedTensorMixin)]  # type: ignore[attr-defined]
    if lazy:
        yield f"{', '.join(lazy)} have no shape yet: call the model once"
    odd = [
        f"{name} ({type(t).__name__})"
        for name, t in tensors
        if type(t) not in (torch.Tensor, nn.Parameter) and name not in lazy
    ]
    if odd:
        yield (
            f"{', '.join(odd)} are tensor subclasses, which have no ATen form: use plain tensors "
            "(a quantised model: dequantise it; a sharded one: pass the unsharded model)"
        )
    yield from _overlaps(tensors)


def _overlaps(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Two parameters that share memory without being one tensor."""
    by_storage: dict[int, dict[Any, str]] = {}
    for name, t in tensors:
        lazy = isinstance(t, nn.parameter.UninitializedTensorMixin)  # type: ignore[attr-defined]
        if isinstance(t, nn.Parameter) and not lazy and t.layout is torch.strided and t.numel():
            views = by_storage.setdefault(t.untyped_storage()._cdata, {})
            views.setdefault((t.storage_offset(), t.shape, t.stride()), name)
    shared = [" and ".join(v.values()) for v in by_storage.values() if len(v) > 1]
    if shared:
        yield f"{', '.join(shared)} are different views of one memory: make them one, or copies"


# -- the outputs -----------------------------------------------------------------------------------------


def refuse_outputs(outputs: Any) -> None:
    """`outputs`: of the trial. Caches, and objects whose tensors are out of sight."""
    caches = _cache_classes()
    found = pytree.tree_flatten_with_path(outputs, is_leaf=lambda x: isinstance(x, caches))[0]
    wrong = [(f"{_named(path)} is of type {type(x).__name__}", x) for path, x in found if not _known(x)]
    if not wrong:
        return
    if any(isinstance(x, caches) for _, x in wrong):
        advice = "call it with use_cache=False"
    else:
        advice = _registered([x for _, x in wrong]) or f"return {CONTAINERS}"
    raise CaptureError(f"the output {', '.join(text for text, _ in wrong)}: {advice}")


def refuse_inputs(leaves: Iterable[tuple[str, Any]]) -> None:
    """`leaves`: of the call, with their paths. Objects whose tensors are out of sight, and odd tensors."""
    leaves = list(leaves)
    odd = [f"{path} is {kind}" for path, x in leaves if (kind := _odd_layout(x))]
    if odd:
        raise CaptureError(f"the input {', '.join(odd)}: pass a plain tensor (x.to_dense(), padded)")
    wrong = [(path, x) for path, x in leaves if dataclasses.is_dataclass(x) or isinstance(x, HIDING)]
    if wrong:
        found = ", ".join(f"{path} is of type {type(x).__name__}" for path, x in wrong)
        advice = _registered([x for _, x in wrong]) or f"pass {CONTAINERS}"
        raise CaptureError(f"the input {found}: {advice}")


def _registered(objects: list[Any]) -> str:
    """How torch is told what is in a dataclass; it then takes and gives it as it is."""
    kinds = {type(x).__name__: None for x in objects if dataclasses.is_dataclass(x)}
    calls = " and ".join(f"torch.export.register_dataclass({k})" for k in kinds)
    return f"call {calls} first, and it is passed and returned as it is" if kinds else ""


CONTAINERS = "tensors, numbers, None, and lists, tuples or dicts of them"
HIDING = (set, frozenset, np.ndarray, np.generic)


def _odd_layout(x: Any) -> str:
    if not isinstance(x, torch.Tensor) or (x.layout is torch.strided and not x.is_nested):
        return ""
    return "a nested tensor" if x.is_nested else f"of layout {str(x.layout).removeprefix('torch.')}"


def _known(x: Any) -> bool:
    plain = (torch.Tensor, type(None), bool, int, float, complex, str, bytes)
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(x, (*plain, *symbolic))


def _cache_classes() -> tuple[type, ...]:
    found = sys.modules.get("transformers.cache_utils")
    return (found.Cache,) if found is not None else ()


def _named(path: Any) -> str:
    return pytree.keystr(path).strip("[]'\"").replace("']['", ".") if path else "of forward"


def refuse_fixed(ranges: Mapping[str, tuple[Any, Any]], places: Mapping[str, str]) -> None:
    """Sizes of which the trial left one value."""
    found = [
        f"{name!r} can only be {low} ({places.get(name, 'of forward')}): leave it out of dynamic="
        for name, (low, high) in ranges.items()
        if low is not None and low == high
    ]
    if found:
        raise CaptureError(f"dynamic=: {'; '.join(found)}")


# -- after -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explained(places: Mapping[str, str] | None = None) -> Iterator[None]:
    """What torch raises becomes a CaptureError with the user's line; what it logs is kept quiet.

    `places`: the lines that ask about each dynamic size.
    """
    with _quiet():
        try:
            yield
        except PlaitError:
            raise
        except Exception as error:
            raise CaptureError(_explain(error, places or {})) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns, logs, and writes the graph so far to stderr."""
    loggers = [logging.getLogger(n) for n in ("torch", "torch.fx", "torch._subclasses")]
    names = [n for n in logging.root.manager.loggerDict if n.startswith("torch.")]
    loggers += [logging.getLogger(n) for n in names]
    before = [(logger, logger.disabled) for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, disabled in before:
            logger.disabled = disabled


def _explain(error: BaseException, places: Mapping[str, str]) -> str:
    text = str(error)
    place = user_line(error)
    if "data-dependent" in text or "DataDependent" in type(error).__name__ or "__format__" in text:
        return (
            f"{place or _module_line(error)}what runs depends on the value of a tensor, which no graph can "
            "keep. Pass the value as a Python number, or compute both cases and choose with torch.where (of "
            "experts in a loop: run every one, and weigh what they give; of torch.distributions: pass "
            "validate_args=False)"
        )
    if type(error).__name__ in ("Unsupported", "UncapturedHigherOrderOpError"):  # torch traces its functions apart
        return f"{place}{WITHIN}"
    if "Constraints violated" in text:
        return _constraints(text, places)
    if "expected compiled_fn to be GraphModule" in text:
        return OVERLAPPING
    if "torch._C.Generator" in text:  # torch 2.11 says it here
        return f"{place}{OBJECT}"
    if "DynamicOutputShape" in type(error).__name__:
        return f"{place}{text.strip()}: {SIZED_LOSS if 'loss' in text else SIZED_BY_VALUES}"
    if "got FakeTensor" in text or "not FakeTensor" in text:
        return (
            f"{place}a Python number is wanted here, and a tensor has none while a graph is captured: pass the "
            f"number, or multiply by the tensor instead ({text.splitlines()[0]})"
        )
    if "fake tensor in the exported program constant" in text:
        return (
            "forward meets a tensor that it did not make of its arguments and weights: of an earlier call, kept "
            "by a global or by an object that is no module (call the model once before it is compiled), or of "
            "a gradient that it takes through a weight (torch.autograd.grad), which is not captured"
        )
    if "data is not allocated yet" in text:
        return (
            f"{place}a list of tensors becomes one tensor by their values, which no graph can keep: join them "
            "with torch.stack"
        )
    if type(error).__name__ == "PendingUnbackedSymbolNotFound":
        return f"{place}{CHOSEN_TWICE}"
    if ".numpy() is not supported" in text or "access data pointer" in text:
        return f"{place}the tensor leaves torch here; only torch operators can be captured"
    return told(error)


SIZED_BY_VALUES = (
    "the size of the result depends on the values of a tensor, which is not supported; keep the size and "
    "mask what does not count (torch.where), or pass it as a Python number"
)

WITHIN = (
    "a graph within the graph is not supported; compute both cases and choose with torch.where, or write a loop of "
    "fixed length"
)

OVERLAPPING = (
    "two buffers share a part of their memory, and forward changes one of them: make them one buffer, and slice it "
    "where it is read"
)

CHOSEN_TWICE = (
    "a part that is chosen by a number which a tensor holds is changed in place, or chosen from by another, which is "
    "not captured: choose by a tensor that has a dim (x[:, t.view(1)] for x[:, t])"
)

OBJECT = (
    "is given an object that a graph cannot keep (a torch.Generator: leave it out, and seed with torch.manual_seed)"
)

SIZED_LOSS = (
    "a size that it needs depends on the values of a tensor, which is not supported: compute the loss on the "
    "outputs of the compiled model"
)


def told(error: BaseException) -> str:
    """An error in the user's own code: the line, the class and what it says."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{spell(error.filename, error.lineno or 0)}{type(error).__name__}: {error.msg}"
    lines = [line.replace("FakeTensor", "Tensor") for line in str(error).splitlines() if line.strip()]
    place = user_line(error) or _module_line(error)
    return f"{place}{type(error).__name__}: {lines[0] if lines else ''}"


def _module_line(error: BaseException) -> str:
    """The innermost module that ran, where no line of the user's did."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ran = [m for f in frames if isinstance(m := f.f_locals.get("self"), nn.Module)]
    if not ran:
        return ""
    names = [name for name, m in ran[0].named_modules() if m is ran[-1]] or [""]
    return f"{names[0].removeprefix('_export_root').lstrip('.') or 'the model'} ({type(ran[-1]).__name__}): "


def _constraints(text: str, places: Mapping[str, str]) -> str:
    """torch's suggested fixes, in the words of `dynamic=`; where it has none, what it asks for."""
    fixes = re.findall(r"^  (\w+) = (.+)$", text, re.MULTILINE)
    found = []
    for name, fix in fixes:
        place = f" ({places[name]})" if name in places else ""
        if fix.isdigit():
            found.append(f"{name!r} can only be {fix}{place}: leave it out of dynamic=")
        elif (multiple := re.fullmatch(r"(\d+)\*_?\w+", fix)) is not None:
            found.append(f"{name!r} has to be a multiple of {multiple[1]}{place}, which is not supported")
        elif fix in dict(fixes) or re.fullmatch(r"\w+", fix):
            found.append(f"{name!r} is always equal to {fix!r}{place}: give them one name")
        else:
            found.append(f"{name!r} is limited{place}: {fix}")
    limits: dict[str, list[str]] = {}
    for name, source, guard in LIMIT.findall(text):
        limits.setdefault(name, []).append(guard.replace(source, name))
    for name in limits.keys() - dict(fixes).keys():
        place = f" ({places[name]})" if name in places else ""
        found.append(f"{name!r} is limited{place}: {', '.join(limits[name])}")
    return "dynamic=: " + ("; ".join(found) or text.splitlines()[0])


LIMIT = re.compile(r"Not all values of (\w+) = (\S+) in .* satisfy the generated guard (.+?)\.?$", re.MULTILINE)


def user_line(error: BaseException) -> str:
    """"file:line: `code`: " of the innermost frame that is neither torch's nor ours."""
    frames = user_frames(error)
    return spell(frames[-1][0].co_filename, frames[-1][1]) if frames else ""


def user_frames(error: BaseException) -> list[tuple[CodeType, int]]:
    """The frames that are neither torch's nor ours, outermost first, with their lines."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    for link in reversed(chain):
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(link.__traceback__)]
        if found := [(code, line) for code, line in frames if is_user_file(code.co_filename)]:
            return found
    return []


def user_place() -> str:
    """The same of the code that runs now."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return spell(frame.f_code.co_filename, frame.f_lineno).rstrip(": ")
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def asked_in_python() -> bool:
    """Whether the model's own Python asks for what runs now, and not an operator that it calls."""
    frame: FrameType | None = sys._getframe(1)
    for passed in (OURSELVES, SYMBOLS):  # what watches, and torch's numbers that are symbols
        while frame is not None and frame.f_code.co_filename.startswith(passed):
            frame = frame.f_back
    name = frame.f_code.co_filename if frame is not None else ""
    return is_user_file(name) or name.startswith(NN)


def traced_place(node: fx.Node) -> str:
    """"file:line: `code`" of the innermost user's line that a node was traced from."""
    lines = re.findall(r'File "(.+)", line (\d+)', str(node.meta.get("stack_trace") or ""))
    ours = [(name, int(line)) for name, line in lines if is_user_file(name)]
    if ours:
        return spell(*ours[-1]).rstrip(": ")
    return "the loss" if any(name == LOSS for name, _ in lines) else node.name


@cache
def is_user_file(name: str) -> bool:
    return not is_standard_file(name) and not name.startswith((*OURS, "<frozen", "<string>")) and "<eval" not in name


def is_standard_file(name: str) -> bool:
    return name.startswith(STANDARD) and "site-packages" not in name


def spell(name: str, line: int) -> str:
    code = linecache.getline(name, line).strip()
    return f"{name}:{line}: " + (f"`{code}`: " if code else "")


STANDARD = sysconfig.get_paths()["stdlib"] + os.sep  # of which site-packages is a part
TORCH, OURSELVES = (
    os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)
OURS = (TORCH, OURSELVES)
LOSS = os.path.join(OURSELVES, "capture", "loss.py")  # its forward: torch keeps no line of what that calls
NN = os.path.dirname(torch.nn.__file__) + os.sep
SYMBOLS = (torch.__file__, *(os.path.join(TORCH, path) for path in ("fx/experimental/", "utils/_")))
