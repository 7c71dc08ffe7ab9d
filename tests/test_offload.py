"""``offload_policy=CPUOffloadPolicy()``: copies in the printed graphs, and numbers on two ranks. There is no
accelerator here: copies go from the CPU to the CPU, or stand in graphs of fake CUDA tensors that are not run."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from facts import Facts
from models import MLP, UnevenBlock
from printed import bucket_table, calls, sequence, stage_text
from reference import check_equal, fsdp2
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report.report import GraphReport

OFFLOADED = CPUOffloadPolicy()
FACTS = Facts(__name__)
aten = torch.ops.aten


def report_of(model: nn.Module | None = None, **options: Any) -> GraphReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = graph_fsdp.compile(model or MLP(), backend="eager", offload_policy=OFFLOADED, **options)
    model(torch.randn(4, 16)).float().sum().backward()
    return graph_fsdp.inspect(model)


# Graphs


@pytest.mark.usefixtures("fake_group")
def test_each_gather_reads_a_copy_and_each_gradient_is_copied() -> None:
    report = report_of(MLP(depth=1))
    assert_expected_inline(sequence(report.forward), """fetch_root fetched_root gather_root full_root""")
    assert_expected_inline(
        sequence(report.backward), """free_root reduce_root reduced_root offload_root offloaded_root"""
    )
    assert_expected_inline(
        "\n".join(stage_text(report.backward).splitlines()[-4:]),
        """\
offload_root = offload_start([reduced_root], pin_memory=False)
offloaded_root = offload_wait(offload_root)
return blocks.0.up.{weight.grad, bias.grad}, ..., blocks.0.down.{weight.grad, bias.grad}, head.{weight.grad,
    bias.grad}""",
    )


@pytest.mark.usefixtures("fake_group")
def test_fetches_start_behind_the_gathers_before_them() -> None:
    report = report_of(reshard_after_forward=True)
    assert_expected_inline(
        sequence(report.forward, "addmm"),
        """\
fetch_blocks_0 fetched_blocks_0 gather_blocks_0 fetch_blocks_1 full_blocks_0 fetched_blocks_1 gather_blocks_1
fetch_root [addmm addmm] free_blocks_0 full_blocks_1 fetched_root gather_root [addmm addmm] free_blocks_1 full_root
[addmm] free_root""",
    )
    assert_expected_inline(
        sequence(report.backward, "mm"),
        """\
fetch_root fetched_root gather_root fetch_blocks_1 full_root fetched_blocks_1 gather_blocks_1 fetch_blocks_0 [mm
mm] free_root reduce_root full_blocks_1 fetched_blocks_0 gather_blocks_0 [mm mm mm mm] free_blocks_1
reduce_blocks_1 full_blocks_0 [mm mm mm] free_blocks_0 reduced_root offload_root reduce_blocks_0 reduced_blocks_1
offload_blocks_1 reduced_blocks_0 offload_blocks_0 offloaded_root offloaded_blocks_1 offloaded_blocks_0""",
    )
    assert_expected_inline(
        bucket_table(report.backward),
        """\
root fetch 2 128
root gather 2 1,024
blocks.1 fetch 4 640
blocks.1 gather 4 5,120
blocks.0 fetch 4 640
root reduce 2 68
blocks.0 gather 4 5,120
blocks.1 reduce 4 536
root offload 2 68
blocks.0 reduce 4 536
blocks.1 offload 4 536
blocks.0 offload 4 536""",
    )


@pytest.mark.usefixtures("fake_group")
def test_casts_run_on_the_device() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    report = report_of(nn.Sequential(nn.Linear(16, 8)), mp_policy=policy)
    operators = ("reduce_scatter_start", "reduce_wait", "convert_element_type", "offload_start")
    assert_expected_inline(
        calls(report.backward, *operators),
        """\
reduce_root = reduce_scatter_start([0.{weight: mm, bias: sum}], bfloat16, world_size=8)
reduced_root = reduce_wait(reduce_root)
convert_element_type(reduced_root, float32)
offload_root = offload_start([convert_element_type], pin_memory=False)""",
    )


@pytest.mark.usefixtures("fake_group")
def test_scalars_are_fetched_without_a_gather() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(UnevenBlock(16))
    report = report_of(model)
    assert_expected_inline(
        sequence(report.forward),
        """fetch_root fetched_root gather_root fetch_root_scalars full_root fetched_root_scalars""",
    )
    assert_expected_inline(
        sequence(report.backward),
        """\
fetch_root_scalars fetched_root_scalars reduce_root_scalars free_root reduce_root reduced_root_scalars
offload_root_scalars reduced_root offload_root offloaded_root_scalars offloaded_root""",
    )


def test_one_process_fetches_and_gathers_nothing() -> None:
    report = report_of(MLP(depth=1))
    assert_expected_inline(sequence(report.forward), """fetch_root fetched_root""")
    assert_expected_inline(
        sequence(report.backward),
        """fetch_root fetched_root offload_root offloaded_root""",
    )


# Numbers


def train(model: nn.Module, steps: int = 2, accumulate: int = 1) -> dict[str, Tensor]:
    """Parameters whole, and each norm that gradients were clipped from."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = {}
    for step in range(steps):
        for _ in range(accumulate):
            model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found[f"norm{step}"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
    for state in optimizer.state.values():
        assert state["exp_avg"].device.type == "cpu"
    return {**found, **{name: p.detach().full_tensor() for name, p in model.named_parameters()}}


def compiled(model: nn.Module | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return graph_fsdp.compile(model or MLP(), backend="eager", **options)


def of_fsdp2(policy: OffloadPolicy, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fsdp2(MLP(), offload_policy=policy, **options)


@functools.cache
def trained() -> dict[str, Tensor]:
    """On this rank, by FSDP2 and with nothing on the CPU but what is there."""
    return train(of_fsdp2(OffloadPolicy()))


@FACTS
def training_is_fsdp2s_bit_for_bit_with_and_without_offload() -> None:
    found = train(compiled(offload_policy=OFFLOADED))
    check_equal(found, train(of_fsdp2(CPUOffloadPolicy(pin_memory=False))))
    check_equal(found, trained())


@FACTS
def so_it_is_in_bfloat16_and_with_gradients_accumulated() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = train(compiled(offload_policy=OFFLOADED, mp_policy=policy), accumulate=2)
    check_equal(found, train(of_fsdp2(CPUOffloadPolicy(pin_memory=False), mp_policy=policy), accumulate=2))


@FACTS
def options_of_the_schedule_change_no_number() -> None:
    """What is copied is counted: of each of two steps, the fetches of two phases."""
    options: tuple[dict[str, Any], ...] = (
        {"reshard_after_forward": True, "passes": default_pipeline(prefetch=3, reductions_in_flight=4)},
        {"reshard_after_forward": False, "passes": default_pipeline(prefetch=0, bucket="none")},
    )
    models = [compiled(offload_policy=OFFLOADED, **each) for each in options]
    for model in models:
        torch._dynamo.reset()
        check_equal(train(model), trained())
    counted = graph_fsdp.inspect(models[0]).collectives
    assert counted == {"fetch": 12, "all_gather": 12, "reduce": 6, "offload": 6}, counted


@FACTS
def what_is_not_sharded_is_copied_too() -> None:
    found = []
    for replicated, options in (
        (False, {}),
        (False, {"offload_policy": OFFLOADED}),
        (True, {"offload_policy": OFFLOADED}),
    ):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate" if replicated else "shard",))
        torch.manual_seed(0)
        found.append(train(compiled(UnevenBlock(16), mesh=mesh, **options)))
    check_equal(found[1], found[0])
    for name, value in found[0].items():  # norms are summed over shards, or not
        torch.testing.assert_close(found[2][name], value, rtol=1e-5, atol=1e-6, msg=name)


@FACTS
def gradients_are_dtensors_and_one_step_leaves_no_trace_in_the_next() -> None:
    model = compiled(MLP(depth=1), offload_policy=OFFLOADED)
    x = torch.randn(4, 16)
    model(x).sum().backward()
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    model(x).sum().backward()
    for name, p in model.named_parameters():
        assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements
        assert torch.equal(p.grad.full_tensor(), 2 * first[name].full_tensor()), name


@FACTS
def state_dicts_go_out_and_in_and_a_printed_stage_runs() -> None:
    model, options = compiled(MLP(depth=1), offload_policy=OFFLOADED), StateDictOptions(full_state_dict=True)
    state = {name: 2 * p for name, p in get_model_state_dict(model, options=options).items()}
    expected = MLP(depth=1)
    with torch.no_grad():
        x, before = torch.randn(4, 16), model(torch.ones(4, 16))
        set_model_state_dict(model, dict(state), options=options)
        expected.load_state_dict(state)
        assert not torch.equal(model(torch.ones(4, 16)), before)
        found = model(x)
    torch.testing.assert_close(found, expected(x).detach(), rtol=1e-6, atol=1e-6, msg="copies are of what was loaded")
    inference = graph_fsdp.inspect(model).inference
    by_name = dict(model.named_parameters())
    records = [n.meta.get("fsdp") for n in inference.graph.placeholders]
    inputs = [by_name[r.params[0]].to_local().detach() if r is not None else x for r in records]
    namespace: dict[str, Any] = {}
    exec(inference.stages["free"].code, namespace)
    assert torch.equal(namespace["forward"](*inputs)[0], found)


@FACTS
def values_of_the_first_rank_and_of_meta_models_arrive() -> None:
    torch.manual_seed(dist.get_rank())
    model = MLP(depth=1)
    graph_fsdp.compile(model, backend="eager", offload_policy=OFFLOADED, sync_module_states=True)
    torch.manual_seed(0)
    expected = MLP(depth=1)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
    with torch.device("meta"):
        meta = MLP(depth=1)
    x = torch.randn(4, 16)
    assert compiled(meta, offload_policy=OFFLOADED)(x).isfinite().all()


test_on_two_ranks = FACTS.on(2)


# The option itself


@pytest.mark.usefixtures("fake_group")
def test_offloading_to_where_the_model_computes_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="saves no memory. Nothing is pinned"):
        graph_fsdp.compile(MLP(), backend="eager", offload_policy=OFFLOADED)


@pytest.mark.usefixtures("fake_group")
def test_policies_that_cannot_be() -> None:
    class Mine(CPUOffloadPolicy):
        pass

    model = MLP()
    for policy, error, words in (
        (True, TypeError, "offload_policy must be .* got True"),
        (Mine(), UnsupportedError, "offload_policy is a Mine"),
    ):
        with pytest.raises(error, match=words):
            graph_fsdp.compile(model, backend="eager", offload_policy=policy)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="regions='whole' leaves no place"):
        graph_fsdp.compile(model, regions="whole", offload_policy=OFFLOADED)
    assert type(model) is MLP
