"""Wrong versions of functions: the text of one, with a part of it replaced, for a while."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def mutated(function: Callable[..., Any], *replaced: tuple[str, str]) -> Iterator[None]:
    """Everybody who refers to the function runs the other text of it."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in replaced:
        assert source.count(old) == 1, f"{function.__qualname__} has {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    names = dict(function.__globals__)
    flags = function.__code__.co_flags & 0x1000000  # annotations are not evaluated
    exec(compile(source, f"<mutant of {function.__qualname__}>", "exec", flags=flags, dont_inherit=True), names)
    before, function.__code__ = function.__code__, names[function.__name__].__code__  # type: ignore[attr-defined]
    try:
        yield
    finally:
        function.__code__ = before  # type: ignore[attr-defined]
