"""Checkpoints that Python runs, where Dynamo has left them to it, can be told what to compute again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from torch.utils import checkpoint

Function = Callable[..., Any]

# What keeps the function that is to be computed again; torch 2.15 has both.
_NAMES = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
_NAME = next(name for name in _NAMES if hasattr(checkpoint, name))
_without_reentrance: Function = getattr(checkpoint, _NAME)


@contextlib.contextmanager
def checkpointed_functions(around: Callable[[Function], Function]) -> Iterator[None]:
    """Have checkpoints that begin in this time compute ``around(function)`` again in place of the function. Reentrant
    ones are of a ``torch.autograd.Function``."""

    def begin(function: Function, *args: Any, **kwargs: Any) -> Any:
        return _without_reentrance(around(function), *args, **kwargs)

    with patch.object(checkpoint, _NAME, begin):
        yield
