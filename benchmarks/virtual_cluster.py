"""A step of a Llama or a GPT on one virtual H100 as a rank of 8, 64 or 512: graph_fsdp beside FSDP2, in virtual time.

    python benchmarks/virtual_cluster.py [--sizes 8b gpt] [--lengths 8192 2048] [--ranks 8 64 512] [--host zero counted]
    python benchmarks/virtual_cluster.py --json

The programs are the real ones: torch's ``fully_shard``, graph_fsdp's passes and runtime, autograd and the optimizer, on
the virtual device (``benchmarks/virtual``) without numbers. Every kernel takes the seconds of the cost model of
``graph_fsdp.passes`` on the stream that the program put it on, every collective those of the cluster's links, and
collectives that share a link run one after the other, in the order in which they were launched, on whichever streams.
What compilers would fuse costs both sides the same (``virtual/compiled.py``). Nothing here was run on a GPU.

Implementations: ``ours`` is ``graph_fsdp.compile`` with ``default_pipeline(hardware=…)``. In ``ours_ahead`` each
embedding is a unit too, which the optimizer gathers for the next forward (``distribute_optimizer(gather_ahead=…)``).
FSDP2 is set up as torchtitan does it: every block sharded, the embedding by itself, norm and head together and kept for
backward; ``fsdp2_compiled`` compiles each block and the loss, ``fsdp2`` nothing. ``simple_fsdp`` is ``simple_fsdp.py``
under ``torch.compile`` of the whole model, which waits for each parameter's collective where it starts it. All gather
in bfloat16, reduce in float32, and train by fused AdamW.

Prints a table of each case, and writes ``results/virtual_cluster.json`` or ``--out``. With ``--json`` it prints one
line of JSON for each case and implementation instead, as soon as it is there, and writes no file but ``--out``.

- step: virtual seconds of forward, backward and optimizer, after two steps of warmup. With ``--host zero`` the host
  launches in no time, so that figures are the same in every run; "counted" adds its processor time between launches.
- compute: seconds of the kernels on the stream that computes; link: of the collectives; bound: max(compute, link).
- floor: of ours, what no order of its kernels and collectives undercuts, by what they depend on
  (``virtual/floor.py``), over what the report's clock says of their order; and the optimizer behind it.
- exposed: step less compute.
- predicted: what graph_fsdp's report says of forward and backward, over their virtual seconds. Of ``ours_ahead``, whose
  optimizer the model knows, the files have what it says of the whole step, too.
- disturbed: the step once more (``virtual/replay.py``) where one rank computes ``--straggler`` times slower and, with
  ``--contention``, a running collective takes processors from compute. The host takes no time there.

Kernels run as if alone: copies of FSDP2 on streams of their own take nothing from what is computed meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig
from llama import SIZES, llama
from simple_fsdp import shard_parameters
from virtual.compiled import backend, compiled_regions
from virtual.cost import Network
from virtual.floor import backward_floor, forward_floor
from virtual.group import virtual_group
from virtual.machine import Host, Machine, Operation
from virtual.replay import seconds_under

import graph_fsdp
from graph_fsdp.passes import Hardware, default_pipeline, find_hardware
from graph_fsdp.passes.analysis.simulate import Conditions

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RESULTS = Path(__file__).parent / "results" / "virtual_cluster.json"
WARMUP = 2
UNDISTURBED = Conditions()
AHEAD = "ours_ahead"


@dataclass(frozen=True)
class Workload:
    """A model of ``layers`` blocks, and the tokens of a rank's one sequence. ``size``: of a Llama (``llama.SIZES``), or
    "gpt", the width of Llama-3-8B with GPT-2's vocabulary."""

    size: str
    layers: int
    length: int
    width: int = 4096
    vocabulary: int = 50304

    @property
    def name(self) -> str:
        return self.size if self.size == "gpt" else f"llama_{self.size}"

    def make(self) -> nn.Module:
        with torch.device("virtual"):
            if self.size != "gpt":
                return Logits(llama(self.size, self.layers, self.length, torch.device("virtual")))
            return GPTLogits(GPTConfig(self.vocabulary, self.layers, self.width, self.width // 128, self.length))

    def tokens(self) -> Tensor:
        return torch.zeros(1, self.length, dtype=torch.int64, device="virtual")


class Logits(nn.Module):
    """A Llama's logits; its parts under the names that FSDP2 is set up by."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.whole = model

    @property
    def parts(self) -> tuple[nn.ModuleList, list[nn.Module], list[nn.Module]]:
        """The blocks, the embeddings, and what follows the blocks."""
        model: Any = self.whole
        return model.model.layers, [model.model.embed_tokens], [model.model.norm, model.lm_head]

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.whole(input_ids=tokens).logits
        return logits


class GPTLogits(GPT):
    """The GPT of the examples without its loss."""

    @property
    def parts(self) -> tuple[nn.ModuleList, list[nn.Module], list[nn.Module]]:
        return self.blocks, [self.tokens, self.positions], [self.norm, self.head]

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, cross_entropy

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.model(tokens), tokens)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def ours(model: nn.Module, mesh: DeviceMesh, hardware: Hardware) -> nn.Module:
    return graph_fsdp.compile(WithLoss(model), mesh, mp_policy=POLICY, passes=default_pipeline(hardware=hardware))


def ours_ahead(model: Any, mesh: DeviceMesh, hardware: Hardware) -> nn.Module:
    blocks, embeddings, _ = model.parts
    passes, units = default_pipeline(hardware=hardware), [*embeddings, *blocks]
    return graph_fsdp.compile(WithLoss(model), mesh, mp_policy=POLICY, passes=passes, auto_wrap_policy=units)


def fsdp2(model: Any, mesh: DeviceMesh, hardware: Hardware) -> nn.Module:
    blocks, embeddings, head = model.parts
    for module in [*blocks, *embeddings]:
        fully_shard(module, mesh=mesh, mp_policy=POLICY)
    fully_shard(head, mesh=mesh, mp_policy=POLICY, reshard_after_forward=False)
    return WithLoss(fully_shard(model, mesh=mesh, mp_policy=POLICY))


def fsdp2_compiled(model: Any, mesh: DeviceMesh, hardware: Hardware) -> nn.Module:
    for block in model.parts[0]:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)  # FSDP2's hooks stay outside
    sharded: Any = fsdp2(model, mesh, hardware)
    sharded.loss = torch.compile(cross_entropy, backend=backend, fullgraph=True)
    return sharded  # type: ignore[no-any-return]


def simple_fsdp(model: nn.Module, mesh: DeviceMesh, hardware: Hardware) -> nn.Module:
    shard_parameters(model, mesh, POLICY, reshard=True)
    compiled: Any = torch.compile(WithLoss(model), backend=backend, fullgraph=True)
    return compiled  # type: ignore[no-any-return]


IMPLEMENTATIONS: dict[str, Callable[[nn.Module, DeviceMesh, Hardware], nn.Module]] = {
    "ours": ours,
    AHEAD: ours_ahead,
    "fsdp2_compiled": fsdp2_compiled,
    "fsdp2": fsdp2,
    "simple_fsdp": simple_fsdp,
}


@dataclass(frozen=True)
class Row:
    """Virtual seconds of one step; see the module. ``graphs_s``: of forward and backward alone."""

    step_s: float
    graphs_s: float
    compute_s: float
    link_s: float
    peak_bytes: int
    disturbed_s: float
    predicted_s: float | None = None
    floor_s: float | None = None
    predicted_step_s: float | None = None

    @property
    def bound_s(self) -> float:
        return max(self.compute_s, self.link_s)

    @property
    def exposed_s(self) -> float:
        return self.step_s - self.compute_s


def row(operations: Sequence[Operation], times: Sequence[float], peak: int, disturbed: float) -> Row:
    """What ran in a step; ``times``: of its begin, of the end of its backward, and of its end."""
    begin, graphs, end = times
    links = [op for op in operations if op.links]
    kernels = [op for op in operations if not op.links and op.stream == 0]
    compute, link = sum(op.seconds for op in kernels), sum(op.seconds for op in links)
    return Row(end - begin, graphs - begin, compute, link, peak, disturbed)


def measure(
    name: str,
    workload: Workload,
    ranks: int,
    hardware: Hardware,
    host: Host = "zero",
    conditions: Conditions = UNDISTURBED,
) -> tuple[Row, Machine]:
    """Train an implementation on a fresh machine, whose ``operations`` are those of the last step."""
    torch._dynamo.reset()
    machine = Machine(hardware, host=host, numbers=False, traced=True)
    with machine, virtual_group(ranks, Network(hardware=hardware)), compiled_regions():
        mesh = init_device_mesh("virtual", (ranks,))
        whole: Any = workload.make()
        embeddings, model = len(whole.parts[1]), IMPLEMENTATIONS[name](whole, mesh, hardware)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if name == AHEAD:
            graph_fsdp.distribute_optimizer(optimizer, gather_ahead=embeddings)
        tokens = workload.tokens()
        operations = machine.operations
        assert operations is not None
        for _ in range(WARMUP + 1):
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            operations.clear()
            begin = machine.seconds
            model(tokens).backward()
            graphs = machine.seconds
            optimizer.step()
            optimizer.zero_grad()
            torch.accelerator.synchronize()
        peak, disturbed = torch.accelerator.max_memory_allocated(), seconds_under(conditions, operations, hardware)
        found = row(operations, (begin, graphs, machine.seconds), peak, disturbed)
        if name == "ours":
            report = graph_fsdp.inspect(model)
            forward, backward = (report.latest(phase).scheduled() for phase in ("forward", "backward"))
            floor = forward_floor(forward.graph, forward.cost) + backward_floor(backward.graph, backward.cost)
            predicted = forward.timeline.seconds + backward.timeline.seconds
            floor *= found.graphs_s / predicted  # in virtual seconds
            found = replace(found, predicted_s=predicted, floor_s=floor + found.step_s - found.graphs_s)
        if name == AHEAD:
            step = graph_fsdp.inspect(model).step_predicted()
            found = replace(found, predicted_step_s=None if step is None else step.seconds)
        del model, optimizer
        torch._dynamo.reset()
        gc.collect()
    return found, machine


def line(name: str, workload: Workload, ranks: int, host: Host, found: Row) -> dict[str, Any]:
    """What ``--json`` prints of an implementation in a case; times in milliseconds."""
    times = {
        "step_ms": found.step_s,
        "compute_ms": found.compute_s,
        "link_ms": found.link_s,
        "bound_ms": found.bound_s,
        "exposed_ms": found.exposed_s,
    }
    predictions = {
        "predicted_ms": found.predicted_s,
        "floor_ms": found.floor_s,
        "predicted_step_ms": found.predicted_step_s,
    }
    return {
        "model": workload.name,
        "layers": workload.layers,
        "tokens": workload.length,
        "ranks": ranks,
        "implementation": name,
        **{key: round(seconds * 1e3, 4) for key, seconds in times.items()},
        **{key: None if seconds is None else round(seconds * 1e3, 4) for key, seconds in predictions.items()},
        "graphs_ms": round(found.graphs_s * 1e3, 4),
        "peak_bytes": found.peak_bytes,
        "host": host,
    }


def table(rows: dict[str, Row]) -> str:
    columns = ("step", "compute", "link", "bound", "floor", "exposed", "disturbed")
    header = f"{'':<26}" + "".join(f"{column:>11}" for column in columns)
    lines = [header + f"{'/bound':>8}{'/floor':>8}{'predicted':>11}{'peak':>11}"]
    for name, r in rows.items():
        times = (r.step_s, r.compute_s, r.link_s, r.bound_s, r.floor_s, r.exposed_s, r.disturbed_s)
        cells = "".join(f"{'-' if seconds is None else f'{seconds * 1e3:.2f}':>11}" for seconds in times)
        of_floor = f"{r.step_s / r.floor_s:.3f}" if r.floor_s is not None else "-"
        predicted = f"{r.predicted_s / r.graphs_s:.3f}" if r.predicted_s is not None else "-"
        ratios = f"{r.step_s / r.bound_s:>8.3f}{of_floor:>8}{predicted:>11}"
        lines.append(f"{name:<26}{cells}{ratios}{r.peak_bytes / 2**30:>7.2f} GiB")
    first, *others = rows
    compared = (f"{rows[first].step_s / rows[other].step_s:.3f} of {other}" for other in others)
    return "\n".join([*lines, f"{first}: {', '.join(compared)}"] if others else lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=("gpt", *SIZES), default=["8b", "gpt"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 2048], help="tokens of a rank's sequence")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--hardware", default="h100")
    parser.add_argument(
        "--memory", type=float, help="GB of the device, instead of the hardware's; nothing fails for want"
    )
    parser.add_argument("--host", nargs="+", choices=("zero", "counted"), default=["zero"])
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--straggler", type=float, default=1.08, help="one rank computes so many times slower")
    parser.add_argument("--contention", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true", help="print one line of JSON per case and implementation")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.name} of benchmarks/results; none with --json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    hardware, conditions = find_hardware(options.hardware), Conditions(options.straggler, options.contention)
    if options.memory is not None:
        hardware = replace(hardware, memory=int(options.memory * 1e9))
    results: list[dict[str, Any]] = []
    for size in options.sizes:
        for length in options.lengths:
            workload = Workload(size, options.layers, length)
            for ranks in options.ranks:
                for host in options.host:
                    of = {"workload": asdict(workload), "ranks": ranks, "host": host}
                    rows = {}
                    for name in options.implementations:
                        rows[name], _ = measure(name, workload, ranks, hardware, host, conditions)
                        if options.json:
                            print(json.dumps(line(name, workload, ranks, host, rows[name])), flush=True)
                    if not options.json:
                        print(f"\n{size}, {options.layers} layers, {length} tokens, {ranks} ranks, host {host}; in ms")
                        print(table(rows), flush=True)
                    results.append({**of, "rows": {name: asdict(found) for name, found in rows.items()}})
    if out := options.out or (None if options.json else RESULTS):
        out.parent.mkdir(parents=True, exist_ok=True)
        report = {"torch": torch.__version__, "hardware": hardware.name, **asdict(conditions), "results": results}
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
