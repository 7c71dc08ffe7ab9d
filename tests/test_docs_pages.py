"""Every block of Python of the documentation runs and prints what stands below it, on every page that there is.

Pages with tests of their own are listed here, and those tests have to name them. A block that is not run says why, in a
comment above it: ``<!-- not run: reason -->``. ``EXPECTTEST_ACCEPT=1`` writes into a page what is printed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from pages import DOCS, ROOT, Example, accept, examples, marked, missing_tests, printed

from graph_fsdp.compat import release

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("**/*.md"))]
OF_THEIR_OWN = {
    "index.md": "test_docs_index.py",
    "lightning.md": "test_lightning.py",
    "xla.md": "xla/test_xla_docs.py",
}
LONG = {"README.md", "checkpoints.md", "passes.md", "planning.md", "profiling.md", "reading_a_report.md"}
# What a page's code takes for given.
GIVEN = {
    "README.md": """
import torch


def MyModel():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


batches = [(torch.ones(3, 4), torch.tensor([0, 1, 0]))] * 2
"""
}


def blocks(page: Path) -> list[Example]:
    given = [Example(0, GIVEN[page.name], "", (0, 0))] if page.name in GIVEN else []
    return [*given, *examples(page.read_text())]


# What of a page's text is another at each run.
VARIES = {"profiling.md": re.compile(r"\d+\.\d\d+| +")}  # times, and the width of their columns
NUMBERED = re.compile(r"^ +detach.*\n|_\d+\b", re.MULTILINE)  # torch 2.9 detaches thrice, and counts on from there
OLD = release(torch.__version__) < (2, 10)
OURS = [page for page in PAGES if page.name not in OF_THEIR_OWN and "```python" in page.read_text()]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long if page.name in LONG else (), id=page.name) for page in OURS],
)
def test_the_code_of_a_page_prints_what_stands_there(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the code writes
    found = blocks(page)
    outputs = printed(found, page)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        accept(found, outputs, page)
    for example, output in zip(blocks(page), outputs, strict=True):
        expected = example.expected
        for left_out in (*([NUMBERED] if OLD else []), *([VARIES[page.name]] if page.name in VARIES else [])):
            output, expected = left_out.sub("", output), left_out.sub("", expected)
        assert output == expected or example.span == (0, 0), f"line {example.line} of {page.name}"


def test_pages_with_tests_of_their_own_have_them() -> None:
    for page, test in OF_THEIR_OWN.items():
        source = (ROOT / "tests" / test).read_text()
        assert page in source and "PAGE" in source


def test_few_blocks_are_not_run() -> None:
    marks = [mark for page in PAGES for mark in re.findall(r"<!-- not run: (.+) -->", page.read_text())]
    assert len(marks) <= 4, marks
    for page in PAGES:
        text = page.read_text()
        assert text.count("<!-- not run:") == marked(text), page.name


def test_tests_that_pages_name_exist() -> None:
    says_what_was_run = "compatibility.md"
    named = {page.name: missing_tests(page.read_text()) for page in PAGES if page.name != says_what_was_run}
    assert {name: missing for name, (missing, _) in named.items() if missing} == {}
    assert sum(count for _, count in named.values()) > 100


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    for page in DOCS.glob("**/*.md"):
        assert f": {page.relative_to(DOCS)}\n" in navigation, page


def test_links_and_pictures_of_the_pages_are_there() -> None:
    for page in PAGES:
        prose = re.sub(r"```.*?```|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
            assert not target.endswith(".png") or (page.parent / target).stat().st_size < 300_000, target


def test_what_is_exported_is_in_the_reference() -> None:
    import graph_fsdp

    reference = (ROOT / "docs" / "api.md").read_text()
    errors = [name for name in graph_fsdp.__all__ if name.endswith(("Error", "Failure", "Disagreement"))]
    named = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", reference, re.MULTILINE)}
    assert set(graph_fsdp.__all__) - set(errors) <= named | {"passes"}
