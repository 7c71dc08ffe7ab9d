"""Benchmarks measure what they say. What they find is in their results, not in assertions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from models import MLP

from graph_fsdp.passes import default_pipeline

FOLDER = Path(__file__).parent.parent / "benchmarks"


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("fake_group")
def test_pass_time_measures_every_default_pass_on_graphs_that_grow_by_a_layer() -> None:
    pass_time = benchmark("pass_time")
    found = [pass_time.measure(depth) for depth in (2, 3, 4)]
    assert [m.depth for m in found] == [2, 3, 4]
    for m in found:
        assert {row.name for row in m.rows} == {p.name for p in default_pipeline()}
        assert 0 < sum(row.total for row in m.rows) <= m.total_seconds <= m.capture_seconds
    a, b, c = (m.graph_nodes for m in found)
    assert c - b == b - a >= 30, "nodes per layer"
    assert all(pass_time.table(found).count(row.name) for row in found[0].rows)


def test_kernel_count_finds_the_same_products_in_every_form_and_the_executors_copies_in_one() -> None:
    kernel_count = benchmark("kernel_count")
    counts, _ = kernel_count.measure("mlp", MLP, (torch.ones(4, 16),))
    rows = {(row.phase, row.form): row for row in counts}
    assert set(rows) == {(phase, form) for phase in ("forward", "backward") for form in kernel_count.FORMS}
    for phase, products in (("forward", 5), ("backward", 9)):  # five layers, and the input needs no gradient
        cut, whole, local = (rows[phase, form] for form in kernel_count.FORMS)
        assert cut.products == whole.products == local.products == products
        assert cut.regions > whole.regions == local.regions == 1
        assert cut.packing_bytes > 0 and local.packing_bytes < cut.packing_bytes
        assert all(row.kernels > 0 and row.kernel_bytes > 0 and row.functions > 0 for row in (cut, whole, local))
    # Three buckets of one message each, cast nowhere: what their gathers receive is read once and written once.
    assert rows["forward", "cut"].packing_bytes == 2 * 4 * kernel_count.WORLD_SIZE * (160 + 160 + 32)
