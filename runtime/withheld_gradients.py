"""Some gradients are withheld from autograd: those that are kept until they are reduced, and those that are absent.

A kept gradient was not reduced by its graph: a whole one, or a shard that replicas have not seen yet. It belongs to the
model, and the next graph that reduces adds it to its own. It has the reduction's dtype, as in FSDP2, so that sums have
the same bits. An absent gradient is None because the loss leaves outputs out, as in plain autograd and FSDP2.

[Note: outputs that the loss leaves out]
AOTAutograd gives backward zeros for the gradients of unused outputs, so parameters that only those depend on would
get zeros, and an optimizer with weight decay would move them. A prehook on the autograd node that runs a graph's
backward sees None in their places; gradients computed from zeros alone are then returned as None. Which gradients
these can be is read off the joint graph, before buckets tie their reductions together. Ranks may use different outputs,
and agree in an all-reduce of bytes on what no rank has (docs/decisions/gradients.md, "Absent gradients").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.effects import aliased_inputs
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import argument, operand
from graph_fsdp.passes.transforms.bucket import is_unsynced
from graph_fsdp.runtime.ranks import lockstep


@dataclass(frozen=True)
class KeepPlan:
    """Holds the static part of an ``accumulate_grad``. With ``reduced``, it keeps a shard, reduced over the ranks that
    shard; with ``owned``, nothing else uses the gradient's memory."""

    param: str
    dtype: torch.dtype
    reduced: bool
    owned: bool


@dataclass
class KeptGradients:
    """Holds kept gradients by parameter and whether they are reduced shards, what takes the mean of a bucket's reduced
    ones over replica groups, in place (given with the first bucket of a program what all of it are, else ""), hooks on
    reduced ones by unit, by parameter what steps it in backward, given gradients of shards by name, and what says
    whether the backward under way is one of a parameter: others neither keep nor take what is kept, and do not step.
    ``due`` has what some rank may keep, and so the same on all ranks: what one's loss leaves out, another's may not.
    ``takes_all`` is set while no backward but ``finalize_backward`` takes."""

    gradients: dict[tuple[str, bool], Tensor] = field(default_factory=dict)
    due: set[tuple[str, bool]] = field(default_factory=set)
    takes_all: bool = False
    mean_over_groups: Callable[[str, Tensor], None] = lambda of_all, reduced: None
    hooks: dict[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    updates: dict[str, Callable[[dict[str, Tensor]], None]] = field(default_factory=dict)
    wanted: Callable[[str], bool] = lambda param: True

    def __bool__(self) -> bool:
        return bool(self.due)

    @property
    def nbytes(self) -> int:
        return sum(g.nbytes for g in self.gradients.values())

    def add(self, plan: KeepPlan, grad: Tensor) -> None:
        if not self.wanted(plan.param):
            return
        key = plan.param, plan.reduced
        self.due.add(key)
        if (kept := self.gradients.get(key)) is not None:
            _add(kept, grad)
        elif plan.owned and grad.dtype is plan.dtype and grad.is_contiguous():
            self.gradients[key] = grad.detach()
        else:
            self.gradients[key] = grad.detach().to(plan.dtype, copy=True, memory_format=torch.contiguous_format)

    def update(self, gradients: dict[str, Tensor]) -> None:
        """Step the parameters that have these gradients, those of one optimizer at once."""
        together: dict[Callable[[dict[str, Tensor]], None], dict[str, Tensor]] = {}
        for name, grad in gradients.items():
            if not self.wanted(name):
                continue
            together.setdefault(self.updates[name], {})[name] = grad
        for step, members in together.items():
            step(members)

    def added_to(self, grads: Any, params: tuple[str, ...], begins: tuple[int, ...]) -> Any:
        """Add what is kept to ``grads``, which are about to be reduced: a list of whole gradients, or, with ``begins``,
        a flat shard, which is changed."""
        if begins:
            for name, begin in zip(params, begins, strict=True):
                if (kept := self._taken(name, True)) is not None:
                    grads[begin : begin + kept.numel()].add_(kept.view(-1))
            return grads
        found = [self._taken(name, False) for name in params]
        return [g if kept is None else _add(kept, g) for g, kept in zip(grads, found, strict=True)]

    def _taken(self, name: str, reduced: bool) -> Tensor | None:
        if not self.takes_all and not self.wanted(name):
            return None
        self.due.discard((name, reduced))
        return self.gradients.pop((name, reduced), None)

    def clear(self) -> None:
        """Give up all gradients that are kept."""
        self.gradients.clear()
        self.due.clear()


def _add(kept: Tensor, grad: Tensor) -> Tensor:
    return kept.add_(grad.to(kept.dtype) if compat.REDUCES_IN_OWN_DTYPE else grad)  # as FSDP2: rounded twice, or once


def keep_plan(node: fx.Node, owned: frozenset[fx.Node]) -> KeepPlan:
    source = operand(node)
    while aliased := aliased_inputs(source):
        source = aliased[0]
    reduced = has_role(source, Role.REDUCE_START)
    return KeepPlan(argument(node, "param"), argument(node, "reduce_dtype"), reduced, node in owned)


def owned_gradients(graph: Graph) -> frozenset[fx.Node]:
    """Return the ``accumulate_grad`` nodes whose gradient fills memory of its own, which nothing uses after them."""
    nodes = graph.with_role(Role.ACCUMULATE)
    if not nodes:
        return frozenset()
    roots = graph.alias_roots()
    last_use: dict[fx.Node, fx.Node] = {}
    for node in graph.fx_graph.nodes:
        last_use.update({root: node for source in node.all_input_nodes for root in roots[source]})
    taken: set[fx.Node] = set()
    owned = set()
    for node in nodes:
        grad = operand(node)
        (root, *others) = roots[grad]
        value = root.meta.get("val")
        fills = root.op == "call_function" and root.target not in dialect.EXECUTED and isinstance(value, Tensor)
        whole = fills and value is not None and not others and value.shape == grad.meta["val"].shape
        if whole and last_use[root] is node and root not in taken:
            owned.add(node)
        taken.add(root)
    return frozenset(owned)


class AbsentGradients:
    """The gradients that the backward of one graph may leave out.

    Args:
        tangents: place of such a gradient among all → a bit for each tangent that it is computed of.
        parameters: its place → the name of the sharded parameter that it belongs to, "" for another input.
        given: the tangents.

    ``used`` has a bit for each tangent that is given in the next run.
    """

    def __init__(
        self,
        tangents: dict[int, int],
        parameters: dict[int, str],
        given: Sequence[fx.Node],
        context: PassContext,
        kept: KeptGradients,
    ) -> None:
        self.tangents, self.parameters, self.kept = tangents, parameters, kept
        self.device: torch.device = given[0].meta["val"].device
        self.number_of_tangents, model = len(given), context.model
        self._tangents: Sequence[int | None] | None = None  # per output of autograd's node, which one is its gradient
        # Process groups that gradients are reduced in, one after the other.
        self._groups = list(model.mesh.groups) if model.mesh.ranks > 1 else []
        # What this graph keeps and does not reduce.
        named = [index for index, name in parameters.items() if name]
        self._unsynced = [i for i in named if is_unsynced(model.parameters[parameters[i]], context)]
        self._agreed = [i for i in named if i not in set(self._unsynced)] if self._groups else []
        self._own = tangents.keys() - {*self._unsynced, *self._agreed}
        self.used = self._all = (1 << self.number_of_tangents) - 1

    @property
    def agrees_on(self) -> tuple[str, ...]:
        return tuple(self.parameters[index] for index in self._agreed)

    def watching(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``run``, which AOTAutograd has just made, to see which outputs have a gradient when backward runs."""
        self._tangents = compat.tangents_of_outputs(self.number_of_tangents)
        if self._tangents is None:
            return run

        def call(*args: Any) -> Any:
            outputs = run(*args)
            if torch.is_grad_enabled():
                given = {value.grad_fn for value in args if isinstance(value, Tensor)}
                node = next((found for o in outputs if (found := _node_of(o, given)) is not None), None)
                if node is not None:
                    compat.hook_before(node, self._note)
            return outputs

        return call

    def _note(self, gradients: Sequence[Tensor | None]) -> None:
        pairs = zip(gradients, self._tangents or (), strict=True)
        self.used = sum({1 << tangent for gradient, tangent in pairs if gradient is not None and tangent is not None})

    def run(self, program: Callable[..., Any], args: list[Any]) -> Any:
        """Run ``program``, the backward, and return None for the gradients that no rank has."""
        used, self.used = self.used, self._all
        lacking = {index for index, bits in self.tangents.items() if not bits & used}
        agreement = self._start_agreement(lacking) if self._agreed else set[int]
        before = {i for i in lacking.intersection(self._unsynced) if self._is_kept(i)}
        outputs = list(program(args))
        for index in lacking.intersection(self._unsynced) - before:
            self.kept.gradients.pop((self.parameters[index], False), None)
        for index in lacking.intersection(self._own) | agreement():
            outputs[index] = None
        return outputs

    def _start_agreement(self, lacking: set[int]) -> Callable[[], set[int]]:
        """Start the all-reduce that finds the gradients which no rank has. Call what is returned on all ranks: it
        waits, and returns them; only on a rank that lacks some does it read the device."""
        lacks = {i for i in self._agreed if i in lacking and not self._is_kept(i)}
        has = torch.ones(len(self._agreed), dtype=torch.uint8, device=self.device)  # the host waits for no copy
        for place in (place for place, i in enumerate(self._agreed) if i in lacks):
            has[place] = 0

        def start(group: str) -> Any:
            return dist.all_reduce(has, dist.ReduceOp.MAX, group=compat.resolve_group(group), async_op=True)

        first, *others = self._groups
        work = start(first)

        def absent() -> set[int]:
            lockstep.finish(work, self.device)
            for group in others:
                lockstep.finish(start(group), self.device)
            if not lacks:
                return set()
            return {index for index, any_has in zip(self._agreed, has.tolist(), strict=True) if not any_has}

        return absent

    def _is_kept(self, index: int) -> bool:
        name = self.parameters[index]
        return (name, False) in self.kept.gradients or (name, True) in self.kept.gradients


def find_absent(joint: Graph, context: PassContext, kept: KeptGradients) -> AbsentGradients | None:
    """Find, where AOTAutograd divides a joint graph, the gradients that may be absent. None where each is computed of
    every tangent or of none. Linear in the graph."""
    given = joint.with_role(Role.TANGENT)
    bits: dict[fx.Node, int] = {node: 1 << index for index, node in enumerate(given)}
    names: dict[fx.Node, str] = {}  # of what is computed of a reduction: the parameter's
    for node in joint.fx_graph.nodes:
        if node.op == "placeholder":
            continue
        for source in node.all_input_nodes:
            if source in bits:
                bits[node] = bits.get(node, 0) | bits[source]
                names[node] = names.get(node) or names.get(source, "")
        if node in bits and has_role(node, Role.REDUCE):
            names[node] = node.meta["fsdp"].params[0]
    gradients = enumerate(joint.outputs[context.forward_outputs :])
    all_bits = (1 << len(given)) - 1
    found = {i: node for i, node in gradients if isinstance(node, fx.Node) and bits.get(node, 0) not in (0, all_bits)}
    if not found:
        return None
    tangents = {index: bits[node] for index, node in found.items()}
    parameters = {index: names.get(node, "") for index, node in found.items()}
    return AbsentGradients(tangents, parameters, given, context, kept)


def _node_of(output: Any, given: set[Any]) -> Any:
    """Return the autograd node that runs the backward of the graph which gave ``output``: its own, or the one before
    where ``output`` is a view that AOTAutograd made behind the graph. ``given`` are the nodes of the graph's inputs."""
    node = output.grad_fn if isinstance(output, Tensor) else None
    while node is not None and node not in given:
        if compat.is_compiled_backward(node):
            return node
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return None
