"""How long the passes take, by pass and by depth, and that they grow linearly. No device, no network, one core.

    OMP_NUM_THREADS=1 python benchmarks/pass_time.py --depths 250 500 1000

A model of equal pre-norm MLP blocks, tiny in width, is traced by ``graph_fsdp.compile`` on a fake process group of
eight ranks. A last pass stops the capture when all others have run on the forward and the backward graph: nothing is
compiled, and no collective runs. What torch needs to trace, differentiate and partition the model is shown apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp.passes import Graph, GraphPass, PassContext, default_pipeline
from graph_fsdp.passes.pipeline import PHASES

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


class CaptureEndsHere(ValueError):
    """Raised when the passes are done; a ValueError leaves the pipeline as it is."""


class EndCapture(GraphPass):
    """Times ``Graph.dependencies()`` of both graphs, which no default pass needs, then ends the capture."""

    name = "end_capture"
    phases = ("forward", "backward")

    def __init__(self) -> None:
        self.dependencies: dict[str, float] = {}
        self.nodes: dict[str, int] = {}

    def run(self, graph: Graph, context: PassContext) -> str | None:
        self.nodes[graph.phase] = len(graph.fx_graph.nodes)
        begin = time.perf_counter()
        graph.dependencies()
        self.dependencies[graph.phase] = time.perf_counter() - begin
        if graph.phase == "backward":
            raise CaptureEndsHere
        return None


@dataclass
class Row:
    """Seconds of one pass on one graph: the pass itself, the verifier after it, the copy for ``inspect``."""

    phase: str
    name: str
    seconds: float
    verify_seconds: float
    snapshot_seconds: float

    @property
    def total(self) -> float:
        return self.seconds + self.verify_seconds + self.snapshot_seconds


@dataclass
class Measurement:
    depth: int
    nodes: dict[str, int]
    rows: list[Row]
    dependencies: dict[str, float]
    capture_seconds: float  # all of the first call: torch's tracing and partitioning, and the passes
    partition_seconds: float  # torch's partitioner
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(row.total for row in self.rows)


def measure(depth: int) -> Measurement:
    """Trace a model of ``depth`` blocks and time every pass."""
    torch._dynamo.reset()
    end = EndCapture()
    pipeline = default_pipeline().insert_after("free", end)
    model = graph_fsdp.compile(Model(depth), backend="eager", passes=pipeline)
    gc.collect()
    begin = time.perf_counter()
    try:
        model(torch.ones(2, WIDTH))
        raise AssertionError("the capture did not end")
    except Exception as error:  # Dynamo wraps it
        if not isinstance(getattr(error, "inner_exception", error), CaptureEndsHere):
            raise
    capture_seconds = time.perf_counter() - begin
    (captured,) = graph_fsdp.inspect(model).graphs
    stages = [stage for phase in PHASES for stage in captured.stages[phase].values()]
    partition = [stage for stage in stages if stage.name == "partition"]
    rows = [
        Row(s.phase, s.name, s.seconds, s.verify_seconds, s.snapshot_seconds) for s in stages if s not in partition
    ]
    return Measurement(
        depth, end.nodes, rows, end.dependencies, capture_seconds, max(stage.seconds for stage in partition)
    )


def table(measurements: list[Measurement]) -> str:
    """One line per pass and graph; the last column is the time at the last depth over that at the one before."""
    lines = [f"{'seconds at depth':34s}" + "".join(f"{m.depth:>9d}" for m in measurements) + f"{'ratio':>8s}"]

    def add(label: str, values: list[float], digits: int = 3) -> None:
        ratio = f"{values[-1] / values[-2]:8.2f}" if len(values) > 1 and values[-2] > 0 else ""
        lines.append(f"{label:34s}" + "".join(f"{value:9.{digits}f}" for value in values) + ratio)

    add("nodes, forward + backward", [sum(m.nodes.values()) for m in measurements], 0)
    for index, row in enumerate(measurements[0].rows):
        add(f"{row.phase}: {row.name}", [m.rows[index].seconds for m in measurements])
    add("all passes", [sum(row.seconds for row in m.rows) for m in measurements])
    add("verifier", [sum(row.verify_seconds for row in m.rows) for m in measurements])
    add("snapshots", [sum(row.snapshot_seconds for row in m.rows) for m in measurements])
    add("TOTAL: passes, verifier, snapshots", [m.total for m in measurements])
    add("Graph.dependencies()", [sum(m.dependencies.values()) for m in measurements])
    add("torch: partition", [m.partition_seconds for m in measurements])
    rest = [m.capture_seconds - m.total - m.partition_seconds - sum(m.dependencies.values()) for m in measurements]
    add("torch: Dynamo, AOTAutograd", rest)
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
    found = {"torch": torch.__version__, "measurements": [asdict(m) | {"total": m.total} for m in measurements]}
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
