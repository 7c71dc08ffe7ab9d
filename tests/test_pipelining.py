"""``finalize_backward`` reduces once for many backwards, and pipelines of torch train compiled models by it."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from models import MLP
from printed import calls
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage as TorchStage
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
        given = (count, torch.device("cpu"))
        before = schedule == "Interleaved1F1B"  # torch's stages, of parts that are not compiled yet
        of_torch = [TorchStage(parts[i], i, *given, group=group) for i in self.mine if before]
        self.models: list[Any] = [graph_fsdp.compile(parts[i], mesh["dp"], backend="eager") for i in self.mine]
        stages = [Stage.of(stage) for stage in of_torch] or [
            Stage(model, i, *given, group=group) for i, model in zip(self.mine, self.models, strict=True)
        ]
        self.schedule: Any = get_schedule_class(schedule)(
            stages if count > 2 else stages[0], MICROBATCHES, loss_fn=loss_fn
        )
        self.is_last = count - 1 in self.mine
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (*self.models, self.one)]

    def step(self, inputs: Tensor, target: Tensor, *, method: str = "step") -> list[Tensor]:
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": target, "losses": losses} if self.is_last else {}
        getattr(self.schedule, method)(*([inputs] if self.place == 0 else []), **given)
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


def accumulated() -> None:
    """On a mesh of one rank, where nothing is reduced, ``no_sync()`` keeps no gradients either."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    for schedule, without_sync in (("1F1B", True), ("1F1B", False), ("Interleaved1F1B", True)):
        trained = Trained(schedule, mesh)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            inputs, target = (torch.randn(8, 16, generator=generator) for _ in range(2))
            with contextlib.ExitStack() as stack:
                for model in trained.models if without_sync and step == 0 else ():
                    stack.enter_context(model.no_sync())
                trained.step(inputs, target)
            loss_fn(trained.one(inputs), target).backward()
        trained.check_gradients(f"{schedule}, without_sync={without_sync}")


def test_steps_add_up() -> None:
    run_ranks(accumulated, 2)


def failed_between_steps() -> None:
    """A loss fails, of which no stage knows; the pipeline goes on. With a gradient that is reduced, and without."""

    class Failing(Exception): ...

    fails = False

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails:
            raise Failing
        return loss_fn(output, target)

    pairs = init_device_mesh("cpu", (2,))
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "dp"))
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "pp"))["pp"]
    for mesh in (pairs, alone["dp"]):
        for drops in (False, True):
            torch.manual_seed(0)
            one = Part()
            model: Any = graph_fsdp.compile(copy.deepcopy(one), mesh, backend="eager")
            shards = list(model.parameters())
            stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=own.get_group())
            schedule: Any = get_schedule_class("GPipe")(stage, MICROBATCHES, loss_fn=loss)
            for step in range(3):
                data = [torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + i)) for i in range(2)]
                fails = step == 1
                with pytest.raises(Failing) if fails else contextlib.nullcontext():
                    schedule.step(data[0], target=data[1])
                if not fails:
                    loss_fn(one(data[0]), data[1]).backward()
                for p, q in zip(shards, one.parameters(), strict=True):
                    torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=f"{step}, {drops}: {q.shape}")
                if fails and drops:
                    model.zero_grad()
                    assert all(p.grad is None for p in shards)
                    one.zero_grad()


def test_a_step_that_fails_leaves_the_gradients_of_earlier_ones() -> None:
    run_ranks(failed_between_steps, 2)


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
            assert more["reduce"] == 2 * buckets, f"{schedule}: {more}, once per step that reduces"
            assert more["all_gather"] == 3 * buckets, f"{schedule}: {more}, once per step"
        evaluates = schedule in ("GPipe", "1F1B", "Interleaved1F1B") and hasattr(trained.schedule, "eval")
        for enabled in (False, True) if evaluates else ():
            with torch.set_grad_enabled(enabled):
                losses = trained.step(data[replica], data[2 + replica], method="eval")
            if losses:
                expected = loss_fn(trained.one(data[replica]), data[2 + replica])
                torch.testing.assert_close(torch.stack(losses).mean(), expected)
            assert not any(engine_of(model).finalization.manual for model in trained.models)


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


# Bad input


def test_what_a_stage_is_not_made_of(fake_group: None) -> None:
    with pytest.raises(TypeError, match="submodule must be a model compiled by graph_fsdp, got Part"):
        PipelineStage(Part(), 0, 2, torch.device("cpu"))
    whole = graph_fsdp.compile(Part(), regions="whole")
    with pytest.raises(UnsupportedError, match="regions='whole'"):
        PipelineStage(whole, 0, 2, torch.device("cpu"))
    given = (0, dist.get_world_size(), torch.device("cpu"))
    of_torch = TorchStage(Part(), *given)
    with pytest.raises(TypeError, match="submodule must be a model compiled by graph_fsdp, got Part"):
        PipelineStage.of(of_torch)
    assert type(of_torch) is TorchStage
    for other in (PipelineStage(graph_fsdp.compile(Part()), *given), Part()):
        with pytest.raises(TypeError, match=f"stage must be .*PipelineStage, got {type(other).__name__}"):
            PipelineStage.of(other)


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


@pytest.mark.filterwarnings("ignore:activation_checkpointing. activations are offloaded")
def test_activations_that_are_offloaded(fake_group: None) -> None:
    model: Any = graph_fsdp.compile(MLP(), backend="eager", activation_checkpointing="offload")
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        model(torch.ones(64, 16)).sum().backward()
    assert calls(graph_fsdp.inspect(model).backward, "reload_activation")
    model.finalize_backward()
    assert all(p.grad is not None for p in model.parameters())


def test_reductions_of_another_type(fake_group: None) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model: Any = graph_fsdp.compile(MLP(depth=1), mp_policy=policy)  # Inductor compiles the casts of what is reduced
    model.set_manual_backward_finalization(True)
    model(batch(0)).sum().backward()
    model.finalize_backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
