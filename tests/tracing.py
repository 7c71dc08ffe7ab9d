"""What a process of the tests leaves out of tracing: half of the time that a small model took went into it.

[Note: what is left out]
The garbage collector runs less often: a compilation makes millions of objects. And what torch remembers of the
operators that it has traced with fake tensors stays for the next model of the process: a model of the library takes
it along when it goes (``compat.forget_fake_values``), which a process with one model after the other pays for, and
torch by itself keeps it. ``forgetting`` is for tests of that. Dynamo's table of torch's functions, which each new
process group lets it forget, stays too: it is the same one again.

pytest adds handlers to each logger that does not propagate. With a handler, torch's structured trace (TORCH_TRACE)
prints and describes each graph and each step of a compilation; without one it does nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from torch._dynamo import trace_rules
from torch._logging._internal import trace_log
from torch._subclasses import FakeTensorMode

GC_THRESHOLD = 10_000  # allocations

_forget = FakeTensorMode.cache_clear


def trace_cheaply() -> None:
    """In this process, from now on."""
    gc.set_threshold(GC_THRESHOLD)
    FakeTensorMode.cache_clear = staticmethod(lambda: None)  # type: ignore[method-assign,assignment]
    trace_rules.clear_lru_cache = lambda: None
    trace_log.propagate = True


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """In a process that traces cheaply: a model that goes takes along what torch remembers of fake tensors."""
    kept = FakeTensorMode.__dict__["cache_clear"]
    FakeTensorMode.cache_clear = _forget  # type: ignore[method-assign]
    _forget()
    try:
        yield
    finally:
        FakeTensorMode.cache_clear = kept  # type: ignore[method-assign]
