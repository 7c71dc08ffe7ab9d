"""``graph-fsdp plan`` predicts a training step on a cluster that is not there."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph_fsdp.cli.saved import parse_bytes

if TYPE_CHECKING:
    from graph_fsdp.planning import Choice, Dimensions

_DTYPES = ("float32", "bfloat16", "float16")
_RESHARD = {"default": None, "true": True, "false": False}
_CHECKPOINTING = ("none", "unit", "selective", "offload")


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts a training step of a model, from its graphs after all passes: no device, no weights and no other "
        "process is needed. Times are of the cost model, bytes of the memory model."
    )
    parser.add_argument("model", help="config.json of Hugging Face, module:function or file.py:function")
    named = "pp=4,dp_replicate=2,dp_shard=8,cp=2,tp=8,ep=16"
    parser.add_argument(
        "--mesh", type=_mesh, default=(8,), help=f"ranks that shard, REPLICASxSHARDS, or such as {named} (default 8)"
    )
    parser.add_argument("--schedule", help="of a pipeline: GPipe, 1F1B or Interleaved1F1B (default 1F1B)")
    parser.add_argument("--microbatches", type=_count, help="of a step, on each rank (default 4 times pp, or 1)")
    parser.add_argument("--stages-per-rank", type=_count, default=1, help="of Interleaved1F1B (default 1)")
    parser.add_argument("--hardware", default="h100", help="of every rank (default h100)")
    parser.add_argument(
        "--batch", type=_count, help="rows per rank, of a microbatch (default 1, or the function's inputs)"
    )
    parser.add_argument("--seq", type=_count, help="tokens per row (default 4096, or the function's inputs)")
    parser.add_argument(
        "--precision", "--dtype", dest="dtype", choices=_DTYPES, default="bfloat16", help="gathered and computed in"
    )
    parser.add_argument(
        "--reshard", choices=_RESHARD, default="default", help="after forward: true is ZeRO-3, false ZeRO-2"
    )
    parser.add_argument("--checkpointing", choices=_CHECKPOINTING, default="none", help="of activations")
    optimizers = ("adamw", "adamw_foreach", "adamw_on_cpu", "sgd", "momentum", "none")
    parser.add_argument("--optimizer", choices=optimizers, default="adamw")
    parser.add_argument(
        "--expandable-segments", action="store_true", help="of torch's allocator, which says what is reserved"
    )
    parser.add_argument("--clip", action="store_true", help="gradients are clipped by their norm")
    parser.add_argument("--straggler", type=float, default=1.0, help="one rank computes so many times slower")
    parser.add_argument(
        "--contention", action="store_true", help="collectives share links, and processors with compute"
    )
    parser.add_argument(
        "--search", action="store_true", help="compare meshes, schedules, resharding, buckets and checkpointing"
    )
    parser.add_argument(
        "--memory", type=parse_bytes, help="of a rank, such as 80GB, for --search (default the hardware's)"
    )
    parser.add_argument("--report", metavar="FILE.html", help="also save the page of the report")
    parser.add_argument("--trace", metavar="FILE.json", help="also save the schedule for Perfetto")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> None:
    if chosen.search:
        defaults = {"reshard": "default", "checkpointing": "none", "report": None, "trace": None}
        for name, default in {**defaults, "expandable_segments": False}.items():
            if getattr(chosen, name) != default:
                option = name.replace("_", "-")
                raise ValueError(f"--{option}: is of one plan, and --search makes several; leave it out")
    elif chosen.memory is not None:
        raise ValueError("--memory: says what a search must fit into; give --search too")

    from graph_fsdp.report.file import check_writable, is_page

    if chosen.report:  # before the minutes that a large model takes
        is_page(chosen.report)
    for name in ("report", "trace"):
        if getattr(chosen, name):
            check_writable(getattr(chosen, name))
    atexit.register(gc.freeze)  # Python's last collection would walk all that is left of the graphs, to free it
    made = _made(chosen)
    gc.freeze()  # nor does one walk them while the plan is printed
    print(json.dumps(made.summary(), indent=1) if chosen.json else made)
    if chosen.report:
        made.save(chosen.report)
    if chosen.trace:
        made.save_trace(chosen.trace)


def _made(chosen: argparse.Namespace) -> Any:
    """Return the plan, or what the search has found."""
    import torch
    from rich.console import Console
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from graph_fsdp import compat
    from graph_fsdp.passes import find_hardware
    from graph_fsdp.planning import Dimensions, plan, search
    from graph_fsdp.planning.model_config import BATCH, LENGTH, find_model
    from graph_fsdp.planning.search import meshes

    dimensions = Dimensions.of(chosen.mesh)
    of_pipelines = chosen.microbatches is not None, chosen.schedule is not None, chosen.stages_per_rank > 1
    divided = not dimensions.is_plain or any(of_pipelines)
    island = find_hardware(chosen.hardware).island
    options: dict[str, Any] = {
        "hardware": chosen.hardware,
        "optimizer": None if chosen.optimizer == "none" else chosen.optimizer,
        "clip_gradients": chosen.clip,
        "expandable_segments": chosen.expandable_segments,
        "straggler": chosen.straggler,
        "contention": chosen.contention,
        "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, chosen.dtype), reduce_dtype=torch.float32),
    }
    if divided:
        return _divided(chosen, dimensions, options)
    model_fn, inputs, are_own = find_model(chosen.model, chosen.batch, chosen.seq)
    try:
        if chosen.search:
            shapes = list(dict.fromkeys([dimensions.plain_shape, *meshes(dimensions.ranks, island)]))
            limits = {"memory": chosen.memory, "progress": _progress}
            return search(model_fn, inputs, mesh_shapes=shapes, **limits, **options)
        waiting = Console(stderr=True).status("tracing the model and running the passes")
        with waiting, compat.failures_unlogged():
            return plan(model_fn, inputs, mesh_shape=dimensions, **_memory_options(chosen), **options)
    except (RuntimeError, LookupError, TypeError, AttributeError) as error:
        if are_own or type(error).__module__.startswith("graph_fsdp."):
            raise
        kind, said = type(error).__name__, " ".join(str(error).split())
        shape = [chosen.batch or BATCH, chosen.seq or LENGTH]
        raise ValueError(
            f"model: {chosen.model} returns no inputs, and its forward fails on tokens, {shape} of int64; return a "
            f"module and its inputs ({kind}: {said[:400]})"
        ) from error


def _divided(chosen: argparse.Namespace, dimensions: Dimensions, options: dict[str, Any]) -> Any:
    """Return the plan of a model of transformers that is divided over more than ranks of data parallelism."""
    from rich.console import Console

    from graph_fsdp.passes import find_hardware
    from graph_fsdp.planning import plan_pipeline, search_pipelines
    from graph_fsdp.planning.causal_lm import CausalLM
    from graph_fsdp.planning.model_config import BATCH, LENGTH, read_config
    from graph_fsdp.planning.search import neighbours

    for name in ("report", "trace", "expandable_segments"):
        if getattr(chosen, name):
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: is of one program, and a pipeline's stages have one each; leave it out")
    if chosen.reshard != "default":
        raise ValueError("--reshard: ranks gather parameters once a step, for all microbatches; leave it out")
    if chosen.search and (chosen.schedule or chosen.stages_per_rank > 1):
        raise ValueError("--schedule: is of one plan, and --search compares several; leave it out")
    if not chosen.model.endswith(".json"):
        raise ValueError(
            f"model: {chosen.model} is no config.json, and how to divide it over {dimensions} is not known; call "
            "graph_fsdp.planning.plan_pipeline with your stages and parallelize"
        )
    sizes = chosen.batch or BATCH, chosen.seq or LENGTH
    usual = 4 * dimensions.pp if dimensions.pp > 1 or chosen.search else 1
    microbatches, config = chosen.microbatches or usual, read_config(Path(chosen.model))
    if chosen.search:
        hardware = find_hardware(chosen.hardware)

        def divided(on: Dimensions) -> Any:
            model = CausalLM(config, on, *sizes)
            return model.stage, model.parallelize

        every = microbatches * dimensions.dp_replicate * dimensions.dp_shard
        shapes, options = neighbours(dimensions, hardware.island), {**options, "microbatches": every}
        return search_pipelines(divided, mesh_shapes=shapes, memory=chosen.memory, progress=_progress, **options)
    model = CausalLM(config, dimensions, *sizes)
    with Console(stderr=True).status("tracing the stages and running the passes"):
        return plan_pipeline(
            model.stage,
            mesh_shape=dimensions,
            parallelize=model.parallelize,
            schedule=chosen.schedule or "1F1B",
            microbatches=microbatches,
            stages_per_rank=chosen.stages_per_rank,
            **_memory_options(chosen),
            **options,
        )


def _memory_options(chosen: argparse.Namespace) -> dict[str, Any]:
    checkpointing = None if chosen.checkpointing == "none" else chosen.checkpointing
    return {"reshard_after_forward": _RESHARD[chosen.reshard], "activation_checkpointing": checkpointing}


def _progress(choices: Iterable[Choice], count: int) -> Iterable[Choice]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(choices, "plans", count, console=console, transient=True, disable=not console.is_terminal)


def _mesh(text: str) -> tuple[int, ...] | dict[str, int]:
    named = [part.partition("=") for part in text.replace(" ", "").split(",")]
    if "=" in text and all(size.isdigit() for _, _, size in named):
        names = [name for name, _, _ in named]
        if len(set(names)) == len(names):
            return {name: int(size) for name, _, size in named}
    sizes = text.lower().split("x")
    if len(sizes) > 2 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mesh: give a number of ranks, or REPLICASxSHARDS such as 64x8, or names and sizes such as "
            "dp_shard=8,tp=8, each name once"
        )
    return tuple(map(int, sizes))


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count: give a whole number, 1 or more")
    return int(text)
