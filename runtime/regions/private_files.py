"""Folders and files that only the user can read and write.

What a cache holds is run. The folder that Inductor keeps its own in by default lies where every user of a host may
write, under a name that everyone can guess: whoever makes it first decides what the others run.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FOLDER = 0o700
FILE = 0o600


def own_folder(path: Path) -> None:
    """Make a folder for the user alone. One that is there has to be the user's, and is closed to others: torch may have
    made it, as open as the user's files are by default.

    Raises:
        PermissionError: it belongs to another user.
    """
    path.mkdir(mode=FOLDER, parents=True, exist_ok=True)
    status = path.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, and compiled code in it would be run; name a folder of your own "
            "in the environment variable TORCHINDUCTOR_CACHE_DIR"
        )
    if stat.S_IMODE(status.st_mode) & ~FOLDER:
        path.chmod(FOLDER)
