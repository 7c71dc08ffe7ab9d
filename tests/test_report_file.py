"""Reports in files: saved, loaded and printed again by the command line; saved by themselves when a pass fails."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fake_process_group
from models import MLP

import graph_fsdp
from graph_fsdp.cli.main import main
from graph_fsdp.passes import Graph, GraphPass, PassContext, default_pipeline
from graph_fsdp.passes.context import PassError
from graph_fsdp.report.report import GraphReport


@pytest.fixture(scope="module")
def report() -> GraphReport:
    with fake_process_group():
        model = graph_fsdp.compile(MLP(), backend="eager")
        for rows in (4, 6):
            model(torch.ones(rows, 16)).sum().backward()
        return graph_fsdp.inspect(model)


@pytest.fixture(scope="module")
def file(report: GraphReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.json"
    report.save(path)
    return path


# Saved and loaded


def test_a_loaded_report_prints_what_the_report_prints(report: GraphReport, file: Path) -> None:
    assert str(graph_fsdp.load_report(file)) == str(report)


@pytest.mark.parametrize("copied", [lambda report: pickle.loads(pickle.dumps(report)), copy.deepcopy])
def test_a_report_is_pickled_and_copied_as_it_is_loaded(report: GraphReport, file: Path, copied: Any) -> None:
    found = copied(report)
    assert str(found) == str(report) and found.to_json() == graph_fsdp.load_report(file).to_json()
    with pytest.raises(TypeError, match="a graph of a report cannot be pickled or copied"):
        copied(report.forward)


def test_a_report_of_no_graph_is_pickled(fake_group: None) -> None:
    report = graph_fsdp.inspect(graph_fsdp.compile(MLP(), backend="eager"))
    assert str(pickle.loads(pickle.dumps(report))) == str(report)


def test_a_loaded_report_has_every_stage_of_every_capture(report: GraphReport, file: Path) -> None:
    loaded = graph_fsdp.load_report(file)
    assert len(report.captures) == 2
    for capture in report.captures:
        for phase, stages in capture.stages.items():
            if stages:
                assert loaded.stages(phase, capture.index) == {n: stage.body for n, stage in stages.items()}
    assert loaded.diff("free", "forward", 0) == report.captures[0].views["forward"].diff("free")
    assert loaded.stages("forward") == loaded.stages("forward", 1) != loaded.stages("forward", 0)


def test_a_loaded_report_becomes_the_same_page(report: GraphReport, file: Path, tmp_path: Path) -> None:
    report.save(tmp_path / "here.html")
    graph_fsdp.load_report(file).save(tmp_path / "loaded.html")
    assert (tmp_path / "loaded.html").read_bytes() == (tmp_path / "here.html").read_bytes()


def test_the_file_is_json_and_loading_it_unpickles_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(file.read_text())
    assert (document["format"], document["version"]) == ("graph_fsdp.GraphReport", 2)
    for name in ("pickle.Unpickler", "pickle.load", "pickle.loads", "torch.load"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("unpickled"))
    graph_fsdp.load_report(file)


def test_graphs_and_stages_that_a_loaded_report_does_not_have(file: Path) -> None:
    loaded = graph_fsdp.load_report(file)
    with pytest.raises(KeyError, match="the report has no inference graph; it has 0: capture, 0: joint"):
        loaded.stages("inference")
    with pytest.raises(KeyError, match="the capture 7 of the report has no forward graph"):
        loaded.stages("forward", 7)
    with pytest.raises(KeyError, match="the forward graph has no stage 'fuse'; it has partition, just_in_time"):
        loaded.diff("fuse", "forward")


# Bad files


def changed(file: Path, tmp_path: Path, **values: Any) -> Path:
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return path


def test_a_report_of_another_version(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a report of version 99, and this graph_fsdp reads version 2; read it"):
        graph_fsdp.load_report(changed(file, tmp_path, version=99))


def test_a_file_that_is_no_report(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no saved report; one is written by report\.save"):
        graph_fsdp.load_report(changed(file, tmp_path, format="graph_fsdp.Profile"))
    page = tmp_path / "report.html"
    page.write_text("<html>")
    with pytest.raises(ValueError, match=r"is not JSON, and so no saved report .*; a page is for browsers"):
        graph_fsdp.load_report(page)
    with pytest.raises(FileNotFoundError):
        graph_fsdp.load_report(tmp_path / "none.json")


@pytest.mark.parametrize("damage", [{"report": None}, {"report": {}}, {"report": {"error": None, "captures": 3}}])
def test_a_damaged_report(file: Path, tmp_path: Path, damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is a damaged report"):
        graph_fsdp.load_report(changed(file, tmp_path, **damage))


def test_paths_that_cannot_be_written(report: GraphReport, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="path: cannot be written"):
        report.save(tmp_path / "no" / "report.json")
    with pytest.raises(ValueError, match=r"path: a report is saved as \.html or \.json, and '.*report\.txt' ends in"):
        report.save(tmp_path / "report.txt")
    assert list(tmp_path.iterdir()) == []


# The command


def test_the_command_prints_a_report(report: GraphReport, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(file)]) == 0
    assert capsys.readouterr().out == f"{report}\n"


def test_the_command_follows_a_parameter(report: GraphReport, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "blocks.0.up.weight"
    assert main(["report", str(file), "--find", name]) == 0
    printed, life = capsys.readouterr().out.splitlines(), report.find(name)
    assert printed[0] == life.about and "forward" in printed and "backward" in printed
    events = [line.split()[:2] for line in printed if line.startswith("  ")]
    assert events == [[str(event.position), event.kind] for event in life.events]
    assert main(["report", str(file), "--find", "blocks.0.up.wieght"]) == 2
    assert "no sharded parameter 'blocks.0.up.wieght'; did you mean 'blocks.0.up.weight'" in capsys.readouterr().err


def test_the_command_prints_what_a_pass_made(
    report: GraphReport, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(file), "--diff", "free"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"# graph 0, forward\n{report.captures[0].views['forward'].diff('free')}\n")
    assert printed.count("# graph 1, ") == 2
    assert main(["report", str(file), "--code", "insert_gathers"]) == 0
    assert capsys.readouterr().out.startswith(
        f"# graph 0, capture\n{report.captures[0].views['capture'].stages['insert_gathers'].body}"
    )


def test_the_command_makes_a_page(report: GraphReport, file: Path, tmp_path: Path) -> None:
    assert main(["report", str(file), "--html", str(tmp_path / "page.html")]) == 0
    report.save(tmp_path / "here.html")
    assert (tmp_path / "page.html").read_bytes() == (tmp_path / "here.html").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.json"], "No such file"),
        (["{file}", "--html", "page.json"], "--html: 'page.json' must end in .html"),
        (["{file}", "--html", "no/page.html"], "path: cannot be written"),
        (["{file}", "--html", ""], "'' ends in neither"),
        (["{file}", "--diff", ""], "no graph has a stage ''"),
        (["{file}", "--code", ""], "no graph has a stage ''"),
        (["{file}", "--find", ""], "no sharded parameter ''"),
        (["{file}", "--diff", "fuse"], "no graph has a stage 'fuse'; there are causal_attention, "),
    ],
)
def test_what_the_command_cannot_do(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["report", *(a.format(file=file) for a in arguments)]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and said.out == ""


def test_the_command_prints_one_thing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(file), "--diff", "free", "--code", "free"])
    assert ended.value.code == 2 and "--code: not allowed with argument --diff" in capsys.readouterr().err


def test_a_narrow_terminal_gets_whole_names_and_numbers(
    report: GraphReport, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": "60", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    assert main(["report", str(file)]) == 0
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert printed.split() == str(report).split()


# When a pass fails


class FreesTooEarly(GraphPass):
    name = "frees_too_early"
    requires = frozenset({"freed"})

    def run(self, graph: Graph, context: PassContext) -> None:
        for gather in graph.gathers:
            if gather.free is not None and gather.wait is not None:
                gather.wait.append(gather.free)


class Raises(GraphPass):
    name = "raises"
    requires = frozenset({"bucketed"})

    def run(self, graph: Graph, context: PassContext) -> None:
        graph.nodes[-1].prepend(graph.nodes[0])  # leaves a graph that is in no order
        raise ZeroDivisionError("nothing to divide")


class RaisesInCapture(Raises):
    phase = "capture"
    requires = frozenset()


def failed(new: GraphPass, after: str = "slots") -> tuple[BaseException, Path]:
    pipeline = default_pipeline().insert_after(after, new)
    model = graph_fsdp.compile(MLP(), backend="eager", passes=pipeline)
    with pytest.raises((graph_fsdp.VerificationError, PassError)) as raised:
        model(torch.ones(4, 16))
    found = re.search(r"graph-fsdp report (\S+)$", str(raised.value))
    assert found is not None, raised.value
    return raised.value, Path(found[1])


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[BaseException, Path]:
    """The error of a pass that the verifier refuses, and the file that it names."""
    with pytest.MonkeyPatch.context() as patched, fake_process_group():
        patched.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("refused")))
        return failed(FreesTooEarly())


@pytest.fixture
def files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_graph_that_the_verifier_refuses_is_saved(refused: tuple[BaseException, Path]) -> None:
    error, path = refused
    report = graph_fsdp.load_report(path)
    assert path.parent.name.startswith("refused"), "the folder of temporary files"
    assert report.error is not None and report.error in f"VerificationError: {error}"
    stages = report.stages("forward")
    assert list(stages)[-1] == "frees_too_early (failed)" and "backward" in str(report)
    assert "+    free_blocks_0 = " in report.diff("frees_too_early (failed)", "forward")
    with pytest.raises(KeyError, match="the report follows no parameter: no graph in it went through all passes"):
        report.find("blocks.0.up.weight")


def test_a_graph_that_a_pass_leaves_in_no_order_is_saved(fake_group: None, files_here: Path) -> None:
    _, path = failed(Raises(), after="bucket")
    report = graph_fsdp.load_report(path)
    assert "ZeroDivisionError('nothing to divide')" in str(report)
    assert list(report.stages("forward")) == ["partition", "just_in_time", "bucket", "raises (failed)"]


def test_a_pass_on_dynamos_graph_that_fails(fake_group: None, files_here: Path) -> None:
    _, path = failed(RaisesInCapture(), after="insert_gathers")
    assert list(graph_fsdp.load_report(path).stages("capture")) == [
        "causal_attention",
        "insert_gathers",
        "raises (failed)",
    ]


def test_the_command_opens_what_an_error_saved(
    refused: tuple[BaseException, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = refused
    assert main(["report", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "VerificationError: pass 'frees_too_early' broke the forward graph" in printed
    assert "forward graph after partition, just_in_time, bucket, " in printed
    assert main(["report", str(path), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_nobody_else_can_read_the_file(refused: tuple[BaseException, Path]) -> None:
    _, path = refused
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_with_torchs_debug_output_the_file_lies_beside_it(
    fake_group: None, files_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    monkeypatch.setattr(torch._dynamo.config, "debug_dir_root", str(files_here / "debug"))
    _, path = failed(FreesTooEarly())
    assert (files_here / "debug") in path.parents


def test_where_nothing_can_be_written_the_error_is_still_that_of_the_pass(
    fake_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    pipeline = default_pipeline().insert_after("slots", FreesTooEarly())
    with pytest.raises(graph_fsdp.VerificationError, match=r"(?s)frees_too_early.*the graphs could not be saved: "):
        graph_fsdp.compile(MLP(), backend="eager", passes=pipeline)(torch.ones(4, 16))


def test_a_call_that_failed_is_no_cause_of_the_next_capture(fake_group: None, files_here: Path) -> None:
    failing = FreesTooEarly()
    pipeline = default_pipeline().insert_after("slots", failing)
    model = graph_fsdp.compile(MLP(), backend="eager", passes=pipeline)
    with pytest.raises(graph_fsdp.VerificationError):
        model(torch.ones(4, 16))
    failing.run = lambda graph, context: None  # type: ignore[method-assign,assignment,misc]
    model(torch.ones(4, 16))
    assert graph_fsdp.inspect(model).captures[-1].cause.kind == "first"
    assert len(os.listdir(files_here)) == 1
