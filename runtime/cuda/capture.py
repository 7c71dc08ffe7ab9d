"""The only calls into CUDA graphs: capture a function, replay it.

The class below was never run: there was no CUDA device. Everything that decides what is captured, which memory it
reads and when it may run again is in ``cuda_graphs.py``, and tested on the CPU with another class in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from graph_fsdp import compat
from graph_fsdp.runtime.regions.regions import Compiled


class Capture(Protocol):
    """Captures functions on one device."""

    def pool(self) -> Any:
        """Memory that several captured functions share, which are replayed in the order of their capture. What a
        result frees is used by those that are captured later; nothing goes back to the device while one exists."""

    def capture(self, function: Compiled, inputs: list[Any], pool: Any) -> tuple[Callable[[], None], Sequence[Any]]:
        """What replays ``function`` on the memory of these inputs, and its results in the pool, which have values
        only after a replay. Whoever keeps the first keeps the memory."""


class CudaCapture:
    """``torch.cuda.CUDAGraph``. The process group's threads go on while one is captured, hence "thread_local"."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # one for all captures: the pool's memory belongs to it

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, function: Compiled, inputs: list[Any], pool: Any) -> tuple[Callable[[], None], Sequence[Any]]:
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps its workspace from call to call: each graph takes one from the pool, and gives it back.
        compat.clear_cublas_workspaces()
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            outputs = function(list(inputs))
        compat.clear_cublas_workspaces()
        return graph.replay, outputs


CAPTURES: dict[str, Callable[[torch.device], Capture]] = {"cuda": CudaCapture}
