"""Part C: what steps take on the device, in time and in memory, beside FSDP2's and beside what was planned.

On the virtual device seconds are virtual ones, and the host's are those of this process. Ordered by what is wanted
first, should the part's time not do for all.
"""

from __future__ import annotations

import gc
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
from simulated_link import INSTANT, Link, StreamLane
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from workloads import Workload, loss_of

import graph_fsdp
from device_checks import REHEARSED, VIRTUAL, Figures, check, one_of, schedule_of
from device_checks.correctness import RANKS, llama_of
from graph_fsdp.passes.analysis.hardware import detect_hardware

ROUNDS = 5


@check("C", 240)
def steps_of_a_simulated_cluster(device: torch.device) -> Figures:
    """Llama-3-8B's shapes, 8 layers, as one rank of 8 and of 64: ours beside FSDP2 with compiled blocks."""
    if device.type == VIRTUAL:
        link = simulated_cluster.CLUSTERS["nvlink"].link
        return in_turns(
            device, llama_of(device), {"ours": ours(backend="eager", **schedule_of(device)), "FSDP2": fsdp2}, link
        )
    return cluster(device, layers=8)


def cluster(
    device: torch.device,
    layers: int,
    clusters: tuple[str, ...] = ("nvlink", "infiniband"),
    rounds: int = ROUNDS,
    more: tuple[str, ...] = (),
) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cluster.json"
        arguments = ["--device", str(device), "--clusters", *clusters, "--out", str(out), *more]
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


def seconds_until_done(device: torch.device) -> float:
    synchronize(device.type)
    return machine().seconds if device.type == VIRTUAL else time.perf_counter()


def seconds_of_host(device: torch.device) -> float:
    return machine().clocks.host.seconds if device.type == VIRTUAL else time.process_time()


def machine() -> Any:
    from virtual.machine import Machine

    return Machine.current


class Timed:
    """A model in training on a simulated group whose collectives take no time. Seconds of wall and CPU time."""

    def __init__(self, build: Builder, workload: Workload, device: torch.device, policy: str = "bfloat16") -> None:
        self.workload, self.device = workload, device
        setup = Setup(workload.blocks, init_device_mesh(device.type, (RANKS,)), POLICIES[policy])
        self.model = build(workload.make(device), setup)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = workload.tokens(0, 0, device)

    def step(self) -> tuple[float, float]:
        wall, cpu = seconds_until_done(self.device), seconds_of_host(self.device)
        loss_of(self.model(**self.batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        launched = seconds_of_host(self.device) - cpu
        return seconds_until_done(self.device) - wall, launched


def in_turns(device: torch.device, workload: Workload, builders: dict[str, Builder], link: Link = INSTANT) -> Figures:
    """Median seconds of a step, and of the host until it has launched one, by implementation."""
    rounds, warmup = (1, 2) if device.type in REHEARSED else (4 * ROUNDS, 4)  # CUDA graphs are captured in the third
    with one_of(device, RANKS, link):
        trainers = {name: Timed(build, workload, device) for name, build in builders.items()}
        for trainer in trainers.values():
            for _ in range(warmup):
                trainer.step()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
        for _ in range(rounds):
            for name, trainer in trainers.items():
                times[name].append(trainer.step())
    return {
        name: {"step_s": statistics.median(w for w, _ in pairs), "host_s": statistics.median(c for _, c in pairs)}
        for name, pairs in times.items()
    }


def timed_llama(device: torch.device) -> Workload:
    return llama_of(device, layers=8)


def eager_builders(device: torch.device) -> dict[str, Builder]:
    return {"ours": ours(backend="eager", **schedule_of(device)), "FSDP2": fsdp2}


def narrow(device: torch.device) -> Workload:
    """A GPT whose kernels take no time: what is left is the host's."""
    return Workload(layers=2 if device.type in REHEARSED else 24, width=64, heads=4, batch=1, length=32)


@check("C", 200, host="counted")
def host_time(device: torch.device) -> Figures:
    """CPU seconds of a step of a narrow GPT: ours, with CUDA graphs on CUDA, FSDP2, FSDP2 with compiled blocks."""
    if device.type in REHEARSED:
        return in_turns(device, narrow(device), eager_builders(device))
    builders: dict[str, Builder] = {"ours": ours(), "FSDP2": fsdp2, "FSDP2, compiled blocks": fsdp2_compiled}
    if device.type == "cuda":
        builders["ours, CUDA graphs"] = ours(cuda_graphs=True)
    return in_turns(device, narrow(device), builders)


@check("C", 120, host="counted")
def optimizer_steps(device: torch.device) -> Figures:
    """Seconds of AdamW's step over the narrow GPT's parameters, of the host and until the device is done: fused, over
    the parameters of ours and of FSDP2, and over slices of the shard storage (``distribute_optimizer``)."""
    builders = {"ours": ours(backend="eager", **schedule_of(device)), "FSDP2": fsdp2}
    figures: Figures = {}
    with one_of(device, RANKS):
        trainers = {name: Timed(build, narrow(device), device) for name, build in builders.items()}
        trainers["ours, distributed"] = Timed(builders["ours"], narrow(device), device)
        graph_fsdp.distribute_optimizer(trainers["ours, distributed"].optimizer)
        for name, trainer in trainers.items():
            times = []
            for _ in range(3 if device.type in REHEARSED else 4 * ROUNDS):
                loss_of(trainer.model(**trainer.batch)).backward()
                wall, cpu = seconds_until_done(device), seconds_of_host(device)
                trainer.optimizer.step()
                launched = seconds_of_host(device) - cpu
                times.append((seconds_until_done(device) - wall, launched))
                trainer.optimizer.zero_grad()
            figures[name] = {
                "step_s": statistics.median(w for w, _ in times),
                "host_s": statistics.median(c for _, c in times),
            }
    return figures


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unit": {"activation_checkpointing": "unit"},
    "selective": {"activation_checkpointing": "selective"},
    "activations on the CPU": {"activation_checkpointing": "offload"},
    "parameters on the CPU": {"offload_policy": CPUOffloadPolicy()},
}


@check("C", 120, needs=["cuda", "xpu", VIRTUAL], reason="the CPU's allocator does not count")
def memory_beside_the_plan(device: torch.device) -> Figures:
    """Bytes that the allocator had live and reserved at most in a step, beside what was planned; and step times."""
    return measured_memory(device, timed_llama(device), {})


@check("C", 240, needs=["cuda", "xpu"], reason="Inductor decides what lies in memory")
def memory_of_other_options_beside_the_plan(device: torch.device) -> Figures:
    workload = timed_llama(device)
    figures = {name: measured_memory(device, workload, OPTIONS[name]) for name in list(OPTIONS)[1:]}
    return figures


def measured_memory(device: torch.device, workload: Workload, options: dict[str, Any]) -> Figures:
    accelerator = torch.accelerator
    torch._dynamo.reset()
    gc.collect()  # the model before, whose modules are in cycles
    accelerator.memory.empty_cache()
    if device.type == VIRTUAL:
        options = {**options, **schedule_of(device), "backend": "eager"}
    where = torch.device("cpu") if "offload_policy" in options else device
    take_workspaces(device)
    before = accelerator.memory_allocated(device)
    with one_of(device, RANKS):
        mesh = init_device_mesh(device.type, (RANKS,))
        model = graph_fsdp.compile(workload.make(where), mesh, mp_policy=POLICIES["bfloat16"], **options)
        accelerator.memory.empty_cache()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        seconds = []
        for step in range(3 if device.type == VIRTUAL else 6):
            if step == 2:
                accelerator.reset_peak_memory_stats(device)
            begin = seconds_until_done(device)
            loss_of(model(**workload.tokens(step, 0, device))).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(seconds_until_done(device) - begin)
    found: Figures = {
        "before": before,
        "between steps": accelerator.memory_allocated(device),
        "live": accelerator.max_memory_allocated(device),
        "reserved": accelerator.max_memory_reserved(device),
        "step_s": statistics.median(seconds[2:]),
    }
    del model, optimizer
    plan = graph_fsdp.plan(
        lambda: workload.make(torch.device("meta")),
        workload.tokens(0, 0, torch.device("cpu")),
        mesh_shape=(RANKS,),
        hardware="h100" if device.type == VIRTUAL else detect_hardware(device),
        mp_policy=POLICIES["bfloat16"],
        **options,
    )
    found |= {"planned live": plan.peak_nbytes, "planned reserved": plan.reserved.nbytes}
    found["planned step_s"] = plan.step_seconds
    return found


def take_workspaces(device: torch.device) -> None:
    """Have the libraries of matrix products take their memory, which they keep, in forward's and backward's thread."""
    matrix = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (matrix @ matrix).sum().backward()


@check("C", 120)
def seconds_of_kernels(device: torch.device) -> Figures:
    """What ``graph_fsdp.profile`` measured of a Llama's regions, for the cost model."""
    workload, rehearsal = timed_llama(device), device.type in REHEARSED
    with one_of(device, RANKS):
        setup = Setup(workload.blocks, init_device_mesh(device.type, (RANKS,)), POLICIES["bfloat16"])
        model = ours(backend="eager" if rehearsal else "inductor")(workload.make(device), setup)
        steps = {"steps": 2, "warmup": 1} if rehearsal else {"steps": 3}
        profile = graph_fsdp.profile(model, **steps, **workload.tokens(0, 0, device))
    print(profile)
    return {"table": str(profile).splitlines()}


@check("C", 200, needs=["cuda"], reason="benchmarks/virtual_cluster.py rehearses it")
def steps_of_2048_tokens(device: torch.device) -> Figures:
    """The same with a quarter of the tokens: over 64 ranks the link decides by far."""
    return cluster(device, layers=8, more=("--length", "2048"))


@check("C", 200, needs=["cuda"], reason="benchmarks/virtual_cluster.py rehearses it")
def steps_of_2048_tokens_on_a_full_device(device: torch.device) -> Figures:
    """The same where the cost model takes the device to have less memory than a step takes: ours gathers no further
    ahead than FSDP2 does."""
    return cluster(device, layers=8, more=("--length", "2048", "--memory", "5"))


@check("C", 200, needs=["cuda"], reason="the virtual device's streams have no priorities")
def steps_with_a_link_of_normal_priority(device: torch.device) -> Figures:
    """The same over 8 ranks, where collectives have no priority over compute: those of NCCL's own stream have none."""
    StreamLane.priority = 0
    return cluster(device, layers=8, clusters=("nvlink",))


@check("C", 300, needs=["cuda"], reason="it trains 8 billion parameters")
def steps_of_32_layers(device: torch.device) -> Figures:
    """Llama-3-8B whole, as one rank of 64."""
    return cluster(device, layers=32, clusters=("infiniband",), rounds=3)
