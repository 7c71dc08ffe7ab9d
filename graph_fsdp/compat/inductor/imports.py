"""Inductor's lowerings, a second of imports, are imported without work that nobody asks for.

Templates of kernels, most of which no model uses, are compiled when a kernel is made of one. And of the operators that
torch decomposes by itself, which are made known to Python for each namespace of operators anew, only those that were
registered since are.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch


class _WhenAsked:
    """Stands for a template, which is made when an attribute of it is read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = functools.cache(make)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)


@contextlib.contextmanager
def quick_import() -> Iterator[None]:
    """Enter this to import ``torch._inductor.lowering``. It does nothing where that was imported before."""
    if "torch._inductor.lowering" in sys.modules:
        yield
        return
    from torch._export import utils
    from torch._inductor.codegen.common import KernelTemplate

    make: Any = KernelTemplate._template_from_string
    materialize = utils._materialize_cpp_cia_ops
    known: list[list[str]] = []

    def when_asked(source: str) -> Any:
        return None if importlib.util.find_spec("jinja2") is None else _WhenAsked(functools.partial(make, source))

    def once() -> None:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if registered not in known:
            materialize()
            known.append(registered)

    with (
        patch.object(KernelTemplate, "_template_from_string", staticmethod(when_asked)),
        patch.object(utils, "_materialize_cpp_cia_ops", once),
    ):
        yield
