"""``graph_fsdp.monitor``: what a record says, what it is reported to, and that the model runs as without it."""

from __future__ import annotations

import gc
import itertools
import re
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fake_process_group
from marks import FAKE_GROUPS_REDUCE
from models import GPT, MLP
from monitored import BATCH, Seen, compiled, sgd, step
from torch import fx, nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

import graph_fsdp
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime.observe import Clock


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
    with (
        graph_fsdp.monitor(model, line=False, tokens=lambda args, kwargs: args[0].sum()),  # type: ignore[arg-type]
        pytest.raises(TypeError, match="tokens must return a whole number, got Tensor: count by shapes"),
    ):
        model(BATCH)


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
    assert not FAKE_GROUPS_REDUCE or all(map(torch.equal, *values))


def test_a_monitor_keeps_no_model_and_leaves_nothing_when_it_is_closed() -> None:
    model = compiled()
    optimizer = sgd(model)
    before = len(hooks)
    watch = graph_fsdp.monitor(model, every=1, line=False)
    step(model, optimizer)
    assert len(hooks) == before + 1 and not watch.is_closed
    assert repr(watch) == f"<Monitor of {type(model).__name__}: step 1>"
    gone = weakref.ref(model)
    del model, optimizer
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    watch.close()
    watch.close()
    assert len(hooks) == before and watch.is_closed
    assert repr(watch) == "<Monitor of a model that is gone: step 1, closed>"


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
