"""Ctrl-C comes before each line, one after the other, of what puts parameters into modules and optimizers: Python
raises it between any two of its instructions."""

from __future__ import annotations

import itertools
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from struck import Struck, assert_whole, compiled, step, warm
from torch import nn

import graph_fsdp
from graph_fsdp.errors import AlreadyCompiledError
from graph_fsdp.optimizers import groups, slices
from graph_fsdp.parameters import placeholder, sharded, unshard
from graph_fsdp.report.report import engine_of

FILES = {module.__file__ for module in (placeholder, sharded, unshard, groups, slices)}


@contextmanager
def interrupted_at(number: int) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt in a block before so many lines of ``FILES`` have run, and tell where. Each counts
    twice at most, as in the first two rounds of a loop."""
    lines, where = Counter[tuple[object, int]](), list[str]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        # Python looks for signals where it calls and jumps: not at a "try:", nor where a block of "with" is to be left.
        line = frame.f_code, frame.f_lineno
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event != "line" or text.startswith(("try:", "with ")) or lines[line] == 2:
            return trace
        lines[line] += 1
        if lines.total() == number:
            sys.settrace(None)
            where.append(f"{frame.f_code.co_name}, line {frame.f_lineno}")
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            yield where
    finally:
        sys.settrace(before)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.zeros(4, 16))


def use_whole(model: nn.Module) -> None:
    with graph_fsdp.unsharded(model):
        model.head(torch.zeros(4, 16))


def unshard_one(model: Any) -> None:
    model.blocks[0].unshard()
    model.blocks[0].reshard()


@pytest.mark.parametrize("used", [evaluate, unshard_one, pytest.param(use_whole, marks=pytest.mark.long)])
def test_parameters_are_shards_again(used: Callable[[nn.Module], object], fake_group: dist.ProcessGroup) -> None:
    model = warm(compiled())
    used(model)
    shards = list(model.parameters())
    for number in itertools.count(1):
        with interrupted_at(number) as where:
            used(model)
        if not where:
            break
        assert torch.is_grad_enabled(), where
        units = engine_of(model).unsharded
        if used is unshard_one:  # it may not have come to that
            model.blocks[0].reshard()
        assert not units.units and not units.held, where
        assert_whole(model, shards)
        used(model)
        assert_whole(model, shards)
    assert number > 20


def test_a_model_that_was_changed_in_part_is_not_compiled_again(fake_group: dist.ProcessGroup) -> None:
    changed = []
    for number in itertools.count(1):
        model = Struck(depth=3)
        with interrupted_at(number) as where:
            graph_fsdp.compile(model, backend="eager")
        if not where:
            break
        assert next(model.parameters()).shape == (32, 16)
        try:
            graph_fsdp.compile(model, backend="eager")
        except AlreadyCompiledError as error:
            assert "model was being changed by graph_fsdp.compile when Ctrl-C" in str(error)
            changed.append(where)
    assert number > len(changed) > 10


def test_an_optimizer_has_its_parameters_and_their_states_again(fake_group: dist.ProcessGroup) -> None:
    model = warm(compiled())
    shards = list(model.parameters())
    optimizer = graph_fsdp.distribute_optimizer(torch.optim.AdamW([{"params": shards[:5]}, {"params": shards[5:]}]))
    step(model, optimizer)
    for number in itertools.count(1):
        for p in shards:
            p.grad = torch.zeros_like(p)
        with interrupted_at(number) as where:
            optimizer.step()
        if not where:
            break
        assert torch.is_grad_enabled(), where
        members = [list(map(id, group["params"])) for group in optimizer.param_groups]
        assert members == [list(map(id, part)) for part in (shards[:5], shards[5:])], where
        assert set(map(id, optimizer.state)) == set(map(id, shards)), where
        assert all("exp_avg" in optimizer.state[p] for p in shards), where
    assert number > 20
