"""The description of a program by the whole table, made once."""

from __future__ import annotations

from plait.program import Program
from plait.rules.aten import table
from plait.rules.describe import Description, describe


def described(program: Program) -> Description:
    """The factors of every value. Of the graph as it is when this is first asked, as the digest: a pass makes another
    program."""
    if "description" not in program.known:
        program.known["description"] = describe(program, table())
    found: Description = program.known["description"]
    return found
