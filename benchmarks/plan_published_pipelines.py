"""The plan against published training runs on thousands of GPUs: Llama-3-405B and DeepSeek-V3.

    python benchmarks/plan_published_pipelines.py [--rows 0 1] --out benchmarks/results/plan_published_pipelines.json

Nothing is measured here, and no figure was fitted. A row is planned twice over:

- **this project**: its program, as ``graph-fsdp plan`` says; parameters are gathered once a step, as both reports have
  it.
- **all hidden**: the same, where each microbatch's forward and backward take as long as what takes longest of them,
  computing or the busiest group's collectives. No schedule can be faster.

FLOPs count what is executed: of attention what a causal mask leaves. The reports do not say how they count, nor Llama
3's how many stages a GPU has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tables import Table
from torch.distributed.fsdp import MixedPrecisionPolicy

from graph_fsdp.passes import GroupShape
from graph_fsdp.passes.analysis.kernels import graph_work
from graph_fsdp.passes.analysis.simulate import simulate
from graph_fsdp.planning import Dimensions, PipelinePlan, plan_pipeline
from graph_fsdp.planning.causal_lm import CausalLM
from graph_fsdp.planning.model_config import read_config
from graph_fsdp.planning.stages import StageFigures

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "plan_published_pipelines.json"


@dataclass(frozen=True)
class Row:
    """What is published, TFLOP/s or tokens per second of a GPU, and its conditions. ``length``: tokens of a sequence;
    each microbatch has one. ``stages_per_rank``: more than one is interleaved 1F1B."""

    name: str
    config: str
    mesh: dict[str, int]
    length: int
    microbatches: int
    hardware: str
    stages_per_rank: int = 1
    teraflops: float | None = None
    tokens: float | None = None


def _llama(name: str, teraflops: float, microbatches: int, length: int = 8192, **mesh: int) -> list[Row]:
    return [
        Row(
            f"{name}, {several} stage{'s' * (several > 1)} of a GPU",
            "llama_3_405b.json",
            {"pp": 16, "tp": 8, **mesh},
            length,
            microbatches,
            "h100",
            several,
            teraflops,
        )
        for several in (1, 4)
    ]


ROWS = (
    *_llama("Llama-3-405B, 8,192 H100", 430, 32, dp_shard=64),
    *_llama("Llama-3-405B, 16,384 H100", 400, 16, dp_shard=128),
    *_llama("Llama-3-405B, 16,384 H100, 131,072 tokens", 380, 16, 131072, dp_shard=8, cp=16),
    # 180,000 GPU hours for 10^12 tokens; a batch of 15,360 sequences.
    Row(
        "DeepSeek-V3, 2,048 H800",
        "deepseek_v3.json",
        {"pp": 16, "dp_shard": 128, "ep": 64},
        4096,
        120,
        "h800",
        tokens=1e12 / (180e3 * 3600),
    ),
)


def predict(row: Row) -> PipelinePlan:
    dimensions = Dimensions.of(row.mesh)
    model = CausalLM(read_config(HERE / "configs" / row.config), dimensions, 1, row.length)
    return plan_pipeline(
        model.stage,
        mesh_shape=dimensions,
        hardware=row.hardware,
        microbatches=row.microbatches,
        schedule="Interleaved1F1B" if row.stages_per_rank > 1 else "1F1B",
        stages_per_rank=row.stages_per_rank,
        parallelize=model.parallelize,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )


def all_hidden(made: PipelinePlan) -> PipelinePlan:
    """Return a plan in which nothing is waited for."""
    known: dict[int, StageFigures] = {}
    for figures, stage in zip(made.stages, made.plans, strict=True):
        if id(stage) in known:
            continue
        cost, spec = stage.traced.context.cost, stage.spec
        assert cost is not None
        sharding = {spec.mesh.group, *(mesh.group for mesh in spec.own_meshes)} - {""}
        quiet = dataclasses.replace(cost, groups={**cost.groups, **dict.fromkeys(sharding, GroupShape(1))})
        forward, backward = (simulate(graph, quiet).bound for graph in stage.traced.graphs.values())
        known[id(stage)] = dataclasses.replace(figures, forward=forward, backward=backward)
    return dataclasses.replace(made, stages=[known[id(stage)] for stage in made.plans])


def executed_flops(made: PipelinePlan) -> float:
    """Count the FLOPs of a step on one GPU, a mean over stages: three times forward's, without what masks leave out."""
    of = {
        id(p): 3 * sum(w.flops * w.executed for w in graph_work(p.traced.forward, fused=True).values())
        for p in made.plans
    }
    return made.microbatches * sum(of[id(p)] for p in made.plans) / made.dimensions.pp


def result_of(row: Row) -> dict[str, Any]:
    made = predict(row)
    plans = {"this project": made, "all hidden": all_hidden(made)}
    flops = executed_flops(made)
    predicted = {
        name: {
            "step_seconds": plan.step_seconds,
            "bubble": plan.bubble,
            "tokens": plan.tokens_per_second,
            "teraflops": flops / plan.step_seconds / 1e12,
            "mfu": plan.mfu,
            "peak_gb": plan.peak_nbytes / 1e9,
        }
        for name, plan in plans.items()
    }
    return {**dataclasses.asdict(row), "predicted": predicted, "in_flight": made.in_flight[0]}


def table(result: dict[str, Any]) -> Table:
    header = ("", "published, of a GPU", "this project", "error", "all hidden", "error", "bubble", "GB")
    rows = []
    for found in result["rows"]:
        figure, unit = ("teraflops", "TFLOP/s") if found["teraflops"] else ("tokens", "tokens/s")
        cells = [found["name"], f"{found[figure]:,.0f} {unit}"]
        for predicted in found["predicted"].values():
            cells += [f"{predicted[figure]:,.0f}", f"{predicted[figure] / found[figure] - 1:+.0%}"]
        own = found["predicted"]["this project"]
        rows.append([*cells, f"{own['bubble']:.0%}", f"{own['peak_gb']:.0f}"])
    return Table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(ROWS))), help="of the table, from 0")
    parser.add_argument("--out", type=Path, help="where the result goes as JSON (default: nowhere)")
    chosen = parser.parse_args()
    result = {
        "benchmark": "plan_published_pipelines",
        "command": f"python benchmarks/plan_published_pipelines.py --out benchmarks/results/{RESULTS.name}",
        "torch": torch.__version__,
        "rows": [result_of(ROWS[index]) for index in chosen.rows],
    }
    print(table(result).text())
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
