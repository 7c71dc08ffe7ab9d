"""``graph_fsdp.monitor`` on gloo ranks: what they know of each other, and that none waits for another."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import MLP
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graph_fsdp
from graph_fsdp import MonitorRecord, compat
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime.observe import Clock

FACTS = Facts(__name__)


@contextmanager
def ticking(seconds: float) -> Iterator[None]:
    """A clock that goes on by so many seconds whenever it is read."""
    count = itertools.count()
    with mock.patch.object(Clock, "mark", lambda self: seconds * next(count)):
        yield


def trained(model: Any, records: list[MonitorRecord], steps: int, **options: Any) -> list[float]:
    """The norms of the gradients; on the first rank ``records`` has what was reported."""
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.0), []
    with graph_fsdp.monitor(model, line=False, to=lambda *_: records.append(watch.last), **options) as watch:
        for _ in range(steps):
            model(torch.randn(2, 16)).square().sum().backward()
            total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            norms.append(float(total.full_tensor()))  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
    return norms


@FACTS
def the_slowest_rank_is_named_by_the_first() -> None:
    rank, records = dist.get_rank(), list[MonitorRecord]()
    with ticking(1.0 + 2 * rank):
        norms = trained(graph_fsdp.compile(MLP(), backend="eager"), records, 5, every=2, tokens=lambda *_: 16)
    if rank > 0:
        assert records == []
        return
    # Ranks publish a step when they begin the next, so that the second record waits for none: it may not be compared.
    assert [record.step for record in records] == [2, 4, 5]
    first = records[0]
    assert (first.straggler_rank, first.straggler_factor) == (1, 3.0)
    # Of 16 tokens each; a step without captures is as many ticks on both, and those of rank 1 are three times as long.
    assert first.step_seconds is not None
    assert first.tokens_per_second == pytest.approx((16 / first.step_seconds + 16 / first.step_seconds / 3) / 2)
    assert first.gradient_norm == pytest.approx(norms[1], rel=1e-5)


@FACTS
def the_norm_of_replicas_and_of_ignored_parameters_counts_each_once() -> None:
    for mesh in (None, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))):
        records = list[MonitorRecord]()
        norms = trained(graph_fsdp.compile(MLP(), mesh, backend="eager"), records, 3, every=1)
        for record, norm in zip(records[:1], norms, strict=False):
            assert record.gradient_norm == pytest.approx(norm, rel=1e-5)
    model: Any = MLP()
    model = graph_fsdp.compile(model, backend="eager", ignored_params=[model.head.bias])
    model(torch.ones(2, 16)).sum().backward()
    norm = float(model.clip_grad_norm_(1e9))
    model.zero_grad()
    optimizer, ones = torch.optim.SGD(model.parameters(), lr=0.0), list[Any]()
    with graph_fsdp.monitor(model, line=False, every=1, to=lambda values, step: ones.append(values)):
        for _ in range(3):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        assert ones[0]["graph_fsdp/gradient_norm"] == pytest.approx(norm, rel=1e-5)


@FACTS
def gradients_of_units_that_are_whole_are_clipped_and_count() -> None:
    model: Any = graph_fsdp.compile(MLP(), backend="eager")
    optimizer, found, clipped = torch.optim.SGD(model.parameters(), lr=0.0), list[Any](), list[list[Tensor]]()
    norms = list[float]()
    for whole in (0, 1, 2):  # units
        model(torch.ones(2, 16)).sum().backward()
        for unit in model.blocks[:whole]:
            unit.unshard()
        norms.append(float(model.clip_grad_norm_(1e-3)))
        for unit in model.blocks:
            unit.reshard()
        clipped.append([p.grad.to_local() for p in model.parameters()])
        model.zero_grad()
    assert norms == [norms[0]] * 3
    torch.testing.assert_close(clipped[1:], clipped[:1] * 2, rtol=0, atol=0)
    with graph_fsdp.monitor(model, line=False, every=1, to=lambda values, step: found.append(values)):
        for _ in range(3):
            model(torch.ones(2, 16)).sum().backward()
            model.blocks[0].unshard()
            optimizer.step()
            optimizer.zero_grad()
            model.blocks[0].reshard()
    if dist.get_rank() == 0:
        assert found[0]["graph_fsdp/gradient_norm"] == pytest.approx(norms[0], rel=1e-5)


@FACTS
def of_tensor_parallel_ranks_the_first_one_reports() -> None:
    mesh, model, records = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), MLP(), list[MonitorRecord]()
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    leaves = ((name, styles.get(name.rpartition(".")[2])) for name, _ in model.named_modules())
    parallelize_module(model, mesh["tp"], {name: style for name, style in leaves if style is not None})
    compiled: Any = graph_fsdp.compile(model, mesh["dp"], backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.0)
    with graph_fsdp.monitor(compiled, line=False, every=1, to=lambda *_: records.append(watch.last)) as watch:
        for _ in range(2):
            compiled(torch.ones(2, 16)).sum().backward()
            norm = float(compiled.clip_grad_norm_(1e9))
            optimizer.step()
            optimizer.zero_grad()
    assert len(records) == (2 if dist.get_rank() == 0 else 0)
    assert all(record.gradient_norm == pytest.approx(norm) for record in records)


@FACTS
def where_one_rank_alone_is_watched_nothing_waits() -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    optimizer, records = torch.optim.SGD(model.parameters(), lr=0.0), list[Any]()
    watch = graph_fsdp.monitor(model, every=1, line=False, to=lambda *_: None) if dist.get_rank() == 0 else None
    for _ in range(4):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        records.append(watch.last if watch is not None else None)
    if watch is not None:
        watch.close()
        assert watch.last is not None and watch.last.step == 4
        assert watch.last.exposed_seconds is not None and watch.last.straggler_factor is None
        assert watch.last.gradient_norm is None, "a part of the gradients is on the other rank"


@FACTS
def a_copy_is_known_by_its_number_whoever_is_watched() -> None:
    model: Any = graph_fsdp.compile(MLP(), backend="eager")
    average, teacher = copy.deepcopy(model), copy.deepcopy(model)
    watch = graph_fsdp.monitor(teacher, every=1, line=False) if dist.get_rank() == 0 else None
    for each in (model, average, teacher):
        each(torch.ones(2, 16)).sum().backward()
    assert [engine_of(each).schedules.index.partition(".")[2] for each in (average, teacher)] == ["0", "1"]
    if watch is not None:
        watch.close()
    another, records = copy.deepcopy(model), list[MonitorRecord]()
    with ticking(1.0 + 2 * dist.get_rank()):
        trained(another, records, 5, every=2)
    if dist.get_rank() == 0:
        assert records[0].straggler_rank == 1


@FACTS
def what_ranks_have_published_is_deleted() -> None:
    model: nn.Module = graph_fsdp.compile(MLP(), backend="eager")
    optimizer, counts = torch.optim.SGD(model.parameters(), lr=0.0), []
    with graph_fsdp.monitor(model, every=1, line=False):
        for count in (6, 6):
            for _ in range(count):
                model(torch.ones(2, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            dist.barrier()
            counts.append(compat.default_store().num_keys())
            dist.barrier()
    assert abs(counts[1] - counts[0]) <= 1, "the record before this step may be there, or be read already"


test_on_two_ranks = FACTS.on(2)
