"""One rank raises in ``graph_fsdp.compile``, where the others wait for it: they learn of it in seconds."""

from __future__ import annotations

import torch
from launch import run_ranks
from models import MLP
from struck import caught, rank, rounds, step, warm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp
from graph_fsdp import MetaDeviceError, RankFailure, compat
from graph_fsdp.mesh import DataParallelMesh
from graph_fsdp.runtime.ranks import failure


def told(error: BaseException, words: str) -> None:
    assert isinstance(error, RankFailure), repr(error)
    assert words in str(error) and "start all ranks again" in str(error)


def one_raises(words: str, mesh: bool = False) -> None:
    """Rank 1, because of an option, and does something else then."""
    failure.RETRY_SECONDS, model = 0.5, MLP()
    shape = init_device_mesh("cpu", (2,)) if mesh else None
    try:
        if rank() == 1:
            error = caught(lambda: graph_fsdp.compile(model, shape, backend="eager", fullgraph="no"))
            assert type(error) is TypeError
            compat.default_store().wait(["told"])
        else:
            error = caught(lambda: warm(graph_fsdp.compile(model, shape, backend="eager")))
            compat.default_store().set("told", "")
            told(error, words)
    finally:
        failure.RETRY_SECONDS = 60.0


def one_rank_raises_before_it_looks_at_the_mesh() -> None:
    one_raises("rank 1 raised TypeError: fullgraph must be True or False, got 'no' in graph_fsdp.compile", mesh=True)


def one_rank_raises_before_there_is_a_mesh() -> None:
    one_raises("rank 1 raised TypeError: fullgraph must be True or False, got 'no' in graph_fsdp.compile")


def one_rank_raises_and_comes_back() -> None:
    model = MLP()
    if rank() == 1:
        caught(lambda: graph_fsdp.compile(model, backend="eager", fullgraph="no"))
    step(warm(graph_fsdp.compile(model, backend="eager")))


def one_rank_raises_while_values_are_sent() -> None:
    """In the middle of the collectives of ``sync_module_states``."""
    model, scatter, calls = MLP(), DataParallelMesh.scatter, []

    def counted(*args: object) -> None:
        calls.append(1)
        if rank() == 1 and len(calls) == 3:
            raise OSError("no memory")
        scatter(*args)

    DataParallelMesh.scatter = counted
    try:
        error = caught(lambda: graph_fsdp.compile(model, backend="eager", sync_module_states=True))
    finally:
        DataParallelMesh.scatter = scatter
    if rank() == 1:
        assert type(error) is OSError
        compat.default_store().wait(["told"])
    else:
        compat.default_store().set("told", "")
        told(error, "rank 1 raised OSError: no memory in the initial values of a MLP")


def all_ranks_raise_in_an_initialisation() -> None:
    """They are in step, and go on."""

    class Broken(nn.Linear):
        raises = True

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if Broken.raises and not self.weight.is_meta:
                raise ValueError("not yet")

    with torch.device("meta"):
        model = nn.Sequential(Broken(16, 4))
    assert type(caught(lambda: graph_fsdp.compile(model, backend="eager"))) is MetaDeviceError
    Broken.raises = False
    step(warm(graph_fsdp.compile(model, backend="eager")))


# A rank that did not come to where values are agreed on has counted one model less, as after every RankFailure that
# only new processes mend: these come last.
ALONE = (
    one_rank_raises_and_comes_back,
    all_ranks_raise_in_an_initialisation,
    one_rank_raises_while_values_are_sent,
    one_rank_raises_before_it_looks_at_the_mesh,
    one_rank_raises_before_there_is_a_mesh,
)


def raise_in_compile() -> None:
    """On a rank."""
    torch.set_num_threads(1)
    for function in rounds(*ALONE):
        function()


def test_a_rank_that_raises_in_compile() -> None:
    run_ranks(raise_in_compile, 2, timeout=120)
