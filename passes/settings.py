"""What the user has changed since the model was compiled, by methods: what graphs depend on beside their inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Each value has graphs of its own, captured at the first call with it; regions are compiled once for all of them.

    Fields are hashable, and their defaults are what ``compile`` was given. Ranks have to set the same.
    ``custom_all_gather``, ``custom_reduce_scatter``: collectives that the user brings, in one message per bucket.
    """

    custom_all_gather: bool = False
    custom_reduce_scatter: bool = False

    def key(self) -> str:
        """Equal for equal settings, on all ranks; "" where nothing was changed."""
        changed = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed.append(f"{field.name}={sorted(value) if isinstance(value, frozenset) else value!r}")
        return ", ".join(changed)
