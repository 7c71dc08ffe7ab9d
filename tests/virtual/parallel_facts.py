"""Parallelism beside FSDP on the virtual device, as one of four ranks that are alike, and what its profile shows."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from both_devices import KINDS, on_virtual, ours, overlapped, same_numbers, strict
from experts import Experts, MoE
from models import MLP
from tensor_parallel import Block, Transformer, with_sequences
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from virtual.machine import Machine

import graph_fsdp
from graph_fsdp.passes import default_pipeline


def device() -> str:
    return "cpu" if Machine.current is None else "virtual"


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(16, (2, 8), generator=generator)


def tensor_parallelism_beside_fsdp() -> None:
    """With sequences divided, too."""

    def shard(model: Any) -> nn.Module:
        mesh = init_device_mesh(device(), (2, 2), mesh_dim_names=("dp", "tp"))
        return ours(with_sequences(model, mesh["tp"]), mesh=mesh["dp"], auto_wrap_policy={Block})

    with strict():
        machine = same_numbers(shard, functools.partial(Transformer, attention=False), tokens)
    assert overlapped(machine) > 0.0


def experts_on_a_mesh_of_their_own() -> None:
    def shard(model: Any) -> nn.Module:
        mesh = init_device_mesh(device(), (2, 2), mesh_dim_names=("efsdp", "ep"))
        return ours(model.distribute(mesh["ep"]), mesh=mesh._flatten("dp"), meshes={Experts: mesh["efsdp"]})

    with strict():
        machine = same_numbers(
            shard,
            functools.partial(MoE, 4, 16),
            lambda generator: torch.randn(16, 16, generator=generator),
        )
    assert overlapped(machine) > 0.0


def statistics_of_all_ranks() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.SyncBatchNorm(16), nn.ReLU(), nn.Linear(16, 16))

    with strict():
        same_numbers(functools.partial(ours, auto_wrap_policy={nn.Linear}), make)


def a_measured_trace_has_the_times_of_the_device() -> None:
    """Of the collectives of a step, beside the predicted ones."""
    machine = Machine("h100", traced=True)

    def run(place: str) -> list[dict[str, Any]]:
        model = ours(MLP(depth=4).to(place), passes=default_pipeline(hardware="h100"), reshard_after_forward=True)
        profile = graph_fsdp.profile(model, torch.ones(4, 16, device=place), steps=1, warmup=1)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile.save_trace(path, predicted=True)
            return json.loads(path.read_text())["traceEvents"]

    events = on_virtual(machine, run)
    predicted, measured = (
        {kind: slices(events, process, kind) for kind in ("region", "communication")} for process in (0, 1)
    )
    assert [name for name, _ in measured["communication"]] == [name for name, _ in predicted["communication"]]
    assert len(measured["region"]) == 10
    for (name, seconds), (other, expected) in zip(measured["region"], predicted["region"], strict=True):
        assert name == other and abs(seconds / expected - 1) < 1e-6, "its kernels take what the cost model says"
    collectives = [op.end - op.begin for op in machine.operations or () if op.operator in KINDS]
    assert min(seconds for _, seconds in measured["communication"]) > 0.99e6 * min(collectives)


def slices(events: list[dict[str, Any]], process: int, kind: str) -> list[tuple[str, float]]:
    """Names and microseconds of what a process of a trace did, in order."""
    found = [e for e in events if e["ph"] == "X" and e["pid"] == process and e["cat"] == kind]
    return [(e["name"], e["dur"]) for e in sorted(found, key=lambda e: e["ts"])]


FOUND = (
    tensor_parallelism_beside_fsdp,
    experts_on_a_mesh_of_their_own,
    statistics_of_all_ranks,
    a_measured_trace_has_the_times_of_the_device,
)
