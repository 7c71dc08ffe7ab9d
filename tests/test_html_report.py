"""``report.save``: what the page knows, and what it does in a browser."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fake_process_group
from models import MLP
from torch import nn

import graph_fsdp
from graph_fsdp.passes.analysis.storages import CATEGORIES
from graph_fsdp.report.report import GraphReport, GraphView

SLOW = 120_000  # milliseconds after which an element is not coming, however busy the machine


def step(model: nn.Module) -> GraphReport:
    compiled = graph_fsdp.compile(model, backend="eager")
    compiled(torch.ones(4, 16)).sum().backward()
    return graph_fsdp.inspect(compiled)


@pytest.fixture(scope="module")
def report() -> GraphReport:
    with fake_process_group():
        return step(MLP())


@pytest.fixture(scope="module")
def page_file(report: GraphReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.save(path)
    return path


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', path.read_text())
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


# What the page knows


def rebuilt(stages: list[dict[str, Any]]) -> Iterator[list[str]]:
    lines: list[str] = []
    for stage in stages:
        before = iter(lines)
        lines = []
        for change in stage["changes"]:
            gone, added = (0, list(itertools.islice(before, change))) if isinstance(change, int) else change
            assert len(list(itertools.islice(before, gone))) == gone
            lines += added
        assert next(before, None) is None
        yield lines


def test_every_stage_of_every_graph_is_there(report: GraphReport, page_file: Path) -> None:
    views: list[GraphView] = [report.capture, report.joint, report.forward, report.backward]
    graphs = data_of(page_file)["graphs"]
    assert [graph["phase"] for graph in graphs] == [view.phase for view in views]
    for graph, view in zip(graphs, views, strict=True):
        assert [stage["name"] for stage in graph["stages"]] == list(view.stages)
        for lines, stage in zip(rebuilt(graph["stages"]), view.stages.values(), strict=True):
            assert "\n".join(lines) + "\n" == stage.body


def test_times_bytes_and_buckets_are_those_of_the_report(report: GraphReport, page_file: Path) -> None:
    graphs = [graph for graph in data_of(page_file)["graphs"] if graph["timeline"] is not None]
    for graph, view in zip(graphs, (report.forward, report.backward), strict=True):
        assert view.timeline is not None and view.memory is not None and view.graph is not None
        drawn = graph["timeline"]
        assert drawn["seconds"] == view.timeline.seconds and drawn["exposed"] == view.timeline.exposed
        computed = [duration for lane, _, _, duration, waits, _ in drawn["slices"] if lane == "compute" and not waits]
        assert sum(computed) == pytest.approx(view.timeline.compute * 1e6, abs=0.1)
        assert drawn["memory"]["peak"] == view.memory.peak == max(map(sum, drawn["memory"]["values"]))
        assert drawn["names"] == [node.name for node in view.graph.nodes]
        assert [row["name"] for row in graph["buckets"]] == [row.name for row in view.buckets]
        events = [drawn["names"][node] for lane, node, *_ in drawn["slices"] if lane != "compute"]
        assert events == [event.node.name for event in view.timeline.events]


def test_lives_are_those_that_find_gives(report: GraphReport, page_file: Path) -> None:
    lives = data_of(page_file)["lives"]
    assert list(lives) == list(report.spec.parameters)
    for name, (about, events) in lives.items():
        life = report.find(name)
        assert str(life).startswith(about)
        assert [(phase, position) for phase, position, *_ in events] == [(e.phase, e.position) for e in life.events]


def test_the_page_needs_nothing_else(page_file: Path) -> None:
    text = page_file.read_text()
    assert not re.search(r'(src|href)\s*=\s*"(?!data:)', text) and "http" not in text.replace("https://", "http")


class Unsafe(nn.Module):
    """Its module and its line would end the script that the data stands in, if that were not packed."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("</script><script>caught()</script>", nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.children())(x)


def test_names_cannot_break_out_of_the_page(fake_group: None, tmp_path: Path) -> None:
    step(Unsafe()).save(tmp_path / "report.html")
    assert "caught" not in (tmp_path / "report.html").read_text()


def test_bad_input(report: GraphReport, tmp_path: Path, fake_group: None) -> None:
    with pytest.raises(FileNotFoundError, match=r"path: cannot be written"):
        report.save(tmp_path / "no" / "report.html")
    with pytest.raises(LookupError, match=r"no graph was captured yet; run the model once"):
        graph_fsdp.inspect(graph_fsdp.compile(MLP(), backend="eager")).save(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, [os.environ.get("CHROMIUM"), *map(shutil.which, names)]), None)
    if found is None:
        pytest.skip("no Chromium on this machine; CHROMIUM=/path/to/it names one")
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, page_file: Path) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1200, "height": 1400})
    page.set_default_timeout(SLOW)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(page_file.as_uri())
    page.wait_for_selector("#stages button")
    yield page
    assert said == []  # no message, no error
    page.close()


def code_lines(page: Any) -> list[str]:
    return page.eval_on_selector_all("#code-lines div", "lines => lines.map(line => line.textContent.slice(2))")


def test_the_page_shows_the_numbers(page: Any) -> None:
    assert page.title() == "graph_fsdp: 10 parameters on 8 ranks"
    assert "predicted on cpu" in page.inner_text("#numbers") and "buckets 3" in page.inner_text("#numbers")
    assert page.locator("#buckets tbody tr").count() == 9
    assert "24.1 kB at mm_5" in page.inner_text("#peaks")


def test_hovering_says_what_lies_there(page: Any) -> None:
    box = page.locator("#timeline").bounding_box()
    seen = set()
    for x in range(152, int(box["width"]), 3):
        for y in (40, 76, 150):  # compute, communication, memory
            page.mouse.move(box["x"] + x, box["y"] + y)
            if page.locator("#tooltip").is_visible():
                seen.add(page.inner_text("#tooltip").split("\n")[0])
    assert {"gather_blocks_0", "reduce_blocks_1", "full_blocks_0"} <= seen
    assert any(" kB at " in text for text in seen)


def test_zooming_and_moving(page: Any) -> None:
    everything = page.inner_text("#range")
    page.click("#zoom-in")
    closer = page.inner_text("#range")
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + 500, box["y"] + 40)
    page.mouse.wheel(0, -300)
    page.wait_for_function("before => document.getElementById('range').textContent !== before", arg=closer)
    page.keyboard.press("Tab")
    page.focus("#timeline")
    page.keyboard.press("0")
    assert page.inner_text("#range") == everything != closer


def test_stages_and_what_they_changed(page: Any, report: GraphReport) -> None:
    page.select_option("#graph", label="backward")
    page.click("#stages button:has-text('free')")
    added = page.eval_on_selector_all(
        "#code-lines .added", "lines => lines.map(line => line.textContent.slice(2).trim())"
    )
    assert [line.split(" = ")[0] for line in added] == ["free_root", "free_blocks_1", "free_blocks_0"]
    page.click("#stages button:has-text('prefetch')")
    assert page.locator("#code-lines .moved").count() > 0  # the pass only moves nodes
    assert page.locator("#code-lines .added, #code-lines .removed").count() == 0
    page.uncheck("#only-changes")
    assert code_lines(page)[0] == report.backward.stages["prefetch"].body.splitlines()[0]


def test_searching_a_parameter(page: Any, report: GraphReport) -> None:
    page.fill("#search", "1.down")
    assert page.eval_on_selector_all("#matches option", "options => options.map(option => option.value)") == [
        "blocks.1.down.weight",
        "blocks.1.down.bias",
    ]
    page.keyboard.press("Enter")
    assert "blocks.1.down.weight: float32[16, 32] of unit blocks.1" in page.inner_text("#parameter")
    kinds = page.eval_on_selector_all("#parameter tr td:nth-child(2)", "cells => cells.map(cell => cell.textContent)")
    assert kinds == [event.kind for event in report.find("blocks.1.down.weight").events]
    page.click("#parameter tr:has-text('reduce_start')")
    assert page.input_value("#graph") == "3"  # backward
    assert (
        "reduce_blocks_1" in page.inner_text("#code-lines .found >> nth=0")
        or page.locator("#code-lines .found:has-text('reduce_blocks_1')").count()
    )
    page.fill("#search", "no such name")
    assert page.eval_on_selector("#search", "field => field.validationMessage") == "no parameter of this name"


def test_times_on_the_axis_differ_where_they_lie_close(page: Any) -> None:
    assert page.evaluate("[58.84, 58.86].map((t) => formatTime(t, 0.02))") == ["58.84 µs", "58.86 µs"]
    assert page.evaluate("[20795, 20800].map((t) => formatTime(t, 5))") == ["20.795 ms", "20.800 ms"]
    assert page.evaluate("formatTime(20795)") == "20.8 ms"


def test_every_category_has_a_color_of_its_own(page: Any) -> None:
    colors = page.evaluate("PALETTE")
    assert len(set(colors)) == len(colors) == len(CATEGORIES)


# Of a deep model

LAYERS = 300


@pytest.fixture(scope="module")
def deep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deep") / "report.html"
    graph_fsdp.plan(
        lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS))),
        (torch.ones(4, 8, device="meta"),),
        mesh_shape=(8,),
        hardware="h100",
        loss=torch.sum,
        auto_wrap_policy={nn.Linear},
    ).save(path)
    return path


def test_the_page_of_a_deep_model_makes_what_is_looked_at(browser: Any, deep_file: Path) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 1400})
    page.set_default_timeout(SLOW)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(deep_file.as_uri())
    page.wait_for_selector("#stages button")
    rows = page.locator("#buckets tbody tr")
    assert rows.count() == 200 and page.locator("#code-lines div").count() < 100
    assert page.evaluate("document.querySelectorAll('*').length") < 5_000
    page.evaluate("document.querySelector('#bucket-section .scroll').scrollTop = 1e6")
    page.wait_for_function("document.querySelectorAll('#buckets tbody tr').length > 200")

    name = f"{LAYERS - 10}.weight"
    page.fill("#search", name)
    page.keyboard.press("Enter")
    assert f"{name}: float32[8, 8] of unit {LAYERS - 10}" in page.inner_text("#parameter")
    everything = page.inner_text("#range")
    page.click("#parameter tr:has-text('reduce_start')")
    assert page.inner_text("#range") != everything, "the timeline is where the parameter is reduced"
    page.wait_for_selector(f"#code-lines .found:has-text('reduce_{LAYERS - 10}')")
    page.uncheck("#only-changes")
    page.evaluate("document.getElementById('code').scrollTop = 1e6")
    page.wait_for_function("document.getElementById('code-lines').textContent.includes('return')")
    assert page.locator("#code-lines div").count() < 100
    assert said == []
    page.close()


def test_the_overview_shows_how_much_of_the_time_compute_waits(browser: Any, deep_file: Path) -> None:
    """Hundreds of waits are narrower than a pixel: the part of the lane that is red is their part of the time."""
    page = browser.new_page(viewport={"width": 500, "height": 1400}, color_scheme="light")
    page.set_default_timeout(SLOW)
    page.goto(deep_file.as_uri())
    page.wait_for_selector("#stages button")
    red, blue, due = page.evaluate(
        """async () => {
          await new Promise(requestAnimationFrame);
          await new Promise(requestAnimationFrame);
          const canvas = document.querySelector("#timeline-section canvas"), top = AXIS + GAP;
          const pixels = canvas.getContext("2d").getImageData(LABEL + 1, top, canvas.width - LABEL - 2, LANE).data;
          let red = 0, blue = 0;
          for (let n = 0; n < pixels.length; n += 4) pixels[n] > pixels[n + 2] ? red++ : blue++;
          const graphs = (await readData()).graphs.flatMap((g) => g.timeline ?? []), sum = (a, b) => a + b;
          const waits = graphs.flatMap((g) => g.slices.filter((s) => s[4]).map((s) => s[3])).reduce(sum);
          return [red, blue, waits / graphs.map((g) => g.seconds * 1e6).reduce(sum)];
        }"""
    )
    assert 0.1 < due < 0.9
    assert red / (red + blue) == pytest.approx(due, abs=0.1)
    page.close()
