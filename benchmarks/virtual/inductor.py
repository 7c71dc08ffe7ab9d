"""Inductor for the virtual device: what it generates is C++ for the CPU, which computes on the same memory.

    inductor.register()
    torch.compile(block), graph_fsdp.compile(model, backend="inductor"): as on any device

A function that Inductor has generated is one operation of the machine. What it reads and writes, the types of its
arguments say (``const``), and it takes as long as its tensors take to be read or written once. Products and attention
are operators of torch's, as in all programs of Inductor's.

Inductor decides what to fuse as for the CPU: a function may hold several loops, which are several kernels of Triton's,
and one that looks up few rows of a table counts the whole table.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from one_device import OneDevice
from torch import Tensor
from torch._dynamo.device_interface import register_interface_for_device
from torch._inductor import utils
from torch._inductor.codegen import common
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V

from virtual import library
from virtual.machine import Machine

_BINDING = re.compile(r"async_compile\.cpp_pybinding\((\[.*?\]), r'''")


@functools.cache
def register() -> None:
    """Make Inductor generate code for the device, from here on in this process."""
    common.register_backend_for_device(library.NAME, CppScheduling, Wrapper)
    common.register_device_op_overrides(library.NAME, common.get_device_op_overrides("cpu"))
    register_interface_for_device(library.NAME, Interface)
    # What is no CPU counts as a GPU with Triton, unless these two say otherwise.
    BaseSchedulerNode.is_cpu = _is_cpu  # type: ignore[method-assign]
    common.get_current_backend = utils.get_current_backend = _backend_of


def _is_cpu(self: Any, is_cpu: Any = BaseSchedulerNode.is_cpu) -> bool:
    device = self.get_device()
    return bool(is_cpu(self)) or (device is not None and device.type == library.NAME)


def _backend_of(device_type: str | None = None, backend_of: Any = utils.get_current_backend) -> str:
    device_type = device_type or V.graph.get_current_device_or_throw().type
    found: str = backend_of("cpu" if device_type == library.NAME else device_type)
    return found


class Kernel:
    """A generated function, called with tensors and numbers. ``types``: those of its C++ arguments."""

    def __init__(self, name: str, types: Sequence[str], function: Any) -> None:
        self.name, self.types, self.function = name, types, function

    def __call__(self, *args: Any) -> None:
        if hasattr(self.function, "result"):  # a compiler was at work on it
            self.function = self.function.result()
        machine = Machine.current
        if machine is None:
            self.function(*args)
            return
        machine.enter()
        try:
            if machine.numbers:
                self.function(*args)
            pairs = [(arg, kind) for arg, kind in zip(args, self.types, strict=True) if isinstance(arg, Tensor)]
            reads = [tensor for tensor, kind in pairs if kind.startswith("const ")]
            writes = [tensor for tensor, kind in pairs if not kind.startswith("const ")]
            moved = sum(tensor.nbytes for tensor, _ in pairs)
            machine.launch(self.name, reads, writes, machine.kernels.model.copy_seconds(moved // 2))
        finally:
            machine.leave()


class Wrapper(PythonWrapperCodegen):
    """Python that calls the functions through ``Kernel``."""

    @staticmethod
    def create(is_subgraph: bool, *args: Any, **kwargs: Any) -> PythonWrapperCodegen:
        return PythonWrapperCodegen.create(is_subgraph, *args, **kwargs) if is_subgraph else Wrapper()

    def write_header(self) -> None:
        super().write_header()
        self.imports.writeline(f"from {__name__} import Kernel as VirtualKernel")

    def define_kernel(self, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> None:
        if (found := _BINDING.match(kernel_body)) is not None:
            types = ast.literal_eval(found[1])
            kernel_body = f"VirtualKernel({kernel_name!r}, {types!r}, {kernel_body.rstrip()})\n"
        super().define_kernel(kernel_name, kernel_body, *args, **kwargs)

    def _generate_kernel_call_helper(self, *args: Any, device: Any = None, **kwargs: Any) -> None:
        own = device is not None and device.type == library.NAME
        super()._generate_kernel_call_helper(*args, device=torch.device("cpu") if own else device, **kwargs)


class Interface(OneDevice):
    class Worker(OneDevice.Worker):
        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            return SimpleNamespace(multi_processor_count=1)

    @staticmethod
    def is_available() -> bool:
        return Machine.current is not None

    @staticmethod
    def get_compute_capability(device: Any = None) -> str:
        return ""

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(device)
