"""How good are the schedules? Predicted step times of Llama-3-8B shapes on H100s, ours and torch's, from one process.

    python benchmarks/schedule_quality.py [--layers 32] [--ranks 8 64 512] [--out benchmarks/results/…json]

Nothing is measured here. Forward and backward graphs are traced for each number of ranks (``graph_fsdp.planning``), and
all schedules run on the same clock (``graph_fsdp.passes.simulate``) with the same cost model. Columns, per step:

- step: predicted seconds of forward and backward; compute and communication: seconds that each lane is busy;
  exposed: seconds in which nothing is computed; bound: max(compute, communication) of both graphs, which no
  schedule of the same collectives can undercut.
- gathered: most bytes of gathered parameters at once, buckets and what torch copies out of them.

Rows: serial gathers each unit when it is needed; one ahead is what FSDP2 does; default is ours; torch is
``schedule_overlap_bucketing`` with the options that torchtitan's SimpleFSDP gives it. "ZeRO-3" gathers every bucket
again in backward, as torch's graphs do; the others keep the unit used last, as FSDP2 and we do by default.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from llama import LENGTHS, SIZES
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graph_fsdp import compat
from graph_fsdp.passes import Graph, PassPipeline, Role, Timeline, default_pipeline, simulate
from graph_fsdp.passes.ir import dialect
from graph_fsdp.planning import Traced, trace

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RESULTS = Path(__file__).parent / "results" / "schedule_quality.json"
COLUMNS = ("step_s", "compute_s", "communication_s", "exposed_s", "bound_s")


def llama_3_8b(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SIZES["8b"], "num_hidden_layers": layers, "max_position_embeddings": LENGTHS["8b"]}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False, attn_implementation="sdpa"))


def pipelines(hardware: str) -> dict[str, tuple[PassPipeline, bool | None]]:
    """Schedule → pipeline and ``reshard_after_forward``."""
    return {
        "serial": (default_pipeline(prefetch=0, reductions_in_flight=1, hardware=hardware), None),
        "one ahead": (default_pipeline(prefetch=1, hardware=hardware), None),
        "default": (default_pipeline(hardware=hardware), None),
        "default, ZeRO-3": (default_pipeline(hardware=hardware), True),
    }


def predict(timelines: Iterable[Timeline]) -> dict[str, float]:
    """Seconds of the graphs of one step."""
    times = [(t.seconds, t.compute, t.communication, t.exposed, t.bound) for t in timelines]
    return {name: sum(column) for name, column in zip(COLUMNS, zip(*times, strict=True), strict=True)}


def gathered_bytes(graph: Graph, copies: frozenset[fx.Node] = frozenset()) -> int:
    """Most bytes of gathered parameters at any point of a graph: buffers from the start of their gather (or, received
    from forward, from the top) until the last use through any alias, and ``copies`` made of them alone."""
    roots = graph.alias_roots()
    size: dict[fx.Node, int] = {}
    last: dict[fx.Node, fx.Node] = {}
    gathered: set[fx.Node] = set()  # the memory of these nodes' values
    for node in graph.fx_graph.nodes:
        copied = node in copies and bool(node.all_input_nodes) and gathered.issuperset(node.all_input_nodes)
        if dialect.has_role(node, Role.GATHER_START, Role.KEPT) or (copied and node in roots[node]):
            size[node] = value_bytes(node)
            last[node] = node
        if any(root in size for root in roots[node]):
            gathered.add(node)
        for root in {root for source in node.all_input_nodes for root in roots[source]}:
            if root in size:
                last[root] = node
    ends: dict[fx.Node, int] = {}
    for root, node in last.items():
        ends[node] = ends.get(node, 0) + size[root]
    live = peak = 0
    for node in graph.fx_graph.nodes:
        live += size.get(node, 0)
        peak = max(peak, live)
        live -= ends.get(node, 0)
    return peak


def value_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return sum(v.nbytes for v in (value if isinstance(value, (list, tuple)) else [value]))


def row(name: str, graphs: list[Graph], timelines: list[Timeline], gathered: int) -> dict[str, Any]:
    collectives = {
        kind: sum(dialect.has_role(n, role) for g in graphs for n in g.nodes)
        for kind, role in (("gathers", Role.GATHER_START), ("reductions", Role.REDUCE_START))
    }
    return {"schedule": name, **predict(timelines), "peak_gathered_bytes": gathered, **collectives}


def our_row(name: str, traced: Traced) -> dict[str, Any]:
    graphs = [traced.forward, traced.backward]
    assert traced.context.cost is not None
    timelines = [simulate(graph, traced.context.cost) for graph in graphs]
    return row(name, graphs, timelines, max(map(gathered_bytes, graphs)))


def torch_row(name: str, traced: Traced, world_size: int) -> dict[str, Any]:
    from torch_schedule import schedule_by_torch

    assert traced.context.cost is not None
    stages = [traced.context.stages["forward"]["partition"], traced.context.stages["backward"]["just_in_time"]]
    begin = time.perf_counter()
    scheduled = [schedule_by_torch(s, traced.context.cost, world_size, collective_bucketing=True) for s in stages]
    seconds = time.perf_counter() - begin
    timelines = [s.simulate(traced.context.cost) for s in scheduled]
    gathered = max(gathered_bytes(s.graph, s.packing) for s in scheduled)
    return row(name, [s.graph for s in scheduled], timelines, gathered) | {"scheduling_s": seconds}


def rows_of(world_size: int, layers: int, batch: int, length: int, hardware: str) -> list[dict[str, Any]]:
    tokens = torch.empty(batch, length, dtype=torch.int64, device="meta")
    inputs = {"input_ids": tokens, "labels": tokens}
    rows = []
    with compat.fake_process_group(world_size):
        for name, (pipeline, reshard) in pipelines(hardware).items():
            begin = time.perf_counter()
            traced = trace(
                lambda: llama_3_8b(layers),
                inputs,
                world_size=world_size,
                mp_policy=POLICY,
                passes=pipeline,
                reshard_after_forward=reshard,
            )
            print(f"  {name}: traced in {time.perf_counter() - begin:.0f} s", flush=True)
            rows.append(our_row(name, traced))
            if reshard:
                rows.append(torch_row("torch", traced, world_size))
            del traced
            torch._dynamo.reset()
            gc.collect()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    header = f"{'schedule':<16}" + "".join(f"{c.removesuffix('_s'):>15}" for c in COLUMNS)
    lines = [header + f"{'gathered':>12}{'gathers':>9}{'reduces':>9}"]
    for r in rows:
        seconds = "".join(f"{r[c] * 1e3:>12.1f} ms" for c in COLUMNS)
        memory = f"{r['peak_gathered_bytes'] / 2**30:>8.2f} GiB"
        lines.append(f"{r['schedule']:<16}{seconds}{memory}{r['gathers']:>9}{r['reductions']:>9}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--length", type=int, default=8192, help="tokens per sequence")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    settings = {k: v for k, v in vars(options).items() if k not in ("ranks", "out")}
    result: dict[str, Any] = {"torch": torch.__version__, **settings, "ranks": {}}
    for world_size in options.ranks:
        print(f"{world_size} ranks", flush=True)
        rows = rows_of(world_size, options.layers, options.batch, options.length, options.hardware)
        result["ranks"][str(world_size)] = rows
        print(table(rows), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
