"""Parameters of tests of which ``make test`` runs some, and ``make test-all`` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import pytest
import torch

Case = TypeVar("Case")

# A test of the numbers of gradients on one process that stands for several.
FAKE_GROUPS_REDUCE = torch.__version__ >= (2, 13)
fake_reductions = pytest.mark.skipif(
    not FAKE_GROUPS_REDUCE, reason="this torch's fake process group leaves results of reductions unwritten"
)

ITEMS: list[pytest.Item] = []  # what this session will run; conftest.py fills it when the collection has ended


def mostly_long(cases: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """The cases as parameters, ``long`` but for those of ``short``. A tuple is the values of several arguments."""
    cases = list(cases)
    unknown = [case for case in short if case not in cases]
    assert not unknown, f"{unknown} are no cases"
    return [case if case in short else _long(case) for case in cases]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)


def selected(cases: Iterable[Case], module: str, argument: str) -> list[Case]:
    """Those of ``cases`` that tests of a module which will run have as ``argument``: what ranks need to compute that
    many tests share. All of them where nothing was collected."""
    calls = [getattr(item, "callspec", None) for item in ITEMS if item.module.__name__ == module]  # type: ignore[attr-defined]
    wanted = [call.params[argument] for call in calls if call is not None and argument in call.params]
    return [case for case in cases if case in wanted or not ITEMS]
