"""On the virtual accelerator: a thread names the rank that is the reason that a collective does not end.

Two processes have a virtual device each. Their collectives run on its streams, compute as those of ranks that are
alike, and end, to the host, once both have started as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import struck
import torch
import torch.distributed as dist
from facts import Facts
from simulated_link import INSTANT, Message
from struck import rounds
from test_watch import TOGETHER, nobody_is_left_watching
from unwaited import Unwaited, UnwaitedWork
from virtual import library
from virtual.clocks import Moment
from virtual.group import VirtualGroup, VirtualWork
from virtual.machine import Machine

pytestmark = pytest.mark.skipif(library.COMPILER is None, reason="needs a C++ compiler")
FACTS = Facts(__name__)
BACKEND = "unwaited_virtual"


class SharedMachine(Machine):
    """``held``: what a stream has come to with a collective → the collective, which the other rank may not have
    started."""

    def __init__(self, hardware: str) -> None:
        super().__init__(hardware)
        self.held: list[tuple[Moment, UnwaitedWork]] = []

    def is_done(self, moment: Moment) -> bool:
        self.held = [(end, work) for end, work in self.held if not work.is_completed()]
        waits = any(all(moment.is_after(*one) for one in end.known.items()) for end, _ in self.held)
        return not waits and super().is_done(moment)


class SharedGroup(Unwaited, VirtualGroup):
    backend = BACKEND

    def launch(self, messages: Sequence[Message]) -> dist.Work | None:
        work = super().launch(messages)
        if isinstance(work, VirtualWork):
            assert isinstance(work.machine, SharedMachine)
            work.machine.held.append((work.end, self.started()))
        return work


def _create(options: Any, _: Any) -> SharedGroup:
    group = SharedGroup(options.group_rank, options.group_size, str(options.group_id), INSTANT)
    group.share(options.store)
    return group


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", library.NAME])


@FACTS
def ranks_of_the_virtual_device_are_watched() -> None:
    library.install()
    for function in rounds(*TOGETHER, backend=BACKEND):
        with SharedMachine("h100"):
            struck.DEVICE = torch.device(library.NAME, 0)
            function()
    nobody_is_left_watching()


# No forks, in which autograd has run before torch knew of the device.
test_on_two_ranks = FACTS.on(2, timeout=240.0, env={"GRAPH_FSDP_TESTS_DEVICE": library.NAME})
