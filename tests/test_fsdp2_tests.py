"""Tests that are written for FSDP2 run with ours in its place, and one that fails with ours alone is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import fsdp2_tests
import pytest

# As PyTorch writes them.
WRITTEN_FOR_FSDP2 = """
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.common_fsdp import MLP, FSDPTest, check_sharded_parity
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

device_type = torch.accelerator.current_accelerator().type


class TestAsFSDP2(FSDPTest):
    @property
    def world_size(self):
        return torch.get_device_module(device_type).device_count()

    def test_parts_are_units(self):
        torch.manual_seed(1)
        model = nn.Sequential(MLP(8), MLP(8), nn.ReLU())
        reference = copy.deepcopy(model)
        fully_shard([model[0].in_proj, model[0].out_proj], reshard_after_forward=False)
        columns = lambda p: Shard(1) if p.dim() > 1 else None
        fully_shard(model[1], shard_placement_fn=columns, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
        fully_shard(model)
        self.assertEqual(model[1].in_proj.weight.placements, (Shard(1),))
        self.assertEqual(model[0].in_proj.weight.placements, (Shard(0),))
        torch.manual_seed(self.rank)
        x = torch.randn(4, 8)
        model(x).sum().backward()
        reference(x).sum().backward()
        for p in reference.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        check_sharded_parity(self, reference, model)
        self.assertEqual(model[1](x).dtype, torch.float64)

    def test_state(self):
        model = nn.Linear(8, 8)
        fully_shard(model)
        self.assertIsNotNone(fully_shard.state(model)._fsdp_param_group)

    def test_part_alone(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        fully_shard(model[0])
        self.assertEqual(model[0].weight.to_local().shape, (4, 8))

    def test_gathered(self):
        model = fully_shard(nn.Linear(8, 8), reshard_after_forward=False)
        model(torch.ones(2, 8))
        self.assertEqual(type(model.weight), nn.Parameter)

    def test_of_devices(self):
        fully_shard(nn.Linear(8, 8))
        self.assertEqual(torch.accelerator.device_count(), 2)

    def test_nothing_sharded(self):
        self.assertEqual(self.world_size, 2)


class TestReplicas(DTensorTestBase):
    @with_comms
    def test_four_ranks(self):
        mesh = init_device_mesh(device_type, (2, self.world_size // 2), mesh_dim_names=("replicate", "shard"))
        model = nn.Linear(8, 8)
        replicate(copy.deepcopy(model), device_ids=[self.rank])
        fully_shard(model, mesh=mesh)
        self.assertEqual(model.weight.to_local().shape, (4, 8))
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    file = tmp_path_factory.mktemp("pytorch") / "test_as_fsdp2.py"
    file.write_text(WRITTEN_FOR_FSDP2)
    done = subprocess.run(
        [sys.executable, fsdp2_tests.__file__, str(file), "--seconds", "100"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 1, done.stderr[-4000:]  # of ``test_gathered``
    return {row["test"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.timeout(600)
def test_each_is_run_with_fsdp2_and_then_with_ours(rows: dict[str, dict[str, str]]) -> None:
    of = {test.partition(".test_")[2]: row for test, row in rows.items()}
    assert {name: row["ranks"] for name, row in of.items() if row["fsdp2"] == "passed"} == {
        **dict.fromkeys(("parts_are_units", "state", "part_alone", "gathered"), "2"),
        "four_ranks": "4",
    }
    assert {name for name, row in of.items() if row.get("ours") == "passed"} == {"parts_are_units", "four_ranks"}
    assert of["of_devices"]["fsdp2"].startswith("AssertionError") and "ours" not in of["of_devices"]
    assert of["nothing_sharded"] == {
        "file": "test_as_fsdp2",
        "test": "TestAsFSDP2.test_nothing_sharded",
        "ranks": "2",
        "fsdp2": "skipped: does not call fully_shard",
    }


def test_a_failure_has_a_reason_or_is_unexpected(rows: dict[str, dict[str, str]]) -> None:
    reasons = {test: fsdp2_tests.reason(row) for test, row in rows.items() if row.get("ours", "passed") != "passed"}
    assert reasons == {
        "TestAsFSDP2.test_state": "reads or patches FSDP2's own state",
        "TestAsFSDP2.test_part_alone": "shards parts of a model and not the model",
        "TestAsFSDP2.test_gathered": None,
    }
    assert [test for test, row in rows.items() if fsdp2_tests.is_unexpected(row)] == ["TestAsFSDP2.test_gathered"]


def test_the_table_says_why_a_test_is_of_fsdp2_alone() -> None:
    row = {"file": "test_fully_shard_comm", "ranks": "2", "fsdp2": "passed"}
    name = "TestFullyShardCommunication.test_fully_shard_communication_count"
    rows = [{**row, "test": "A.test_b", "ours": "passed"}, {**row, "test": name, "ours": "AssertionError: 3 and 4"}]
    table = fsdp2_tests.table({"rows": rows}).markdown()
    assert (
        "| `test_fully_shard_comm.py` | 2 | 1 | counts collectives, of which a bucket has several on gloo: `test_"
        in table
    )
    assert not any(map(fsdp2_tests.is_unexpected, rows))
