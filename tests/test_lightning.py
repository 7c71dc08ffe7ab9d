"""Lightning: Fabric and the Trainer with our ``shard``, beside the same training with torch's ``fully_shard``, both
under Lightning's own ``ModelParallelStrategy``."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from facts import Facts, shared_folder
from lightning.fabric import strategies as fabric_strategies
from lightning.pytorch import strategies as trainer_strategies
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from models import GPT, SEQUENCE, VOCABULARY
from pages import DOCS, ROOT, examples, printed
from reference import fsdp2 as with_fsdp2
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import graph_fsdp
from graph_fsdp.integrations.lightning import shard

sys.path.insert(0, str(ROOT / "examples"))

import lightning_gpt

FACTS = Facts(__name__)
PAGE = DOCS / "lightning.md"
Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


def fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if isinstance(model, FSDPModule):
        return model
    return with_fsdp2(model, mesh=mesh["data_parallel"])


ours: Parallelize = functools.partial(shard, backend="eager")


@dataclass
class Outcome:
    """``steps``: for each, numbers that two trainings must agree in, bit for bit."""

    steps: list[tuple[float, ...]]
    model: nn.Module

    @functools.cached_property
    def state(self) -> dict[str, Tensor]:
        return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in self.model.state_dict().items()}


def check_same(a: Outcome, b: Outcome) -> None:
    assert a.steps == b.steps, (a.steps, b.steps)
    assert a.state.keys() == b.state.keys()
    for name, value in a.state.items():
        assert torch.equal(value, b.state[name]), name


def score(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


# Fabric


def with_fabric(
    parallelize: Parallelize,
    precision: Any = "32-true",
    *,
    meta: bool = False,
    full: bool = False,
    save: Path | None = None,
    load: Path | None = None,
    steps: int = 6,
    devices: int = 2,
    depth: int = 1,
) -> Outcome:
    """Steps of two batches each; saved after the third."""
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=devices,
        strategy=fabric_strategies.ModelParallelStrategy(
            parallelize, data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=not full
        ),
        precision=precision,
    )
    fabric.launch()
    torch.manual_seed(0)
    with fabric.init_module(empty_init=meta):
        model = GPT(depth=depth)
    torch.manual_seed(0)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if load is not None:
        assert fabric.load(load, state) == {}
    outcome = Outcome([], model)
    for step in range(state["step"], steps):
        losses = []
        for part in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + fabric.global_rank)
            tokens = torch.randint(VOCABULARY, (4, SEQUENCE), generator=generator)
            with fabric.no_backward_sync(model, enabled=part == 0):
                loss = score(model, tokens)
                fabric.backward(loss / 2)
            losses.append(loss.item())
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        outcome.steps.append((*losses, norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()))
        state["step"] = step + 1
        if save is not None and step == 2:
            fabric.save(save, state)
    return outcome


@functools.cache
def saved_by_fabric() -> tuple[Path, Outcome]:
    """A folder with what each of the two has saved, sharded and full, and what FSDP2 has trained."""
    folder = shared_folder()
    own = with_fabric(fsdp2, save=folder / "own")
    outcome = with_fabric(ours, save=folder / "ours")
    check_same(outcome, own)
    assert own.steps[-1] != own.steps[0]
    return folder, own


@FACTS
def losses_norms_and_parameters_of_fabric_are_those_of_fsdp2_bit_for_bit() -> None:
    _, own = saved_by_fabric()
    assert {p.dtype for p in own.model.parameters()} == {torch.float32}


@FACTS
def so_are_those_of_a_model_in_bfloat16_that_fabric_builds_on_the_meta_device() -> None:
    """It gets the values that it would have had."""
    own, outcome = with_fabric(fsdp2, "bf16-true", steps=3), with_fabric(ours, "bf16-true", meta=True, steps=3)
    check_same(outcome, own)
    assert {p.dtype for p in outcome.model.parameters()} == {torch.bfloat16}
    assert own.steps != saved_by_fabric()[1].steps[:3]


@FACTS
def fabrics_checkpoints_are_fsdp2s_sharded_and_full() -> None:
    folder, own = saved_by_fabric()
    with_fabric(fsdp2, full=True, save=folder / "ownfull", steps=3)
    with_fabric(ours, full=True, save=folder / "oursfull", steps=3)
    resumed = Outcome(own.steps[3:], own.model)
    for full in (False, True):
        ending = "full" if full else ""
        assert (folder / f"ours{ending}").is_file() == full
        check_same(with_fabric(ours, full=full, load=folder / f"own{ending}"), resumed)
        check_same(with_fabric(fsdp2, full=full, load=folder / f"ours{ending}"), resumed)
    if dist.get_rank() == 0:
        saved = torch.load(folder / "oursfull", weights_only=True)
        GPT(depth=1).load_state_dict(saved["model"])
        assert saved["step"] == 3


# The Trainer


class Module(lightning.LightningModule):
    def __init__(self, parallelize: Parallelize) -> None:
        super().__init__()
        self.parallelize = parallelize
        self.model: nn.Module | None = None
        self.steps: list[tuple[float, ...]] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = GPT(depth=1)
        self.parallelize(self.model, self.device_mesh)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = score(self.model, batch[0])  # type: ignore[arg-type]
        self.steps.append((loss.item(),))
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", score(self.model, batch[0]), sync_dist=True)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def with_trainer(
    parallelize: Parallelize,
    precision: Any = "32-true",
    *,
    full: bool = False,
    save: Path | None = None,
    load: Path | None = None,
) -> Outcome:
    """Two epochs of four steps of two batches each; saved after each epoch. The last entry is of the validation."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=trainer_strategies.ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=not full
        ),
        precision=precision,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(save, filename="{epoch}", save_top_k=-1)] if save is not None else None,
        enable_checkpointing=save is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    tokens = torch.randint(VOCABULARY, (64, SEQUENCE), generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(tokens), batch_size=4)
    module = Module(parallelize)
    trainer.fit(module, loader, loader, ckpt_path=load)
    fitted = module.model
    trainer.validate(module, loader, verbose=False)
    assert module.model is fitted, "configure_model was called again"
    return Outcome([*module.steps, (float(trainer.callback_metrics["validation"]),)], module)


@functools.cache
def saved_by_the_trainer() -> tuple[Path, Outcome]:
    folder = shared_folder()
    own = with_trainer(fsdp2, save=folder / "own")
    outcome = with_trainer(ours, save=folder / "ours")
    assert len(own.steps) == 17
    check_same(outcome, own)
    return folder, own


@FACTS
def losses_and_parameters_of_the_trainer_are_those_of_fsdp2_and_it_resumes_what_that_saved() -> None:
    folder, own = saved_by_the_trainer()
    resumed = Outcome(own.steps[8:], own.model)
    check_same(with_trainer(ours, load=folder / "own" / "epoch=0.ckpt"), resumed)
    check_same(with_trainer(fsdp2, load=folder / "ours" / "epoch=0.ckpt"), resumed)


@FACTS
def the_callback_of_averages_leaves_the_mean_of_all_steps() -> None:
    class Seen(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            values.append([p.full_tensor().detach().clone() for p in module.parameters()])

    class Linear(Module):
        def configure_model(self) -> None:
            if self.model is None:
                torch.manual_seed(0)
                self.model = ours(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), self.device_mesh)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.model(batch[0]).square().mean()  # type: ignore[misc,no-any-return]

    values: list[list[Tensor]] = []
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, callbacks=[Seen(), WeightAveraging()],
        strategy=trainer_strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    trainer.fit(module := Linear(ours), DataLoader(TensorDataset(rows), batch_size=2))
    assert len(values) == 4
    for p, *steps in zip(module.parameters(), *values, strict=True):
        torch.testing.assert_close(p.full_tensor(), torch.stack(steps).mean(0))  # type: ignore[attr-defined]


@FACTS
def so_does_it_with_autocast_and_full_checkpoints() -> None:
    folder, single = saved_by_the_trainer()
    own = with_trainer(fsdp2, "bf16-mixed")
    check_same(with_trainer(ours, "bf16-mixed", full=True, save=folder / "full"), own)
    assert own.steps != single.steps
    resumed = with_trainer(ours, "bf16-mixed", full=True, load=folder / "full" / "epoch=0.ckpt")
    check_same(resumed, Outcome(own.steps[8:], own.model))
    if dist.get_rank() == 0:
        saved = torch.load(folder / "full" / "epoch=1.ckpt", weights_only=True)["state_dict"]
        assert all(torch.equal(value, own.state[name]) for name, value in saved.items())


@FACTS
def code_of_the_page_prints_what_stands_there() -> None:
    found = examples(PAGE.read_text())
    assert len(found) == 2
    before = Path.cwd()
    os.chdir(shared_folder())
    try:
        outputs = printed(found, PAGE)
    finally:
        os.chdir(before)
    assert outputs == ([example.expected for example in found] if dist.get_rank() == 0 else ["", ""])


@FACTS
def the_example_learns_and_resumes() -> None:
    folder = shared_folder()
    text = folder / f"text{dist.get_rank()}"  # one per rank: a rank must not read what another is about to write
    text.write_text("to be or not to be, that is the question; " * 200)
    given = ["--text", str(text), "--folder", str(folder / "saved"), "--accelerator", "cpu"]
    given += ["--devices", "2", "--backend", "eager", "--windows", "64", "--batch", "4", "--lr", "1e-2"]
    given += ["--layers", "1", "--width", "32"]
    losses, validation = lightning_gpt.run([*given, "--epochs", "1"])
    resumed, after = lightning_gpt.run([*given, "--epochs", "2"])
    assert len(losses) == len(resumed) == 8, "the second epoch only"
    assert resumed[-1] < losses[-1] < losses[0] and after < validation
    assert lightning_gpt.run([*given, "--epochs", "2"]) == ([], after), "nothing is left to train"


# Lightning asks this variable whether something else has started the processes.
test_on_two_ranks = pytest.mark.long(FACTS.on(2, env={"TORCHELASTIC_RUN_ID": "tests"}))


# In one process


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What Fabric sets in the environment, and the process group that it makes, are gone afterwards."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_fabric_trains_on_one_rank_as_with_fsdp2(alone: None) -> None:
    outcome, own = (with_fabric(parallelize, steps=2, devices=1, depth=2) for parallelize in (ours, fsdp2))
    check_same(outcome, own)
    assert "blocks.1" in str(graph_fsdp.inspect(outcome.model.module))  # type: ignore[arg-type]


def mesh_of(data_parallel: int, tensor_parallel: int) -> DeviceMesh:
    return init_device_mesh(
        "cpu", (data_parallel, tensor_parallel), mesh_dim_names=("data_parallel", "tensor_parallel")
    )


def test_lightnings_default_sizes_are_an_error_that_says_what_to_give(fake_group: dist.ProcessGroup) -> None:
    model = GPT()
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 8 .*give ModelParallelStrategy data_parallel_size="):
        shard(model, mesh_of(1, 8))
    assert [p.data_ptr() for p in model.parameters()] == before and type(model) is GPT


def test_options_go_to_compile_and_a_compiled_model_is_left_alone(fake_group: dist.ProcessGroup) -> None:
    model = GPT()
    assert shard(model, mesh_of(8, 1), backend="eager", reshard_after_forward=False) is model
    (model(torch.zeros(2, SEQUENCE, dtype=torch.int64)).sum()).backward()
    assert "kept" in str(graph_fsdp.inspect(model))
    assert shard(model, mesh_of(8, 1)) is model


def test_a_tensor_parallel_model_is_sharded_over_the_other_dimension(fake_group: dist.ProcessGroup) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(4, 2)
    model = GPT()
    for block in model.blocks:
        parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh, backend="eager")
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor) and weight.device_mesh.mesh_dim_names == ("data_parallel", "tensor_parallel")
    assert weight.to_local().numel() * 8 == weight.numel()


def test_precisions_that_lightning_does_not_have_with_this_strategy_are_its_own_error() -> None:
    strategy = fabric_strategies.ModelParallelStrategy(ours, data_parallel_size=1, tensor_parallel_size=1)
    with pytest.raises(ValueError, match=r"does not support .*16-mixed"):
        lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy, precision="16-mixed")
