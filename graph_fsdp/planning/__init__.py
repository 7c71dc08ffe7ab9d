"""Planning: what a model would do on a cluster that is not there."""

from graph_fsdp.planning.prediction import Plan, plan
from graph_fsdp.planning.tracing import Traced, trace

__all__ = ["Plan", "Traced", "plan", "trace"]
