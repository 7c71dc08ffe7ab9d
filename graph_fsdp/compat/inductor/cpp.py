"""Inductor's C++ kernels of several graphs are built together, by private names of torch (``docs/private_names.md``).

[Note: one library for several kernels]
Inductor makes a library of each kernel, for which the compiler takes a second more than for the kernel. So the kernels
of all graphs compiled within ``built_together`` go into few libraries: each is the source that Inductor would have
compiled, in a namespace of its own, with the same options and its own ``PyInit_`` function. Which kernels share a
library follows from the kernels alone, so ranks and later runs find it in Inductor's cache (docs/decisions/tracing.md).
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

from torch._dynamo.utils import dynamo_timed
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache

from graph_fsdp.compat.inductor.probes import BuiltSource

log = logging.getLogger(__name__)

_SMALLEST = 6  # kernels in a library, where there are more than one library
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)
_EXPORTED = 'extern "C"'


class Kernel:
    """Stands for a kernel that is not built yet. Called before that, it is built by itself."""

    def __init__(self, argument_types: Sequence[str], source: str) -> None:
        self.argument_types, self.source = tuple(argument_types), source
        self.function: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.function is None:
            self.function = _built_alone(self)
        return self.function(*args)


@contextlib.contextmanager
def built_together() -> Iterator[None]:
    """Build C++ kernels of the graphs that Inductor compiles meanwhile, or finds in its cache, at the end."""
    kernels: dict[tuple[tuple[str, ...], str], Kernel] = {}
    modules: list[dict[str, Any]] = []
    wait = AsyncCompile.wait

    def cpp_pybinding(_: Any, argument_types: Sequence[str], source: str) -> Kernel:
        kernel = Kernel(argument_types, source)
        return kernels.setdefault((kernel.argument_types, source), kernel)

    def wait_for_others(self: Any, scope: dict[str, Any]) -> None:
        modules.append(scope)
        wait(self, scope)

    with (
        patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding),
        patch.object(AsyncCompile, "wait", wait_for_others),
    ):
        yield
    with dynamo_timed("graph_fsdp.build_kernels"):
        build(list(kernels.values()))
    for scope in modules:
        scope.update({name: value.function for name, value in scope.items() if isinstance(value, Kernel)})


def build(kernels: list[Kernel]) -> None:
    """Build ``kernels``, which get their functions."""
    threads = get_compile_threads()
    submit = AsyncCompile.submit if threads > 1 else None
    # Large ones first, and dealt out: libraries then take about as long as each other, and are the same on all ranks.
    alike = [kernel for kernel in kernels if kernel.source.count(_EXPORTED) == 1]
    alike.sort(key=lambda kernel: (-len(kernel.source), kernel.source, kernel.argument_types))
    count = max(1, min(threads, len(alike) // _SMALLEST))
    libraries = [alike[index::count] for index in range(count)]
    begun = [(library, _begin(library, submit)) for library in libraries if len(library) > 1]
    for library, load in begun:
        try:
            for kernel, function in zip(library, load().functions, strict=True):
                kernel.function = function
        except Exception as error:  # of a kernel, which is an error by itself too, or of what is done to it here
            log.info("%d kernels are built one by one: together they cannot be: %s", len(library), error)
    for kernel in kernels:
        if kernel.function is None:
            kernel.function = _built_alone(kernel)


def _begin(kernels: Sequence[Kernel], submit: Callable[..., Any] | None) -> Callable[[], Any]:
    """Start the compiler; return what waits for it, and has the ``functions``."""
    names = [f"kernel_{index}" for index in range(len(kernels))]
    texts = [_with_bindings(kernel, name) for kernel, name in zip(kernels, names, strict=True)]
    includes = dict.fromkeys(line.strip() for text in texts for line in _INCLUDE.findall(text))
    # Inductor's header first, which it precompiles; what is Python's wants this definition before it.
    lines = [*(line for line in includes if "inductor" in line), "#define PY_SSIZE_T_CLEAN", *includes]
    for name, text in zip(names, texts, strict=True):
        lines += [f"namespace {name}_ {{", _INCLUDE.sub("", text).replace(_EXPORTED, ""), "}"]

    base: Any = CppPythonBindingsCodeCache
    source = "\n".join(lines)
    known = BuiltSource(source)

    class Library(base):
        cache: ClassVar[dict[str, Any]] = {}

        @classmethod
        def _load_library_inner(cls, path: str, key: str) -> Any:
            functions = [_loaded(path, key, name) for name in names]
            known.remember()
            return SimpleNamespace(functions=functions)

        @classmethod
        def _get_uncompiled_header(cls, device: str) -> str | None:
            header: str | None = None if known.built else super()._get_uncompiled_header(device)
            return header

    return Library.load_async(source, "cpu", submit_fn=submit)


def _with_bindings(kernel: Kernel, name: str) -> str:
    """Return what Inductor gives to the compiler for a kernel; the Python module is called ``name``."""
    found: list[str] = []

    class Source(CppPythonBindingsCodeCache):
        entry_function = name

        @classmethod
        def load_async(cls, main_code: str, *args: Any, **kwargs: Any) -> Any:
            found.append(main_code)

    Source.load_pybinding_async(kernel.argument_types, kernel.source)
    return found[0]


def _loaded(path: str, key: str, name: str) -> Callable[..., Any]:
    loader: Any = type("Loader", (CppPythonBindingsCodeCache,), {"entry_function": name})
    return getattr(loader._load_library_inner(path, key), name)


def _built_alone(kernel: Kernel) -> Callable[..., Any]:
    return CppPythonBindingsCodeCache.load_pybinding(kernel.argument_types, kernel.source)
