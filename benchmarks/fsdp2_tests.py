"""PyTorch's own tests of FSDP2, with one call of ``graph_fsdp.compile`` in the place of their calls of ``fully_shard``.

    python benchmarks/fsdp2_tests.py …/test/distributed/_composable/fsdp/test_fully_shard_training.py [more files]
    python benchmarks/fsdp2_tests.py FILE --only shared --only accumulation    tests with one of these in their names

The files are those of a checkout of PyTorch, best of the release that is installed; they are run as they are. Each
test that calls ``fully_shard`` runs on two processes of the CPU (gloo), or one, or, if it asks for them and does not
pass so, on four, with torch's ``fully_shard``, and if it passes with ours, operator by operator
(``third_party/fully_shard.py``). A test that passes with torch's and fails with ours must have a reason in
``OF_FSDP2``, why it can hold for FSDP2 alone; else this exits with 1. With ``--save`` the results replace those of the
same files in ``results/fsdp2_tests.json``.
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

NAME, RANKS = "fsdp2_tests", (2, 4)  # the second for tests that two are too few for
PASSED, SKIPPED, PARTS_ALONE = "passed", "skipped", "shards parts of a model and not the model"
# Test, or a part of what it raises → why it can hold for FSDP2 alone.
_STATE, _COUNTS = "reads or patches FSDP2's own state", "counts collectives, of which a bucket has several on gloo"
_OTHER_ERROR, _WORKS = "the same error, of another class or in other words", "FSDP2 refuses it, and here it works"
_META = "what is on the meta device `compile` gives values, or says what to pass"
OF_FSDP2 = {
    "'FullyShard' object has no attribute 'state'": _STATE,
    PARTS_ALONE: PARTS_ALONE,
    "tensors; what is sharded is one plain tensor": "parameters that wrap several tensors: an error says so",
    "is a TwoTensor that requires a gradient": "parameters that wrap several tensors: an error says so",
    "whose __tensor_unflatten__ takes": "a subclass that `torch.compile` cannot trace: an error says so",
    "test_modules_to_run_forward_empty_for_single_module": _STATE,
    "test_partial_group_reshard_toggle": _STATE,
    "test_size1_reduceop": _STATE,
    "test_fully_shard_backward_prefetch": _STATE,
    "test_fully_shard_multi_module_backward_prefetch": _STATE,
    "test_fully_shard_multi_module_unused_module": _STATE,
    "test_set_modules_to_forward_prefetch": _STATE,
    "test_set_modules_to_backward_prefetch": _STATE,
    "test_set_modules_to_backward_prefetch_inside_ac": _STATE,
    "test_train_mixed_requires_grad_per_group": _STATE,
    "test_fully_shard_communication_count": _COUNTS,
    "test_manual_reshard_with_reshard_after_forward_false": _COUNTS,
    "test_set_reshard_after_forward": _COUNTS,
    "test_gradient_accumulation": "counts gathers: a weight that backward does not need is not gathered for it",
    "test_param_registration_after_forward": "`parameters()` of a model that keeps them gathered are the shards",
    "test_shard_placement_fn_contiguous_params_grads": "a hook asserts in Python: an error says so",
    "test_shared_params_separate_fsdp_groups_error": _WORKS,
    "test_raise_scalar_parameter": _WORKS,
    "test_raise_noncontiguous_parameter": _WORKS,
    "test_2d_mesh_without_mesh_dim_names": _WORKS,
    "test_reduce_scatter_max_input_buffers_resolves_to_max": "sets it for units: an error says so",
    "test_exception_when_used_together_with_comm_hooks": _OTHER_ERROR,
    "test_fully_shard_deepcopy": _WORKS,
    "test_fully_shard_reapply": _OTHER_ERROR,
    "test_fully_shard_unsupported_module_cls": _OTHER_ERROR,
    "test_invalid_mesh_ndim": _OTHER_ERROR,
    "test_invalid_shard_dim": _OTHER_ERROR,
    "test_init_1d_uneven_shard_largest_dim": _OTHER_ERROR,
    "test_invalid_meta_device_init": _META,
    "test_rank0_broadcast_meta_device_init": _META,
    "test_reset_sharded_param_in_lazy_init": _META,
}


def as_on_devices() -> None:
    """Have tests run on processes of the CPU that ask for as many devices, and for threads in the place of ranks."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal import common_distributed, common_fsdp
    from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase

    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test  # type: ignore[assignment]
    common_fsdp.FSDPTestMultiThread = common_fsdp.FSDPTest  # type: ignore[assignment,misc]
    common_fsdp.DEVICE_COUNT = max(RANKS)
    torch.cpu.device_count = lambda: dist.get_world_size() if dist.is_initialized() else max(RANKS)
    torch.cpu._sleep = lambda cycles: None  # type: ignore[attr-defined]
    DTensorTestBase.init_pg = DTensorTestBase.destroy_pg = lambda *_: None  # type: ignore[assignment,method-assign]
    init = DistributedDataParallel.__init__
    DistributedDataParallel.__init__ = (  # type: ignore[method-assign]
        lambda self, module, device_ids=None, **options: init(self, module, **options)
    )


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
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    for case in vars(module).values():
        if isinstance(case, type) and issubclass(case, MultiProcessTestCase) and case.__module__ == module.__name__:
            for name in unittest.defaultTestLoader.getTestCaseNames(case):
                if not only or any(text in name for text in only):
                    yield case, name


def run(module: ModuleType, case: type[Any], name: str, ours: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a test on this rank, in a process of its own."""
    import torch
    import torch.distributed as dist
    from third_party.fully_shard import FullyShard
    from torch.testing._internal import common_fsdp

    calls, compiled = mock.Mock(wraps=module.fully_shard), FullyShard()
    calls.__name__ = compiled.__name__ = "fully_shard"
    for names in map(vars, (module, torch.distributed.fsdp, common_fsdp)):  # decorators and models take theirs there
        names["fully_shard"] = compiled if ours else calls
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
    except Exception as error:
        if not compiled.parts:
            raise
        raise RuntimeError(f"{PARTS_ALONE}: {error}") from error
    else:
        yield name, {"result": PASSED if ours or calls.called else f"{SKIPPED}: does not call fully_shard"}


def result_of(found: Results, name: str, folder: Path) -> str:
    """A line; of an error that torch's tests have raised, what they compared. ``folder``: of the tests."""
    said = str(found.get("error", found.get(name, {"result": "the process ended"}))["result"])
    return " ".join(said.split("To execute this test")[0].replace(f"{folder}/", "").split())[:300]


def run_test(module: ModuleType, case: type[Any], name: str, seconds: float) -> dict[str, str]:
    asked = case(name).world_size or max(RANKS)  # of no accelerators, none

    def one(ours: bool, ranks: int) -> str:
        found = on_ranks(partial(run, module, case, name, ours), ranks, seconds)
        if trace := found.get("error", {}).get("trace"):
            print(trace, file=sys.stderr)
        return result_of(found, name, Path(str(module.__file__)).parent)

    row = {"file": module.__name__, "test": f"{case.__name__}.{name}"}
    for ranks in sorted({min(asked, most) for most in RANKS}):
        row |= {"ranks": str(ranks), "fsdp2": one(ours=False, ranks=ranks)}
        if row["fsdp2"] == PASSED:
            return row | {"ours": one(ours=True, ranks=ranks)}
        if row["fsdp2"].startswith(SKIPPED):
            break
    return row


def reason(row: dict[str, str]) -> str | None:
    """Why a test that fails with ours can hold for FSDP2 alone."""
    name = row["test"].partition(".")[2]
    return next((why for part, why in OF_FSDP2.items() if part == name or part in row["ours"]), None)


def is_unexpected(row: dict[str, str]) -> bool:
    return row.get("ours", PASSED) != PASSED and reason(row) is None


def table(result: dict[str, Any]) -> Table:
    rows = []
    for file in dict.fromkeys(row["file"] for row in result["rows"]):
        tried = [row for row in result["rows"] if row["file"] == file and row["fsdp2"] == PASSED]
        others: dict[str, list[str]] = {}
        for row in tried:
            if row["ours"] != PASSED:
                name = row["test"].partition(".")[2]
                others.setdefault(reason(row) or row["ours"], []).append(f"`{name}`")
        passed = len(tried) - sum(map(len, others.values()))
        said = "; ".join(f"{why}: {', '.join(names)}" for why, names in others.items())
        rows.append([f"`{file}.py`", str(len(tried)), str(passed), said])
    return Table(["file", "pass with FSDP2 on CPU ranks", "of these with graph_fsdp", "the others"], rows)


def record(rows: list[dict[str, str]], path: Path) -> None:
    import torch

    old = json.loads(path.read_text())["rows"] if path.exists() else []
    files = {row["file"] for row in rows}
    about = f"torch {torch.__version__}, and files of PyTorch from 2025 and 2026"
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
