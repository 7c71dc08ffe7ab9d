"""``graph-fsdp plan``: a training step on a cluster that is not there."""

from __future__ import annotations

import argparse
import json

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from graph_fsdp.files import write_text
from graph_fsdp.planning import Plan, plan
from graph_fsdp.planning.model_config import find_model

SUMMARY = "time and memory of a training step on a cluster that is not there"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RESHARD = {"default": None, "true": True, "false": False}


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts a training step of a model, from its graphs after all passes: no device, no weights and no other "
        "process is needed. Times are of the cost model, bytes of the memory model."
    )
    parser.add_argument("model", help="config.json of Hugging Face, module:function or file.py:function")
    parser.add_argument("--mesh", type=_mesh, default=(8,), help="ranks that shard, or REPLICASxSHARDS (default 8)")
    parser.add_argument("--hardware", default="h100", help="of every rank (default h100)")
    parser.add_argument("--batch", type=int, default=1, help="rows per rank (default 1)")
    parser.add_argument("--seq", type=int, default=4096, help="tokens per row (default 4096)")
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="bfloat16", help="gathered and computed in (default bfloat16)"
    )
    parser.add_argument(
        "--reshard", choices=_RESHARD, default="default", help="after forward: true is ZeRO-3, false ZeRO-2"
    )
    parser.add_argument("--checkpointing", choices=("none", "unit", "selective"), default="none", help="of activations")
    parser.add_argument("--optimizer", choices=("adamw", "sgd", "momentum", "none"), default="adamw")
    parser.add_argument("--report", metavar="FILE.html", help="also save the page of the report")
    parser.add_argument("--trace", metavar="FILE.json", help="also save the schedule for Perfetto")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=_plan)


def _plan(chosen: argparse.Namespace) -> None:
    made = _planned(chosen)
    print(json.dumps(made.summary(), indent=1) if chosen.json else made)
    if chosen.report:
        made.save(chosen.report)
    if chosen.trace:
        made.save_trace(chosen.trace)


def _planned(chosen: argparse.Namespace) -> Plan:
    for name in ("report", "trace"):
        if getattr(chosen, name):  # before the minutes that a large model takes
            write_text(getattr(chosen, name), "")
    model_fn, inputs = find_model(chosen.model, chosen.batch, chosen.seq)
    return plan(
        model_fn,
        inputs,
        mesh_shape=chosen.mesh,
        hardware=chosen.hardware,
        optimizer=None if chosen.optimizer == "none" else chosen.optimizer,
        mp_policy=MixedPrecisionPolicy(param_dtype=_DTYPES[chosen.dtype], reduce_dtype=torch.float32),
        reshard_after_forward=_RESHARD[chosen.reshard],
        activation_checkpointing=None if chosen.checkpointing == "none" else chosen.checkpointing,
    )


def _mesh(text: str) -> tuple[int, ...]:
    sizes = text.lower().split("x")
    if len(sizes) > 2 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mesh: give a number of ranks, or REPLICASxSHARDS such as 64x8"
        )
    return tuple(map(int, sizes))
