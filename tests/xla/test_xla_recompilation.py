"""What is compiled, how often and why: captures by Dynamo, and compilations by XLA of a graph that is captured."""

from __future__ import annotations

import pytest
from models import MLP
from xla_compare import BOUND, mesh, vectors
from xla_launch import DEVICES, run_xla


def replayed_from_a_small_cache(sharding: str) -> tuple[list[float], list[list[str]], str]:
    """Differences of outputs to the CPU's, causes by graph and the report, of three steps."""
    import copy

    import torch_xla

    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    model = MLP(depth=1)
    reference = copy.deepcopy(model)
    graph_fsdp.compile(model, axes, backend="xla", sharding=sharding)
    differences = []
    for step in range(3):
        x, _ = vectors(step)
        y = model(shard_batch(x, axes))
        differences.append((y.detach().cpu() - reference(x).detach()).abs().max().item())
        y.square().sum().backward()
        torch_xla.sync()
    report = graph_fsdp.inspect(model)
    causes = [[c.cause for c in view.xla_compilations] for view in (report.forward, report.backward)]
    return differences, causes, str(report)


@pytest.mark.parametrize("sharding", ["manual", "auto"])
def test_a_program_that_torch_xla_has_dropped_is_compiled_again(sharding: str) -> None:
    """A long training with many shapes would come to it: programs of all graphs share one cache."""
    from graph_fsdp.runtime.xla.program import DROPPED, FIRST_RUN

    env = {"XLA_COMPILATION_CACHE_SIZE": "1"}
    differences, causes, report = run_xla(replayed_from_a_small_cache, sharding, env=env)
    assert max(differences) < BOUND
    assert causes == [[FIRST_RUN, DROPPED, DROPPED]] * 2
    assert report.count(f"compiled by XLA 3x: {FIRST_RUN} (") == 2
    assert report.count(DROPPED) == 4


def compiled_once() -> tuple[list[list[str]], str]:
    import torch_xla

    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    model = graph_fsdp.compile(MLP(depth=1), axes, backend="xla")
    for step in range(3):
        x, _ = vectors(step)
        model(shard_batch(x, axes)).sum().backward()
        torch_xla.sync()
    report = graph_fsdp.inspect(model)
    report.forward.hlo()
    return [[c.cause for c in view.xla_compilations] for view in (report.forward, report.backward)], str(report)


def test_a_program_is_compiled_once_and_for_its_text() -> None:
    from graph_fsdp.runtime.xla.program import FIRST_RUN, FOR_ITS_TEXT

    causes, report = run_xla(compiled_once)
    assert causes == [[FIRST_RUN, FOR_ITS_TEXT], [FIRST_RUN]]
    assert "compiled by XLA 2x: " in report and "compiled by XLA 1x: " in report


def captured_again(sharding: str) -> list[tuple[str, str]]:
    """Kinds and texts of the causes: another size of batch, evaluation, and, of the local view, rows that all have."""
    import warnings

    import torch

    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    model = graph_fsdp.compile(MLP(depth=1), axes, backend="xla", sharding=sharding)
    x, _ = vectors(0)
    for rows in (x, x, torch.cat([x, x]), x):
        model(shard_batch(rows, axes))
    with torch.no_grad():
        model(shard_batch(x, axes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x[:2].to("xla"))
    return [(captured.cause.kind, str(captured.cause)) for captured in graph_fsdp.inspect(model).captures]


@pytest.mark.parametrize("sharding", ["manual", "auto"])
def test_a_graph_that_is_captured_again_says_why(sharding: str) -> None:
    first, larger, evaluation, whole = run_xla(captured_again, sharding)
    assert first == ("first", "first call")
    rows = (2, 4) if sharding == "manual" else (8, 16)  # of one device, or of all
    assert larger[0] == "guard" and f"size mismatch at index 0. expected {rows[0]}, actual {rows[1]}" in larger[1]
    assert "x is float32[16, 16] now" in larger[1], "the input as the user gave it"
    assert evaluation[0] == "guard" and "grad_mode" in evaluation[1], evaluation
    if sharding == "manual":
        assert whole == ("inputs", "inputs are sharded over the devices in another way")
    else:
        assert whole[0] == "guard" and "x is float32[2, 16] now" in whole[1], whole
