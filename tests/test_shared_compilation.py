"""Processes divide compilations between them: each task is one process's, and ranks share Inductor's cache."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from models import MLP
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import graph_fsdp
from graph_fsdp.runtime.backends.inductor import divide

# Tasks of processes

HOLDER = """
import sys, time
from pathlib import Path
from graph_fsdp.runtime.backends.inductor import divide

def hold():
    print("holding", flush=True)
    time.sleep(600)

divide([("held", hold)], Path(sys.argv[1]))
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has begun the task ``held`` and does not end it."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "holding\n"
        try:
            yield process
        finally:
            process.kill()


def test_what_another_process_has_begun_comes_last_and_patience_has_an_end(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    assert divide([("held", lambda: 1), ("free", lambda: 2)], tmp_path, patience=0.1) == [1, 2]
    assert holder.poll() is None
    done: list[str] = []

    def run(name: str) -> str:
        done.append(name)
        if len(done) == 2:
            holder.kill()  # which gives up its task
            holder.wait()
        return name

    tasks = [(name, partial(run, name)) for name in ("held", "first", "second")]
    assert divide(tasks, tmp_path) == ["held", "first", "second"]
    assert done == ["first", "second", "held"]


def test_tasks_run_without_locks_where_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert divide([("task", lambda: 1), ("task", lambda: 2)], tmp_path / "file") == [1, 2]


def test_a_task_that_raises_holds_nothing(tmp_path: Path) -> None:
    def fail() -> int:
        raise ValueError("no compiler")

    with pytest.raises(ValueError, match="no compiler"):
        divide([("task", fail)], tmp_path)
    assert divide([("task", lambda: 1)], tmp_path, patience=0.0) == [1]


# With Inductor, on ranks that share a cache


def compilations(**options: Any) -> tuple[Counter[str], float]:
    """On a rank: what Inductor's cache counted in a step of a model, and the norm of its gradients. Kernels without
    vectors and precompiled headers, which an empty folder is long without."""
    torch.manual_seed(0)
    model = MLP(depth=1)
    graph_fsdp.compile(model, auto_wrap_policy={nn.Linear}, **options)
    counters["inductor"].clear()
    with inductor_config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        output = model(torch.ones(2, 16))
        output.square().mean().backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(norm, DTensor)
    prefix = "fxgraph_cache_"
    counted = {key.removeprefix(prefix): n for key, n in counters["inductor"].items() if key.startswith(prefix)}
    return Counter(counted), float(norm.full_tensor())


def compilations_of_regions_and_whole() -> tuple[tuple[Counter[str], float], tuple[Counter[str], float]]:
    """On a rank."""
    return compilations(), compilations(regions="whole")


def test_ranks_compile_each_region_once_between_them_and_a_second_run_none(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    (cut, whole), (cut_there, whole_there) = run_ranks(compilations_of_regions_and_whole, 2, env=env)
    (first, norm), (second, _) = cut, cut_there
    assert whole[0] + whole_there[0] == {"hit": 2, "miss": 2}, "forward and backward, each by one of them"
    assert whole[1] == pytest.approx(norm, rel=1e-5)
    regions = first.total()
    assert regions > 2 and second.total() == regions
    assert first["miss"] + second["miss"] == regions and first["hit"] == second["miss"], "each by one of them"
    assert first["miss"] and second["miss"], "both had a part"
    kernels = sorted(tmp_path.rglob("*.so"))
    for counted, again in run_ranks(compilations, 2, env=env):
        assert counted == {"hit": regions} and again == norm
    assert kernels and sorted(tmp_path.rglob("*.so")) == kernels


def compilations_without_a_cache() -> tuple[Counter[str], float]:
    """On a rank."""
    with inductor_config.patch(fx_graph_cache=False):
        return compilations()


@pytest.mark.long
def test_without_a_cache_each_rank_compiles_for_itself(tmp_path: Path) -> None:
    for counted, norm in run_ranks(compilations_without_a_cache, 2, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}):
        assert norm > 0 and "hit" not in counted and "miss" not in counted
    assert not (tmp_path / "graph_fsdp").exists()
