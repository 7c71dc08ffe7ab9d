"""An optimizer's state stays on the CPU, where its parameters are stepped; these and their gradients are on the device.

As ZeRO-Offload does (Ren et al. 2021). A step copies each run's gradient and parameter to pinned memory, all of them
on one stream, one after the other. As soon as one is there, the optimizer's own ``step`` computes with it on the CPU,
while the next ones come; and what it made of the parameter goes back on another stream, while it computes the next. The
device waits for these before it uses a parameter, and the host for what it reads, and for nothing else.

The state is that of parameters on the CPU: DTensors over the same mesh, as with ``CPUOffloadPolicy``.
``load_state_dict`` puts what it is given there, and nothing of it on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn, optim

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.optimizers.slices import GroupStep, Run, ShardSlice, Slices
from graph_fsdp.runtime.comm.streams import stream_of


class HostRun(Run):
    """Neighbours that are stepped as one parameter of the CPU."""

    def __init__(self, members: Sequence[ShardSlice]) -> None:
        super().__init__(members)
        self._shards = self.param.data
        host = torch.empty_like(self._shards, device="cpu", pin_memory=True)
        self.param, self._gradient = nn.Parameter(host, requires_grad=False), torch.empty_like(host, pin_memory=True)
        self._comes: torch.Event | None = None
        self._sent: torch.Event | None = None

    def set_gradient(self, gradients: Sequence[Tensor]) -> None:
        """Start to copy the gradients, and what the parameters are now, to the CPU."""
        found = self.joined(gradients)
        if self._sent is not None:
            self._sent.synchronize()  # a step ago: it has long ended
        stream = stream_of(self._shards.device, "offload")
        stream.wait_stream(torch.accelerator.current_stream(self._shards.device))
        with stream:
            self._gradient.copy_(found, non_blocking=True)
            self.param.data.copy_(self._shards, non_blocking=True)
        self._comes = stream.record_event()
        self.param.grad = self._gradient

    def wait(self) -> None:
        """Wait on the host for what ``set_gradient`` copies."""
        if self._comes is not None:
            self._comes.synchronize()
            self._comes = None

    def send_back(self) -> torch.Event:
        """Start to copy the parameters to the device; return the end of it. The device is through with them: the host
        has waited for a copy that came after all that reads them."""
        stream = stream_of(self._shards.device, "fetch")
        with stream:
            self._shards.copy_(self.param.data, non_blocking=True)
        self._sent = stream.record_event()
        return self._sent

    def clear_gradient(self) -> None:
        if hasattr(self, "_comes"):  # else it is being made
            self.wait()
        super().clear_gradient()


class HostState(Slices):
    """Steps the runs of an optimizer on the CPU, one after the other."""

    make_run = HostRun

    def __init__(self, optimizer: optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for name in ("fused", "capturable", "differentiable"):
                if group.get(name):
                    raise UnsupportedError(
                        f"offload_state=True: the optimizer has {name}=True, which is for a step on the device; leave "
                        "one of the two out"
                    )
        super().__init__(optimizer)
        if any(m.buffer.is_cpu for m in self._slices.values()):
            raise UnsupportedError(
                "offload_state=True: the parameters are on the CPU, and so is the optimizer's state; leave it out"
            )

    def step_runs(self, steps: Sequence[GroupStep], own_step: Callable[[], Any]) -> None:
        back: torch.Event | None = None
        for step in steps:
            step.group["params"] = []
        try:
            for step in steps:
                for run in step.runs:
                    assert isinstance(run, HostRun)
                    step.group["params"] = [run.param]
                    run.wait()
                    own_step()
                    back = run.send_back()
                step.group["params"] = []
        finally:  # also where a step raised, or was interrupted
            if back is not None:  # of one stream: the last is the end of all
                torch.accelerator.current_stream().wait_event(back)
        if any(step.others for step in steps):
            Slices.step_runs(self, [GroupStep(step.group, (), step.others) for step in steps], own_step)


class LoadsToHost(optim.Optimizer):
    """Comes before the class of an optimizer whose state is on the CPU."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state into the memory of the host. Hooks are called as by ``torch.optim.Optimizer``.

        torch moves values to the device of their parameter, where the whole state may not fit. So while it does that,
        groups hold empty tensors of the CPU in place of parameters; hooks of others see the parameters.
        """
        in_place_of: dict[Tensor, Tensor] = {}

        def put_in_place(*_: Any) -> None:
            for group in self.param_groups:
                stands = [torch.empty(0, dtype=p.dtype) for p in group["params"]]
                in_place_of.update(zip(stands, group["params"], strict=True))
                group["params"] = stands

        def put_back(*_: Any) -> None:
            for group in self.param_groups:
                group["params"] = [in_place_of.get(p, p) for p in group["params"]]
            for stand in [key for key in self.state if isinstance(key, Tensor) and key in in_place_of]:
                values = self.state.pop(stand)
                self.state[in_place_of[stand]] = compat.tree_map_only(Tensor, lambda value: value.to("cpu"), values)
            in_place_of.clear()

        with ExitStack() as stack:
            stack.callback(put_back)  # also where torch raises
            for handle in (
                self.register_load_state_dict_pre_hook(put_in_place),  # the last one
                self.register_load_state_dict_post_hook(put_back, prepend=True),
            ):
                stack.callback(handle.remove)
            super().load_state_dict(state_dict)
