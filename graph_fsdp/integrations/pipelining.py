"""``PipelineStage`` is a stage of torch's pipeline schedules whose module is a compiled model.

torch's stage reduces gradients once per step by FSDP2's inside, until torch 2.15, whose stages call
``finalize_backward``. This one calls it on all versions of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage as TorchStage

from graph_fsdp import compat
from graph_fsdp.module.unit_methods import place
from graph_fsdp.runtime.ranks.stages import stage_failures


def _told(what: str, method: Callable[..., Any]) -> Any:
    """Return a stage's method with its errors told to the ranks of the other stages."""

    @wraps(method)
    def told(self: PipelineStage, *args: Any, **kwargs: Any) -> Any:
        with self.telling(what):
            return method(self, *args, **kwargs)

    return told


def _prepare(submodule: torch.nn.Module) -> None:
    if "_graph_fsdp" not in vars(submodule) or place(submodule)[1]:
        raise TypeError(
            f"submodule must be a model compiled by graph_fsdp, got {type(submodule).__name__}; call "
            "graph_fsdp.compile(stage, mesh) before, or take torch's PipelineStage"
        )
    model: Any = submodule
    model.set_manual_backward_finalization(False)  # changes nothing, and raises where it could not be True
    place(model)[0].unsharded.optional = True  # schedules of several stages call unshard()


class PipelineStage(TorchStage):
    """A ``torch.distributed.pipelining.PipelineStage`` of a compiled model, with the same arguments.

    Microbatches keep their gradients whole, and the last one's backward is followed by one reduction of their sums.
    Parameters are gathered at the first forward of a step and stay whole to its end, where units can be whole
    (``unshard``); otherwise each microbatch gathers them, as with offloaded parameters on an accelerator. Where the
    schedule divides a backward into that of inputs and that of weights (zero bubble), two programs run it.

    Where a stage raises, and its process goes on, the ranks of the others get a ``RankFailure`` with its error, on the
    CPU. The schedule calls its ``loss_fn``, not the stage: an error of it is told where its body is in a block
    ``with stage.telling("the loss"):``.

    Raises:
        TypeError: ``submodule`` is no compiled model.
        UnsupportedError: it has ``backend="xla"`` or ``regions="whole"``.
        ValueError: in the schedule's first step, the schedule has this stage on another rank.
    """

    def __init__(self, submodule: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        _prepare(submodule)
        super().__init__(submodule, *args, **kwargs)
        self._begin()

    @classmethod
    def of(cls, stage: TorchStage) -> PipelineStage:
        """Make one of these of torch's ``stage``, whose ``submod`` has been compiled since, before its first step; the
        same object stays in its schedule. Raises as the class does."""
        if type(stage) is not TorchStage:
            raise TypeError(f"stage must be a torch.distributed.pipelining.PipelineStage, got {type(stage).__name__}")
        _prepare(stage.submod)
        ranks = vars(stage).pop("stage_index_to_group_rank")
        stage.__class__ = cls
        made: PipelineStage = stage  # type: ignore[assignment]
        made._ranks = ranks
        made._begin()
        return made

    def _begin(self) -> None:
        self._failures = stage_failures(self.group, self.device)
        self._has_begun = False  # the step under way, with a forward
        self._earlier: dict[Tensor, Tensor] = {}  # copies of gradients of earlier steps of the schedule

    def telling(self, what: str) -> AbstractContextManager[None]:
        """Return a context whose errors the ranks of the other stages get to know; ``what``: what runs in it. Such an
        error comes out of it as it is, and what follows another stage's as ``RankFailure``."""
        if self._failures is None:
            return nullcontext()
        return self._failures.telling(f"{what} of stage {self.stage_index}", self._lockstep)

    @property
    def _lockstep(self) -> Any:
        return place(self.submod)[0].schedules.lockstep

    def _watched(self, messages: list[dist.P2POp], what: str) -> list[dist.P2POp]:
        if self._failures is None:
            return messages
        return self._failures.watched(messages, f"{what} of stage {self.stage_index}", self._lockstep)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._watched(super().get_fwd_recv_ops(fwd_chunk_id), f"receive {fwd_chunk_id} of forward")

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._watched(super().get_fwd_send_ops(fwd_chunk_id), f"send {fwd_chunk_id} of forward")

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._watched(super().get_bwd_recv_ops(bwd_chunk_id), f"receive {bwd_chunk_id} of backward")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._watched(super().get_bwd_send_ops(bwd_chunk_id), f"send {bwd_chunk_id} of backward")

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """Return where the stages are. The schedule sets it, and torch reads it before the first communication, which
        would wait for ever where ranks made other stages, and would fail where a stage has failed before."""
        if self._failures is not None:
            self._failures.check()
        due = self._ranks.get(self.stage_index, self.group_rank)
        if due != self.group_rank:
            mine = [stage for stage, rank in self._ranks.items() if rank == self.group_rank]
            raise ValueError(
                f"stage {self.stage_index} was made on rank {self.group_rank} of the pipeline, and this schedule has "
                f"it on rank {due}; rank {self.group_rank} has to make the stages {mine}"
            )
        return self._ranks

    @stage_index_to_group_rank.setter
    def stage_index_to_group_rank(self, ranks: dict[int, int]) -> None:
        self._ranks = ranks

    @partial(_told, "forward")
    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.submod
        engine, _ = place(model)
        has_begun = self._has_begun and engine.finalization.manual
        if torch.is_grad_enabled() and self.has_backward and not has_begun:
            self._has_begun = True
            model.set_manual_backward_finalization(True)
            shards = [p.shard for p in engine.storage.parameters.values()]  # unshard() registers whole parameters
            self._earlier = {p: p.grad.clone() for p in {*model.parameters(), *shards} if p.grad is not None}
            if engine.spec.mesh.world_size > 1 and not engine.unsharded.unavailable():
                model.set_reshard_after_backward(False)
        return super().forward_one_chunk(*args, **kwargs)

    @partial(_told, "backward")
    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        grads: tuple[Tensor | None, ...] = ()
        of_weights = None
        if backward_type == "weight":
            for run in bwd_kwargs["param_groups"]:
                run()
        else:
            outputs, grads_of_outputs = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            is_divided = backward_type == "input"
            if is_divided and grads_of_outputs is None:  # torch has made a tuple of the loss
                grads_of_outputs = (None,) * len(outputs)
            with place(self.submod)[0].division.deferring() if is_divided else nullcontext() as of_weights:
                grads = compat.stage_backward(outputs, grads_of_outputs, bwd_kwargs["input_values"])
        if last_backward and not hasattr(TorchStage, "perform_reduce_grad"):  # torch 2.9's schedules have no such step
            self._finalize()
        return grads, of_weights

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.start_gradient_reduction()
        self.wait_for_gradient_reduction(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Reduce the gradients of a step; torch 2.15's schedules of several stages call it. Torch's own would reduce
        those that ``no_sync()`` leaves out, too. Evaluations, in which GPipe and 1F1B call it as well, reduce none."""
        if self.has_backward:
            with self.telling("the reduction of gradients"):
                self._finalize()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Divide the reduced gradients, which are there already, by ``grad_scale_factor``; not in evaluations."""
        if self.has_backward:
            self.scale_grads(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients of a step, and not those of earlier ones, to which they were added. (These stay in
        ``.grad`` meanwhile: a step that fails leaves them there.)"""
        super().scale_grads(grad_scale_factor)
        for p, grad in self._earlier.items():
            if p.grad is not None:
                p.grad.add_(grad, alpha=1 - 1 / grad_scale_factor)
        self._earlier = {}

    def clear_runtime_states(self) -> None:
        """Forget the step before, which may have failed; schedules call it before each step."""
        super().clear_runtime_states()
        self._has_begun = False

    def _finalize(self) -> None:
        model: Any = self.submod
        if place(model)[0].spec.mesh.world_size > 1:
            model.set_reshard_after_backward(True)
        model.finalize_backward()
        model.set_manual_backward_finalization(False)


for _name in filter(partial(hasattr, TorchStage), compat.FIND_SHAPES_OF_STAGES):
    setattr(PipelineStage, _name, _told("the search for shapes", getattr(TorchStage, _name)))
