"""A process group of real ranks whose collectives the host does not wait for, as those of a GPU: backend "unwaited".

A collective fills its output at once, with what it would be if all ranks sent what this one sends. It ends once all
ranks have started as many, which a thread finds out, as a device would; ``synchronize`` waits for that.
"""

from __future__ import annotations

import atexit
import queue
import threading
from typing import Any

import torch.distributed as dist
from named_group import NamedGroup
from torch import Tensor

BACKEND = "unwaited"


class UnwaitedWork(dist.Work):
    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class Unwaited:
    """Of a process group: its collectives end on a thread, once all ranks have started as many."""

    def share(self, store: dist.Store) -> None:
        self._store = store.clone()  # type: ignore[attr-defined]
        self._under_way: queue.SimpleQueue[UnwaitedWork] = queue.SimpleQueue()
        self._last = UnwaitedWork()
        self._last.ended.set()
        self.aborted = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def abort(self) -> None:
        self.aborted.set()

    shutdown = abort

    def _end(self) -> None:
        """The thread must not run into the end of the interpreter."""
        self.aborted.set()
        self._under_way.put(UnwaitedWork())
        self._thread.join(10.0)

    def _run(self) -> None:
        number, size = 0, self.size()  # type: ignore[attr-defined]
        while not self.aborted.is_set():
            work, number = self._under_way.get(), number + 1
            if self.aborted.is_set():
                return
            self._store.add(f"collective {number}", 1)
            while self._store.add(f"collective {number}", 0) < size:
                if self.aborted.wait(0.01):
                    return
            work.ended.set()

    def started(self) -> UnwaitedWork:
        self._last = UnwaitedWork()
        self._under_way.put(self._last)
        return self._last

    def synchronize(self) -> None:
        while not self._last.ended.wait(0.01):
            if self.aborted.is_set():
                raise RuntimeError("the collectives of the device were aborted")


class UnwaitedGroup(Unwaited, NamedGroup):
    backend = BACKEND

    def __init__(self, store: dist.Store, rank: int, world_size: int, name: str) -> None:
        super().__init__(rank, world_size, name)
        self.share(store)

    # Collectives, under the names of c10d. torch 2.13 renamed some of them.

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        output.view(self.size(), -1).copy_(input.view(1, -1))
        return self.started()

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        output.view(-1).copy_(input.view(self.size(), -1)[self.rank()])
        return self.started()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.started()

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.started()

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


def synchronize() -> None:
    """Wait, as ``torch.cuda.synchronize``, until the collectives of the default group have ended. Raises RuntimeError
    where they were aborted."""
    world: Any = dist.group.WORLD
    world.synchronize()


def _create(options: Any, _: Any) -> UnwaitedGroup:
    return UnwaitedGroup(options.store, options.group_rank, options.group_size, str(options.group_id))


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
