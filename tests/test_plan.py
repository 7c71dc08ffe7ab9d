"""``graph_fsdp.plan`` and ``graph-fsdp plan``: the figures are those of the graphs, and bad input is told."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT, MLP, VOCABULARY
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import graph_fsdp
from graph_fsdp.cli.main import main
from graph_fsdp.passes import HARDWARE, default_pipeline
from graph_fsdp.passes.analysis.simulate import simulate

X = torch.empty(4, 16, device="meta")


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


@functools.cache
def planned(**options: Any) -> graph_fsdp.Plan:
    """One plan for all tests that ask for the same."""
    arguments = {"mesh_shape": (8,), "hardware": "h100", **options}
    return graph_fsdp.plan(WithLoss, (X,), **arguments)


# Figures


def test_times_are_those_of_the_graphs() -> None:
    made = planned()
    graphs = [view.graph for view in (made.forward, made.backward)]
    timelines = [simulate(graph, graph.cost) for graph in graphs if graph is not None and graph.cost is not None]
    assert made.graph_seconds == {"forward": timelines[0].seconds, "backward": timelines[1].seconds}
    assert made.exposed_seconds == sum(timeline.exposed for timeline in timelines)
    h100 = HARDWARE["h100"]
    shards = sum(p.shard_numel * 4 for p in made.spec.parameters.values())
    assert made.optimizer_seconds == pytest.approx(7 * shards / (h100.memory_bandwidth * h100.memory_efficiency))
    assert made.step_seconds == pytest.approx(sum(t.seconds for t in timelines) + made.optimizer_seconds)
    assert made.forward.stages["bucket"].code and made.find("model.head.weight").events  # a report like any other


def test_copies_of_offloaded_activations_take_time(tmp_path: Path) -> None:
    x = torch.empty(4096, 16, device="meta")
    plain, made = (
        graph_fsdp.plan(WithLoss, (x,), mesh_shape=(8,), hardware="h100", activation_checkpointing=how)
        for how in (None, "offload")
    )
    made.save_trace(tmp_path / "trace.json")
    for view in (made.forward, made.backward):
        found = view.scheduled()
        copies = [event for event in found.timeline.events if event.group == "activations"]
        assert copies
        for event in copies:
            nbytes = event.node.meta["fsdp"].nbytes
            assert event.end - event.begin == pytest.approx(found.cost.transfer_seconds(nbytes)) and nbytes >= 4096 * 64
    assert made.step_seconds > plain.step_seconds
    assert "copies of activations" in (tmp_path / "trace.json").read_text()


def test_flops_are_those_of_the_model() -> None:
    """Two per multiplication and row in forward, three times in training, and no more with checkpointing."""
    products = 2 * (16 * 32 + 32 * 16) + 16 * 5
    assert planned().model_flops == planned(activation_checkpointing="unit").model_flops == 3 * 2 * 4 * products
    made = planned()
    assert made.mfu == pytest.approx(made.model_flops / made.step_seconds / HARDWARE["h100"].peak_flops(torch.float32))


def test_memory_has_the_optimizers_state() -> None:
    shards = sum(p.shard_numel * 4 for p in planned().spec.parameters.values())
    memories = {name: planned(optimizer=name).memory for name in ("adamw", "momentum", "sgd", None)}
    assert [m.get("optimizer", 0) for m in memories.values()] == [2 * shards, shards, 0, 0]
    made = planned(optimizer=None)
    assert made.peak_nbytes == max(view.memory.peak for view in (made.forward, made.backward) if view.memory)
    assert made.fits


def test_what_is_offloaded_is_not_on_the_device() -> None:
    """Graphs are traced on the CPU, where copies on the CPU would save nothing."""

    def of(hardware: str = "h100", **options: Any) -> graph_fsdp.Plan:
        rows = torch.empty(256, 16, device="meta")
        loss = {"loss": lambda out: out.square().mean()}
        return graph_fsdp.plan(lambda: MLP(depth=6), (rows,), mesh_shape=(8,), hardware=hardware, **loss, **options)

    plain = of()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*save")
        units, parameters = of(activation_checkpointing="offload"), of(offload_policy=CPUOffloadPolicy())
    assert units.peak_nbytes < plain.peak_nbytes and units.reserved.allocated < plain.reserved.allocated
    assert {"shards", "optimizer"} <= set(plain.memory) and not {"shards", "optimizer"} & set(parameters.memory)
    assert parameters.step().persistent == [0] and not parameters.step().states
    assert parameters.optimizer_seconds == 0
    with pytest.warns(UserWarning, match="the copies save nothing there"):
        here = of(hardware="cpu", activation_checkpointing="offload")
    assert here.memory["saved"] > units.memory.get("saved", 0)


def test_tokens_are_counted_per_rank() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.long, device="meta")
    made = graph_fsdp.plan(lambda: GPT(), (tokens,), mesh_shape=(8,), hardware="h100")
    assert made.tokens_per_second == pytest.approx(16 / made.step_seconds)
    assert made.summary()["rows_per_second"] == pytest.approx(2 / made.step_seconds)
    assert VOCABULARY and planned().tokens_per_second is None


def test_a_mesh_of_two_dimensions_replicates_over_the_first() -> None:
    made = planned(mesh_shape=(4, 2))
    assert made.backward.graph is not None
    assert [kind for kind, _ in made.backward.graph.collectives].count("replicate_start") == 3
    assert made.spec.mesh.world_size == 2 and made.spec.mesh.replicas == 4
    assert planned(mesh_shape=(1, 8)).forward.stages["free"].body == planned().forward.stages["free"].body


def test_hardware_changes_the_prediction() -> None:
    assert planned(hardware="a100").step_seconds > planned().step_seconds
    assert planned(passes=default_pipeline(prefetch=0)).exposed_seconds >= planned().exposed_seconds


def test_the_summary_tells_what_fits_from_what_is_reserved() -> None:
    plan = planned()
    assert plan.peak_nbytes < plan.reserved.nbytes
    for memory, says, waits in (
        (plan.reserved.nbytes, "fits in", False),
        (plan.reserved.nbytes - 1, "fits in", True),
        (plan.peak_nbytes - 1, "does not fit in", False),
    ):
        smaller = copy.copy(plan)
        smaller.hardware = dataclasses.replace(plan.hardware, memory=memory)
        text = str(smaller)
        assert f" GB, {says}" in text and ("more than there is" in text) == waits, text


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hardware": "h9000"}, ValueError, r"hardware: 'h9000' is not known; known are h100"),
        ({"mesh_shape": (2, 2, 2)}, ValueError, r"mesh_shape must be \(ranks that shard,\)"),
        ({"mesh_shape": (0,)}, ValueError, r"mesh_shape must be"),
        ({"mesh_shape": "8"}, ValueError, r"mesh_shape must be"),
        ({"optimizer": "lion"}, ValueError, r"optimizer: 'lion' is not known; known are"),
        ({"straggler": 0.5}, ValueError, r"straggler: says how many times slower .*, 1 or more, got 0.5"),
        ({"straggler": float("inf")}, ValueError, r"straggler: says how many times slower .*, 1 or more, got inf"),
        ({"contention": "no"}, TypeError, r"contention must be True or False, got 'no'"),
        ({"clip_gradients": 1.0}, TypeError, r"clip_gradients must be True or False, got 1.0"),
        ({"passes": [1]}, TypeError, r"passes must be a PassPipeline, got list"),
        ({"passes": default_pipeline(hardware="a100")}, ValueError, r"passes: the pipeline is for a100, and .* h100"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planned.__wrapped__(**options)


# On the command line


MODEL = """
import torch
from torch import nn

FACTOR = 2.0

class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * FACTOR

def model():
    return nn.Sequential(nn.Embedding(32, 16), Scaled(16, 8))

def model_and_inputs():
    return nn.Linear(16, 8), torch.zeros(4, 16)

def model_alone():
    return nn.Linear(16, 8)

def nothing():
    return None

def reads_values():
    layer = nn.Linear(4, 4)
    layer.largest = layer.weight.max().item()
    return layer
"""
CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(MODEL)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "other.json").write_text(json.dumps({**CONFIG, "model_type": "no_such_model"}))
    (tmp_path / "bert.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    (tmp_path / "t5.json").write_text(json.dumps({"model_type": "t5"}))
    (tmp_path / "not.json").write_text("{")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "syntax.py").write_text("def model(:")
    (tmp_path / "imports.py").write_text("import no_such_module")
    return tmp_path


@pytest.mark.parametrize("model", ["own.py:model", "own.py:model_and_inputs", "config.json"])
def test_the_command_prints_json(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    length = [] if model.endswith("inputs") else ["--seq", "16"]
    assert main(["plan", str(folder / model), "--mesh", "2x4", *length, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh_shape"] == [2, 4] and found["hardware"] == "h100" and found["fits"]
    assert found["tokens_per_second"] is None if model.endswith("inputs") else found["tokens_per_second"] > 0
    parameters = {"own.py:model": 32 * 16 + 16 * 8 + 8, "own.py:model_and_inputs": 16 * 8 + 8}
    assert found["parameters"] == parameters.get(model, 2 * (3072 + 3 * 64 * 32 + 2 * 32) + 2 * 64 * 32 + 32)


def test_the_command_prints_a_summary_and_writes_the_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = folder / "report.html", folder / "trace.json"
    assert main(["plan", f"{folder}/own.py:model", "--report", str(page), "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan: 648 parameters on a mesh of 8 h100") and "tokens/s per rank" in out
    assert "timeline" in page.read_text() and json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["own.py:model", "--hardware", "h9000"], "hardware: 'h9000' is not known; known are h100"),
        (["no.py:model"], "model: there is no file"),
        (["no.such.module:model"], "model: there is no module 'no.such.module'"),
        (["syntax.py:model"], "model: syntax.py cannot be imported (SyntaxError: "),
        (["imports.py:model"], "model: imports.py cannot be imported (ModuleNotFoundError: No module named "),
        (["own.py:no_function"], "has no function 'no_function'"),
        (["own.py:nothing"], "must return a module, or a module and its inputs"),
        (["no.json"], "model: there is no file"),
        (["own.py"], "model: own.py names no function that builds the model; give own.py:function"),
        (["own.py:"], "model: own.py: names no function that builds the model; give own.py:function"),
        (["not.json"], "is no JSON"),
        (["bytes.json"], "bytes.json is no JSON"),
        (["other.json"], "has model_type 'no_such_model', which transformers"),
        (["bert.json"], "bert.json is of BertForMaskedLM, which is no causal language model"),
        (["t5.json"], "t5.json is of t5, which is no causal language model"),
        (["own.py:reads_values"], "model: cannot be built on the meta device, where tensors have no values"),
        (["torch.nn:Linear"], "is called without arguments: Linear.__init__() missing 2 required positional arguments"),
        (["own.py:model", "--mesh", "12"], "mesh_shape: 12 does not divide into nodes of 8 h100"),
        (["own.py:model", "--mesh", "8x6"], "mesh_shape: 8x6 does not divide into nodes of 8 h100"),
        (["own.py:model", "--straggler", "0.5"], "straggler: says how many times slower the slowest rank computes"),
        (["own.py:model", "--memory", "80GB"], "--memory: says what a search must fit into; give --search too"),
        (["own.py:model", "--search", "--expandable-segments"], "--expandable-segments: is of one plan, and --search"),
        (["own.py:model", "--search", "--report", "a.html"], "--report: is of one plan, and --search makes several"),
        (["own.py:model_and_inputs", "--seq", "16"], "--seq: own.py:model_and_inputs returns inputs of its own"),
        (["own.py:model_and_inputs", "--batch", "2"], "--batch: own.py:model_and_inputs returns inputs of its own"),
        (["own.py:model_alone"], "own.py:model_alone returns no inputs, and its forward fails on tokens, [1, 4096]"),
        (["own.py:model", "--report", "no/such/folder.html"], "path: cannot be written"),
        (["no.py:model", "--report", "report.txt"], "'report.txt' ends in neither"),
    ],
)
def test_bad_commands(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(folder)
    assert main(["plan", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--mesh", "8by8", "'8by8' is no mesh: give a number of ranks, or REPLICASxSHARDS"),
        ("--memory", "80 gallons", "'80 gallons' is no size: give bytes, or as 500MB"),
        ("--seq", "0", "'0' is no count: give a whole number, 1 or more"),
    ],
)
def test_options_that_are_none(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "own.py:model", option, value])
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_the_command_searches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", f"{folder}/own.py:model", "--mesh", "8", "--seq", "16", "--search", "--memory", "80GB"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"] == 80 * 10**9 and len(found["candidates"]) + len(found["refused"]) == 3 * 2 * 3
    assert found["best"] in found["front"]


def test_conditions_and_what_the_optimizer_does_lengthen_the_step() -> None:
    plain = planned()
    assert planned(straggler=1.5).optimizer_seconds == pytest.approx(1.5 * plain.optimizer_seconds)
    assert planned(straggler=1.5).step_seconds > plain.step_seconds
    assert planned(optimizer="adamw_foreach").optimizer_seconds == pytest.approx(20 / 7 * plain.optimizer_seconds)
    on_cpu = planned(optimizer="adamw_on_cpu")
    trained = plain.memory["optimizer"] / 2
    assert on_cpu.optimizer_seconds == pytest.approx(2 * trained / plain.hardware.host.bandwidth)
    assert on_cpu.peak_nbytes == plain.peak_nbytes - plain.memory["optimizer"]
    assert planned(clip_gradients=True).optimizer_seconds == pytest.approx(10 / 7 * plain.optimizer_seconds)
    made = planned(contention=True)
    assert made.summary()["conditions"] == {"straggler": 1.0, "contention": True}
    assert "with contention" in str(made) and made.backward.timeline is not plain.backward.timeline
