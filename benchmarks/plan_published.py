"""The plan against published measurements: torchtitan's table of Llama-3.1-8B, FSDP only, end of 2024.

    python benchmarks/plan_published.py [--rows 0 1 2] [--layers 32]

Nothing is measured here: rows are predicted (``graph_fsdp.planning``) and set beside what the page says,
https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md. All rows have one
description of the hardware, ``h100_500w``, and one of the conditions: links and processors are shared
(``contention``), and the slowest GPU computes 1.08 times slower than the others, which is the variation between GPUs of
one kind that Sinha et al. (SC 2022) measured on average. No row has a figure of its own. The model is
``published_llama.py``, its optimizer and clipping are those of the page's commit: AdamW as separate kernels, gradients
clipped by their norm.

The page's gigabytes are what torch's allocator has reserved (``max_reserved_gib`` of torchtitan's ``metrics.py``, from
``reserved_bytes.all.peak``), with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``, which ``run_llama_train.sh``
sets. So is what is predicted: of the plan's own program, and with the buffers that FSDP2 has in its place
(``fsdp2_memory.py``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from fsdp2_memory import fsdp2_step
from published_llama import EveryOtherProduct, PublishedLlama, Sizes
from tables import Table
from torch.distributed.fsdp import MixedPrecisionPolicy

from graph_fsdp.passes import default_pipeline
from graph_fsdp.planning import Plan, plan
from graph_fsdp.planning.allocator import replay

RESULTS = Path(__file__).parent / "results" / "plan_published.json"
HARDWARE, STRAGGLER, BATCH, LENGTH = "h100_500w", 1.08, 2, 8192
GIB = 2**30
# GPUs, backend, and as published: tokens per second and GPU, GiB.
ROWS: tuple[tuple[int, str, int, float], ...] = (
    (8, "inductor", 6667, 77.0),
    (128, "inductor", 6514, 62.0),
    (8, "eager", 5762, 82.4),
    (128, "eager", 5605, 67.0),
)


def predict(gpus: int, backend: str, layers: int) -> Plan:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    return plan(
        lambda: PublishedLlama(Sizes(layers=layers)),
        (tokens, tokens),
        mesh_shape=(gpus,),
        hardware=HARDWARE,
        backend=backend,
        optimizer="adamw_foreach",
        clip_gradients=True,
        expandable_segments=True,
        straggler=STRAGGLER,
        contention=True,
        passes=default_pipeline(hardware=HARDWARE).insert_after("recompute", EveryOtherProduct()),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )


def row(gpus: int, backend: str, tokens: int, gib: float, layers: int) -> dict[str, Any]:
    made = predict(gpus, backend, layers)
    as_fsdp2 = replay(fsdp2_step(made), expandable_segments=made.expandable_segments)
    return {
        "gpus": gpus,
        "backend": backend,
        "published": {"tokens_per_second": tokens, "reserved_gib": gib},
        "predicted": {
            "tokens_per_second": made.tokens_per_second,
            "live_gib": made.peak_nbytes / GIB,
            "reserved_gib": made.reserved.nbytes / GIB,
            "reserved_as_fsdp2_gib": as_fsdp2.nbytes / GIB,
        },
        "plan": made.summary(),
    }


def table(result: dict[str, Any]) -> Table:
    names = ("published", "predicted", "error")
    header = ("", *(f"tokens/s and GPU, {names[0]}", *names[1:]), *(f"GiB, {names[0]}", "live tensors", "reserved"))
    header += ("error", "reserved, FSDP2's buffers", "error")
    rows = []
    for found in result["rows"]:
        published, predicted = found["published"], found["predicted"]
        speed, gib = published["tokens_per_second"], published["reserved_gib"]
        cells = [f"{found['gpus']} GPUs, {'compiled' if found['backend'] == 'inductor' else 'eager'}"]
        cells += [f"{speed:,}", f"{predicted['tokens_per_second']:,.0f}"]
        cells += [f"{predicted['tokens_per_second'] / speed - 1:+.1%}", f"{gib:.1f}", f"{predicted['live_gib']:.1f}"]
        for name in ("reserved_gib", "reserved_as_fsdp2_gib"):
            cells += [f"{predicted[name]:.1f}", f"{predicted[name] / gib - 1:+.1%}"]
        rows.append(cells)
    return Table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(ROWS))), help="of the table, from 0")
    parser.add_argument("--layers", type=int, default=Sizes().layers)
    parser.add_argument("--out", type=Path, help="where the result goes as JSON (default: nowhere)")
    chosen = parser.parse_args()
    result = {
        "benchmark": "plan_published",
        "command": f"python benchmarks/plan_published.py --out benchmarks/results/{RESULTS.name}",
        "torch": torch.__version__,
        "rows": [row(*ROWS[index], chosen.layers) for index in chosen.rows],
    }
    print(table(result).text())
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
