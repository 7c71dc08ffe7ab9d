"""What masks cost a Llama of transformers that leaves out the cache: a step of one rank of eight.

    OMP_NUM_THREADS=1 python benchmarks/attention_masks.py --save benchmarks/results/attention_masks.json
    python benchmarks/attention_masks.py --device cuda

Seconds are those of the processor, or, on an accelerator, whose model is larger, from a step's start to its end there.

The process group is torch's fake one, whose collectives return at once; a step is forward, backward, and gradients set
to None, in bfloat16. All implementations are alive in one process and take turns:

- ours: the default passes, which leave out the mask (``causal_attention``);
- with masks: without that pass, as a model is traced;
- FSDP2, blocks compiled: the model is not traced, and makes no mask.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, machine
from implementations import IMPLEMENTATIONS, Setup
from tables import Table, quartile_cell
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp.compat import fake_process_group
from graph_fsdp.passes import default_pipeline

WORLD_SIZE, VOCABULARY = 8, 512
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    heads: int
    key_heads: int
    lengths: tuple[int, ...]  # tokens of a row, of which a step has one


ON_THE_CPU = Sizes(layers=4, width=512, heads=8, key_heads=2, lengths=(512, 2048))
ON_AN_ACCELERATOR = Sizes(layers=8, width=4096, heads=32, key_heads=8, lengths=(2048, 8192))  # Llama-3-8B's


def plain_llama(sizes: Sizes, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.width,
        intermediate_size=7 * sizes.width // 2,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_heads,
        max_position_embeddings=length,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def models(length: int, mesh: DeviceMesh, device: torch.device) -> dict[str, nn.Module]:
    def llama() -> nn.Module:
        with device:
            return plain_llama(sizes_on(device), length)

    ours = partial(graph_fsdp.compile, mesh=mesh, mp_policy=POLICY)
    setup = Setup(lambda model: model.model.layers, mesh, POLICY)
    return {
        "ours": ours(llama()),
        "with masks": ours(llama(), passes=default_pipeline().remove("causal_attention")),
        "FSDP2, blocks compiled": IMPLEMENTATIONS["fsdp2_compiled"].build(llama(), setup),
    }


def sizes_on(device: torch.device) -> Sizes:
    return ON_THE_CPU if device.type == "cpu" else ON_AN_ACCELERATOR


def now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def step_seconds(model: nn.Module, tokens: torch.Tensor) -> float:
    begin = now(tokens.device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    model.zero_grad(set_to_none=True)
    return now(tokens.device) - begin


def measure(length: int, rounds: int, warm_up: int, device: torch.device) -> dict[str, list[float]]:
    """Implementation → first quartile, median and third quartile of a step's seconds."""
    with fake_process_group(WORLD_SIZE):
        subjects = models(length, init_device_mesh(device.type, (WORLD_SIZE,)), device)
        tokens = torch.randint(0, VOCABULARY, (1, length), device=device)
        found: dict[str, list[float]] = {name: [] for name in subjects}
        for index in range(warm_up + rounds):
            for name, model in subjects.items():
                seconds = step_seconds(model, tokens)
                if index >= warm_up:
                    found[name].append(seconds)
    torch._dynamo.reset()
    return {name: statistics.quantiles(seconds, n=4, method="inclusive") for name, seconds in found.items()}


def table(result: dict[str, Any]) -> Table:
    rows = []
    for length, found in result["seconds"].items():
        reference = found["FSDP2, blocks compiled"][1]
        rows += [[length, name, quartile_cell(q, 1e3, 0), f"{q[1] / reference:.2f}"] for name, q in found.items()]
    return Table(["tokens", "implementation", "step, ms", "÷ FSDP2's"], rows)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", help="of rows, in tokens")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--save", type=Path, default=None, help=f"where to write JSON, such as {RESULTS.name}/…")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"machine": machine(options.device, WORLD_SIZE) | {"process_group": "fake"}, "seconds": {}}
    device = torch.device(options.device)
    for length in options.lengths or sizes_on(device).lengths:
        result["seconds"][str(length)] = measure(length, options.rounds, options.warm_up, device)
    print(table(result).text())
    if options.save is not None:
        options.save.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
