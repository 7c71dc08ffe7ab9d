"""What ``graph_fsdp.monitor`` reports to: a terminal, loggers, functions, a file and a port of OpenMetrics text."""

from __future__ import annotations

import io
import logging
import math
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from monitored import Seen, compiled, sgd, step
from rich.console import Console

import graph_fsdp
from graph_fsdp import MonitorRecord
from graph_fsdp.monitoring import outputs

FULL = MonitorRecord(20, 10, 0.4123, 49_670.4, 0.031, 0.0251, 5_200_000_000, 1.23456, 1.124, 3, 1, ("a guard failed",))


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
