"""Parameters of tests of which ``make test`` runs some, and ``make test-all`` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_long(cases: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """The cases as parameters, ``long`` but for those of ``short``. A tuple is the values of several arguments."""
    cases = list(cases)
    unknown = [case for case in short if case not in cases]
    assert not unknown, f"{unknown} are no cases"
    return [case if case in short else _long(case) for case in cases]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
