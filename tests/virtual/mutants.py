"""Wrong versions of functions: the text of one, with parts of it replaced, for a while."""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """``function``: ``package.module:name``, of this library. ``replaced``: parts of its text, and what stands in their
    places; the dict ``reused`` is there to keep something in. ``found``: what finds it; "" if it is harmless.
    ``compiles``: it is wrong while a model is compiled."""

    found: str
    function: str
    replaced: tuple[tuple[str, str], ...]
    compiles: bool = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Everybody who refers to the function runs the other text of it."""
        function: Any = pkgutil.resolve_name(f"graph_fsdp.{self.function}")
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in self.replaced:
            assert source.count(old) == 1, f"{self.function} has {old!r} {source.count(old)} times"
            source = source.replace(old, new)
        names = dict(function.__globals__)
        flags = function.__code__.co_flags & 0x1000000  # annotations are not evaluated
        exec(compile(source, f"<mutant of {self.function}>", "exec", flags=flags, dont_inherit=True), names)
        before, function.__code__ = function.__code__, names[function.__name__].__code__
        function.__globals__["reused"] = {}
        try:
            yield
        finally:
            function.__code__ = before
            del function.__globals__["reused"]


def wrong(found: str, function: str, *parts: str, compiles: bool = False) -> Mutant:
    """``parts``: a part of the text and what replaces it, one pair behind the other."""
    return Mutant(found, function, tuple(zip(parts[::2], parts[1::2], strict=True)), compiles)
