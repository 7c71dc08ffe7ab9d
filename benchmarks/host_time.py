"""What the host does in a step: processor time of one rank of eight, on a model so small that nothing else takes time.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py
    OMP_NUM_THREADS=1 python benchmarks/host_time.py --parameters 8 388 --implementations ours plain --profile ours

The process group is torch's fake one, whose collectives return at once. All implementations are alive in one process,
and take turns: round after round, each runs every measured piece of work once. What is counted is the processor time of
the process (median over rounds, with the first and third quartile), in milliseconds:

- step: forward, backward, and gradients set to None;
- accumulation: forward and backward of four micro-batches, and gradients set to None;
- evaluation: forward in ``torch.no_grad()``;
- optimizer: a step of AdamW with ``foreach=True``;
- distributed: the same where the optimizer was given to ``graph_fsdp.distribute_optimizer``.

Models by their number of parameters: 8 (four linear layers), 291 (a Hugging Face Llama of 32 layers) and 388 (a GPT of
32 layers with biases: twelve parameters a layer). All are 32 wide.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import RESULTS, machine
from implementations import IMPLEMENTATIONS, Implementation, Setup
from tables import Table, quartile_cell
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from workloads import Workload, loss_of

import graph_fsdp
from graph_fsdp.compat import fake_process_group
from graph_fsdp.module.module import GraphFSDPModule

WORLD_SIZE, MICRO_BATCHES = 8, 4
KINDS = ("step", "accumulation", "evaluation", "optimizer", "distributed")
NAMES = ("fsdp2", "fsdp2_compiled", "ours", "local")
DEVICE = torch.device("cpu")
Work = Callable[[], Any]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Layers(nn.Module):
    """Four linear layers: eight parameters."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs.mean()


class Block(nn.Module):
    """A pre-norm block with two heads and biases: twelve parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*split.unbind(), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """32 blocks, an embedding, a norm and a head: 388 parameters."""

    def __init__(self, width: int = 32, vocab: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(32))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _layers() -> tuple[nn.Module, nn.ModuleList, dict[str, Tensor]]:
    model = Layers()
    return model, model.blocks, {"inputs": torch.randn(4, 32)}


def _gpt() -> tuple[nn.Module, nn.ModuleList, dict[str, Tensor]]:
    model = GPT()
    return model, model.blocks, {"inputs": torch.randint(64, (1, 8)), "targets": torch.randint(64, (1, 8))}


def _of(workload: Workload) -> tuple[nn.Module, nn.ModuleList, dict[str, Tensor]]:
    model = workload.make(DEVICE)
    return model, workload.blocks(model), workload.tokens(0, 0, DEVICE)


_SMALL: dict[str, Any] = {"width": 32, "heads": 2, "vocab": 64, "batch": 1, "length": 8}
MODELS: dict[int, Callable[[], tuple[nn.Module, nn.ModuleList, dict[str, Tensor]]]] = {
    8: _layers,
    291: partial(_of, Workload("llama", layers=32, **_SMALL)),
    388: _gpt,
}


class Subject:
    """One implementation of one model, and the work that is measured."""

    def __init__(self, implementation: Implementation, parameters: int) -> None:
        torch.manual_seed(0)
        model, blocks, self.batch = MODELS[parameters]()
        assert len(list(model.parameters())) == parameters
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        self.model = implementation.build(model, Setup(lambda _: blocks, mesh))
        self.work: dict[str, Work] = {
            "step": partial(self.step, 1),
            "accumulation": partial(self.step, MICRO_BATCHES),
            "evaluation": self.evaluate,
            "optimizer": partial(self.optimize, torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)),
        }
        loss_of(self.model(**self.batch)).backward()
        self.gradients = {p: p.grad for p in self.model.parameters()}  # FSDP2 exchanges parameters while it evaluates
        self.model.zero_grad()
        if isinstance(self.model, GraphFSDPModule):
            distributed = graph_fsdp.distribute_optimizer(
                torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
            )
            self.work["distributed"] = partial(self.optimize, distributed)

    def step(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            loss_of(self.model(**self.batch)).backward()
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model(**self.batch)

    def optimize(self, optimizer: torch.optim.Optimizer) -> None:
        for p, gradient in self.gradients.items():
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def processor_seconds(work: Work) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(parameters: int, names: Sequence[str], rounds: int, warm_up: int) -> dict[str, dict[str, list[float]]]:
    """Implementation → work → first quartile, median and third quartile of processor seconds."""
    subjects = {name: Subject(IMPLEMENTATIONS[name], parameters) for name in names}
    for subject in subjects.values():
        for work in subject.work.values():
            for _ in range(warm_up):
                work()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name, subject in subjects.items():
            for kind, work in subject.work.items():
                found[name].setdefault(kind, []).append(processor_seconds(work))
    return {
        name: {kind: statistics.quantiles(seconds, n=4, method="inclusive") for kind, seconds in kinds.items()}
        for name, kinds in found.items()
    }


def profiled(name: str, parameters: int, kind: str, times: int) -> None:
    """Print what Python's profiler says of ``times`` pieces of work, by the time within each function itself."""
    work = Subject(IMPLEMENTATIONS[name], parameters).work[kind]
    for _ in range(3):
        work()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(times):
        work()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(60)


def table(result: dict[str, Any]) -> Table:
    rows = [
        [parameters, name, *(quartile_cell(kinds[kind], 1e3, 2) if kind in kinds else "" for kind in KINDS)]
        for parameters, names in result["seconds"].items()
        for name, kinds in names.items()
    ]
    header = ["parameters", "implementation", *(f"{kind}, ms" for kind in KINDS)]
    return Table(header, rows)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--implementations", nargs="+", choices=sorted(IMPLEMENTATIONS), default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--save", type=Path, default=None, help=f"where to write JSON, such as {RESULTS.name}/…")
    parser.add_argument("--profile", choices=sorted(IMPLEMENTATIONS), help="profile a step of this one, and stop")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"machine": machine("cpu", WORLD_SIZE) | {"process_group": "fake"}, "seconds": {}}
    for parameters in options.parameters:
        with fake_process_group(WORLD_SIZE):
            if options.profile:
                profiled(options.profile, parameters, "step", options.rounds)
                continue
            found = measure(parameters, options.implementations, options.rounds, options.warm_up)
        result["seconds"][str(parameters)] = found
        torch._dynamo.reset()
        gc.unfreeze()
    if not options.profile:
        print(table(result).markdown() if options.markdown else table(result).text())
    if options.save is not None:
        options.save.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
