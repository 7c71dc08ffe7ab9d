"""A stage of torch's pipeline schedules whose module is a compiled model.

torch's stage reduces gradients once per step by FSDP2's inside, until torch 2.15, whose stages call
``finalize_backward``. This one calls it on all versions of torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage as TorchStage

from graph_fsdp.compat.pipelining import stage_backward
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.module.unit_methods import place


class PipelineStage(TorchStage):
    """A ``torch.distributed.pipelining.PipelineStage`` of a compiled model, with the same arguments.

    Microbatches keep their gradients whole, and the last one's backward is followed by one reduction of their sums.
    Parameters are gathered at the first forward of a step and stay whole to its end, where units can be whole
    (``unshard``); otherwise each microbatch gathers them, as with tensor-parallel or offloaded parameters.

    Raises:
        TypeError: ``submodule`` is no compiled model.
        UnsupportedError: the schedule divides a backward into that of inputs and that of weights (zero bubble).
    """

    def __init__(self, submodule: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if "_graph_fsdp" not in vars(submodule) or place(submodule)[1]:
            raise TypeError(
                f"submodule must be a model compiled by graph_fsdp, got {type(submodule).__name__}; call "
                "graph_fsdp.compile(stage, mesh) before, or take torch's PipelineStage"
            )
        super().__init__(submodule, *args, **kwargs)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.submod
        engine, _ = place(model)
        if torch.is_grad_enabled() and not engine.finalization.manual:
            model.set_manual_backward_finalization(True)
            if engine.spec.world_size > 1 and not engine.unsharded.unavailable():
                model.set_reshard_after_backward(False)
        return super().forward_one_chunk(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type != "full":
            raise UnsupportedError(
                "schedule: it divides each backward into that of inputs and that of weights, and a graph runs both; "
                "take ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B"
            )
        given = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        grads = stage_backward(*given)
        if last_backward and not hasattr(TorchStage, "perform_reduce_grad"):  # torch 2.9's schedules have no such step
            self._finalize()
        return grads, None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self._finalize()
        if grad_scale_factor != 1:
            self.scale_grads(grad_scale_factor)

    def _finalize(self) -> None:
        model: Any = self.submod
        if place(model)[0].spec.world_size > 1:
            model.set_reshard_after_backward(True)
        model.finalize_backward()
        model.set_manual_backward_finalization(False)
