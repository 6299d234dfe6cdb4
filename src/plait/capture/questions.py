"""Whether it is being traced, which a model's Python may ask: told as in a plain call.

    torch.compiler.is_compiling(), is_exporting(), torch._dynamo.is_compiling()
    torch.fx._symbolic_trace.is_fx_tracing(), isinstance(x, torch._subclasses.FakeTensor)

What a plain call does is what a compiled model has to equal, so that way is captured. torch's own code asks
the same, and gets the truth. Where the plain way cannot be captured (it looks at a value), what was asked last
before the failure gets the truth as well, and the capture is tried again; where that does not help, all do.
What was told the truth is noted by its line.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from plait.capture.constants import Constants
from plait.capture.refuse import is_user_file, spell, user_frames
from plait.errors import CaptureError

Site = tuple[tuple[CodeType, int], ...]  # the user's frames, outermost first, each with its line


class Questions:
    """Of one model, over all tries to capture it."""

    def __init__(self) -> None:
        self.error: CaptureError | None = None  # why all are told the truth
        self._asked: list[Site] = []  # in this try
        self._told: dict[Site, str] = {}  # the truth, and why
        self._caller: FrameType | None = None  # of the model
        self._constants = Constants()
        self._before: tuple[int, CaptureError] | None = None  # how far the last try came

    @property
    def open(self) -> bool:
        """Whether another answer may lead elsewhere."""
        return bool(self._asked) and self.error is None

    def give_in(self, error: CaptureError) -> bool:
        """Whether to try again after `error`."""
        if not self.open:
            return False
        last = self._asked[-1]
        self._asked.clear()
        if last not in self._told:
            self._told[last] = _note(last, error)
        elif self._before is not None and self._constants.seen < self._before[0]:  # the truth led to it
            self.error = self._before[1]
        else:
            self.error = error
        self._before = self._constants.seen, error
        return True

    def notes(self) -> tuple[str, ...]:
        if self.error is None:
            return tuple(dict.fromkeys(self._told.values()))
        return (f"forward is told that it is traced, wherever it asks: {_otherwise(self.error)}",)

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Around a call of the model that is traced; what it makes of numbers alone has values meanwhile."""
        functions = [*map(inspect.unwrap, _functions())]
        before = [(f, f.__code__, f.__kwdefaults__) for f in functions]
        modules = [m for m in map(sys.modules.get, _TYPES) if m is not None]
        self._caller = sys._getframe(2)
        try:
            for function in functions:
                truth = FunctionType(function.__code__, function.__globals__)
                function.__code__ = _ask.__code__
                function.__kwdefaults__ = {"answer": functools.partial(self._answer, truth)}
            for module in modules:
                held = {"FakeTensor": property(self._type_of_a_trace)}
                module.__class__ = type("module", (ModuleType,), held)
            self._constants = Constants()
            with self._constants:
                yield
        finally:
            for function, code, defaults in before:
                function.__code__, function.__kwdefaults__ = code, defaults
            for module in modules:
                module.__class__ = ModuleType
            self._caller = None

    def _answer(self, truth: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        return truth(*args, **kwargs) and self._tells(sys._getframe(2))

    def _type_of_a_trace(self, module: ModuleType) -> type:
        kind: type = vars(module)["FakeTensor"]
        return kind if self._tells(sys._getframe(1)) else _OfATrace

    def _tells(self, frame: FrameType | None) -> bool:
        """Whether who asks is told the truth."""
        while frame is not None and frame.f_code is _ask.__code__:  # torch has several names for it
            frame = frame.f_back
        if frame is None or not is_user_file(frame.f_code.co_filename):
            return True
        site = self._site(frame)
        self._asked.append(site)
        return self.error is not None or site in self._told

    def _site(self, frame: FrameType | None) -> Site:
        found = []
        while frame is not None and frame is not self._caller:
            if is_user_file(frame.f_code.co_filename):
                found.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return tuple(reversed(found))


def _ask(*args: Any, answer: Callable[..., bool], **kwargs: Any) -> bool:
    """The code of every function below, while it is asked."""
    return answer(*args, **kwargs)


class _OfATrace(Tensor):
    """Stands for the type of a traced tensor, and no tensor is of it."""


def _functions() -> Iterator[Any]:
    for name, asked in _ASKED:
        if name in sys.modules:
            yield getattr(sys.modules[name], asked)


def _note(site: Site, error: CaptureError) -> str:
    """By the line of the innermost function that both asked and failed; others asked in its name."""
    code, line = site[-1]
    for (asked, at), (failed, _) in zip(site, user_frames(error), strict=False):
        if asked is not failed:
            break
        code, line = asked, at
    place = spell(code.co_filename, line)
    return f"{place}forward is told here that it is traced: {_otherwise(error, place)}"


def _otherwise(error: CaptureError, place: str = "") -> str:
    return f"the way of a plain call cannot be captured ({str(error).removeprefix(place).split('. ')[0]})"


_ASKED = (
    ("torch.compiler", "is_compiling"), ("torch.compiler", "is_exporting"),
    ("torch._dynamo.external_utils", "is_compiling"), ("torch._utils", "is_compiling"),
    ("torch.fx._symbolic_trace", "is_fx_tracing"), ("torch._subclasses.fake_tensor", "is_fake"),
)  # fmt: skip
_TYPES = ("torch._subclasses", "torch._subclasses.fake_tensor")
