"""A replica group of torchft's is killed and comes back: the others go on, and no step is lost.

Two groups of two ranks, each with a process group and a store of its own, as under two torchruns.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="torchft is not installed (the extra torchft)")

from replica_groups import Training, check, group_of, lighthouse, read, results, took_part, wait_for

pytestmark = pytest.mark.long
STEPS, KILLED_AT, ALONE = 200, 60, 20


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_replica_group_is_killed_and_comes_back(tmp_path: Path, asynchronous: bool) -> None:
    """Killed in the middle of a backward, between the means of two buckets."""
    with lighthouse() as address, contextlib.ExitStack() as running:
        options = {"folder": str(tmp_path), "lighthouse": address, "steps": STEPS, "asynchronous": asynchronous}
        staying = Training(**options, waits_at=KILLED_AT + ALONE)
        running.enter_context(group_of(0, tmp_path / "stays", staying))
        with group_of(1, tmp_path / "dies", Training(**options, dies_at=KILLED_AT)):
            wait_for(lambda: any(line["step"] == KILLED_AT + ALONE for line in read(tmp_path, 0)))
        rejoining = Training(**options, seed=1, rejoins=True)  # other values, until it has healed
        running.enter_context(group_of(1, tmp_path / "rejoins_", rejoining))
        parameters = results(tmp_path / "stays", tmp_path / "rejoins_")
    repeated = [line["step"] for line in read(tmp_path, 0) if not line["committed"]]
    assert repeated == [KILLED_AT], "that step is repeated, once"
    lines = took_part(tmp_path)
    alone = [step for step, groups in lines.items() if list(groups) == [0] and step >= KILLED_AT]
    assert alone == list(range(KILLED_AT, alone[-1] + 1)) and ALONE <= len(alone) < STEPS - KILLED_AT
    check(tmp_path, staying, parameters)
