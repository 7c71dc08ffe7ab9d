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
