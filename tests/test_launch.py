"""The harness of the multi-process tests: results come back, errors are named, and nothing is left behind."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launch
import pytest
import torch
import torch.distributed as dist
from conftest import shuffle
from facts import Facts, check_all
from launch import run_ranks
from torch._dynamo.utils import compilation_time_metrics, counters

import graph_fsdp
from graph_fsdp.report.report import engine_of


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files of its own, to see what is left in it."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet reaped by its parent does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text() if sys.platform == "linux" else os.kill(pid, 0) or ""
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[:1] != ["Z"]


def pids(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def wait_until_dead(folder: Path) -> None:
    """A killed process is gone a moment after the kill; a leaked one never is, and the test times out."""
    assert pids(folder)
    while any(alive(pid) for pid in pids(folder)):
        time.sleep(0.01)


# Functions that the ranks call


def reduced(tensor: torch.Tensor, scale: int) -> dict[str, object]:
    total = tensor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID")
    return {
        "rank": dist.get_rank(),
        "sum": total * scale,
        "env": {name: os.environ.get(name) for name in names},
    }


def command() -> str:
    return Path("/proc/self/cmdline").read_text()


def knowledge() -> dict[str, object]:
    """What a fresh process has, and one that has compiled a model does not."""
    seed = torch.initial_seed()
    return {
        "threads": threading.active_count(),  # the watch of the parent is one
        "drawn": not torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(seed))),
        "compiled": [name for name, times in compilation_time_metrics.items() if times],
        "counted": [name for name, counts in counters.items() if counts],
        "group": dist.is_initialized(),
        "models": engine_of(graph_fsdp.compile(torch.nn.Linear(2, 2), backend="eager")).number,
    }


def fails_on_rank_1(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    # A child that would survive its parent, as a pool of compile workers might.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    (Path(folder) / str(child.pid)).touch()
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("no such luck")
    dist.barrier()  # never answered


def hangs_on_rank_0(folder: str) -> None:
    print(f"rank {dist.get_rank()} is here", flush=True)
    (Path(folder) / str(os.getpid())).touch()
    dist.barrier()
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)


FACTS = Facts(__name__)


@FACTS
def fails_on_rank_1_where_rank_0_waits_for_it() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause of the timeout")
    dist.barrier()


def hangs_alone(folder: str) -> None:
    for pid in (os.getpid(), os.getppid()):
        (Path(folder) / str(pid)).touch()
    time.sleep(3600)


def leaves_a_child_behind(folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    (Path(folder) / str(child.pid)).touch()


def exits_early(code: int) -> None:
    print("so long", flush=True)
    os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)


def not_connected(folder: str, before: int) -> int:
    """Fails until there have been ``before`` launches."""
    launches = len(list(Path(folder).iterdir()))
    (Path(folder) / str(launches)).touch()
    if launches < before:
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:144] Connection closed by peer")
    return launches


def dies_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def group_state() -> tuple[bool, str]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    return before, dist.get_backend()


def rank_finishes_before_others() -> float:
    if dist.get_rank() == 0:
        time.sleep(0.5)
    value = torch.ones(1)
    if dist.get_rank() < 2:
        dist.all_reduce(value, group=dist.new_group([0, 1], use_local_synchronization=True))
    return value.item()


# The tests


def test_results_come_back_in_the_order_of_ranks(scratch: Path) -> None:
    results = run_ranks(reduced, 3, torch.tensor([1.0, 2.0]), 10, env={"TORCHELASTIC_RUN_ID": "x"})
    assert [result["rank"] for result in results] == [0, 1, 2]
    for rank, result in enumerate(results):
        assert torch.equal(result["sum"], torch.tensor([60.0, 120.0]))
        assert result["env"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RUN_ID": "x",
        }
    assert list(scratch.iterdir()) == []


def test_without_a_backend_the_function_makes_the_group() -> None:
    assert run_ranks(group_state, 2, backend=None) == [(False, "gloo")] * 2


def test_a_rank_that_gloo_cannot_connect_is_started_once_more_and_not_twice(tmp_path: Path) -> None:
    assert run_ranks(not_connected, 1, str(tmp_path), 1, backend=None) == [1]
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        run_ranks(not_connected, 1, str(tmp_path), 4, backend=None)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_rank_that_has_finished_stays_until_all_have() -> None:
    assert run_ranks(rank_finishes_before_others, 3) == [2.0, 2.0, 1.0]


def test_an_exception_on_one_rank_is_raised_and_everything_is_killed(scratch: Path, tmp_path: Path) -> None:
    started = tmp_path / "pids"
    started.mkdir()
    with pytest.raises(RuntimeError) as caught:
        run_ranks(fails_on_rank_1, 2, str(started))
    message = str(caught.value)
    assert message.startswith("rank 1 raised:\nTraceback")
    assert 'raise ValueError("no such luck")' in message
    assert "rank 0" not in message
    assert len(pids(started)) == 4
    wait_until_dead(started)
    assert list(scratch.iterdir()) == []


@pytest.fixture
def timeout_after_rank_1(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """A timeout in seconds that is over once rank 1 has its result, before a look at results, however long a machine
    takes for it."""
    later = 0

    def sleep(seconds: float) -> None:
        nonlocal later
        time.sleep(seconds)
        if list(scratch.glob("ranks-*/result1.pt")):
            later = 1000

    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: time.monotonic() + later))
    return 900.0


def test_a_timeout_kills_everything_and_shows_where_each_rank_was(
    scratch: Path, tmp_path: Path, timeout_after_rank_1: float
) -> None:
    started = tmp_path / "pids"
    started.mkdir()
    with pytest.raises(RuntimeError) as caught:
        run_ranks(hangs_on_rank_0, 2, str(started), timeout=timeout_after_rank_1)
    message = str(caught.value)
    assert message.startswith("no result of ranks [0] after 900 seconds")
    assert "rank 0 is here" in message and "rank 1 is here" in message
    assert "in hangs_on_rank_0" in message
    assert len(pids(started)) == 2
    wait_until_dead(started)
    assert list(scratch.iterdir()) == []


def test_a_timeout_shows_a_failure_on_another_rank_that_caused_it(timeout_after_rank_1: float) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)no result of ranks .0. .*ValueError: the cause of the timeout"):
        run_ranks(check_all, 2, __name__, timeout=timeout_after_rank_1)


@pytest.mark.parametrize(("code", "message"), [(3, "exited with code 3"), (-signal.SIGKILL, "died of signal 9")])
def test_a_rank_that_dies_is_an_error(code: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)rank 0 {message} without a result.*so long"):
        run_ranks(exits_early, 1, code, backend=None)


def test_a_death_stands_before_the_errors_that_it_causes_on_other_ranks() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1 died of signal 9 without a result.*rank 0 raised:\nTraceback"):
        run_ranks(dies_on_rank_1, 2)


def test_children_of_a_rank_that_succeeds_are_killed_too(tmp_path: Path) -> None:
    run_ranks(leaves_a_child_behind, 1, str(tmp_path), backend=None)
    assert len(pids(tmp_path)) == 1
    wait_until_dead(tmp_path)


@pytest.mark.long
def test_ranks_do_not_outlive_a_parent_that_is_killed(tmp_path: Path, scratch: Path) -> None:
    started = tmp_path / "pids"
    started.mkdir()
    code = f"import launch, test_launch; launch.run_ranks(test_launch.hangs_on_rank_0, 2, {str(started)!r})"
    # A killed process cannot remove its files: they go with the test's own.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment)
    try:
        while len(pids(started)) < 2:
            assert parent.poll() is None
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    wait_until_dead(started)


# What a test starts and does not end: a child in a session of its own that is stopped, and a rank that hangs.
INTERRUPTED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from launch import run_ranks
from test_launch import hangs_alone

def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    os.kill(child.pid, signal.SIGSTOP)
    for pid in (os.getpid(), child.pid):
        (Path(os.environ["STARTED"]) / str(pid)).touch()
    run_ranks(hangs_alone, 1, os.environ["STARTED"], backend=None, timeout=3600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is no guard")
def test_nothing_outlives_an_interrupted_pytest(tmp_path: Path) -> None:
    started, temporary, suite = (tmp_path / name for name in ("pids", "temporary", "suite"))
    for folder in (started, temporary, suite):
        folder.mkdir()
    here = Path(__file__).parent
    (suite / "conftest.py").write_text((here / "conftest.py").read_text())
    (suite / "test_interrupted.py").write_text(INTERRUPTED)
    environment = {**os.environ, "STARTED": str(started), "TMPDIR": str(temporary), "PYTHONPATH": str(here)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "--rootdir", suite, suite]
    run = subprocess.Popen(command, cwd=suite, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    expected = 4 if launch.preloaded_of(0).forks else 3  # the worker, its child, the rank and what forked it
    try:
        while len(pids(started)) < expected:
            assert run.poll() is None
            time.sleep(0.05)
    finally:
        run.terminate()
        run.wait()
    wait_until_dead(started)
    ours = [path.name for path in temporary.iterdir() if not path.name.startswith("tmp")]  # which are torch 2.9's
    assert [name.partition("-of-")[0] for name in ours] == ["pytest"], "all is in pytest's folder"


def test_a_random_order_keeps_files_together_and_is_that_of_its_seed() -> None:
    def shuffled(seed: int) -> list[tuple[str, int]]:
        items: list[Any] = [SimpleNamespace(path=name, test=test) for name in "abcd" for test in range(5)]
        shuffle(items, seed)
        return [(item.path, item.test) for item in items]

    first, again, other = shuffled(7), shuffled(7), shuffled(8)
    assert first == again != other and sorted(first) == sorted(other) != first
    assert len(list(groupby(first, lambda item: item[0]))) == 4


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(ValueError, match="top of a module"):
        run_ranks(lambda: None, 1)


def test_the_fake_group_has_eight_ranks(fake_group: dist.ProcessGroup) -> None:
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 8, "fake")
    dist.all_reduce(torch.ones(1))


def test_a_rank_knows_no_more_than_a_fresh_process() -> None:
    code = "import json, test_launch; print(json.dumps(test_launch.knowledge()))"
    tests = {"cwd": Path(__file__).parent, "env": {**os.environ, "PYTHONPATH": ""}}
    fresh = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True, **tests))
    assert run_ranks(knowledge, 2, backend=None) == [{**fresh, "threads": fresh["threads"] + 1}] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")
def test_without_forks_a_rank_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    starts_a_thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    (scratch / "sitecustomize.py").write_text(starts_a_thread)  # as imports of some builds of torch do
    monkeypatch.setenv("PYTHONPATH", f"{scratch}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(launch, "preloaded_of", functools.cache(launch.preloaded_of.__wrapped__))
    [line] = run_ranks(command, 1)
    assert "launch.py" in line


@pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")
def test_ranks_are_forks_though_libraries_set_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - launch.preloaded_of(0).environment.keys():
        monkeypatch.delenv(name)
    for name in launch.SET_BY_LIBRARIES:
        monkeypatch.setenv(name, "1")
    if torch.accelerator.is_available() and not launch.preloaded_of(0).forks:
        pytest.skip("imports start threads for a device, which forks would lack")
    assert all("preloaded.py" in line for line in run_ranks(command, 2))
