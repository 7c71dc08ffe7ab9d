"""A replica group of torchft's is killed and comes back: the others go on, and no step is lost.

Two groups of two ranks, each with a process group and a store of its own, as under two torchruns; or under two.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from replica_groups import Training, check, group_of, lighthouse, needs_torchft, read, results, took_part, wait_for

pytestmark = [pytest.mark.long, needs_torchft]
STEPS, KILLED_AT, LEFT = 200, 60, 20
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # or restarted ranks find addresses of dead ones
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_replica_group_is_killed_and_comes_back(tmp_path: Path, asynchronous: bool) -> None:
    """Killed in the middle of a backward, between the means of two buckets."""
    with lighthouse() as address, contextlib.ExitStack() as running:
        options = {"folder": str(tmp_path), "lighthouse": address, "steps": STEPS, "asynchronous": asynchronous}
        staying = Training(**options, waits_at=KILLED_AT + LEFT)
        running.enter_context(group_of(0, tmp_path / "stays", staying))
        with group_of(1, tmp_path / "dies", Training(**options, dies_at=KILLED_AT)):
            wait_for(lambda: any(line["step"] == KILLED_AT + LEFT for line in read(tmp_path, 0)), tmp_path / "stays")
        rejoining = Training(**options, seed=1, rejoins=True)  # other values, until it has healed
        running.enter_context(group_of(1, tmp_path / "rejoins_", rejoining))
        parameters = results(tmp_path / "stays", tmp_path / "rejoins_")
    repeated = [line["step"] for line in read(tmp_path, 0) if not line["committed"]]
    assert repeated == [KILLED_AT], "that step is repeated, once"
    lines = took_part(tmp_path)
    alone = [step for step, groups in lines.items() if list(groups) == [0] and step >= KILLED_AT]
    assert alone == list(range(KILLED_AT, alone[-1] + 1)) and LEFT <= len(alone) < STEPS - KILLED_AT
    check(tmp_path, staying, parameters)


@contextlib.contextmanager
def torchrun(log: Path, address: str, replica: int) -> Iterator[int]:
    """The example's replica group, which torchrun restarts, and which goes on until the end of the block; torchrun's
    process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "examples/fault_tolerant_gpt.py", "--backend", "eager", "--steps", "1000000"]
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1", **OWN_STORE}
    with open(log, "w") as output:
        started = subprocess.Popen(
            [*command, "--replica", str(replica)], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield started.pid
    except BaseException:
        print(log.read_text()[-4000:])
        raise
    finally:
        started.terminate()
        started.wait()


def step_of(log: Path, participants: int, after: int = -1) -> int | None:
    """The first step after one that so many replicas took part in, by a group's log."""
    found = map(int, re.findall(rf"^step (\d+) loss [\d.]+ of {participants} replicas$", log.read_text(), re.MULTILINE))
    return next((step for step in found if step > after), None)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of ranks as Linux has them")
def test_the_example_goes_on_while_torchrun_restarts_a_group(tmp_path: Path) -> None:
    logs = [tmp_path / f"group{group}" for group in range(2)]
    with lighthouse() as address, torchrun(logs[0], address, 0), torchrun(logs[1], address, 1) as parent:
        wait_for(lambda: step_of(logs[1], 2) is not None)
        killed_at = step_of(logs[1], 2)
        assert killed_at is not None
        ranks = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        os.kill(max(ranks), signal.SIGKILL)
        wait_for(lambda: step_of(logs[0], 1, killed_at) is not None)
        alone = step_of(logs[0], 1, killed_at)
        assert alone is not None
        wait_for(lambda: step_of(logs[0], 2, alone) is not None)
        again = step_of(logs[0], 2, alone)
        assert again is not None
        wait_for(lambda: step_of(logs[1], 2, again - 1) is not None)
        assert step_of(logs[1], 2, again - 1) == again, "the group that is back takes part in the same step"
        assert logs[0].read_text().count("to be repeated") <= 1
