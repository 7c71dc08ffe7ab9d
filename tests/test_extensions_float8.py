"""Extensions that find a scale together, as torchao's float8 weights do: an all-reduce in the graph, FSDP2's bits."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from facts import Facts
from launch import run_ranks
from printed import bucket_table, calls, sequence
from reference import fsdp2
from test_extensions import Float8, Wrapped, extended, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report.report import engine_of

FACTS = Facts(__name__)
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


class Scaled(Float8):
    """float8, at a scale from the largest value that any rank has."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        largest = self._data.abs().max()
        if mesh is not None:
            name = mesh.get_group().group_name
            largest = torch.ops._c10d_functional.all_reduce(largest, "max", name)
            largest = torch.ops._c10d_functional.wait_tensor(largest)
        scale = largest.clamp(min=1e-12) / 448
        return ((self._data / scale).to(torch.float8_e4m3fn),), (scale,)


class ScaledInPlace(Float8):
    """The same by torch's own functions, as extensions of torchao's call them, from the mean of all ranks."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        largest, mean = self._data.abs().max(), self._data.abs().mean()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        work = dist.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=True)
        work.wait()
        scale = (largest + mean).clamp(min=1e-12) / 448
        return ((self._data / scale).to(torch.float8_e4m3fn),), (scale,)


class MakesWrapped(Float8):
    """The gathered parameter is a tensor subclass too."""

    def restore(self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype) -> Tensor:
        return Wrapped(super().restore(outputs, metadata, dtype))


@pytest.mark.usefixtures("fake_group")
def test_the_scales_of_all_parameters_are_one_all_reduce_in_front_of_all_gathers() -> None:
    model = graph_fsdp.compile(extended(Scaled), backend="eager", reshard_after_forward=True)
    model(torch.randn(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert_expected_inline(
        calls(report.forward, "abs", "max", "reduce_payloads"),
        """\
abs(blocks.0.up.weight)
max(abs)
abs(blocks.0.down.weight)
max(abs)
abs(blocks.1.up.weight)
max(abs)
abs(blocks.1.down.weight)
max(abs)
reduced_payloads = reduce_payloads([max, max, max, max], op=max)""",
    )
    order = sequence(report.forward)
    assert order.index("reduced_payloads") < order.index("gather_")
    assert_expected_inline(
        calls(report.forward, "all_gather_start").splitlines()[0],
        """gather_blocks_0_payload = all_gather_start([_to_copy, _to_copy], float8_e4m3fn, world_size=8)""",
    )
    assert not calls(report.backward, "reduce_payloads"), "backward has forward's scales"
    assert calls(report.backward, "all_gather_start").count("all_gather_start") > 1


@pytest.mark.usefixtures("fake_group")
def test_ranks_agree_on_the_all_reduce() -> None:
    model = graph_fsdp.compile(extended(Scaled), backend="eager")
    with torch.no_grad():
        model(torch.randn(4, 16))
    (fingerprint,) = engine_of(model).schedules._agreed
    assert fingerprint[0].startswith("inference payload_reduce payloads 16 bytes torch.float32")


@FACTS
def a_scale_of_all_ranks_trains_as_with_fsdp2() -> None:
    for kind, reductions in ((Scaled, 1), (ScaledInPlace, 2)):
        expected = train(fsdp2(extended(kind)))
        for options in (
            {"reshard_after_forward": True},
            {"reshard_after_forward": False, "passes": default_pipeline(bucket="none")},
        ):
            torch._dynamo.reset()
            model = graph_fsdp.compile(extended(kind), **{"backend": "eager", **options})
            found = train(model)
            for name, value in expected.items():
                assert torch.equal(found[name], value), (kind, options, name)
            times = graph_fsdp.inspect(model).collectives["payload_reduce"]
            assert times == 2 * reductions, "in each forward, none in backward"


@FACTS
def a_gathered_parameter_may_be_a_subclass() -> None:
    found = train(graph_fsdp.compile(extended(MakesWrapped, depth=1), backend="eager"), steps=1)
    torch._dynamo.reset()
    expected = train(graph_fsdp.compile(extended(Float8, depth=1), backend="eager"), steps=1)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# torchao's


def converted(emulate: bool, width: int = 64) -> nn.Sequential:
    """With biases: gloo gathers no float8 for FSDP2, but does where a bucket of several types is one of bytes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    return convert_to_float8_training(model, config=config)


def losses_and_parameters(
    model: nn.Module, precompute: bool = False, steps: int = 2, rank: int | None = None
) -> list[Tensor]:
    """``rank``: whose batches; None: this one's."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(steps):
        loss = model(torch.randn(16, 32, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
    values = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [*found, *(getattr(value, "_tensor", value).detach() for value in values)]


def of_fsdp2(emulate: bool, width: int = 64, precompute: bool = False) -> list[Tensor]:
    model = converted(emulate, width)
    for module in (model[0], model[2]):
        fully_shard(module)
    return losses_and_parameters(fully_shard(model), precompute)


@FACTS.marked(needs_torchao)
def torchaos_float8_trains_as_with_fsdp2() -> None:
    by_layer = {"reshard_after_forward": True, "auto_wrap_policy": {nn.Linear}}
    for emulate, options in ((False, {}), (True, by_layer)):
        torch._dynamo.reset()
        model = graph_fsdp.compile(converted(emulate), **{"backend": "eager", **options})
        precompute = emulate  # which finds nothing to do: the scales are the graph's
        found, expected = losses_and_parameters(model, precompute), of_fsdp2(emulate, precompute=precompute)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), (emulate, options)
        assert graph_fsdp.inspect(model).collectives["payload_reduce"] == 2


def of_bitnet() -> nn.Sequential:
    """Whose weights are gathered as two bits a value, at the mean of all ranks' values."""
    from torchao.prototype.quantized_training import bitnet_training
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    quantize_(model, bitnet_training())
    return model


@FACTS.marked(needs_torchao)
def torchaos_bitnet_trains_as_with_fsdp2() -> None:
    expected = losses_and_parameters(fully_shard(of_bitnet()))
    model = graph_fsdp.compile(of_bitnet(), backend="eager", reshard_after_forward=False)
    found = losses_and_parameters(model)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert graph_fsdp.inspect(model).collectives["payload_reduce"] == 2


@FACTS.marked(needs_torchao)
def rows_that_do_not_divide_by_the_ranks() -> None:
    """FSDP2 has no uneven shards of extended weights: a first loss is that of one process."""
    plain = converted(True, width=63)
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    (expected, *_), (found, *_) = losses_and_parameters(plain, steps=1), losses_and_parameters(model, steps=1)
    assert torch.equal(found, expected)


@needs_torchao
def test_torchaos_float8_on_one_process() -> None:
    plain = converted(emulate=True)
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    assert all(map(torch.equal, losses_and_parameters(model), losses_and_parameters(plain)))


@pytest.mark.usefixtures("fake_group")
@needs_torchao
def test_torchaos_weights_are_gathered_as_float8() -> None:
    model = graph_fsdp.compile(converted(emulate=False), backend="eager")
    model(torch.randn(16, 32)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert_expected_inline(
        bucket_table(report.forward),
        """\
root#payload gather 2 4,096 kept
root#1 gather 2 1,024 kept""",
    )


test_on_two_ranks = FACTS.on(2)


# Tensor-parallel ones, on four ranks


def tensor_parallel(tp: DeviceMesh) -> nn.Sequential:
    """A weight by columns and one by rows, each cast to float8 by its data-parallel ranks."""
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    plan = {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()}
    return parallelize_module(converted(emulate=True), tp, plan)


def tensor_parallel_float8_trains_as_with_fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = mesh["dp"]

    def trained(model: nn.Module) -> list[Tensor]:
        return losses_and_parameters(model, rank=data.get_local_rank())

    model = tensor_parallel(mesh["tp"])
    for module in (model[0], model[2]):
        fully_shard(module, mesh=data)
    expected = trained(fully_shard(model, mesh=data))
    for options in ({"reshard_after_forward": False}, {"auto_wrap_policy": {nn.Linear}, "reshard_after_forward": True}):
        torch._dynamo.reset()
        model = graph_fsdp.compile(tensor_parallel(mesh["tp"]), data, backend="eager", **options)
        assert all(type(compat.local_part(p)) is Tensor for p in model.parameters())
        found = trained(model)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), options
        assert graph_fsdp.inspect(model).collectives["payload_reduce"] == 2


@needs_torchao
def test_tensor_parallel_on_four_ranks() -> None:
    run_ranks(tensor_parallel_float8_trains_as_with_fsdp2, 4)
