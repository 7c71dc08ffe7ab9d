"""The cost model: what kernels and collectives take by their shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, loss_of
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import graph_fsdp
from graph_fsdp.passes import (
    HARDWARE,
    CostModel,
    Graph,
    GraphPass,
    GroupShape,
    PassContext,
    default_pipeline,
)
from graph_fsdp.passes.analysis import cost
from graph_fsdp.passes.analysis.cost import collective_key, op_key
from graph_fsdp.passes.analysis.kernels import CPU_ATTENTION_FORMULAS, graph_work, node_flops
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.layout import copies_by

aten = torch.ops.aten
H100 = HARDWARE["h100"]
NODE, CLUSTER, REPLICAS = "node", "cluster", "replicas"  # 8 GPUs of a node; 8 nodes; 1 GPU of each of 8 nodes
GROUPS = {NODE: GroupShape(8), CLUSTER: GroupShape(64), REPLICAS: GroupShape(8, 8), "alone": GroupShape(1)}


def model(**options: Any) -> CostModel:
    return CostModel(H100, GROUPS, **options)


def trace(function: Callable[..., Any], *inputs: Tensor, symbolic: bool = False) -> Graph:
    """The graph of a function; inputs on the meta device have no memory."""
    return Graph(make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs), "inference")


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def seconds(graph: Graph, **options: Any) -> float:
    return sum(model(**options).graph_seconds(graph).values())


def calls(graph: Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def bytes_moved(graph: Graph, *, fused: bool = True) -> int:
    return sum(work.read + work.written for work in graph_work(graph, fused=fused).values())


# Compute


def llama_block(x: Tensor, qkv: Tensor, out: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A block of Llama 3 8B without rotary embedding, one sequence."""
    q, k, v = (x @ qkv).split([4096, 1024, 1024], -1)
    heads = [t.view(1, -1, t.shape[-1] // 128, 128).transpose(1, 2) for t in (q, k, v)]
    q, k, v = heads[0], *(t.repeat_interleave(4, 1) for t in heads[1:])
    attended = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
    x = x + attended.transpose(1, 2).reshape(x.shape) @ out
    return x + (F.silu(x @ gate) * (x @ up)) @ down


def llama_inputs(tokens: int = 8192) -> list[Tensor]:
    shapes = (tokens, 4096), (4096, 6144), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)
    return [tensor(*shape) for shape in shapes]


def test_the_matmuls_of_a_llama_block_take_five_milliseconds_on_an_h100() -> None:
    graph = trace(llama_block, *llama_inputs())
    took = model().graph_seconds(graph)
    matmuls = sum(took[node] for node in calls(graph, aten.mm.default))
    # 2 FLOPs · 218 million parameters · 8192 tokens at 0.7 of 989 TFLOP/s
    assert matmuls == pytest.approx(5.16e-3, rel=0.01)
    assert 1.1 * matmuls < sum(took.values()) < 1.6 * matmuls, "attention and what is pointwise"
    assert matmuls < model().least_seconds(graph) < sum(took.values()), "arithmetic, without what is pointwise"


def test_a_small_matmul_takes_its_launch_and_a_thin_one_the_reading_of_its_weights() -> None:
    small = trace(torch.mm, tensor(16, 16), tensor(16, 16))
    assert seconds(small) == pytest.approx(H100.launch, rel=0.01)
    thin = trace(torch.mm, tensor(1, 8192), tensor(8192, 8192))
    assert seconds(thin) == pytest.approx(8192 * 8193 * 2 / (0.85 * 3.35e12) + H100.launch, rel=0.01)


def test_inputs_views_and_outputs_cost_nothing() -> None:
    graph = trace(lambda x: x.view(8, 8).t()[1:].unsqueeze(0), tensor(64))
    assert set(model().graph_seconds(graph).values()) == {0.0}
    assert set(model(fused=False).graph_seconds(graph).values()) == {0.0}


def test_a_graph_is_timed_once_for_as_long_as_it_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = trace(lambda x, w: (x @ w).relu(), tensor(64, 64), tensor(64, 64)), model()
    timed: list[Graph] = []
    monkeypatch.setattr(cost, "graph_work", lambda graph, **how: timed.append(graph) or graph_work(graph, **how))
    first = costs.graph_seconds(graph)
    (product,), (relu,) = calls(graph, aten.mm.default), calls(graph, aten.relu.default)
    first.clear()
    assert costs.graph_seconds(graph)[product] > 0
    assert len(timed) == 1
    changes: list[Callable[[], Any]] = [
        lambda: setattr(relu, "target", aten.neg.default),
        lambda: setattr(relu, "args", (graph.placeholders[0],)),
        lambda: relu.meta.update(val=relu.meta["val"][:32]),
        lambda: relu.append(product),
    ]
    for number, change in enumerate(changes, 2):
        change()
        costs.graph_seconds(graph)
        assert len(timed) == number
    model().graph_seconds(graph)
    assert len(timed) == 6, "another model has other seconds"


def test_a_fused_pointwise_chain_reads_once_writes_once_and_launches_once() -> None:
    graph = trace(lambda x, y: ((x + y).relu() * 2).exp(), tensor(1024, 1024), tensor(1024, 1024))
    size = 2 * 1024 * 1024
    assert bytes_moved(graph) == 3 * size
    assert bytes_moved(graph, fused=False) == (3 + 2 + 2 + 2) * size
    assert [work.launches for work in graph_work(graph, fused=True).values()].count(1) == 1
    assert seconds(graph) < seconds(graph, fused=False)


def test_a_value_that_is_also_used_outside_of_its_fusion_group_is_written() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        hidden = x.relu()
        return (hidden @ w) + hidden.exp()

    graph = trace(function, tensor(64, 64), tensor(64, 64))
    work = graph_work(graph, fused=True)
    (relu,), (exp,), (add,) = (calls(graph, t) for t in (aten.relu.default, aten.exp.default, aten.add.Tensor))
    size = 2 * 64 * 64
    assert (work[relu].read, work[relu].written) == (size, size)
    # exp is only needed after the matmul: it is computed there, from hidden as it was written
    assert (work[exp].read, work[exp].written, work[exp].launches) == (size, 0, 1)
    assert (work[add].read, work[add].written, work[add].launches) == (size, size, 0)


def test_a_norm_is_one_fused_kernel() -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w

    graph = trace(norm, tensor(4096, 4096), tensor(4096))
    assert bytes_moved(graph) == 2 * 2 * 4096 * 4096 + 2 * 4096
    assert sum(work.launches for work in graph_work(graph, fused=True).values()) == 1


def test_a_lookup_reads_rows_and_not_the_table() -> None:
    tokens = torch.empty(128, dtype=torch.int64, device="meta")
    graph = trace(lambda table, i: F.embedding(i, table), tensor(100_000, 512), tokens)
    for fused in (True, False):
        assert bytes_moved(graph, fused=fused) == 2 * 128 * 512 * 2 + 128 * 8


def test_pieces_of_a_value_are_read_piece_by_piece() -> None:
    graph = trace(lambda x, w: x[:64] @ w, tensor(1024, 64), tensor(64, 64))
    assert bytes_moved(graph) == 3 * 64 * 64 * 2


def test_an_in_place_copy_reads_its_source_and_writes_its_target() -> None:
    graph = trace(lambda x, y: x.copy_(y), tensor(64, 64), tensor(64, 64))
    assert bytes_moved(graph) == 2 * 64 * 64 * 2


def test_symbolic_sizes_count_as_they_were_traced() -> None:
    inputs = [torch.empty(24, 16, device="meta"), torch.empty(16, 8, device="meta")]
    fixed = trace(lambda a, b: (a @ b).relu(), *inputs)
    symbolic = trace(lambda a, b: (a @ b).relu(), *inputs, symbolic=True)
    assert not isinstance(calls(symbolic, aten.mm.default)[0].meta["val"].shape[0], int), "or this shows nothing"
    assert seconds(symbolic) == seconds(fixed)
    assert op_key(calls(symbolic, aten.mm.default)[0]) == op_key(calls(fixed, aten.mm.default)[0])


class Keep(GraphPass):
    """Keeps the graphs as they are at the end of the pipeline."""

    name = "keep"

    def __init__(self) -> None:
        self.graphs: dict[str, Graph] = {}

    def run(self, graph: Graph, context: PassContext) -> str | None:
        self.graphs[graph.phase] = graph
        return None


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    """Forward and backward of the GPT, sharded over 8 ranks."""
    from conftest import fake_process_group

    keep, case = Keep(), CASES["gpt"]
    with fake_process_group():
        sharded = graph_fsdp.compile(
            case.model(), backend="eager", passes=default_pipeline().insert_after("free", keep)
        )
        loss_of(sharded, case.batch(4, 0)).backward()
    return keep.graphs


def test_a_sharded_models_graphs_have_the_flops_that_torch_counts(graphs: dict[str, Graph]) -> None:
    formulas = {
        operator: lambda *shapes, formula=formula, out_shape=None, **rest: formula(*shapes, **rest)
        for operator, formula in CPU_ATTENTION_FORMULAS.items()
    }
    case = CASES["gpt"]
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        loss_of(case.model(), case.batch(4, 0)).backward()
    counted = sum(node_flops(node) for graph in graphs.values() for node in graph.nodes)
    assert counted == counter.get_total_flops() > 0


def test_dependencies_carry_seconds_and_bytes(graphs: dict[str, Graph]) -> None:
    for graph in graphs.values():
        assert graph.cost is not None, "the pipeline gives the graph its model"
        graph.cost = None
        assert set(dict(graph.dependencies().nodes(data="seconds")).values()) == {0.0}, "without a model"
        (group,) = {node.args[5] for node in calls(graph, dialect.all_gather_start)}
        graph.cost = CostModel(H100, {group: GroupShape(8)})
        dag = graph.dependencies()
        took = dict(dag.nodes(data="seconds"))
        assert all(took[node] > 0 for target in dialect.STARTS for node in calls(graph, target))
        reductions = dialect.WAITS - {dialect.all_gather_wait}
        assert all(took[node] == 0 for target in reductions | {dialect.free} for node in calls(graph, target))
        for wait in calls(graph, dialect.all_gather_wait):
            assert (took[wait] > 0) == (copies_by(wait.args[0])[1] > 0), "of unpacking"
        assert all(took[node] > 0 for node in calls(graph, aten.mm.default))
        wait = calls(graph, dialect.all_gather_wait)[0]
        start = wait.args[0]
        assert dag.edges[start, wait] == {"kind": "data", "nbytes": dag.nodes[start]["nbytes"]}
        assert {data["nbytes"] for *_, data in dag.edges(data=True) if data["kind"] != "data"} <= {0}
        graph.cost = None


# Collectives


def test_eight_h100_gather_a_llama_block_in_about_a_millisecond() -> None:
    assert 1.1e-3 < model().all_gather_seconds(436_000_000, NODE) < 1.4e-3


@pytest.mark.parametrize("group", [NODE, CLUSTER, REPLICAS])
def test_more_bytes_take_longer(group: str) -> None:
    cost = model()
    for collective in (cost.all_gather_seconds, cost.all_reduce_seconds):
        took = [collective(2**power, group) for power in range(0, 34)]
        assert took == sorted(took) and took[0] < took[-1]
    assert cost.all_reduce_seconds(2**30, group) > 1.9 * cost.all_gather_seconds(2**30, group)


def test_groups_across_nodes_are_slower_and_those_with_one_rank_per_node_slowest() -> None:
    cost = model()
    for nbytes in (1_000, 436_000_000):
        within, across = cost.all_gather_seconds(nbytes, NODE), cost.all_gather_seconds(nbytes, CLUSTER)
        assert within < across
    # One network adapter for all of it, instead of eight.
    assert cost.all_gather_seconds(10**9, REPLICAS) == pytest.approx(7 / 8 * 10**9 / 45e9, rel=0.01)


def test_a_group_of_one_rank_communicates_nothing() -> None:
    cost = model()
    assert cost.all_gather_seconds(100, "alone") == cost.all_reduce_seconds(100, "alone") == 0.0
    assert cost.saturating_bytes("alone") == 0 and cost.message_seconds("alone") == 0.0


def test_small_messages_take_logarithmically_many_steps() -> None:
    large = CostModel(H100, {"g": GroupShape(1024)})
    # log2(8) steps inside of a node and log2(128) between nodes, instead of 896 and 127
    steps = 3 * H100.intra.latency + 7 * H100.inter.latency
    assert large.all_gather_seconds(64, "g") == pytest.approx(H100.collective_launch + steps, rel=0.01)


@pytest.mark.parametrize("group", [NODE, CLUSTER, REPLICAS])
@pytest.mark.parametrize("efficiency", [0.3, 0.5, 0.9])
def test_saturating_bytes_are_the_fewest_that_reach_the_bandwidth(group: str, efficiency: float) -> None:
    cost = model()
    endless = 10**15 / cost.all_gather_seconds(10**15, group)
    enough = cost.saturating_bytes(group, efficiency)

    def reached(nbytes: int) -> float:
        return nbytes / cost.all_gather_seconds(nbytes, group) / endless

    assert reached(enough) == pytest.approx(efficiency, rel=1e-3)
    assert reached(int(0.9 * enough)) < efficiency


def test_more_latency_needs_larger_buckets() -> None:
    cost = model()
    assert cost.saturating_bytes(NODE) < cost.saturating_bytes(CLUSTER)
    assert cost.message_seconds(NODE) < cost.message_seconds(CLUSTER)
    with pytest.raises(ValueError, match="efficiency must be above 0 and below 1, got 1"):
        cost.saturating_bytes(NODE, 1)


def starts() -> list[fx.Node]:
    """Starts of collectives of 8 ranks on 1 MiB of float32 each."""
    graph = Graph(fx.GraphModule(torch.nn.Module(), fx.Graph()), "forward")
    shard, grad = (graph.fx_graph.placeholder(name) for name in ("shard", "grad"))
    shard.meta["val"], grad.meta["val"] = tensor(2**15, dtype=torch.float32), tensor(2**18, dtype=torch.float32)
    return [
        graph.call(dialect.all_gather_start, ([shard], [0], 2**15, torch.float32, 8, NODE)),
        graph.call(dialect.reduce_scatter_start, ([grad], torch.float32, 8, NODE)),
        graph.call(dialect.all_reduce_start, ([grad], torch.float32, 8, NODE)),
    ]


def test_the_collectives_of_a_graph_take_what_their_buffers_say() -> None:
    cost, (gather, scatter, reduce) = model(), starts()
    assert cost.collective_seconds(gather) == cost.all_gather_seconds(2**20, NODE)
    assert cost.collective_seconds(scatter) == cost.all_gather_seconds(2**20, NODE)
    assert cost.collective_seconds(reduce) == cost.all_reduce_seconds(2**20, NODE)
    assert [collective_key(node) for node in (gather, scatter)] == [
        "graph_fsdp.all_gather_start.default 1048576 bytes float32 of 8 ranks",
        "graph_fsdp.reduce_scatter_start.default 1048576 bytes float32 of 8 ranks",
    ]


def test_an_unknown_group_and_a_node_that_starts_nothing_are_errors() -> None:
    gather = starts()[0]
    with pytest.raises(ValueError, match="no process group 'node'; it has 'other'"):
        CostModel(H100, {"other": GroupShape(8)}).collective_seconds(gather)
    with pytest.raises(ValueError, match="starts no collective"):
        model().collective_seconds(gather.all_input_nodes[0])
    with pytest.raises(ValueError, match="stride must be a whole number of ranks, 1 or more, got 0"):
        GroupShape(8, 0)


# Measurements


@pytest.mark.parametrize("heads", [8, 2])
def test_grouped_query_attention_counts_the_heads_of_the_queries(heads: int) -> None:
    """With and without groups: two products of (batch 1, 8 heads, 16 x 16, 4 wide)."""
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    graph = fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    for node, count in ((q, 8), (k, heads), (v, heads)):
        node.meta["val"] = torch.empty(1, count, 16, 4, device="meta")
    call = graph.call_function(attention, (q, k, v))
    call.meta["val"] = (torch.empty(1, 8, 16, 4, device="meta"), torch.empty(1, 8, 16, device="meta"))
    assert node_flops(call) == 2 * (2 * 8 * 16 * 16 * 4)


def test_products_in_groups_count_as_one_product() -> None:
    """However long the groups are: of rows in the forward, of columns or of what is summed in the backward."""
    ends = torch.empty(8, dtype=torch.int32, device="meta")
    shapes = {
        "rows": ((512, 64), (8, 64, 32), 2 * 512 * 64 * 32),
        "columns": ((8, 32, 64), (64, 512), 2 * 32 * 64 * 512),
        "what is summed": ((64, 512), (512, 32), 2 * 64 * 512 * 32),
        "no groups": ((8, 512, 64), (8, 64, 32), 8 * 2 * 512 * 64 * 32),
    }
    for name, (a, b, flops) in shapes.items():
        offsets = () if len(a) == len(b) == 3 else (ends,)
        graph = trace(aten._grouped_mm.default, tensor(*a), tensor(*b), *offsets)
        (product,) = calls(graph, aten._grouped_mm.default)
        work = graph_work(graph, fused=True)[product]
        assert (work.flops, work.launches, work.dtype) == (flops, 1, torch.bfloat16), name


def test_attention_has_its_own_efficiencies_and_executes_what_a_causal_mask_leaves() -> None:
    def attend(causal: bool) -> Callable[..., Tensor]:
        return lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)[0]

    inputs = [tensor(1, 32, 8192, 128)] * 3
    flops = 4 * 32 * 8192 * 8192 * 128
    took = {c: seconds(trace(attend(c), *inputs)) for c in (True, False)}
    peak = H100.flops[torch.bfloat16]
    assert H100.attention_efficiency is not None and H100.attention_backward_efficiency is not None
    assert took[False] == pytest.approx(flops / (peak * H100.attention_efficiency) + H100.launch, rel=1e-6)
    assert took[True] == pytest.approx(flops / 2 / (peak * H100.attention_efficiency) + H100.launch, rel=1e-6)
    graph = trace(attend(True), *inputs)
    unknown = CostModel(dataclasses.replace(H100, attention_efficiency=None), GROUPS)
    assert sum(unknown.graph_seconds(graph).values()) == pytest.approx(flops / (peak * 0.7) + H100.launch, rel=1e-6)


def test_complex_numbers_are_not_fused() -> None:
    def rotated(x: Tensor, angles: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.cos()) * angles).sin()

    inputs = tensor(64, 2, dtype=torch.float32), tensor(64, dtype=torch.complex64)
    work = graph_work(trace(rotated, *inputs), fused=True)
    assert sum(w.launches for w in work.values()) == 3
