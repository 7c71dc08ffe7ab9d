"""The virtual device computes what the CPU computes, keeps time by stream, and finds what nothing orders."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import MLP
from reference import fsdp2
from simulated_link import Link
from torch import nn
from virtual import library
from virtual.compiled import backend
from virtual.group import virtual_group
from virtual.machine import Machine, RaceError

from graph_fsdp.compat import all_gather_single, grouped, reduce_scatter_single
from graph_fsdp.passes import HARDWARE
from graph_fsdp.passes.analysis.hardware import detect_hardware

pytestmark = pytest.mark.skipif(library.COMPILER is None, reason="needs a C++ compiler")
FACTS = Facts(__name__)
LINK = Link(1e9, 1e-3)


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


@FACTS
def it_is_an_accelerator_while_there_is_a_machine() -> None:
    assert library.NAME == "virtual"
    with Machine("h100"):
        assert str(torch.accelerator.current_accelerator(check_available=True)) == "virtual"
        assert torch.get_device_module("virtual").get_device_properties().total_memory == HARDWARE["h100"].memory
        assert torch.empty(2, device="virtual").device == torch.device("virtual", 0)
    assert not torch.accelerator.is_available()


@FACTS
def its_hardware_is_what_its_driver_says() -> None:
    device = torch.device("virtual")
    with Machine("mi300x"):
        assert detect_hardware(device) == HARDWARE["mi300x"]
    with Machine(dataclasses.replace(HARDWARE["mi300x"], name="thing", memory=1 << 30)):
        found = detect_hardware(device)
        assert (found.name, found.memory) == ("unknown virtual THING (as a100)", 1 << 30)
        assert found.overlaps
    assert detect_hardware(device).name == "unknown virtual (as cpu)"


@FACTS
def modules_and_optimizers_compute_as_on_the_cpu() -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.5), nn.GELU())
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            out = model(torch.arange(8, device=device)).view(2, 2, 2, 16)
            out = nn.functional.pad(out, (1, 1)).transpose(1, 2).reshape(-1).masked_fill(torch.tensor(False), 0.0)
            torch.cat([out, out.chunk(2)[0]]).to(torch.bfloat16).float().logsumexp(0).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    with Machine("h100") as machine:
        found = train("virtual")
        assert machine.seconds > 0
    assert all(torch.equal(a, b) for a, b in zip(found, train("cpu"), strict=True))


@FACTS
def streams_run_beside_each_other_and_wait_for_events() -> None:
    with Machine("h100", traced=True) as machine:
        x = torch.ones(1 << 18, device="virtual")
        other = torch.Stream("virtual")
        other.wait_stream(current())
        for _ in range(4):
            x.sin()
        with other:
            y = x.cos()
        current().wait_event(other.record_event())
        y + x
        *_, cos, last = machine.operations
        assert cos.operator == "aten.cos" and last.operator == "aten.add"
        sines = [operation for operation in machine.operations if operation.operator == "aten.sin"]
        assert cos.begin == sines[0].begin and last.begin == sines[-1].end
        assert last.end == machine.seconds


@FACTS
def the_time_of_the_host_counts_where_it_is_wanted() -> None:
    def seconds(host: str) -> float:
        with Machine("h100", host=host) as machine:
            x = torch.ones(4, device="virtual")
            sum(i for i in range(200_000))
            x + x
            return machine.seconds

    assert seconds("counted") > 1e-3 > seconds("zero")


@FACTS
def operations_that_nothing_orders_are_found() -> None:
    with Machine("h100") as machine:
        x, other = torch.ones(8, device="virtual"), torch.Stream("virtual")
        with other:
            x[2:4].mul_(2)
        x[:2] + 1
        (race,) = machine.take_races()
        assert (race.first.operator, race.second.operator) == ("aten.fill_", "aten.mul")
        assert race.first.stream_name == "the default stream" and "test_virtual_device.py" in str(race.second)
        x[3:5] + 1
        (race,) = machine.take_races()
        assert (race.first.operator, race.second.operator) == ("aten.mul", "aten.add")
    with pytest.raises(RaceError, match="nothing orders"), Machine("h100"):
        x = torch.ones(8, device="virtual")
        with other:
            x.mul(2)


@FACTS
def columns_of_a_matrix_are_apart() -> None:
    with Machine("h100") as machine:
        x, other = torch.ones(4, 4, device="virtual"), torch.Stream("virtual")
        other.wait_stream(current())
        with other:
            x[:, 0].zero_()
        x[:, 1].zero_()
        assert not machine.take_races()
        x[:, :1].zero_()
        assert len(machine.take_races()) == 1


@FACTS
def memory_that_is_given_away_while_it_is_used_is_found() -> None:
    with Machine("h100") as machine:
        for told in (False, True):
            x, other = torch.ones(8, device="virtual"), torch.Stream("virtual")
            other.wait_stream(current())
            with other:
                x.mul(2)
            if told:
                x.record_stream(other)
            del x
            torch.empty(8, device="virtual")
            found = machine.take_races()
            assert [race.second.operator for race in found] == ([] if told else ["the next allocation"])


@FACTS
def memory_is_counted_as_the_caching_allocator_does() -> None:
    with Machine("h100"):
        x = torch.empty(1000, device="virtual")
        y = torch.empty(3 << 20, dtype=torch.uint8, device="virtual")
        assert torch.accelerator.memory_allocated() == 4096 + (3 << 20)
        assert torch.accelerator.memory_reserved() == (2 << 20) + (20 << 20)
        y.untyped_storage().resize_(0)
        del x
        assert torch.accelerator.memory_allocated() == 0
        assert torch.accelerator.max_memory_allocated() == 4096 + (3 << 20)
        torch.accelerator.reset_peak_memory_stats()
        assert torch.accelerator.max_memory_allocated() == 0


@FACTS
def what_is_copied_to_pinned_memory_is_there_after_a_wait() -> None:
    with Machine("h100"):
        x, pinned = torch.ones(8, device="virtual"), torch.zeros(8, pin_memory=True)
        pinned.copy_(x, non_blocking=True)
        assert pinned.isnan().all()
        torch.accelerator.synchronize()
        assert torch.equal(pinned, torch.ones(8))
        assert torch.equal(x.cpu(), torch.ones(8))


@FACTS
def pinned_memory_that_is_written_before_it_is_read_is_found() -> None:
    with Machine("h100") as machine:
        pinned = torch.zeros(8, pin_memory=True)
        x = pinned.to("virtual", non_blocking=True)
        pinned.fill_(1)
        torch.accelerator.synchronize()
        (race,) = machine.take_races()
        assert race.second.stream_name == "the host" and not x.any()


@FACTS
def collectives_run_on_a_stream_of_their_own() -> None:
    with Machine("h100", traced=True) as machine, virtual_group(4, LINK):
        full, shard = torch.zeros(1000, device="virtual"), torch.arange(250.0, device="virtual")
        work = all_gather_single(full, shard, async_op=True)
        shard.sin()
        work.wait()
        assert torch.equal(full.cpu(), torch.arange(250.0).repeat(4))
        gather = next(operation for operation in machine.operations if operation.operator == "all_gather")
        sin = next(operation for operation in machine.operations if operation.operator == "aten.sin")
        assert gather.end - gather.begin == pytest.approx(1e-3 + 3000 / 1e9)
        assert sin.begin == gather.begin and gather.stream != sin.stream
        all_gather_single(full, shard, async_op=True)
        full.sum()
        assert {race.first.operator for race in machine.take_races()} == {"all_gather"}


@FACTS
def a_collective_that_is_waited_for_at_once_runs_on_the_current_stream() -> None:
    with Machine("h100", traced=True) as machine, virtual_group(4, LINK):
        full, shard = torch.zeros(8, device="virtual"), torch.ones(2, device="virtual")
        other = torch.Stream("virtual")
        other.wait_stream(current())
        with other:
            all_gather_single(full, shard)
        assert machine.operations[-1].stream == other.stream_id


@FACTS
def every_collective_is_there() -> None:
    with Machine("h100"), virtual_group(2, LINK):
        x = torch.arange(4.0, device="virtual")
        out = torch.zeros(4, device="virtual")
        dist.all_reduce(x)
        assert x.tolist() == [0.0, 2.0, 4.0, 6.0]
        dist.broadcast(x, 0)
        dist.all_to_all_single(out, x)
        assert out.tolist() == [0.0, 2.0, 0.0, 2.0]
        reduce_scatter_single(out[:2], x, op=dist.ReduceOp.AVG)
        assert out[:2].tolist() == [0.0, 2.0]
        targets = [torch.zeros(4, device="virtual") for _ in range(2)]
        for work in grouped([(target, x[:2]) for target in targets], dist.group.WORLD):
            work.wait()
        assert all(target.tolist() == [0.0, 2.0, 0.0, 2.0] for target in targets)
        dist.barrier()


@FACTS
def a_collective_keeps_its_tensors_until_the_wait() -> None:
    with Machine("h100") as machine, virtual_group(2, LINK) as group:
        for keeps in (True, False):
            type(group).keeps_tensors = keeps
            x, out = torch.ones(4, device="virtual"), torch.ones(2, device="virtual")
            work = reduce_scatter_single(out, x, async_op=True)
            del x
            torch.empty(4, device="virtual")
            work.wait()
            assert bool(machine.take_races()) is not keeps
        type(group).keeps_tensors = True


@FACTS
def collectives_that_share_a_link_run_one_after_the_other_on_whichever_streams() -> None:
    with Machine("h100", traced=True) as machine, virtual_group(4, LINK):
        other_group = dist.new_group([0, 1])
        full, shard = torch.zeros(1000, device="virtual"), torch.ones(250, device="virtual")
        second, half = torch.zeros(500, device="virtual"), torch.ones(1000, device="virtual")
        streams = [torch.Stream("virtual") for _ in range(2)]
        for stream in streams:
            stream.wait_stream(current())
        with streams[0]:
            all_gather_single(full, shard)
        with streams[1]:
            reduce_scatter_single(second, half, group=other_group)
        gather, reduction = machine.operations[-2:]
        assert gather.stream != reduction.stream and reduction.begin == gather.end > gather.begin
        second.add(1)
        assert len(machine.take_races()) == 1, "a busy link orders nothing for the program"


def trained(host_of_numbers: bool) -> tuple[list[tuple[int, str, float]], float]:
    """What ran where, and when it began, in a step of FSDP2; seconds of all steps."""
    with Machine("h100", numbers=host_of_numbers, traced=True) as machine, virtual_group(4, LINK):
        torch.manual_seed(0)
        model = fsdp2(MLP(depth=3).to("virtual"))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            model(torch.ones(4, 16, device="virtual")).square().mean().backward()
            optimizer.step()
        names = {stream: index for index, stream in enumerate(dict.fromkeys(o.stream for o in machine.operations))}
        return [(names[o.stream], o.operator, o.begin) for o in machine.operations], machine.seconds


@FACTS
def without_numbers_the_same_runs_at_the_same_time() -> None:
    (expected, seconds), (found, others) = trained(True), trained(False)
    assert found == expected and others == seconds


@FACTS
def without_numbers_tensors_take_no_memory() -> None:
    with Machine("h100", numbers=False) as machine:
        x = torch.empty(1 << 20, 1 << 20, device="virtual")
        (x @ x).sum().item()
        assert 2 << 42 <= machine.memory.most < 3 << 42 and machine.seconds > (2 << 60) / 67e12
        q = torch.empty(1, 32, 1 << 20, 128, dtype=torch.bfloat16, device="virtual", requires_grad=True)
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        assert q.grad.shape == q.shape and machine.memory.most < 4 << 42, "scores are not kept"


@FACTS
def compiled_graphs_compute_what_the_cpu_computes_in_fewer_kernels() -> None:
    def train(device: str, compiled: bool) -> tuple[list[torch.Tensor], float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with Machine("h100") as machine:
            model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)).to(device)
            model(torch.ones(4, 16, device=device))
            run = torch.compile(model, backend=backend) if compiled else model
            for _ in range(2):
                begin = machine.seconds
                run(torch.ones(4, 16, device=device)).sin().sum().backward()
            seconds = machine.seconds - begin
            return [p.grad.cpu() for p in model.parameters()], seconds

    (expected, _), (found, fused), (_, eager) = train("cpu", False), train("virtual", True), train("virtual", False)
    torch.testing.assert_close(found, expected)
    assert fused < 0.9 * eager


@FACTS
def compiled_graphs_allocate_what_their_kernels_write() -> None:
    """What is fused has no memory; what is written is freed after it has been read for the last time."""
    torch._dynamo.reset()
    with Machine("h100", numbers=False) as machine:
        x, w = (torch.empty(1024, 1024, device="virtual") for _ in range(2))

        def layers(x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = (x @ w).exp().sin()
            return x

        with torch.no_grad():
            y = torch.compile(layers, backend=backend)(x)
        assert machine.memory.most == 4 * x.nbytes, "x and w, and two of: a product, its sine"
        assert machine.memory.allocated == 3 * y.nbytes


@FACTS
def conjugated_and_negated_values_are_copied() -> None:
    with Machine("h100"):
        x, y = (torch.view_as_complex(torch.randn(3, 2)) for _ in range(2))
        a, b = x.to("virtual").requires_grad_(), y.to("virtual")
        torch.view_as_real(a * b).pow(3).sum().backward()  # the gradient has b conjugated
        c = x.clone().requires_grad_()
        torch.view_as_real(c * y).pow(3).sum().backward()
        assert torch.equal(a.grad.cpu(), c.grad)
        assert torch.equal(b.conj().imag.clone().cpu(), y.conj().imag) and torch.equal(b.conj().cpu(), y.conj())


test_on_a_virtual_device = FACTS.in_a_fresh_process()
