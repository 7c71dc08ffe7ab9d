"""The house: floors that are not climbed, no circles of imports, and tables that have every operator of the dialect."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Effect
from graph_fsdp.runtime.executor import CALLED

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "graph_fsdp": ROOT / "graph_fsdp",
    "graph_fsdp.passes": ROOT / "passes",
    "graph_fsdp.runtime": ROOT / "runtime",
}
FLOORS = ("graph_fsdp.compat", "graph_fsdp.passes", "graph_fsdp.runtime", "graph_fsdp")  # from below
MOST_FLAT_FILES = 10


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that a file imports when it runs: not those that are for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(node) for block in typing for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports name the package"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                yield name


@pytest.fixture(scope="module")
def imports() -> nx.DiGraph:
    known = modules()
    return nx.DiGraph((name, other) for name, path in known.items() for other in imported(path, known) if other != name)


def floor(module: str) -> int:
    return next(i for i, name in enumerate(FLOORS) if module == name or module.startswith(f"{name}."))


def test_nothing_imports_from_a_floor_above(imports: nx.DiGraph) -> None:
    # The package itself imports nothing until a name is asked for, and has no floor.
    climbs = [(a, b) for a, b in imports.edges if b != "graph_fsdp" and floor(a) < floor(b)]
    assert not climbs


def test_no_files_import_each_other_in_a_circle(imports: nx.DiGraph) -> None:
    packages = [name for name, path in modules().items() if path.name == "__init__.py"]  # they hand names on
    files = imports.subgraph(set(imports) - set(packages))
    assert [sorted(circle) for circle in nx.strongly_connected_components(files) if len(circle) > 1] == []


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=lambda folder: folder.name)
def test_few_files_lie_flat(folder: Path) -> None:
    files = [path.name for path in folder.glob("*.py") if not path.name.startswith("__")]
    assert len(files) <= MOST_FLAT_FILES, files


def test_every_operator_is_carried_out() -> None:
    """By programs, and called one by one, as a printed graph calls them."""
    assert CALLED == dialect.EXECUTED
    for operator in dialect.OPERATORS:
        assert operator.has_kernel_for_dispatch_key("CompositeExplicitAutograd"), operator


def test_every_operator_says_what_it_yields_and_does() -> None:
    assert all(found.meaning for found in dialect.OPERATORS.values())
    assert {found.effect for found in dialect.OPERATORS.values()} == set(Effect)
    starts = {record.effect for target, record in dialect.OPERATORS.items() if target in dialect.STARTS}
    assert starts == {Effect.START}
