"""docs/fsdp_in_300_lines.md: its blocks are one short file that needs torch alone, and trains on two ranks.

What the blocks print in one process, ``test_docs_pages.py`` compares.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "fsdp_in_300_lines.md").read_text()
PASSES, REAL = PAGE.split("\n## What the real one does more\n")


def code(page: str) -> str:
    return "".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))


def test_all_of_it_is_at_most_300_lines() -> None:
    assert 200 < code(PAGE).count("\n") <= 300


def test_only_torch_is_imported_before_the_last_section() -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(code(PASSES))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    others = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert others == {"torch", "functorch"}  # functorch comes with torch


def test_the_files_of_the_real_one_are_there() -> None:
    named = re.findall(r"`((?:graph_fsdp|passes|runtime)/\S+)`", REAL)
    assert len(named) > 20 and [name for name in named if not (ROOT / name).is_file()] == []


def test_the_pieces_of_the_table_are_on_the_page() -> None:
    pieces = re.findall(r"^\| `(\w+)` \|", REAL, re.MULTILINE)
    assert {"insert_gathers", "regather", "bucket", "prefetch", "free_after_use"} <= set(pieces)
    assert [
        piece for piece in pieces if not re.search(rf"^ *(?:def|class) {piece}\b", code(PASSES), re.MULTILINE)
    ] == []


@pytest.mark.long
def test_two_ranks_end_with_the_parameters_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "mini_fsdp.py").write_text(code(PASSES))
    command, wanted, expected = re.findall(
        r"^\$ OMP_NUM_THREADS=1 torchrun (.*) \| grep (\w+)\n(.*)\n", PAGE, re.MULTILINE
    )[0]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if wanted in line] == [expected]
