"""What is different on devices, as far as a CPU shows it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated_group import simulated_group
from simulated_link import INSTANT
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._inductor import codecache, compile_fx, config
from torch._inductor.codegen.common import get_device_op_overrides
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.triton_bundler import TritonBundle, TritonKernelArtifacts
from torch._inductor.utils import BoxedBool
from torch._subclasses import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from graph_fsdp import compat
from graph_fsdp.compat.inductor.devices import shared_by_devices
from graph_fsdp.parameters.inputs import on_device

CUDA = torch.device("cuda:0")
on_the_cpu = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="fake tensors of a GPU's index need that GPU where there is one"
)


@dataclasses.dataclass
class Given:
    packed: PackedSequence


def test_arguments_are_copied_to_a_device() -> None:
    device, x = torch.device("meta"), torch.ones(2)
    there = {"x": torch.ones(2, device=device)}
    (moved, number, own), packed = on_device(([x, {"x": x}], 3, there), device), pack_sequence([x, x])
    assert number == 3 and {moved[0].device, moved[1]["x"].device} == {device} and x.device.type == "cpu"
    assert own is there, "it may be a cache that the model writes to"
    found = on_device(Given(packed), device).packed
    assert (found.data.device, found.batch_sizes.device.type, packed.data.device.type) == (device, "cpu", "cpu")


def test_gloo_launches_no_groups_of_collectives(fake_group: dist.ProcessGroup) -> None:
    assert compat.launches_groups(fake_group, CUDA)
    assert not compat.launches_groups(fake_group, torch.device("cpu"))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    assert not compat.launches_groups(dist.group.WORLD, CUDA)


def test_groups_of_members_are_named_alike_by_a_process_that_takes_anothers_place() -> None:
    names: list[list[str]] = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        names.append([compat.group_of_members([0]).group_name for _ in range(2)])
        dist.destroy_process_group()
    assert names[0] == names[1] and names[0][0] != names[0][1]


def test_a_group_of_collectives_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.distributed, "launches_groups", lambda group, device: True)
    full, parts = ([torch.full((n,), 2.0) for _ in range(3)] for n in (4, 2))
    with simulated_group(2, INSTANT) as group:
        group.trace = []
        (work,) = compat.grouped(list(zip(full, parts, strict=True)), group)
        work.wait()
        mean = {"async_op": False, "op": dist.ReduceOp.AVG}
        assert not compat.grouped(list(zip(parts, full, strict=True)), group, compat.reduce_scatter_single, **mean)
        assert [launch.kinds for launch in group.trace] == [("all_gather",) * 3, ("reduce_scatter",) * 3]
    assert all(torch.equal(value, torch.full_like(value, 2.0)) for value in (*full, *parts))


def test_inductor_makes_no_cuda_graphs_of_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        compile_fx, "compile_fx_inner", lambda *args, cudagraphs=None, **kwargs: given.append(cudagraphs)
    )
    graph = fx.Graph()
    value = graph.placeholder("x")
    value.meta["val"] = torch.empty(1)
    graph.output((value,))
    with tracing(TracingContext(FakeTensorMode())), config.patch({"triton.cudagraphs": True}):
        compat.inductor_compile(fx.GraphModule({}, graph), "inference")
    assert [made.value for made in given] == [False], "None is the setting"


# Ranks of a host share what Inductor compiles


def sum_with_ones(device: str, constant: str = "") -> tuple[fx.GraphModule, list[Tensor]]:
    """A graph with an input, and with ones that are made on the same device, or a constant of another."""
    device_of = torch.device(device)
    graph = fx.Graph()
    with FakeTensorMode():
        value = torch.empty(4, device=device)
    x = graph.placeholder("x")
    if constant:
        ones = graph.get_attr("ones")
    else:
        ones = graph.call_function(torch.ops.aten.full.default, ([4], 1.0), {"device": device_of})
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, ones))
    for node in (x, ones, total):
        node.meta["val"] = value
    graph.output((total,))
    root = torch.nn.Module()
    root.register_buffer("ones", torch.empty(4, device=constant) if constant else None)
    return fx.GraphModule(root, graph), [value]


def inductor_key(monkeypatch: pytest.MonkeyPatch, device: str, *, shared: bool = True, **given: Any) -> str:
    """Inductor's key for a graph on this device, which is the current one."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: torch.device(device).index)
    module, inputs = sum_with_ones(device, **given)
    with shared_by_devices(module) if shared else contextlib.nullcontext():
        key, _ = codecache.compiled_fx_graph_hash(module, inputs, {}, [])
    return str(key)


@on_the_cpu
def test_ranks_find_each_others_code_in_inductors_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    key = functools.partial(inductor_key, monkeypatch)
    assert key("cuda:0") == key("cuda:1") == key("cuda:3") != key("xpu:1")
    assert key("cuda:0", shared=False) != key("cuda:1", shared=False), "as torch has it"
    described = codecache.extract_tensor_metadata_for_cache_key
    for constant, current, shared in [("cpu", 1, True), ("meta", 1, False), ("", 0, False)]:
        monkeypatch.setattr(torch.accelerator, "current_device_index", functools.partial(int, current))
        with shared_by_devices(sum_with_ones("cuda:1", constant)[0]):
            assert (codecache.extract_tensor_metadata_for_cache_key is not described) == shared


@on_the_cpu
@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_code_of_another_rank_is_loaded_for_this_ones_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Inductor's own text of what names a device, for index 3, loaded on the rank with index 1."""
    ops = get_device_op_overrides(device)
    names = [ops.device_guard(3), ops.set_device(3), "get_raw_stream(3)", f"'{device}:3'", str(torch.device(device, 3))]
    kept = compiled_view()
    kept.source_code = f"""
from torch import device
from torch._inductor.runtime.hints import DeviceProperties
kernel = {DeviceProperties(device, 3, 132, 90)!r}
def call(args):
    return [kernel.index, {torch.device(device, 3)!r}, 13, *{names}]
"""
    kept.cache_key = codecache.code_hash(kept.source_code)
    kept.device_idxs.add(3)
    kept._triton_bundle = TritonBundle([TritonKernelArtifacts("abc", 3, [])], [None])  # type: ignore[list-item]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(codecache.TritonBundler, "read_and_emit", lambda bundle: emitted.append(bundle))
    emitted: list[TritonBundle] = []
    with shared_by_devices(sum_with_ones(f"{device}:1")[0]):
        loaded, _ = codecache.FxGraphCache.cache_hit_post_compile(kept, {}, CompiledFxGraphConstants())
    assert loaded is not None and loaded.current_callable is not None
    index, literal, number, *found = loaded.current_callable([])
    assert (index, literal, number) == (1, torch.device(device, 1), 13)
    assert found == [name.replace("3", "1") for name in names]
    assert set(loaded.device_idxs) == {1}
    assert emitted == [TritonBundle([TritonKernelArtifacts("abc", 1, [])], [])]


def compiled_view() -> CompiledFxGraph:
    """What Inductor makes of a graph without kernels."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode() as mode:
        x.meta["val"] = torch.empty(4)
        view = graph.call_function(torch.ops.aten.view.default, (x, [2, 2]))
        view.meta["val"] = x.meta["val"].view(2, 2)
    graph.output((view,))
    module = fx.GraphModule({}, graph)
    with tracing(TracingContext(mode)), config.patch({"force_disable_caches": True}):
        made = compile_fx.compile_fx_inner(module, [x.meta["val"]], cudagraphs=BoxedBool(False))
    assert isinstance(made, CompiledFxGraph)
    return made
