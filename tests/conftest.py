"""Fixtures for all tests. Each test starts from the same seed and without compiled code of other tests."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

FAKE_WORLD_SIZE = 8

# Those of XLA's CPU client run where torch_xla is installed, which is the environment of `make test-xla`.
XLA_TESTS = Path(__file__).parent / "xla"
if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["xla/test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(XLA_TESTS):
            item.add_marker(pytest.mark.xla)


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as on the ranks: kernels split their sums by the number of threads
    yield
    torch._dynamo.reset()


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
