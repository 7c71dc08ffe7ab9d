"""The table of docs/compatibility.md, and what newer torch needs of us."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import compatibility
import torch
from torch import nn

import graph_fsdp

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def test_dynamo_does_not_take_a_unit_for_one_of_fsdp1() -> None:
    """As torch 2.15 looks: without calling what it finds."""
    model = graph_fsdp.compile(nn.Linear(4, 2), backend="eager")
    model(torch.ones(1, 4))
    assert not inspect.getattr_static(model, "_is_fsdp_managed_module", False)
    assert model._is_fsdp_managed_module in (True, False)


def private_names(source: str) -> Iterator[str]:
    """Names of torch and torch_xla that begin with an underscore. Operators are none of theirs, whatever they are
    called."""
    tree = ast.parse(source)
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module and not n.level]
    froms = [n for n in froms if n.module and n.module.split(".")[0] in ("torch", "torch_xla")]
    names = {alias.asname or alias.name: f"{n.module}.{alias.name}" for n in froms for alias in n.names}
    modules = [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
    used = list(names.values()) + [name for name in modules if name.split(".")[0] in ("torch", "torch_xla")]
    for node in ast.walk(tree):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in {"torch", *names}:
            used.append(".".join((names.get(inner.id, inner.id), *reversed(parts))))
    yield from (n for n in used if re.search(r"\._(?!_)", n) and not n.startswith("torch.ops."))


def test_private_names_are_found() -> None:
    assert list(private_names("import torch._dynamo")) == ["torch._dynamo"]
    assert list(private_names("from torch.utils import _pytree as pytree")) == ["torch.utils._pytree"]
    assert "torch.Tensor._make" in private_names("from torch import Tensor\nTensor._make(1)")
    assert "torch._C._x" in private_names("import torch\ntorch._C._x()")
    assert not list(private_names("import torch\ntorch.ops.aten._to_copy.default(torch.ones(1))"))


def test_private_names_of_torch_are_used_in_the_compatibility_modules_alone() -> None:
    package = [path for folder in ("graph_fsdp", "passes", "runtime") for path in (ROOT / folder).rglob("*.py")]
    ours = [path for path in package if not any(part.startswith("compat") for part in path.relative_to(ROOT).parts)]
    assert len(ours) > 100
    found = {str(path.relative_to(ROOT)): names for path in ours if (names := list(private_names(path.read_text())))}
    assert found == {}


def test_the_tests_of_the_matrix_are_there_and_the_table_names_them() -> None:
    assert all((TESTS / name).is_file() for name in compatibility.TESTS)
    result = json.loads(compatibility.FILE.read_text())
    assert result["files"] == list(compatibility.TESTS), "make test-matrix"
    assert all(f"`{name}`" in result["about"] for name in compatibility.TESTS)


def test_results_are_counted_and_shown() -> None:
    cases = """<testsuites><testsuite>
        <testcase classname="a" name="passes"/>
        <testcase classname="a" name="is_skipped"><skipped/></testcase>
        <testcase classname="a" name="fails"><failure/></testcase>
        <testcase classname="a" name="cannot_begin"><error/></testcase>
    </testsuite></testsuites>"""
    counted = compatibility.counted(ElementTree.ElementTree(ElementTree.fromstring(cases)))
    assert counted == {"passed": 1, "skipped": 1, "failed": ["a::fails", "a::cannot_begin"]}
    missing = {"torch": "2.11.0", "python": "3.12", "reason": "no interpreter"}
    found = {"torch": "2.13.0", "python": "3.11.7", **counted, "files": ["a.py"]}
    before = {**found, "torch": "2.9.1", "files": ["b.py", "c.py"]}
    assert compatibility.table({"files": ["a.py"], "rows": [before, found, missing]}).rows == [
        ["2.9.1", "3.11.7", "1 of an earlier selection, 2 files", "1", "2: a::fails, a::cannot_begin"],
        ["2.13.0", "3.11.7", "1", "1", "2: a::fails, a::cannot_begin"],
        ["2.11.0", "3.12", "not run: no interpreter", "", ""],
    ]
