"""Scheduled graphs through XLA: one program of all devices, in which every device runs the local view."""

from __future__ import annotations

from graph_fsdp.runtime.xla.placement import Placement

__all__ = ["Placement"]
