"""Tests of taste: public names, the direction of imports, sizes, and every error with its words."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import plait
from plait import errors

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "plait").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
pytestmark = pytest.mark.unthinned
FILE_LINES, FUNCTION_LINES = 600, 80

PUBLIC = {
    "Cluster",
    "Compiled",
    "Plan",
    "__version__",
    "clip_grad_norm_",
    "collectives",
    "compile",
    "errors",
    "plan",
    "simulate",
}

# Each room may use those of the rows above it, and nothing of its own row but itself.
LEVELS = (
    "errors",
    "written",
    "program mesh",
    "rules cluster collectives",
    "timeline",
    "cost passes",
    "capture plan",
    "asked report",
    "runtime",
    "compiler",
    "api fetch",
    "models",
    "generate verify survey bench",
    "cli",
)

# What users import from: these name what stands above them.
FACADES = {ROOT / "src" / "plait" / "collectives" / "__init__.py"}

# What a compiler that reads graphs never needs to know.
FAMILIES = re.compile(r"llama|qwen|mistral|gpt|falcon|gemma|mixtral|phi\d|bert|t5|olmo", re.I)
NAMED_MODELS = {"models.py", "cli.py", "fetch.py", "shapes.py"}  # MODEL and --shape have names


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def test_public_names() -> None:
    assert set(plait.__all__) == PUBLIC
    assert all(hasattr(plait, name) for name in PUBLIC)


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_imports_run_downward(path: Path) -> None:
    level = {room: i for i, row in enumerate(LEVELS) for room in row.split()}
    room = _room(path)
    if room == "__init__" or path in FACADES:
        return
    for name in imported(path):
        other = name.split(".")[1]
        assert other in level, f"{other} has no place in LEVELS"
        assert other == room or level[other] < level[room], f"{room} imports {name}"


def test_what_few_need_is_imported_by_them() -> None:
    """The tracer, sizes that are symbols, the solver: seconds, for a word of help or a mistake."""
    late = ["torch._dynamo", "sympy", "scipy", "transformers", "torch.distributed.checkpoint"]
    code = f"import plait, sys; print([m for m in {late} if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def _room(path: Path) -> str:
    parts = path.relative_to(ROOT / "src" / "plait").with_suffix("").parts
    return parts[0]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "plait":
            yield from (f"plait.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plait."):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("plait."))


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_a_file_can_be_read_at_a_sitting(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= FILE_LINES, f"{lines} lines"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_a_module_says_its_idea(path: Path) -> None:
    module = tree(path)
    assert not module.body or ast.get_docstring(module)


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_nothing_is_recognised_by_the_name_of_a_model(path: Path) -> None:
    if path.name in NAMED_MODELS:
        return
    module = tree(path)
    prose = {id(d) for node in ast.walk(module) if (d := _docstring(node)) is not None}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            assert not FAMILIES.search(node.value), f"line {node.lineno}: {node.value!r}"


def _docstring(node: ast.AST) -> ast.Constant | None:
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    value = first.value if isinstance(first, ast.Expr) else None
    return value if isinstance(value, ast.Constant) else None


ERRORS = [
    name
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.PlaitError) and kind is not errors.PlaitError
]


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_also_the_builtin_that_a_caller_expects(name: str) -> None:
    kind = getattr(errors, name)
    assert any(base is not errors.PlaitError and base is not Exception for base in kind.__bases__)
    assert str(kind("what is wrong")) == "what is wrong"


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_reached_with_its_words(name: str) -> None:
    assert any(_reaches(path, name) for path in TESTS), f"no test reaches {name} and reads it"


def _reaches(path: Path, name: str) -> bool:
    """`pytest.raises(name, match=...)`, or a caught one whose value is read."""
    module = tree(path)
    for call in ast.walk(module):
        if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith("raises")):
            continue
        if not any(ast.unparse(a).split(".")[-1] == name for a in call.args):
            continue
        if any(k.arg == "match" for k in call.keywords) or "caught.value" in ast.unparse(module):
            return True
    return False
