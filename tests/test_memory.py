"""The memory model: bytes by category at each node, pinned by hand, and against what the executor counts and what
torch's profiler measures. On a fake process group of 8 ranks, and once on two gloo ranks."""

from __future__ import annotations

import pytest
import torch
from allocations import measure
from conftest import fake_process_group
from expecttest import assert_expected_inline
from facts import Facts
from marks import mostly_long
from models import MLP, SMALL_CASES, loss_of
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp.passes import Graph, MemoryProfile, PassContext, Role, default_pipeline, memory_profile
from graph_fsdp.passes.analysis.memory import MAX_HOLDERS
from graph_fsdp.passes.analysis.storages import CATEGORIES
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.effects import aliased_inputs
from graph_fsdp.passes.ir.spec import MeshSpec, make_model_spec
from graph_fsdp.report.report import GraphReport, GraphView, engine_of

FACTS = Facts(__name__)


def profiles(model: nn.Module) -> tuple[MemoryProfile, MemoryProfile]:
    report = graph_fsdp.inspect(model)
    return profile_of(report.forward), profile_of(report.backward)


def profile_of(view: GraphView) -> MemoryProfile:
    assert view.memory is not None
    return view.memory


def trained(case: str, *, rows: int = 4, slots: bool = True, **options: object) -> nn.Module:
    """A case's model after a step, without gradients."""
    pipeline = default_pipeline(prefetch=1)
    model = graph_fsdp.compile(
        SMALL_CASES[case].model(),
        backend="eager",
        passes=pipeline if slots else pipeline.remove("slots"),
        **options,
    )
    loss_of(model, SMALL_CASES[case].batch(rows, 0)).backward()
    model.zero_grad(set_to_none=True)
    return model


# Pinned. Chunks of 64 floats and less are padded to 64 bytes; floats are 4 bytes, there are 8 ranks and 4 rows.


class TwoLayers(nn.Module):
    """Two units of 16x16 floats without bias: each is 1,024 bytes gathered, and a gather lands in place."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def table(view: GraphView) -> str:
    """Bytes per category at each node that is neither an input nor a view, without the categories that have none."""
    profile = profile_of(view)
    used = [c for c in CATEGORIES if any(profile.timeline[c])]
    rows = [["", *used]]
    for index, node in enumerate(view.stages["free"].graph.nodes):
        if node.op != "placeholder" and (node.target in dialect.EXECUTED or not aliased_inputs(node)):
            rows.append([node.name, *(str(profile.timeline[c][index] or ".") for c in used)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(v.rjust(w) for v, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    )


def two_layers(bias: bool = False, prefetch: int = 0, **options: object) -> tuple[GraphView, GraphView]:
    model = graph_fsdp.compile(
        TwoLayers(bias),
        backend="eager",
        auto_wrap_policy={nn.Linear},
        passes=default_pipeline(prefetch=prefetch),
        reshard_after_forward=True,
        **options,
    )
    model(torch.ones(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    return report.forward, report.backward


def test_bytes_at_each_node_of_forward_and_backward(fake_group: None) -> None:
    forward, backward = two_layers()
    assert_expected_inline(
        table(forward),
        """\
                 shards  gathered  inputs  saved  temporary
gather_layers_0     256      1024     256      .          .
full_layers_0       256      1024     256      .          .
mm                  256      1024     256      .        256
tanh                256      1024     256    256        256
free_layers_0       256      1024     256    256          .
gather_layers_1     256      1024     256    256          .
full_layers_1       256      1024     256    256          .
mm_1                256      1024     256    256        256
tanh_1              256      1024     256    512        256
free_layers_1       256      1024     256    512          .
output              256         .     256    512          .""",
    )

    assert_expected_inline(
        table(backward),
        """\
                  shards  gathered  inputs  saved  reducing  gradients  temporary
tanh_backward        256         .     256    768         .          .        256
mm_2                 256         .       .    512      1024          .        256
gather_layers_1      256      1024       .    512      1024          .        256
full_layers_1        256      1024       .    512      1024          .        256
mm_3                 256      1024       .    512      1024          .        512
tanh_backward_1      256      1024       .    512      1024          .        512
free_layers_1        256      1024       .    256      1024          .        256
reduce_layers_1      256         .       .    256      1024        128        256
mm_4                 256         .       .    256      2048        128        256
reduce_layers_0      256         .       .      .      2048        256          .
reduced_layers_1     256         .       .      .      2048        256          .
reduced_layers_0     256         .       .      .      1024        256          .
output               256         .       .      .         .        256          .""",
    )


def test_a_bucket_of_two_parameters_lands_elsewhere_and_its_landing_buffer_is_used_again(fake_group: None) -> None:
    assert_expected_inline(
        table(two_layers(bias=True, prefetch=1)[0]),
        """\
                 shards  gathered  landing  inputs  saved  temporary
gather_layers_0     384      1536     1536     256      .          .
full_layers_0       384      1536     1536     256      .          .
gather_layers_1     384      3072     1536     256      .          .
addmm               384      3072     1536     256      .        256
tanh                384      3072     1536     256    256        256
free_layers_0       384      3072     1536     256    256          .
full_layers_1       384      1536     1536     256    256          .
addmm_1             384      1536        .     256    256        256
tanh_1              384      1536        .     256    512        256
free_layers_1       384      1536        .     256    512          .
output              384         .        .     256    512          .""",
    )


def test_shards_are_cast_and_gradients_reduced_in_their_own_dtypes(fake_group: None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    forward, backward = two_layers(mp_policy=policy)
    assert_expected_inline(
        table(forward) + "\n\n" + table(backward),
        """\
                 shards  gathered  inputs  saved  temporary
gather_layers_0     256       512     128      .          .
full_layers_0       256       512     128      .          .
mm                  256       512     128      .        128
tanh                256       512     128    128        128
free_layers_0       256       512     128    128          .
gather_layers_1     256       512     128    128          .
full_layers_1       256       512     128    128          .
mm_1                256       512     128    128        128
tanh_1              256       512     128    256        128
free_layers_1       256       512     128    256          .
output              256         .     128    256          .

                  shards  gathered  inputs  saved  reducing  gradients  temporary
tanh_backward        256         .     128    384         .          .        128
mm_2                 256         .       .    256       512          .        128
gather_layers_1      256       512       .    256       512          .        128
full_layers_1        256       512       .    256       512          .        128
mm_3                 256       512       .    256       512          .        256
tanh_backward_1      256       512       .    256       512          .        256
free_layers_1        256       512       .    128       512          .        128
reduce_layers_1      256         .       .    128      1536        128        128
mm_4                 256         .       .    128      1536        128        128
reduced_layers_1     256         .       .      .      1536        128          .
reduce_layers_0      256         .       .      .      1536        256          .
reduced_layers_0     256         .       .      .      1024        256          .
output               256         .       .      .         .        256          .""",
    )


# Against the executor's count


@pytest.mark.parametrize(("case", "reshard", "prefetch"), [("mlp", None, 0), ("mlp", True, 1), ("uneven", False, 0)])
def test_gathered_bytes_are_those_that_the_executor_counts(
    fake_group: None, case: str, reshard: bool | None, prefetch: int
) -> None:
    gathered_as_counted(case, reshard, prefetch)


def gathered_as_counted(case: str, reshard: bool | None, prefetch: int) -> None:
    model = graph_fsdp.compile(
        SMALL_CASES[case].model(),
        backend="eager",
        passes=default_pipeline(prefetch=prefetch),
        reshard_after_forward=reshard,
    )
    counter = engine_of(model).counter
    loss = loss_of(model, SMALL_CASES[case].batch(4, 0))
    counted = [(counter.peak, counter.landing.peak)]
    counter.reset()
    loss.backward()
    counted.append((counter.peak, counter.landing.peak))
    assert counted == [(p.peak_gathered, p.peak_landing) for p in profiles(model)]
    assert min(counted)[0] > 0


def test_units_that_are_whole_are_gathered_throughout(fake_group: None) -> None:
    case = SMALL_CASES["uneven"]
    model = graph_fsdp.compile(case.model(), backend="eager")
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    loss_of(model, case.batch(4, 0)).backward()
    counter = engine_of(model).counter
    assert counter.peak == counter.current > 0
    for profile in profiles(model):
        assert set(profile.timeline["gathered"]) == {counter.peak}
        assert "whole units" in [holder.node for holder in profile.holders]


@FACTS
def gathered_bytes_are_those_that_the_executor_counts_on_ranks() -> None:
    gathered_as_counted("uneven", None, prefetch=1)


test_on_two_ranks = FACTS.on(2)


# Against what is allocated


MEASURED = [("mlp", None), ("mlp", True), ("mlp", False)]
MEASURED += [("gpt", None), ("gpt_checkpoint_dropout", True), ("uneven", False)]


@pytest.mark.parametrize(("case", "reshard"), mostly_long(MEASURED, [("mlp", False), ("gpt", None)]))
def test_a_step_allocates_what_was_predicted(fake_group: None, case: str, reshard: bool | None) -> None:
    """To the byte: operators in float32 on the CPU, convolutions apart, allocate their results and nothing else."""
    allocated_as_predicted(case, reshard)


@pytest.mark.parametrize(
    ("case", "reshard"), mostly_long([("mlp", None), ("mlp", True), ("gpt", True)], [("mlp", True)])
)
def test_a_step_without_slots_allocates_what_was_predicted(fake_group: None, case: str, reshard: bool | None) -> None:
    """Each buffer is then one of the allocator's, from its start to its free."""
    allocated_as_predicted(case, reshard, slots=False)


def allocated_as_predicted(case: str, reshard: bool | None, *, slots: bool = True) -> None:
    model = trained(case, rows=64, slots=slots, reshard_after_forward=reshard)
    batch = SMALL_CASES[case].batch(64, 0)
    measured = measure(lambda: loss_of(model, batch).backward())
    forward, backward = profiles(model)
    assert measured[0].peak == forward.peak - forward.total[0]
    assert measured[1].peak == backward.peak - backward.total[0]
    assert measured[0].end == forward.total[-1] - forward.total[0]
    assert all(m.peak > 0 for m in measured)
    assert all(any(profile.timeline["pooled"]) <= slots for profile in (forward, backward))


# The profile


@pytest.fixture(scope="module")
def report() -> GraphReport:
    """Of a GPT after a step and an evaluation."""
    with fake_process_group():
        model = trained("gpt")
        with torch.no_grad():
            model(SMALL_CASES["gpt"].batch(4, 0)["x"])
        return graph_fsdp.inspect(model)


def test_what_a_profile_says_of_its_peak(report: GraphReport) -> None:
    for profile in (profile_of(report.forward), profile_of(report.backward)):
        total = profile.total
        assert profile.peak == max(total) == total[profile.peak_index] == sum(profile.by_category.values())
        assert total.index(profile.peak) == profile.peak_index
        sizes = [holder.nbytes for holder in profile.holders]
        assert sizes == sorted(sizes, reverse=True) and len(sizes) == MAX_HOLDERS
        assert {holder.category for holder in profile.holders} <= set(profile.by_category)


def test_the_shards_are_the_storage_of_all_parameters(fake_group: None) -> None:
    model = trained("uneven")
    storage = sum(buffer.nbytes for buffer in engine_of(model).storage.buffers)
    for profile in profiles(model):
        assert set(profile.timeline["shards"]) == {storage}


def test_what_forward_saves_is_what_backward_receives(report: GraphReport) -> None:
    """Without the batch, which the user holds and forward only passes on."""
    forward, backward = profile_of(report.forward), profile_of(report.backward)
    tokens = 4 * 8 * torch.int64.itemsize
    positions = 8 * torch.int64.itemsize
    assert forward.timeline["saved"][-1] + tokens == backward.timeline["saved"][0]
    assert forward.timeline["saved"][-1] > 100 * positions


def test_views_of_one_saved_tensor_are_one_storage(report: GraphReport) -> None:
    """Queries, keys and values are saved as three views of one product."""
    saved = [h.nbytes for h in profile_of(report.backward).holders if h.category == "saved"]
    assert saved.count(4 * 8 * 3 * 16 * 4) == 2, "one of 4 rows, 8 tokens and 3 x 16 floats per block"


def test_the_evaluation_has_a_profile_without_what_is_saved(report: GraphReport) -> None:
    inference = profile_of(report.inference)
    assert "saved" not in inference.by_category and inference.peak < profile_of(report.forward).peak


def test_symbolic_sizes_count_as_they_were_traced(fake_group: None) -> None:
    model = graph_fsdp.compile(MLP(depth=1), backend="eager", dynamic=True)
    model(torch.ones(4, 16)).sum().backward()
    fixed = graph_fsdp.compile(MLP(depth=1), backend="eager", dynamic=False)
    fixed(torch.ones(4, 16)).sum().backward()
    assert [p.by_category for p in profiles(model)] == [p.by_category for p in profiles(fixed)]
    model(torch.ones(6, 16)).sum().backward()
    assert len(graph_fsdp.inspect(model).graphs) == 1, "the profile puts no guard on sizes"


def test_on_one_process_parameters_are_shards_and_nothing_is_gathered() -> None:
    forward, backward = profiles(trained("mlp"))
    for profile in (forward, backward):
        assert not {"gathered", "landing", "pooled", "reducing"} & set(profile.by_category)
    assert backward.timeline["gradients"][-1] == sum(p.nbytes for p in SMALL_CASES["mlp"].model().parameters())


def test_the_profile_of_a_graph_whose_buffers_are_not_freed() -> None:
    graph = Graph(torch.fx.symbolic_trace(nn.Identity()), "forward")
    context = PassContext(make_model_spec([], MeshSpec("", "0", 8)))
    with pytest.raises(ValueError, match="a forward graph before its buffers are freed has no lifetimes"):
        memory_profile(graph, context)


# Lists of views


class Pieces(nn.Module):
    """Uses the second half of a parameter of its own long after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 16))
        self.blocks = MLP(depth=1).blocks

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.chunk(2)
        x = x @ first
        for block in self.blocks:
            x = block(x)
        return x @ second


def test_a_buffer_is_held_while_a_piece_of_a_parameter_is_used(fake_group: None) -> None:
    model = graph_fsdp.compile(Pieces(), backend="eager", reshard_after_forward=True)
    model(torch.ones(4, 16)).sum().backward()
    view = graph_fsdp.inspect(model).forward
    nodes = list(view.stages["free"].graph.nodes)
    products = [i for i, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default]
    root = next(row for row in view.buckets if row.name == "root")
    assert root.free is not None and root.free > products[-1]
    assert profile_of(view).timeline["gathered"][products[-1]] >= root.nbytes
    assert nodes[root.free].meta["fsdp"].role is Role.FREE
