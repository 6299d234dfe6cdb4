"""Written: dataclasses as JSON, read back with every value of the type that its field has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from plait.errors import PlaitError, PlanError

T = TypeVar("T")


def parse(kind: type[T], text: str, what: str) -> T:
    """As `read`, of JSON."""
    try:
        data = json.loads(text)
    except (ValueError, TypeError) as error:
        raise PlanError(f"this is no {what}: {error}") from None
    return read(kind, data, what)


def read(kind: type[T], data: Any, what: str, error: type[PlaitError] = PlanError) -> T:
    """Of what JSON says; `error` names `what` that is not, and the first place that shows it. An object within may
    have been read already."""
    try:
        return cast(T, _as(kind, data, ()))
    except ValueError as fault:
        raise error(f"this is no {what}: {fault}") from None


Place = tuple[str | int, ...]


def _as(hint: Any, value: Any, at: Place) -> Any:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        (one,) = (a for a in inner if a is not type(None))  # all others are of one type or nothing
        return None if value is None else _as(one, value, at)
    if is_dataclass(kind):
        return value if type(value) is kind else _object(kind, _of(dict, value, at), at)
    if kind is tuple:
        items = _of(list, value, at)
        each = [inner[0]] * len(items) if inner[-1] is ... else inner
        if len(each) != len(items):
            raise ValueError(f"{_spell(at)} has {len(items)} items, and should have {len(each)}")
        return tuple(_as(h, x, (*at, i)) for i, (h, x) in enumerate(zip(each, items, strict=True)))
    if kind is Mapping:
        return {name: _as(inner[1], x, (*at, name)) for name, x in _of(dict, value, at).items()}
    return _of(kind, value, at)


def _object(kind: Any, data: dict[str, Any], at: Place) -> Any:
    hints = _hints(kind)
    lacks = [f.name for f in fields(kind) if f.name not in data and f.default is f.default_factory is MISSING]
    unknown = sorted(data.keys() - hints.keys())
    for names, how in ((lacks, "lacks"), (unknown, "has, as nothing of its kind does,")):
        if names:
            raise ValueError(f"{_spell(at)} {how} {', '.join(names)}")
    return kind(**{name: _as(hints[name], x, (*at, name)) for name, x in data.items()})


def _of(kind: type, value: Any, at: Place) -> Any:
    """The value, where it is of a plain type; a whole number will do for a float, and true is no number."""
    wanted = (int, float) if kind is float else kind
    if isinstance(value, wanted) and (kind is bool or not isinstance(value, bool)):
        return value
    names = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}
    raise ValueError(f"{_spell(at)} is {json.dumps(value)[:40]}, and should be {names.get(kind, kind.__name__)}")


def _spell(at: Place) -> str:
    return ".".join(map(str, at)) or "it"


@cache
def _hints(kind: Any) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {name: hint for name, hint in get_type_hints(kind).items() if name in names}
