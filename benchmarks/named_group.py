"""A process group written in Python, with the names that torch asks of each and that those in C++ have already."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist


class NamedGroup(dist.ProcessGroup):
    """``backend``: the name under which torch.distributed knows the class. ``name``: the group's own."""

    backend: ClassVar[str]

    def __init__(self, rank: int, world_size: int, name: str) -> None:
        super().__init__(rank, world_size)
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return self.backend
