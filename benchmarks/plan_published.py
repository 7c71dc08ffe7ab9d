"""Published measurements of torchtitan's program beside FSDP2's own code on the virtual device, and beside our plan.

    python benchmarks/plan_published.py [--rows 0 1 2] [--layers 32]
    python benchmarks/plan_published.py --other gpus=64 batch=1 hardware=h100 tokens=7000 gib=50 --out other.json

Nothing is measured here. A row's conditions are what its page and torchtitan's code at that time say; none has a figure
that was fitted to it (docs/planning.md). ``--other`` is a row that is not in the table, by the fields of ``Row``.

**FSDP2's program**: torch's ``fully_shard``, ``torch.utils.checkpoint``, ``torch.compile`` of each block, autograd,
clipping by norm and AdamW run as torchtitan calls them, at full depth, on the virtual device (``virtual/``) without
numbers, as one rank of the row's GPUs.

- tokens/s: of the third step. The host takes no time. What ran is played again with one GPU that computes
  1.08 times slower, and with collectives that take processors (``virtual/replay.py``).
- GiB: the most that torch's caching allocator has reserved in three steps, and has had in use. Compiled code allocates
  what its kernels write, and frees it after the last that reads it (``virtual/compiled.py``). A page's gigabytes are
  GiB reserved (``max_reserved_gib`` of torchtitan's ``metrics.py``), under ``expandable_segments:True``, which its
  scripts set.

**Ours**: ``graph_fsdp.plan`` of the same model, under the same conditions: what ``graph_fsdp.compile`` would do there.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from published_llama import MODELS, NAMED, Block, EveryOtherProduct, Head, PublishedLlama, Sizes
from tables import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Embedding
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from virtual.compiled import backend
from virtual.cost import Network
from virtual.group import virtual_group
from virtual.machine import Machine
from virtual.replay import seconds_under

from graph_fsdp.passes import default_pipeline, find_hardware
from graph_fsdp.passes.analysis.simulate import Conditions
from graph_fsdp.planning import Plan, plan

RESULTS = Path(__file__).parent / "results" / "plan_published.json"
CONDITIONS = Conditions(straggler=1.08, contention=True)
GIB, STEPS = 2**30, 3
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_SAVED = {operator.default for operator in NAMED}


@dataclass(frozen=True)
class Row:
    """What is published, tokens per second and GPU and GiB (None: not published), and its conditions.

    batch: sequences of a GPU. checkpointing: "op" saves what torchtitan's list of operators says, "full" the inputs of
    blocks only, "none" all that autograd saves. root_only: embedding, last norm and output are parameters of the root,
    not of units of their own. Raises ValueError on a model or a checkpointing that there is none of.
    """

    name: str
    tokens: float
    gib: float | None
    model: str = "Llama-3-8B"
    gpus: int = 8
    batch: int = 2
    checkpointing: str = "op"
    blocks_compiled: bool = True
    loss_compiled: bool = False
    root_only: bool = True
    optimizer: str = "adamw"
    hardware: str = "h100_500w"
    expandable_segments: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (
            ("model", self.model, list(MODELS)),
            ("checkpointing", self.checkpointing, ["op", "full", "none"]),
        ):
            if value not in known:
                raise ValueError(f"{name}: there is no {value!r}; give one of {', '.join(known)}")

    def sizes(self, layers: int | None) -> Sizes:
        """Those of the model, or with fewer layers."""
        sizes = MODELS[self.model]
        return dataclasses.replace(sizes, layers=layers or sizes.layers)


_END_OF_2024: dict[str, Any] = {"optimizer": "adamw_foreach"}
_APRIL_2024: dict[str, Any] = {"optimizer": "adamw_foreach", "blocks_compiled": False, "hardware": "a100"}
_AUGUST_2025: dict[str, Any] = {
    "loss_compiled": True,
    "root_only": False,
    "hardware": "mi300x",
    "expandable_segments": False,  # torch has none on ROCm
}
ROWS = (
    Row("December 2024: 8 H100s, compiled", 6667, 77.0, **_END_OF_2024),
    Row("128 H100s, compiled", 6514, 62.0, gpus=128, **_END_OF_2024),
    Row("8 H100s, eager", 5762, 82.4, blocks_compiled=False, **_END_OF_2024),
    Row("128 H100s, eager", 5605, 67.0, gpus=128, blocks_compiled=False, **_END_OF_2024),
    Row("March 2025: 8 H100s, compiled, one sequence", 6150, 47.65, batch=1),
    Row("June 2025: the same, loss compiled", 6300, 30.89, batch=1, loss_compiled=True),
    Row("April 2024: 64 A100s, eager, one sequence", 2973, None, gpus=64, batch=1, **_APRIL_2024),
    Row(
        "64 A100s: Llama-3-70B, one sequence, blocks recomputed", 331, None, "Llama-3-70B", 64, 1, "full", **_APRIL_2024
    ),
    Row("64 A100s: Llama-2-13B, nothing recomputed", 2162, None, "Llama-2-13B", 64, 2, "none", **_APRIL_2024),
    Row("64 A100s: Llama-2-13B", 1904, None, "Llama-2-13B", 64, 2, **_APRIL_2024),
    Row("64 A100s: Llama-2-70B, one sequence", 355, None, "Llama-2-70B", 64, 1, **_APRIL_2024),
    Row("64 A100s: Llama-2-70B, blocks recomputed", 353, None, "Llama-2-70B", 64, 2, "full", **_APRIL_2024),
    Row("August 2025: 8 MI300Xs, compiled, one sequence", 5376.5, 39.09, batch=1, **_AUGUST_2025),
)


# FSDP2's program


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
    """Make a row's model as torchtitan does: blocks checkpointed, compiled, then sharded; memory comes last."""
    with torch.device("meta"):
        model = PublishedLlama(row.sizes(layers))
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


def train_step(row: Row, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """Run one step, in torchtitan's order."""
    optimizer.zero_grad()
    model(tokens, tokens).backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
    optimizer.step()


def fsdp2(row: Row, layers: int | None = None) -> dict[str, Any]:
    """Train a row's model, or one with fewer layers, for three steps on a machine of its own."""
    torch._dynamo.reset()
    hardware, expandable = find_hardware(row.hardware), row.expandable_segments
    machine = Machine(hardware, numbers=False, traced=True, expandable_segments=expandable)
    with machine, virtual_group(row.gpus, Network(hardware=hardware)):
        model = sharded(row, layers, init_device_mesh("virtual", (row.gpus,)))
        fused = row.optimizer != "adamw_foreach"
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused, foreach=not fused)
        tokens = torch.zeros(row.batch, MODELS[row.model].length, dtype=torch.int64, device="virtual")
        operations, reserved = machine.operations, []
        assert operations is not None
        gc.collect()
        gc.disable()  # as torchtitan does, which collects between steps
        for _ in range(STEPS):
            operations.clear()
            begin = machine.seconds
            train_step(row, model, optimizer, tokens)
            torch.accelerator.synchronize()
            reserved.append(machine.memory.reserved / GIB)
        gc.enable()
        alone, seconds = machine.seconds - begin, seconds_under(CONDITIONS, operations, hardware)
        found = {
            "tokens_per_second": tokens.numel() / seconds,
            "seconds": seconds,
            "undisturbed_seconds": alone,
            "compute_seconds": sum(op.seconds for op in operations if not op.links and op.stream == 0),
            "link_seconds": sum(op.seconds for op in operations if op.links),
            "operations": len(operations),
            "allocated_gib": machine.memory.most / GIB,
            "reserved_gib": reserved[-1],
            "reserved_gib_after_steps": reserved,
        }
        del model, optimizer
        torch._dynamo.reset()
        gc.collect()
    return found


def ours(row: Row, layers: int | None = None) -> Plan:
    """Plan a row's model, or one with fewer layers, as ``graph_fsdp.compile`` would train it."""
    tokens = torch.zeros(row.batch, MODELS[row.model].length, dtype=torch.long, device="meta")
    passes = default_pipeline(hardware=row.hardware)
    if row.checkpointing == "op":
        passes = passes.insert_after("recompute", EveryOtherProduct())
    return plan(
        lambda: PublishedLlama(row.sizes(layers)),
        (tokens, tokens),
        mesh_shape=(row.gpus,),
        hardware=row.hardware,
        backend="inductor" if row.blocks_compiled else "eager",
        optimizer=row.optimizer,  # type: ignore[arg-type]
        clip_gradients=True,
        expandable_segments=row.expandable_segments,
        straggler=CONDITIONS.straggler,
        contention=CONDITIONS.contention,
        activation_checkpointing="unit" if row.checkpointing == "full" else None,
        auto_wrap_policy={Block} if row.root_only else {Block, Embedding, Head},
        passes=passes,
        mp_policy=POLICY,
    )


def result_of(row: Row, layers: int | None = None) -> dict[str, Any]:
    run = fsdp2(row, layers)  # first: autograd counts the devices that there are once
    made = ours(row, layers)
    assert made.tokens is not None
    planned = {
        "tokens_per_second": made.tokens / made.step_seconds,
        "reserved_gib": made.reserved.nbytes / GIB,
        "plan": made.summary(),
    }
    return {**dataclasses.asdict(row), "fsdp2": run, "ours": planned}


def table(result: dict[str, Any]) -> Table:
    speeds = ("", "tokens/s and GPU, published", "FSDP2's program", "error")
    header = (*speeds, "GiB, published", "in use", "reserved", "error", "our plan: tokens/s", "GiB reserved")
    rows = []
    for found in result["rows"]:
        fsdp2, speed, gib = found["fsdp2"], found["tokens"], found["gib"]
        rows.append(
            [
                found["name"],
                f"{speed:,g}",
                f"{fsdp2['tokens_per_second']:,.0f}",
                f"{fsdp2['tokens_per_second'] / speed - 1:+.1%}",
                f"{gib:g}" if gib is not None else "",
                f"{fsdp2['allocated_gib']:.1f}",
                f"{fsdp2['reserved_gib']:.1f}",
                f"{fsdp2['reserved_gib'] / gib - 1:+.1%}" if gib is not None else "",
                f"{found['ours']['tokens_per_second']:,.0f}",
                f"{found['ours']['reserved_gib']:.1f}",
            ]
        )
    return Table(header, rows)


def other_row(settings: list[str]) -> Row:
    """Read ``name=value`` pairs, by the types of ``Row``'s fields."""
    readers = {"str": str, "float": float, "int": int, "bool": lambda text: text.lower() in ("1", "true", "yes")}
    kinds = {field.name: str(field.type).removesuffix(" | None") for field in dataclasses.fields(Row)}
    values: dict[str, Any] = {"name": "another row", "tokens": float("nan"), "gib": float("nan")}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in kinds or not value:
            raise ValueError(f"--other: {setting!r} is no setting of a row; give name=value of {', '.join(kinds)}")
        values[name] = readers[kinds[name]](value)
    return Row(**values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(ROWS))), help="of the table, from 0")
    parser.add_argument("--other", nargs="+", metavar="NAME=VALUE", help="one row that is not in the table")
    parser.add_argument("--layers", type=int, help="fewer than the models have")
    parser.add_argument("--out", type=Path, help="where the result goes as JSON (default: nowhere)")
    chosen = parser.parse_args()
    rows = [other_row(chosen.other)] if chosen.other else [ROWS[index] for index in chosen.rows]
    result = {
        "benchmark": "plan_published",
        "command": f"python benchmarks/plan_published.py --out benchmarks/results/{RESULTS.name}",
        "torch": torch.__version__,
        "rows": [result_of(row, chosen.layers) for row in rows],
    }
    print(table(result).text())
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
