"""``backend="inductor"`` compiles each region, or each graph whole, with Inductor (CUDA, XPU, CPU).

The ranks of a host divide the work by lock files, and find each other's results in Inductor's cache on disk
(docs/decisions/tracing.md, "Division of compilation among ranks").

What a cache holds is run. Inductor's default folder has a name that everyone can guess, where every user of a host may
write: whoever makes it first decides what the others run. So folders and files are made for the user alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir.canonical_form import digest
from graph_fsdp.runtime.backends.base import Backend
from graph_fsdp.runtime.regions.regions import Compiled, Region, RegionKey

Result = TypeVar("Result")

_FOLDER, _FILE = 0o700, 0o600
_POLL_SECONDS = 0.01
PATIENCE_SECONDS = 300.0  # for a task that another rank has begun; longer than any region compiles


class InductorBackend(Backend):
    name = "inductor"
    compiles_whole = True
    captures_regions = True

    def compile_region(self, region: Region, kind: str) -> Compiled:
        return compat.inductor_compile(region.module, kind)

    def compile_regions(self, regions: Mapping[RegionKey, Region]) -> dict[RegionKey, Compiled]:
        """Compile a part of the regions, and find in the cache what the host's other ranks compile meanwhile."""
        directory, keys = _cache_directory(), _dissimilar_first(regions)
        tasks = [(key.digest, partial(self.compile_region, regions[key], key.kind)) for key in keys]
        with compat.built_together():
            if directory is None:
                return super().compile_regions(regions)
            return dict(zip(keys, divide(tasks, directory / "graph_fsdp"), strict=True))

    def programs_folder(self) -> Path | None:
        directory = _cache_directory()
        return None if directory is None else directory / "graph_fsdp" / "programs"

    def compile_whole(self, module: fx.GraphModule, kind: str) -> Compiled:
        """Compile a graph, or find it in the cache where another rank of the host has compiled its like. On an
        accelerator each rank compiles, as all of a graph may not be fit for the devices of other ranks."""
        directory, task = _cache_directory(), partial(compat.inductor_compile, module, kind, keep_order=True)
        with compat.built_together():
            if directory is None:
                return task()
            # Equal on ranks whose values have the same shapes and devices; others need not wait for each other.
            called = [f"{node.target} {node.meta.get('val')}" for node in module.graph.nodes]
            (compiled,) = divide([(digest([kind, *called]), task)], directory / "graph_fsdp")
            return compiled

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        return compat.inductor_decompositions()

    def prepare(self, module: fx.GraphModule) -> fx.GraphModule:
        return compat.inductor_joint_passes(module)


def _cache_directory() -> Path | None:
    """Return ``compat``'s directory, once nobody else can put anything into it."""
    default = compat.default_inductor_cache_directory()
    if default is not None:
        own_folder(default)
    return compat.inductor_cache_directory()


def _dissimilar_first(regions: Mapping[RegionKey, Region]) -> list[RegionKey]:
    """Order the regions as ranks look for work: large ones first, so that all end together, and the largest of each
    kind before the second largest. Regions that are alike have most kernels in common, and ranks that compile them at
    the same time wait for each other's."""
    by_size = sorted(regions, key=lambda key: len(regions[key].nodes), reverse=True)
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)  # of a kind's regions, the largest first
    return sorted(by_size, key=lambda key: next(numbers[key.kind]))


def divide(
    tasks: Sequence[tuple[str, Callable[[], Result]]], directory: Path, patience: float = PATIENCE_SECONDS
) -> list[Result]:
    """Run all tasks, each a (name, function), and return their results in the order given. While another process of
    this host runs a task of the same name and ``directory``, others are run first; after ``patience`` seconds without
    any left, it is run all the same. Raises what a function raises."""
    results: dict[int, Result] = {}
    deadline = time.monotonic() + patience
    while len(results) < len(tasks):
        before = len(results)
        for index, (name, run) in enumerate(tasks):
            with contextlib.ExitStack() as stack:
                lock = directory / f"{name}.lock"
                if index not in results and (_acquire(lock, stack) or time.monotonic() > deadline):
                    results[index] = run()
        if len(results) > before:
            deadline = time.monotonic() + patience
        elif len(results) < len(tasks):
            time.sleep(_POLL_SECONDS)
    return [results[index] for index in range(len(tasks))]


def _acquire(path: Path, stack: contextlib.ExitStack) -> bool:
    """Take the lock for as long as ``stack`` lives. False while another process has it."""
    try:
        path.parent.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
        stack.enter_context(FileLock(path, mode=_FILE).acquire(timeout=0))
    except (OSError, NotImplementedError) as error:  # an unwritable folder, a file system without locks
        return not isinstance(error, Timeout)
    return True


def own_folder(path: Path) -> None:
    """Make a folder for the user alone, or close the user's own to others. Raises PermissionError for another's."""
    path.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
    status = path.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, and compiled code in it would be run; name a folder of your own "
            "in the environment variable TORCHINDUCTOR_CACHE_DIR"
        )
    if stat.S_IMODE(status.st_mode) & ~_FOLDER:
        path.chmod(_FOLDER)
