"""Numbers that are affine in the indices of a tensor's elements, and truths that are inequalities between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Affine:
    """``constant`` plus the sum of ``steps[d]`` times the index of dimension ``-1 - d``: the last dimension comes
    first, as broadcasting counts. The last step is not 0."""

    constant: int
    steps: tuple[int, ...] = ()

    @classmethod
    def of(cls, constant: int, steps: Iterable[int] = ()) -> Affine:
        given = list(steps)
        while given and not given[-1]:
            given.pop()
        return cls(constant, tuple(given))

    def step(self, dim: int) -> int:
        return self.steps[dim] if dim < len(self.steps) else 0

    def __add__(self, other: Affine) -> Affine:
        pairs = zip_longest(self.steps, other.steps, fillvalue=0)
        return Affine.of(self.constant + other.constant, [a + b for a, b in pairs])

    def __mul__(self, factor: int) -> Affine:
        return Affine.of(factor * self.constant, [factor * step for step in self.steps])

    def __sub__(self, other: Affine) -> Affine:
        return self + other * -1

    def moved(self, dims: Iterable[int | None]) -> Affine:
        """Return it for a tensor whose dimensions, the last first, were these, or None for a new one."""
        return Affine.of(self.constant, [0 if dim is None else self.step(dim) for dim in dims])

    def is_never_negative(self, shape: Iterable[Any]) -> bool:
        """Say whether no element of a tensor of this shape is below 0, however long its symbolic dimensions are."""
        lowest = self.constant
        for step, size in zip(self.steps, reversed(tuple(shape)), strict=False):
            if step < 0 and not isinstance(size, int):
                return False
            lowest += min(0, step * (size - 1)) if step < 0 else 0
        return lowest >= 0


Truth: TypeAlias = frozenset[Affine]  # True where all of them are at least 0
Value: TypeAlias = "Affine | Truth | None"  # None: unknown

FALSE: Truth = frozenset({Affine(-1)})


def truth(conditions: Iterable[Affine]) -> Truth:
    left = frozenset(a for a in conditions if a.steps or a.constant < 0)
    return FALSE if any(not a.steps for a in left) else left


def is_causal(mask: Truth, shape: tuple[Any, ...]) -> bool:
    """Say whether a mask of this shape is True where, and only where, the last index is at most the one before it."""
    left = [a for a in mask if not a.is_never_negative(shape)]
    if len(left) != 1 or len(left[0].steps) != 2:
        return False
    (condition,) = left
    key, query = condition.steps
    return query > 0 and key == -query and 0 <= condition.constant < query


def is_always_true(mask: Truth, shape: tuple[Any, ...]) -> bool:
    return all(a.is_never_negative(shape) for a in mask)


def constant_of(value: Value) -> int | None:
    """Return what all elements are, True as 1; None where they differ, or may."""
    if isinstance(value, Affine):
        return None if value.steps else value.constant
    return {frozenset(): 1, FALSE: 0}.get(value) if value is not None else None


def each(value: Affine | Truth, change: Callable[[Affine], Affine]) -> Affine | Truth:
    return change(value) if isinstance(value, Affine) else truth(map(change, value))
