"""Files that users name are written here, with errors that say what is wrong."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write a whole file. Raises OSError of the kind that the system gave, with what to do."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"path: cannot be written ({error.strerror}); name a file in a folder that exists and is yours"
        raise type(error)(error.errno, reason, fspath(path)) from error
