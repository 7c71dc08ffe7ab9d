"""Fixtures for all tests. Each test starts from the same seed and without compiled code of other tests, makes temporary
files in pytest's own folder, and leaves no process behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import collector  # noqa: F401
import marks
import pytest
import torch
import torch.distributed as dist
from facts import Failures
from guard import Guard
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.distributed import device_mesh
from tracing import trace_cheaply

from graph_fsdp import compat
from graph_fsdp.passes import pipeline
from graph_fsdp.runtime.backends import BACKENDS
from graph_fsdp.runtime.backends.inductor import own_folder

FAKE_WORLD_SIZE = 8

# In all that tests start. A rank that goes on calling one that was killed may reach a rank of another test, which got
# its port: gloo takes that for the connection that it waits for, and loses it when the caller ends.
os.environ["GLOO_DISABLE_CONNECTION_RETRIES"] = "1"

# As torch has them. torch_xla, which transformers imports where it is installed, changes them for its process.
DYNAMO = {name: getattr(torch._dynamo.config, name) for name in ("automatic_dynamic_shapes", "specialize_float")}

# Those of XLA's CPU client run where torch_xla is installed, which is the environment of `make test-xla`.
XLA_TESTS = Path(__file__).parent / "xla"
if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["xla/test_*.py"]


# `make test` gives a worker one file after the other, in this order. The last ones are to be short, so that the workers
# end at the same time; these are not, for the most part because they launch ranks.
LONG = (
    *("test_gpu_checks", "test_soak", "test_one_process", "test_models_compatibility", "test_late_and_early"),
    *("test_replica_groups", "test_held_memory", "test_expert_parallelism", "test_whole_order"),
    *("test_virtual_training", "test_examples", "test_random_graph_breaks", "test_ports", "test_restart_time"),
    *("test_three_and_four_ranks", "test_benchmarks", "test_tensor_parallel", "test_two_ranks", "test_agreement"),
    *("test_mesh_ranks", "test_models", "test_elastic", "test_lightning", "test_repeat", "test_whole_ranks"),
    *("test_option_numbers", "test_shared_compilation", "test_resume_ranks", "test_virtual_inductor"),
    *("test_cuda_graphs_ranks", "test_one_rank", "test_gradient_sync_ranks", "test_calls_ranks", "test_docs_index"),
    *("test_checkpoint_faults", "test_accelerate_launch", "test_trainer", "test_minilm", "test_lost_ranks"),
    *("test_copies", "test_train", "test_unshard_ranks", "test_tensor_parallel_meshes", "test_published_program"),
    *("test_parameter_meshes", "test_quantized", "test_programs_shared", "test_gather_ahead", "test_dropless_experts"),
    *("test_memory_checkpoints", "test_launch", "test_pipelining", "test_programs", "test_virtual_cluster"),
    *("test_branches", "test_watch_virtual", "test_frozen", "test_torchao_gathers", "test_symmetric_memory"),
    *("test_benchmarks_of_costs", "test_pieces_ranks", "test_docs_fsdp_in_300_lines", "test_docs_pages"),
    *("test_xla_training", "test_xla_replicas", "test_xla_corners", "test_xla_auto", "test_xla_models"),
    *("test_xla_checkpoint", "test_xla_docs", "test_xla_recompilation", "test_xla_peers", "test_xla_host_fallbacks"),
    "test_xla_operators",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the files, and the tests of each, in the random order that this number is the seed of"
    parser.addoption("--random-order-seed", type=int, metavar="NUMBER", help=text)


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("random_order_seed")
    return [] if seed is None else [f"random order: --random-order-seed={seed}"]


def pytest_collection_finish(session: pytest.Session) -> None:
    marks.ITEMS[:] = session.items


def pytest_sessionstart() -> None:
    trace_cheaply()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()  # see collector.py


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(XLA_TESTS):
            item.add_marker(pytest.mark.xla)
    seed = config.getoption("random_order_seed")
    if seed is not None:
        shuffle(items, seed)
        return
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Tests of a file stay together, as its fixtures are made once, and each worker finds the same order."""
    draw = random.Random(seed)
    files = sorted({item.path for item in items})
    draw.shuffle(files)
    draw.shuffle(items)
    places = {path: place for place, path in enumerate(files)}
    items.sort(key=lambda item: places[item.path])


GUARD = pytest.StashKey[Guard]()
ORPHAN_SECONDS = 60.0  # a process that was killed, or told to end, is gone a moment later


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform == "linux":
        config.stash[GUARD] = Guard()


def pytest_unconfigure() -> None:
    """pytest collects garbage once more when it ends, and xdist interrupts a worker that takes 5 seconds to end: what
    the tests have left alive, which is much, is not to be walked for that."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_orphans(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.session.exitstatus == pytest.ExitCode.INTERRUPTED:
        return  # by Ctrl-C, in the middle of a test: the guard ends what it had started
    guard = request.config.stash.get(GUARD, None)
    deadline = time.monotonic() + ORPHAN_SECONDS
    while guard is not None and (left := guard.orphans()):
        assert time.monotonic() < deadline, f"tests have left processes behind: {left}"
        time.sleep(0.1)


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In pytest's folder, also those of the processes that tests start. What compilers take ten seconds for is kept
    with Inductor's cache: precompiled headers, and devices that are not there."""
    with pytest.MonkeyPatch.context() as patch:
        cache = compat.default_inductor_cache_directory()
        if cache is not None:
            own_folder(cache)
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        patch.setenv("GRAPH_FSDP_PROGRAMS", "0")  # tests are of tracing and passes
        folder = tmp_path_factory.mktemp("temporary")
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        link_headers(kept)
        if "VIRTUAL_DEVICE_CACHE" not in os.environ:
            patch.setenv("VIRTUAL_DEVICE_CACHE", str(kept / "virtual_device"))
        yield


def link_headers(cache: Path) -> None:
    """Where Inductor looks for precompiled headers, in the folder of temporary files, are those of its cache."""
    kept, default = cache / "precompiled_headers", Path(default_cache_dir())
    own_folder(kept)
    own_folder(default)
    (default / kept.name).symlink_to(kept)


@pytest.fixture(autouse=True)
def fresh_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as on the ranks: kernels split their sums by the number of threads
    backends = dict(BACKENDS)
    of_xla = request.node.get_closest_marker("xla") is not None
    with torch._dynamo.config.patch({} if of_xla else DYNAMO):
        yield
    torch._dynamo.reset()
    torch.nn.modules.module._global_buffer_registration_hooks.clear()  # an export that fails leaves one in torch 2.9
    assert backends == BACKENDS, "the test leaves a backend registered: messages of later tests would name it"


@pytest.fixture(scope="module")
def older_objects_frozen() -> Iterator[None]:
    """For tests that collect garbage again and again: walking what other tests of the process have left took most of
    their time. What such a test makes is all that it sees with ``gc.get_objects``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "frozen", pipeline.frozen)  # is kept from the first compilation that finds it so
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()


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
        if (kept := getattr(device_mesh, "_mesh_resources", None)) is not None:  # torch 2.9's: of groups that are gone
            getattr(kept, "root_to_flatten_mapping", {}).clear()


@pytest.fixture
def fake_group() -> Iterator[dist.ProcessGroup]:
    with fake_process_group() as group:
        yield group


@pytest.fixture(scope="module")
def fake_group_of_module() -> Iterator[dist.ProcessGroup]:
    with fake_process_group() as group:
        yield group


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> Failures:
    """What of the module's facts does not hold, on each of their ranks."""
    found: Failures = request.module.FACTS.launch()
    return found
