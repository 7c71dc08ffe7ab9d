"""docs/planning.md: its code runs and prints what stands there (``EXPECTTEST_ACCEPT=1`` writes it), its commands parse,
and its table is that of the published rows."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
import types
from pathlib import Path

import plan_published
import pytest
import torch

from graph_fsdp.cli import plan as plan_command

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "planning.md"
_EXAMPLE = re.compile(r"^```python\n(?P<code>.*?)^```\n```text\n(?P<printed>.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.long
def test_the_code_of_the_page_prints_what_stands_there() -> None:
    page = PAGE.read_text()
    module = types.ModuleType("planning_md")  # Dynamo imports a model's module by name
    sys.modules[module.__name__] = module

    def printed(example: re.Match[str]) -> str:
        torch._dynamo.reset()
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(example["code"], str(PAGE), "exec"), vars(module))
        return f"```python\n{example['code']}```\n```text\n{output.getvalue()}```"

    found, count = _EXAMPLE.subn(printed, page)
    del sys.modules[module.__name__]
    assert count == 5
    if os.environ.get("EXPECTTEST_ACCEPT"):
        PAGE.write_text(found)
    assert found == page or os.environ.get("EXPECTTEST_ACCEPT")


def test_the_commands_of_the_page_are_commands() -> None:
    parser = argparse.ArgumentParser()
    plan_command.add(parser)
    commands = re.findall(r"^graph-fsdp plan (.*)$", PAGE.read_text(), re.MULTILINE)
    for command in commands:
        model = parser.parse_args(shlex.split(command)).model
        assert model == "own.py:model_and_inputs" or (ROOT / model).is_file()
    assert len(commands) == 4


def test_published_rows_are_within_what_the_page_says() -> None:
    """Of the results that are kept: compiled rows within 15% in tokens per second, and in what is reserved."""
    if not plan_published.RESULTS.exists():
        assert f"<!-- results/{plan_published.RESULTS.name} -->\nNot measured yet." in PAGE.read_text()
        return
    result = json.loads(plan_published.RESULTS.read_text())
    rows = {(row["gpus"], row["backend"]): row for row in result["rows"]}
    assert list(rows) == [(gpus, backend) for gpus, backend, *_ in plan_published.ROWS]
    for (_, backend), row in rows.items():
        assert row["plan"]["hardware"] == "h100_500w"
        error = row["predicted"]["tokens_per_second"] / row["published"]["tokens_per_second"] - 1
        assert backend == "eager" or abs(error) < 0.15
        for figure in ("reserved_gib", "reserved_as_fsdp2_gib"):
            error = row["predicted"][figure] / row["published"]["reserved_gib"] - 1
            assert backend == "eager" or abs(error) < 0.15
            assert row["predicted"][figure] > row["predicted"]["live_gib"]


def test_a_published_row_is_planned_with_its_settings() -> None:
    made = plan_published.predict(8, "inductor", layers=2)
    assert made.tokens == 2 * 8192 and made.mesh_shape == (8,) and made.conditions.contention
    products = [n for n in made.backward.graph.nodes if n.target is torch.ops.aten.mm.default]  # type: ignore[union-attr]
    # Two for each of a block's seven and the head's, and three of each block that are computed again: wk, wo, w3.
    assert len(products) == 2 * (2 * 7 + 1) + 2 * 3
