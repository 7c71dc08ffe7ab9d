"""``cuda_graphs=True``: what it is refused with, what it changes in programs and reports, and which regions it takes.

Graphs are executed again on the CPU (``reexecution.py``); the last test needs CUDA. Numbers on two ranks:
``test_cuda_graphs_ranks.py``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from models import MLP
from reexecution import Reexecution, cpu_graphs
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime.cuda.capture import CudaCapture
from graph_fsdp.runtime.slots import GatheredBytes, SlotMemory


@pytest.fixture
def graphs() -> Iterator[None]:
    with cpu_graphs():
        yield


class Layers(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return graph_fsdp.compile(model, backend="eager", auto_wrap_policy={nn.Linear}, cuda_graphs=True, **options)


def train(model: nn.Module, steps: int = 4) -> graph_fsdp.GraphReport:
    for _ in range(steps):
        model(torch.ones(4, 16)).sum().backward()
    return graph_fsdp.inspect(model)


# Refused, before anything is changed


def refused(error: type[Exception], *words: str, **options: Any) -> None:
    model = MLP()
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(error) as raised:
        graph_fsdp.compile(model, **{"backend": "eager", "cuda_graphs": True, **options})
    assert all(word in str(raised.value) for word in ("cuda_graphs", *words)), str(raised.value)
    assert {name: id(p) for name, p in model.named_parameters()} == before and type(model) is MLP


def test_a_mesh_of_other_devices(fake_group: None) -> None:
    refused(
        graph_fsdp.MeshError, "cuda_graphs=True needs a mesh of CUDA devices, this one is of cpu; leave cuda_graphs out"
    )


def test_options_that_cannot_go_with_it(fake_group: None, graphs: None) -> None:
    refused(TypeError, "'yes'", cuda_graphs="yes")
    refused(graph_fsdp.UnsupportedError, "regions='whole'", regions="whole", backend="inductor")
    refused(ValueError, "dynamic=True", dynamic=True)
    refused(graph_fsdp.UnsupportedError, "offload_policy", offload_policy=CPUOffloadPolicy())
    refused(graph_fsdp.UnsupportedError, "activation_checkpointing", activation_checkpointing="offload")


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(F.dropout(self.inside(x)))


def test_a_model_of_which_nothing_can_be_captured(fake_group: None, graphs: None) -> None:
    model = graph_fsdp.compile(Dropout(), backend="eager", cuda_graphs=True)
    with pytest.raises(graph_fsdp.UnsupportedError, match=r"cuda_graphs=True: no region .* draws random numbers"):
        model(torch.ones(4, 16))


# What it changes


def test_the_program_says_which_regions_are_graphs(fake_group: None, graphs: None) -> None:
    report = train(compiled(Dropout(), reshard_after_forward=True))
    assert report.forward.program is not None
    assert_expected_inline(
        report.forward.program,
        """\
def run(frame, args):  # forward
    primals_1, primals_2, primals_3, primals_4, primals_5, = args
    args.clear()
    gather_inside = frame.gather_start(plan_0, [primals_1, primals_2])  # inside
    del primals_1, primals_2
    full_inside = frame.wait(gather_inside)
    del gather_inside
    gather_outside = frame.gather_start(plan_2, [primals_4, primals_5])  # outside
    del primals_5
    inputs = [full_inside, primals_3]
    getitem_1, getitem, = region_3(inputs)  # no CUDA graph: draws random numbers (native_dropout)
    frame.free(full_inside)
    del full_inside
    full_outside = frame.wait(gather_outside)
    del gather_outside
    inputs = [full_outside, getitem]
    addmm_1, = region_6(inputs)  # a CUDA graph
    frame.free(full_outside)
    del full_outside
    return [addmm_1, primals_3, primals_4, getitem, getitem_1]
""",
    )
    assert_expected_inline(
        str(report.forward.cuda_graphs),
        """\
CUDA graphs: 1 of 2 regions that have kernels
  region_3 is not one: draws random numbers (native_dropout)
  runs: 2 warming up, 1 captured, 1 replayed
  kept between runs, in bytes: copies of inputs 256, results 256; slots of all graphs 4,608""",
    )
    assert_expected_inline(
        str(report.backward.cuda_graphs),
        """\
CUDA graphs: 2 of 2 regions that have kernels
  runs: 2 warming up, 1 captured, 1 replayed
  kept between runs, in bytes: copies of inputs 832, results 1,344; slots of all graphs 4,608""",
    )
    assert str(report.forward.cuda_graphs).splitlines()[0] in str(report)


def test_without_it_nothing_is_said_of_it(fake_group: None) -> None:
    model = graph_fsdp.compile(Layers(), backend="eager", auto_wrap_policy={nn.Linear})
    report = train(model)
    assert report.forward.cuda_graphs is None and "CUDA" not in str(report) + str(report.forward.program)


def test_slots_are_kept_and_the_memory_model_says_so(fake_group: None, graphs: None) -> None:
    """Of layers that are gathered one ahead, the last ones leave the first slot unused; it stays all the same."""
    options: dict[str, Any] = {"reshard_after_forward": True, "passes": default_pipeline(prefetch=1)}
    model = compiled(Layers(3), **options)
    report = train(model)
    torch._dynamo.reset()
    without = train(graph_fsdp.compile(Layers(3), backend="eager", auto_wrap_policy={nn.Linear}, **options))
    for view, other in ((report.forward, without.forward), (report.backward, without.backward)):
        assert view.memory is not None and other.memory is not None
        slots = view.slots.nbytes
        held = [
            sum(pair) for pair in zip(view.memory.timeline["pooled"], view.memory.timeline["gathered"], strict=True)
        ]
        assert set(held) == {slots}
        assert view.memory.timeline["gathered"] == other.memory.timeline["gathered"]
        assert view.memory.total[-1] == other.memory.total[-1] + slots
    counter = engine_of(model).counter
    assert counter.slots.current == counter.slots.peak == report.forward.slots.nbytes
    assert f"slots of all graphs {counter.slots.current:,}" in str(report)


def test_graphs_of_a_model_share_their_slots() -> None:
    memory = SlotMemory(torch.device("cpu"), GatheredBytes())
    first = memory.take((128, 1024, 512))
    again = memory.take((600, 128))
    assert [piece.nbytes for piece in first] == [128, 1024, 512]
    assert [piece.nbytes for piece in again] == [1024, 128] and memory.nbytes == 1664
    larger = memory.take((2048, 512))
    assert [piece.nbytes for piece in larger] == [2048, 512] and memory.nbytes == 3712
    assert memory.counter.slots.current == 3712


def test_parameters_that_are_whole_are_not_captured(fake_group: None, graphs: None) -> None:
    model = compiled(Layers())
    with graph_fsdp.unsharded(model):
        report = train(model)
    assert report.forward.cuda_graphs is None and Reexecution.captures == 0


def test_a_model_of_one_process(graphs: None) -> None:
    """One region, which reads the parameters where they lie."""
    torch.manual_seed(0)
    plain = Layers()
    model = Layers()
    model.load_state_dict(plain.state_dict())
    compiled(model)
    for index in range(6):
        for m in (plain, model):
            m(torch.full((4, 16), 0.1 * index)).square().sum().backward()
            with torch.no_grad():
                for p in m.parameters():
                    p -= p.grad
                    p.grad = None
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=1e-6)
    runs = graph_fsdp.inspect(model).backward.cuda_graphs.runs
    assert dict(runs) == {"warming up": 2, "captured": 1, "replayed": 3}


# Which regions


class Reads(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.what == "nonzero":
            x = x * torch.nonzero(x.detach() > 0).sum()
        elif self.what == "another graph":
            x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        elif self.what == "attention":
            x = F.scaled_dot_product_attention(*3 * (x.view(1, 1, 4, 16),)).view(4, 16)
        return self.second(x)


@pytest.mark.parametrize(
    ("what", "reason"),
    [("nonzero", "has sizes that are not fixed"), ("another graph", "calls other graphs"), ("attention", None)],
)
def test_regions_that_are_left_out(fake_group: None, graphs: None, what: str, reason: str | None) -> None:
    model = compiled(Reads(what), reshard_after_forward=True)
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(4, 16))
    found = graph_fsdp.inspect(model).inference.cuda_graphs
    assert found is not None
    assert [text.split(" (")[0] for text in found.choice.reasons.values()] == ([] if reason is None else [reason])
    assert found.runs["replayed"] == 1


def test_buckets_without_slots_are_not_read_by_graphs(fake_group: None, graphs: None) -> None:
    model = compiled(Layers(), passes=default_pipeline().remove("slots"), reshard_after_forward=True)
    with pytest.raises(graph_fsdp.UnsupportedError, match=r"no region .* the pipeline is without its pass 'slots'"):
        model(torch.ones(4, 16))


def test_a_profile_runs_without_graphs(fake_group: None, graphs: None) -> None:
    model = compiled(Layers())
    train(model)
    before = Reexecution.replays
    train(model, 1)
    of_a_step = Reexecution.replays - before
    graph_fsdp.profile(model, torch.ones(4, 16), warmup=1, steps=5)
    assert Reexecution.replays == before + 2 * of_a_step
    train(model, 1)
    assert Reexecution.replays == before + 3 * of_a_step


def test_what_a_replay_lends_does_not_grow_with_the_model(
    fake_group: None, graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage_at = compat.storage_at

    def lent(depth: int) -> tuple[int, int]:
        """Storages made in a step that is replayed, and results that are saved for backward."""
        model, made = compiled(Layers(depth), reshard_after_forward=True), []
        report = train(model)
        with monkeypatch.context() as patch:
            patch.setattr(compat, "storage_at", lambda *given: (made.append(given), storage_at(*given))[1])
            assert train(model, 1).forward.cuda_graphs.runs["replayed"] == 2
        captured = report.forward.cuda_graphs.captured
        assert not captured.is_lent
        output = model(torch.ones(4, 16))
        assert captured.is_lent
        del output
        assert not captured.is_lent
        return len(made), len(captured.shared)

    (few, saved), (many, more) = lent(2), lent(5)
    assert few == many <= 1 and more == saved + 3


# Errors and ends


def test_a_region_that_cannot_be_captured(fake_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    with cpu_graphs():
        model = compiled(Layers())
        train(model, 2)
        monkeypatch.setattr(Reexecution, "capture", fail)
        with pytest.raises(RuntimeError, match=r"cuda_graphs=True: region_.* of the forward graph cannot be captured"):
            train(model, 1)
        monkeypatch.undo()
        report = train(model, 2)
        assert report.forward.cuda_graphs.runs["replayed"] == 1


def test_an_address_that_changes_within_a_run_is_an_error(fake_group: None, graphs: None) -> None:
    model = compiled(Layers(), reshard_after_forward=True)
    report = train(model)
    captured = report.forward.cuda_graphs.captured
    moved = tuple(torch.empty_like(piece) for piece in captured.slots.memory)
    object.__setattr__(captured.slots, "memory", moved)
    with pytest.raises(RuntimeError, match=r"region_.* of the forward graph was captured with an input at another"):
        train(model, 1)


def test_a_deleted_model_gives_its_memory_back(fake_group: None, graphs: None) -> None:
    model = compiled(Layers())
    report = train(model)
    captured = [weakref.ref(view.cuda_graphs.captured) for view in (report.forward, report.backward)]
    del report, model
    gc.collect()
    assert [reference() for reference in captured] == [None, None]


class Calls(TorchDispatchMode):
    """What is called of a CUDA that is not there, and the operators in between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        for name in ("synchronize", "empty_cache", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, functools.partial(self.names.append, name))
        for name in ("device", "stream", "Stream"):
            monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.names.append(f"begin {capture_error_mode}")

    def capture_end(self) -> None:
        self.names.append("end")

    def replay(self) -> None:
        raise AssertionError("nothing is replayed")


def test_captures_wait_for_the_device_once_behind_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(inputs: list[Any]) -> Any:
        raise ValueError("in the capture")

    with Calls(monkeypatch) as calls:
        capture = CudaCapture(torch.device("cpu"))
        pool, x = capture.pool(), torch.empty(2)
        for _ in range(2):
            capture.capture(lambda inputs: [torch.sin(inputs[0])], [x], pool)
        with pytest.raises(ValueError, match="in the capture"):
            capture.capture(fail, [x], pool)
    of_one = ["begin thread_local", "sin", "end"]
    prepared = ["ones", "mm", "synchronize", "empty_cache", "graph_pool_handle", "empty"]
    assert calls.names == [*prepared, *of_one, *of_one, "begin thread_local", "end"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_on_cuda() -> None:
    """Captured graphs in a pool that they share, and a training in one process."""
    capture = CudaCapture(torch.device("cuda", torch.cuda.current_device()))
    pool, x = capture.pool(), torch.ones(8, 8, device="cuda")
    first, (y,) = capture.capture(lambda inputs: [inputs[0] @ inputs[0]], [x], pool)
    second, (z,) = capture.capture(lambda inputs: [inputs[0] + 1], [y], pool)
    for value in (1.0, 2.0):
        x.fill_(value)
        first()
        second()
        assert z.eq(8 * value * value + 1).all()
    losses: list[list[float]] = []
    for options in ({}, {"cuda_graphs": True}):
        torch.manual_seed(0)
        model = graph_fsdp.compile(MLP().cuda(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(8):
            loss = model(torch.randn(4, 16, device="cuda", generator=torch.Generator("cuda").manual_seed(1)))
            loss = loss.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    # Captured products take another algorithm of cuBLAS, which rounds otherwise.
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-3)
    assert losses[0][-1] < losses[0][0]
    assert graph_fsdp.inspect(model).forward.cuda_graphs.runs["replayed"] == 5
