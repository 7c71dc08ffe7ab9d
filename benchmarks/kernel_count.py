"""What fusions do the cuts between regions lose? Kernels that Inductor generates for one step, and the bytes they move.

    OMP_NUM_THREADS=1 python benchmarks/kernel_count.py

Each model is compiled in three forms, for eight ranks of a fake process group (nothing is communicated):

- cut: ``regions="cut"``, the default: compute regions between the collectives, copies around them by the executor;
- whole: ``regions="whole"``: each graph in one piece, the same collectives in the same order;
- local: one process, nothing sharded: what Inductor makes of the model itself.

Columns, per step and graph, bytes are read and written ones:

- kernels: generated ones that compute, each element that a kernel touches counted once;
- packing: kernels that only cast, pack or unpack what is communicated: generated ones, or the executor's copies;
- products: calls of external kernels (products, attention), which are the model's in every form;
- functions: distinct functions of generated code (on the CPU a function may hold several kernels).

Which kernels of the whole form compute follows from the FX nodes that Inductor names as their origins. A copy of a
parameter that is inlined into a product's input has the origins of that input, and counts as computing: between whole
and the others only the sums of both MB columns compare; between cut and local each column does.

Then the kernels of the whole form that compute what lies in two or more regions when the graph is cut.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from inductor_kernels import Kernel, inductor_kernels
from llama import SIZES
from torch import Tensor, fx, nn
from workloads import GPT, GPTConfig

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.passes.analysis.kernels import node_flops
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.effects import aliased_inputs, is_view
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import copies_by
from graph_fsdp.runtime import Program
from graph_fsdp.runtime.backends import BACKENDS, InductorBackend
from graph_fsdp.runtime.regions.regions import Compiled, Region, cut

WORLD_SIZE = 8
FORMS = ("cut", "whole", "local")
FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "kernel_count.json"
_FUNCTION = re.compile(r"= async_compile\.\w+\(.*?'''(.*?)'''", re.DOTALL)
_SHOWN = 8  # kernels that fuse across a cut


class CountingBackend(InductorBackend):
    """Remembers the kernels of each function that it has compiled."""

    def __init__(self) -> None:
        self.functions: list[Compiled] = []  # alive, so that their ids stay theirs
        self.kernels: dict[int, list[Kernel]] = {}

    def compile_region(self, region: Region, kind: str) -> Compiled:
        return self._counted(lambda: super(CountingBackend, self).compile_region(region, kind))

    def compile_whole(self, module: fx.GraphModule, kind: str) -> Compiled:
        return self._counted(lambda: super(CountingBackend, self).compile_whole(module, kind))

    def _counted(self, compile_one: Callable[[], Compiled]) -> Compiled:
        with inductor_kernels() as kernels:
            function = compile_one()
        self.functions.append(function)
        self.kernels[id(function)] = kernels
        return function


@dataclass
class Count:
    """One graph of one form, per step."""

    model: str
    phase: str
    form: str
    regions: int
    kernels: int
    kernel_bytes: int
    packing: int
    packing_bytes: int
    products: int
    functions: int


@dataclass
class Across:
    """A kernel of the whole form that a cut would divide: the nodes that it computes, by region."""

    model: str
    phase: str
    nbytes: int
    regions: dict[int, list[str]]


Found = tuple[Count, list[Kernel], Graph]


def count(name: str, model: nn.Module, batch: Sequence[Tensor], form: str) -> dict[str, Found]:
    """Compile and run one step; by phase. The output of ``model`` is summed for a loss."""
    torch._dynamo.reset()
    with mock.patch.dict(BACKENDS, {"counting": CountingBackend}):
        graph_fsdp.compile(model, backend="counting", regions="whole" if form == "whole" else "cut")
    output = model(*batch)
    (output if isinstance(output, Tensor) else output.logits).float().sum().backward()
    engine: Any = model.__dict__["_graph_fsdp"]
    found: dict[str, Found] = {}
    for (_, phase), program in engine.programs.items():
        functions, cut_up = _functions(program, engine.backend), isinstance(program, Program)
        kernels = [kernel for function in functions for kernel in engine.backend.kernels[id(function)]]
        products = [k for k in kernels if not k.generated]
        computing = [k for k in kernels if k.generated and (cut_up or _computed(k, program.graph))]
        packing = [size for n in program.graph.nodes if (size := sum(copies_by(n)))] if cut_up else []
        packing += [k.nbytes for k in kernels if k.generated and k not in computing]
        sources = {body for function in functions for body in _FUNCTION.findall(_source(function))}
        sizes = (len(computing), sum(k.nbytes for k in computing), len(packing), sum(packing))
        row = Count(name, phase, form, len(functions), *sizes, len(products), len(sources))
        found[phase] = (row, computing, program.graph)
    return found


def _functions(program: Any, backend: CountingBackend) -> list[Compiled]:
    """What a step calls, each as often as it does."""
    if not isinstance(program, Program):
        return [program.function]
    values = [value for key, value in program.constants.items() if key.startswith("region_")]
    return [value for value in values if id(value) in backend.kernels]  # the others are views alone


def _source(function: Any) -> str:
    return function.source_code


def _computed(kernel: Kernel, graph: Graph) -> set[str]:
    """The nodes of ``graph`` that a generated kernel computes: no views, and no product that it only prepares."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.target not in dialect.EXECUTED]
    return {n.name for n in nodes if not is_view(n) and not node_flops(n)}.intersection(kernel.nodes)


def across(name: str, phase: str, kernels: Sequence[Kernel], graph: Graph) -> list[Across]:
    """The kernels of a whole graph that compute nodes of several regions of ``graph``, which is cut. Views belong to no
    region, nor does what is computed again in each kernel that reads it."""
    region_of = {
        node.name: index
        for index, step in enumerate(cut(graph))
        if isinstance(step, Region)
        for node in step.nodes
        if not aliased_inputs(node)
    }
    found = []
    for kernel in kernels:
        regions: dict[int, list[str]] = {}
        for node in kernel.nodes:
            if node in region_of:
                regions.setdefault(region_of[node], []).append(node)
        if len(regions) > 1:
            found.append(Across(name, phase, kernel.nbytes, dict(sorted(regions.items()))))
    return found


def measure(name: str, make: Callable[[], nn.Module], batch: Sequence[Tensor]) -> tuple[list[Count], list[Across]]:
    """All forms of a model, and what the whole form fuses across cuts."""
    counts: list[Count] = []
    fused: list[Across] = []
    graphs: dict[str, Graph] = {}
    for form in FORMS:
        sharded = form != "local"
        with compat.fake_process_group(WORLD_SIZE) if sharded else contextlib.nullcontext():
            found = count(name, make(), batch, form)
        for phase, (row, kernels, graph) in found.items():
            counts.append(row)
            if form == "cut":
                graphs[phase] = graph
            elif form == "whole":
                fused += across(name, phase, kernels, graphs[phase])
    return counts, fused


def table(counts: Sequence[Count]) -> str:
    header = ("model", "graph", "form", "regions", "kernels", "MB", "packing", "MB", "products", "functions")
    rows = [
        (
            *(c.model, c.phase, c.form, str(c.regions), str(c.kernels), _mb(c.kernel_bytes)),
            *(str(c.packing), _mb(c.packing_bytes), str(c.products), str(c.functions)),
        )
        for c in counts
    ]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}"


def gpt() -> nn.Module:
    return GPT(GPTConfig())


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SIZES["small"], "vocab_size": 1024, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, use_cache=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0))
    counts: list[Count] = []
    fused: list[Across] = []
    for name, make, batch in (("gpt", gpt, (text, text)), ("llama", llama, (text,))):
        rows, kernels = measure(name, make, batch)
        counts += rows
        fused += kernels
    print(f"torch {torch.__version__}, {WORLD_SIZE} ranks, 4 x 64 tokens per rank")
    print(table(counts))
    print(f"\n{len(fused)} kernels across cuts, largest first")
    for kernel in sorted(fused, key=lambda k: -k.nbytes)[:_SHOWN]:
        print(f"  {kernel.model} {kernel.phase}, {kernel.nbytes:,} bytes: {kernel.regions}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    results = {"torch": torch.__version__, "counts": [asdict(c) for c in counts], "across": [asdict(k) for k in fused]}
    options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
