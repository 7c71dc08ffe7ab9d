"""A backend makes a function of a compute region. Each is one small class."""

from __future__ import annotations

from graph_fsdp.runtime.backends.base import Backend, EagerBackend, XlaBackend
from graph_fsdp.runtime.backends.inductor import InductorBackend

BACKENDS: dict[str, type[Backend]] = {"eager": EagerBackend, "inductor": InductorBackend, "xla": XlaBackend}

__all__ = ["BACKENDS", "Backend", "EagerBackend", "InductorBackend", "XlaBackend"]
