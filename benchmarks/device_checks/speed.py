"""Part C: what steps take on the device, in time and in memory, beside FSDP2's and beside what was planned."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import simulated_cluster
import torch
from harness import POLICIES, synchronize
from implementations import Builder, Setup, fsdp2, fsdp2_compiled, ours
from simulated_group import simulated_group
from simulated_link import INSTANT, StreamLane
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from workloads import Workload, loss_of

import graph_fsdp
from device_checks import Figures, check
from device_checks.correctness import RANKS, llama_of
from graph_fsdp.passes.analysis.hardware import detect_hardware

ROUNDS = 5


@check("C", 240)
def steps_of_a_simulated_cluster(device: torch.device) -> Figures:
    """Llama-3-8B's shapes, 8 layers, as one rank of 8 and of 64: ours beside FSDP2 with compiled blocks."""
    return cluster(device, layers=8)


@check("C", 240, needs="cuda")
def steps_with_a_link_of_normal_priority(device: torch.device) -> Figures:
    """The same over 8 ranks, where collectives have no priority over compute: those of NCCL's own stream have none."""
    StreamLane.priority = 0
    return cluster(device, layers=8, clusters=("nvlink",))


@check("C", 300, needs="cuda")
def steps_of_32_layers(device: torch.device) -> Figures:
    """Llama-3-8B whole, as one rank of 64."""
    return cluster(device, layers=32, clusters=("infiniband",), rounds=3)


def cluster(
    device: torch.device, layers: int, clusters: tuple[str, ...] = ("nvlink", "infiniband"), rounds: int = ROUNDS
) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cluster.json"
        arguments = ["--device", str(device), "--clusters", *clusters, "--out", str(out)]
        if device.type == "cpu":
            arguments += ["--size", "tiny", "--layers", "2", "--rounds", "1", "--warmup", "1", "--backend", "eager"]
        else:
            arguments += ["--layers", str(layers), "--rounds", str(rounds)]
        simulated_cluster.main(arguments)
        found = json.loads(out.read_text())["clusters"]
    kept = ("step_s", "compute_s", "link_s", "over_bound", "peak_bytes")
    return {
        name: {
            "ratios": result["ratios"],
            **{who: {key: row[key] for key in kept} for who, row in result["implementations"].items()},
        }
        for name, result in found.items()
    }


class Timed:
    """A model in training on a simulated group whose collectives take no time. Seconds of wall and CPU time."""

    def __init__(self, build: Builder, workload: Workload, device: torch.device, policy: str = "bfloat16") -> None:
        self.workload, self.device = workload, device
        setup = Setup(workload.blocks, init_device_mesh(device.type, (RANKS,)), POLICIES[policy])
        self.model = build(workload.make(device), setup)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = workload.tokens(0, 0, device)

    def step(self) -> tuple[float, float]:
        synchronize(self.device.type)
        wall, cpu = time.perf_counter(), time.process_time()
        loss_of(self.model(**self.batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        launched = time.process_time() - cpu
        synchronize(self.device.type)
        return time.perf_counter() - wall, launched


def in_turns(device: torch.device, workload: Workload, builders: dict[str, Builder]) -> Figures:
    """Median seconds of a step, and of the host until it has launched one, by implementation."""
    with simulated_group(RANKS, INSTANT):
        trainers = {name: Timed(build, workload, device) for name, build in builders.items()}
        for trainer in trainers.values():
            for _ in range(4):  # CUDA graphs are captured in the third
                trainer.step()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
        for _ in range(4 * ROUNDS):
            for name, trainer in trainers.items():
                times[name].append(trainer.step())
    return {
        name: {"step_s": statistics.median(w for w, _ in pairs), "host_s": statistics.median(c for _, c in pairs)}
        for name, pairs in times.items()
    }


def narrow(device: torch.device) -> Workload:
    """A GPT whose kernels take no time: what is left is the host's."""
    return Workload(layers=2 if device.type == "cpu" else 24, width=64, heads=4, batch=1, length=32)


@check("C", 200)
def host_time(device: torch.device) -> Figures:
    """CPU seconds of a step of a narrow GPT: ours, with CUDA graphs on CUDA, FSDP2, FSDP2 with compiled blocks."""
    if device.type == "cpu":
        return in_turns(device, narrow(device), {"ours": ours(backend="eager"), "FSDP2": fsdp2})
    builders: dict[str, Builder] = {"ours": ours(), "FSDP2": fsdp2, "FSDP2, compiled blocks": fsdp2_compiled}
    if device.type == "cuda":
        builders["ours, CUDA graphs"] = ours(cuda_graphs=True)
    return in_turns(device, narrow(device), builders)


@check("C", 300, needs="cuda")
def memory_beside_the_plan(device: torch.device) -> Figures:
    """Bytes that the allocator had live and reserved at most in a step, beside what was planned; and step times."""
    figures: Figures = {}
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "unit": {"activation_checkpointing": "unit"},
        "selective": {"activation_checkpointing": "selective"},
        "activations on the CPU": {"activation_checkpointing": "offload"},
    }
    for name, chosen in options.items():
        figures[name] = measured_memory(device, llama_of(device, layers=8), chosen)
    figures["parameters on the CPU"] = measured_memory(
        device, llama_of(device, layers=8), {"offload_policy": CPUOffloadPolicy()}, planned=False
    )
    return figures


def measured_memory(device: torch.device, workload: Workload, options: dict[str, Any], planned: bool = True) -> Figures:
    module: Any = torch.get_device_module(device)
    torch._dynamo.reset()
    module.empty_cache()
    where = torch.device("cpu") if "offload_policy" in options else device
    with simulated_group(RANKS, INSTANT):
        mesh = init_device_mesh(device.type, (RANKS,))
        model = graph_fsdp.compile(workload.make(where), mesh, mp_policy=POLICIES["bfloat16"], **options)
        module.empty_cache()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        seconds = []
        for step in range(6):
            if step == 2:
                module.reset_peak_memory_stats(device)
            module.synchronize(device)
            begin = time.perf_counter()
            loss_of(model(**workload.tokens(step, 0, device))).backward()
            optimizer.step()
            optimizer.zero_grad()
            module.synchronize(device)
            seconds.append(time.perf_counter() - begin)
    found: Figures = {
        "live": module.max_memory_allocated(device),
        "reserved": module.max_memory_reserved(device),
        "step_s": statistics.median(seconds[2:]),
    }
    if planned:
        plan = graph_fsdp.plan(
            lambda: workload.make(torch.device("meta")),
            workload.tokens(0, 0, torch.device("cpu")),
            mesh_shape=(RANKS,),
            hardware=detect_hardware(device),
            mp_policy=POLICIES["bfloat16"],
            **options,
        )
        found |= {"planned live": plan.peak_nbytes, "planned reserved": plan.reserved.nbytes}
        found["planned step_s"] = plan.step_seconds
    return found


@check("C", 200)
def seconds_of_kernels(device: torch.device) -> Figures:
    """What ``graph_fsdp.profile`` measured of a Llama's regions, for the cost model."""
    workload = llama_of(device, layers=8)
    with simulated_group(RANKS, INSTANT):
        setup = Setup(workload.blocks, init_device_mesh(device.type, (RANKS,)), POLICIES["bfloat16"])
        backend = "eager" if device.type == "cpu" else "inductor"
        model = ours(backend=backend)(workload.make(device), setup)
        profile = graph_fsdp.profile(model, steps=3, **workload.tokens(0, 0, device))
    print(profile)
    return {"table": str(profile).splitlines()}
