"""``torch.virtual``: what ``torch.cuda`` is to CUDA, as far as programs ask it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from virtual.machine import Machine


def module() -> ModuleType:
    made: Any = ModuleType("torch.virtual", __doc__)
    for name, value in vars(_Functions).items():
        if isinstance(value, staticmethod):
            setattr(made, name, value.__func__)
    made.Stream, made.Event = torch.Stream, torch.Event
    assert isinstance(made, ModuleType)
    return made


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Functions:
    @staticmethod
    def is_available() -> bool:
        return Machine.current is not None

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _lazy_init() -> None:
        pass

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None:
        pass

    @staticmethod
    def device(device: Any) -> Any:
        return _nothing()

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "" if Machine.current is None else f"virtual {Machine.current.hardware.name.upper()}"

    @staticmethod
    def get_device_properties(device: Any = None) -> Any:
        memory = 0 if Machine.current is None else Machine.current.hardware.memory
        return SimpleNamespace(name=_Functions.get_device_name(), total_memory=memory)

    # streams

    @staticmethod
    def stream(stream: torch.Stream | None) -> Any:
        return _nothing() if stream is None else stream

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @staticmethod
    def set_stream(stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    # memory

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return torch.accelerator.memory_allocated(device)

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        return torch.accelerator.max_memory_allocated(device)

    @staticmethod
    def memory_reserved(device: Any = None) -> int:
        return torch.accelerator.memory_reserved(device)

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        torch.accelerator.reset_peak_memory_stats(device)

    @staticmethod
    def empty_cache() -> None:
        pass

    # random numbers: the CPU's

    @staticmethod
    def manual_seed(seed: int) -> None:
        pass

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
