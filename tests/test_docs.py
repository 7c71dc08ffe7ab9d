"""What docs/passes.md says: its tables are complete. Its code is run by test_docs_pages.py."""

from __future__ import annotations

import ast
import dataclasses
import re

import torch
from pages import DOCS, ROOT, missing_tests

import graph_fsdp
from graph_fsdp.passes import Gather, GraphPass, PassContext, Reduction, Role, default_pipeline
from graph_fsdp.passes.ir.graph import GIVEN, PHASES

PAGE = DOCS / "passes.md"


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
    others = {"constrain", "mark_sharding"} | {
        f"{name}{end}" for name in ("recurrent_layer", "ctc_loss") for end in ("", "_backward")
    }
    assert set(first_column("operator")) == defined - others
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


def test_each_difference_from_fsdp2_names_its_test() -> None:
    page = (DOCS / "migrating.md").read_text()
    table = page.split("## Where numbers or behaviour differ from FSDP2")[1].split("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ")][2:]
    assert len(rows) >= 8
    for row in rows:
        missing, count = missing_tests(row.split(" | ")[-1])
        assert missing == [] and count == 1, row
