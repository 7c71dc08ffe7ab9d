"""Sharding models that are on the meta device, or have values: bytes as torch allocates them, and of the process."""

from __future__ import annotations

import resource
import threading

import torch
from allocations import SLACK, nbytes, peak_of
from conftest import FAKE_WORLD_SIZE
from launch import run_ranks
from models import MLP
from test_meta import initialised, on_meta
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp.units import find_units


def test_no_more_than_one_unit_is_there_above_the_shards(fake_group: None) -> None:
    model = on_meta(lambda: MLP(depth=6, width=256))
    unit, shards = nbytes(model.blocks[0]), nbytes(model) // FAKE_WORLD_SIZE
    peak = peak_of(lambda: initialised(model))
    assert unit <= peak - shards <= unit + SLACK
    assert nbytes(model) > 3 * (unit + shards)


def test_of_a_root_unit_one_module_is_there_at_a_time(fake_group: None) -> None:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    (unit,) = find_units(model)
    assert unit.modules[unit.name] is model
    peak = peak_of(lambda: initialised(model))
    assert nbytes(model[0]) <= peak - nbytes(model) // FAKE_WORLD_SIZE <= nbytes(model[0]) + SLACK


def test_tied_weights_are_not_there_twice(fake_group: None) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 64), nn.Linear(64, 4096, bias=False))
        model[2].weight = model[0].weight
        return model

    model = on_meta(make)
    peak = peak_of(lambda: initialised(model))
    assert peak <= nbytes(model[0]) + nbytes(model) // FAKE_WORLD_SIZE + SLACK


def test_of_a_model_with_values_nothing_is_there_above_the_shards(fake_group: None) -> None:
    """On a device that the model is not on, its placeholders would be whole for a moment."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    shards = nbytes(model) // FAKE_WORLD_SIZE
    peak = peak_of(lambda: graph_fsdp.compile(model, backend="eager"))
    assert shards <= peak <= shards + SLACK < shards + nbytes(model[0])


def resident() -> int:
    """The most bytes of memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def own_memory() -> int:
    """Bytes of memory that this process has to itself. Pages of libraries do not count: the system may take them away
    and read them again."""
    with open("/proc/self/statm") as statm:
        _, pages, shared, *_ = map(int, statm.read().split())
    return (pages - shared) * resource.getpagesize()


class MostOwnMemory:
    """The most of it within the block, looked at every two milliseconds."""

    def __enter__(self) -> MostOwnMemory:
        self.nbytes, self._ended = own_memory(), threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self.nbytes = max(self.nbytes, own_memory())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watch.join()


def shard_ten_billion_parameters() -> tuple[int, int, int, int]:
    """In a process of its own, as rank 0 of 1,024: parameters, bytes of shards, of the largest unit, and how much more
    memory than before them the process had at most."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    width, ranks = 5120, 1024

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Linear(width, 4 * width, bias=False)
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(32_000, width)
            self.blocks = nn.ModuleList(Block() for _ in range(31))
            self.head = nn.Linear(width, 32_000, bias=False)

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model = on_meta(Model).bfloat16()
    before = own_memory()
    # Random numbers would take minutes. Every byte of every parameter is written all the same.
    fill_all = lambda module: [p.fill_(0.5) for p in module.parameters(recurse=False)]  # noqa: E731
    with MostOwnMemory() as most:
        graph_fsdp.compile(model, mesh, backend="eager", param_init_fn=fill_all)
    shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    assert all(shard.eq(0.5).all() for shard in shards)
    return (
        sum(p.numel() for p in model.parameters()),
        sum(shard.numel() * shard.element_size() for shard in shards),
        nbytes(model.blocks[0]),
        most.nbytes - before,
    )


def test_ten_billion_parameters_over_1024_ranks_take_the_memory_of_one_unit() -> None:
    large_pages = {"THP_MEM_ALLOC_ENABLE": "1"}  # 20 GB are written, and getting small pages for them would take longer
    ((parameters, shards, unit, grown),) = run_ranks(shard_ten_billion_parameters, 1, backend=None, env=large_pages)
    assert parameters > 10e9
    assert unit / 2 < grown < unit + shards + 50e6
    assert grown < parameters * 2 / 25
    print(f"{parameters / 1e9:.1f} billion parameters: {grown / 1e9:.2f} GB, {unit / 1e9:.2f} GB of it one unit")


def shard_a_model_with_values() -> tuple[int, int]:
    """In a process of its own: the model's bytes, and how far sharding raised the most memory that it has had."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24)))
    before = resident()
    graph_fsdp.compile(model, backend="eager")
    return nbytes(model), resident() - before


def test_a_model_with_values_is_given_back_while_it_is_sharded() -> None:
    """In one process the shards are as large as the model, which is there twice if it is given back at the end."""
    ((size, grown),) = run_ranks(shard_a_model_with_values, 1, backend=None)
    assert size > 400e6 and grown < size / 4
    print(f"a model of {size / 1e6:.0f} MB: {grown / 1e6:.0f} MB more")
