"""Programs have frames as large as graphs, and Python's stack has room for what they call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MLP

import graph_fsdp
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime.executor import Program, with_room_for_calls

CALLS = 500


def program() -> Any:
    """As programs are: many variables, and calls one after the other."""
    lines = [
        "def run(called):",
        *(f"    a{i} = 0" for i in range(300)),
        f"    for _ in range({CALLS}):",
        "        called()",
    ]
    namespace: dict[str, Any] = {}
    exec("\n".join(lines), namespace)
    return namespace["run"]


def called() -> int:
    return min(range(1, 3), key=lambda value: value)


def page_faults(depth: int, call: Callable[[], Any]) -> int:
    import resource

    if depth:
        return page_faults(depth - 1, call)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.version_info < (3, 11) or sys.platform != "linux", reason="frames lie elsewhere")
def test_at_no_depth_do_calls_of_a_program_map_memory() -> None:
    as_it_is, with_room = program(), with_room_for_calls(program())
    assert max(page_faults(depth, lambda: as_it_is(called)) for depth in range(150)) >= CALLS
    assert max(page_faults(depth, lambda: with_room(called)) for depth in range(150)) < CALLS // 2


@pytest.mark.usefixtures("fake_group")
def test_programs_have_room() -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    model(torch.ones(4, 16)).sum().backward()
    programs = engine_of(model).programs
    for made in programs.values():
        assert isinstance(made, Program) and made.ordinary.__code__.co_stacksize > 2**11
    assert {phase for _, phase in programs} == {"forward", "backward"}
