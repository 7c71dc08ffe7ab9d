"""Benchmarks measure what they say, and fail where an implementation does not train as it should. What they find is in
their results, not in assertions."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from graph_fsdp.passes import default_pipeline

FOLDER = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(FOLDER))

import compile_time  # noqa: E402
import memory  # noqa: E402
import peak_memory  # noqa: E402
import step_time  # noqa: E402
import training  # noqa: E402
import update_docs  # noqa: E402
from bounds import Compute, Link  # noqa: E402
from copies import copies_of  # noqa: E402
from harness import POLICIES, command_of, machine  # noqa: E402
from implementations import IMPLEMENTATIONS, REFERENCE_ALONE, Implementation, Setup  # noqa: E402
from workloads import Workload  # noqa: E402


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.usefixtures("fake_group")
def test_pass_time_measures_every_default_pass_on_graphs_that_grow_by_a_layer() -> None:
    pass_time = benchmark("pass_time")
    found = [pass_time.measure(depth) for depth in (2, 3, 4)]
    assert [m.depth for m in found] == [2, 3, 4]
    for m in found:
        assert {row.name for row in m.rows} == {p.name for p in default_pipeline()}
        assert 0 < sum(row.total for row in m.rows) <= m.total_seconds <= m.capture_seconds
    a, b, c = (m.graph_nodes for m in found)
    assert c - b == b - a >= 30, "nodes per layer"
    assert all(pass_time.table(found).count(row.name) for row in found[0].rows)


@pytest.mark.long
def test_pass_time_traces_the_model_of_a_configuration() -> None:
    pass_time = benchmark("pass_time")
    config = FOLDER / "configs" / "llama_3_405b.json"
    found = {layers: [pass_time.measure_configured(config, layers)] for layers in (3, 4)}
    for (run,) in found.values():
        assert 0 < run["trace"] < run["plan"] and min(run["passes"], run["verifier"], run["snapshots"]) > 0
    assert found[4][0]["nodes"] - found[3][0]["nodes"] >= 250, "nodes per layer"
    assert "each further layer" in pass_time.table_of_configured(found)


# On two ranks, without Inductor

TINY = ["--device", "cpu", "--width", "16", "--heads", "2", "--vocab", "32", "--batch", "2", "--length", "8"]
EAGER = {name: IMPLEMENTATIONS[name] for name in ("ours_eager", "fsdp2")}


def forgets_to_reduce(model: nn.Module, setup: Setup) -> nn.Module:
    """Each rank trains on its own batches and calls it data parallelism."""
    return model


def forgets_a_block(model: nn.Module, setup: Setup) -> nn.Module:
    setup.blocks(model)[0].requires_grad_(False)
    return IMPLEMENTATIONS["fsdp2"].build(model, setup)


BROKEN = {
    **EAGER,
    "forgets_to_reduce": Implementation("", forgets_to_reduce, inductor=False),
    "forgets_a_block": Implementation("", forgets_a_block, inductor=False),
}


def run_step_time(folder: str) -> dict[str, Any]:
    """On a rank: what the benchmark returns for sound implementations, and for each broken one."""
    where = ["--results", folder, "--images", folder]
    arguments = [*TINY, "--layers", "1", "--rounds", "2", "--steps", "1", *where]
    sound = {**EAGER, "alone": REFERENCE_ALONE}
    codes = {"sound": step_time.main([*arguments, "--against", "fsdp2", "alone"], sound)}
    for sound_one, name in (("ours_eager", "forgets_to_reduce"), ("fsdp2", "forgets_a_block")):
        chosen = ["--implementations", sound_one, name, "--no-memory", "--name", name]
        codes[name] = step_time.main([*arguments, *chosen], BROKEN)
    return codes


@pytest.mark.long
def test_step_time_compares_implementations_and_fails_where_one_trains_wrongly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = run_ranks(run_step_time, 2, str(tmp_path))
    output = capfd.readouterr().out
    assert codes == [{"sound": 0, "forgets_to_reduce": 1, "forgets_a_block": 1}] * 2, "on all ranks"
    assert "FAILED: forgets_to_reduce does not train as the reference does: at step 1 rank 0 has loss" in output
    assert "FAILED: forgets_a_block does not train as the reference does: at step 1 rank 0 has loss" in output
    assert "FAILED: ours_eager" not in output
    assert [path.name for path in tmp_path.glob("*.json")] == ["step_time.json"], "a failed run writes no result"

    result = json.loads((tmp_path / "step_time.json").read_text())
    assert result["machine"]["ranks"] == 2 and str(tmp_path) not in json.dumps(result)
    assert result["command"].endswith("--rounds 2 --steps 1 --against fsdp2 alone")
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["ours_eager", "fsdp2", "alone"]
    model = Workload(layers=1, width=16, heads=2, vocab=32, length=8).make(CPU)
    parameters = sum(p.nbytes for p in model.parameters())
    for name, row in rows.items():
        low, median, high = row["step_seconds"]
        assert 0 < low <= median <= high and len(row["rounds"]) == 2
        assert row["ratio"]["fsdp2"] == [1, 1, 1] or name != "fsdp2"
        assert row["tokens_per_second"] == pytest.approx(2 * 2 * 8 / median, rel=1e-3)
        ranks = 1 if name == "alone" else 2
        held = row["bytes_between_steps"]
        assert 3 * parameters / ranks < held < 1.1 * 3 * parameters / ranks, "a shard and its two moments"
        assert held < row["peak_bytes"]
    assert rows["fsdp2"]["copied_bytes"]["pack"] > parameters and "copied_bytes" not in rows["alone"]
    assert result["loss"]["steps"] == 1 + 3 + 2 * (1 + 1) and result["loss"]["largest_difference"] < 1e-6
    assert result["bounds"] == {}
    assert [line.split()[0] for line in step_time.table(result).text().splitlines()[1:4]] == list(rows)


def run_others(folder: str) -> list[int]:
    """On a rank: the memory benchmark with sound and with broken implementations; one compilation of each kind."""
    where = ["--results", folder, "--images", folder]
    arguments = [*TINY, "--layers", "1", "--zero", "ZeRO-3", "--implementations"]
    measure = [*TINY, "--into", f"{folder}/one.json", "--depths", "1", "--measure"]
    return [
        memory.main([*arguments, "ours_eager", "fsdp2", *where], EAGER),
        memory.main([*arguments, "forgets_to_reduce", *where, "--name", "broken"], BROKEN),
        compile_time.main([*measure, "fsdp2"], BROKEN),
        compile_time.main([*measure, "forgets_to_reduce"], BROKEN),
    ]


@pytest.mark.long
def test_memory_and_compile_time_fail_where_an_implementation_trains_wrongly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(run_others, 2, str(tmp_path)) == [[0, 1, 0, 1]] * 2
    output = capfd.readouterr().out
    assert output.count("FAILED: forgets_to_reduce does not train as the reference does: at step 1") == 2
    result = json.loads((tmp_path / "memory.json").read_text())
    cases = [(row["name"], memory.configuration(row)) for row in result["rows"]]
    both = ("ours_eager", "fsdp2")
    assert cases == [(n, "ZeRO-3") for n in both] + [(n, "ZeRO-3, checkpointed") for n in both]
    assert all(0 < row["bytes_between_steps"] < row["peak_bytes"] for row in result["rows"])
    assert "ours_eager ÷ fsdp2" in memory.table(result).header
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["seconds"] > 0 and one["cpu_seconds"] >= 0 and one["passes"] == 0, "in ticks of ten milliseconds"


def measure_compile_time(arguments: list[str]) -> int:
    """On a rank."""
    return compile_time.main(arguments, EAGER)


@pytest.mark.long
def test_compile_time_starts_ranks_of_its_own_for_every_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[int] = []

    def start_ranks(script: str, arguments: list[str], ranks: int, device: str, **environment: str) -> int:
        """As the harness does, but for torchrun and its imports."""
        assert Path(script).name == "compile_time.py" and device == "cpu"
        started.append(ranks)
        return max(run_ranks(measure_compile_time, ranks, arguments, backend=None, env=environment))

    monkeypatch.setattr(compile_time, "start_ranks", start_ranks)
    where = ["--results", str(tmp_path), "--images", str(tmp_path)]
    chosen = ["--implementations", "ours_eager", "--depths", "1", "2", "--ranks", "1"]
    assert compile_time.main([*TINY, *chosen, *where, "--markdown"]) == 0
    assert started == [1, 1]
    result = json.loads((tmp_path / "compile_time.json").read_text())
    rows = result["rows"]
    assert [(row["name"], row["depth"]) for row in rows] == [("ours_eager", 1), ("ours_eager", 2)]
    assert all(0 < row["passes"] + row["tracing"] < row["seconds"] and row["inductor"] == 0 for row in rows)
    assert compile_time.table(result).markdown() in capsys.readouterr().out


# What a step copies

CPU = torch.device("cpu")


def copies_on_a_rank() -> list[dict[str, int] | None]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    setup = Setup(lambda model: nn.ModuleList(), mesh)
    found = []
    for build in (IMPLEMENTATIONS["fsdp2"].build, forgets_to_reduce):
        model = build(nn.Linear(8, 8, bias=False), setup)
        found.append(copies_of(model, lambda m=model: m(torch.ones(4, 8)).sum().backward()))
    return found


@pytest.mark.long
def test_what_fsdp2_copies_is_counted_while_it_runs() -> None:
    full, shard = 8 * 8 * 4, 4 * 8 * 4
    # The root is gathered once. Gather: the shard to the buffer, the buffer to the parameter; gradient to its buffer.
    expected = {"pack": 2 * shard + 2 * full, "unpack": 2 * full}
    assert run_ranks(copies_on_a_rank, 2) == [[expected, None]] * 2


# Parts


def test_a_round_takes_the_slowest_ranks_time_and_all_ranks_cpu_time() -> None:
    of_ranks = [[{"a": (1.0, 0.5), "b": (2.0, 0.1)}], [{"a": (3.0, 0.25), "b": (1.0, 0.1)}]]
    assert step_time.combine(of_ranks) == [{"a": (3.0, 0.75), "b": (2.0, 0.2)}]
    assert step_time.quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == [2, 3, 4] and step_time.quartiles([7.0]) == [7, 7, 7]


@pytest.mark.usefixtures("fake_group")
def test_turns_are_taken_in_an_order_that_changes_from_round_to_round() -> None:
    order: list[str] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def step(self) -> None:
            order.append(self.name)

    found = step_time.interleave({name: Recorder(name) for name in "abc"}, rounds=3, steps=1, device="cpu")  # type: ignore[dict-item]
    assert "".join(order) == "aabbcc" + "aaccbb" + "ccaabb", "one step before the timed one"
    assert [set(turns) for turns in found] == [set("abc")] * 3


@pytest.mark.usefixtures("fake_group")
def test_bounds_update_a_ranks_share_and_send_what_a_sharded_step_sends() -> None:
    workload = Workload(layers=2, width=16, heads=2, vocab=32, length=8)
    setup = Setup(workload.blocks, init_device_mesh("cpu", (8,)), POLICIES["bfloat16"])
    with torch.compiler.set_stance("force_eager"):
        compute = Compute(workload, setup)
        compute.step()
    updated = [p for group in compute.optimizer.param_groups for p in group["params"]]
    numel = sum(p.numel() for p in compute.model.parameters())
    moments = sum(state["exp_avg"].numel() for state in compute.optimizer.state.values())
    assert sum(p.numel() for p in updated) == moments == numel / 8

    link = Link(workload, setup)
    with CommDebugMode() as sent:
        link.step()
    gathers, reductions = 1 + 2 * workload.layers, workload.layers + 1
    assert list(sent.get_comm_counts().values()) == [gathers, reductions]
    whole = {"bfloat16": 0, "float32": 0}
    for launch in link.launches:
        whole[str(launch.args[0].dtype).removeprefix("torch.")] += max(tensor.numel() for tensor in launch.args)
    of_blocks = sum(p.numel() for p in workload.blocks(workload.make(CPU)).parameters())
    assert whole == {"bfloat16": numel + of_blocks, "float32": numel}, "blocks are gathered twice"


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("wrong", [1.01, float("nan"), float("inf")])
def test_a_loss_that_differs_is_said_with_its_step(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    monkeypatch.setattr(training, "gather", lambda value: [value])  # the fake group gathers nothing
    expected = {"good": [2.0, 1.0, 0.5], "bad": [2.0, 1.0, 0.5]}
    assert training.check_losses({"good": [2.0, 1.00001, 0.5]}, expected, 1e-4) == pytest.approx(1e-5, rel=1e-3)
    with pytest.raises(training.Disagreement, match=r"^bad does not .* at step 1 rank 0 has loss"):
        training.check_losses({"good": [2.0, 1.0, 0.5], "bad": [2.0, wrong, 3.0]}, expected, 1e-4)


class KnownAllocations:
    """Holds 1000 floats between steps, 3000 more at most during one."""

    def __init__(self) -> None:
        self.state = torch.ones(1000)

    def step(self) -> None:
        first = torch.ones(1000)
        second = torch.ones(2000)
        del first, second
        torch.ones(2500)

    def losses(self) -> list[float]:
        return [1.0]


def test_peak_memory_is_what_is_allocated_and_held_at_once() -> None:
    torch.ones(100_000)
    assert peak_memory.measure(KnownAllocations, "cpu") == peak_memory.Peak(4 * 4000, 4 * 1000, [1.0])


def test_an_allocation_whose_free_is_not_seen_counts_only_while_a_tensor_lies_there() -> None:
    def record(time: float, size: int, address: int) -> dict[str, Any]:
        return {"ts": time, "args": {"Bytes": size, "Addr": address}}

    records = [record(1, 8, 10), record(2, 16, 20), record(3, -8, 10), record(4, 32, 30), record(5, 64, 20)]
    assert peak_memory.allocation_changes(records, alive={30}) == [(1, 8), (3, -8), (4, 32)]


def test_a_workload_can_be_learnt_and_every_rank_has_batches_of_its_own() -> None:
    workload = Workload(layers=1, width=16, heads=2, vocab=32, batch=2, length=8)
    batches = [workload.tokens(step, rank, CPU) for step, rank in ((0, 0), (0, 1), (1, 0))]
    for batch in batches:
        assert torch.equal(batch["targets"], (5 * batch["inputs"] + 3) % 32)
        assert batch["inputs"].shape == (2, 8)
    assert not torch.equal(batches[0]["inputs"], batches[1]["inputs"])
    assert not torch.equal(batches[0]["inputs"], batches[2]["inputs"])


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_checkpointed_workload_is_the_same_model(name: Any) -> None:
    plain = Workload(name, layers=2, width=16, heads=2, vocab=32, batch=2, length=8)
    kinds = []
    losses = []
    for workload in (plain, Workload(**{**plain.__dict__, "checkpointed": True})):
        model = workload.make(CPU)
        kinds.append({type(block) for block in workload.blocks(model)})
        loss = training.loss_of(model(**workload.tokens(0, 0, CPU)))
        loss.backward()
        losses.append((loss.item(), [p.grad for p in model.parameters()]))
    assert all(len(kind) == 1 for kind in kinds) and kinds[0] != kinds[1]
    assert losses[0][0] == losses[1][0]
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1], losses[1][1], strict=True))  # type: ignore[arg-type]


def test_bfloat16_replicas_keep_float32_parameters_and_gradients() -> None:
    from implementations import CastParameters

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = CastParameters(Linear(), torch.bfloat16)
    output = model(x=torch.ones(2, 4, dtype=torch.bfloat16))
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())  # type: ignore[union-attr]


# Results


def test_a_command_and_a_machine_are_told_without_paths() -> None:
    told = command_of("/a/b/memory.py", ["--ranks", "2", "--results", "somewhere", "--model", "llama", "--images=x"])
    assert told == "GRAPH_FSDP_PROGRAMS=0 python benchmarks/memory.py --ranks 2 --model llama", "as conftest.py sets it"
    found = machine("cpu", 2)
    assert found["accelerator"] is None and found["cores"] >= 1 and found["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("parse", "arguments", "complaint"),
    [
        (step_time.parse, ["--implementations", "ours", "--against", "ddp"], "ddp is not among --implementations"),
        (step_time.parse, ["--rounds", "0"], "--rounds and --steps must be at least 1"),
        (step_time.parse, ["--implementations", "nobody"], "invalid choice: 'nobody'"),
        (step_time.parse, ["--reshard-after-forward", "perhaps"], "'perhaps' is neither true nor false"),
        (compile_time.parse, ["--repeats", "0"], "--repeats must be at least 1"),
        (memory.parse, ["--zero", "ZeRO-1"], "invalid choice: 'ZeRO-1'"),
    ],
)
def test_a_wrong_command_line_is_refused(
    parse: Any, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments, IMPLEMENTATIONS)
    assert complaint in capsys.readouterr().err


def test_compile_time_is_refused_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        compile_time.parse([], IMPLEMENTATIONS)
    assert "starts its own ranks" in capsys.readouterr().err


def test_the_pages_show_the_results_that_are_kept() -> None:
    shown = {}
    for path in update_docs.PAGES:
        page = path.read_text()
        assert update_docs.updated(page) == page, f"{path.name}: run python benchmarks/update_docs.py"
        shown[path.name] = page.count("<!-- results/")
    assert shown["performance.md"] >= 3 and shown["xla.md"] >= 1
