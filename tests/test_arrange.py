"""Which parameters share a bucket, and in which messages it is gathered."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graph_fsdp.passes import Bucket, CostModel, GroupShape, PassError, PipelineError, default_pipeline, find_hardware
from graph_fsdp.passes.ir.spec import BucketSpec, MeshSpec, ModelSpec, ParameterSpec, make_model_spec
from graph_fsdp.passes.transforms.arrange import arrange_buckets

WORLD = 4
MESH = MeshSpec("", "0", WORLD)
KIB = 1024


def parameter(name: str, unit: str, kib: int, dtype: torch.dtype = torch.float32) -> ParameterSpec:
    """A parameter of ``kib`` gathered kibibytes."""
    rows = kib * KIB // dtype.itemsize // 16
    return ParameterSpec(name, unit, (rows, 16), dtype, dtype, dtype, True, MESH)


SCALAR = ParameterSpec("s", "u", (), torch.float32, torch.float32, torch.float32, True, MESH)


def model(*parameters: ParameterSpec) -> ModelSpec:
    return make_model_spec(parameters, MESH)


def layers(count: int, *kib: int) -> Iterator[ParameterSpec]:
    for layer in range(count):
        for index, size in enumerate(kib):
            yield parameter(f"layers.{layer}.{index}", f"layers.{layer}", size)


def buckets(spec: ModelSpec) -> dict[str, list[str]]:
    return {bucket.name: [p.name for p in bucket.parameters] for bucket in spec.buckets}


CPU = CostModel(find_hardware("cpu"), {"0": GroupShape(WORLD)})


def test_none_is_a_bucket_per_parameter_and_unit_one_per_unit() -> None:
    spec = model(*layers(2, 4, 8))
    assert list(buckets(arrange_buckets(spec, "none"))) == [f"layers.{i}.{j}" for i in range(2) for j in range(2)]
    assert buckets(arrange_buckets(spec, "unit")) == {
        "layers.0": ["layers.0.0", "layers.0.1"],
        "layers.1": ["layers.1.0", "layers.1.1"],
    }


def test_a_size_divides_units_that_exceed_it_all_in_the_same_way() -> None:
    spec = arrange_buckets(model(*layers(2, 4, 8, 4, 20)), 12 * KIB)
    assert buckets(spec) == {
        "layers.0": ["layers.0.0", "layers.0.1"],
        "layers.0#1": ["layers.0.2"],
        "layers.0#2": ["layers.0.3"],  # exceeds the size by itself
        "layers.1": ["layers.1.0", "layers.1.1"],
        "layers.1#1": ["layers.1.2"],
        "layers.1#2": ["layers.1.3"],
    }


def test_a_size_puts_small_units_together() -> None:
    spec = arrange_buckets(model(*layers(5, 2, 4)), 12 * KIB)
    assert {name: len(found) for name, found in buckets(spec).items()} == {
        "layers.0..layers.1": 4,
        "layers.2..layers.3": 4,
        "layers.4": 2,
    }


def test_the_parts_of_a_unit_before_and_after_others_are_apart() -> None:
    spec = model(parameter("embed", "", 8), *layers(2, 8), parameter("head", "", 8))
    assert list(buckets(arrange_buckets(spec, 8 * KIB))) == ["root", "layers.0", "layers.1", "root#1"]


def test_dtypes_do_not_share_a_bucket() -> None:
    spec = model(parameter("a", "", 4), parameter("b", "", 4, torch.bfloat16), parameter("c", "", 4))
    assert buckets(arrange_buckets(spec, 100 * KIB)) == {"root": ["a", "c"], "root#1": ["b"]}


def test_auto_is_the_smallest_size_that_saturates_the_link() -> None:
    size = CPU.saturating_bytes("0")
    assert 100 * KIB < size < 16 * 1024 * KIB
    spec = model(parameter("large", "large", 16 * 1024), *layers(40, 64))
    automatic = arrange_buckets(spec, "auto", CPU)
    assert buckets(automatic) == buckets(arrange_buckets(spec, size))
    assert len(automatic.buckets) < 40


def test_auto_is_no_larger_than_the_largest_unit_and_half_the_budget() -> None:
    spec = model(*layers(40, 64, 64))
    assert buckets(arrange_buckets(spec, "auto", CPU)) == buckets(arrange_buckets(spec, "unit"))
    budget = 160 * KIB
    bounded = arrange_buckets(spec, "auto", CPU, budget)
    assert max(sum(p.gathered_nbytes for p in bucket.parameters) for bucket in bounded.buckets) == 64 * KIB


def test_auto_buckets_of_a_replicated_model_saturate_its_all_reduce() -> None:
    sharded = [parameter("large", "large", 16 * 1024), *layers(40, 64)]
    mesh = MeshSpec("", "", 1, "r", WORLD)
    spec = make_model_spec([dataclasses.replace(p, mesh=mesh) for p in sharded], mesh)
    cost = CostModel(find_hardware("cpu"), {"": GroupShape(1), "r": GroupShape(WORLD)})
    automatic = arrange_buckets(spec, "auto", cost)
    assert buckets(automatic) == buckets(arrange_buckets(spec, cost.saturating_bytes("r")))
    assert len(automatic.buckets) < 40


def test_the_first_unit_is_divided_where_its_gather_takes_its_bytes_time() -> None:
    h100 = CostModel(find_hardware("h100"), {"0": GroupShape(WORLD)})
    mib = KIB
    large = model(parameter("embed", "", 64 * mib), *layers(2, 64 * mib, 64 * mib, 64 * mib, 64 * mib))
    assert buckets(arrange_buckets(large, "unit", h100)) == {
        "root": ["embed"],
        "layers.0": ["layers.0.0"],
        "layers.0#1": ["layers.0.1"],
        "layers.0#2": ["layers.0.2"],
        "layers.0#3": ["layers.0.3"],
        "layers.1": ["layers.1.0", "layers.1.1", "layers.1.2", "layers.1.3"],
    }
    small = model(parameter("embed", "", 1), *layers(2, 4, 4, 4, 4))
    assert list(buckets(arrange_buckets(small, "unit", h100))) == ["root", "layers.0", "layers.1"], "all latency"
    assert list(buckets(arrange_buckets(large, "unit", CPU))) == ["root", "layers.0", "layers.1"], "nothing overlaps"


def test_the_parts_of_a_divided_unit_and_of_one_on_two_meshes_have_names_of_their_own() -> None:
    h100 = CostModel(find_hardware("h100"), {"0": GroupShape(WORLD), "1": GroupShape(WORLD)})
    mesh = MeshSpec("efsdp", "1", WORLD)
    large = list(layers(2, *[64 * KIB] * 4))
    experts = [dataclasses.replace(parameter(f"layers.{i}.experts", f"layers.{i}", 1), mesh=mesh) for i in range(2)]
    assert buckets(arrange_buckets(model(*large[:4], experts[0], *large[4:], experts[1]), "unit", h100)) == {
        "layers.0": ["layers.0.0"],
        "layers.0#1": ["layers.0.1"],
        "layers.0#2": ["layers.0.2"],
        "layers.0#3": ["layers.0.3"],
        "layers.1": ["layers.1.0", "layers.1.1", "layers.1.2", "layers.1.3"],
        "layers.0#4": ["layers.0.experts"],
        "layers.1#1": ["layers.1.experts"],
    }


def test_a_parameter_dearer_to_unpack_than_to_send_has_a_message_of_its_own() -> None:
    spec = arrange_buckets(model(*layers(1, 1, 1, 64 * KIB, 1, 1, 32 * KIB)), "unit", CPU)
    (bucket,) = spec.buckets
    assert [p.name for p in bucket.parameters] == [f"layers.0.{index}" for index in (2, 5, 0, 1, 3, 4)]
    small, large, larger = 64, 32 * KIB * KIB // 4 // WORLD, 64 * KIB * KIB // 4 // WORLD
    assert bucket.messages == ((0, larger), (larger, large), (larger + large, 4 * small))
    assert arrange_buckets(model(*layers(2, 1, 1)), "unit", CPU).buckets[0].messages == (), "one message does it"


def test_parameters_dearer_to_unpack_together_than_to_send_apart_have_messages_of_their_own() -> None:
    (bucket,) = arrange_buckets(model(*layers(1, 1024, 256)), "unit", CPU).buckets
    assert CPU.copy_seconds(1024 * KIB) < CPU.message_seconds("0") < CPU.copy_seconds(1280 * KIB)
    assert bucket.messages == ((0, 65536), (65536, 16384))
    assert arrange_buckets(model(*layers(1, 256, 256)), "unit", CPU).buckets[0].messages == ()
    (whole,) = arrange_buckets(model(*layers(1, 1024, 256)), "unit", CPU, messages="one").buckets
    assert whole.messages == () and whole.parameters == bucket.parameters


def test_a_compiler_that_joins_collectives_gets_a_message_for_each_parameter() -> None:
    combining = CostModel(find_hardware("cpu"), {"0": GroupShape(WORLD)}, combining=True)
    (bucket,) = arrange_buckets(model(*layers(1, 1, 64, 2)), "unit", combining).buckets
    assert [p.name for p in bucket.parameters] == [f"layers.0.{index}" for index in range(3)]
    assert [begin for begin, _ in bucket.messages] == list(bucket.offsets.values())


@pytest.mark.parametrize("size", ["units", 0, -1, True, 2.5, None])
def test_a_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="bucket must be 'unit', 'none', 'auto' or a positive number of bytes, got"):
        default_pipeline(bucket=size)  # type: ignore[arg-type]


def test_messages_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="messages must be 'auto' or 'one', got 8"):
        default_pipeline(messages=8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda spec: spec.buckets, "arrange must return a ModelSpec"),
        (lambda spec: dataclasses.replace(spec, buckets=spec.buckets[1:]), "arrange left a in no bucket"),
        (lambda spec: dataclasses.replace(spec, buckets=spec.buckets * 2), "arrange put a into bucket 'u' and another"),
        (
            lambda spec: dataclasses.replace(
                spec, buckets=(BucketSpec("u", "u", tuple(p for b in spec.buckets for p in b.parameters)),)
            ),
            "arrange made bucket 'u' of parameters of several dtypes",
        ),
        (
            lambda spec: dataclasses.replace(spec, buckets=(*spec.buckets, BucketSpec("s", "u", (SCALAR,)))),
            "arrange put s in bucket 's', and that is no sharded parameter",
        ),
    ],
    ids=["no model", "one left out", "one twice", "two dtypes", "a scalar"],
)
def test_buckets_of_a_users_pass_are_checked(change: Callable[[ModelSpec], Any], message: str) -> None:
    class Mine(Bucket):
        def arrange(self, model: ModelSpec, cost: CostModel | None) -> ModelSpec:
            return change(super().arrange(model, cost))

    spec = model(parameter("a", "u", 4), parameter("b", "u", 4, torch.bfloat16), SCALAR)
    with pytest.raises(PipelineError, match=message) as raised:
        default_pipeline().replace("bucket", Mine()).arrange(spec, CPU)
    assert "Mine('bucket')" in str(raised.value)


@pytest.mark.parametrize("kind", [ValueError, KeyError])
def test_a_pass_that_raises_when_it_arranges_is_named(kind: type[Exception]) -> None:
    class Mine(Bucket):
        def arrange(self, model: ModelSpec, cost: CostModel | None) -> ModelSpec:
            raise kind("no such unit")

    if kind is ValueError and sys.version_info < (3, 11):
        pytest.skip("exceptions have no notes before Python 3.11")
    with pytest.raises(Exception, match="no such unit") as raised:
        default_pipeline().replace("bucket", Mine()).arrange(model(parameter("a", "u", 4)), CPU)
    assert type(raised.value) is (ValueError if kind is ValueError else PassError)
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "pass 'bucket' " in told


@pytest.mark.parametrize(
    "changes",
    [{"mesh": MeshSpec("efsdp", "1", WORLD)}, {"reduce_dtype": torch.bfloat16}, {"sent_as": torch.int8}],
    ids=["mesh", "reduce_dtype", "quantized"],
)
def test_a_users_bucket_has_one_mesh_and_one_type_of_reductions(changes: dict[str, Any]) -> None:
    class All(Bucket):
        def arrange(self, model: ModelSpec, cost: CostModel | None) -> ModelSpec:
            return dataclasses.replace(model, buckets=(BucketSpec("all", "u", tuple(model.parameters.values())),))

    pipeline, one, other = default_pipeline().replace("bucket", All()), parameter("a", "u", 4), parameter("b", "u", 4)
    assert list(buckets(pipeline.arrange(model(one, other), CPU))) == ["all"]
    with pytest.raises(PipelineError, match="bucket 'all' of parameters of several dtypes or meshes"):
        pipeline.arrange(model(one, dataclasses.replace(other, **changes)), CPU)
