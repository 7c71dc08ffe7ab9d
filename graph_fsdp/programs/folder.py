"""A folder has a file per program, called by a digest of its key: a line that says what it is for, and the program.

A file is written under another name and renamed, for the user alone. What another user could have written is not read,
nor what is not whole. Where the folder has a bound, who writes a program removes those whose last use is longest ago.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from graph_fsdp.compat.inductor.probes import replace_file

log = logging.getLogger(__name__)

_FOLDER, _FILE = 0o700, 0o600
_LOOKED_AT = 64  # files, to say why there is no program
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


class Folder:
    """Holds programs by the digest of their keys: ``most_bytes`` in all, where given, but for the newest one."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self.path, self.most_bytes = path, most_bytes

    @classmethod
    def named(cls, option: str, path: str | os.PathLike[str], advice: str) -> Folder:
        """Return the folder that an option names, made where there is none. Raises ValueError where that cannot be."""
        folder = cls(Path(path))
        try:
            folder.make()
        except OSError as error:
            raise ValueError(
                f"{option}={str(path)!r}: there can be no folder of programs: {error.strerror or error}; {advice}"
            ) from error
        return folder

    def make(self) -> None:
        """Make the folder, for the user alone, where there is none. Raises OSError where that cannot be."""
        self.path.mkdir(mode=_FOLDER, parents=True, exist_ok=True)

    def file_of(self, key: Mapping[str, str]) -> Path:
        text = json.dumps(dict(key), sort_keys=True)
        return self.path / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def read(self, key: Mapping[str, str]) -> dict[str, Any] | None:
        """Return what was written for a key; None where nothing is, or not all of it, or another could have written
        it. The log says which."""
        path = self.file_of(key)
        try:
            with open(path, encoding="utf-8") as file:
                if not _is_private(os.fstat(file.fileno())):
                    log.info("%s belongs to another user, or others may write to it, and is not read", path)
                    return None
                head, body = _head(file), file.read()
        except FileNotFoundError:
            log.info("no program is kept in %s: %s", self.path, self._why(key))
            return None
        except (OSError, ValueError) as error:
            log.info("%s cannot be read: %s", path, error)
            return None
        if head.get("key") != dict(key) or head.get("sha256") != hashlib.sha256(body.encode()).hexdigest():
            log.info("%s is not whole", path)
            return None
        with contextlib.suppress(OSError):  # another user's folder
            os.utime(path)
        found: dict[str, Any] = json.loads(body)
        return found

    def write(self, key: Mapping[str, str], program: Callable[[], str]) -> None:
        """Keep a program, in JSON, unless one is kept for the key or another process of this host is about to:
        ``program`` is then not called. The log says where it cannot be written."""
        path = self.file_of(key)
        try:
            self.make()
            with FileLock(path.with_suffix(".lock"), mode=_FILE).acquire(timeout=0):
                if path.exists() and self.read(key) is not None:
                    return
                body = program()
                head = json.dumps({"key": dict(key), "sha256": hashlib.sha256(body.encode()).hexdigest()})
                replace_file(path, f"{head}\n{body}")
                self._make_room()
        except Timeout:
            return
        except (OSError, NotImplementedError) as error:  # an unwritable folder, a file system without locks
            log.info("no program can be kept in %s: %s", self.path, error)

    def _make_room(self) -> None:
        """Remove what is beyond the bound. A process that has opened a file still reads it."""
        held = 0
        for place, path in enumerate(self._newest_first()):
            with contextlib.suppress(OSError):  # another process may have removed it
                held += path.stat().st_size
                if place and self.most_bytes is not None and held > self.most_bytes:
                    path.unlink()
                    log.info("%s is removed: programs have more than %d bytes in all", path, self.most_bytes)

    def _newest_first(self) -> list[Path]:
        def used(path: Path) -> float:
            try:
                return path.stat().st_mtime
            except OSError:
                return 0.0

        return sorted(self.path.glob("*.json"), key=used, reverse=True)

    def _why(self, key: Mapping[str, str]) -> str:
        """Say what of a key differs from that of the program that has most in common with it."""
        differences = [[name for name in key if other.get(name) != key[name]] for other in self._keys()]
        if not differences:
            return "there is none"
        nearest: list[str] = min(differences, key=len)
        return f"{', '.join(nearest)} differ from those of the nearest one"

    def _keys(self) -> Iterator[dict[str, str]]:
        for path in self._newest_first()[:_LOOKED_AT]:
            with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
                key = _head(file).get("key")
                if isinstance(key, dict):
                    yield key


def _head(file: TextIO) -> dict[str, Any]:
    """Return the first line of a file. Raises ValueError where it is not that of a program."""
    head = json.loads(file.readline())
    if not isinstance(head, dict):
        raise ValueError("it is no file of a program")
    return head


def _is_private(status: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & _WRITABLE
