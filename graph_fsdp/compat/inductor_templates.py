"""Inductor's templates of kernels are compiled when a kernel is made of one, and not when its modules are imported."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch


class _WhenAsked:
    """Is a template that is made when an attribute of it is read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = functools.cache(make)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)


def templates_made_when_asked() -> contextlib.AbstractContextManager[Any]:
    """Return a context for the first import of Inductor's lowerings, most of whose templates no model uses."""
    if "torch._inductor.lowering" in sys.modules:
        return contextlib.nullcontext()
    from torch._inductor.codegen.common import KernelTemplate

    make: Any = KernelTemplate._template_from_string

    def when_asked(source: str) -> Any:
        return None if importlib.util.find_spec("jinja2") is None else _WhenAsked(functools.partial(make, source))

    return patch.object(KernelTemplate, "_template_from_string", staticmethod(when_asked))
