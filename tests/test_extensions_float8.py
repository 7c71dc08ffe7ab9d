"""Extensions that find a scale together, as torchao's float8 weights do: an all-reduce in the graph, FSDP2's bits."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from facts import Facts, Failures, check
from test_extensions import Float8, Wrapped, extended, train
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report import engine_of

FACTS = Facts(__name__)
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@pytest.fixture(scope="module")
def ranks() -> Failures:
    return FACTS.check_on(2)


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


class MakesWrapped(Float8):
    """The gathered parameter is a tensor subclass too."""

    def restore(self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype) -> Tensor:
        return Wrapped(super().restore(outputs, metadata, dtype))


@pytest.mark.usefixtures("fake_group")
def test_the_scales_of_all_parameters_are_one_all_reduce_in_front_of_all_gathers() -> None:
    model = graph_fsdp.compile(extended(Scaled), backend="eager", reshard_after_forward=True)
    model(torch.randn(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    lines = report.forward.stages["free"].body.splitlines()
    calls = ("abs.", "max.", "reduce_payloads.", "all_gather_start.", "float8", "return")
    assert_expected_inline(
        "\n".join(line.strip() for line in lines[:24] if any(call in line for call in calls)),
        """\
abs_1 = torch.ops.aten.abs.default(primals_1)
max_1 = torch.ops.aten.max.default(abs_1)
abs_2 = torch.ops.aten.abs.default(primals_4)
max_2 = torch.ops.aten.max.default(abs_2)
abs_3 = torch.ops.aten.abs.default(primals_6)
max_3 = torch.ops.aten.max.default(abs_3)
abs_4 = torch.ops.aten.abs.default(primals_8)
max_4 = torch.ops.aten.max.default(abs_4)
reduced_payloads = torch.ops.graph_fsdp.reduce_payloads.default([max_1, max_2, max_3, max_4], 'max', '0')
_to_copy = torch.ops.aten._to_copy.default(div_1, dtype = torch.float8_e4m3fn)
_to_copy_2 = torch.ops.aten._to_copy.default(div_3, dtype = torch.float8_e4m3fn)
gather_blocks_0_payload = torch.ops.graph_fsdp.all_gather_start.default([_to_copy, _to_copy_2], [0, 64], 128, torch.float8_e4m3fn, 8, '0')""",
    )
    assert "reduce_payloads.default" not in report.backward.stages["free"].body, "backward has forward's scales"
    assert sum("all_gather_start" in line for line in report.backward.stages["free"].body.splitlines()) > 1


@pytest.mark.usefixtures("fake_group")
def test_ranks_agree_on_the_all_reduce() -> None:
    model = graph_fsdp.compile(extended(Scaled), backend="eager")
    with torch.no_grad():
        model(torch.randn(4, 16))
    (fingerprint,) = engine_of(model).schedules._agreed
    assert fingerprint[0].startswith("inference payload_reduce payloads 16 bytes torch.float32")


@FACTS
def a_scale_of_all_ranks_trains_as_with_fsdp2() -> None:
    theirs = extended(Scaled)
    for block in theirs.blocks:
        fully_shard(block)
    expected = train(fully_shard(theirs))
    for options in (
        {},
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"passes": default_pipeline(bucket="none")},
    ):
        torch._dynamo.reset()
        model = graph_fsdp.compile(extended(Scaled), **{"backend": "eager", **options})
        found = train(model)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (options, name)
        assert engine_of(model).counter.collectives["payload_reduce"] == 3, "one for each forward, none in backward"


@FACTS
def a_gathered_parameter_may_be_a_subclass() -> None:
    found = train(graph_fsdp.compile(extended(MakesWrapped), backend="eager"))
    torch._dynamo.reset()
    expected = train(graph_fsdp.compile(extended(Float8), backend="eager"))
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


def losses_and_parameters(model: nn.Module, precompute: bool = False, steps: int = 3) -> list[Tensor]:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
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


@FACTS
def torchaos_float8_trains_as_with_fsdp2() -> None:
    if importlib.util.find_spec("torchao") is None:
        return
    for emulate in (False, True):
        expected = of_fsdp2(emulate)
        for options in ({}, {"reshard_after_forward": True, "auto_wrap_policy": {nn.Linear}}):
            torch._dynamo.reset()
            model = graph_fsdp.compile(converted(emulate), **{"backend": "eager", **options})
            found = losses_and_parameters(model)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected)), (emulate, options)
            counts = engine_of(model).counter.collectives
            assert counts["payload_reduce"] == 3


@FACTS
def scales_that_torchao_precomputes_are_those_of_the_graph() -> None:
    if importlib.util.find_spec("torchao") is None:
        return
    model = graph_fsdp.compile(converted(emulate=True), backend="eager")
    assert all(map(torch.equal, losses_and_parameters(model, precompute=True), of_fsdp2(True, precompute=True)))


@FACTS
def rows_that_do_not_divide_by_the_ranks() -> None:
    if importlib.util.find_spec("torchao") is None:
        return
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
        report.forward.table(),
        """\
  bucket        kind    params  bytes  start  wait  first use  free
  root#payload  gather       2  4,096     30    31         33  kept
  root#1        gather       2  1,024     32    51         52  kept""",
    )


@pytest.mark.parametrize("name", FACTS.names)
def test_on_two_ranks(ranks: Failures, name: str) -> None:
    if "torchao" in name or "rows" in name:
        pytest.importorskip("torchao")
    check(ranks, name)
