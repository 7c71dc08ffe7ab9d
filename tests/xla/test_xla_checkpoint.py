"""Checkpoints on XLA: a training resumes, also on other devices, and files are those of other backends."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from models import MLP, UnevenBlock
from safetensors.torch import load_file
from torch import Tensor, nn
from xla_compare import adamw, mesh, vectors
from xla_launch import DEVICES, run_xla

from graph_fsdp.cli.main import main

pytestmark = pytest.mark.timeout(2000)
TIMEOUT = 600  # seconds, of a process
FIRST, MORE = 4, 4  # steps before and after a checkpoint
BOUND = 1e-5

Values = dict[str, Tensor]


def make_model() -> nn.Module:
    """Rows that devices do not share equally, and scalars."""
    return MLP(depth=2, block=UnevenBlock)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, axes: Any, first: int, steps: int) -> list[float]:
    import torch_xla

    from graph_fsdp.xla import shard_batch

    losses = []
    for step in range(first, first + steps):
        x, target = shard_batch(vectors(step), axes)
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def on_cpu(model: nn.Module) -> Values:
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def compiled(*shape: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    import graph_fsdp

    axes = mesh(*shape)
    model = graph_fsdp.compile(make_model(), axes, backend="xla", **options)
    return model, adamw(model.parameters()), axes


def scrambled(model: nn.Module) -> nn.Module:
    """With values that nothing else has, which a load must replace."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.25).add_(0.01)
    return model


def rows_of_states(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Of the states of a parameter whose rows devices share equally: what each holds of them."""
    from graph_fsdp.compat import xla as compat_xla

    compat_xla.sync(wait=True)
    shared = next(p for p in optimizer.state if p.dim() == 2 and len(p) % DEVICES == 0)
    states = {n: s for n, s in optimizer.state[shared].items() if s.dim() and s.device.type == "xla"}
    return {name: compat_xla.device_shards(state)[0].padded.numel() / state.numel() for name, state in states.items()}


def interrupted(path: Path, shape: tuple[int, ...], sharding: str) -> tuple[list[float], Values, Values]:
    """Losses after the checkpoint, and values at and after it. A second model resumes from it in the same process."""
    from graph_fsdp import checkpoint
    from graph_fsdp.compat import xla as compat_xla

    model, optimizer, axes = compiled(*shape, sharding=sharding)
    train(model, optimizer, axes, 0, FIRST)
    pending = checkpoint.save(path, model, optimizer, extra={"step": FIRST}, asynchronous=sharding == "auto")
    saved = on_cpu(model)
    losses, values = train(model, optimizer, axes, FIRST, MORE), on_cpu(model)

    pending.result()
    again, optimizer, axes = compiled(*shape, sharding=sharding)
    extra = checkpoint.load(path, scrambled(again), optimizer)
    assert extra["step"] == FIRST
    assert all(torch.equal(a, b) for a, b in zip(on_cpu(again).values(), saved.values(), strict=True))
    shares = rows_of_states(optimizer)
    assert shares == dict.fromkeys(("exp_avg", "exp_avg_sq"), 1 / shape[-1]), shares
    weight = again.blocks[0].down.weight.detach()
    assert len(compat_xla.device_shards(weight)[0].padded) == len(weight) // shape[-1]
    assert train(again, optimizer, axes, FIRST, MORE) == losses, "bit for bit"
    assert all(torch.equal(a, b) for a, b in zip(on_cpu(again).values(), values.values(), strict=True))
    return losses, saved, values


def resumed(path: Path, devices: int) -> tuple[list[float], Values, Values]:
    """Values as loaded; losses and values after the steps that follow."""
    from graph_fsdp import checkpoint

    model, optimizer, axes = compiled(devices)
    checkpoint.load(path, scrambled(model), optimizer)
    loaded = on_cpu(model)
    return train(model, optimizer, axes, FIRST, MORE), loaded, on_cpu(model)


def on_ranks(read: Path, written: Path) -> Values:
    """Values that ranks read of a checkpoint, whole, and write again."""
    import graph_fsdp
    from graph_fsdp import checkpoint

    model = graph_fsdp.compile(make_model(), backend="eager")
    optimizer = adamw(model.parameters())
    checkpoint.load(read, scrambled(model), optimizer)
    checkpoint.save(written, model, optimizer, extra={"step": FIRST})
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.state_dict().items()}


def same(found: Values, expected: Values, bound: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        difference = (value - expected[name]).abs().max().item()
        assert difference <= bound, (name, difference)


def test_a_training_resumes_here_on_other_devices_and_on_ranks(tmp_path: Path) -> None:
    path, of_ranks = tmp_path / "xla", tmp_path / "ranks"
    losses, saved, values = run_xla(interrupted, path, (DEVICES,), "manual", timeout=TIMEOUT)
    for read in run_ranks(on_ranks, 2, path, of_ranks, timeout=TIMEOUT):
        same(read, saved)
    env = {"CPU_NUM_DEVICES": "2"}
    for checkpoint in (path, of_ranks):
        again, loaded, after = run_xla(resumed, checkpoint, 2, env=env, timeout=TIMEOUT)
        same(loaded, saved)
        same(after, values, BOUND)
        assert max(abs(a - b) for a, b in zip(again, losses, strict=True)) < BOUND
    for name in ("whole.safetensors", "whole.pt"):
        assert main(["consolidate", str(path), "-o", str(tmp_path / name)]) == 0
    for read in (load_file(tmp_path / "whole.safetensors"), torch.load(tmp_path / "whole.pt", weights_only=True)):
        plain = scrambled(make_model())
        plain.load_state_dict(read)
        same(on_cpu(plain), saved)


@pytest.mark.parametrize(("shape", "sharding"), [((2, 2), "manual"), ((DEVICES,), "auto")])
def test_replicas_and_the_global_view_resume(tmp_path: Path, shape: tuple[int, ...], sharding: str) -> None:
    run_xla(interrupted, tmp_path / "saved", shape, sharding, timeout=TIMEOUT)


def from_safetensors(path: Path) -> None:
    import torch_xla
    from safetensors.torch import save_file

    import graph_fsdp
    from graph_fsdp import checkpoint
    from graph_fsdp.compat import xla as compat_xla

    axes = mesh(DEVICES)
    expected = scrambled(make_model())
    save_file({name: value.contiguous() for name, value in expected.state_dict().items()}, path)
    with torch.device("meta"):
        on_meta = make_model()
    for model in (make_model(), on_meta):
        graph_fsdp.compile(model, axes, backend="xla", checkpoint=path)
        same(on_cpu(model), on_cpu(expected))
        weight = model.blocks[0].down.weight.detach()
        assert len(compat_xla.device_shards(weight)[0].padded) == len(weight) // DEVICES
    later = graph_fsdp.compile(make_model(), axes, backend="xla")
    checkpoint.load_safetensors(later, path)
    torch_xla.sync()
    same(on_cpu(later), on_cpu(expected))
    from graph_fsdp.xla import shard_batch

    x, _ = vectors(0)
    with torch.no_grad():
        assert (later(shard_batch(x, axes)).cpu() - copy.deepcopy(expected)(x)).abs().max() < BOUND


def test_values_from_safetensors_files(tmp_path: Path) -> None:
    run_xla(from_safetensors, tmp_path / "model.safetensors", timeout=TIMEOUT)
