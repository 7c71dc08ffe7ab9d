"""Programs of earlier starts: a start that finds one runs the same graphs, and one that differs in anything finds none.

On a fake process group of 8 ranks. ``test_programs_key.py`` has what a program depends on, ``test_programs_ranks.py``
two gloo ranks.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fake_process_group
from models import MLP, WIDTH
from programs import DEPTH, ROWS, Custom, Started, WithBuffer, start
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import graph_capture
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp import UnsupportedError
from graph_fsdp.compat.traces.joint_traces import FOLLOWING
from graph_fsdp.passes import Plan, default_pipeline
from graph_fsdp.passes.ir.portable import Names
from graph_fsdp.programs.folder import Folder
from graph_fsdp.report.report import GraphReport, engine_of
from graph_fsdp.runtime.regions import regions
from graph_fsdp.runtime.regions.kept_keys import cut_with_keys, keys_to_data


def texts(report: GraphReport) -> dict[str, Any]:
    """All that a report says of forward and backward: the graph after each pass, with metadata, and the program."""
    found: dict[str, Any] = {}
    for view in (report.capture, report.joint, report.forward, report.backward):
        stages = {name: stage.body for name, stage in view.stages.items()}
        summaries = [stage.summary for stage in view.stages.values()]
        found[view.phase] = (stages, summaries, view.program, view.lines())
        for node in view.graph.fx_graph.nodes if view.graph is not None else ():
            value = node.meta.get("val")
            layout = (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else None
            trace = re.sub(r"graph_fsdp_forward_\d+", "", node.meta.get("stack_trace") or "")
            modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
            found[f"{view.phase} {node.name}"] = (node.format_node(), layout, node.meta.get("fsdp"), trace, modules)
    found["report"] = str(report)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "programs"


@pytest.fixture(autouse=True)
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    if "precompile" in request.node.name:  # it makes one itself
        yield
        return
    with fake_process_group():
        yield


# A second start


OPTIONS = [
    pytest.param({}, id="default"),
    pytest.param({"reshard_after_forward": False}, id="kept", marks=pytest.mark.long),
    pytest.param({"reshard_after_forward": 2}, id="groups", marks=pytest.mark.long),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_second_start_finds_the_program_and_runs_the_same(folder: Path, options: dict[str, Any]) -> None:
    first, second = start(folder, **options), start(folder, **options)
    assert (first.found, second.found) == (False, True)
    assert torch.equal(first.outputs, second.outputs)
    assert all(map(torch.equal, first.gradients, second.gradients))
    assert texts(first.report) == texts(second.report)


def test_a_second_start_traces_no_joint_graph(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(folder)
    extract: Any = getattr(graph_capture, FOLLOWING[-1], None)
    if extract is None:
        pytest.skip("torch is told no joint graph")
    known: list[Any] = []

    def seen(joint: Any, metadata: Any) -> None:
        extract(joint, metadata)
        known.extend(metadata.tangent_source_stack_traces)

    monkeypatch.setattr(graph_capture, extract.__name__, seen)
    monkeypatch.setattr(graph_capture, "make_fx", None)
    second = start(folder)
    assert second.found and all(map(torch.equal, first.gradients, second.gradients))
    assert len(known) == 1 and "models.py" in known[0], "for an error of autograd's, which names the line"
    with pytest.raises(TypeError, match="not callable"):
        start(None)


def test_keys_of_regions_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names({}, torch.device("cpu"))
    report = start(folder).report
    for graph in (report.forward.graph, report.backward.graph):
        assert graph is not None
        data = json.loads(json.dumps(keys_to_data(regions.cut(graph), graph.phase, names)))
        found = [step for step in cut_with_keys(graph, data, names) if isinstance(step, regions.Region)]
        assert [r.keys for r in found] == [{graph.phase: regions.region_key(r, graph.phase)} for r in found]
        assert len(data["keys"]) < len(found)
        data["of"].pop()
        with pytest.raises(ValueError, match="zip"):
            cut_with_keys(graph, data, names)
    monkeypatch.setattr(regions, "region_key", None)
    assert start(folder).found


def test_a_program_that_is_kept_has_its_regions_cut_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find, found = regions.region_key, list[str]()
    monkeypatch.setattr(regions, "region_key", lambda region, kind: found.append(kind) or find(region, kind))
    start(None)
    counts = Counter(found)
    found.clear()
    assert not start(folder).found and Counter(found) == counts


def test_checkpointed_and_mixed_precision_models_are_found(folder: Path) -> None:
    options = {"activation_checkpointing": "unit", "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    first, second = start(folder, **options), start(folder, **options)
    assert second.found
    assert all(map(torch.equal, first.gradients, second.gradients))
    assert texts(first.report) == texts(second.report)


def test_two_dimensions_of_ranks_are_found(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    made = [start(folder, mesh=mesh) for _ in range(2)]
    assert made[1].found
    assert texts(made[0].report) == texts(made[1].report)


def test_evaluation_has_a_program_of_its_own(folder: Path) -> None:
    for found in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = graph_fsdp.compile(MLP(DEPTH), backend="eager", programs=folder)
        with torch.no_grad():
            started = Started(model, torch.ones(ROWS, WIDTH), backward=False)
        assert started.found is found
        assert list(started.report.inference.stages)
    assert len(list(folder.glob("*.json"))) == 1


def test_outputs_that_a_loss_leaves_out_have_no_gradient(folder: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    for found in (False, True):
        torch._dynamo.reset()
        model = graph_fsdp.compile(Two(), backend="eager", programs=folder)
        model(torch.ones(ROWS, WIDTH))[0].sum().backward()
        assert (graph_fsdp.inspect(model).graphs[-1].remake is not None) is found
        assert [name for name, p in model.named_parameters() if p.grad is None] == ["b.weight", "b.bias"]


def test_stages_are_made_when_they_are_read_or_an_error_says_what_to_do(folder: Path) -> None:
    start(folder)
    second = start(folder)
    stages = second.report.forward.stages
    assert list(stages)[:2] == ["partition", "just_in_time"]
    second.report.graphs[-1].remake.engine.pipeline = default_pipeline().remove("prefetch")  # makes other graphs
    with pytest.raises(LookupError, match="compile the model with programs=False"):
        _ = stages["bucket"].code


def test_a_report_has_stages_when_its_model_is_gone(folder: Path) -> None:
    first = start(folder)
    view = start(folder).report.forward  # of a model that nothing else keeps
    assert view.stages["bucket"].body == first.report.forward.stages["bucket"].body


def test_a_found_program_keeps_nothing_that_the_user_passed(folder: Path) -> None:
    import gc
    import weakref

    start(folder)
    torch._dynamo.reset()
    model = graph_fsdp.compile(MLP(DEPTH), backend="eager", programs=folder)
    batch = torch.ones(ROWS, WIDTH)
    model(batch).sum().backward()
    assert graph_fsdp.inspect(model).graphs[-1].remake is not None
    gone = weakref.ref(batch)
    del batch
    gc.collect()
    assert gone() is None


def test_ranks_with_another_plan_do_not_run_the_kept_program(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = start(folder)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = graph_fsdp.compile(MLP(DEPTH), backend="eager", programs=folder)
    program = json.loads(next(folder.glob("*.json")).read_text().split("\n", 1)[1])
    plan = Plan.from_json(program["plan"])
    backward = plan.collectives["backward"]
    backward[-1], backward[-2] = backward[-2], backward[-1]
    engine_of(model).schedules.plans[program["kind"]] = plan
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        other = Started(model, torch.ones(ROWS, WIDTH))
    assert "the ranks have another plan" in caplog.text
    assert not other.found
    assert other.report.backward.graph is not None and first.report.backward.graph is not None
    assert other.report.backward.graph.collectives == backward != first.report.backward.graph.collectives


# Files


def test_files_are_the_users_alone_and_hold_no_code(folder: Path) -> None:
    start(folder)
    (file,) = folder.glob("*.json")
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert all(json.loads(line) for line in file.read_text().splitlines())


def damaged(text: str) -> str:
    return text[: len(text) // 2]


def foreign(text: str) -> str:
    """As somebody would write it who knows how the sum is made."""
    import hashlib

    head, body = text.split("\n", 1)
    body = body.replace("aten.mm.default", "os.system.default")
    known = json.loads(head) | {"sha256": hashlib.sha256(body.encode()).hexdigest()}
    return f"{json.dumps(known)}\n{body}"


@pytest.mark.parametrize("change", [damaged, foreign, lambda text: "", lambda text: text.replace("relu", "gelu")])
def test_a_file_that_was_changed_is_not_used(folder: Path, change: Callable[[str], str]) -> None:
    first = start(folder)
    (file,) = folder.glob("*.json")
    text = file.read_text()
    file.write_text(change(text) if change(text) != text else text + " ")
    second = start(folder)
    assert not second.found
    assert all(map(torch.equal, first.gradients, second.gradients))


def test_a_file_that_others_may_write_to_is_not_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(folder)
    (file,) = folder.glob("*.json")
    file.chmod(0o666)
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        assert not start(folder).found
    assert "others may write to it" in caplog.text


def test_nothing_is_kept_without_a_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graph_fsdp.runtime.backends import BACKENDS

    monkeypatch.setattr(BACKENDS["eager"], "programs_folder", lambda self: folder)
    start(None)
    monkeypatch.setenv("GRAPH_FSDP_PROGRAMS", "0")
    start(None, programs=None)
    assert not folder.exists()
    monkeypatch.delenv("GRAPH_FSDP_PROGRAMS")
    start(None, programs=None)
    assert start(None, programs=None).found


def test_what_was_not_used_for_longest_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = [{"model": str(index)} for index in range(4)]
    bounded, unbounded = Folder(tmp_path / "bounded", 1000), Folder(tmp_path / "unbounded")
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        for folder in (bounded, unbounded):
            for index, key in enumerate(keys[:3]):
                folder.write(key, lambda: json.dumps({"program": "x" * 200}))
                os.utime(folder.file_of(key), (index, index))
            assert folder.read(keys[0]) is not None  # its last use is now
            folder.write(keys[3], lambda: json.dumps({"program": "x" * 200}))
    assert [key for key in keys if bounded.file_of(key).exists()] == [keys[0], keys[2], keys[3]]
    assert all(unbounded.file_of(key).exists() for key in keys)
    assert caplog.text.count("is removed: programs have more than 1000 bytes in all") == 1
    Folder(tmp_path / "small", 1).write(keys[0], lambda: json.dumps({"program": ""}))
    assert Folder(tmp_path / "small").read(keys[0]) is not None, "the newest stays"


def test_inductor_keeps_programs_beside_its_own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graph_fsdp.runtime.backends import BACKENDS

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert BACKENDS["inductor"]().programs_folder() == tmp_path / "graph_fsdp" / "programs"
    with torch._inductor.config.patch(force_disable_caches=True):
        assert BACKENDS["inductor"]().programs_folder() is None
    assert BACKENDS["eager"]().programs_folder() is None


def test_a_bad_path_is_one_error_before_anything_is_changed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = MLP()
    with pytest.raises(ValueError, match=r"programs='.*file': there can be no folder of programs: .*programs=False"):
        graph_fsdp.compile(model, backend="eager", programs=tmp_path / "file")
    with pytest.raises(TypeError, match="programs must be the path of a folder, False to keep none, or None, got 3"):
        graph_fsdp.compile(model, backend="eager", programs=3)
    assert type(model) is MLP


# Ahead


def test_precompiled_programs_are_found(folder: Path) -> None:
    for shape in ((8,), (2, 4)):
        graph_fsdp.precompile(
            lambda: MLP(DEPTH), (torch.ones(ROWS, WIDTH),), mesh_shape=shape, path=folder, backend="eager"
        )
    with fake_process_group():
        for mesh in (None, init_device_mesh("cpu", (2, 4))):  # whose process groups have other names
            ahead, whole = start(folder, mesh=mesh), start(None, mesh=mesh)
            assert (ahead.found, whole.found) == (True, False)
            assert texts(ahead.report) == texts(whole.report)
            assert all(map(torch.equal, ahead.gradients, whole.gradients))


def kernels_found() -> Counter[str]:
    """How often Inductor's cache had the kernels of a region, and had not, since this was called before."""
    counted = {name: counters["inductor"].pop(f"fxgraph_cache_{name}", 0) for name in ("hit", "miss")}
    return Counter(counted)


def test_precompiled_kernels_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    batch = (torch.ones(ROWS, WIDTH),)

    def ahead(folder: str, **options: Any) -> None:
        graph_fsdp.precompile(
            lambda: MLP(DEPTH),
            batch,
            mesh_shape=(8,),
            path=tmp_path / folder,
            device="cpu",
            backend="inductor",
            **options,
        )

    kernels_found()
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        ahead("programs", kernels=False)
        assert not kernels_found().total()
        ahead("programs")
        made = kernels_found()
        assert made["miss"] and not made["hit"]
        with fake_process_group():
            found = start(tmp_path / "programs", backend="inductor")
        assert found.found and kernels_found() == Counter(hit=made["miss"])
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        ahead("whole", regions="whole")
    assert not kernels_found().total()
    assert "compiled whole have their kernels built at the first start" in caplog.text


def test_precompile_says_what_it_cannot_keep(folder: Path) -> None:
    batch = (torch.ones(ROWS, WIDTH),)
    with pytest.raises(UnsupportedError, match="cannot be kept: it depends on the operator graph_fsdp_tests"):
        graph_fsdp.precompile(Custom, batch, mesh_shape=(8,), path=folder, backend="eager")
    with pytest.raises(UnsupportedError, match="cannot be kept: it writes to its inputs"):
        graph_fsdp.precompile(WithBuffer, batch, mesh_shape=(8,), path=folder, backend="eager")
    with pytest.raises(TypeError, match="inputs must be a tuple"):
        graph_fsdp.precompile(MLP, batch[0], mesh_shape=(8,), path=folder)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path must be the path of a folder"):
        graph_fsdp.precompile(MLP, batch, mesh_shape=(8,), path=8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kernels must be True, to build them, or False, got 'cpu'"):
        graph_fsdp.precompile(MLP, batch, mesh_shape=(8,), path=folder, kernels="cpu")  # type: ignore[arg-type]
    (folder.parent / "file").write_text("")
    with pytest.raises(ValueError, match=r"path='.*file': there can be no folder of programs: .*; name another one"):
        graph_fsdp.precompile(MLP, batch, mesh_shape=(8,), path=folder.parent / "file")
    with pytest.raises(TypeError, match="leave programs out"):
        graph_fsdp.precompile(MLP, batch, mesh_shape=(8,), path=folder, programs=folder)
