"""Steps of a Llama on one device that acts as one rank of a cluster: graph_fsdp and FSDP2 with compiled blocks.

    python benchmarks/simulated_cluster.py [--layers 32] [--clusters nvlink infiniband] [--rounds 5] [--out …json]

The collectives of both run on a simulated process group (``simulated_group.py``): they take the time that the cluster's
link would take, beside compute, and every rank is taken to hold what this one holds. Shapes are those of Llama-3-8B,
with one sequence of 8,192 tokens per rank; bfloat16 gathers and compute, float32 reductions, AdamW. On the CPU the
model is small, and links are slower by ``--bandwidth-scale`` and ``--latency-scale`` so that communication matters.

The two take turns in one process, on the same weights and tokens, a step with the link and a step with collectives that
take no time. Per implementation:

- step: median seconds of a step; compute: the same with a link that takes no time, over which the copies remain.
- link: seconds that the link is busy in a step, as planned; with streams they took "busy" times as long, which is 1 but
  for a clock that has changed since the spinning kernel was calibrated.
- bound: max(compute, link); no schedule of the same collectives and kernels is faster.
- peak: bytes that the device's allocator had at once in a step, without what the other implementation holds. Not
  measured on the CPU.

A run fails if the first losses differ by more than LOSS_TOLERANCE, the next ones by more than LATER_TOLERANCE, or the
norms of a parameter's first gradient by more than GRADIENT_TOLERANCE. FSDP2 is set up as torchtitan does it: every
block compiled and sharded, the embedding sharded by itself, norm and head together and kept for backward. On the CPU,
FSDP2 waits for every collective where it starts it, since its overlap needs streams: the CPU's figures say nothing of a
GPU.

The cost model of graph_fsdp is told what the link is (``hardware``).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from llama import LAYERS, LENGTHS, SIZES, llama
from simulated_group import SimulatedGroup, simulated_group
from simulated_link import INSTANT, Link
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp.passes import Hardware, default_pipeline
from graph_fsdp.passes.analysis import hardware as hardware_module

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Relative. The two fuse, and so round to bfloat16, differently, and training makes more of that with each step. A shard
# can be one element, whose gradient then has few right bits: 3e-2 were seen; a wrong factor or a lost part is more.
LOSS_TOLERANCE, LATER_TOLERANCE, COMPARED_LOSSES = 1e-3, 1e-2, 12
GRADIENT_TOLERANCE = 0.1
BATCHES = 4
RESULTS = Path(__file__).parent / "results" / "simulated_cluster.json"


@dataclass(frozen=True)
class Cluster:
    """``ranks`` joined by ``link``: nccl-tests' bus bandwidth, per rank; latencies are round figures."""

    ranks: int
    link: Link


CLUSTERS = {
    "nvlink": Cluster(8, Link(bandwidth=360e9, latency=25e-6)),
    "infiniband": Cluster(64, Link(bandwidth=45e9, latency=100e-6)),
}


def shard_ours(model: nn.Module, mesh: DeviceMesh, hardware: Hardware, backend: str) -> nn.Module:
    passes = default_pipeline(hardware=hardware)
    return graph_fsdp.compile(model, mesh, mp_policy=POLICY, passes=passes, backend=backend)


def shard_fsdp2(model: nn.Module, mesh: DeviceMesh, hardware: Hardware, backend: str) -> nn.Module:
    llama: Any = model
    for block in llama.model.layers:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)  # FSDP2's hooks stay outside
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(llama.model.embed_tokens, mesh=mesh, mp_policy=POLICY)
    fully_shard([llama.model.norm, llama.lm_head], mesh=mesh, mp_policy=POLICY, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    return model


IMPLEMENTATIONS: dict[str, Callable[[nn.Module, DeviceMesh, Hardware, str], nn.Module]] = {
    "graph_fsdp": shard_ours,
    "FSDP2, compiled blocks": shard_fsdp2,
}


def hardware_of(cluster: Cluster, device: torch.device, memory: float | None = None) -> Hardware:
    """The device, joined as the cluster is, or one with ``memory`` gigabytes. Where the messages of a gather are
    launched as a group they share its latency; on the CPU they are collectives of their own."""
    hardware = hardware_module.detect_hardware(device)
    if memory is not None:
        hardware = dataclasses.replace(hardware, memory=int(memory * 1e9))
    return joined_as(hardware, cluster, grouped=device.type != "cpu")


def joined_as(hardware: Hardware, cluster: Cluster, grouped: bool) -> Hardware:
    """What the simulated group does, in the terms of the cost model. Each collective has the latency, if it is not
    ``grouped`` with others, as its ring's steps."""
    ranks, link = cluster.ranks, cluster.link
    step = 0.0 if grouped else link.latency / (ranks - 1)
    return dataclasses.replace(
        hardware,
        island=ranks,
        intra=hardware_module.Link(link.bandwidth, latency=step, efficiency=1.0),
        collective_launch=link.latency if grouped else 0.0,
        overlaps=True,
    )


class Memory:
    """The device's allocator; zeros on the CPU, whose allocator does not count."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.counts = hasattr(self.module, "max_memory_allocated")

    def held(self) -> int:
        if not self.counts:
            return 0
        gc.collect()
        return self.module.memory_allocated(self.device)

    def reset(self) -> None:
        if self.counts:
            self.module.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return self.module.max_memory_allocated(self.device) if self.counts else 0


@dataclass
class Trainer:
    """One implementation in training, and what was measured of it. ``resident``: bytes that it holds between steps."""

    model: nn.Module
    loss_of: Callable[[Tensor, Tensor], Tensor]
    batches: Sequence[Tensor]
    memory: Memory
    resident: int = 0
    peak: int = 0
    losses: list[Tensor] = field(default_factory=list)
    gradient_norms: dict[str, Tensor] = field(default_factory=dict)  # of the first step, of this rank's shards
    step_seconds: list[float] = field(default_factory=list)
    compute_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        fused = self.memory.device.type != "cpu"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)

    def step(self) -> float:
        """Seconds of forward, backward and optimizer."""
        tokens = self.batches[len(self.losses) % len(self.batches)]
        before = self.memory.held()
        self.memory.reset()
        synchronize(self.memory.device)
        begin = time.perf_counter()
        loss = self.loss_of(self.model(input_ids=tokens[:, :-1]).logits, tokens[:, 1:])
        loss.backward()
        if not self.losses:
            self.gradient_norms = gradient_norms(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.memory.device)
        seconds = time.perf_counter() - begin
        self.losses.append(loss.detach())
        self.peak = max(self.peak, self.memory.peak() - (before - self.resident))
        return seconds


def gradient_norms(model: nn.Module) -> dict[str, Tensor]:
    shards = {name: p.grad.to_local() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    return {name: torch.linalg.vector_norm(shard) for name, shard in shards.items()}


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def run_cluster(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    """Train all implementations on a cluster, in turns; what was measured."""
    device, memory = options.device, Memory(options.device)
    generator = torch.Generator().manual_seed(1)
    shape = (1, options.length + 1)
    vocabulary = SIZES[options.size]["vocab_size"]
    batches = [torch.randint(vocabulary, shape, generator=generator).to(device) for _ in range(BATCHES)]
    loss_of = torch.compile(cross_entropy, backend=options.backend)
    hardware = hardware_of(cluster, device, options.memory)
    with simulated_group(cluster.ranks, INSTANT) as group:
        mesh = init_device_mesh(device.type, (cluster.ranks,))
        trainers = {}
        for name, shard in IMPLEMENTATIONS.items():
            before, begin = memory.held(), time.perf_counter()
            model = shard(llama(options.size, options.layers, options.length, device), mesh, hardware, options.backend)
            trainers[name] = trainer = Trainer(model, loss_of, batches, memory)
            for _ in range(options.warmup):
                trainer.step()
            trainer.resident, trainer.peak = memory.held() - before, 0
            print(f"  {name}: {options.warmup} steps after {time.perf_counter() - begin:.0f} s", flush=True)
        for turn in range(options.rounds):
            take_turns(list(trainers.values()), group, cluster.link, turn)
        rows = {name: row(trainer, group, cluster.link) for name, trainer in trainers.items()}
        losses = [[loss.item() for loss in trainer.losses] for trainer in trainers.values()]
        norms = [{name: norm.item() for name, norm in t.gradient_norms.items()} for t in trainers.values()]
        # Models and what is compiled refer to each other, and the next cluster needs their memory.
        del model, trainer, trainers
        torch._dynamo.reset()
        gc.collect()
    ours, other = IMPLEMENTATIONS
    return {
        "ranks": cluster.ranks,
        "bandwidth": cluster.link.bandwidth,
        "latency_s": cluster.link.latency,
        "hardware": hardware.name,
        "implementations": rows,
        "ratios": {
            key: rows[ours][key] / rows[other][key] if rows[other][key] else None
            for key in ("step_s", "compute_s", "link_s", "peak_bytes")
        },
        "losses": dict(zip(rows, losses, strict=True)),
        "first_loss_difference": difference(*(dict(enumerate(values[:1])) for values in losses)),
        "loss_difference": difference(*(dict(enumerate(values[:COMPARED_LOSSES])) for values in losses)),
        "gradient_difference": difference(*norms),
    }


def take_turns(trainers: list[Trainer], group: SimulatedGroup, link: Link, turn: int) -> None:
    """A step of each with the link, and a step of each with one that takes no time; another begins each time."""
    first = turn % len(trainers)
    for trainer in trainers[first:] + trainers[:first]:
        for used, seconds in ((link, trainer.step_seconds), (INSTANT, trainer.compute_seconds)):
            group.link = used
            seconds.append(trainer.step())


def row(trainer: Trainer, group: SimulatedGroup, link: Link) -> dict[str, Any]:
    """A trainer's results, and its collectives in one more step."""
    group.link, group.trace = link, []
    trainer.step()
    launches, group.trace = group.trace, None
    step, compute = statistics.median(trainer.step_seconds), statistics.median(trainer.compute_seconds)
    seconds = sum(launch.seconds for launch in launches)
    bound = max(compute, seconds)
    return {
        "step_s": step,
        "compute_s": compute,
        "link_s": seconds,
        "busy": sum(launch.occupied() for launch in launches) / seconds if trainer.memory.counts else None,
        "bound_s": bound,
        "over_bound": step / bound,
        "collectives": len(launches),
        "moved_bytes": sum(launch.moved for launch in launches),
        "peak_bytes": trainer.peak if trainer.memory.counts else None,
        "steps_s": trainer.step_seconds,
        "computes_s": trainer.compute_seconds,
    }


def difference(ours: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """The largest relative difference; infinite where a value is not finite, or missing."""
    if ours.keys() != other.keys() or not all(map(math.isfinite, [*ours.values(), *other.values()])):
        return math.inf
    pairs = [(value, other[key]) for key, value in ours.items()]
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{'':<24}{'step':>12}{'compute':>12}{'link':>12}{'busy':>7}{'bound':>12}{'step/bound':>12}{'collectives':>13}"
        f"{'moved':>12}{'peak':>12}"
    ]
    for name, r in result["implementations"].items():
        seconds = {key: f"{r[key] * 1e3:>9.1f} ms" for key in ("step_s", "compute_s", "link_s", "bound_s")}
        peak = f"{r['peak_bytes'] / 2**30:.2f} GiB" if r["peak_bytes"] is not None else "-"
        busy = f"{r['busy']:.3f}" if r["busy"] is not None else "-"
        lines.append(
            f"{name:<24}{seconds['step_s']}{seconds['compute_s']}{seconds['link_s']}{busy:>7}"
            f"{seconds['bound_s']}{r['over_bound']:>12.3f}{r['collectives']:>13}"
            f"{r['moved_bytes'] / 2**20:>8.0f} MiB{peak:>12}"
        )
    ratios = {key: f"{value:.3f}" if value is not None else "-" for key, value in result["ratios"].items()}
    lines.append(
        f"ratio: step {ratios['step_s']}, compute {ratios['compute_s']}, link {ratios['link_s']}, peak "
        f"{ratios['peak_bytes']}; differences at most {result['first_loss_difference']:.1e} of the first loss, "
        f"{result['loss_difference']:.1e} of the others, "
        f"{result['gradient_difference']:.1e} of a gradient's norm"
    )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", type=torch.device, default=accelerator or torch.device("cpu"))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--size", choices=SIZES, help="8b on accelerators, small on the CPU unless told")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--length", type=int, help="tokens of the one sequence")
    parser.add_argument("--memory", type=float, help="GB that ours takes the device to have; nothing fails for want")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="steps before, in which everything is compiled")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--bandwidth-scale", type=float, help="of the clusters' bandwidth; 1, on the CPU 1/500")
    parser.add_argument("--latency-scale", type=float, help="of the clusters' latency; 1, on the CPU 10")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    cpu = options.device.type == "cpu"
    if not cpu:
        index = options.device.index or 0
        torch.accelerator.set_device_index(index)
        options.device = torch.device(options.device.type, index)
    defaults = {"size": "small" if cpu else "8b", "bandwidth_scale": 0.002 if cpu else 1.0}
    defaults["latency_scale"] = 10.0 if cpu else 1.0
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.layers = options.layers or LAYERS[options.size]
    options.length = options.length or LENGTHS[options.size]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    cpu = options.device.type == "cpu"
    device_name = "cpu" if cpu else torch.get_device_module(options.device).get_device_name(options.device)
    settings = {k: v for k, v in vars(options).items() if k not in ("clusters", "out", "device")}
    results: dict[str, Any] = {}
    for cluster_name in options.clusters:
        cluster = CLUSTERS[cluster_name]
        link = Link(cluster.link.bandwidth * options.bandwidth_scale, cluster.link.latency * options.latency_scale)
        print(f"{cluster_name}: {cluster.ranks} ranks, {link.bandwidth / 1e9:g} GB/s, {link.latency * 1e6:g} µs")
        results[cluster_name] = run_cluster(Cluster(cluster.ranks, link), options)
        print(table(results[cluster_name]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"torch": torch.__version__, "device": device_name, **settings, "clusters": results}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [
        name
        for name, result in results.items()
        if result["first_loss_difference"] > LOSS_TOLERANCE
        or result["loss_difference"] > LATER_TOLERANCE
        or result["gradient_difference"] > GRADIENT_TOLERANCE
    ]
    if wrong:
        sys.exit(f"losses or gradients differ on {', '.join(wrong)}; see {options.out}")


if __name__ == "__main__":
    main()
