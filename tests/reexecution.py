"""CUDA graphs without CUDA: what is captured is executed again, on the addresses of the capture.

``cpu_graphs()`` lets ``cuda_graphs=True`` run on the CPU. A captured function reads whatever lies at the addresses of
its inputs and writes to where its results first lay. Before that it destroys all memory of its pool that was free when
it was captured, as kernels with temporary values there would. So a run that should not have been replayed has wrong
numbers here, too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.runtime.cuda.capture import CAPTURES
from graph_fsdp.runtime.regions.regions import Compiled

CPU = torch.device("cpu")
_GARBAGE = 0xFF  # not a number, in every floating-point type


class Block:
    """A piece of a pool. ``user``: the storage that lies in it."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self.user: Callable[[], Any] = lambda: None

    @property
    def is_free(self) -> bool:
        return self.user() is None

    def take(self, nbytes: int) -> torch.UntypedStorage:
        storage = compat.storage_at(self.memory.data_ptr(), nbytes, CPU)
        self.user = weakref.ref(storage)
        return storage


class Pool:
    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def take(self, nbytes: int) -> torch.UntypedStorage:
        block = next((b for b in self.blocks if b.is_free and b.memory.nbytes >= nbytes), None)
        if block is None:
            self.blocks.append(block := Block(nbytes))
        return block.take(nbytes)


class Reexecution:
    """A ``Capture`` for the CPU. ``captures`` and ``replays`` count over all of them."""

    captures = 0
    replays = 0

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def pool(self) -> Pool:
        return Pool()

    def capture(self, function: Compiled, inputs: list[Any], pool: Pool) -> tuple[Callable[[], None], Sequence[Any]]:
        Reexecution.captures += 1
        free = [block for block in pool.blocks if block.is_free]
        inputs = list(inputs)
        copies = [value.clone() for value in inputs]  # a capture computes nothing
        sources = {copy.untyped_storage().data_ptr(): value for copy, value in zip(copies, inputs, strict=True)}
        storages: dict[int, torch.UntypedStorage] = {}
        outputs: list[Any] = []
        for value in function(list(copies)):
            if isinstance(value, Tensor) and value.numel():
                address = value.untyped_storage().data_ptr()
                if address in sources:
                    storage = sources[address].untyped_storage()
                else:
                    if address not in storages:
                        storages[address] = pool.take(value.untyped_storage().nbytes())
                        _bytes(storages[address]).fill_(_GARBAGE)
                    storage = storages[address]
                outputs.append(_on(storage, value))
            else:
                outputs.append(value)
        read = [_elsewhere(value) for value in inputs]
        written = [_elsewhere(value) if isinstance(value, Tensor) else value for value in outputs]

        def replay(keep_alive: Pool = pool) -> None:
            Reexecution.replays += 1
            for block in free:
                if not any(value.data_ptr() == block.memory.data_ptr() for value in read):
                    block.memory.fill_(_GARBAGE)
            for target, value in zip(written, function(list(read)), strict=True):
                if isinstance(value, Tensor) and value.numel():
                    target.copy_(value)

        return replay, outputs


def _on(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    return torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.shape, like.stride())


def _elsewhere(value: Tensor) -> Tensor:
    """A tensor at the same address that keeps nothing alive."""
    own = value.untyped_storage()
    return _on(compat.storage_at(own.data_ptr(), own.nbytes(), CPU), value)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


@contextlib.contextmanager
def cpu_graphs() -> Iterator[None]:
    Reexecution.captures = Reexecution.replays = 0
    with mock.patch.dict(CAPTURES, {"cpu": Reexecution}):
        yield
