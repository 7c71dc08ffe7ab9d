"""torch's own scheduler on our graphs: ``torch._inductor.fx_passes.overlap_scheduling.schedule_overlap_bucketing``.

torch's pass works on functional collectives, ours on the dialect. So a graph as it is before our bucket pass (one
``gather_param`` or ``reduce_grad`` per parameter) is lowered to what SimpleFSDP traces: per parameter an all-gather
right before its first use, a reduce-scatter right after its gradient. torch's pass buckets and orders that, and the
result is raised to the dialect again, in torch's order, so that one clock and one count of bytes serve both.

The pass asks for a GPU in two places, and gets our cost model in both:

- each node's roofline time: ``estimate_roofline_runtime_ms`` ends in ``get_gpu_dram_gbps``, which asks Triton's driver
  (``ModuleNotFoundError: No module named 'triton'`` in a build without), even where ``custom_runtime_estimation`` is
  given; and which nodes are compute worth hiding behind: those with a FLOP formula, which attention on CPU lacks
  before torch 2.15;
- with ``compute_estimator="benchmark"``, its default, it times kernels; ``"analytical"`` does not.

What torch adds for its buckets (casts, concatenations, splits that copy) counts as no compute and no time, as packing
and unpacking of our own buckets do. The process group must exist; a fake one does.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection
from typing import Any, cast
from unittest import mock

import torch
from torch import fx

from graph_fsdp.passes import CostModel, Graph, Role, Stage, Timeline, simulate
from graph_fsdp.passes.analysis import kernels
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, set_record
from graph_fsdp.passes.ir.graph import Phase, nbytes

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional
GATHERS = {c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_out.default}
MEGABYTE = 2**20


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """``packing``: nodes that torch added for its buckets."""

    graph: Graph
    packing: frozenset[fx.Node]

    def simulate(self, cost: CostModel) -> Timeline:
        return simulate(self.graph, _WithoutPacking(cost, self.packing))


def schedule_by_torch(stage: Stage, cost: CostModel, world_size: int, **options: Any) -> Scheduled:
    """The graph of a stage before the bucket pass, scheduled by torch with our cost model's seconds.

    ``options`` are those of ``schedule_overlap_bucketing``; torchtitan sets ``collective_bucketing=True``.
    """
    from torch._inductor.fx_passes import overlap_scheduling

    module, phase = fx.GraphModule(stage.owner, _copy(stage.graph)), cast(Phase, stage.phase)
    graph = Graph(module, phase)
    ours = set(graph.nodes)
    seconds = cost.graph_seconds(graph)
    group = _lower(graph, world_size)
    formulas = mock.patch.dict(torch.utils.flop_counter.flop_registry, kernels.CPU_ATTENTION_FORMULAS)

    def milliseconds(node: fx.Node, override_nbytes: int | None = None) -> float:
        if node.target in GATHERS:
            return 1e3 * cost.all_gather_seconds(override_nbytes or nbytes(node.meta["val"]), group)
        if node.target is c10d.reduce_scatter_tensor.default:
            full = override_nbytes or nbytes(node.all_input_nodes[0].meta["val"])
            return 1e3 * cost.all_gather_seconds(full, group)  # as long as an all-gather of as much
        return 1e3 * seconds.get(node, 0.0)

    with formulas, mock.patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", milliseconds):
        module = overlap_scheduling.schedule_overlap_bucketing(
            module,
            custom_runtime_estimation=milliseconds,
            compute_estimator="analytical",
            **options,
        )
    _raise(graph := Graph(module, phase), group)
    return Scheduled(graph, frozenset(n for n in graph.nodes if n not in ours and n.target not in dialect.EXECUTED))


class _WithoutPacking(CostModel):
    def __init__(self, cost: CostModel, packing: Collection[fx.Node]) -> None:
        super().__init__(cost.hardware, cost.groups, measured=cost.measured, fused=cost.fused)
        self.packing = packing

    def graph_seconds(self, graph: Graph) -> dict[fx.Node, float]:
        return {n: 0.0 if n in self.packing else s for n, s in super().graph_seconds(graph).items()}


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def _lower(graph: Graph, world_size: int) -> str:
    """The dialect's gathers and reductions become functional collectives, where SimpleFSDP has them. Returns the
    process group's name."""
    positions = graph.positions()
    group = ""
    for node in graph.nodes:
        if node.target is dialect.gather_param:
            group = str(node.args[5])
            first_use = min(node.users, key=positions.__getitem__)
            with graph.fx_graph.inserting_before(first_use):
                _replace(node, _lower_gather(graph, node, world_size))
        elif node.target is dialect.reduce_grad:
            group = str(node.args[5])
            gradient = node.args[0]
            assert isinstance(gradient, fx.Node)
            after = gradient if gradient.op == "call_function" else graph.placeholders[-1]
            with graph.fx_graph.inserting_before(after.next):
                _replace(node, _lower_reduction(graph, node, world_size))
    graph.fx_graph.lint()
    return group


def _lower_gather(graph: Graph, node: fx.Node, world_size: int) -> fx.Node:
    shard, shape, dtype, _, _, group = cast(tuple[Any, ...], node.args)
    assert isinstance(shard, fx.Node)
    value = shard
    if value.meta["val"].dtype is not dtype:
        value = graph.call(prims.convert_element_type.default, (value, dtype))
    value = graph.call(c10d.all_gather_into_tensor.default, (value, world_size, group))
    value = graph.call(c10d.wait_tensor.default, (value,))
    if value.meta["val"].shape[0] != shape[0]:
        value = graph.call(aten.slice.Tensor, (value, 0, 0, shape[0]))
    return value


def _lower_reduction(graph: Graph, node: fx.Node, world_size: int) -> fx.Node:
    gradient, shard_shape, dtype, reduce_dtype, _, group = cast(tuple[Any, ...], node.args)
    assert isinstance(gradient, fx.Node)
    value = gradient
    if value.meta["val"].dtype is not reduce_dtype:
        value = graph.call(prims.convert_element_type.default, (value, reduce_dtype))
    missing = shard_shape[0] * world_size - value.meta["val"].shape[0]
    if missing:
        padding = [0] * (2 * value.meta["val"].dim() - 1) + [missing]
        value = graph.call(aten.constant_pad_nd.default, (value, padding))
    value = graph.call(c10d.reduce_scatter_tensor.default, (value, "avg", world_size, group))
    value = graph.call(c10d.wait_tensor.default, (value,))
    if reduce_dtype is not dtype:
        value = graph.call(prims.convert_element_type.default, (value, dtype))
    return value


def _replace(node: fx.Node, value: fx.Node) -> None:
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _raise(graph: Graph, group: str) -> None:
    """Functional collectives become the dialect's, in the same places."""
    numbers = itertools.count()
    started: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target in GATHERS or node.target is c10d.reduce_scatter_tensor.default:
            with graph.fx_graph.inserting_before(node):
                started[node] = _raise_start(graph, node, group, f"bucket{next(numbers)}")
        elif node.target is c10d.wait_tensor.default:
            collective = node.args[0]
            assert isinstance(collective, fx.Node)
            start = started[collective]
            gathers = start.target is dialect.all_gather_start
            with graph.fx_graph.inserting_before(node):
                wait = graph.call(dialect.all_gather_wait if gathers else dialect.reduce_wait, (start,))
                role = Role.GATHER_WAIT if gathers else Role.REDUCE_WAIT
                set_record(wait, dataclasses.replace(start.meta["fsdp"], role=role))
                value = graph.call(aten.view.default, (wait, list(node.meta["val"].shape)))
            _replace(node, value)
    for collective in reversed(started):
        graph.fx_graph.erase_node(collective)
    graph.fx_graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or n.target in dialect.EXECUTED)
    graph.fx_graph.lint()


def _raise_start(graph: Graph, node: fx.Node, group: str, bucket: str) -> fx.Node:
    source, value = node.args[0], node.meta["val"]
    assert isinstance(source, fx.Node)
    gathers = node.target in GATHERS
    world_size = int(cast(tuple[Any, ...], node.args)[1 if gathers else 2])
    if gathers:
        length = source.meta["val"].numel()
        arguments: tuple[Any, ...] = ([source], [0], length, value.dtype, world_size, group)
    else:
        arguments = ([source], value.dtype, world_size, group)
    start = graph.call(dialect.all_gather_start if gathers else dialect.reduce_scatter_start, arguments)
    role = Role.GATHER_START if gathers else Role.REDUCE_START
    return set_record(start, NodeRecord(role, "", bucket, (), nbytes(start.meta["val"])))
