"""``finalize_backward`` reduces once for many backwards, and pipelines of torch train compiled models by it."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from launch import run_ranks
from marks import fake_reductions
from models import MLP
from printed import calls, stage_text
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graph_fsdp
from graph_fsdp import UnsupportedError
from graph_fsdp.integrations.pipelining import PipelineStage
from graph_fsdp.report.report import engine_of

ROWS, MICROBATCHES = 2, 4


def trained(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return graph_fsdp.compile(MLP(), backend="eager")


def batch(seed: int) -> Tensor:
    return torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(seed))


# Finalization by hand


def test_a_graph_of_reductions_alone(fake_group: None) -> None:
    model = trained()
    model.set_manual_backward_finalization(True)
    losses = [model(batch(i)).sum() for i in range(2)]
    for loss in losses:
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert graph_fsdp.inspect(model).kept_nbytes > 0
    assert calls(graph_fsdp.inspect(model).backward, "reduce_scatter_start") == ""
    model.finalize_backward(async_op=True).wait()
    report = graph_fsdp.inspect(model)
    assert report.kept_nbytes == 0 and all(p.grad is not None for p in model.parameters())
    captured = vars(model)["_graph_fsdp"].graphs[-1]
    assert captured.cause.kind == "finalized" and "finalize_backward() reduces" in str(report)
    assert calls(captured.views["backward"], "all_gather_start") == ""
    ordinary = trained()
    ordinary(batch(0)).sum().backward()
    reductions = calls(captured.views["backward"], "reduce_scatter_start")
    assert reductions.count("reduce_scatter_start") == calls(
        graph_fsdp.inspect(ordinary).backward, "reduce_scatter_start"
    ).count("reduce_scatter_start")


def test_what_finalization_cannot_be(fake_group: None) -> None:
    model = trained()
    with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization\(True\) before the forward"):
        model.finalize_backward()
    with pytest.raises(ValueError, match="enabled must be True or False"):
        model.set_manual_backward_finalization(1)
    with pytest.raises(UnsupportedError, match="call it on the model"):
        graph_fsdp.compile(MLP(), backend="eager").blocks[0].set_manual_backward_finalization(True)
    model.set_manual_backward_finalization(True)
    model.finalize_backward()  # before the first forward there is nothing
    model.set_manual_backward_finalization(False)
    model(batch(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters()), "each backward reduces again"


def finalized_gradients() -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    one = MLP()
    model: Any = graph_fsdp.compile(copy.deepcopy(one), mesh, backend="eager")
    for step in range(2):
        model.set_manual_backward_finalization(True)
        losses = [model(batch(step + 10 * rank + i)).square().sum() for i in range(3)]
        for loss in losses:  # as torch's stages do
            model.set_is_last_backward(False)
            model.set_reshard_after_backward(False)
            model.set_requires_gradient_sync(False)
            loss.backward()
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        model.blocks[0].set_requires_gradient_sync(False)
        model.finalize_backward()
        assert all((p.grad is None) == name.startswith("blocks.0") for name, p in model.named_parameters())
        model.set_requires_gradient_sync(True)
        for p in model.parameters():
            p.grad = None
        model.finalize_backward()  # what is left
        assert all((p.grad is None) != name.startswith("blocks.0") for name, p in model.named_parameters())
        model.set_manual_backward_finalization(False)
        for other in range(2):
            for i in range(3):
                (one(batch(step + 10 * other + i)).square().sum() / 2).backward()
        for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
        for p in [*model.parameters(), *one.parameters()]:
            p.grad = None


def test_gradients_are_those_of_one_process() -> None:
    run_ranks(finalized_gradients, 2)


# Pipelines


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Stage(PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []  # torch 2.9 sends an int64 here and receives a float32, which gloo refuses


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def is_v_shaped(schedule: str) -> bool:
    return schedule in ("ZBVZeroBubble", "DualPipeV")


class Trained:
    """This rank's stages of a pipeline of ``Part``, each on a mesh of ``dp`` and, with ``tp``, tensor-parallel."""

    def __init__(self, schedule: str, mesh: DeviceMesh) -> None:
        count = 2 if schedule in ("GPipe", "1F1B") else 4
        torch.manual_seed(0)
        parts = [Part() for _ in range(count)]
        self.one = nn.Sequential(*copy.deepcopy(parts))
        self.place, group = mesh["pp"].get_local_rank(), mesh.get_group("pp")
        self.mine = ((0, 3), (1, 2))[self.place] if is_v_shaped(schedule) else range(self.place, count, 2)
        if "tp" in (mesh.mesh_dim_names or ()):
            for part in parts:
                parallelize_module(part, mesh["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
        self.models: list[Any] = [graph_fsdp.compile(parts[i], mesh["dp"], backend="eager") for i in self.mine]
        stages = [
            Stage(model, i, count, torch.device("cpu"), group=group)
            for i, model in zip(self.mine, self.models, strict=True)
        ]
        self.schedule: Any = get_schedule_class(schedule)(
            stages if count > 2 else stages[0], MICROBATCHES, loss_fn=loss_fn
        )
        self.is_last = count - 1 in self.mine
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (*self.models, self.one)]

    def step(self, inputs: Tensor, target: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": target, "losses": losses} if self.is_last else {}
        self.schedule.step(*([inputs] if self.place == 0 else []), **given)
        return losses

    def check_gradients(self, what: str) -> None:
        for i, model in zip(self.mine, self.models, strict=True):
            for (name, p), q in zip(model.named_parameters(), self.one[i].parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=f"{what}: {i}.{name}")

    def end_step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def clip_grad_norm_(stages: list[Any], max_norm: float, pipeline: Any) -> Tensor:
    squares = torch.stack([stage.clip_grad_norm_(float("inf")) ** 2 for stage in stages]).sum()
    dist.all_reduce(squares, group=pipeline)
    norm = squares.sqrt()
    for stage in stages:
        torch.nn.utils.clip_grads_with_norm_(stage.parameters(), max_norm, norm)
    return norm


def pipelines(schedules: tuple[str, ...], tp: bool = False) -> None:
    names, sizes = (("pp", "dp", "tp"), (2, 2, 2)) if tp else (("pp", "dp"), (2, 2))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    replica = mesh["dp"].get_local_rank()
    for schedule in schedules:
        trained = Trained(schedule, mesh)
        for step in range(4):
            data = [torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + i)) for i in range(4)]
            with contextlib.ExitStack() as stack:
                for model in trained.models if step == 1 else ():  # adds up with the next
                    stack.enter_context(model.no_sync())
                losses = trained.step(data[replica], data[2 + replica])
            expected = [loss_fn(trained.one(data[i]), data[2 + i]) for i in range(2)]
            (sum(expected) / 2).backward()
            if losses:
                torch.testing.assert_close(torch.stack(losses).mean(), expected[replica])
            if step == 1:
                assert all(p.grad is None for model in trained.models for p in model.parameters())
                continue
            trained.check_gradients(f"{schedule}, step {step}")
            if step == 0:  # in which torch has run the stages once more, to find shapes
                before = [graph_fsdp.inspect(model).collectives for model in trained.models]
            if step == 3:
                norm = clip_grad_norm_(trained.models, 0.01, mesh.get_group("pp"))
                torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(trained.one.parameters(), 0.01))
                trained.check_gradients(f"{schedule}, clipped")
            trained.end_step()
        for model, counted in zip(trained.models, before, strict=True):
            report = graph_fsdp.inspect(model)
            kinds = Counter(captured.cause.kind for captured in report.graphs)
            is_first = model is trained.models[0] and trained.place == 0  # all of whose backward is of weights
            divides = schedule not in ("GPipe", "1F1B", "Interleaved1F1B") and not is_first
            assert kinds["finalized"] == 1 and kinds["divided"] == 2 * divides, f"{schedule}: {kinds}"
            more = {kind: report.collectives[kind] - counted[kind] for kind in ("all_gather", "reduce")}
            buckets = len(report.spec.buckets)
            assert more["reduce"] == 2 * buckets, f"{schedule}: {more}, once per step"
            assert more["all_gather"] > 3 * buckets if tp else more["all_gather"] == 3 * buckets, f"{schedule}: {more}"


V_SHAPES = () if torch.__version__ < (2, 13) else ("ZBVZeroBubble",)
SHORT = ("GPipe", "1F1B", *(V_SHAPES or ("InterleavedZeroBubble",)))
LONG = ("Interleaved1F1B", *(("InterleavedZeroBubble", "DualPipeV") if V_SHAPES else ()))


@pytest.mark.parametrize("schedules", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=["short", "long"])
def test_schedules_train_as_one_process(schedules: tuple[str, ...]) -> None:
    run_ranks(pipelines, 4, schedules)


@pytest.mark.long
def test_tensor_parallel_stages_train_as_one_process() -> None:
    run_ranks(pipelines, 8, ("1F1B", SHORT[-1]), True)


# Zero bubble


def divided_gradients(model: Any, x: Tensor, divided: bool) -> dict[str, Tensor]:
    """The sums that a backward keeps, and the gradient of its input."""
    model.set_manual_backward_finalization(True)
    engine = engine_of(model)
    loss = model(x).square().sum()
    if not divided:
        loss.backward()
        return {name: g for (name, _), g in engine.kept.gradients.items()} | {"x": x.grad}
    with engine.division.deferring() as of_weights:
        loss.backward()
    assert x.grad is not None and not engine.kept
    for run in of_weights:
        run()
    return {name: g for (name, _), g in engine.kept.gradients.items()} | {"x": x.grad}


@fake_reductions
@pytest.mark.parametrize(
    "options",
    [{}, {"activation_checkpointing": "unit"}, {"backend": "inductor"}, {"mesh": None}],
    ids=["gathered", "checkpointed", "inductor", "tensor_parallel"],
)
def test_halves_have_the_gradients_of_a_whole_backward(fake_group: None, options: dict[str, Any]) -> None:
    found = []
    for divided in (False, True):
        torch.manual_seed(0)
        model, options = Part(), dict(options)
        if "mesh" in options:
            mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
            options["mesh"] = mesh["dp"]
        backend = {} if divided else {"backend": "eager"}
        compiled = graph_fsdp.compile(model, **{"backend": "eager", **options, **backend})
        found.append(divided_gradients(compiled, batch(0).requires_grad_(), divided))
    whole, halves = found
    assert whole.keys() == halves.keys() and len(whole) == 5
    rtol = 0.0 if options.get("backend") != "inductor" else 1e-6  # kernels are fused otherwise
    for name, gradient in whole.items():
        torch.testing.assert_close(halves[name], gradient, rtol=rtol, atol=rtol)


def test_one_process_divides_its_backward() -> None:
    found = []
    for divided in (False, True):
        model, x = trained(), batch(0).requires_grad_()
        loss = model(x)[:, 0].sum()
        with engine_of(model).division.deferring() if divided else contextlib.nullcontext([]) as of_weights:
            loss.backward()
        assert (model.head.weight.grad is None) == divided
        for run in of_weights:
            run()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for whole, halves in zip(*found, strict=True):
        torch.testing.assert_close(halves, whole, rtol=0, atol=0)


def test_the_graphs_of_both_halves(fake_group: None) -> None:
    model = trained()
    divided_gradients(model, batch(0).requires_grad_(), divided=True)
    report = graph_fsdp.inspect(model)
    first, second = report.graphs[1:]
    assert "graph 1 was captured because graph 0's backward is divided; this half is of the inputs" in str(report)
    of_inputs, of_weights = (captured.views["backward"] for captured in (first, second))
    assert_expected_inline(
        stage_text(of_inputs, "mm", stage="divide"),
        """\
takes kept(root)
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, down.weight}], float32, world_size=8)
    mm(tangent, head.weight)
free(kept(root))
full_blocks_1 = all_gather_wait(gather_blocks_1)
gather_blocks_0 = all_gather_start([blocks.0.{up.weight, down.weight}], float32, world_size=8)
    mm(mm, blocks.1.down.weight), ..., mm(gelu_backward, blocks.1.up.weight), ...
free(full_blocks_1)
full_blocks_0 = all_gather_wait(gather_blocks_0)
    mm(add, blocks.0.down.weight), ..., mm(gelu_backward, blocks.0.up.weight), ...
free(full_blocks_0)
return ...""",
    )
    assert_expected_inline(
        stage_text(of_weights, "mm", stage="divide"),
        """\
    mm(tangent, input), ...
head_bias_kept = accumulate_grad(head.bias: sum, shard_shape=[1], float32, float32)
head_weight_kept = accumulate_grad(head.weight: mm, shard_shape=[1, 16], float32, float32)
    mm(input, input), ..., mm(input, input), ...
blocks_1_down_bias_kept = accumulate_grad(blocks.1.down.bias: sum, shard_shape=[2], float32, float32)
blocks_1_down_weight_kept = accumulate_grad(blocks.1.down.weight: mm, shard_shape=[2, 32], float32, float32)
blocks_1_up_bias_kept = accumulate_grad(blocks.1.up.bias: sum, shard_shape=[4], float32, float32)
blocks_1_up_weight_kept = accumulate_grad(blocks.1.up.weight: mm, shard_shape=[4, 16], float32, float32)
    mm(input, input), ..., mm(input, input), ...
blocks_0_down_bias_kept = accumulate_grad(blocks.0.down.bias: sum, shard_shape=[2], float32, float32)
blocks_0_down_weight_kept = accumulate_grad(blocks.0.down.weight: mm, shard_shape=[2, 32], float32, float32)
blocks_0_up_bias_kept = accumulate_grad(blocks.0.up.bias: sum, shard_shape=[4], float32, float32)
blocks_0_up_weight_kept = accumulate_grad(blocks.0.up.weight: mm, shard_shape=[4, 16], float32, float32)
return blocks_0_up_weight_kept, blocks_0_up_bias_kept, ..., blocks_0_down_weight_kept, blocks_0_down_bias_kept,
    blocks_1_up_weight_kept, blocks_1_up_bias_kept, blocks_1_down_weight_kept, blocks_1_down_bias_kept,
    head_weight_kept, head_bias_kept""",
    )


def test_halves_of_whole_parameters(fake_group: None) -> None:
    model = trained()
    model.set_reshard_after_backward(False)
    divided_gradients(model, batch(0).requires_grad_(), divided=True)
    of_inputs, of_weights = (c.views["backward"] for c in graph_fsdp.inspect(model).graphs[-2:])
    assert_expected_inline(
        stage_text(of_inputs, "mm", stage="divide"),
        """\
takes whole_blocks_0_up_weight, whole_blocks_0_down_weight, whole_blocks_1_up_weight, whole_blocks_1_down_weight,
    whole_head_weight
    mm(tangent, whole_head_weight), mm(mm, whole_blocks_1_down_weight), ..., mm(gelu_backward,
        whole_blocks_1_up_weight), ..., mm(add, whole_blocks_0_down_weight), ..., mm(gelu_backward,
        whole_blocks_0_up_weight), ...
return ...""",
    )
    assert "whole" not in stage_text(of_weights, "mm", stage="divide"), "weights' gradients need no weights"


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.square()


def test_a_bucket_that_both_halves_read_is_gathered_in_both(fake_group: None) -> None:
    torch.manual_seed(0)
    model: Any = graph_fsdp.compile(Squared(), backend="eager", reshard_after_forward=True)
    divided_gradients(model, batch(0).requires_grad_(), divided=True)
    of_inputs, of_weights = (c.views["backward"] for c in graph_fsdp.inspect(model).graphs[-2:])
    assert_expected_inline(
        stage_text(of_inputs, "mm", stage="divide"),
        """\
gather_root = all_gather_start([weight], float32, world_size=8)
full_root = all_gather_wait(gather_root)
    pow(weight), mm(tangent, pow)
free(full_root)
return ...""",
    )
    assert_expected_inline(
        stage_text(of_weights, "mm", stage="divide"),
        """\
gather_root = all_gather_start([weight], float32, world_size=8)
    mm(input, tangent)
full_root = all_gather_wait(gather_root)
    pow(weight), ...
weight_kept = accumulate_grad(weight: mul, shard_shape=[2, 16], float32, float32)
free(full_root)
return weight_kept, ...""",
    )


def test_what_crosses_is_freed_after_the_second_half(fake_group: None) -> None:
    torch.manual_seed(0)
    model: Any = graph_fsdp.compile(Part(), backend="eager", activation_checkpointing="unit")
    divided_gradients(model, batch(0).requires_grad_(), divided=True)  # torch 2.9 holds the first batch longer
    x = batch(1).requires_grad_()
    with engine_of(model).division.deferring() as of_weights:
        model(x).sum().backward()
    held = weakref.ref(x)
    del x
    assert held() is not None, "the gradient of the first weight is computed of it"
    of_weights.pop()()
    assert held() is None


# Bad input


def test_what_a_stage_is_not_made_of(fake_group: None) -> None:
    with pytest.raises(TypeError, match="submodule must be a model compiled by graph_fsdp, got Part"):
        PipelineStage(Part(), 0, 2, torch.device("cpu"))
    whole = graph_fsdp.compile(Part(), regions="whole")
    with pytest.raises(UnsupportedError, match="regions='whole'"):
        PipelineStage(whole, 0, 2, torch.device("cpu"))


def test_stages_are_where_the_schedule_has_them(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    stages = [
        PipelineStage(graph_fsdp.compile(Part(), mesh["dp"]), i, 4, torch.device("cpu"), group=mesh.get_group("pp"))
        for i in (0, 2)
    ]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=loss_fn)
    with pytest.raises(ValueError, match="stage 2 was made on rank 0 of the pipeline, and this schedule has it on"):
        schedule.step(torch.randn(8, 16))
    assert not any(engine_of(stage.submod).finalization.manual for stage in stages)


def test_reductions_of_another_type(fake_group: None) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model: Any = graph_fsdp.compile(MLP(), mp_policy=policy)  # Inductor compiles the casts of what is reduced
    model.set_manual_backward_finalization(True)
    model(batch(0)).sum().backward()
    model.finalize_backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
