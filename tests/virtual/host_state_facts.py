"""An optimizer whose state is on the CPU (``distribute_optimizer(offload_state=True)``), on the virtual device."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from both_devices import mlp, on_cpu, on_virtual, ours, strict
from models import MLP
from reference import fsdp2
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from virtual.machine import Machine

import graph_fsdp
from graph_fsdp.optimizers.host_state import HostRun

Make = Callable[[Any], optim.Optimizer]
Between = Callable[[nn.Module, optim.Optimizer], Any]
STEPS = 3


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def states(optimizer: optim.Optimizer) -> list[Tensor]:
    return [local(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]


def trained(device: str, make: Make, between: Between | None = None, width: int = 16) -> list[Tensor]:
    """The shards after some steps, and the optimizer's state, on the CPU. ``between``: after the first step. FSDP2
    trains on the CPU."""
    torch.manual_seed(0)
    shard = fsdp2 if device == "cpu" else ours
    model: Any = shard(MLP(depth=3, width=width).to(device))
    optimizer = make(model.parameters())
    if device != "cpu":
        graph_fsdp.distribute_optimizer(optimizer, offload_state=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        model(torch.randn(4, width, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and between is not None:
            between(model, optimizer)
    if device != "cpu":
        torch.accelerator.synchronize()
        assert {p.device.type for p in model.parameters()} == {"virtual"}
        assert {value.device.type for value in states(optimizer)} == {"cpu"}
    return [value.detach().cpu().clone() for value in [*map(local, model.parameters()), *states(optimizer)]]


def same(make: Make, between: Between | None = None, width: int = 16) -> Machine:
    machine = Machine("h100", traced=True)
    run = functools.partial(trained, make=make, between=between, width=width)
    with strict():
        found, expected = on_virtual(machine, run), on_cpu(run)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    return machine


def optimizers_whose_state_is_on_the_cpu_step_as_on_the_cpu() -> None:
    for make in (
        functools.partial(optim.AdamW, lr=1e-2),
        functools.partial(optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
        functools.partial(optim.Adagrad, lr=1e-2),
        functools.partial(optim.RMSprop, lr=1e-2, foreach=True),
    ):
        same(make)


def copies_of_an_offloaded_state_go_both_ways_at_once() -> None:
    """Of parameters that are large: each is stepped while others are copied."""
    machine = same(functools.partial(optim.AdamW, lr=1e-2), width=256)
    by_stream: dict[int, list[Any]] = {}
    for op in machine.operations or ():
        if op.operator == "aten.copy_" and op.stream != 0:
            by_stream.setdefault(op.stream, []).append(op)
    there, back = sorted(by_stream.values(), key=len, reverse=True)
    assert len(there) == 2 * len(back) > 2 * STEPS
    assert any(min(a.end, b.end) > max(a.begin, b.begin) for a in there for b in back)


def what_is_written_between_steps_counts_and_states_are_saved_and_loaded() -> None:
    def between(model: nn.Module, optimizer: optim.Optimizer) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, weights_only=False))

    def by_dcp(model: nn.Module, optimizer: optim.Optimizer) -> None:
        found = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, found)

    for done in (between, by_dcp):
        same(functools.partial(optim.AdamW, lr=1e-2), done)


def a_loaded_state_is_in_the_memory_of_the_host_at_once() -> None:
    """Also one that was saved on the device, of which not a byte goes back there, and where torch refuses it."""
    machine = Machine("h100")

    def made(offloads: bool, device: str) -> tuple[Any, optim.Optimizer]:
        torch.manual_seed(0)
        model: Any = ours(MLP(depth=3, width=256).to(device))
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
        return model, graph_fsdp.distribute_optimizer(optimizer, offload_state=offloads)

    def step(model: nn.Module, optimizer: optim.Optimizer, device: str) -> None:
        model(torch.ones(4, 256, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(device: str) -> None:
        _, before = model, optimizer = made(False, device)
        step(model, optimizer, device)
        saved = optimizer.state_dict()
        assert {v.device.type for v in states(optimizer) if v.dim()} == {device}
        model, optimizer = made(True, device)
        seen: list[Any] = []
        optimizer.register_load_state_dict_pre_hook(lambda o, _: seen.append([*o.param_groups[0]["params"]]))
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append([*o.param_groups[0]["params"], *o.state]))
        parameters = list(model.parameters())
        held = machine.memory.most = machine.memory.allocated
        with contextlib.suppress(ValueError):
            optimizer.load_state_dict({**saved, "param_groups": []})
        assert not optimizer.state and same_objects(optimizer.param_groups[0]["params"], parameters)
        optimizer.load_state_dict(saved)
        assert machine.memory.most == held, "nothing was allocated on the device"
        assert {v.device.type for v in states(optimizer)} == {"cpu"}
        assert len(states(optimizer)) == 4 * len(parameters)
        assert all(map(torch.equal, states(optimizer), [v.cpu() for v in states(before)]))
        assert [len(at) for at in seen] == [len(parameters), len(parameters), 2 * len(parameters)]
        assert all(same_objects(at, parameters * 2) for at in seen)
        step(model, optimizer, device)
        assert {v.device.type for v in states(optimizer)} == {"cpu"}

    on_virtual(machine, run)


def same_objects(found: Any, expected: Any) -> bool:
    """Whether the first ones of ``expected`` are what was found."""
    return all(a is b for a, b in zip(found, expected, strict=False))


def an_offloaded_state_takes_no_memory_of_the_device() -> None:
    """As planned: twice the bytes of the shards less, and nothing is left of what a step copies."""
    held: dict[bool, list[int]] = {}
    for offloads in (False, True):
        machine = Machine("h100")

        def run(device: str, offloads: bool = offloads, machine: Machine = machine) -> list[int]:
            torch.manual_seed(0)
            model: Any = ours(mlp().to(device))
            optimizer = graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters()), offload_state=offloads)
            for _ in range(STEPS):
                model(torch.ones(4, 16, device=device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.accelerator.synchronize()
            shards = sum(p.to_local().nbytes for p in model.parameters())
            return [
                machine.memory.allocated,
                sum(v.nbytes for v in states(optimizer) if v.dim() and not offloads),
                shards,
            ]

        held[offloads] = on_virtual(machine, run)
    (device, state, shards), (without, none, _) = held[False], held[True]
    # The allocator gives out blocks of 512 bytes.
    assert none == 0 and state == 2 * shards and device - without >= state
    planned = [
        graph_fsdp.plan(
            lambda: mlp().to("meta"),
            (torch.ones(4, 16),),
            mesh_shape=(4,),
            hardware="h100",
            optimizer=name,
            backend="eager",
        )
        for name in ("adamw", "adamw_on_cpu")
    ]
    assert planned[0].peak_nbytes - planned[1].peak_nbytes == planned[0].memory["optimizer"] >= state
    assert "optimizer" not in planned[1].memory


def a_step_that_is_interrupted_leaves_parameters_that_can_be_used() -> None:
    def run(device: str) -> bool:
        model: Any = ours(MLP(depth=3, width=256).to(device))
        optimizer = graph_fsdp.distribute_optimizer(optim.SGD(model.parameters(), lr=0.1), offload_state=True)
        calls, send_back = itertools.count(), HostRun.send_back

        def interrupted(self: HostRun) -> torch.Event:
            if next(calls) == 2:
                raise KeyboardInterrupt
            return send_back(self)

        model(torch.ones(4, 256, device=device)).sum().backward()
        held = list(optimizer.param_groups[0]["params"])
        with mock.patch.object(HostRun, "send_back", interrupted), contextlib.suppress(KeyboardInterrupt):
            optimizer.step()
        assert next(calls) == 3
        assert all(a is b for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True))
        model(torch.ones(4, 256, device=device)).sum().backward()
        optimizer.step()
        torch.accelerator.synchronize()
        return True

    assert on_virtual(Machine("h100"), run)


def an_offloaded_state_that_does_not_fit_the_optimizer_is_refused() -> None:
    def run(device: str) -> list[str]:
        found = []
        model: Any = ours(mlp().to(device))
        for make in (
            functools.partial(optim.AdamW, capturable=True),
            functools.partial(optim.Adam, differentiable=True),
        ):
            try:
                graph_fsdp.distribute_optimizer(make(model.parameters()), offload_state=True)
            except graph_fsdp.UnsupportedError as error:
                found.append(str(error))
        return found

    found = on_virtual(Machine("h100"), run)
    assert [text.split(",")[0] for text in found] == [
        "offload_state=True: the optimizer has capturable=True",
        "offload_state=True: the optimizer has differentiable=True",
    ]


FOUND = (
    optimizers_whose_state_is_on_the_cpu_step_as_on_the_cpu,
    copies_of_an_offloaded_state_go_both_ways_at_once,
    what_is_written_between_steps_counts_and_states_are_saved_and_loaded,
    a_loaded_state_is_in_the_memory_of_the_host_at_once,
    an_offloaded_state_takes_no_memory_of_the_device,
    a_step_that_is_interrupted_leaves_parameters_that_can_be_used,
    an_offloaded_state_that_does_not_fit_the_optimizer_is_refused,
)
