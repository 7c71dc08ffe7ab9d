"""The published rows by FSDP2's own code: torchtitan's program for Llama on the virtual device, at full depth.

    python benchmarks/published_on_virtual.py [--rows 0 1 2] [--layers 32] [--out …json]
    python benchmarks/published_on_virtual.py --other gpus=64 batch=1 hardware=h100 tokens=7000 gib=50

Rows and their conditions are those of ``plan_published.py``, which predicts them from a description of FSDP2. Here
torch's ``fully_shard``, ``torch.utils.checkpoint``, ``torch.compile`` of each block, autograd, clipping by norm and
AdamW run as torchtitan calls them, on the virtual device (``virtual/``) without numbers, as one rank of the row's GPUs.

- tokens/s: of the third step. The host takes no time. What ran is played again with one GPU that computes
  ``STRAGGLER`` times slower, and with collectives that take processors (``virtual/replay.py``), as for the plan.
- GiB: the most that torch's caching allocator has reserved, and has had in use, from the first step on. Compiled code
  allocates what its kernels write, and frees it after the last that reads it (``virtual/compiled.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plan_published import GIB, ROWS, STRAGGLER, Row, other_row, table
from published_llama import MODELS, NAMED, Block, PublishedLlama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from virtual.compiled import backend
from virtual.cost import Network
from virtual.group import virtual_group
from virtual.machine import Machine
from virtual.replay import seconds_under

from graph_fsdp.passes import find_hardware
from graph_fsdp.passes.analysis.simulate import Conditions

RESULTS = Path(__file__).parent / "results" / "published_on_virtual.json"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 3
_SAVED = {operator.default for operator in NAMED}


def every_other_product() -> Any:
    """Return the two contexts of a checkpoint that saves attention and every other matrix multiplication."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Checkpointed(nn.Module):
    """A block under ``torch.utils.checkpoint``, with contexts that save some of its results, or with none."""

    def __init__(self, block: Block, contexts: Callable[[], Any] | None) -> None:
        super().__init__()
        self.block = block
        self.run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        if contexts is not None:
            self.run = partial(self.run, context_fn=contexts)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return self.run(self.block, x, angles)  # type: ignore[no-any-return]


def sharded(row: Row, layers: int | None, mesh: DeviceMesh) -> PublishedLlama:
    """Make a row's model as torchtitan does: blocks checkpointed, then compiled, then sharded, and given memory last."""
    sizes = MODELS[row.model]
    with torch.device("meta"):
        model = PublishedLlama(dataclasses.replace(sizes, layers=layers or sizes.layers))
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": POLICY}
    last = len(model.layers) - 1
    for index, block in enumerate(model.layers):
        if row.checkpointing != "none":
            assert isinstance(block, Block)
            block = Checkpointed(block, every_other_product if row.checkpointing == "op" else None)
        if row.blocks_compiled:
            block.compile(backend=backend, fullgraph=True)
        fully_shard(block, **settings, reshard_after_forward=index < last or not row.root_only)
        model.layers[index] = block
    if not row.root_only:
        fully_shard(model.embedding, **settings)
        fully_shard(model.head, **settings, reshard_after_forward=False)
    fully_shard(model, **settings, reshard_after_forward=False)
    if row.loss_compiled:
        model.loss.compile(backend=backend, fullgraph=True)
    return model.to_empty(device="virtual")


def train(row: Row, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """Run one step, in torchtitan's order."""
    optimizer.zero_grad()
    model(tokens, tokens).backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
    optimizer.step()


def result_of(row: Row, layers: int | None = None) -> dict[str, Any]:
    """Train a row's model, or one with fewer layers, for three steps on a machine of its own."""
    torch._dynamo.reset()
    hardware = find_hardware(row.hardware)
    expandable = row.expandable_segments
    machine = Machine(hardware, numbers=False, traced=True, expandable_segments=expandable)
    with machine, virtual_group(row.gpus, Network(hardware=hardware)):
        model = sharded(row, layers, init_device_mesh("virtual", (row.gpus,)))
        kind = "foreach" if row.optimizer == "adamw_foreach" else "fused"
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, **{kind: True})
        tokens = torch.zeros(row.batch, MODELS[row.model].length, dtype=torch.int64, device="virtual")
        operations, reserved = machine.operations, []
        assert operations is not None
        gc.collect()
        gc.disable()  # as torchtitan does, which collects between steps
        for _ in range(STEPS):
            operations.clear()
            begin = machine.seconds
            train(row, model, optimizer, tokens)
            torch.accelerator.synchronize()
            reserved.append(machine.memory.reserved / GIB)
        gc.enable()
        alone = machine.seconds - begin
        seconds = seconds_under(Conditions(STRAGGLER, contention=True), operations, hardware)
        kernels = [op for op in operations if not op.links and op.stream == 0]
        found = {
            "tokens_per_second": tokens.numel() / seconds,
            "seconds": seconds,
            "undisturbed_seconds": alone,
            "compute_seconds": sum(op.seconds for op in kernels),
            "link_seconds": sum(op.seconds for op in operations if op.links),
            "operations": len(operations),
            "allocated_gib": machine.memory.most / GIB,
            "reserved_gib": reserved[-1],
            "reserved_gib_after_steps": reserved,
        }
        del model, optimizer
        torch._dynamo.reset()
        gc.collect()
    return {**dataclasses.asdict(row), "predicted": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(ROWS))), help="of the table, from 0")
    parser.add_argument("--other", nargs="+", metavar="NAME=VALUE", help="one row that is not in the table")
    parser.add_argument("--layers", type=int, help="fewer than the models have")
    parser.add_argument("--out", type=Path, help="where the result goes as JSON (default: nowhere)")
    chosen = parser.parse_args()
    rows = [other_row(chosen.other)] if chosen.other else [ROWS[index] for index in chosen.rows]
    result = {
        "benchmark": "published_on_virtual",
        "command": f"python benchmarks/published_on_virtual.py --out benchmarks/results/{RESULTS.name}",
        "torch": torch.__version__,
        "rows": [result_of(row, chosen.layers) for row in rows],
    }
    print(table(result).text())
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
