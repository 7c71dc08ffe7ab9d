"""What the user has changed since the model was compiled, by methods: what graphs depend on beside their inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Each value has graphs of its own, captured at the first call with it; regions are compiled once for all of them.

    Fields are hashable, and their defaults are what ``compile`` was given. Ranks have to set the same.
    """

    def key(self) -> str:
        """Equal for equal settings, on all ranks; "" where nothing was changed."""
        changed = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed.append(f"{field.name}={sorted(value) if isinstance(value, frozenset) else value!r}")
        return ", ".join(changed)
