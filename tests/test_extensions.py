"""FSDP2's tensor extensions: weights that travel as int8 and scales, or as float8, in the graph and bit for bit."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from facts import Facts
from launch import run_ranks
from models import MLP
from printed import bucket_tables, stage_text
from reference import check_equal, fsdp2
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from wrapped import Wrapped

import graph_fsdp
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.passes import default_pipeline

FACTS = Facts(__name__)


class Int8Rows(Wrapped):
    """int8, and a float32 scale for each row."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: nn.Module, policy: Any) -> Any:
        scale = self._data.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        return (torch.round(self._data / scale).to(torch.int8), scale), None

    def restore(self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype) -> Tensor:
        values, scale = outputs
        return (values.to(torch.float32) * scale).to(dtype)


class Float8(Wrapped):
    """float8, at a scale that all ranks know."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return ((self._data * 64).to(torch.float8_e4m3fn),), (1 / 64,)

    def restore(self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype) -> Tensor:
        return outputs[0].to(dtype) * metadata[0]


def extended(kind: type[Wrapped], depth: int = 2, rows: int = 32) -> MLP:
    """The weights of blocks travel as ``kind``; biases and the head as they are."""
    torch.manual_seed(0)
    model = MLP(depth=depth)
    for block in model.blocks:
        for linear in (block.up, block.down):
            linear.weight = nn.Parameter(kind(linear.weight.detach()))
    return model


def compiled(kind: type[Wrapped], **options: Any) -> MLP:
    return graph_fsdp.compile(extended(kind), **{"backend": "eager", **options})


# Graphs


@pytest.mark.usefixtures("fake_group")
def test_the_payloads_are_computed_in_front_of_their_gather_and_the_parameter_behind_it() -> None:
    model = graph_fsdp.compile(extended(Int8Rows, depth=1), backend="eager")
    model(torch.randn(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert_expected_inline(
        stage_text(report.forward, "abs", "_to_copy", "mul"),
        """\
    abs(blocks.0.up.weight), ..., div(blocks.0.up.weight, div), ..., _to_copy(round, int8),
        abs(blocks.0.down.weight), ..., div(blocks.0.down.weight, div), ..., _to_copy(round, int8)
gather_root_payload = all_gather_start([_to_copy, _to_copy], int8, world_size=8)
full_root_payload = all_gather_wait(gather_root_payload)
gather_root_payload_1 = all_gather_start([div, div], float32, world_size=8)
    _to_copy(blocks.0.up.weight#0, float32)
full_root_payload_1 = all_gather_wait(gather_root_payload_1)
gather_root_1 = all_gather_start([blocks.0.{up.bias, down.bias}, head.{weight, bias}], float32, world_size=8)
    mul(_to_copy, blocks.0.up.weight#1), _to_copy(blocks.0.down.weight#0, float32), mul(_to_copy,
        blocks.0.down.weight#1)
full_root_1 = all_gather_wait(gather_root_1)
    addmm(blocks.0.up.bias), ..., addmm(blocks.0.down.bias), ..., addmm(head.{bias, weight})
return ..., full_root_payload, full_root_payload_1, full_root_1, ..., blocks.0.down.weight, head.weight, ...""",
    )
    assert_expected_inline(
        bucket_tables(report),
        """\
forward
root#payload gather 2 1,024 kept
root#payload#1 gather 2 1,024 kept
root#1 gather 4 2,048 kept
backward
root#payload kept 2 1,024
root#payload#1 kept 2 1,024
root#1 kept 4 2,048
root#1 reduce 4 92
root reduce 2 512""",
    )
    saved = [v for v in report.forward.graph.output.args[0][1:] if v is not None]
    full = {(32, 16), (16, 32)}
    assert not any(tuple(v.meta["val"].shape) in full for v in saved), "no full weight is saved for backward"


@pytest.mark.usefixtures("fake_group")
def test_bytes_gathered() -> None:
    def gathered(model: nn.Module) -> int:
        with torch.no_grad():
            model(torch.randn(4, 16))
        return sum(row.nbytes for row in graph_fsdp.inspect(model).inference.buckets if row.name != "root")

    plain = gathered(graph_fsdp.compile(MLP(), backend="eager"))
    weights = 4 * 32 * 16
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    half = gathered(graph_fsdp.compile(MLP(), backend="eager", mp_policy=bfloat16))
    biases = plain - 4 * weights
    assert gathered(compiled(Float8)) == weights + biases, "a quarter of float32"
    assert gathered(compiled(Float8, mp_policy=bfloat16)) == half - weights, "and a half of bfloat16"


# Numbers


def train(model: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = {}
    for step in range(steps):
        loss = model(torch.randn(4, 16, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss{step}"] = loss.detach()
    for name, p in model.named_parameters():
        value = p.detach()
        value = value.to_local() if isinstance(value, DTensor) else value
        found[name] = getattr(value, "_data", value).clone()
    return found


@functools.cache
def trained() -> dict[str, Tensor]:
    """On this rank by FSDP2, with int8 weights."""
    return train(fsdp2(extended(Int8Rows)))


@FACTS
def in_bfloat16_too() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_equal(train(compiled(Int8Rows, mp_policy=policy)), train(fsdp2(extended(Int8Rows), mp_policy=policy)))


@FACTS
def int8_weights_train_as_with_fsdp2_in_every_schedule() -> None:
    for options in (
        {"passes": default_pipeline(bucket="none", prefetch=3)},
        {"reshard_after_forward": False, "passes": default_pipeline(bucket=700)},
    ):
        torch._dynamo.reset()
        check_equal(train(compiled(Int8Rows, **options)), trained())


@FACTS
def float8_weights_train_and_differ_from_float32() -> None:
    torch.manual_seed(0)
    expected = train(MLP(), steps=1)
    found = train(compiled(Float8), steps=1)
    assert not torch.equal(found["loss0"], expected["loss0"]), "weights lost digits on their way"
    torch.testing.assert_close(found["loss0"], expected["loss0"], rtol=0.1, atol=0.01)


@FACTS
def shards_are_plain_and_evaluation_works() -> None:
    model = compiled(Int8Rows)
    assert all(type(p.to_local().detach()) is Tensor for p in model.parameters())
    x = torch.randn(4, 16)
    with torch.no_grad():
        evaluated = model(x)
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(evaluated, fsdp2(extended(Int8Rows))(x))


def values_of(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() for p in model.parameters()]


@FACTS
def values_come_from_an_initialisation_files_or_the_first_rank() -> None:
    """A weight on the meta device is initialised as a plain one."""
    torch.manual_seed(0)
    plain = MLP()
    expected = [p.detach() for p in plain.parameters()]
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    file = Path(str(folder[0])) / "model.safetensors"
    if dist.get_rank() == 0:
        save_file(plain.state_dict(), file)
    dist.barrier()
    for options in ({}, {"checkpoint": file}, {"sync_module_states": True}):
        model = extended(Float8)
        if dist.get_rank() or not options.get("sync_module_states"):
            for module in model.modules():
                for name, p in list(module.named_parameters(recurse=False)):
                    inner = getattr(p, "_data", p).detach().to("meta")
                    setattr(module, name, nn.Parameter(Float8(inner) if isinstance(p, Float8) else inner))
        torch.manual_seed(0)
        found = values_of(graph_fsdp.compile(model, backend="eager", **options))
        assert all(map(torch.equal, found, expected)), options
        assert len(train(model, steps=1)) == 1 + len(expected)
        torch._dynamo.reset()
    with torch.no_grad():
        model = extended(Float8)
        for p in model.parameters():
            p.zero_()
    found = values_of(graph_fsdp.compile(model, backend="eager", checkpoint=file))
    assert all(map(torch.equal, found, expected)), "values that were there give way"


def with_inductor_numbers_are_close() -> None:
    torch.set_num_threads(1)
    found = train(compiled(Int8Rows, backend="inductor"), steps=1)
    torch.testing.assert_close(found["loss0"], trained()["loss0"], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_with_inductor_on_two_ranks() -> None:
    run_ranks(with_inductor_numbers_are_close, 2)


test_on_two_ranks = FACTS.on(2)


def test_one_process_quantises_and_gathers_nothing() -> None:
    model, x = extended(Int8Rows), torch.randn(4, 16)
    for block in model.blocks:
        for linear in (block.up, block.down):
            local = linear.weight
            payloads, metadata = local.fsdp_pre_all_gather(None, None, None, None, None)
            linear.weight = nn.Parameter(local.restore(payloads, metadata, torch.float32))
    expected = model(x).detach()
    assert torch.equal(compiled(Int8Rows)(x), expected)


# What is refused


class Communicating(Float8):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scales = torch.ops._c10d_functional.all_gather_into_tensor(self._data.abs().amax(0), 8, "0")
        return ((self._data * scales[0]).to(torch.float8_e4m3fn),), (scales[0],)


class Half(Float8):
    fsdp_post_all_gather = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name == "fsdp_post_all_gather":
            raise AttributeError(name)
        return super().__getattribute__(name)


class CommunicatingLater(Float8):
    def restore(self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype) -> Tensor:
        full = super().restore(outputs, metadata, dtype)
        return full / torch.ops._c10d_functional.all_reduce(full.abs().amax(), "max", "0")


class InAnotherGroup(Float8):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scale = torch.ops._c10d_functional.all_reduce(self._data.abs().amax(), "max", "another")
        return ((self._data * scale).to(torch.float8_e4m3fn),), (scale,)


class Opaque(Tensor):
    """Nobody can tell what it is made of."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class OfOpaque(Float8):
    def restore(self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype) -> Tensor:
        return Opaque(super().restore(outputs, metadata, dtype))


class OfThreeArguments(Float8):
    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], size: Any, stride: Any) -> Tensor:  # type: ignore[override]
        return inner["_data"]


class OfWrongDtype(Float8):
    def restore(self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype) -> Tensor:
        return outputs[0]


REFUSED: list[tuple[type[Wrapped], dict[str, Any], type[Exception], str]] = [
    (Communicating, {}, UnsupportedError, "the extension of parameter 'blocks.0.up.weight' communicates"),
    (Half, {}, ValueError, "has one of fsdp_pre_all_gather and fsdp_post_all_gather"),
    (CommunicatingLater, {}, UnsupportedError, "may all-reduce over the ranks that shard"),
    (InAnotherGroup, {}, UnsupportedError, "may all-reduce over the ranks that shard"),
    (OfOpaque, {}, UnsupportedError, "makes a Opaque without __tensor_flatten__"),
    (
        OfThreeArguments,
        {},
        UnsupportedError,
        r"takes \(inner.*define it with \(inner_tensors, metadata",
    ),
    (OfWrongDtype, {}, ValueError, "makes torch.float8_e4m3fn"),
    (
        Float8,
        {"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 else None},
        UnsupportedError,
        r"'blocks.0.up.weight' is to be sharded on dimension 1.*return Shard\(0\)",
    ),
    (
        Float8,
        {"reshard_after_forward": 2},
        UnsupportedError,
        "not available with reshard_after_forward=2; leave one out",
    ),
    (
        Float8,
        {"backend": "inductor", "regions": "whole"},
        UnsupportedError,
        "not available with regions='whole'; leave one out",
    ),
]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(("kind", "options", "error", "words"), REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_changed(
    kind: type[Wrapped], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = extended(kind)
    with pytest.raises(error, match=words):
        graph_fsdp.compile(model, **{"backend": "eager", **options})
    assert type(model) is MLP and all(not isinstance(p, DTensor) for p in model.parameters())
