"""Tests use what is public: names with an underscore in front, of objects that are not the test's own, are counted.

Counted are attributes of anything but ``self`` and ``cls``, names that are imported from this package, and names that
are patched by a string. Not counted are names below ``torch`` and ``aten``, which users name as well (modules as
``torch._dynamo``, operators as ``torch.ops.aten._to_copy``), and the few that others document with an underscore.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
LIMIT = 27
_TORCHS = {"torch", "aten", "torch_xla"}
# Python's own, a hook of Hugging Face, and the method of a DeviceMesh that torch's tutorials and docs/ name.
_DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_flatten", "_init_weights"}


def test_few_private_names_are_touched() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line} {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, name in private_names(ast.parse(path.read_text()))
    ]
    assert len(found) < LIMIT, "\n".join(["make one of these public, or test what it does:", *found])


def test_what_is_counted() -> None:
    source = """
from graph_fsdp.checkpoint import _storage
engine._held.x
self.engine._held
self._own; cls._own; other.__dict__; torch._dynamo.reset(); torch.ops.aten._to_copy.default(x)
monkeypatch.setattr("graph_fsdp.passes.analysis.hardware._describe", None)
monkeypatch.setattr(hardware, "_describe", None)
"""
    assert [(line, name) for line, name in private_names(ast.parse(source))] == [
        (2, "_storage"),
        (3, "_held"),
        (4, "_held"),
        (6, "graph_fsdp.passes.analysis.hardware._describe"),
        (7, "_describe"),
    ]


def private_names(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and name of each."""
    return sorted((node.lineno, name) for node in ast.walk(tree) for name in _names(node))  # type: ignore[attr-defined]


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node.value):
        yield node.attr
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graph_fsdp"):
        yield from (alias.name for alias in node.names if _is_private(alias.name))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
        strings = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        yield from (s for s in strings if _is_private(s.rpartition(".")[2]))


def _is_private(name: str) -> bool:
    return re.match(r"_[^_]", name) is not None and name not in _DOCUMENTED


def _is_own(value: ast.expr) -> bool:
    """Whether it is the object whose method this is, or below a name of torch's."""
    if isinstance(value, ast.Name) and value.id in ("self", "cls"):
        return True
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name) and value.id in _TORCHS
