"""How long the passes take, by pass and by depth, and that they grow linearly. No device, no network, one core.

    OMP_NUM_THREADS=1 python benchmarks/pass_time.py --depths 250 500 1000
    OMP_NUM_THREADS=1 python benchmarks/pass_time.py --config benchmarks/configs/llama_3_405b.json --depths 6 126

A model of equal pre-norm MLP blocks, tiny in width, is traced by ``graph_fsdp.compile`` on a fake process group of
eight ranks. The capture ends when the passes have run on the forward and the backward graph: nothing is compiled, and
no collective runs. What torch needs to trace, differentiate and partition the model is shown apart.

With ``--config`` it is the causal language model of a Hugging Face configuration, with the depths as numbers of layers,
traced and planned as ``graph-fsdp plan`` does it on 2,048 replicas of 8 ranks, each depth in a process of its own: CPU
seconds from the call of ``graph_fsdp.planning.trace`` until all passes have run and were verified, what each further
layer adds, and those of the whole plan. Nothing is written.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp.passes import Graph, GraphPass, PassContext, PassPipeline, default_pipeline
from graph_fsdp.passes.ir.graph import PHASES

WORLD_SIZE = 8
WIDTH = 8
RESULTS = Path(__file__).parent / "results" / "pass_time.json"


class Block(nn.Module):
    """Pre-norm MLP with a residual connection: six parameters, one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CaptureEndsHere(Exception):
    """Raised when the passes have run on the forward and the backward graph."""


class TimedPipeline(PassPipeline):
    """Times each run as a whole, and ``Graph.dependencies()``, which no default pass needs. Then ends the capture."""

    def __init__(self, passes: Sequence[GraphPass]) -> None:
        super().__init__(passes)
        self.seconds = self.cpu_seconds = 0.0
        self.dependencies_seconds = 0.0
        self.nodes: dict[str, int] = {}

    def run(self, graphs: Sequence[Graph], context: PassContext) -> None:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        super().run(graphs, context)
        self.seconds += time.perf_counter() - begin
        self.cpu_seconds += time.process_time() - cpu_begin
        self.nodes |= {graph.phase: len(graph.fx_graph.nodes) for graph in graphs}
        if "backward" not in self.nodes:
            return
        gc.collect()  # what the passes left to collect is not the cost of dependencies
        begin = time.perf_counter()
        for graph in graphs:
            graph.dependencies()
        self.dependencies_seconds = time.perf_counter() - begin
        raise CaptureEndsHere


@dataclass
class Row:
    """Seconds of one pass on one graph: the pass itself, the verifier after it, the copy for ``inspect``."""

    phase: str
    name: str
    nodes: int  # of the graph after the pass
    seconds: float
    verify_seconds: float
    snapshot_seconds: float

    @property
    def total(self) -> float:
        return self.seconds + self.verify_seconds + self.snapshot_seconds


@dataclass
class Measurement:
    """One model. ``total_seconds`` is all that the pipeline does: passes, verifier, snapshots, and ``other``: the
    verifiers' first look at a graph, and the code of the graph modules when all passes have run."""

    depth: int
    nodes: dict[str, int]
    rows: list[Row]
    total_seconds: float
    total_cpu_seconds: float  # the same without what other programs took of the core
    dependencies_seconds: float
    capture_seconds: float  # of the first call: torch's tracing and partitioning, and the passes
    partition_seconds: float  # torch's partitioner

    @property
    def graph_nodes(self) -> int:
        return self.nodes["forward"] + self.nodes["backward"]

    @property
    def other_seconds(self) -> float:
        return self.total_seconds - sum(row.total for row in self.rows)


def measure(depth: int) -> Measurement:
    """Trace a model of ``depth`` blocks and time every pass."""
    torch._dynamo.reset()
    pipeline = TimedPipeline(default_pipeline().passes)
    model = graph_fsdp.compile(Model(depth), backend="eager", passes=pipeline)
    gc.collect()
    begin = time.perf_counter()
    try:
        model(torch.ones(2, WIDTH))
        raise AssertionError("the capture did not end")
    except CaptureEndsHere:
        pass
    capture_seconds = time.perf_counter() - begin
    (captured,) = graph_fsdp.inspect(model).graphs
    stages = [stage for phase in PHASES for stage in captured.stages[phase].values()]
    rows = [
        Row(s.phase, s.name, len(s.snapshot), s.seconds, s.verify_seconds, s.snapshot_seconds)
        for s in stages
        if s.name != "partition"
    ]
    partition_seconds = captured.stages["forward"]["partition"].seconds
    return Measurement(
        depth,
        pipeline.nodes,
        rows,
        pipeline.seconds,
        pipeline.cpu_seconds,
        pipeline.dependencies_seconds,
        capture_seconds,
        partition_seconds,
    )


SEQUENCE, MESH = 8192, (2048, 8)


def measure_configured(config: Path, layers: int) -> dict[str, float]:
    """Trace a configured model of ``layers`` layers, and predict its step, as ``graph-fsdp plan`` does."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from graph_fsdp.planning import prediction
    from graph_fsdp.planning.model_config import find_model

    traced = {}

    def trace(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        found = _trace(*args, **kwargs)
        traced["trace"] = time.process_time() - begin
        return found

    _trace, prediction.trace = prediction.trace, trace
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "config.json"
        changed.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": layers}))
        begin = time.process_time()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model, inputs, _ = find_model(str(changed), 1, SEQUENCE)
        plan = prediction.plan(model, inputs, mesh_shape=MESH, hardware="h100", mp_policy=policy)
        json.dumps(plan.summary())
    planned = time.process_time() - begin
    stages = [stage for of_phase in plan.traced.context.stages.values() for stage in of_phase.values()]
    parts = {
        "passes": sum(stage.seconds for stage in stages if stage.name != "partition"),
        "verifier": sum(stage.verify_seconds for stage in stages),
        "snapshots": sum(stage.snapshot_seconds for stage in stages),
        "partition": max(stage.seconds for stage in stages if stage.name == "partition"),
        "nodes": sum(len(graph.fx_graph.nodes) for graph in plan.traced.graphs.values()),
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"plan": planned, "peak": peak, **traced, **parts}


def table_of_configured(measured: dict[int, list[dict[str, float]]]) -> str:
    """One column per depth: the least of the repeats."""
    named = {
        "trace": "to the end of the passes, CPU seconds",
        "passes": "  of these, passes (wall)",
        "verifier": "  verifier (wall)",
        "snapshots": "  snapshots (wall)",
        "partition": "  torch: partition (wall)",
        "plan": "graph-fsdp plan, without imports, CPU seconds",
        "peak": "peak, MB",
        "nodes": "nodes, forward + backward",
    }
    rows = {name: [min(run[name] for run in runs) for runs in measured.values()] for name in named}
    lines = [f"{'layers':46s}" + "".join(f"{layers:>10d}" for layers in measured)]
    for name, label in named.items():
        digits = 0 if name in ("peak", "nodes") else 2
        lines.append(f"{label:46s}" + "".join(f"{value:>10.{digits}f}" for value in rows[name]))
    least, most = min(measured), max(measured)
    if most != least:
        seconds = dict(zip(measured, rows["trace"], strict=True))
        further = (seconds[most] - seconds[least]) / (most - least)
        lines.append(f"{'each further layer, CPU milliseconds':46s}{further * 1e3:>{10 * len(measured)}.1f}")
    return "\n".join(lines)


def run_configured(options: argparse.Namespace) -> None:
    """Measure each depth in a process of its own, in turns."""
    measured: dict[int, list[dict[str, float]]] = {layers: [] for layers in options.depths}
    for _ in range(options.repeats):
        for layers, runs in measured.items():
            command = [sys.executable, __file__, "--config", str(options.config), "--alone", str(layers)]
            run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(json.loads(run.stdout.splitlines()[-1]))
    print(f"torch {torch.__version__}, {options.config.stem}, least of {options.repeats}")
    print(table_of_configured(measured))


def table(measurements: list[Measurement]) -> str:
    """One line per pass and graph: seconds at each depth, the last over the one before, and at the last depth the
    nodes of the graph after the pass."""
    depths = "".join(f"{m.depth:>9d}" for m in measurements)
    lines = [f"{'seconds at depth':34s}{depths}{'ratio':>8s}{'nodes':>9s}"]

    def add(label: str, values: list[float], digits: int = 3, nodes: int | str = "") -> None:
        ratio = f"{values[-1] / values[-2]:.2f}" if len(values) > 1 and values[-2] > 0 else ""
        seconds = "".join(f"{value:9.{digits}f}" for value in values)
        lines.append(f"{label:34s}{seconds}{ratio:>8s}{nodes:>9}".rstrip())

    add("nodes, forward + backward", [m.graph_nodes for m in measurements], 0)
    for index, row in enumerate(measurements[0].rows):
        seconds = [m.rows[index].seconds for m in measurements]
        add(f"{row.phase}: {row.name}", seconds, nodes=measurements[-1].rows[index].nodes)
    add("all passes", [sum(row.seconds for row in m.rows) for m in measurements])
    add("verifier", [sum(row.verify_seconds for row in m.rows) for m in measurements])
    add("snapshots", [sum(row.snapshot_seconds for row in m.rows) for m in measurements])
    add("recompiling, other", [m.other_seconds for m in measurements])
    add("TOTAL", [m.total_seconds for m in measurements])
    add("TOTAL, CPU seconds", [m.total_cpu_seconds for m in measurements])
    add("Graph.dependencies()", [m.dependencies_seconds for m in measurements])
    add("torch: partition", [m.partition_seconds for m in measurements])
    ours = [m.total_seconds + m.dependencies_seconds + m.partition_seconds for m in measurements]
    add("torch: Dynamo, AOTAutograd", [m.capture_seconds - o for m, o in zip(measurements, ours, strict=True)])
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[250, 500, 1000])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--config", type=Path, help="config.json of a model that is traced instead")
    parser.add_argument("--repeats", type=int, default=1, help="of a configured model")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)  # layers, in the process that measures them
    options = parser.parse_args()
    if options.config is not None:
        if options.alone is not None:
            print(json.dumps(measure_configured(options.config, options.alone)))
        else:
            run_configured(options)
        return
    # Importing the module registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    measure(2)  # what is imported and cached at first use is not the passes' cost
    measurements = [measure(depth) for depth in options.depths]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread")
    print(table(measurements))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    found = {"torch": torch.__version__, "measurements": [asdict(m) for m in measurements]}
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
