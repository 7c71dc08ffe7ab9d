"""Keys of Inductor's cache are made with less work, and are what they were.

In each process Inductor reads all of torch's source for a digest of it. A note in Inductor's cache has that digest by
the names, sizes and times of the files: where one of them was changed since, it is read again. And a key's ingredients
are hashed one by one for a log only where it is on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._logging._internal import trace_log

from graph_fsdp.compat.inductor.probes import read_note, write_note

_SUFFIXES = (*importlib.machinery.all_suffixes(), ".cpp", ".ld", ".h")  # the last three of one file each


@functools.cache  # as torch's own
def know_torch(directory: Path) -> None:
    """Have Inductor know the digest of torch's source, by a note in its cache's ``directory``, or make the note."""
    from torch._inductor.codecache import torch_key

    found = modules_of(Path(torch.__path__[0]))
    note = directory / "graph_fsdp" / "sources" / hashlib.sha256(found.encode()).hexdigest()
    known: Any = torch_key
    digest = _digest(read_note(note))
    if digest is None:
        write_note(note, torch_key().hex())
    elif hasattr(known, "set"):
        with contextlib.suppress(RuntimeError, AssertionError):  # it is known already
            known.set(digest)


def _digest(text: str | None) -> bytes | None:
    """Return what a note says, if it is a digest as torch makes it."""
    if text is None or len(text) != 2 * hashlib.sha256().digest_size:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def modules_of(folder: Path) -> str:
    """Say which modules the package has, and when they were changed; the files that are none, of Inductor's digest,
    too."""
    lines = [f"torch {torch.__version__}"]
    folders = [os.fspath(folder)]
    while folders:
        inside, is_package = [], False
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.endswith(_SUFFIXES):
                    status = entry.stat()
                    lines.append(f"{entry.path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
                    is_package = is_package or entry.name == "__init__.py"
                elif entry.is_dir() and entry.name != "__pycache__":
                    inside.append(entry.path)
        folders += inside if is_package else []
    return "\n".join(lines)


def unlogged_keys_unprinted() -> contextlib.AbstractContextManager[Any]:
    """For a time, have Inductor describe keys only if a log wants it."""
    from torch._inductor import codecache

    if trace_log.handlers or codecache.log.isEnabledFor(logging.DEBUG):
        return contextlib.nullcontext()
    return patch.object(codecache.FxGraphCachePickler, "debug_lines", lambda *_: [])
