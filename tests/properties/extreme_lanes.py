"""The two ends of the time in which a device may run a collective: all of it when it is started, or when it is waited
for. What a program computes is the same on both, bit for bit, unless it reads a result before it has waited for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from simulated_link import Message, fill
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class _Started(dist.Work):
    """What a lane's start returns. ``end`` is called at the first wait."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end: Callable[[], None] | None = end

    def wait(self, timeout: Any = None) -> bool:
        end, self._end = self._end, None
        if end is not None:
            end()
        return True

    def is_completed(self) -> bool:
        return self._end is None


class EarlyLane:
    """Results are there as soon as a collective is started."""

    def start(self, seconds: float, messages: Sequence[Message], timed: bool) -> tuple[dist.Work, Callable[[], float]]:
        fill(messages)
        return _Started(lambda: None), lambda: 0.0

    def close(self) -> None:
        pass


class LateLane:
    """Results are there when they were waited for, and NaN (-1 in integers) before. The wait of a collective whose
    inputs were written since its start, or of which memory was given back, is an error."""

    keeps_inputs = False

    def start(self, seconds: float, messages: Sequence[Message], timed: bool) -> tuple[dist.Work, Callable[[], float]]:
        ends = [_delayed(message) for message in messages]
        kept = [message.inputs for message in messages if self.keeps_inputs]
        return _Started(lambda: [end() for end in ends] and kept.clear()), lambda: 0.0

    def close(self) -> None:
        pass


class KeepingLateLane(LateLane):
    """It keeps inputs alive until the wait, as torch's process groups do; its ``DTensor.full_tensor`` needs that."""

    keeps_inputs = True


def _delayed(message: Message) -> Callable[[], None]:
    """Poisons the outputs, and returns what writes them. It keeps none of the tensors: the program has to."""
    kind = message.kind
    with torch.inference_mode():
        sent = [(_Place(tensor), tensor.clone()) for tensor in message.inputs]
        fill([message])
        received = [(_Place(tensor), tensor.clone()) for tensor in message.outputs]
        for tensor in message.outputs:
            tensor.view(torch.uint8).fill_(0xFF) if tensor.dim() else tensor.fill_(-1)
        for tensor, (_, value) in zip(message.inputs, sent, strict=True):  # which may be a part of the output
            tensor.copy_(value)

    def end() -> None:
        with torch.inference_mode():
            for place, value in sent:
                if not torch.equal(bits(place.tensor(f"an input of {kind}")), bits(value)):
                    raise AssertionError(f"an input of {kind} was written between its start and its wait")
            for place, value in received:
                place.tensor(f"an output of {kind}").copy_(value)

    return end


def bits(value: Tensor) -> Tensor:
    """NaN is equal to itself here."""
    return value.reshape(-1).view(torch.uint8)


class _Place:
    """Where a tensor lies, without keeping the memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.memory = StorageWeakRef(tensor.untyped_storage())
        self.nbytes = tensor.untyped_storage().nbytes()
        self.like = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self, name: str) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None or storage.nbytes() < self.nbytes:
            raise AssertionError(f"the memory of {name} was given back before its wait")
        dtype, *place = self.like
        return torch.empty(0, dtype=dtype).set_(storage, *place)
