"""Plan what a model would take on a cluster that is not there."""

from graph_fsdp.passes.analysis.simulate import Conditions
from graph_fsdp.passes.analysis.simulate import simulate as run
from graph_fsdp.planning.dimensions import Dimensions
from graph_fsdp.planning.prediction import Plan, plan
from graph_fsdp.planning.search import Candidate, Choice, Search, search, search_pipelines
from graph_fsdp.planning.stages import PipelinePlan, Stage, plan_pipeline
from graph_fsdp.planning.tracing import Traced, trace

__all__ = [
    "Candidate",
    "Choice",
    "Conditions",
    "Dimensions",
    "PipelinePlan",
    "Plan",
    "Search",
    "Stage",
    "Traced",
    "plan",
    "plan_pipeline",
    "run",
    "search",
    "search_pipelines",
    "trace",
]
