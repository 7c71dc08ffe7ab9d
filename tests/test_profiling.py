"""Profiles: what is timed, what it leaves as it was, and that the cost model and the schedule take it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import fake_process_group
from expecttest import assert_expected_inline
from models import CASES, CNN, GPT, MLP
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp
from graph_fsdp.passes import default_pipeline

pytestmark = pytest.mark.usefixtures("fake_group")

BATCH = torch.zeros(4, 16)


def compiled(model: nn.Module | None = None, backend: str = "eager", **options: Any) -> nn.Module:
    return graph_fsdp.compile(model or MLP(), backend=backend, passes=default_pipeline(**options))


def profile(model: nn.Module, *batch: Any, **kwargs: Any) -> graph_fsdp.Profile:
    return graph_fsdp.profile(model, *(batch or (BATCH,)), steps=2, warmup=1, **kwargs)


def without_times(table: str) -> str:
    """Widths of columns are of the times too."""
    return re.sub(r" +", " ", re.sub(r"\d+\.\d\d+", "t", table))


@pytest.fixture(scope="module")
def timed() -> tuple[graph_fsdp.Profile, graph_fsdp.GraphReport]:
    """Of one model, for tests that only look."""
    with fake_process_group():
        model = compiled()
        return profile(model), graph_fsdp.inspect(model)


# What is timed


def test_regions_and_collectives_of_forward_and_backward_are_rows_of_a_table(
    timed: tuple[graph_fsdp.Profile, graph_fsdp.GraphReport],
) -> None:
    table = without_times(str(timed[0]))
    assert_expected_inline(
        table,
        """\
graph_fsdp profile: 2 steps on 8 ranks, predicted for cpu; milliseconds
 predicted measured ratio
 compute t t t
 collectives t t t
 exposed t t t
 step t t t

 predicted measured ratio
 graph 0, forward t t t
 region unit first node predicted measured ratio slowest rank
 region_3 blocks.0 addmm t t t t 0
 region_7 blocks.1 addmm_2 t t t t 0
 region_10 root addmm_4 t t t t 0
 collective bucket bytes predicted measured ratio exposed: predicted measured
 gather blocks.0 5,120 t t t t t
 gather blocks.1 5,120 t t t t t
 gather root 1,024 t t t t t

 predicted measured ratio
 graph 0, backward t t t
 region unit first node predicted measured ratio slowest rank
 region_1 root mm t t t t 0
 region_6 blocks.1 mm_2 t t t t 0
 region_10 blocks.0 mm_6 t t t t 0
 collective bucket bytes predicted measured ratio exposed: predicted measured
 gather blocks.1 5,120 t t t t t
 reduce root 68 t t t t t
 gather blocks.0 5,120 t t t t t
 reduce blocks.1 536 t t t t t
 reduce blocks.0 536 t t t t t""",
    )


def test_rows_name_the_regions_of_the_printed_program_and_the_buckets_of_the_report(
    timed: tuple[graph_fsdp.Profile, graph_fsdp.GraphReport],
) -> None:
    found, report = timed
    for phase, view in (("forward", report.forward), ("backward", report.backward)):
        for region in (row for row in found.regions if row.phase == phase):
            assert f"region_{region.region}(inputs)" in view.program
        rows = [(row.kind, row.bucket, row.nbytes) for row in found.collectives if row.phase == phase]
        started = sorted((row for row in view.buckets if row.start is not None), key=lambda row: row.start)
        assert rows == [(row.kind, row.name, row.nbytes) for row in started]


def test_times_are_positive_and_add_up_to_the_totals(timed: tuple[graph_fsdp.Profile, graph_fsdp.GraphReport]) -> None:
    found, _ = timed
    assert all(row.seconds > 0 for row in [*found.regions, *found.collectives])
    assert found.compute_seconds == sum(row.seconds for row in found.regions)
    assert found.collective_seconds == sum(row.seconds for row in found.collectives)
    assert found.predicted_compute_seconds > 0 and found.predicted_collective_seconds > 0


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_without_training_the_inference_graph_is_timed_alone(how: str) -> None:
    model = compiled()
    if how == "eval":
        found = profile(model.eval())
    else:
        with getattr(torch, how)():
            found = profile(model)
    assert {row.phase for row in found.regions} == {"inference"}
    assert {row.kind for row in found.collectives} == {"gather"}


@dataclass
class Result:
    values: list[Tensor]


class Holder:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Outputs(nn.Module):
    """Returns its result in one of many ways."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(16, 16), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.linear(x))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y,
        lambda y: {"loss": y.mean(), "n": 1},
        lambda y: (y.argmax(), [y, y.half()]),
        lambda y: Result([y]),
        Holder,
        lambda y: torch.complex(y, y),
    ],
    ids=["tensor", "dict", "tuple", "dataclass", "object", "complex"],
)
def test_backward_runs_from_whatever_the_model_returns(wrap: Any) -> None:
    found = profile(compiled(Outputs(wrap)))
    assert {row.phase for row in found.regions} == {"forward", "backward"}


def test_of_an_output_with_a_loss_the_loss_alone_is_differentiated() -> None:
    model, differentiated = compiled(), []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
        outputs = {"loss": output.mean(), "logits": output * 2}
        for name, value in outputs.items():
            value.register_hook(lambda _, name=name: differentiated.append(name))
        return SimpleNamespace(**outputs)

    model.register_forward_hook(hook)
    graph_fsdp.profile(model, BATCH, steps=1, warmup=1)
    assert differentiated == ["loss"] * 3, "to warm up, and for a step of each kind"


def test_a_frozen_model_has_no_backward() -> None:
    found = profile(compiled(MLP().requires_grad_(False)))
    assert {row.kind for row in found.collectives} == {"gather"}


def test_one_process_has_regions_and_no_collectives() -> None:
    dist.destroy_process_group()
    try:
        found = profile(compiled())
    finally:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=8)
    assert found.ranks == 1 and found.regions and not found.collectives
    assert found.measurements.collectives == {}


def test_reductions_over_replicas_are_timed_by_themselves() -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    found = profile(graph_fsdp.compile(MLP(), mesh, backend="eager"))
    kinds = [row.kind for row in found.collectives]
    assert kinds.count("reduce") == kinds.count("replicate") == 3
    assert any(key.startswith("graph_fsdp.all_reduce_shard_start") for key in found.measurements.collectives)


def test_a_model_whose_graph_breaks_is_timed_in_all_its_pieces() -> None:
    class Broken(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            torch._dynamo.graph_break()
            return self.head(self.blocks[1](x))

    model = graph_fsdp.compile(Broken(), backend="eager", fullgraph=False)
    assert {row.graph for row in profile(model).regions} == {0, 1}


def test_the_graphs_that_the_batch_runs_are_timed_and_no_others() -> None:
    model = graph_fsdp.compile(MLP(), backend="eager", dynamic=False)
    model(torch.zeros(8, 16)).sum().backward()
    assert {row.graph for row in profile(model).regions} == {1}


@pytest.mark.long
def test_what_inductor_compiled_is_timed() -> None:
    found = profile(compiled(MLP(depth=1), backend="inductor"))
    assert {row.phase for row in found.regions} == {"forward", "backward"}
    assert found.measurements.compute and all("mm" in key for key in found.measurements.compute), "the rest is fused"


# What it leaves as it was


def state(model: nn.Module) -> list[Tensor]:
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return [*(t.detach().clone() for t in local), torch.get_rng_state()]


@pytest.mark.parametrize("trained", [True, False], ids=["trained before", "never called"])
def test_parameters_gradients_buffers_and_random_numbers_stay(trained: bool) -> None:
    case = CASES["cnn_batchnorm"]
    model = compiled(nn.Sequential(case.model(), nn.Dropout(0.5)))
    x = case.batch(4, 0)["x"]
    if trained:
        model(x).sum().backward()
    before, objects = state(model), list(model.buffers())
    profile(model, x)
    assert len(before) == len(state(model)), "gradients appeared"
    assert all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))
    assert all(a is b for a, b in zip(objects, model.buffers(), strict=True))


def test_buffers_and_random_numbers_stay_when_the_model_raises() -> None:
    model = compiled(CNN())
    x = CASES["cnn_batchnorm"].batch(4, 0)["x"]
    model(x)
    before = state(model)
    calls: list[int] = []

    def fail_at_third(*_: Any) -> None:
        torch.rand(1)
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("third")

    hook = model.register_forward_hook(fail_at_third)
    with pytest.raises(KeyError, match="third"):
        graph_fsdp.profile(model, x, steps=5, warmup=1)
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))
    counted = graph_fsdp.inspect(model).collectives["all_gather"]
    model(x)
    assert graph_fsdp.inspect(model).collectives["all_gather"] > counted, "or it would run timed for ever"


def test_no_gradient_is_accumulated_so_optimizers_in_backward_do_not_step() -> None:
    model, stepped = compiled(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(stepped.append)
    x = torch.zeros(4, 16, requires_grad=True)
    profile(model, x)
    assert not stepped and x.grad is None


def test_the_reports_counts_are_those_of_training() -> None:
    model = compiled()
    model(BATCH).sum().backward()
    before = graph_fsdp.inspect(model)
    graph_fsdp.profile(model, BATCH, steps=7, warmup=1)
    after = graph_fsdp.inspect(model)
    assert after.collectives == {kind: 2 * count for kind, count in before.collectives.items()}, "one call to warm up"
    assert after.peak_gathered_bytes == before.peak_gathered_bytes


def test_a_profiled_model_computes_what_it_computed_before() -> None:
    model = compiled(GPT(dropout=0.2))
    x = CASES["gpt"].batch(4, 0)["x"]
    outputs: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    for _ in range(2):
        torch.manual_seed(3)
        profile(model, x)
    torch.manual_seed(3)
    calls = 5  # one to warm up, two timed by themselves, two as in training
    for _ in range(calls):
        model(x)
    hook.remove()
    assert len(outputs) == 3 * calls and not torch.equal(outputs[0], outputs[1]), "dropout"
    for normal, *timed in zip(outputs[2 * calls :], outputs[:calls], outputs[calls : 2 * calls], strict=True):
        assert all(torch.equal(normal, output) for output in timed)


# Keeping it


def test_a_profile_that_was_saved_is_the_same_when_loaded(
    timed: tuple[graph_fsdp.Profile, graph_fsdp.GraphReport], tmp_path: Path
) -> None:
    found, _ = timed
    found.save(tmp_path / "profile.json")
    loaded = graph_fsdp.Profile.load(str(tmp_path / "profile.json"))
    assert loaded == found and str(loaded) == str(found)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "graph_fsdp.Profile"}'])
def test_another_file_is_no_profile(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"path: '.*other.json' is not a saved profile"):
        graph_fsdp.Profile.load(tmp_path / "other.json")


# Wrong calls


def test_a_model_that_was_not_compiled_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model: MLP was not compiled by graph_fsdp; call graph_fsdp.compile first"):
        graph_fsdp.profile(MLP(), BATCH)


@pytest.mark.parametrize("name", ["steps", "warmup"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_less_than_one_call_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a whole number of calls, 1 or more, got {value}"):
        graph_fsdp.profile(compiled(), BATCH, **{name: value})


def test_a_batch_that_does_not_fit_is_the_forwards_own_error() -> None:
    model = compiled()
    with pytest.raises(TypeError, match=r"MLP\.forward\(\):? missing .*argument: 'x'"):
        graph_fsdp.profile(model)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        graph_fsdp.profile(model, BATCH, y=1)
    model(BATCH)


@pytest.mark.parametrize("measured", [{}, "profile.json", SimpleNamespace(measurements=1)])
def test_a_pipeline_takes_nothing_else_for_measurements(measured: Any) -> None:
    with pytest.raises(TypeError, match=r"measured must be what graph_fsdp\.profile returned"):
        default_pipeline(measured=measured)
