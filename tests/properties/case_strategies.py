"""Random cases. What a strategy makes is valid: what the library refuses, it does not make, or knows by its error."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hypothesis import strategies as st
from lasting_ranks import MESHES
from random_cases import Case, LayerCase, MeshCase, MeshKind, ModelCase, OptionsCase
from random_layers import LAYERS, OVER_ROWS, WRITE_BUFFERS

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
    "activation_checkpointing": st.sampled_from(["unit", "selective", "offload", "mm", 0.0, 0.3, 1.0]),
    "auto_wrap_policy": st.sampled_from(["block", "linear", "block and linear", "size", "model"]),
    "offload": st.just(True),
    "columns": st.just(True),
    "dynamic": st.booleans(),
}
PIPELINE: dict[str, st.SearchStrategy[Any]] = {
    "bucket": st.sampled_from(["none", "auto", 8, 100, 400, 1000, 5000]),
    "prefetch": st.sampled_from([0, 1, 2, 5, None, "pre", "post"]),
    "forward_prefetch": st.sampled_from([0, 1, 3, "auto"]),
    "reductions_in_flight": st.sampled_from([1, 2, 5]),
    "budget": st.sampled_from([500, 1000, 2000, 4000, 100_000]),
}

ALONE = MeshCase("none", 1)
layers = st.builds(LayerCase, st.sampled_from(sorted(LAYERS)), st.integers(1, 7))


@st.composite
def models(draw: st.DrawFn, *, cast: bool) -> ModelCase:
    """``cast``: parameters are, and neither BatchNorm's buffers nor ignored parameters."""
    kinds = layers.filter(lambda layer: layer.kind != "batch_norm") if cast else layers
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
    # What a checkpoint computes again, plain PyTorch writes again.
    changes = any(layer.kind in WRITE_BUFFERS for block in blocks for layer in block)
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
        ties=draw(few),
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
    return OptionsCase(compile, pipeline)


@st.composite
def cases(draw: st.DrawFn, ranks: int, kinds: Collection[MeshKind]) -> Case:
    """On a mesh of so many ranks that is of one of these kinds."""
    mesh = draw(st.sampled_from([mesh for mesh in (ALONE, *MESHES) if mesh.ranks == ranks and mesh.kind in kinds]))
    chosen = draw(options(mesh))
    model = draw(models(cast="mp" in chosen.compile))
    over_rows = any(layer.kind in OVER_ROWS for block in model.blocks for layer in block)
    rows = st.integers(2 if over_rows else 1, 4)
    return Case(
        model,
        mesh,
        chosen,
        rows=draw(st.tuples(rows) | st.tuples(rows) | st.tuples(rows).map(lambda n: n * 2) | st.tuples(rows, rows)),
        skewed=ranks > 1 and draw(st.integers(0, 4)) == 4,
        microbatches=draw(st.sampled_from([1, 1, 1, 2])),
        no_sync=draw(st.integers(0, 3)) == 3,
        evaluate=draw(st.integers(0, 3)) == 3,
        input_grad=not model.writes_input and draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )
