"""What programs do to a compiled model in training, beside the options that it was compiled with."""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import torch
from both_devices import Training, ours
from models import MLP
from resuming import save_and_load
from test_custom_collectives import CountingGather, CountingReduction
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import graph_fsdp


def units_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def accumulated(t: Any) -> None:
    t.model.set_requires_gradient_sync(t.last)


def accumulated_shards(t: Any) -> None:
    t.model.set_requires_all_reduce(t.last)


def clipped(t: Any) -> None:
    t.seen.append(nn.utils.clip_grad_norm_(t.model.parameters(), 0.1).full_tensor())


def evaluated(t: Any) -> None:
    """An evaluation, and parameters that are written behind it."""
    with torch.no_grad():
        t.seen.append(t.model(t.batch()))
        for p in t.model.parameters():
            p.mul_(0.9)


def saved(t: Any) -> None:
    """All is saved, and loaded again."""
    save_and_load(t.model, t.optimizer)


def unsharded(t: Any) -> None:
    """One unit is whole before the forward waits for it, another is about to be."""
    first, *others = units_of(t.model)[-2:]
    handle = first.unshard(async_op=True)
    for unit in others:
        unit.unshard(async_op=True)
    handle.wait()
    t.seen.extend(p.detach() + 0 for p in first.parameters())


def resharded(t: Any) -> None:
    """What forward has kept is given back, and gathered again for backward."""
    for unit in units_of(t.model):
        unit.reshard()


def whole(t: Any) -> None:
    with graph_fsdp.unsharded(t.model), torch.no_grad():
        t.seen.extend(value + 0 for value in t.model.state_dict().values())
        t.model.head.bias.add_(0.1)


def profiled(t: Any) -> None:
    profile = graph_fsdp.profile(t.model, torch.ones(16, 16, device=t.device), steps=1, warmup=1)
    assert str(profile)


def monitored(t: Any) -> None:
    """Every step's collectives are timed, and its norm is computed."""
    t.watch = graph_fsdp.monitor(t.model, every=1, line=False)


def read_monitor(t: Any) -> None:
    """The step before this one was read: by a later one, or once more than a step is under way."""
    if (record := t.watch.last) is not None:
        assert record.step_seconds > 0 and record.step == 1
        assert (record.exposed_seconds is None) == (record.predicted_exposed_seconds is None)


def custom(t: Any) -> None:
    t.model.set_custom_all_gather(CountingGather())
    t.model.set_custom_reduce_scatter(CountingReduction())


def separate_group(t: Any) -> None:
    t.model.set_separate_reduce_scatter_group()


def one_reduction(t: Any) -> None:
    t.model.set_reduce_scatter_max_input_buffers(1)


def divided(t: Any) -> None:
    t.model.set_gradient_divide_factor(3.0)


def prefetch_lists(t: Any) -> None:
    units = units_of(t.model)
    first, last = units[len(units) // 2], units[-1]
    first.set_modules_to_forward_prefetch([last])
    last.set_modules_to_backward_prefetch([first])


def hooked(t: Any) -> None:
    """Gradients are halved, where nothing is replicated on a stream of the hook's own."""
    stream = torch.Stream(t.device) if t.device != "cpu" and not t.mesh else None
    t.model.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), stream=stream)


def interrupted(t: Any) -> None:
    """A backward raises in its middle, with collectives under way."""

    def raises(reduced: Tensor) -> None:
        raise ArithmeticError("in a hook")

    if t.last:
        return
    unit = units_of(t.model)[-2:][0]
    unit.set_all_reduce_hook(raises)
    try:
        t.model(torch.ones(16, 16, device=t.device)).sum().backward()
    except ArithmeticError as error:
        traceback.clear_frames(error.__traceback__)  # or the garbage collector drops what they hold, at some time
    else:
        raise AssertionError("the hook was not called")
    unit.set_all_reduce_hook(None)


def state_on_the_host(t: Any) -> None:
    """The optimizer's state is on the CPU, and its step is bit for bit that of the device."""
    t.optimizer = graph_fsdp.distribute_optimizer(t.optimizer, offload_state=t.device != "cpu")


def optimized_beside(t: Any) -> None:
    """The optimizer runs on a stream of its own, and the next forward waits for it."""
    if t.device == "cpu":
        return
    stream, optimizer = torch.Stream(t.device), t.optimizer

    def step() -> None:
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # their memory is not that of this stream
        t.model.set_post_optim_event(stream.record_event())

    t.update = step


def two_models(t: Any) -> None:
    """Another model trains on another stream, a step between each forward of this one and its backward."""
    on_virtual = t.device != "cpu"
    if not t.others:
        other = Training(ours, MLP, lambda generator: torch.randn(16, 16, generator=generator), t.device)
        t.others.append((other, torch.Stream(t.device) if on_virtual else contextlib.nullcontext()))
        if on_virtual:
            t.others[0][1].wait_stream(torch.accelerator.current_stream())
    other, stream = t.others[0]
    with stream:
        t.seen.append(other.step())
