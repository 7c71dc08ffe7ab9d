"""What Inductor finds out about a host's compiler in each process is remembered beside what it finds out with.

Before it loads a kernel, Inductor has a child process load a library for each kind of vectors that the processor has,
to see whether what the compiler makes of them can be loaded; and it preprocesses a header, to see whether a precompiled
one is the header's still. Six children and the compiler take a CPU second, more than all the kernels of a model.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_FLAGS = ("flags", "Features")  # of a processor, in Linux's words


def remembered_probes() -> contextlib.AbstractContextManager[Any]:
    """For a time, have Inductor load a library in a child only where it has not been loaded on such a host before.

    A note beside the library says on what host, and of what library, it could be. Where anything of that is otherwise
    now, or it could not be loaded, it is tried again.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    probe = getattr(VecISA, "_probe_load", None)  # torch 2.9 has the same in one piece with the compilation
    if probe is None:
        return contextlib.nullcontext()

    def remembered(isa: Any, library: str) -> bool:
        note, now = Path(f"{library}.loads"), _circumstances(library)
        if now is not None and read_note(note) == now:
            return True
        loads = bool(probe(isa, library))
        if loads and now is not None:
            write_note(note, now)
        return loads

    return patch.object(VecISA, "_probe_load", remembered)


class BuiltSource:
    """Remembers in Inductor's cache, where there is one, that a source has been built: no header has to be precompiled
    for it then.

    Whether the library is still that of the compiler and its options is found out by Inductor, from the
    name of the file; if it is not, it is built without a precompiled header, which takes longer.
    """

    def __init__(self, source: str) -> None:
        from torch._inductor import config
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        self._note: Path | None = None
        if config.fx_graph_cache and not config.force_disable_caches:
            name = hashlib.sha256(source.encode()).hexdigest()
            self._note = Path(cache_dir(), "graph_fsdp", "libraries", name)

    @property
    def built(self) -> bool:
        return self._note is not None and self._note.exists()

    def remember(self) -> None:
        if self._note is not None and not self.built:
            write_note(self._note, "")


def _circumstances(library: str) -> str | None:
    """Describe all that decides whether a library can be loaded; None where that cannot be found out."""
    described = processor()
    try:
        status = os.stat(library)
    except OSError:
        return None
    if described is None:
        return None
    known = {
        "library": (status.st_size, status.st_mtime_ns),
        "processor": described,
        "system": (platform.system(), platform.machine(), platform.release(), *platform.libc_ver()),
        "Python": (sys.executable, sys.version),
        "torch": (torch.__file__, torch.__version__, torch.version.git_version),
        "paths": {name: value for name, value in os.environ.items() if name.startswith(("LD_", "DYLD_"))},
    }
    return json.dumps(known, sort_keys=True)


@functools.cache
def processor() -> str | None:
    """Return what instructions the processor has, in the system's words; None where it has none for them."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in _FLAGS:
                return " ".join(sorted(value.split()))
    return None


def read_note(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def write_note(path: Path, text: str) -> None:
    """Write a note, unless that cannot be: what it says is then found out again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, text)


def replace_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file at once or not at all: who reads it meanwhile finds what was there before."""
    handle, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
