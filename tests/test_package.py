"""What the package says of itself in several places is the same. (`make test-package` builds and installs it.)"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import graph_fsdp

if sys.version_info < (3, 11):
    pytest.skip("the standard library reads TOML since Python 3.11", allow_module_level=True)
import tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"graph_fsdp": "graph_fsdp", "graph_fsdp.passes": "passes", "graph_fsdp.runtime": "runtime"}


def test_every_folder_with_python_files_is_a_package() -> None:
    there = set()
    for name, top in FOLDERS.items():
        for folder in {path.parent for path in (ROOT / top).rglob("*.py")}:
            below = folder.relative_to(ROOT / top).parts
            there.add(".".join((name, *below)))
    assert PROJECT["tool"]["setuptools"]["package-dir"] == FOLDERS
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(there)


def test_the_version_is_semantic_and_in_the_changelog() -> None:
    version = PROJECT["project"]["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version) and version == graph_fsdp.__version__
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" and headings[1] == version


def test_what_is_public_is_typed() -> None:
    assert PROJECT["tool"]["mypy"]["strict"] is True
    assert (ROOT / "graph_fsdp" / "py.typed").exists()
