"""What TORCH_LOGS and TORCH_TRACE show of the passes. In a process of its own: torch reads both when imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import MLP

import graph_fsdp

PROGRAM = """
import torch
from models import MLP
import graph_fsdp
model = graph_fsdp.compile(MLP(), backend="eager")
model(torch.ones(4, 16)).sum().backward()
print(graph_fsdp.inspect(model).backward.stages["bucket"].code, end="")
"""


def run(before: str = "", **environment: str) -> tuple[str, str]:
    """What the program printed, after ``before`` in the same process, and what was logged."""
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), **environment}
    for name in ("TORCH_LOGS", "TORCH_TRACE"):
        if name not in environment:
            variables.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", before + PROGRAM], env=variables, capture_output=True, text=True, timeout=600, check=True
    )
    return done.stdout, done.stderr


def check_logged(code: str, logged: str, *, graphs: bool) -> None:
    assert "backward graph after pass 'bucket'" in logged and "forward graph after pass 'free'" in logged
    body = code.splitlines()[-3:]
    assert all((line in logged) == graphs for line in body)


def test_a_script_that_logs_everything_of_its_own_sees_stages_only_where_it_asks() -> None:
    everything = "import logging, sys; logging.basicConfig(level=logging.DEBUG); logging.debug('begun')\n"
    asks = "print('it asks', file=sys.stderr)\nlogging.getLogger('graph_fsdp').setLevel(logging.INFO)\n"
    code, logged = run(everything + PROGRAM + asks)
    before, after = logged.split("it asks\n")
    assert "begun" in before and "graph_fsdp" not in before
    check_logged(code, after, graphs=False)


@pytest.mark.long
def test_torch_logs_without_graphs() -> None:
    check_logged(*run(TORCH_LOGS="graph_fsdp"), graphs=False)


def test_torch_logs_and_torch_trace(tmp_path: Path) -> None:
    code, logged = run(TORCH_LOGS="+graph_fsdp", TORCH_TRACE=str(tmp_path))
    check_logged(code, logged, graphs=True)
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    names = []
    for line in text.splitlines():
        if '"artifact"' in line and line.startswith("V"):
            record = json.loads(line[line.index("{") :])
            if record["artifact"]["name"].startswith("graph_fsdp_"):
                names.append(record["artifact"]["name"])
                assert record["frame_id"] == 0  # of the compilation that it belongs to
    assert names[:3] == [
        "graph_fsdp_capture_causal_attention",
        "graph_fsdp_capture_insert_gathers",
        "graph_fsdp_joint_annotate",
    ]
    assert "graph_fsdp_backward_bucket" in names and "graph_fsdp_forward_free" in names
    assert "".join(f"\t{line}\n" for line in code.splitlines()) in text


@pytest.mark.skipif("TORCH_LOGS" in os.environ, reason="it is asked for")
def test_nothing_is_logged_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    model = graph_fsdp.compile(MLP(depth=1), backend="eager")
    model(torch.ones(4, 16))
    assert "graph after pass" not in "".join(capfd.readouterr())
