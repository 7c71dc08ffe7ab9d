"""Tensor extensions whose shards are kept on the CPU, or on meshes of their own: copies, gathers and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from facts import Facts
from models import MLPBlock
from printed import bucket_tables, calls
from reference import check_equal, fsdp2
from test_extensions import Float8, Int8Rows, compiled, extended, train
from test_extensions_float8 import Scaled, converted, losses_and_parameters, needs_torchao
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import graph_fsdp
from graph_fsdp.passes import default_pipeline

FACTS = Facts(__name__)
OFFLOAD: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
pytestmark = pytest.mark.filterwarnings("ignore:offload_policy")


@pytest.mark.usefixtures("fake_group")
def test_a_shard_is_copied_to_the_device_where_its_payloads_are_computed() -> None:
    model = compiled(Int8Rows, auto_wrap_policy={MLPBlock}, **OFFLOAD)
    model(torch.randn(4, 16)).sum().backward()
    assert_expected_inline(
        bucket_tables(graph_fsdp.inspect(model)),
        """\
forward
blocks.0#payload fetch 2 512
blocks.1#payload fetch 2 512
blocks.0#payload#1 gather 2 1,024
blocks.0#payload#2 gather 2 1,024
blocks.0#1 fetch 2 128
blocks.1#payload#1 gather 2 1,024
blocks.1#payload#2 gather 2 1,024
blocks.0#1 gather 2 1,024
blocks.1#1 fetch 2 128
blocks.1#1 gather 2 1,024
root fetch 2 128
root gather 2 1,024 kept
backward
root kept 2 1,024
blocks.1#payload fetch 2 512
blocks.0#payload fetch 1 512
blocks.1#payload#1 gather 2 1,024
blocks.1#payload#2 gather 2 1,024
root reduce 2 68
blocks.0#payload#1 gather 2 1,024
blocks.0#payload#2 gather 2 1,024
blocks.1#1 reduce 2 24
root offload 2 68
blocks.1 reduce 2 512
blocks.1#1 offload 2 24
blocks.0#1 reduce 2 24
blocks.1 offload 2 512
blocks.0 reduce 2 512
blocks.0#1 offload 2 24
blocks.0 offload 2 512""",
    )


@pytest.mark.usefixtures("fake_group")
def test_without_ranks_to_gather_from_shards_are_copied_once() -> None:
    model = compiled(Float8, mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("replicate",)), **OFFLOAD)
    model(torch.randn(4, 16)).sum().backward()
    assert_expected_inline(
        bucket_tables(graph_fsdp.inspect(model)).partition("backward")[0],
        """\
forward
blocks.0#payload fetch 2 4,096
blocks.1#payload fetch 2 4,096
blocks.0#1 fetch 2 192
blocks.1#1 fetch 2 192
root fetch 2 384
""",
    )


@pytest.mark.usefixtures("fake_group")
def test_payloads_are_gathered_and_gradients_reduced_on_the_mesh_that_a_parameter_has() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    own = {"mesh": mesh._flatten("all"), "auto_wrap_policy": {MLPBlock}, "meshes": {MLPBlock: mesh}}
    model = compiled(Float8, **own)
    model(torch.randn(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert_expected_inline(
        calls(report.forward, "all_gather_start"),
        """\
gather_blocks_0_payload = all_gather_start([_to_copy, _to_copy], float8_e4m3fn, world_size=4)
gather_blocks_1_payload = all_gather_start([_to_copy, _to_copy], float8_e4m3fn, world_size=4)
gather_blocks_0_1 = all_gather_start([blocks.0.{up.bias, down.bias}], float32, world_size=4)
gather_blocks_1_1 = all_gather_start([blocks.1.{up.bias, down.bias}], float32, world_size=4)
gather_root = all_gather_start([head.{weight, bias}], float32, world_size=8)""",
    )
    assert_expected_inline(
        calls(report.backward, "reduce_scatter_start"),
        """\
reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8)
reduce_blocks_1_1 = reduce_scatter_start([blocks.1.{up.bias: sum, down.bias: sum}], float32, world_size=4,
    replicas=2)
reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, down.weight: mm}], float32, world_size=4,
    replicas=2)
reduce_blocks_0_1 = reduce_scatter_start([blocks.0.{up.bias: sum, down.bias: sum}], float32, world_size=4,
    replicas=2)
reduce_blocks_0 = reduce_scatter_start([blocks.0.{up.weight: mm, down.weight: mm}], float32, world_size=4,
    replicas=2)""",
    )


@FACTS
def numbers_are_those_of_fsdp2() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    by_block: dict[str, Any] = {"auto_wrap_policy": {MLPBlock}, "reshard_after_forward": True}
    for kind, options in ((Int8Rows, {}), (Scaled, {"mp_policy": policy})):
        expected = train(fsdp2(extended(kind), **OFFLOAD, **options))
        for schedule in (
            by_block,
            {**by_block, "reshard_after_forward": False},
            {**by_block, "fullgraph": False},
            {"passes": default_pipeline(bucket="none", prefetch=3)},
        ):
            torch._dynamo.reset()
            model = compiled(kind, **OFFLOAD, **options, **schedule)
            assert {p.device.type for p in model.parameters()} == {"cpu"}
            check_equal(train(model), expected)


@FACTS.marked(needs_torchao)
def torchaos_float8_is_that_of_fsdp2() -> None:
    model = converted(emulate=True)
    for module in (model[0], model[2]):
        fully_shard(module, **OFFLOAD)
    expected = losses_and_parameters(fully_shard(model, **OFFLOAD))
    ours = graph_fsdp.compile(converted(emulate=True), backend="eager", auto_wrap_policy={nn.Linear}, **OFFLOAD)
    found = losses_and_parameters(ours)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@FACTS
def extensions_may_have_meshes_of_their_own() -> None:
    """Blocks are replicated on the two ranks: what is gathered, their shards and their scales, is each rank's own."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def placed(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.shape == (5, 16) else None

    options = {"mesh": mesh._flatten("all"), "auto_wrap_policy": {MLPBlock}}
    expected = train(compiled(Scaled, **options))
    for more in ({}, OFFLOAD):
        torch._dynamo.reset()
        model = compiled(Scaled, **options, **more, meshes={MLPBlock: mesh}, shard_placement_fn=placed)
        found = train(model)
        assert model.head.weight.placements == (Shard(1),)
        assert model.blocks[0].up.weight.to_local().shape == (32, 16)
        assert torch.equal(found["loss0"], expected["loss0"]) and torch.equal(found["loss1"], expected["loss1"])


test_on_two_ranks = FACTS.on(2)
