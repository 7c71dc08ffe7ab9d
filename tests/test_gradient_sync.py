"""FSDP2's methods on gradients: what each changes in the backward graph of a two-block MLP on 8 ranks."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP
from printed import bucket_table, calls, stage_text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import graph_fsdp
from graph_fsdp import UnsupportedError
from graph_fsdp.passes import GraphPass, default_pipeline
from graph_fsdp.report.report import GraphReport, engine_of

pytestmark = pytest.mark.usefixtures("fake_group")


def model_on(shape: tuple[int, ...] = (8,), **options: object) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    return graph_fsdp.compile(MLP(), mesh, backend="eager", **options)  # type: ignore[arg-type]


def step(model: nn.Module) -> GraphReport:
    model(torch.randn(4, 16)).sum().backward()
    return graph_fsdp.inspect(model)


def every_unit(model: nn.Module, method: str, *arguments: object) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            getattr(module, method)(*arguments)


def reductions(report: GraphReport) -> str:
    """The rows of backward's table that are no gathers."""
    return "\n".join(row for row in bucket_table(report.backward).splitlines() if " gather " not in row)


def roots(report: GraphReport) -> str:
    """The reductions of the root's bucket."""
    found = calls(report.backward, "reduce_scatter_start", "all_reduce_shard_start").splitlines()
    return "\n".join(line for line in found if "_root = " in line)


def test_without_synchronisation_gradients_are_kept_and_nothing_is_reduced() -> None:
    model = model_on()
    model.set_requires_gradient_sync(False)
    report = step(model)
    assert_expected_inline(
        reductions(report),
        """\
root kept 2 1,024
root keep 2 340
blocks.1 keep 4 4,288
blocks.0 keep 4 4,288""",
    )
    assert_expected_inline(
        stage_text(report.backward),
        """\
takes kept(root)
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, down.weight}], float32, world_size=8)
    mm(head.weight), ...
head_bias_kept = accumulate_grad(head.bias: sum, shard_shape=[1], float32, float32)
head_weight_kept = accumulate_grad(head.weight: mm, shard_shape=[1, 16], float32, float32)
free(kept(root))
full_blocks_1 = all_gather_wait(gather_blocks_1)
gather_blocks_0 = all_gather_start([blocks.0.down.weight], float32, world_size=8)
    mm(blocks.1.down.weight), ..., mm(blocks.1.up.weight), ...
blocks_1_down_bias_kept = accumulate_grad(blocks.1.down.bias: sum, shard_shape=[2], float32, float32)
blocks_1_down_weight_kept = accumulate_grad(blocks.1.down.weight: mm, shard_shape=[2, 32], float32, float32)
blocks_1_up_bias_kept = accumulate_grad(blocks.1.up.bias: sum, shard_shape=[4], float32, float32)
blocks_1_up_weight_kept = accumulate_grad(blocks.1.up.weight: mm, shard_shape=[4, 16], float32, float32)
free(full_blocks_1)
full_blocks_0 = all_gather_wait(gather_blocks_0)
    mm(blocks.0.down.weight), ...
blocks_0_down_bias_kept = accumulate_grad(blocks.0.down.bias: sum, shard_shape=[2], float32, float32)
blocks_0_down_weight_kept = accumulate_grad(blocks.0.down.weight: mm, shard_shape=[2, 32], float32, float32)
blocks_0_up_bias_kept = accumulate_grad(blocks.0.up.bias: sum, shard_shape=[4], float32, float32)
blocks_0_up_weight_kept = accumulate_grad(blocks.0.up.weight: mm, shard_shape=[4, 16], float32, float32)
free(full_blocks_0)
return blocks_0_up_weight_kept, blocks_0_up_bias_kept, ..., blocks_0_down_weight_kept, blocks_0_down_bias_kept,
    blocks_1_up_weight_kept, blocks_1_up_bias_kept, blocks_1_down_weight_kept, blocks_1_down_bias_kept,
    head_weight_kept, head_bias_kept""",
    )
    assert all(p.grad is None for p in model.parameters())

    # What is kept is as large as the parameters, and reported and predicted.
    whole = sum(4 * p.numel() for p in MLP().parameters())
    assert report.kept_nbytes == whole
    assert f"gradients that are not reduced yet: {whole:,} bytes" in str(report)
    assert f"{whole:,} bytes of gradients kept whole" in report.backward.stages["bucket"].summary
    assert report.backward.memory.timeline["gradients"][-1] == whole  # type: ignore[union-attr]

    # Each setting is captured once.
    for sync in (True, False, True):
        model.set_requires_gradient_sync(sync)
        report = step(model)
    assert report.kept_nbytes == 0 and len(report.graphs) == 2
    assert report.backward.memory.timeline["gradients"][-1] < whole  # type: ignore[union-attr]


def test_graphs_with_and_without_share_their_compiled_regions() -> None:
    model = model_on(reshard_after_forward=True)
    compiled = step(model).compiled_regions
    model.set_requires_gradient_sync(False)
    assert step(model).compiled_regions == compiled


def test_on_replicas_shards_are_kept_before_their_all_reduce() -> None:
    model = model_on((2, 4))
    model.set_requires_all_reduce(False)
    report = step(model)
    assert_expected_inline(
        reductions(report),
        """\
root kept 2 768
root reduce 2 136
blocks.1 reduce 4 1,072
root keep 2 136
blocks.0 reduce 4 1,072
blocks.1 keep 4 1,072
blocks.0 keep 4 1,072""",
    )
    assert_expected_inline(
        calls(report.backward, "accumulate_grad").splitlines()[0],
        """head_bias_kept = accumulate_grad(head.bias: reduced_root, shard_shape=[2], float32, float32)""",
    )
    assert not calls(report.backward, "all_reduce_shard_start")
    assert report.kept_nbytes == sum(4 * p.shard_numel for p in report.spec.parameters.values())
    model.set_requires_all_reduce(True)
    assert "replicate" in reductions(step(model))


def test_what_is_not_synchronised_is_kept_whole_whatever_is_said_of_replicas() -> None:
    model = model_on((2, 4))
    model.set_requires_gradient_sync(False)
    model.set_requires_all_reduce(False)
    report = step(model)
    assert report.kept_nbytes == sum(4 * p.numel() for p in MLP().parameters())
    assert not calls(report.backward, "reduce_scatter_start")


def test_where_nothing_shards_whole_gradients_are_kept() -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("replicate",))
    model = graph_fsdp.compile(MLP(), mesh, backend="eager")
    model.set_requires_all_reduce(False)
    report = step(model)
    assert report.kept_nbytes == sum(4 * p.numel() for p in MLP().parameters())
    assert not calls(report.backward, "all_reduce_start", "reduce_scatter_start")


@pytest.mark.parametrize(
    ("method", "value", "argument"),
    [
        ("set_gradient_divide_factor", 3.0, "factor=3.0"),
        ("set_force_sum_reduction_for_comms", True, "summed=True"),
    ],
)
def test_divide_factors_and_sums_are_arguments_of_the_reductions(method: str, value: float, argument: str) -> None:
    model = model_on((2, 4))
    every_unit(model, method, value)
    assert roots(step(model)).splitlines() == [
        "reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=4, replicas=2, "
        f"{argument})",
        f"replicate_root = all_reduce_shard_start(reduced_root, ranks=8, {argument})",
    ]


def test_a_hook_stands_behind_the_reductions_and_sees_each_bucket() -> None:
    model, seen = model_on((2, 4)), []
    every_unit(model, "set_all_reduce_hook", lambda reduced: seen.append(tuple(reduced.shape)))
    report = step(model)
    assert_expected_inline(
        calls(report.backward, "reduce_hook"),
        """\
hook_root = reduce_hook(replicated_root)
hook_blocks_1 = reduce_hook(replicated_blocks_1)
hook_blocks_0 = reduce_hook(replicated_blocks_0)""",
    )
    assert len(seen) == 3
    every_unit(model, "set_all_reduce_hook", None)
    assert not calls(step(model).backward, "reduce_hook")
    assert len(seen) == 3


def test_settings_between_forward_and_backward_are_refused() -> None:
    model = model_on()
    with model.no_sync():
        loss = model(torch.randn(4, 16)).sum()
    with pytest.raises(RuntimeError, match="between a forward and its backward"):
        loss.backward()
    with model.no_sync():
        model(torch.randn(4, 16)).sum().backward()
    assert graph_fsdp.inspect(model).kept_nbytes


def test_no_sync_leaves_what_was_set() -> None:
    model = model_on((2, 4))
    model.set_requires_all_reduce(False)
    with model.no_sync():
        pass
    assert not calls(step(model).backward, "all_reduce_shard_start")


def test_buckets_of_several_units_have_one_setting() -> None:
    model = model_on(passes=default_pipeline(bucket=100_000))
    model.blocks[0].set_all_reduce_hook(print)
    with pytest.raises(ValueError, match=r"units 'blocks.0', 'blocks.1', ''.*bucket='unit'"):
        step(model)


def test_methods_of_a_unit_are_for_that_unit() -> None:
    model = model_on()
    model.blocks[0].set_requires_gradient_sync(False)
    model.blocks[1].set_gradient_divide_factor(2.0)
    assert_expected_inline(
        reductions(step(model)),
        """\
root kept 2 1,024
root reduce 2 68
blocks.1 reduce 4 536
blocks.0 keep 4 4,288""",
    )
    report = graph_fsdp.inspect(model)
    assert "factor=2.0" in calls(report.backward, "reduce_scatter_start") and "factor" not in roots(report)
    assert all(p.grad is None for p in model.blocks[0].parameters())
    assert all(p.grad is not None for p in model.blocks[1].parameters())


class DropsReductions(GraphPass):
    name = "drops_reductions"
    phase = "backward"

    def run(self, graph, context) -> None:  # type: ignore[no-untyped-def]
        from graph_fsdp.passes.ir.dialect import Role
        from graph_fsdp.passes.transforms import bucket

        (node, *_) = graph.with_role(Role.SHARD_GRAD)
        with graph.fx_graph.inserting_before(graph.output):
            kept = bucket.keep(graph, node, context, node.meta["fsdp"].params[0], "root")
        node.replace_all_uses_with(kept, delete_user_cb=lambda user: user is graph.output)


def test_a_pass_cannot_keep_what_the_user_wants_reduced() -> None:
    model = model_on(passes=default_pipeline().insert_after("bucket", DropsReductions()))
    with pytest.raises(graph_fsdp.VerificationError, match="kept and not reduced"):
        step(model)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("set_requires_gradient_sync", (1,), "requires_gradient_sync must be True or False"),
        ("set_requires_all_reduce", (None,), "requires_all_reduce must be True or False"),
        ("set_gradient_divide_factor", (0,), "factor must be a positive number"),
        ("set_gradient_divide_factor", (True,), "factor must be a positive number"),
        ("set_force_sum_reduction_for_comms", ("yes",), "enable must be True or False"),
        ("set_all_reduce_hook", (3,), "hook must be a function"),
        ("set_post_optim_event", (3,), r"event must be a torch.Event"),
        ("set_is_last_backward", (3,), "is_last_backward must be"),
    ],
)
def test_bad_arguments_change_nothing(method: str, arguments: tuple[object, ...], message: str) -> None:
    model = model_on()
    before = engine_of(model).settings
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(model, method)(*arguments)
    assert engine_of(model).settings == before


def test_without_replicas_there_is_no_all_reduce_to_leave_out() -> None:
    with pytest.warns(UserWarning, match="nothing is replicated"):
        model_on().set_requires_all_reduce(False)


def test_whole_graphs_refuse() -> None:
    mesh = init_device_mesh("cpu", (8,))
    model = graph_fsdp.compile(MLP(), mesh, regions="whole")
    for method, argument in [
        ("set_requires_gradient_sync", False),
        ("set_requires_all_reduce", False),
        ("set_gradient_divide_factor", 2.0),
        ("set_force_sum_reduction_for_comms", True),
        ("set_all_reduce_hook", print),
    ]:
        with pytest.raises(UnsupportedError, match="regions='cut'"):
            getattr(model, method)(argument)


def test_an_event_is_waited_for_once() -> None:
    class Event:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    model, event = model_on(), Event()
    model.set_post_optim_event(event)
    step(model)
    step(model)
    assert event.waits == 1
    model.set_post_optim_event(event)
    model.set_post_optim_event(torch.cpu.current_stream().record_event())  # None: a stream of the CPU has no events
    step(model)
    assert event.waits == 1


class Doubled(nn.Module):
    """Both gradients of ``add`` are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * (self.a + self.b)).sum()


def test_gradients_that_share_memory_are_kept_apart() -> None:
    model = graph_fsdp.compile(Doubled(), init_device_mesh("cpu", (8,)), backend="eager")
    model.set_requires_gradient_sync(False)
    for _ in range(3):
        model(torch.full((8, 4), 2.0)).backward()
    kept = engine_of(model).kept.gradients
    assert torch.equal(kept["a", False], torch.full((8, 4), 6.0)) and torch.equal(
        kept["b", False], torch.full((8, 4), 6.0)
    )


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.head(self.blocks[branch](x))


@pytest.mark.parametrize("method", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_a_backward_reduces_what_is_kept_of_a_branch_that_it_has_not(method: str) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    model = graph_fsdp.compile(Branches(), mesh, backend="eager")
    getattr(model, method)(False)
    model(torch.randn(4, 16), 0).sum().backward()
    getattr(model, method)(True)
    loss = model(torch.randn(4, 16), 1).sum()
    torch.autograd.grad(loss, [model.blocks[1].weight], retain_graph=True)
    assert graph_fsdp.inspect(model).kept_nbytes, "a backward of other gradients takes nothing of these"
    loss.backward()
    report = graph_fsdp.inspect(model)
    assert report.kept_nbytes == 0 and all(p.grad is not None for p in model.parameters())
    added = engine_of(model).graphs[-1]
    assert added.cause.text == "a backward has ended, and reduces what backwards have kept"
    assert {b.parameters for b in added.views["backward"].buckets} == {("blocks.0.weight", "blocks.0.bias")}
    graphs = len(engine_of(model).graphs)
    model(torch.randn(4, 16), 1).sum().backward()
    assert len(engine_of(model).graphs) == graphs, "nothing is left"


@pytest.mark.parametrize("method", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_an_accumulation_that_raised_is_given_up(method: str) -> None:
    model = model_on((2, 4))
    getattr(model, method)(False)
    assert step(model).kept_nbytes
    model.zero_grad()
    assert graph_fsdp.inspect(model).kept_nbytes, "as FSDP2 does"
    model.reset_iter_state()
    assert graph_fsdp.inspect(model).kept_nbytes == 0 and not engine_of(model).kept, "the next backward adds nothing"
