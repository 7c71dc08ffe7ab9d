"""What the user has changed since the model was compiled, by methods: what graphs depend on beside their inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Each value has graphs of its own, captured at the first call with it; regions are compiled once for all of them.

    Fields are hashable, and their defaults are what ``compile`` was given. Ranks have to set the same.

    ``unsynced``: units whose gradients are accumulated whole and not reduced; ``unreplicated``: those whose gradients
    are reduced over the ranks that shard, and not over the replicas. ``divide_factors``: unit → what sums of gradients
    are divided by, instead of the number of ranks. ``summed``: units whose reductions are sums, divided apart.
    ``hooked``: units whose reduced gradients are shown to a function of the user.
    """

    unsynced: frozenset[str] = frozenset()
    unreplicated: frozenset[str] = frozenset()
    divide_factors: tuple[tuple[str, float], ...] = ()
    summed: frozenset[str] = frozenset()
    hooked: frozenset[str] = frozenset()

    def divide_factor(self, unit: str) -> float | None:
        """What the user divides the sum of a unit's gradients by; None for the mean."""
        return dict(self.divide_factors).get(unit)

    def key(self) -> str:
        """Equal for equal settings, on all ranks; "" where nothing was changed."""
        changed = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed.append(f"{field.name}={sorted(value) if isinstance(value, frozenset) else value!r}")
        return ", ".join(changed)
