"""Choose in the joint graph which activations of units are saved for backward, and which are computed again.

The pass writes the tags that ``torch.utils.checkpoint`` leaves under torch.compile, per call of a unit
(``unit_calls.py``), and the partitioner follows them. Three policies:

- ``"unit"``: all of a unit is recomputed. Saved is what it reads from outside (besides parameters) and what others read
  of it.
- ``"selective"``, or a collection of operators: likewise, but the results of these operators are saved.
- a number: the partitioner chooses, within this part of the memory between saving inputs only (0) and what it saves by
  itself (1). What goes between units and random numbers are saved.

Tags follow from the traced graph alone, and the partitioner's choice does not decide what backward gathers
(``recompute.py``): ranks do alike. Reasons: *Activation checkpointing* and *Memory budget of activations* in
docs/decisions/memory.md.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from graph_fsdp.compat import CheckpointPolicy, HigherOrderOperator, OpOverload, OpOverloadPacket
from graph_fsdp.passes.analysis.kernels import has_tensor, packet
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.effects import is_random, mutated_inputs
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.recurrent import recurrent_layer
from graph_fsdp.passes.ir.settings import check_flags
from graph_fsdp.passes.ir.unit_calls import unit_calls
from graph_fsdp.passes.pipeline import PassPipeline
from graph_fsdp.passes.transforms.edits import computed_of_constants, reached_from
from graph_fsdp.passes.transforms.offload_activations import OffloadActivations, SaveBases
from graph_fsdp.passes.transforms.recompute import forward_nodes, is_of_parameters, save, tag

Operator: TypeAlias = Any  # OpOverload, OpOverloadPacket or HigherOrderOperator
Recompute: TypeAlias = Literal["unit", "selective"] | float | Collection[Operator] | None

_OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)
_ACCEPTED = (
    "'unit' (computed again, per unit), 'selective' (all but matrix multiplications and attention), 'offload' (copied "
    "to the CPU), a collection of operators that are saved, such as [torch.ops.aten.mm], a memory budget from 0 to 1, "
    "or a graph_fsdp.ActivationCheckpointing"
)
_SMALLEST_BUDGET = 1e-6  # at 0 itself the partitioner saves nothing but inputs, whatever is tagged

aten = torch.ops.aten
# What costs most to compute again: matrix multiplications, convolutions, recurrent layers and attention.
_ATTENTION = ("_flash_attention_forward", "_efficient_attention_forward", "flex_attention")
_SELECTED = (
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm, aten.convolution),
    recurrent_layer.overloadpacket,
    *(getattr(aten, name) for name in dir(aten) if name.startswith("_scaled_dot_product_") or name in _ATTENTION),
)


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Says what becomes of the activations that units save for backward. ``torch.utils.checkpoint`` in the model works
    with it, and alone.

    recompute: ``"unit"`` saves only the inputs of each unit but the root, and recomputes the rest in backward.
    ``"selective"`` also saves the results of matrix multiplications, convolutions and attention; a collection of
    operators (OpOverload, OpOverloadPacket or HigherOrderOperator), such as ``[torch.ops.aten.mm]``, theirs instead. A
    number from 0 to 1 is the partitioner's memory budget, as a part of what it saves by itself. With None it chooses.

    offload: what is saved is copied to the CPU after its last use in forward, and back before backward uses it. The
    unit that backward needs first stays.

    Raises:
        ValueError, TypeError: ``recompute`` or ``offload`` is none of these.
    """

    recompute: Recompute = "unit"
    offload: bool = False

    def __post_init__(self) -> None:
        check_flags(offload=self.offload)
        if isinstance(self.recompute, Collection) and not isinstance(self.recompute, str):
            in_one_order = sorted(self.recompute, key=str)  # that of a set is each process's own
            object.__setattr__(self, "recompute", tuple(in_one_order))
        if (wrong := _what_is_wrong(self.recompute)) is not None:
            kind, what = wrong
            raise kind(f"activation_checkpointing: {what}; pass {_ACCEPTED}")

    @classmethod
    def of(cls, value: Any) -> ActivationCheckpointing | None:
        """Make one of the option of ``compile``; None of None. Raises as the constructor does."""
        if value is None or isinstance(value, ActivationCheckpointing):
            return value
        return cls(None, offload=True) if isinstance(value, str) and value == "offload" else cls(value)


def _what_is_wrong(recompute: Any) -> tuple[type[Exception], str] | None:
    if recompute is None or (isinstance(recompute, str) and recompute in ("unit", "selective")):
        return None
    if isinstance(recompute, (int, float)) and not isinstance(recompute, bool):
        in_range = 0 <= recompute <= 1  # and not NaN
        return None if in_range else (ValueError, f"a memory budget lies between 0 and 1, got {recompute!r}")
    if isinstance(recompute, str):
        return ValueError, f"there is no {recompute!r}"
    if not isinstance(recompute, tuple):
        return TypeError, f"got {recompute!r}"
    if not recompute:
        return ValueError, "the collection of operators is empty"
    strangers = [op for op in recompute if not isinstance(op, _OPERATORS)]
    return (TypeError, f"the collection holds {strangers[0]!r}, which is no operator") if strangers else None


@dataclass(frozen=True, repr=False)
class CheckpointActivations(GraphPass):
    """Tags the joint graph. ``recompute``: as in :class:`ActivationCheckpointing`, without None."""

    recompute: Recompute = "unit"

    name = "activation_checkpointing"
    phases = ("joint",)
    requires = ("recompute_tagged",)
    provides = ("activations_tagged",)

    def __post_init__(self) -> None:
        given = ActivationCheckpointing(self.recompute).recompute
        if given is None:
            raise ValueError("CheckpointActivations: recompute must not be None; leave the pass out")
        object.__setattr__(self, "recompute", given)

    def __repr__(self) -> str:
        """Say what ranks compare: operators by their names, in an order that all ranks have in common."""
        names = map(str, self.recompute) if isinstance(self.recompute, tuple) else [repr(self.recompute)]
        return f"{type(self).__qualname__}({self.name!r}, recompute={', '.join(sorted(names))})"

    def run(self, graph: Graph, context: PassContext) -> str | None:
        graph.recomputes_activations = True
        joint = _Joint(graph, context)
        if isinstance(self.recompute, (int, float)):
            return _within_budget(self.recompute, joint)
        saved = [node for node in joint.calls if self._is_saved(node)]
        if isinstance(self.recompute, tuple) and joint.calls and not saved:
            called = sorted({str(node.target) for node in joint.calls if node.target is not operator.getitem})
            warnings.warn(
                f"activation_checkpointing: no unit calls any of {', '.join(map(str, self.recompute))}, so that all of "
                f"each unit is computed again; what units call: {', '.join(called)}",
                stacklevel=2,
            )
        ids = [n.meta["ac_graph_id"] for n in graph.nodes if "ac_graph_id" in n.meta and n not in joint.of_parameters]
        first_id = max(ids, default=0) + 1
        tagged = 0
        for node, call in joint.calls.items():
            node.meta["ac_graph_id"] = first_id + call.index
            if node.target is operator.getitem:  # as what it is an element of
                continue
            # Not what writes, and no collective of the user's: all ranks would run it a second time.
            once = mutated_inputs(node) or getattr(node.target, "namespace", "") in ("_c10d_functional", "c10d")
            if node.meta.get("recompute") is not CheckpointPolicy.MUST_SAVE and not once:
                tag(node, CheckpointPolicy.MUST_RECOMPUTE)
                tagged += 1
        for node in (*saved, *joint.borders()):
            save(node)
        calls = len(set(joint.calls.values()))
        return f"{tagged} nodes of {calls} calls of units are recomputed in backward, {len(saved)} of them saved"

    def _is_saved(self, node: fx.Node) -> bool:
        if self.recompute == "selective":
            return packet(node) in _SELECTED or str(node.target) in _ATTENTION
        return isinstance(self.recompute, tuple) and not {node.target, packet(node)}.isdisjoint(self.recompute)


def _within_budget(budget: float, joint: _Joint) -> str:
    joint.graph.activation_memory_budget = max(float(budget), _SMALLEST_BUDGET)
    random = [node for node in joint.graph.nodes if node in joint.forward and is_random(node)]
    found = dict.fromkeys([*joint.borders(), *random])
    kept = [node for node in found if "recompute" not in node.meta]  # by torch.utils.checkpoint
    for node in kept:
        save(node)
    return f"the partitioner chooses within {budget:g} of the activations; {len(kept)} nodes not recomputed"


def with_activation_checkpointing(pipeline: PassPipeline, policy: ActivationCheckpointing) -> PassPipeline:
    """Return the pipeline with the passes that carry out ``policy``, behind the one that provides ``recompute_tagged``.

    Raises:
        ValueError: it has such a pass already, or no place for one.
    """
    tagging = [p.name for p in pipeline if not {"recompute_tagged", "activations_tagged"}.isdisjoint(p.provides)]
    freeing = next(p.name for p in pipeline if "freed" in p.provides)  # every pipeline has one
    if not tagging:
        raise ValueError(
            "activation_checkpointing needs a pass that provides 'recompute_tagged', and passes has none; give it a "
            "pipeline that has one, as default_pipeline() has"
        )
    new: list[GraphPass] = [CheckpointActivations(policy.recompute)] if policy.recompute is not None else []
    new += [SaveBases(), OffloadActivations()] if policy.offload else []
    for p in new:
        if any(p.name == other.name for other in pipeline):
            raise ValueError(
                f"activation_checkpointing is given, and passes has a pass {p.name!r} already; leave one of the two out"
            )
    for p in reversed(new):  # each in front of those that are there already
        in_joint = "joint" in p.phases
        pipeline = pipeline.insert_after(tagging[-1], p) if in_joint else pipeline.insert_before(freeing, p)
    return pipeline


def with_torchs_budget(pipeline: PassPipeline, budget: float) -> PassPipeline:
    """Return the pipeline with a budget that was set for ``torch.compile`` and not here: its partitioner alone would
    let backward draw other random numbers than forward. A pipeline that checkpoints activations has its own.

    Raises:
        ValueError: the budget is none, or the pipeline has no place for the pass.
    """
    if budget == 1 or any(isinstance(p, CheckpointActivations) for p in pipeline):
        return pipeline
    try:
        return with_activation_checkpointing(pipeline, ActivationCheckpointing(budget))
    except ValueError as error:
        setting = f"torch._functorch.config.activation_memory_budget={budget!r}"
        raise ValueError(f"{setting} is taken as activation_checkpointing={budget!r}: {error}") from None


class _Joint:
    """Describes a joint graph. ``computed``: operators that read more than parameters and constants. ``calls``: those
    of them that need no gradients → the call of a unit they belong to."""

    def __init__(self, graph: Graph, context: PassContext) -> None:
        self.graph, nodes = graph, graph.nodes
        self.of_gradients = reached_from(graph, graph.with_role(Role.TANGENT))
        self.forward = forward_nodes(graph, context)
        # Gathers and what is computed of parameters alone: the pass before this one has tagged them.
        self.of_parameters = {n for n in nodes if has_role(n, Role.GATHER) or is_of_parameters(n)}
        # What is made of nothing is made again, or not, as the partitioner likes. (Equal ones of several units are one
        # by then, and tags of different units would have it saved.)
        constants = computed_of_constants(nodes, _is_pure)
        left_out, calls = self.of_parameters | constants, unit_calls(graph, context.model)
        self.computed = [n for n in nodes if n.op == "call_function" and n not in left_out and has_tensor(n)]
        without_gradients = [n for n in self.computed if n not in self.of_gradients]
        self.calls = {n: calls[n] for n in without_gradients if n in calls}
        for node in without_gradients:  # what backward computes of a unit's activations alone, for its gradients
            of = {self.calls[source] for source in node.all_input_nodes if source in self.calls}
            if node not in self.forward and node not in self.calls and len(of) == 1:
                self.calls[node] = of.pop()

    def borders(self) -> list[fx.Node]:
        """Find what forward computes in one call, or outside of units, and a unit or the root reads elsewhere."""
        found = []
        for node in self.computed:
            if node in self.forward:
                own = self.calls.get(node)
                given = own is not None and self.graph.output in node.users
                if given or any(self.calls.get(user) != own and user in self.forward for user in node.users):
                    found.append(node)
        return found


def _is_pure(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_random(node) and not mutated_inputs(node)
