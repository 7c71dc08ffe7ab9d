"""Random cases. What a strategy makes is valid: what the library refuses, it does not make, or knows by its error."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from hypothesis import strategies as st
from lasting_ranks import MESHES
from random_cases import Case, LayerCase, MeshCase, MeshKind, ModelCase, OptionsCase
from random_hooks import OF_BACKWARD, OF_MODULES
from random_layers import EXTENDED, LAYERS, NOT_CAST, OVER_ROWS, WRITE_BUFFERS
from random_models import OF_PARAMETERS

NUMBERS = st.integers(0, 20)
OUTPUTS = (
    *("x", "again", "view", "hidden", "mean", "bias", "weight_view", "penalty", "detached", "input", "none", "number"),
)
# What XLA and Inductor would compile is not among them: regions="whole" takes Inductor.
COMPILE: dict[str, st.SearchStrategy[Any]] = {
    "reshard_after_forward": st.sampled_from([True, False, 1, 2, 3, 4, "auto"]),
    "mp": st.sampled_from(
        [
            {"param_dtype": "float32"},
            {"param_dtype": "bfloat16"},
            {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
            {"reduce_dtype": "float32"},
            {"param_dtype": "float32", "reduce_dtype": "float64", "output_dtype": "float64"},
            {"output_dtype": "float32"},
        ]
    ),
    "mp_blocks": st.sampled_from(
        [
            {"param_dtype": "bfloat16", "output_dtype": "float64"},
            {"param_dtype": "float32", "reduce_dtype": "float64", "output_dtype": "float64"},
        ]
    ),
    "activation_checkpointing": st.sampled_from(
        ["unit", "selective", "offload", "unit, offload", "selective, offload", "mm", 0.0, 0.3, 1.0]
    ),
    "auto_wrap_policy": st.sampled_from(["block", "linear", "block and linear", "size", "model"]),
    "offload": st.booleans(),  # pinned or not
    "columns": st.just(True),
    "dynamic": st.booleans(),
    "sync_module_states": st.just(True),
    "values": st.sampled_from(["checkpoint", "param_init_fn", "first rank"]),  # of a model on the meta device
    "own_mesh": st.none(),  # another one of as many ranks
}
PIPELINE: dict[str, st.SearchStrategy[Any]] = {
    "bucket": st.sampled_from(["none", "auto", 8, 100, 400, 1000, 5000]),
    "prefetch": st.sampled_from([0, 1, 2, 5, None, "pre", "post"]),
    "forward_prefetch": st.sampled_from([0, 1, 3, "auto"]),
    "reductions_in_flight": st.sampled_from([1, 2, 5]),
    "budget": st.sampled_from([500, 1000, 2000, 4000, 100_000]),
    "messages": st.just("one"),
    "delay_wgrad": st.sampled_from([0, 1, 2, 5]),
    "hardware": st.sampled_from(["h100", "cheap messages"]),
}

WHEN = ("before", "after", "step")


def _few(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, min_size=1, max_size=3).map(tuple)


PROGRAM: dict[str, st.SearchStrategy[Any]] = {
    "divide": _few(st.sampled_from([1.0, 2.0, 3.0])),
    "summed": _few(st.booleans()),
    "hook": _few(st.sampled_from([0.5, 1.0])),
    "in_flight": st.sampled_from([1, 2, 5]),
    "custom": st.just(True),
    "keeps": _few(st.booleans()),
    "stays_whole": st.just(True),
    "replicas_late": st.just(True),
    "forward_prefetch": _few(_few(NUMBERS)),
    "backward_prefetch": _few(_few(NUMBERS)),
    "unshard": _few(st.tuples(NUMBERS, st.booleans())),
    "reshard": _few(NUMBERS),
    "clip": st.sampled_from([0.01, 1.0]),
    "whole": st.just(0.9),
    "reload": st.just(True),
    "frozen_later": _few(NUMBERS),
    "grads_stay": st.just(True),
    "module_hooks": _few(st.tuples(st.sampled_from(sorted(OF_MODULES)), NUMBERS, st.sampled_from(WHEN))),
    "gradient_hooks": _few(st.tuples(st.sampled_from(["before", "after", "other"]), NUMBERS, st.just(0.5))),
    "manual": st.booleans(),
    "apart": st.just(True),
    "optimizer": st.sampled_from(["slices", "in_backward", 1, 2]),
}
HOOKS = {"module_hooks", "gradient_hooks"}
REDUCED = {"divide", "summed", "hook", "in_flight", "apart"}
GATHERED = {"custom", "apart", "keeps", "stays_whole", "forward_prefetch", "backward_prefetch"}
WHOLE = {"stays_whole", "unshard", "whole"}

ALONE = MeshCase("none", 1)
layers = st.builds(LayerCase, st.sampled_from(sorted(LAYERS)), st.integers(1, 7))


@st.composite
def models(draw: st.DrawFn, *, cast: bool, tied: bool, extended: bool) -> ModelCase:
    """``cast``: parameters are, and neither BatchNorm's buffers nor ignored parameters. ``tied``: some may be.
    ``extended``: some may be tensor extensions."""
    out = {*(NOT_CAST if cast else ()), *(() if extended else EXTENDED)}
    kinds = layers.filter(lambda layer: layer.kind not in out)
    if draw(st.booleans()):  # equal blocks, as most models have
        block = tuple(draw(st.lists(kinds, min_size=1, max_size=2)))
        blocks: tuple[tuple[LayerCase, ...], ...] = (block,) * draw(st.integers(1, 3))
    else:
        blocks = tuple(map(tuple, draw(st.lists(st.lists(kinds, min_size=1, max_size=2), min_size=1, max_size=2))))
    indices = st.integers(0, len(blocks) - 1)
    in_order = tuple(range(len(blocks)))
    registered = draw(st.just(in_order) | st.lists(indices, min_size=1, max_size=3).map(tuple))
    calls = draw(st.just(tuple(range(len(registered)))) | st.lists(st.integers(0, 4), max_size=3).map(tuple))
    used = [registered[call % len(registered)] for call in calls]
    if any(used.count(i) > 1 and any(layer.kind == "counter" for layer in blocks[i]) for i in used):
        # Plain PyTorch refuses that: the second use writes to what the first saved for backward.
        registered, calls = in_order, in_order
    # What a checkpoint computes again, plain PyTorch writes again. Recurrent modules set attributes in some of them.
    changes = any(layer.kind in {*WRITE_BUFFERS, "sequence"} for block in blocks for layer in block)
    outputs = draw(st.just(("x",)) | st.lists(st.sampled_from(OUTPUTS), min_size=1, max_size=4, unique=True).map(tuple))
    few = st.just(()) | st.lists(NUMBERS, min_size=1, max_size=3).map(tuple)
    tokens = draw(st.booleans())
    return ModelCase(
        width=draw(st.integers(1, 6).filter(lambda n: n > 1 or all(x.kind != "in_place" for b in blocks for x in b))),
        tokens=tokens,
        blocks=blocks,
        registered=registered,
        calls=calls,
        residual=draw(st.booleans()),
        ties=draw(few) if tied else (),
        frozen=draw(few),
        ignored=() if cast else draw(st.just(()) | st.tuples(NUMBERS)),
        checkpointed=() if changes else draw(st.just(()) | st.lists(st.integers(0, 2), max_size=2).map(tuple)),
        container=draw(st.sampled_from(["tensor", "tuple", "dict", "nested", "dataclass"])),
        outputs=outputs,
        used=draw(st.just((0,)) | st.lists(NUMBERS, max_size=4).map(tuple)),
        writes_input=not tokens and draw(st.integers(0, 5)) == 5,
        graph_break=draw(st.integers(0, 5)) == 5,
    )


@st.composite
def options(draw: st.DrawFn, mesh: MeshCase) -> OptionsCase:
    chosen = draw(st.lists(st.sampled_from(sorted(COMPILE)), max_size=3, unique=True))
    compile = {name: draw(COMPILE[name]) for name in chosen}
    chosen = draw(st.lists(st.sampled_from(sorted(PIPELINE)), max_size=2, unique=True))
    pipeline = {name: draw(PIPELINE[name]) for name in chosen}
    reshard = compile.get("reshard_after_forward")
    if reshard == "auto":
        pipeline.setdefault("budget", 100_000)
    sharding = {"none": 1, "replicate": 1, "shard": mesh.ranks}.get(mesh.kind) or mesh.shape[1]
    if isinstance(reshard, int) and not isinstance(reshard, bool) and sharding % reshard:
        compile["reshard_after_forward"] = sharding
    others = [other for other in MESHES if other.ranks == mesh.ranks > 1 and other != mesh]
    if not others or {"columns", "reshard_after_forward"} & set(compile):
        compile.pop("own_mesh", None)
    elif "own_mesh" in compile:
        compile["own_mesh"] = draw(st.sampled_from(others))
    if "mp" in compile:
        compile.pop("mp_blocks", None)
    if compile.get("values") == "first rank":  # which has no values for parameters with meshes of their own
        compile.pop("own_mesh", None)
    if "values" in compile:
        compile.pop("sync_module_states", None)
    whole = "columns" not in compile
    return OptionsCase(compile, pipeline, draw(programs(mesh, sharding, whole)))


@st.composite
def programs(draw: st.DrawFn, mesh: MeshCase, sharding: int, whole: bool) -> dict[str, Any]:
    """What a program does to a model on a mesh. ``sharding``: ranks that shard; ``whole``: parameters can be whole."""
    possible = set(PROGRAM)
    if mesh.ranks == 1:
        possible -= {*REDUCED, "custom"}
    if sharding == 1 < mesh.ranks:
        possible -= GATHERED
    if mesh.kind != "hybrid" or mesh.shape[0] == 1:
        possible -= {"replicas_late"}
    if mesh.kind == "none":
        possible -= {"optimizer"}
    if not whole:
        possible -= WHOLE
    chosen = draw(st.just([]) | st.lists(st.sampled_from(sorted(possible)), min_size=1, max_size=3, unique=True))
    given = {name: draw(PROGRAM[name]) for name in chosen}
    in_backward = given.get("optimizer") == "in_backward"
    if in_backward and (sharding == 1 or {"clip", "replicas_late", "manual"} & set(given)):
        given["optimizer"] = "slices"
    if isinstance(given.get("optimizer"), int) and not whole:
        given["optimizer"] = "slices"
    return given


def in_parts(options: OptionsCase, model: ModelCase) -> bool:
    """Whether a model can be compiled in parts: its own parameters are not what it returns, nor are options for it."""
    own = OF_PARAMETERS & set(model.outputs)
    of_model = {"mp", "mp_blocks", "own_mesh", "auto_wrap_policy", "values"} & set(options.compile)
    return not own and not of_model and "budget" not in options.pipeline


def _can_be_extended(options: OptionsCase) -> bool:
    """Whether a model may have tensor extensions."""
    reshard = options.compile.get("reshard_after_forward")
    parts = isinstance(reshard, int) and not isinstance(reshard, bool)
    return not parts and not {*WHOLE, "reshard", "reload"} & set(options.program) and "columns" not in options.compile


@st.composite
def cases(draw: st.DrawFn, ranks: int, kinds: Collection[MeshKind]) -> Case:
    """On a mesh of so many ranks that is of one of these kinds."""
    mesh = draw(st.sampled_from([mesh for mesh in (ALONE, *MESHES) if mesh.ranks == ranks and mesh.kind in kinds]))
    chosen = draw(options(mesh))
    cast = bool({"mp", "mp_blocks"} & set(chosen.compile))
    tied = not {"mp_blocks", "own_mesh"} & set(chosen.compile)
    model = draw(models(cast=cast, tied=tied, extended=_can_be_extended(chosen)))
    parts = draw(st.integers(0, 7)) == 7 and in_parts(chosen, model)
    if not model.graph_break and "module_hooks" in chosen.program:  # a graph has no full backward hooks but its own
        kept = tuple(hook for hook in chosen.program["module_hooks"] if hook[0] not in OF_BACKWARD or hook[1] == 0)
        chosen.program["module_hooks"] = kept
    if parts:
        hooks = {name: value for name, value in chosen.program.items() if name in HOOKS}
        chosen, model = OptionsCase(chosen.compile, chosen.pipeline, hooks), dataclasses.replace(model, ties=())
    in_backward = chosen.program.get("optimizer") == "in_backward"
    # Plain PyTorch refuses that, too: a second call writes to what the first one saved.
    again = not in_backward and all(layer.kind != "counter" for block in model.blocks for layer in block)
    over_rows = any(layer.kind in OVER_ROWS for block in model.blocks for layer in block)
    rows = st.integers(2 if over_rows else 1, 4)
    return Case(
        model,
        mesh,
        chosen,
        rows=draw(st.tuples(rows) | st.tuples(rows) | st.tuples(rows).map(lambda n: n * 2) | st.tuples(rows, rows)),
        skewed=ranks > 1 and draw(st.integers(0, 4)) == 4,
        microbatches=1 if in_backward else draw(st.sampled_from([1, 1, 1, 2])),
        calls=draw(st.sampled_from([1, 1, 1, 1, 1, 2])) if again else 1,
        parts=parts,
        no_sync=not in_backward and draw(st.integers(0, 3)) == 3,
        evaluate=draw(st.integers(0, 3)) == 3,
        input_grad=not model.writes_input and draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )
