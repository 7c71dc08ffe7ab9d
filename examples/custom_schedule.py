"""A schedule of one's own: train a small GPT under the default schedule, then under another, and compare.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/custom_schedule.py

Alone it runs too; one process has nothing to gather. See docs/passes.md for what a pass may do.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig

import graph_fsdp
from graph_fsdp.passes import (
    Graph,
    GraphPass,
    PassContext,
    PassPipeline,
    Phase,
    Timeline,
    default_pipeline,
    defer_reductions,
    simulate,
)


class HalfwayThrough(GraphPass):
    """A bucket is gathered when half of what uses the bucket ``ahead`` before it has run.

    Reductions are waited for late, as by default. A rank with other shapes may have another graph, and would start
    its collectives in another order: ``plan.keep`` gives it the order that the ranks agreed on.
    """

    name = "halfway_through"
    requires = ("bucketed",)
    provides = ("scheduled",)

    def __init__(self, ahead: int = 2) -> None:
        self.ahead = ahead

    def run(self, graph: Graph, context: PassContext) -> str:
        gathers = [gather for gather in graph.gathers if gather.start is not None]
        for gather in reversed(gathers[: self.ahead]):  # at the top, in their order
            graph.placeholders[-1].append(gather.start)
        positions = graph.positions()
        for before, gather in zip(gathers, gathers[self.ahead :], strict=False):
            halfway = before.uses[len(before.uses) // 2]
            if positions[halfway] < positions[gather.start]:
                halfway.append(gather.start)
        defer_reductions(graph, [reduction.start for reduction in graph.reductions], in_flight=2)
        context.plan.keep(graph)
        return f"gathers start halfway through the bucket {self.ahead} before"


class Clock(GraphPass):
    """Changes nothing: notes how long the cost model expects each graph to take."""

    name = "clock"

    def __init__(self) -> None:
        self.timelines: dict[Phase, Timeline] = {}

    def run(self, graph: Graph, context: PassContext) -> None:
        if context.cost is not None:
            self.timelines[graph.phase] = simulate(graph, context.cost)


@dataclass
class Outcome:
    losses: list[float]
    starts: dict[Phase, list[tuple[str, str, int]]]  # phase → (kind, bucket, position of the start in the graph)
    report: str


def train(passes: PassPipeline, steps: int, backend: str) -> Outcome:
    """A few steps on random bytes, from the same weights and with the same batches every time."""
    torch.manual_seed(0)
    clock = Clock()
    model = GPT(GPTConfig(layers=4, width=128, heads=4, context=32))
    graph_fsdp.compile(model, passes=passes.insert_after("free", clock), backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    draws = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    losses = []
    for _ in range(steps):
        data = torch.randint(256, (4, 33), generator=draws)
        loss = model(data[:, :-1], data[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = graph_fsdp.inspect(model)
    views = {view.phase: view for view in (found.forward, found.backward)}
    lines = [repr(passes)]
    for phase, view in views.items():
        times = clock.timelines[phase]
        lines += [f"{phase}:", view.table() if view.buckets else "  nothing to gather or reduce on one rank"]
        lines += [f"  predicted: {times.seconds * 1e3:.2f} ms, {times.exposed * 1e3:.2f} ms of it only communication"]
    lines += [f"most bytes gathered at once: {found.peak_gathered_bytes:,}"]
    lines += ["losses: " + " ".join(f"{loss:.4f}" for loss in losses)]
    starts = {
        phase: [(row.kind, row.name, row.start) for row in view.buckets if row.start is not None]
        for phase, view in views.items()
    }
    return Outcome(losses, starts, "\n".join(lines))


def compare(steps: int = 3, backend: str = "eager") -> tuple[Outcome, Outcome]:
    """The default schedule, and ours in its place."""
    default = default_pipeline()
    ours = default.replace("prefetch", HalfwayThrough())
    return train(default, steps, backend), train(ours, steps, backend)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    args = parser.parse_args()
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    before, after = compare(args.steps, args.backend)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(before.report, after.report, sep="\n\n")
    assert before.losses == after.losses, "a schedule changes when things happen, not what is computed"
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
