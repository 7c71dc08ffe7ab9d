"""Builds ``device.cpp``, makes the device known to torch, and tells a machine what torch does with it.

What is made once is a process's own: torch can be given one such device, and not lose it again. Without a machine it is
not available, and its tensors are memory without a clock.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from virtual.clocks import Moment

if TYPE_CHECKING:
    from virtual.machine import Machine

NAME = "virtual"
SOURCE = Path(__file__).with_name("device.cpp")
COMPILER = shutil.which("g++") or shutil.which("clang++")

_INT, _ADDRESS, _NONE = ctypes.c_int64, ctypes.c_void_p, None
# As in ``Callbacks``: name → what it returns and takes.
_CALLBACKS: dict[str, tuple[Any, ...]] = {
    "allocated": (_NONE, _ADDRESS, _INT, _INT),
    "freed": (_NONE, _ADDRESS),
    "used_on": (_NONE, _ADDRESS, _INT),
    "new_stream": (_NONE, _INT, ctypes.c_int),
    "record": (_NONE, _INT, _INT),
    "block": (_NONE, _INT, _INT),
    "wait_event": (_NONE, _INT),
    "wait_stream": (_NONE, _INT),
    "is_event_done": (ctypes.c_int, _INT),
    "is_stream_done": (ctypes.c_int, _INT),
    "elapsed_milliseconds": (ctypes.c_double, _INT, _INT),
    "pinned": (_NONE, _ADDRESS, _INT),
    "unpinned": (_NONE, _ADDRESS),
    "memory": (_NONE, ctypes.POINTER(_INT)),
    "forget_peak": (_NONE,),
}


class _Callbacks(ctypes.Structure):
    _fields_ = [(name, ctypes.CFUNCTYPE(*types)) for name, types in _CALLBACKS.items()]


def build(source: Path = SOURCE) -> Path:
    """The library, built for this torch unless it is there already. It takes a compiler some ten seconds."""
    if COMPILER is None:
        raise RuntimeError("the virtual device needs a C++ compiler: g++ or clang++")
    root = Path(torch.__file__).parent
    key = hashlib.sha256(f"{torch.__version__} {torch.version.git_version}".encode() + source.read_bytes()).hexdigest()
    user = os.getuid() if hasattr(os, "getuid") else ""
    folder = Path(os.environ.get("VIRTUAL_DEVICE_CACHE", Path(tempfile.gettempdir()) / f"virtual_device_{user}"))
    library = folder / f"{key[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        command = [COMPILER, "-std=c++20", "-O0", "-shared", "-fPIC", str(source), "-o", str(made)]
        command += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", f"-L{root / 'lib'}"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-lc10", "-ltorch_cpu"]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if finished.returncode:
            raise RuntimeError(f"the virtual device does not compile:\n{finished.stderr[-4000:]}")
        made.rename(library)
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build()))


@functools.cache
def install() -> None:
    """Make the device known to torch: ``torch.device("virtual")``, ``torch.virtual``, ``torch.accelerator``."""
    from virtual import device_module, kernels

    library = _library()
    library.virtual_current_stream.restype = _INT
    library.virtual_register()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module.module())
    torch.utils.generate_methods_for_privateuse1_backend()
    kernels.register()
    atexit.register(detach)


def current_stream() -> int:
    return int(_library().virtual_current_stream())


_attached: list[_Callbacks] = []  # alive while torch may call them


def attach(machine: Machine) -> None:
    events = machine.clocks.events
    streams = machine.clocks

    def wait_stream(stream: int) -> None:
        if stream < 0:
            machine.synchronize()
        else:
            machine.wait_for(streams[stream])

    def memory(given: Any) -> None:
        given[0], given[1], given[2] = machine.memory.allocated, machine.memory.most, machine.memory.reserved

    functions: dict[str, Callable[..., Any]] = {
        "allocated": machine.allocate,
        "freed": machine.free,
        "used_on": lambda address, stream: machine.memory.use_on(address, stream),
        "new_stream": machine.add_stream,
        "record": lambda event, stream: streams.record(event, streams[stream]),
        "block": lambda event, stream: streams.block(event, streams[stream]),
        "wait_event": lambda event: machine.wait_for(events.get(event, Moment())),
        "wait_stream": wait_stream,
        "is_event_done": lambda event: machine.is_done(events.get(event, Moment())),
        "is_stream_done": lambda stream: machine.is_done(streams[stream]),
        "elapsed_milliseconds": lambda first, last: (events[last].seconds - events[first].seconds) * 1e3,
        "pinned": machine.memory.pin,
        "unpinned": machine.free,
        "memory": memory,
        "forget_peak": machine.memory.forget_peak,
    }
    called = {name: _CALLBACKS_TYPES[name](_guarded(machine, function)) for name, function in functions.items()}
    _attached[:] = [_Callbacks(**called)]
    _library().virtual_set(ctypes.byref(_attached[0]), int(machine.numbers))


_CALLBACKS_TYPES = dict(_Callbacks._fields_)


def _guarded(machine: Machine, function: Callable[..., Any]) -> Callable[..., Any]:
    """C++ cannot be raised through: the machine keeps the error. The time of the call is not the program's."""

    def call(*args: Any) -> Any:
        machine.enter()
        try:
            found = function(*args)
            return 0 if found is None else found
        except BaseException as error:
            machine.errors.append(error)
            return 0
        finally:
            machine.leave()

    return call


def detach() -> None:
    _library().virtual_set(None, 1)
    _attached.clear()
