"""How long the passes take, by pass and by depth, and that they grow linearly. No device, no network, one core.

    OMP_NUM_THREADS=1 python benchmarks/pass_time.py --depths 250 500 1000

A model of equal pre-norm MLP blocks, tiny in width, is traced by ``graph_fsdp.compile`` on a fake process group of
eight ranks. The capture ends when the passes have run on the forward and the backward graph: nothing is compiled, and
no collective runs. What torch needs to trace, differentiate and partition the model is shown apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp.compat import BackendCompilerFailed
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
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, CaptureEndsHere):
            raise
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
    options = parser.parse_args()
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
