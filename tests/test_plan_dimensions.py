"""Plans of pipelines, tensor, context and expert parallelism: times and bytes are those of the stages' programs."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import graph_fsdp
from graph_fsdp import MeshError, UnsupportedError
from graph_fsdp.cli.main import main
from graph_fsdp.passes import HARDWARE, CostModel, GroupShape
from graph_fsdp.passes.analysis.simulate import simulate
from graph_fsdp.passes.ir import dialect
from graph_fsdp.planning import Dimensions, PipelinePlan, plan_pipeline
from graph_fsdp.planning.causal_lm import CausalLM
from graph_fsdp.planning.search import neighbours, search_pipelines
from graph_fsdp.planning.stages import pipeline_orders, schedule_ends

H100 = HARDWARE["h100"]
LLAMA = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 8, "first_k_dense_replace": 1, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
LENGTH = 32
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def model_on(dimensions: Dimensions, fields: dict[str, Any] = LLAMA, length: int = LENGTH) -> CausalLM:
    config = CONFIG_MAPPING[str(fields["model_type"])].from_dict({**fields, "use_cache": False})
    return CausalLM(config, dimensions, 1, length)


@functools.cache
def planned(mesh: str, model: str = "llama", **options: Any) -> PipelinePlan:
    """One plan for all tests that ask for the same. ``mesh``: as on the command line."""
    dimensions = Dimensions.of({name: int(size) for name, size in (part.split("=") for part in mesh.split(","))})
    divided = model_on(dimensions, LLAMA if model == "llama" else DEEPSEEK)
    return plan_pipeline(
        divided.stage,
        mesh_shape=dimensions,
        hardware="h100",
        parallelize=divided.parallelize,
        mp_policy=MIXED,
        **{"microbatches": 4, **options},
    )


def collectives(plan: graph_fsdp.Plan, phase: str) -> Counter[str]:
    graph = plan.traced.graphs[phase]  # type: ignore[index]
    of_model = [n for n in graph.nodes if dialect.is_model_collective(n)]
    return Counter(str(n.target).split(".")[-2] for n in [*of_model, *graph.starts])


# Schedules


def ends_of(schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1, send: float = 0.0) -> float:
    """The end of a step whose stages take 1 second for a forward and 2 for a backward, over the stages of a rank."""
    orders, count = pipeline_orders(schedule, ranks, microbatches, stages_per_rank), ranks * stages_per_rank
    of = {"F": 1 / stages_per_rank, "B": 2 / stages_per_rank, "G": 0.0, "R": 0.0}
    seconds = {(stage, kind): taken for stage in range(count) for kind, taken in of.items()}
    return max(schedule_ends(orders, seconds, dict.fromkeys(range(1, count), send)).values())


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (4, 8), (16, 32)])
def test_bubbles_are_those_of_the_schedules_papers(ranks: int, microbatches: int) -> None:
    """(p-1) / (m+p-1) of the step, where stages are equal (Huang et al. 2019, Narayanan et al. 2021)."""
    for schedule in ("GPipe", "1F1B"):
        end = ends_of(schedule, ranks, microbatches)
        assert 1 - 3 * microbatches / end == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    if ranks > 1:
        assert ends_of("Interleaved1F1B", ranks, microbatches, 2) == pytest.approx(
            3 * microbatches + 3 * (ranks - 1) / 2
        )


def test_what_is_sent_arrives_later() -> None:
    """Of two stages: 0.5 s until the first activations are there, and 0.5 s until the last gradients are."""
    assert ends_of("GPipe", 2, 4, send=0.5) == pytest.approx(ends_of("GPipe", 2, 4) + 1.0)


def test_orders_are_torchs() -> None:
    orders = [
        " ".join(f"{stage}{kind}{number}" for stage, kind, number in order) for order in pipeline_orders("1F1B", 2, 3)
    ]
    assert orders == ["0G0 0F0 0F1 0B0 0F2 0B1 0B2 0R0", "1G0 1F0 1B0 1F1 1B1 1F2 1B2 1R0"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("1F1B", 4, 3), ValueError, "microbatches: 1F1B refuses 3: Number of microbatches"),
        (("Interleaved1F1B", 4, 9, 2), ValueError, "microbatches: Interleaved1F1B refuses 9: "),
        (("1F1B", 4, 0), ValueError, "microbatches must be a whole number, 1 or more, got 0"),
        (("1F1B", 4, 8, 2), ValueError, "stages_per_rank: 1F1B takes 1 stages of a rank, got 2"),
        (("Interleaved1F1B", 4, 8), ValueError, "stages_per_rank: Interleaved1F1B takes 2 or more"),
        (("2F2B", 4, 8), ValueError, "schedule: '2F2B' is not known; known are GPipe, 1F1B, Interleaved1F1B"),
        (("DualPipeV", 4, 8), UnsupportedError, "schedule: DualPipeV divides each backward"),
    ],
)
def test_schedules_that_cannot_be(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pipeline_orders(*arguments)


# Collectives of the model's own


def test_an_all_to_all_sends_through_each_ranks_own_adapter() -> None:
    cost = CostModel(H100, {"node": GroupShape(8), "nodes": GroupShape(64), "apart": GroupShape(4, 8)})
    launch, gb = H100.collective_launch, 10**9
    inside = launch + H100.intra.latency + 7 / 8 * gb / H100.intra.sustained
    assert cost.all_to_all_seconds(gb, "node") == pytest.approx(inside)
    across = launch + H100.inter.latency + 56 / 64 * gb / H100.inter.sustained
    assert cost.all_to_all_seconds(gb, "nodes") == pytest.approx(across)
    apart = launch + H100.inter.latency + 3 / 4 * gb / H100.inter.sustained
    assert cost.all_to_all_seconds(gb, "apart") == pytest.approx(apart)
    assert [cost.send_seconds(gb, distance) < gb / 50e9 for distance in (4, 8)] == [True, False]


def test_tensor_parallelism_exchanges_activations_in_the_graph() -> None:
    """With sequences divided: whole ones before, sums of parts behind attention and perceptron."""
    first, last = planned("pp=2,dp_shard=2,tp=2").plans
    assert collectives(first, "forward") == {
        "all_gather_into_tensor": 2, "reduce_scatter_tensor": 3,
    }, "and parameters are whole"  # fmt: skip
    # One more before the head, and of the loss the highest logits, the sums and the labels' own.
    assert collectives(last, "forward") == {
        "all_gather_into_tensor": 3, "reduce_scatter_tensor": 2, "all_reduce": 3,
    }  # fmt: skip
    backward = last.traced.backward
    cost = last.traced.context.cost
    assert cost is not None
    events = simulate(backward, cost).events
    own = [event for event in events if dialect.is_model_collective(event.node)]
    assert own and all(event.exposed == pytest.approx(event.end - event.begin) for event in own), "waited for at once"
    assert not any(n.target is dialect.reduce_scatter_start for n in backward.nodes), "kept for all microbatches"
    assert last.traced.finalization is not None and last.traced.finalization[0].reductions


def test_context_parallelism_gathers_keys_and_values() -> None:
    made = planned("dp_shard=2,cp=2").plans[0]
    assert collectives(made, "forward") == {"all_gather_into_tensor": 4}, "and parameters are whole"
    assert collectives(made, "backward") == {"reduce_scatter_tensor": 4}
    assert {p.world_size for p in made.spec.parameters.values()} == {4}
    assert made.tokens == LENGTH // 2


def test_experts_exchange_tokens() -> None:
    made = planned("dp_shard=4,ep=2", "deepseek").plans[0]
    # Of one layer of two. torch 2.9 traces one of backward's on a constant, and runs it in forward.
    assert collectives(made, "forward") + collectives(made, "backward") == {"all_to_all_single": 4}
    sizes = {name.rpartition(".")[2]: (p.shape, p.world_size) for name, p in made.spec.parameters.items()}
    assert sizes["gate_up_proj"] == ((4, 32, 32), 2) and sizes["q_a_proj.weight".partition(".")[2]][1] == 4


# Steps


def test_a_step_is_its_stages_by_the_schedule() -> None:
    made = planned("pp=2,dp_shard=2,tp=2")
    first, last = made.stages
    # Four microbatches, 1F1B, without what is sent: the last stage is never early for the first.
    assert all(s.gather > 0 and s.reduce > 0 and s.optimizer > 0 for s in made.stages)
    sent = made.sends[1]
    assert sent == pytest.approx(
        H100.collective_launch + H100.intra.latency + LENGTH // 2 * 32 * 2 / H100.intra.sustained
    )
    cycle = last.forward + last.backward
    longest = first.gather + first.forward + sent + 4 * cycle + sent + first.backward + first.reduce + first.optimizer
    assert made.step_seconds == pytest.approx(longest)
    busy = sum(4 * (s.forward + s.backward) + s.gather + s.reduce + s.optimizer for s in made.stages)
    assert made.bubble == pytest.approx(1 - busy / (2 * longest))
    assert made.tokens_per_second == pytest.approx(4 * LENGTH / 2 / 2 / longest)  # of tp, of pp
    flops = sum(plan.model_flops for plan in made.plans)
    assert made.mfu == pytest.approx(4 * flops / (2 * longest * H100.peak_flops(torch.bfloat16)))


def test_memory_of_a_stage_grows_with_the_microbatches_in_flight() -> None:
    made = planned("pp=2,dp_shard=2,tp=2")
    assert made.in_flight == [2, 1]
    assert planned("pp=2,dp_shard=2,tp=2", schedule="GPipe").in_flight == [4, 4]
    for stage, held, flight in zip(made.stages, made.memory, made.in_flight, strict=True):
        assert held["saved"] == flight * stage.saved and held["working"] == stage.working
        assert held["optimizer"] == 2 * held["shards"]
    spec = made.plans[0].spec
    assert made.memory[0]["gradients"] == sum(p.shard_numel * 2 * 4 for p in spec.parameters.values()), "whole, float32"
    assert made.peak_nbytes == max(sum(held.values()) for held in made.memory) and made.fits


def test_parameters_that_can_be_whole_are_gathered_once() -> None:
    made = planned("dp_shard=2,cp=2")
    (stage,) = made.stages
    buckets = made.plans[0].spec.buckets
    assert stage.gather > 0 and stage.held["gathered"] == sum(bucket.gathered_nbytes for bucket in buckets)
    once = stage.gather + stage.reduce + stage.optimizer
    assert made.step_seconds == pytest.approx(4 * (stage.forward + stage.backward) + once) and abs(made.bubble) < 1e-9


def test_a_stages_programs_work_beside_what_is_held_and_saved() -> None:
    """Whole parameters are held throughout, not only until the last of them that backward reads."""
    made = planned("pp=2,dp_shard=2,tp=2")
    for stage, plan in zip(made.stages, made.plans, strict=True):
        profiles = [plan.forward.memory, plan.backward.memory]
        assert all(set(p.timeline["gathered"]) == {stage.held["gathered"]} for p in profiles if p is not None)
        most = max(total - p.timeline["gradients"][i] for p in profiles if p for i, total in enumerate(p.total))
        assert most == stage.held["shards"] + stage.held["gathered"] + stage.saved + stage.working


def test_a_stages_plan_is_a_report(tmp_path: Path) -> None:
    plan = planned("pp=2,dp_shard=2,tp=2").plans[0]
    plan.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any("all_gather_into_tensor" in event["name"] for event in events)


def test_what_is_printed() -> None:
    lines = str(planned("pp=2,dp_shard=2,tp=2")).splitlines()
    assert lines[0] == "plan: 2 stages on a mesh of pp=2,dp_shard=2,tp=2 h100, 1F1B with 4 microbatches"
    assert "of it bubble" in lines[1] and "MFU" in lines[2] and "fits in 86" in lines[3]
    assert [line.split()[:2] for line in lines[5:]] == [["pp", "0"], ["pp", "1"]]


def test_layers_are_dealt_out_with_embedding_and_head() -> None:
    divided = model_on(Dimensions(pp=4), {**LLAMA, "num_hidden_layers": 6})
    keys = [divided.stage(index, 4).key for index in range(4)]
    assert keys == [(True, False, 0, 1), (False, False, 0, 2), (False, False, 0, 2), (False, True, 0, 1)]


# Bad input


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        ({"dp_shard": 4, "ep": 3}, MeshError, "mesh_shape: ep=3 does not nest in dp_shard=4 times cp=1"),
        ({"dp_shard": 6, "cp": 4, "ep": 6}, MeshError, "mesh_shape: ep=6 does not nest in dp_shard=6 times cp=4"),
        ({"dp": 4}, ValueError, "mesh_shape: there is no dimension 'dp'; name some of pp, dp_replicate"),
        ({"tp": 0}, ValueError, "mesh_shape: tp must be a number of ranks, 1 or more, got 0"),
        ({"dp_shard": 2, "tp": 2}, ValueError, "parallelize: mesh_shape is dp_shard=2,tp=2; give a function"),
        ({"pp": 2, "dp_shard": 2}, ValueError, "mesh_shape: pp=2 are stages"),
    ],
)
def test_meshes_that_cannot_be(mesh: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        graph_fsdp.plan(lambda: nn.Linear(4, 4), (torch.zeros(2, 4),), mesh_shape=mesh, hardware="h100")


def test_groups_that_straddle_nodes_are_refused() -> None:
    with pytest.raises(MeshError, match="dp_shard=8,cp=3 does not divide into nodes of 8 h100"):
        Dimensions.of({"dp_shard": 8, "cp": 3}).check_nodes(H100)
    Dimensions.of({"pp": 4, "dp_replicate": 2, "dp_shard": 8, "cp": 2, "tp": 8, "ep": 16}).check_nodes(H100)


@pytest.mark.parametrize(
    ("mesh", "fields", "length", "message"),
    [
        ({"ep": 2, "dp_shard": 2}, LLAMA, 32, "mesh_shape: ep=2 and the model has no experts"),
        (
            {"ep": 3, "dp_shard": 3},
            DEEPSEEK,
            32,
            "mesh_shape: ep=3 and the model has 8 experts, which ep does not divide",
        ),
        ({"tp": 8}, LLAMA, 32, "mesh_shape: tp=8 does not divide the model's num_key_value_heads, 4"),
        ({"cp": 2}, LLAMA, 33, "seq: 33 tokens do not divide by cp=2 times tp=1"),
        ({"pp": 2}, {**LLAMA, "tie_word_embeddings": True}, 32, "model: llama has embedding and head in common"),
    ],
)
def test_models_that_do_not_divide(mesh: dict[str, int], fields: dict[str, Any], length: int, message: str) -> None:
    with pytest.raises((ValueError, UnsupportedError), match=message):
        model_on(Dimensions.of(mesh), fields, length)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="mesh_shape: 4 stages for 2 layers"):
        model_on(Dimensions(pp=4)).stage(0, 4)


def test_a_parameter_on_two_meshes_is_refused() -> None:
    def parallelize(model: nn.Module, meshes: Any) -> dict[str, Any]:
        return {"meshes": {nn.Linear: meshes["efsdp"], model[0]: meshes["dp"]}}  # type: ignore[index]

    with pytest.raises(ValueError, match=r"meshes: parameter '0.weight' has two meshes"):
        graph_fsdp.plan(
            lambda: nn.Sequential(nn.Linear(4, 4)),
            (torch.zeros(2, 4),),
            mesh_shape={"dp_shard": 4, "ep": 2},
            hardware="h100",
            parallelize=parallelize,
        )


# The command, and search


def test_a_pipeline_gathers_once_whatever_is_asked() -> None:
    with pytest.raises(ValueError, match=r"^reshard_after_forward: ranks gather parameters once a step"):
        planned("pp=2", reshard_after_forward=True)


def test_the_command_plans_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = ["plan", f"{tmp_path}/config.json", "--seq", "16", "--mesh", "pp=2,dp_shard=2", "--schedule", "GPipe"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh_shape"] == {"pp": 2, "dp_shard": 2} and found["schedule"] == "GPipe" and found["fits"]
    assert found["microbatches"] == 8 and found["in_flight"] == [8, 8] and len(found["stages"]) == 2
    assert main([*arguments[:4], "--mesh", "2", "--microbatches", "3", "--straggler", "1.5", "--contention"]) == 0
    printed = capsys.readouterr().out
    assert "1F1B with 3 microbatches, with a straggler of 1.5 and contention" in printed
    assert ", of it bubble 0.0%" in printed
    for mesh in ("pp=2,dp_shard=2", "dp_shard=2,tp=2"):
        assert main([*arguments[:4], "--mesh", mesh, "--checkpointing", "offload"]) == 0
    with_stages, without = (line for line in capsys.readouterr().out.splitlines() if line.startswith("plan: "))
    assert "1F1B with 8 microbatches" in with_stages and "1F1B with 1 microbatches" in without
    for wrong, message in (
        (["own.py:model", "--mesh", "tp=2"], "model: own.py:model is no config.json, and how to divide it over tp=2"),
        ([arguments[1], "--mesh", "tp=2", "--report", f"{tmp_path}/a.html"], "--report: is of one program"),
        ([arguments[1], "--mesh", "pp=2", "--reshard", "true"], "--reshard: ranks gather parameters once a step"),
        ([arguments[1], "--mesh", "pp=2", "--microbatches", "1"], "microbatches: 1F1B refuses 1"),
    ):
        assert main(["plan", *wrong]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"], "what is refused writes nothing"


def test_neighbours_have_as_many_ranks() -> None:
    found = neighbours(Dimensions(pp=2, dp_shard=8, tp=4, ep=4), 8)
    assert [str(mesh) for mesh in found] == [
        "pp=2,dp_shard=8,tp=4,ep=4",
        "pp=2,dp_shard=4,tp=8,ep=4",
        "pp=2,dp_shard=16,tp=2,ep=4",
        "pp=4,dp_shard=4,tp=4,ep=4",
        "pp=4,dp_shard=8,tp=2,ep=4",
        "dp_shard=16,tp=4,ep=4",
        "dp_shard=8,tp=8,ep=4",
        "dp_shard=32,tp=2,ep=4",
    ]


def test_search_compares_meshes_and_schedules() -> None:
    def divided(dimensions: Dimensions) -> Any:
        model = model_on(dimensions)
        return model.stage, model.parallelize

    found = search_pipelines(
        divided,
        mesh_shapes=[{"pp": 2, "dp_shard": 2}],
        hardware="h100",
        microbatches=8,
        checkpointings=(None,),
        mp_policy=MIXED,
    )
    (one,), ((refused, reason),) = found.candidates, found.refused
    assert one.choice.schedule == ("1F1B", 1) and found.best is one and "1F1B, checkpointing none" in str(found)
    assert refused.schedule == ("Interleaved1F1B", 2) and "4 stages for 2 layers" in reason
    alone = planned("pp=2,dp_shard=2")
    assert (one.step_seconds, one.peak_nbytes) == (alone.step_seconds, alone.peak_nbytes)
