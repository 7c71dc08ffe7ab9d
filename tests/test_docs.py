"""What docs/passes.md says: its code runs and prints what stands there, its tables are complete, its tests exist.

``EXPECTTEST_ACCEPT=1`` writes into the page what is printed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import os
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import graph_fsdp
from graph_fsdp.passes import Gather, GraphPass, PassContext, Reduction, Role, default_pipeline
from graph_fsdp.passes.ir.graph import GIVEN, PHASES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "passes.md"
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass
class Example:
    """A block of Python and the block of what it prints. ``line``: of the page, where the code begins."""

    line: int
    code: str
    expected: str
    span: tuple[int, int]  # of the expected output in the page


def examples(page: str) -> list[Example]:
    found: list[Example] = []
    for block in _FENCE.finditer(page):
        language, body = block.groups()
        if language == "python":
            found.append(Example(page.count("\n", 0, block.start(2)), body, "", (0, 0)))
        else:
            assert language == "text" and not found[-1].expected, "each block of text is what a block of Python prints"
            found[-1].expected, found[-1].span = body, block.span(2)
    return found


def printed(found: Sequence[Example], page: Path = PAGE) -> list[str]:
    """What each prints, run one after the other in one namespace."""
    module = types.ModuleType(f"{page.stem}_md")  # Dynamo imports a model's module by name
    sys.modules[module.__name__] = module
    outputs = []
    for example in found:
        torch._dynamo.reset()
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            # As many lines above the code as on the page: tracebacks then point into it.
            exec(compile("\n" * example.line + example.code, str(page), "exec"), vars(module))
        outputs.append(output.getvalue())
    del sys.modules[module.__name__]
    return outputs


def accept(found: Sequence[Example], outputs: Sequence[str], path: Path = PAGE) -> None:
    page = path.read_text()
    for example, output in reversed(list(zip(found, outputs, strict=True))):
        if example.span != (0, 0):
            page = page[: example.span[0]] + output + page[example.span[1] :]
    path.write_text(page)


EXAMPLES = examples(PAGE.read_text())


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    found = printed(EXAMPLES)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        accept(EXAMPLES, found)
    return found


@pytest.mark.long
@pytest.mark.parametrize("index", range(len(EXAMPLES)), ids=[f"line {example.line}" for example in EXAMPLES])
def test_code_of_the_page_prints_what_stands_there(outputs: list[str], index: int) -> None:
    assert outputs[index] == EXAMPLES[index].expected


def first_column(header: str) -> list[str]:
    """The `code` in the first cells of the table with this first header cell."""
    lines = PAGE.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {header} |"))
    cells = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        cells += re.findall(r"`([^`]+)`", line.split("|")[1])
    return cells


def fields(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_tables_are_complete() -> None:
    assert callable(graph_fsdp.compile), "with it come all operators"
    assert first_column("phase") == list(PHASES)
    defined = {name for name in dir(torch.ops.graph_fsdp) if _is_operator(name)}
    assert set(first_column("operator")) == defined - {"constrain", "mark_sharding"}  # for XLA: in constrain.py
    assert sorted(first_column("role")) == sorted(role.value for role in Role)
    facts = {fact for p in default_pipeline() for fact in p.provides}.union(*GIVEN.values())
    assert set(first_column("fact")) == facts
    assert set(first_column("`context.`")) - {"context."} == fields(PassContext)
    assert set(first_column("`Gather`")) - {"Gather"} == fields(Gather) | {"views", "uses"}
    assert set(first_column("`Reduction`")) - {"Reduction"} == fields(Reduction)
    public = {name for name in vars(GraphPass) if not name.startswith("_")} - {"runs_in"}
    assert set(first_column("attribute")) == public


def _is_operator(name: str) -> bool:
    return isinstance(getattr(torch.ops.graph_fsdp, name), torch._ops.OpOverloadPacket)


def test_every_invariant_of_the_verifier_is_listed() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "passes" / "verify").glob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.Call, ast.Assign))]
    strings = set()
    for call in calls:
        if isinstance(call, ast.Assign) and "invariant" in ast.unparse(call.targets[0]).lower():
            strings |= {n.value for n in ast.walk(call.value) if isinstance(n, ast.Constant) and type(n.value) is str}
        elif isinstance(call, ast.Call) and ast.unparse(call.func) in ("self._fail", "fail"):
            first = call.args[0]
            strings |= {first.value} if isinstance(first, ast.Constant) else set()
    assert set(first_column("invariant")) == strings


def test_options_of_the_default_pipeline_are_listed() -> None:
    listed = {name.split("=")[0] for name in first_column("option")}
    assert set(default_pipeline.__kwdefaults__) <= listed


def missing_tests(page: str) -> tuple[list[str], int]:
    """Tests that a page names and that are not there, and how many it names."""
    named = re.findall(r"`(test_\w+\.py)`((?:,\s+`\w+`)*)", page)
    missing = []
    for file, functions in named:
        if not (ROOT / "tests" / file).exists():
            missing.append(file)
            continue
        tree = ast.parse((ROOT / "tests" / file).read_text())
        known = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing += [f"{file}: {name}" for name in re.findall(r"`(\w+)`", functions) if name not in known]
    return missing, len(named)


def test_tests_that_the_page_names_exist() -> None:
    missing, count = missing_tests(PAGE.read_text())
    assert missing == [] and count > 15


def test_each_difference_from_fsdp2_names_its_test() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    table = page.split("## Where numbers or behaviour differ from FSDP2")[1].split("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ")][2:]
    assert len(rows) >= 8
    for row in rows:
        missing, count = missing_tests(row.split(" | ")[-1])
        assert missing == [] and count == 1, row
