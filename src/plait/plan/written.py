"""Written: data of a plan as JSON, read back with every value of the type that its field has."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

from plait.errors import PlanError

T = TypeVar("T")
TOLD = 3  # faults of a text that its error names


def read(kind: type[T], text: str, what: str) -> T:
    """A dataclass from JSON; PlanError names `what` the text is not, and where."""
    from pydantic import ValidationError

    try:
        return cast(T, _adapter(cast(Any, kind)).validate_json(text, strict=True))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        faults = [f"{'.'.join(map(str, e['loc'])) or 'all of it'}: {e['msg']}" for e in found[:TOLD]]
        more = f" and {len(found) - TOLD} more" if len(found) > TOLD else ""
        raise PlanError(f"this is no {what}: {'; '.join(faults)}{more}") from None


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
