"""The table of docs/compatibility.md, and what newer torch needs of us."""

from __future__ import annotations

import inspect
from pathlib import Path
from xml.etree import ElementTree

import compatibility
import torch
from torch import nn

import graph_fsdp

TESTS = Path(__file__).parent


def test_dynamo_does_not_take_a_unit_for_one_of_fsdp1() -> None:
    """As torch 2.15 looks: without calling what it finds."""
    model = graph_fsdp.compile(nn.Linear(4, 2), backend="eager")
    model(torch.ones(1, 4))
    assert not inspect.getattr_static(model, "_is_fsdp_managed_module", False)
    assert model._is_fsdp_managed_module in (True, False)


def test_the_tests_of_the_matrix_are_there() -> None:
    assert all((TESTS / name).is_file() for name in compatibility.TESTS)


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
    rows = compatibility.table({"rows": [{"torch": "2.13.0", "python": "3.11.7", **counted}, missing]}).rows
    assert rows == [
        ["2.13.0", "3.11.7", "1", "1", "2: a::fails, a::cannot_begin"],
        ["2.11.0", "3.12", "not run: no interpreter", "", ""],
    ]
