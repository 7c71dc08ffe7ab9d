"""What a pass is, and what it is given: the pass's contract, and the context of one capture."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import fx, nn

from graph_fsdp.passes.ir.agreed_order import Plan
from graph_fsdp.passes.ir.graph import Graph, Phase
from graph_fsdp.passes.ir.settings import Settings
from graph_fsdp.passes.ir.spec import BucketSpec, ModelSpec, ParameterSpec
from graph_fsdp.passes.ir.stage import Stage

if TYPE_CHECKING:
    from graph_fsdp.passes.analysis.cost import CostModel

PHASES: tuple[Phase, ...] = ("capture", "joint", "forward", "backward", "inference")
# What a graph of each phase is before any pass of that phase has run.
GIVEN: dict[Phase, frozenset[str]] = {
    "capture": frozenset({"captured"}),
    "joint": frozenset({"traced"}),
    "forward": frozenset({"traced", "annotated", "partitioned"}),
    "backward": frozenset({"traced", "annotated", "partitioned"}),
    "inference": frozenset({"traced"}),
}


class PipelineError(ValueError):
    """A pipeline whose contracts do not hold, or an edit of a pass that it does not have."""


class PassError(RuntimeError):
    """A pass raised. Says which, on which graph; the pass's own error is the cause."""

    def __init__(self, message: str, pass_name: str = "", phase: str = "") -> None:
        super().__init__(message)
        self.pass_name, self.phase = pass_name, phase


@dataclass(frozen=True)
class Sharing:
    """Names of buckets. ``kept``: those that the piece keeps for backward, in the order in which that receives them."""

    takes: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset()
    kept: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.takes or self.gives)

    def key(self) -> str:
        """Equal on all ranks that share alike."""
        return f"takes {sorted(self.takes)} gives {sorted(self.gives)}"


@dataclass
class PassContext:
    """What passes may know beyond the graph. One per capture.

    ``plan``: what the ranks have decided for graphs of this kind; passes keep to it, or decide and write it down.
    ``cost``: seconds of nodes and collectives; None where there is no description of the hardware.
    ``settings``: what the user has changed since the model was compiled.
    ``shard_inputs`` (capture phase): placeholder → parameter and the fake value of its padded shard.
    ``as_used`` (capture phase): placeholder → what makes of the gathered parameter the kind of tensor that the model
    uses, where that is no plain one.
    ``batch_inputs`` (capture phase): placeholders whose first dimension is the batch's, where XLA divides the graph.
    ``forward_outputs``: number of outputs of the forward graph that are the user's; saved tensors follow.
    ``tangents``: which placeholders of the joint graph are gradients of outputs.
    ``budget``: most bytes of gathered parameters at any point, which the schedule must keep to; None for no limit.
    ``kept``: bucket → forward's node of the buffer that stays gathered for backward.
    ``kept_shards``: bucket → forward's node of the shard that backward gathers over a smaller group.
    ``slots``: bytes of each slot that the graph's gathered buffers lie in, once they are assigned.
    ``extensions``: parameter → what makes it of its shard, where that is a tensor extension.
    ``reduced``: parameters whose gradients the joint graph reduces.
    ``absent``: the runtime's ``AbsentGradients``, where a loss may leave outputs out with parameters of their own.
    ``unsharded``: per phase, the parameters that are inputs of the graph, whole, behind its other inputs.
    ``sharing``: buckets that pieces of one forward call hand to each other; ``taken``, ``given``: those of this graph.
    ``recomputes_activations``: whether backward does, by the user's checkpoints or by an option.
    ``offloaded``: place among the saved tensors → forward's node of the copy on the CPU that backward receives.
    ``activation_memory_budget``: what the partitioner may save for backward, from 0, inputs only, to 1, all it wants.
    """

    model: ModelSpec
    reshard_after_forward: bool | Literal["auto"] | None = None
    plan: Plan = field(default_factory=Plan)
    cost: CostModel | None = None
    settings: Settings = field(default_factory=Settings)
    shard_inputs: dict[fx.Node, tuple[ParameterSpec, Any]] = field(default_factory=dict)
    as_used: dict[fx.Node, Callable[[Any], Any]] = field(default_factory=dict)
    batch_inputs: frozenset[fx.Node] = frozenset()
    forward_outputs: int = 0
    extensions: Mapping[str, nn.Module] = field(default_factory=dict)
    tangents: slice = field(default_factory=lambda: slice(0, 0))
    reduced: frozenset[str] = frozenset()
    absent: Any = None
    recomputes_activations: bool = False
    offloaded: dict[int, fx.Node] = field(default_factory=dict)
    activation_memory_budget: float = 1.0
    budget: int | None = None
    kept: dict[str, fx.Node] = field(default_factory=dict)
    kept_shards: dict[str, fx.Node] = field(default_factory=dict)
    slots: dict[Phase, tuple[int, ...]] = field(default_factory=dict)
    unsharded: dict[Phase, list[str]] = field(default_factory=dict)
    sharing: Sharing = field(default_factory=Sharing)
    taken: list[str] = field(default_factory=list)
    given: dict[str, fx.Node] = field(default_factory=dict)
    facts: dict[Phase, frozenset[str]] = field(default_factory=lambda: dict(GIVEN))
    collectives: dict[Phase, list[tuple[str, str]]] = field(default_factory=dict)
    stages: dict[Phase, dict[str, Stage]] = field(default_factory=lambda: {phase: {} for phase in PHASES})

    def bucket_of(self, parameter: str) -> BucketSpec:
        return self.model.bucket_of[parameter]


class GraphPass:
    """One rewrite or reordering with a single job.

    Subclasses set ``name``, the ``phases`` that they run in (or one ``phase``), the facts that they ``requires`` and
    ``provides`` of the graph, and implement ``run``, which edits the graph and may return one line on what it changed.
    """

    name: str = ""
    phase: str | None = None
    phases: Collection[str] = ("forward", "backward", "inference")
    requires: Collection[str] = ()
    provides: Collection[str] = ()

    def run(self, graph: Graph, context: PassContext) -> str | None:
        raise TypeError(f"{type(self).__name__} is a GraphPass without run(graph, context)")

    def runs_in(self) -> tuple[str, ...]:
        """The phases, as ``phase`` or ``phases`` say: what the object sets, or else its class, or else a base of it.

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
            raise PipelineError(f"{self!r}: phase must be one of {known}, got {phase!r}; set phases to name several")
        if phases is not None and set(strings_of(self, "phases", phases)) != {phase}:
            raise PipelineError(f"{self!r} sets phase to {phase!r} and phases to {phases!r}; set one of them")
        return (phase,)

    def arrange(self, model: ModelSpec, cost: CostModel | None) -> ModelSpec:
        """Before anything is traced: the model with other buckets, in which the shards then lie in storage."""
        return model

    def settings(self) -> str:
        """What ranks compare: the pass with its options."""
        return repr(self)

    def __repr__(self) -> str:
        """The pass with its options: attributes that are plain values, but for the contract."""
        options = {key: value for key, value in sorted(vars(self).items()) if key not in _CONTRACT and _is_plain(value)}
        return f"{type(self).__name__}({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in options.items())])})"


_CONTRACT = frozenset({"name", "phase", "phases", "requires", "provides"})


def strings_of(p: GraphPass, attribute: str, value: object) -> tuple[str, ...]:
    """A pass's collection of strings. One string is a collection of letters, and never what was meant."""
    if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(v, str) for v in value):
        hint = f"; write ({value!r},)" if isinstance(value, str) else ""
        raise PipelineError(f"{p!r}: {attribute} must be a set, tuple or list of strings, got {value!r}{hint}")
    return tuple(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, enum.Enum))
