"""The harness of the XLA tests: four devices, results come back, and a process that dies is an error."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import launch
import pytest
import torch
from facts import check
from xla_launch import DEVICES, XlaFacts, run_xla

FACTS = XlaFacts(__name__)


def sum_over_devices() -> dict[str, object]:
    import torch_xla
    import torch_xla.runtime as xr

    value = torch.arange(3, dtype=torch.float32, device=torch_xla.device()) + 1
    torch_xla.sync()
    return {
        "devices": xr.global_runtime_device_count(),
        "value": value.cpu(),
        "client": os.environ["PJRT_DEVICE"],
        "command": Path("/proc/self/cmdline").read_text(),
        "flags": os.environ["XLA_FLAGS"],
    }


def one_device() -> int:
    import torch_xla.runtime as xr

    return xr.global_runtime_device_count()


def aborts() -> None:
    print("so long", flush=True)
    os.abort()


def hangs() -> None:
    print("here", flush=True)
    time.sleep(3600)


def raises() -> None:
    raise ValueError("no such luck")


@FACTS
def a_fact_that_holds() -> None:
    import torch_xla

    assert torch.ones(2, device=torch_xla.device()).sum().item() == 2


@FACTS
def a_fact_that_does_not() -> None:
    assert torch.ones(2).sum() == 3, "two is not three"


def test_a_process_has_four_devices_and_its_result_comes_back() -> None:
    result = run_xla(sum_over_devices)
    assert result["devices"] == DEVICES
    assert result["client"] == "CPU"
    assert torch.equal(result["value"], torch.tensor([1.0, 2.0, 3.0]))
    assert "preloaded.py" in result["command"], "a fork of a process that has imported torch_xla"
    assert "--xla_cpu_enable_fast_math=false" in result["flags"], "what importing torch_xla sets for XLA's client"


def test_the_environment_can_be_overridden() -> None:
    assert run_xla(one_device, env={"CPU_NUM_DEVICES": "1"}) == 1


def test_a_process_that_aborts_raises_or_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)died of signal 6 without a result.*so long"):
        run_xla(aborts)
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*ValueError: no such luck"):
        run_xla(raises)
    # The time is over once the process is there, however long a busy machine takes for that.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    over = lambda: any("here" in log.read_text() for log in tmp_path.glob("ranks-*/log0"))  # noqa: E731
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + (1000 if over() else 0))
    monkeypatch.setattr(launch, "time", clock)
    with pytest.raises(RuntimeError, match=r"(?s)no result of ranks .0. after 900 seconds.*here.*in hangs"):
        run_xla(hangs, timeout=900)


def test_facts_share_a_process_and_fail_alone() -> None:
    FACTS.on_devices()
    failures = FACTS.launch()
    check(failures, "a_fact_that_holds")
    with pytest.raises(pytest.fail.Exception, match="two is not three"):
        check(failures, "a_fact_that_does_not")
