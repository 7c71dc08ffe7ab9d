"""The plan against published measurements of torchtitan's program: Llama-3-8B under FSDP2 alone.

    python benchmarks/plan_published.py [--rows 0 1 2] [--layers 32]
    python benchmarks/plan_published.py --other gpus=64 batch=1 hardware=h100 tokens=7000 gib=50 --out other.json

Nothing is measured here: rows are predicted (``graph_fsdp.planning``) and set beside what pages say. A row's conditions
are what its page and torchtitan's code at that time say; none has a figure that was fitted to it (docs/planning.md).
``--other`` is a row that is not in the table, by the fields of ``Row``.

The plan is of the model that torchtitan had (``published_llama.py``), in operators of PyTorch. Its steps are those of
torchtitan's program: blocks compiled, or not; the loss too, or not; FSDP2's collectives, copies and buffers
(``fsdp2_program.py``, ``fsdp2_memory.py``). A page's gigabytes are GiB that torch's allocator has reserved
(``max_reserved_gib`` of torchtitan's ``metrics.py``), with ``expandable_segments:True``, which its scripts set.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fsdp2_memory import fsdp2_step
from fsdp2_program import Compiled, fsdp2_seconds
from published_llama import MODELS, Block, EveryOtherProduct, Head, PublishedLlama, SaveAsAutograd
from tables import Table
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Embedding

from graph_fsdp.passes import default_pipeline
from graph_fsdp.passes.transforms.activation_checkpointing import CheckpointActivations
from graph_fsdp.planning import Plan, plan
from graph_fsdp.planning.allocator import replay

RESULTS = Path(__file__).parent / "results" / "plan_published.json"
STRAGGLER, GIB = 1.08, 2**30


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

    @property
    def compiled(self) -> Compiled:
        return Compiled(self.blocks_compiled, self.loss_compiled)


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
SEEN = 5  # rows that the program was written for; the others were predicted when it stood


def predict(row: Row, layers: int | None = None) -> Plan:
    """Plan a row, or its model with fewer layers."""
    sizes = MODELS[row.model]
    sizes = dataclasses.replace(sizes, layers=layers or sizes.layers)
    tokens = torch.zeros(row.batch, sizes.length, dtype=torch.long, device="meta")
    saves = SaveAsAutograd(row.loss_compiled, everywhere=row.checkpointing == "none")
    checkpointing = {"none": [], "op": [EveryOtherProduct()], "full": [CheckpointActivations("unit")]}
    passes = default_pipeline(hardware=row.hardware)
    for new in (saves, *checkpointing[row.checkpointing]):  # the last one comes first
        passes = passes.insert_after("recompute", new)
    return plan(
        lambda: PublishedLlama(sizes),
        (tokens, tokens),
        mesh_shape=(row.gpus,),
        hardware=row.hardware,
        backend="eager",
        optimizer=row.optimizer,  # type: ignore[arg-type]
        clip_gradients=True,
        expandable_segments=row.expandable_segments,
        straggler=STRAGGLER,
        contention=True,
        auto_wrap_policy={Block} if row.root_only else {Block, Embedding, Head},
        passes=passes,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )


def result_of(row: Row, layers: int | None = None) -> dict[str, Any]:
    made = predict(row, layers)
    seconds = fsdp2_seconds(made, row.compiled)
    reserved = replay(fsdp2_step(made, row.compiled), expandable_segments=row.expandable_segments)
    assert made.tokens is not None
    return {
        **dataclasses.asdict(row),
        "predicted": {
            "tokens_per_second": made.tokens / sum(seconds.values()),
            "seconds": seconds,
            "allocated_gib": reserved.allocated / GIB,
            "reserved_gib": reserved.nbytes / GIB,
        },
        "plan": made.summary(),
    }


def table(result: dict[str, Any]) -> Table:
    header = ("", "tokens/s and GPU, published", "predicted", "error")
    header += ("GiB, published", "in use", "reserved", "error")
    rows = []
    for found in result["rows"]:
        predicted, speed, gib = found["predicted"], found["tokens"], found["gib"]
        rows.append(
            [
                found["name"],
                f"{speed:,g}",
                f"{predicted['tokens_per_second']:,.0f}",
                f"{predicted['tokens_per_second'] / speed - 1:+.1%}",
                *_memory_cells(gib, predicted),
            ]
        )
    return Table(header, rows)


def _memory_cells(gib: float | None, predicted: dict[str, Any]) -> list[str]:
    if gib is None:
        return [""] * 4
    allocated, reserved = predicted["allocated_gib"], predicted["reserved_gib"]
    return [f"{gib:g}", f"{allocated:.1f}", f"{reserved:.1f}", f"{reserved / gib - 1:+.1%}"]


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
