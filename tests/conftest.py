"""Fixtures for all tests. Each test starts from the same seed and without compiled code of other tests."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import GC_THRESHOLD

from graph_fsdp.runtime.backends import BACKENDS

FAKE_WORLD_SIZE = 8

# Those of XLA's CPU client run where torch_xla is installed, which is the environment of `make test-xla`.
XLA_TESTS = Path(__file__).parent / "xla"
if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["xla/test_*.py"]


# `make test` gives a worker one file after the other, in this order. The last ones are to be short, so that the workers
# end at the same time; these are not, for the most part because they launch ranks.
LONG = (
    *("test_three_and_four_ranks", "test_benchmarks", "test_examples", "test_two_ranks", "test_agreement"),
    *("test_mesh_ranks", "test_models", "test_elastic", "test_lightning", "test_resume_ranks", "test_whole_ranks"),
    *("test_option_numbers", "test_regions", "test_one_process", "test_tensor_parallel", "test_cuda_graphs_ranks"),
    *("test_one_rank", "test_gradient_sync_ranks", "test_calls_ranks", "test_docs_index", "test_checkpoint_faults"),
    *("test_accelerate", "test_trainer", "test_minilm", "test_lost_ranks", "test_copies", "test_repeat", "test_train"),
)


def pytest_sessionstart() -> None:
    gc.set_threshold(GC_THRESHOLD)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(XLA_TESTS):
            item.add_marker(pytest.mark.xla)
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as on the ranks: kernels split their sums by the number of threads
    backends = dict(BACKENDS)
    yield
    torch._dynamo.reset()
    assert backends == BACKENDS, "the test leaves a backend registered: messages of later tests would name it"


@contextlib.contextmanager
def fake_process_group() -> Iterator[dist.ProcessGroup]:
    """The default process group: rank 0 of 8 whose collectives do nothing, so one process has all of it."""
    # Importing the module registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FAKE_WORLD_SIZE)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.fixture
def fake_group() -> Iterator[dist.ProcessGroup]:
    with fake_process_group() as group:
        yield group


@pytest.fixture(scope="module")
def fake_group_of_module() -> Iterator[dist.ProcessGroup]:
    with fake_process_group() as group:
        yield group
