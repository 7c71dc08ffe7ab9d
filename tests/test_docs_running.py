"""What docs/running.md says: its tables are complete, its messages are those of the source. Its code is run by
test_docs_pages.py."""

from __future__ import annotations

import json
import re

import pytest
from messages import ROOT, texts

import graph_fsdp
from graph_fsdp.monitoring.record import METRICS, STRAGGLES

PAGE = (ROOT / "docs" / "running.md").read_text()
MESSAGES = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


def first_column(header: str) -> list[str]:
    table = PAGE.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_each_number_of_a_record_is_explained() -> None:
    assert first_column("number") == [name for name in METRICS if name != "steps"]
    assert f"above {STRAGGLES:g} and always the same" in PAGE


def test_each_error_is_explained() -> None:
    errors = [name for name in graph_fsdp.__all__ if name.endswith(("Error", "Failure", "Disagreement"))]
    assert sorted(first_column("error")) == sorted(errors)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_source(message: str) -> None:
    assert any(message.removesuffix(" …") in " ".join(text.split()) for text in texts())


def test_what_a_monitor_costs_is_what_was_measured() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "monitor_overhead.json").read_text())
    said = PAGE.split("<!-- monitor_overhead -->\n")[1].split("\n\n", 1)[0]
    for rank, measured in enumerate(found["ranks"]):
        figures = f"{measured['microseconds']:.0f} µs of a step of {measured['step milliseconds']:.0f} ms"
        assert f"{figures} on rank {rank} ({measured['share']:.2%})" in " ".join(said.split())
        assert measured["share"] < 0.005, "what a monitor may cost"
