"""This module has the contract of a pass, and the context that passes get for one capture."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx, nn

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.ir.agreed_order import Plan
from graph_fsdp.passes.ir.dialect import record
from graph_fsdp.passes.ir.effects import is_view
from graph_fsdp.passes.ir.graph import PHASES, Graph, Phase
from graph_fsdp.passes.ir.settings import Settings
from graph_fsdp.passes.ir.spec import BucketSpec, ModelSpec, ParameterSpec
from graph_fsdp.passes.ir.stage import Stage


class PipelineError(ValueError):
    """Says that a pipeline's contracts do not hold, or that an edit names a pass that it does not have."""


class PassError(RuntimeError):
    """Says which pass raised, and on which graph; the pass's own error is the cause."""

    def __init__(self, message: str, pass_name: str = "", phase: str = "") -> None:
        super().__init__(message)
        self.pass_name, self.phase = pass_name, phase


class VerificationError(RuntimeError):
    """Says that a pass broke an invariant of a graph: the pass, the invariant, the node, and the parameters of its
    record or else of the records closest above it."""

    def __init__(
        self,
        pass_name: str,
        graph: Graph,
        invariant: str,
        node: fx.Node | None,
        detail: str,
        parameters: tuple[str, ...] = (),
    ) -> None:
        self.pass_name, self.invariant, self.phase = pass_name, invariant, graph.phase
        self.node = node.name if node is not None else None
        self.parameters = parameters or (_parameters(node) if node is not None else ())
        where = f"\n  node: {node.name}: {node.format_node()}" if node is not None else ""
        params = f"\n  parameters: {', '.join(self.parameters)}" if self.parameters else ""
        broken = f"pass {pass_name!r} broke the {graph.phase} graph: {detail}"
        super().__init__(f"{broken}\n  invariant: {invariant}{where}{params}")


def _parameters(node: fx.Node) -> tuple[str, ...]:
    """Return the parameters of the node's record, or of the records fewest operators above it; views do not count."""
    level = [node] if node.op != "output" else []
    seen: set[fx.Node] = set()
    while level:
        names: list[str] = []
        above: list[fx.Node] = []
        for current in level:  # grows
            if current in seen:
                continue
            seen.add(current)
            found = record(current)
            if found is not None and found.params:
                names += found.params
            elif is_view(current):
                level += current.all_input_nodes
            else:
                above += current.all_input_nodes
        if names:
            return tuple(dict.fromkeys(names))
        level = above
    return ()


@dataclass(frozen=True)
class Sharing:
    """Names the buckets that a piece takes from earlier pieces, gives to later ones, and in ``kept`` those that it
    keeps for backward, in the order in which backward receives them."""

    takes: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset()
    kept: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.takes or self.gives)

    def key(self) -> str:
        """Return a text that is equal on all ranks that share alike."""
        return f"takes {sorted(self.takes)} gives {sorted(self.gives)}"


@dataclass
class CaptureInputs:
    """Describes the inputs of Dynamo's graph. ``shards``: placeholder → its parameter and the fake value of its padded
    shard. ``as_used``: placeholder → what makes of a gathered parameter the tensor subclass that the model uses.
    ``batch``: placeholders whose first dimension is the batch's, where XLA divides the graph. ``extensions``: parameter
    → the tensor extension that makes it of its shard, if any."""

    shards: dict[fx.Node, tuple[ParameterSpec, Any]] = field(default_factory=dict)
    as_used: dict[fx.Node, Callable[[Any], Any]] = field(default_factory=dict)
    batch: frozenset[fx.Node] = frozenset()
    extensions: Mapping[str, nn.Module] = field(default_factory=dict)


@dataclass
class PassContext:
    """Holds what passes are given beyond the graph, one per capture. What they find is in the graphs.

    ``model``: the parameters, buckets and groups of ranks. ``reshard_after_forward``: the option of ``compile``.
    ``plan``: what the ranks have decided for graphs of this kind; passes keep to it, or decide and write it down.
    ``cost``: seconds of nodes and collectives; None where there is no description of the hardware.
    ``settings``: what the user has changed since the model was compiled. ``inputs``: those of Dynamo's graph.
    ``forward_outputs``: number of outputs of the forward graph that are the user's; saved tensors follow.
    ``sharing``: buckets that pieces of one forward call hand to each other.
    ``budget``: most bytes of gathered parameters at any point, which the schedule must keep to; None for no limit.
    ``step_nbytes``: what a step holds at its peak before it is scheduled, once asked for (``analysis/room.py``).
    ``graphs``: those that passes have gone over. ``stages``: per phase, what the report shows of passes that have run.
    """

    model: ModelSpec
    reshard_after_forward: bool | Literal["auto"] | None = None
    plan: Plan = field(default_factory=Plan)
    cost: CostModel | None = None
    settings: Settings = field(default_factory=Settings)
    inputs: CaptureInputs = field(default_factory=CaptureInputs)
    forward_outputs: int = 0
    sharing: Sharing = field(default_factory=Sharing)
    budget: int | None = None
    step_nbytes: int | None = None
    graphs: dict[Phase, Graph] = field(default_factory=dict)
    stages: dict[Phase, dict[str, Stage]] = field(default_factory=lambda: {phase: {} for phase in PHASES})

    def bucket_of(self, parameter: str) -> BucketSpec:
        return self.model.bucket_of[parameter]


class GraphPass:
    """A pass is one rewrite or reordering with a single job.

    Subclasses set ``name``, the ``phases`` that they run in (or one ``phase``), the facts that they ``requires`` and
    ``provides`` of the graph, and implement ``run``, which edits the graph and may return one line on what it changed.
    """

    name: str = ""
    phase: str | None = None
    phases: Collection[str] = ("forward", "backward", "inference")
    requires: Collection[str] = ()
    provides: Collection[str] = ()

    def run(self, graph: Graph, context: PassContext) -> str | None:
        raise TypeError(f"{type(self).__name__} is a GraphPass without run(graph, context); define it")

    def runs_in(self) -> tuple[str, ...]:
        """Return the phases that the object sets by ``phase`` or ``phases``, or else its class, or else a base of it.

        Raises:
            PipelineError: both are set in one place, and differ.
        """
        places = (vars(self), *map(vars, type(self).__mro__))
        place = next(p for p in places if p.get("phase") is not None or p.get("phases") is not None)
        phase, phases = place.get("phase"), place.get("phases")
        if phase is None:
            return strings_of(self, "phases", phases)
        if not isinstance(phase, str):
            known = ", ".join(PHASES)
            raise PipelineError(f"{self}: phase must be one of {known}, got {phase!r}; set phases to name several")
        if phases is not None and set(strings_of(self, "phases", phases)) != {phase}:
            raise PipelineError(f"{self} sets phase to {phase!r} and phases to {phases!r}; set one of them")
        return (phase,)

    def arrange(self, model: ModelSpec, cost: CostModel | None) -> ModelSpec:
        """Return the model with the buckets that the pass wants, before anything is traced."""
        return model

    def __repr__(self) -> str:
        """Show the pass with its options, the attributes that are plain values: this is what ranks compare."""
        options = (f"{key}={value!r}" for key, value in sorted(vars(self).items()) if _is_plain(value))
        return f"{type(self).__qualname__}({', '.join([repr(self.name), *options])})"

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def as_compared(p: GraphPass) -> str:
    """Return what ranks compare of a pass: its repr, but for that which a dataclass gets, where the order of sets and
    the addresses of objects are each process's own."""
    made = getattr(type(p), "__dataclass_params__", None)
    return GraphPass.__repr__(p) if made is not None and made.repr else repr(p)


def strings_of(p: GraphPass, attribute: str, value: object) -> tuple[str, ...]:
    """Return a pass's collection of strings as a tuple. Raises PipelineError on anything else, one string too."""
    if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(v, str) for v in value):
        hint = f"; write ({value!r},)" if isinstance(value, str) else ""
        raise PipelineError(f"{p}: {attribute} must be a set, tuple or list of strings, got {value!r}{hint}")
    return tuple(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, enum.Enum))
