"""The package imports nothing until a name of it is asked for, and then everything that the name needs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import graph_fsdp


def run(program: str) -> str:
    """What a program printed in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_imports_neither_torch_nor_its_own_modules() -> None:
    loaded = run("import sys, graph_fsdp\nprint(*sys.modules)").split()
    assert [name for name in loaded if name.startswith(("torch", "graph_fsdp."))] == []


def test_help_and_wrong_arguments_are_answered_without_torch() -> None:
    program = """
import contextlib, io, sys
from graph_fsdp.cli.main import main

for command in ([], ["plan"], ["report"], ["consolidate"], ["inspect-checkpoint"]):
    for arguments, status in ((["--help"], 0), (["--nonsense"], 2)):
        written = io.StringIO()
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
            try:
                main([*command, *arguments])
            except SystemExit as end:
                assert end.code == status, (command, arguments, end.code)
        assert "usage: graph-fsdp" in written.getvalue()
with contextlib.redirect_stdout(written):
    assert main([]) == 0
assert "graph-fsdp plan config.json" in written.getvalue()
print("torch" in sys.modules, "graph_fsdp.passes" in sys.modules)
"""
    assert run(program).split() == ["False", "False"]


def test_type_checkers_and_programs_find_each_name_in_the_same_module() -> None:
    tree = ast.parse(Path(graph_fsdp.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    checked = {
        alias.name: getattr(importlib.import_module(str(statement.module)), alias.name)
        for statement in guarded.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert checked.keys() == set(graph_fsdp.__all__)
    for name, value in checked.items():
        assert getattr(graph_fsdp, name) is value, name


def test_names_can_be_asked_for_late_and_change_no_state() -> None:
    """Inside torch's modes, after the seeds were set, by a star."""
    program = """
import random, sys
import torch, graph_fsdp
from torch._subclasses.fake_tensor import FakeTensorMode

random.seed(3)
states = random.getstate(), torch.manual_seed(3).get_state()
assert not [name for name in sys.modules if name.startswith("graph_fsdp.")]
with FakeTensorMode(), torch.device("meta"), torch.inference_mode():
    from graph_fsdp import *
assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
assert all(globals()[name] is getattr(graph_fsdp, name) for name in graph_fsdp.__all__)
assert graph_fsdp.errors.MeshError is MeshError and graph_fsdp.planning.plan is plan
model = graph_fsdp.compile(torch.nn.Linear(2, 2), backend="eager")
model(torch.ones(1, 2)).sum().backward()
print(model.weight.grad.sum().item())
"""
    assert run(program).split() == ["4.0"]


def test_a_name_that_is_not_there() -> None:
    assert {*graph_fsdp.__all__, "errors", "planning"} <= set(dir(graph_fsdp))
    with pytest.raises(AttributeError, match=r"module 'graph_fsdp' has no attribute 'compil'"):
        graph_fsdp.compil  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'compil'"):
        from graph_fsdp import compil  # type: ignore[attr-defined]  # noqa: F401


def test_the_first_name_says_that_torch_is_too_old() -> None:
    program = """
import sys, types
old = types.ModuleType("torch")
old.__version__ = "2.8.1"
sys.modules["torch"] = old
import graph_fsdp
try:
    graph_fsdp.compile
except ImportError as error:
    print(error)
"""
    assert run(program).startswith("graph_fsdp needs torch 2.9 or newer, and this is 2.8.1")
