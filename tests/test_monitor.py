"""``graph_fsdp.monitor``: what a record says, what it is reported to, and that the model runs as without it."""

from __future__ import annotations

import gc
import io
import itertools
import logging
import math
import re
import socket
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fake_process_group
from expecttest import assert_expected_inline
from models import GPT, MLP
from rich.console import Console
from torch import fx, nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

import graph_fsdp
from graph_fsdp import MonitorRecord
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.monitoring import outputs
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime.observe import Clock

BATCH = torch.ones(4, 16)
FULL = MonitorRecord(20, 10, 0.4123, 49_670.4, 0.031, 0.0251, 5_200_000_000, 1.23456, 1.124, 3, 1, ("a guard failed",))


class Seen:
    """Keeps what a function of a dict and a step was given."""

    def __init__(self) -> None:
        self.values: list[tuple[int, dict[str, float]]] = []

    def __call__(self, values: dict[str, float], step: int) -> None:
        self.values.append((step, values))

    def of(self, name: str) -> list[float | None]:
        return [values.get(f"graph_fsdp/{name}") for _, values in self.values]


def compiled(model: nn.Module | None = None, **options: Any) -> Any:
    return graph_fsdp.compile(model or MLP(), **{"backend": "eager", **options})


def step(model: nn.Module, *optimizers: torch.optim.Optimizer, batch: torch.Tensor = BATCH) -> None:
    model(batch).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts how often it was read, in seconds."""
    count = itertools.count()
    monkeypatch.setattr(Clock, "mark", lambda self: float(next(count)))


# What a step is. Each line names the marks of the clock: the begin of a first step, the end of each.


@pytest.mark.usefixtures("ticks")
def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    model, seen = compiled(), Seen()
    optimizer = sgd(model)
    with graph_fsdp.monitor(model, every=2, to=seen, line=False) as watch:
        for _ in range(5):
            step(model, optimizer)
        assert [s for s, _ in seen.values] == [2, 4], "a step has ended when the next one begins"
    # Step 1 captured a graph (0 to 1), and is left out of the mean of 1 and 2.
    assert [s for s, _ in seen.values] == [2, 4, 5] and seen.of("step_seconds") == [1.0, 1.0, 1.0]
    assert watch.last is not None and watch.last.steps == 1


@pytest.mark.usefixtures("ticks")
def test_an_evaluation_between_two_steps_belongs_to_none() -> None:
    model, seen = compiled(), Seen()
    optimizer = sgd(model)
    with graph_fsdp.monitor(model, every=1, to=seen, line=False) as watch:
        step(model, optimizer)  # 0 to 1
        with torch.no_grad():
            model(BATCH)
        Clock(torch.device("cpu")).mark()  # 2: somebody looks at the clock
        step(model, optimizer)  # 3 to 4
    assert seen.of("step_seconds") == [1.0, 1.0]
    assert watch.last is not None and watch.last.causes == (
        "a guard of graph 0 failed: GLOBAL_STATE changed: grad_mode",
    )


@pytest.mark.usefixtures("ticks")
def test_accumulation_and_several_optimizers_are_one_step() -> None:
    model, seen = compiled(GPT()), Seen()
    tokens = torch.zeros(2, 8, dtype=torch.long)
    halves = [list(model.parameters())[half::2] for half in (0, 1)]
    two = [torch.optim.SGD(half, lr=1e-3) for half in halves]
    other = sgd(nn.Linear(2, 2))
    with graph_fsdp.monitor(model, every=1, to=seen, line=False):
        for _ in range(2):
            model(tokens).sum().backward()
            other.step()  # of no parameter of the model
            step(model, *two, batch=tokens)
    # 0 to 2, 2 to 4: each optimizer reads the clock, and the last one ends the step.
    assert seen.of("step_seconds") == [2.0, 2.0]
    assert seen.of("tokens_per_second") == [32 / 2, 32 / 2]


@pytest.mark.usefixtures("ticks")
def test_tokens_are_what_a_function_says_and_steps_end_where_the_program_says() -> None:
    model, seen = compiled(), Seen()
    with graph_fsdp.monitor(
        model, every=1, to=seen, line=False, tokens=lambda args, kwargs: args[0].shape[0] * 10
    ) as watch:
        for _ in range(2):
            step(model)
            watch.step_ended()
    assert seen.of("tokens_per_second") == [40.0, 40.0]


@pytest.mark.usefixtures("ticks")
def test_two_models_have_monitors_of_their_own() -> None:
    first, second, seen = compiled(), compiled(), [Seen(), Seen()]
    optimizers = [sgd(first), sgd(second)]
    with (
        graph_fsdp.monitor(first, every=1, to=seen[0], line=False),
        graph_fsdp.monitor(second, every=1, to=seen[1], line=False),
    ):
        for _ in range(2):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                step(model, optimizer)
    # Of the marks 0, 1 (first), 2, 3 (second), 4 (first), 5 (second): a step lasts to the next of the same model.
    assert [s.of("step_seconds") for s in seen] == [[1.0, 3.0], [1.0, 2.0]]


# What else is in a record


def test_the_norm_is_that_of_clipping_or_else_of_the_gradients() -> None:
    model, seen, norms = compiled(), Seen(), []
    optimizer = sgd(model)
    with graph_fsdp.monitor(model, every=1, to=seen, line=False):
        for clips in (True, False, True):
            model(BATCH).sum().backward()
            if clips:
                norms.append(float(model.clip_grad_norm_(1e-3)))
            else:
                norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
            optimizer.step()
            model.zero_grad()
    assert seen.of("gradient_norm") == pytest.approx(norms, rel=1e-6)


def test_exposed_communication_is_the_waits_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    with fake_process_group():
        model, seen = compiled(), Seen()
        optimizer = sgd(model)
        with graph_fsdp.monitor(model, every=2, to=seen, line=False):
            monkeypatch.setattr(Clock, "mark", lambda self: float(next(count)))
            for _ in range(4):
                step(model, optimizer)
        report = graph_fsdp.inspect(model)
        waits = sum("wait" in line for view in (report.forward, report.backward) for line in view.program.splitlines())
        predicted = sum(view.timeline.exposed for view in (report.forward, report.backward))
    assert waits == 6 + 2 and seen.of("exposed_seconds") == [float(waits)] * 2
    assert seen.of("predicted_exposed_seconds") == pytest.approx([predicted] * 2)
    assert seen.of("straggler_factor") == [None, None], "fake ranks tell nothing"


def test_recompilations_have_their_causes_and_the_first_capture_is_none() -> None:
    model, seen = compiled(dynamic=False), Seen()
    optimizer = sgd(model)
    with graph_fsdp.monitor(model, every=2, to=seen, line=False) as watch:
        for rows in (4, 4, 4, 3):
            step(model, optimizer, batch=torch.ones(rows, 16))
    assert seen.of("recompilations") == [0, 1]
    assert watch.last is not None and len(watch.last.causes) == 1
    assert "x is float32[3, 16] now" in watch.last.causes[0]


def test_peak_memory_is_that_of_the_process_on_the_cpu() -> None:
    model, seen = compiled(), Seen()
    with graph_fsdp.monitor(model, every=1, to=seen, line=False):
        step(model, sgd(model))
    (peak,) = seen.of("peak_bytes")
    assert peak is not None and peak > 2**25


def test_a_model_compiled_whole_is_watched_without_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs run here as they are: compiling them takes long, and changes nothing of it."""

    def compile_whole(self: Any, module: fx.GraphModule, kind: str) -> Any:
        return lambda inputs: module(*inputs)

    model, seen = compiled(), Seen()
    monkeypatch.setattr(engine_of(model), "whole", True)
    monkeypatch.setattr(type(engine_of(model).backend), "compile_whole", compile_whole)
    with graph_fsdp.monitor(model, every=1, to=seen, line=False):
        step(model, sgd(model))
    assert seen.of("exposed_seconds") == [None] and seen.of("step_seconds") != [None]


# The model runs as without it


def test_programs_counts_and_numbers_are_those_without_a_monitor() -> None:
    texts, counts, values = [], [], []
    for watched in (False, True):
        torch.manual_seed(0)
        with fake_process_group():
            model = compiled()
            optimizer = sgd(model)
            watch = graph_fsdp.monitor(model, every=1, line=False) if watched else None
            for _ in range(3):
                step(model, optimizer)
            report = graph_fsdp.inspect(model)
            texts.append([report.forward.program, report.backward.program, len(report.graphs)])
            counts.append((report.collectives, report.peak_gathered_bytes))
            values.append([p.to_local().clone() for p in model.parameters()])
            assert watch is None or watch.close() is None
    assert texts[0] == texts[1] and counts[0] == counts[1]
    assert all(map(torch.equal, *values))


def test_a_monitor_keeps_no_model_and_leaves_nothing_when_it_is_closed() -> None:
    model = compiled()
    optimizer = sgd(model)
    before = len(hooks)
    watch = graph_fsdp.monitor(model, every=1, line=False)
    step(model, optimizer)
    assert len(hooks) == before + 1 and not watch.is_closed
    gone = weakref.ref(model)
    del model, optimizer
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    watch.close()
    watch.close()
    assert len(hooks) == before and watch.is_closed


def test_a_monitor_that_is_dropped_with_its_model_leaves_nothing() -> None:
    before, model = len(hooks), compiled()
    graph_fsdp.monitor(model, line=False)
    assert len(hooks) == before + 1
    del model
    torch._dynamo.reset()
    gc.collect()
    assert len(hooks) == before


def test_an_interrupt_closes_it_and_what_was_watched_is_reported() -> None:
    model, seen = compiled(), Seen()
    optimizer = sgd(model)
    with pytest.raises(KeyboardInterrupt), graph_fsdp.monitor(model, every=10, to=seen, line=False) as watch:
        step(model, optimizer)
        model(BATCH)
        raise KeyboardInterrupt
    assert watch.is_closed and [s for s, _ in seen.values] == [1]
    step(model, optimizer)
    assert len(seen.values) == 1


# What it reports to


def test_the_line_of_a_record() -> None:
    assert_expected_inline(
        str(FULL),
        """step 20, 412.3 ms, 49,670 tokens/s, exposed 31.0 ms (predicted 25.1), peak 5.20 GB, norm 1.235, slowest rank 3 x1.12, captured again: a guard failed""",  # noqa: E501
    )
    assert str(MonitorRecord(3, 3, gradient_norm=math.nan)) == "step 3, norm nan"


def test_the_line_is_for_a_terminal_alone() -> None:
    text = io.StringIO()
    assert outputs.terminal(Console(file=text)) is None
    show = outputs.terminal(Console(file=text, force_terminal=True, width=40))
    assert show is not None
    show(FULL)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue())
    assert plain == f"{FULL}\n" and "\x1b[31mcaptured" in text.getvalue() and "\x1b[33mslowest" in text.getvalue()


def test_standard_error_that_is_no_terminal_stays_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    model = compiled()
    with graph_fsdp.monitor(model, every=1):
        step(model, sgd(model))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_loggers_writers_and_functions(caplog: pytest.LogCaptureFixture) -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars.append((tag, value, step))

    model, seen, writer = compiled(), Seen(), Writer()
    with (
        caplog.at_level(logging.INFO, "of.the.program"),
        graph_fsdp.monitor(model, every=1, to=[logging.getLogger("of.the.program"), writer, seen]) as watch,
    ):
        step(model, sgd(model))
    (message,) = [r.getMessage() for r in caplog.records if r.name == "of.the.program"]
    assert message == str(watch.last) and message.startswith("step 1, ")
    ((number, values),) = seen.values
    assert writer.scalars == [(name, value, 1) for name, value in values.items()] and number == 1
    assert {"graph_fsdp/step_seconds", "graph_fsdp/peak_bytes", "graph_fsdp/gradient_norm"} < values.keys()


def test_what_cannot_report_is_told_once_and_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    def fails(values: dict[str, float], step: int) -> None:
        raise ConnectionError("no network")

    model, seen = compiled(), Seen()
    optimizer = sgd(model)
    with graph_fsdp.monitor(model, every=1, to=[fails, seen], line=False):
        for _ in range(3):
            step(model, optimizer)
    assert [s for s, _ in seen.values] == [1, 2, 3]
    (told,) = [r.getMessage() for r in caplog.records if "the monitor cannot report" in r.getMessage()]
    assert "step 1 (ConnectionError: no network); training goes on" in told


def test_open_metrics_text() -> None:
    assert_expected_inline(
        FULL.open_metrics('G"P\\T'),
        """\
# TYPE graph_fsdp_steps counter
# HELP graph_fsdp_steps Steps of an optimizer that were reported.
graph_fsdp_steps_total{model="G\\"P\\\\T"} 20
# TYPE graph_fsdp_step_seconds gauge
# UNIT graph_fsdp_step_seconds seconds
# HELP graph_fsdp_step_seconds Mean time of a step.
graph_fsdp_step_seconds{model="G\\"P\\\\T"} 0.4123
# TYPE graph_fsdp_tokens_per_second gauge
# HELP graph_fsdp_tokens_per_second Tokens per second of a rank.
graph_fsdp_tokens_per_second{model="G\\"P\\\\T"} 49670.4
# TYPE graph_fsdp_exposed_seconds gauge
# UNIT graph_fsdp_exposed_seconds seconds
# HELP graph_fsdp_exposed_seconds Time for which the last step waited for collectives.
graph_fsdp_exposed_seconds{model="G\\"P\\\\T"} 0.031
# TYPE graph_fsdp_predicted_exposed_seconds gauge
# UNIT graph_fsdp_predicted_exposed_seconds seconds
# HELP graph_fsdp_predicted_exposed_seconds The same, as the schedule's clock predicts it.
graph_fsdp_predicted_exposed_seconds{model="G\\"P\\\\T"} 0.0251
# TYPE graph_fsdp_peak_bytes gauge
# UNIT graph_fsdp_peak_bytes bytes
# HELP graph_fsdp_peak_bytes Most memory that was held, on the rank that held most.
graph_fsdp_peak_bytes{model="G\\"P\\\\T"} 5200000000
# TYPE graph_fsdp_gradient_norm gauge
# HELP graph_fsdp_gradient_norm 2-norm of all gradients in the last step.
graph_fsdp_gradient_norm{model="G\\"P\\\\T"} 1.23456
# TYPE graph_fsdp_straggler_factor gauge
# HELP graph_fsdp_straggler_factor Time of the slowest rank without waits, by that of the median one.
graph_fsdp_straggler_factor{model="G\\"P\\\\T"} 1.124
# TYPE graph_fsdp_straggler_rank gauge
# HELP graph_fsdp_straggler_rank The slowest rank.
graph_fsdp_straggler_rank{model="G\\"P\\\\T"} 3
# TYPE graph_fsdp_recompilations counter
# HELP graph_fsdp_recompilations Graphs that were captured again.
graph_fsdp_recompilations_total{model="G\\"P\\\\T"} 1
# EOF
""",
    )
    assert 'norm{model="M"} NaN\n' in MonitorRecord(1, 1, gradient_norm=math.nan).open_metrics("M")
    assert 'norm{model="M"} +Inf\n' in MonitorRecord(1, 1, gradient_norm=math.inf).open_metrics("M")


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.prom"
    model = compiled()
    optimizer = sgd(model)
    with graph_fsdp.monitor(model, every=1, line=False, path=path):
        step(model, optimizer)
        with pytest.raises(FileNotFoundError):
            path.read_text()
        step(model, optimizer)
        first = path.stat().st_ino
        assert 'graph_fsdp_steps_total{model="MLP"} 1\n' in path.read_text()
    assert 'graph_fsdp_steps_total{model="MLP"} 2\n' in path.read_text() and path.stat().st_ino != first
    assert list(tmp_path.iterdir()) == [path] and path.stat().st_mode & 0o777 == 0o644


def fetched(port: int, path: str = "/metrics") -> tuple[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_a_port_answers_on_this_machine_alone() -> None:
    model = compiled()
    optimizer = sgd(model)
    with graph_fsdp.monitor(model, every=1, line=False, port=0) as watch:
        assert watch.address is not None
        host, port = watch.address
        assert host == "127.0.0.1"
        kind, text = fetched(port)
        assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert 'graph_fsdp_steps_total{model="MLP"} 0\n' in text and text.endswith("# EOF\n")
        step(model, optimizer)
        step(model, optimizer)
        assert 'graph_fsdp_steps_total{model="MLP"} 1\n' in fetched(port)[1]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetched(port, "/etc/passwd")
    with pytest.raises(urllib.error.URLError):
        fetched(port)
    assert watch.address is None


# Bad arguments


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield int(held.getsockname()[1])


def test_wrong_arguments_are_named_and_nothing_is_watched(taken: int, tmp_path: Path) -> None:
    model = compiled()
    for options, error, text in (
        ({"every": 0}, ValueError, "every must be a whole number of steps, 1 or more, got 0"),
        ({"every": True}, ValueError, "every must be a whole number of steps"),
        ({"line": 1}, TypeError, "line must be True or False, got 1"),
        ({"tokens": 8}, TypeError, "tokens must be a function of (args, kwargs), or None, got 8"),
        (
            {"to": "wandb"},
            TypeError,
            "to must be a logging.Logger, an object with TensorBoard's add_scalar, a function",
        ),
        ({"to": [print, Seen]}, TypeError, "to must be a logging.Logger"),
        ({"path": 3}, TypeError, "path must be the path of a file to write, or None, got 3"),
        ({"path": tmp_path / "none" / "m"}, FileNotFoundError, "path: cannot be written"),
        ({"port": 70_000}, ValueError, "port must be a number from 1 to 65535"),
        ({"port": taken}, OSError, f"port: cannot listen on 127.0.0.1:{taken}"),
        ({"port": 0, "host": ""}, TypeError, "host must be the name or address to listen on"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            graph_fsdp.monitor(model, **options)  # type: ignore[arg-type]
    assert not engine_of(model).watchers
    with pytest.raises(TypeError, match=r"model: MLP was not compiled by graph_fsdp; call graph_fsdp\.compile first"):
        graph_fsdp.monitor(MLP())
    with pytest.raises(ValueError, match=re.escape("model: it is the module 'blocks.0' of a model; monitor the model")):
        graph_fsdp.monitor(model.blocks[0])


def test_a_model_on_xla_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    monkeypatch.setattr(type(engine_of(model).backend), "name", "xla")
    with pytest.raises(UnsupportedError, match=r"model: it was compiled with backend='xla'.*torch_xla\.debug\.metrics"):
        graph_fsdp.monitor(model)
