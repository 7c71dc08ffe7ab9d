"""``graph_fsdp.monitor`` on the virtual device: events are read once the device has passed them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from both_devices import on_virtual, ours
from models import MLP
from virtual.machine import Machine

import graph_fsdp
from graph_fsdp import MonitorRecord
from graph_fsdp.runtime.observe import Clock


def a_monitor_waits_for_the_device_nowhere() -> None:
    seconds_between = Clock.seconds_between

    def without_waiting(self: Clock, begin: Any, end: Any) -> float:
        assert self.is_past(begin) and self.is_past(end)
        return seconds_between(self, begin, end)

    def run(device: str) -> list[MonitorRecord | None]:
        model: Any = ours(MLP(depth=3).to(device))
        optimizer = torch.optim.AdamW(model.parameters())
        records: list[MonitorRecord | None] = []
        with graph_fsdp.monitor(model, every=1, line=False) as watch:
            for _ in range(4):
                model(torch.ones(4, 16, device=device)).sum().backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                records.append(watch.last)
                torch.accelerator.synchronize()  # the program, for its loss
        return [*records, watch.last]

    with mock.patch.object(Clock, "seconds_between", without_waiting):
        records = on_virtual(Machine("h100"), run)
    assert [record and record.step for record in records] == [None, 1, 2, 3, 4]
    last = records[-1]
    assert last is not None and last.exposed_seconds is not None and last.step_seconds is not None
    assert 0 < last.exposed_seconds < last.step_seconds and last.predicted_exposed_seconds is not None
    assert last.gradient_norm is not None and last.gradient_norm > 0


FOUND = (a_monitor_waits_for_the_device_nowhere,)
