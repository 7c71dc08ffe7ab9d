"""PyTorch's own tests of FSDP2, with one call of ``graph_fsdp.compile`` in the place of their calls of ``fully_shard``.

    python benchmarks/fsdp2_tests.py …/test/distributed/_composable/fsdp/test_fully_shard_training.py [more files]
    python benchmarks/fsdp2_tests.py FILE --only shared --only accumulation    tests with one of these in their names

The files are those of a checkout of PyTorch, best of the release that is installed; they are run as they are. Each
test runs on two processes of the CPU (gloo), or one, with torch's ``fully_shard``, and if it passes so with ours,
operator by operator (``third_party/fully_shard.py``). A test that passes with torch's and fails with ours must be one
of ``OF_FSDP2``, which says why it can hold for FSDP2 alone; else this exits with 1. With ``--save`` the results replace
those of the same files in ``results/fsdp2_tests.json``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import unittest
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from harness import RESULTS
from tables import Table
from third_party.forks import Results, on_ranks

NAME, RANKS = "fsdp2_tests", 2
PASSED, SKIPPED = "passed", "skipped"
# Test → why it can hold for FSDP2 alone.
_STATE, _COUNTS = "reads or patches FSDP2's own state", "counts collectives, of which a bucket has several on gloo"
OF_FSDP2 = {
    "test_modules_to_run_forward_empty_for_single_module": _STATE,
    "test_partial_group_reshard_toggle": _STATE,
    "test_size1_reduceop": _STATE,
    "test_fully_shard_backward_prefetch": _STATE,
    "test_fully_shard_multi_module_backward_prefetch": _STATE,
    "test_fully_shard_multi_module_unused_module": _STATE,
    "test_set_modules_to_forward_prefetch": _STATE,
    "test_set_modules_to_backward_prefetch": _STATE,
    "test_set_modules_to_backward_prefetch_inside_ac": _STATE,
    "test_share_comm_context": "shards parts of a model and not the model",
    "test_fully_shard_communication_count": _COUNTS,
    "test_manual_reshard_with_reshard_after_forward_false": _COUNTS,
    "test_set_reshard_after_forward": _COUNTS,
    "test_gradient_accumulation": "counts gathers: a weight that backward does not need is not gathered for it",
    "test_param_registration_after_forward": "`parameters()` of a model that keeps them gathered are the shards",
    "test_shard_placement_fn_contiguous_params_grads": "a hook asserts in Python: an error says so",
    "test_shared_params_separate_fsdp_groups_error": "units may share parameters",
    "test_reduce_scatter_max_input_buffers_resolves_to_max": "sets it for units: an error says so",
    "test_exception_when_used_together_with_comm_hooks": "another class of the same error",
}


def as_on_devices() -> None:
    """Have tests run on processes of the CPU that ask for as many devices, and for threads in the place of ranks."""
    import torch
    from torch.testing._internal import common_distributed, common_fsdp

    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test  # type: ignore[assignment]
    common_fsdp.FSDPTestMultiThread = common_fsdp.FSDPTest  # type: ignore[assignment,misc]
    torch.cpu.device_count = lambda: RANKS
    torch.cpu._sleep = lambda cycles: None  # type: ignore[attr-defined]


def load(file: Path) -> ModuleType:
    import torch

    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file} is no file of Python")
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # what tests have in common
    with mock.patch.object(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu")):
        spec.loader.exec_module(module)
    return module


def tests(module: ModuleType, only: Sequence[str]) -> Iterator[tuple[type[Any], str]]:
    from torch.testing._internal.common_fsdp import FSDPTest

    for case in vars(module).values():
        if isinstance(case, type) and issubclass(case, FSDPTest) and case.__module__ == module.__name__:
            for name in unittest.defaultTestLoader.getTestCaseNames(case):
                if not only or any(text in name for text in only):
                    yield case, name


def run(module: ModuleType, case: type[Any], name: str, ours: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a test on this rank, in a process of its own."""
    import torch
    import torch.distributed as dist
    from third_party.fully_shard import FullyShard

    if ours:
        vars(module)["fully_shard"] = FullyShard()
    if hasattr(module, "get_cycles_per_ms"):
        vars(module)["get_cycles_per_ms"] = lambda *_: 1.0
    case.world_size = property(lambda _: dist.get_world_size())
    test = case(name)
    test.rank = dist.get_rank()
    torch.manual_seed(0)
    try:
        getattr(test, name)()
    except (unittest.SkipTest, SystemExit) as reason:  # torch's tests end their processes
        yield name, {"result": f"{SKIPPED}: {reason}"}
    else:
        yield name, {"result": PASSED}


def result_of(found: Results, name: str, folder: Path) -> str:
    """A line; of an error that torch's tests have raised, what they compared. ``folder``: of the tests."""
    said = str(found.get("error", found.get(name, {"result": "the process ended"}))["result"])
    return " ".join(said.split("To execute this test")[0].replace(f"{folder}/", "").split())[:300]


def run_test(module: ModuleType, case: type[Any], name: str, seconds: float) -> dict[str, str]:
    ranks = min(RANKS, case(name).world_size)

    def one(ours: bool) -> str:
        found = on_ranks(partial(run, module, case, name, ours), ranks, seconds)
        if trace := found.get("error", {}).get("trace"):
            print(trace, file=sys.stderr)
        return result_of(found, name, Path(str(module.__file__)).parent)

    row = {"file": module.__name__, "test": f"{case.__name__}.{name}", "fsdp2": one(ours=False)}
    if row["fsdp2"] == PASSED:
        row["ours"] = one(ours=True)
    return row


def is_unexpected(row: dict[str, str]) -> bool:
    return row.get("ours", PASSED) != PASSED and row["test"].partition(".")[2] not in OF_FSDP2


def table(result: dict[str, Any]) -> Table:
    rows = []
    for file in dict.fromkeys(row["file"] for row in result["rows"]):
        tried = [row for row in result["rows"] if row["file"] == file and row["fsdp2"] == PASSED]
        others: dict[str, list[str]] = {}
        for row in tried:
            if row["ours"] != PASSED:
                name = row["test"].partition(".")[2]
                others.setdefault(OF_FSDP2.get(name, row["ours"]), []).append(f"`{name}`")
        passed = len(tried) - sum(map(len, others.values()))
        said = "; ".join(f"{why}: {', '.join(names)}" for why, names in others.items())
        rows.append([f"`{file}.py`", str(len(tried)), str(passed), said])
    return Table(["file", "pass with FSDP2 on two CPU ranks", "of these with graph_fsdp", "the others"], rows)


def record(rows: list[dict[str, str]], path: Path) -> None:
    import torch

    old = json.loads(path.read_text())["rows"] if path.exists() else []
    files = {row["file"] for row in rows}
    about = f"torch {torch.__version__}, and files of PyTorch from 2026, newer than it"
    written = {
        "benchmark": NAME,
        "command": "python benchmarks/fsdp2_tests.py FILES",
        "about": about,
        "rows": [*(row for row in old if row["file"] not in files), *rows],
    }
    path.write_text(json.dumps(written, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", action="append", default=[], help="a part of tests' names")
    parser.add_argument("--seconds", type=float, default=300.0, help="that one test has")
    parser.add_argument("--save", action="store_true", help=f"write results/{NAME}.json")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    importlib.import_module("third_party.fully_shard")  # before processes are forked
    as_on_devices()
    rows: list[dict[str, str]] = []
    for file in options.files:
        module = load(file)
        for case, name in tests(module, options.only):
            rows.append(run_test(module, case, name, options.seconds))
            print(json.dumps(rows[-1]), flush=True)
    if options.save:
        record(rows, RESULTS / f"{NAME}.json")
    return int(any(map(is_unexpected, rows)))


if __name__ == "__main__":
    sys.exit(main())
