"""FSDP2's methods on communication are here: which gradients are reduced, when, and over what.

Graphs are captured at the first forward under each setting, and compute regions compiled once for all. A gradient goes
by what was set when its forward ran.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from graph_fsdp.errors import UnsupportedError
from graph_fsdp.module.unit_methods import (
    change,
    check_bool,
    check_cut,
    check_reduced,
    check_schedule,
    of_whole_model,
    place,
    units_of,
)
from graph_fsdp.parameters.gradient_norm import clip_gradients
from graph_fsdp.passes.ir.settings import Settings, is_count, is_positive

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


class GradientReductionHandle:
    """``finalize_backward(async_op=True)`` returns this handle, whose reductions are done: ``wait`` has nothing to
    wait for."""

    def wait(self) -> None:
        return None


class CommunicationMethods:
    """Adds these methods to the classes of models and units. ``recurse`` is that of ``unit_methods.py``."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether the gradients of later forwards are reduced. If not, each rank adds up its own, whole, in
        ``reduce_dtype`` (``inspect(model).kept_nbytes``), until a backward that reduces includes them; ``.grad`` stays
        as it is. ``zero_grad()`` leaves them, as with FSDP2; ``reset_iter_state()`` gives them up."""
        check_bool(requires_gradient_sync=requires_gradient_sync, recurse=recurse)
        engine, units = place(self)[0], units_of(self, recurse)
        check_cut(engine, "set_requires_gradient_sync")
        if engine.spec.mesh.ranks == 1:
            return  # there is nothing to reduce
        finalization, now = engine.finalization, engine.settings
        if finalization.manual:
            left_out = finalization.unreduced
            finalization.unreduced = left_out - units if requires_gradient_sync else left_out | units
            return
        unsynced = now.unsynced - units if requires_gradient_sync else now.unsynced | units
        change(engine, unsynced=unsynced, unreplicated=now.unreplicated - units)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether, on a mesh that replicates (HSDP), the gradients of later forwards are reduced over the replicas.
        If not, they are reduced over the ranks that shard, and each rank adds up its shards."""
        check_bool(requires_all_reduce=requires_all_reduce, recurse=recurse)
        engine, units = place(self)[0], units_of(self, recurse)
        check_cut(engine, "set_requires_all_reduce")
        if engine.spec.mesh.replicas == 1:
            warnings.warn(
                "set_requires_all_reduce has no effect: nothing is replicated, so no gradient is all-reduced; "
                "set_requires_gradient_sync leaves out the reduction there is",
                stacklevel=2,
            )
            return
        now = engine.settings.unreplicated
        change(engine, unreplicated=now - units if requires_all_reduce else now | units)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave out gradient reductions, as FSDP1's does, for forwards and their backwards within the block."""
        engine, _ = place(self)
        before, unreduced = engine.settings, engine.finalization.unreduced
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            engine.finalization.unreduced = unreduced
            change(engine, unsynced=before.unsynced, unreplicated=before.unreplicated)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of the whole model so that their ``norm_type``-norm, as of one vector, is at most
        ``max_norm`` (0 makes them zeros); call it on the model, on all ranks. Returns the norm before, a plain scalar
        in float32 at least. Parameters may be sharded, replicated, tensor-parallel and on meshes of their own; there is
        one reduction per process group. ``ignored_params`` count as equal on all ranks. A norm that is not finite makes
        gradients so."""
        engine, unit = place(self)
        if unit:
            raise UnsupportedError("clip_grad_norm_() is of the gradients of the whole model; call it on the model")
        if not is_positive(max_norm, or_zero=True):
            raise ValueError(f"max_norm must be a positive number or 0, got {max_norm!r}")
        if not is_positive(norm_type):
            raise ValueError(f"norm_type must be a positive number, got {norm_type!r}")
        if engine.settings.stepped:
            raise UnsupportedError(
                "clip_grad_norm_() needs all gradients at once, and an optimizer has stepped in backward "
                "(in_backward=True), which frees them; distribute the optimizer without in_backward"
            )
        if engine.backend.name == "xla":
            raise UnsupportedError("clip_grad_norm_() is for ranks; with backend='xla' call torch's clip_grad_norm_")
        assert isinstance(self, nn.Module)
        gradients = engine.storage.gradients(self.parameters())
        if engine.spec.mesh.ranks > 1:
            what = f"norm {norm_type} of {len(gradients)} gradients"
            engine.schedules.begin("clip_grad_norm_()", "call", [what])
        with torch.no_grad(), engine.schedules.telling():
            norm = clip_gradients(gradients, float(max_norm), float(norm_type))
        for watcher in engine.watchers if norm_type == 2.0 else ():
            watcher.clipped(norm)
        return norm

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Warn that False has no effect. FSDP2 leaves the last reductions of a backward under way where another
        backward follows; here a backward returns their results, and so waits for them."""
        check_bool(is_last_backward=is_last_backward)
        if not is_last_backward and not place(self)[0].finalization.manual:
            warnings.warn(
                "set_is_last_backward(False) has no effect: every backward waits for its reductions, whose results it "
                "returns; set_requires_gradient_sync(False) leaves them out",
                stacklevel=2,
            )

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Leave the reductions of later forwards' backwards to ``finalize_backward()``, as a pipeline does that runs
        many microbatches; call it on the model. Gradients are kept whole until then. In this mode
        ``set_requires_gradient_sync`` says what ``finalize_backward()`` reduces, and may be called at any time."""
        check_bool(enabled=enabled)
        engine = _finalized(self, "set_manual_backward_finalization")
        finalization = engine.finalization
        if finalization.manual == enabled:
            return
        if engine.spec.mesh.ranks > 1:
            every = units_of(self, True)
            if enabled:
                finalization.unreduced = engine.settings.unsynced
            change(engine, unsynced=every if enabled else finalization.unreduced)
        finalization.manual = enabled
        if not enabled:
            finalization.unreduced = frozenset()

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients that backwards have kept under ``set_manual_backward_finalization(True)`` into
        ``.grad``, and reshard. All ranks call it, after the last backward. Before the first forward it does nothing.

        ``async_op``: return a handle. The reductions run in one scheduled graph and are done when this returns.

        Raises:
            RuntimeError: backwards are not finalized by hand, or replicas are left out (``set_requires_all_reduce``).
            UnsupportedError: with ``backend="xla"`` or ``regions="whole"``, or it is called on a unit.
        """
        check_bool(async_op=async_op)
        engine = _finalized(self, "finalize_backward")
        if not engine.finalization.manual:
            raise RuntimeError(
                "finalize_backward() was called, and each backward reduces its gradients; call "
                "set_manual_backward_finalization(True) before the forward"
            )
        if engine.settings.unreplicated:
            raise RuntimeError("finalize_backward() reduces over replicas; call set_requires_all_reduce(True) before")
        with engine.schedules.failures_told("finalize_backward()"):
            engine.finalization.run()
        return GradientReductionHandle() if async_op else None

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may be under way at once, each of which holds the gradients that it sends. It
        overrides ``default_pipeline(reductions_in_flight=…)`` for the whole model: call it on the model."""
        if not is_count(max_input_buffers):
            error = ValueError if type(max_input_buffers) is int else TypeError
            raise error(f"max_input_buffers must be a whole number, 1 or more, got {max_input_buffers!r}")
        what = "the reductions of the whole model, which one schedule bounds"
        engine = of_whole_model(self, "set_reduce_scatter_max_input_buffers", what, recurse)
        check_schedule(engine, "set_reduce_scatter_max_input_buffers")
        change(engine, reductions_in_flight=max_input_buffers)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accept only False. With FSDP2, True makes ranks that use different parameters run the same collectives. Here
        such ranks run different graphs, and get a ``RankDisagreement``; within a graph, a parameter of an output that
        some ranks leave out of their loss is reduced on every rank."""
        check_bool(reduce_scatter_unused_params=reduce_scatter_unused_params, recurse=recurse)
        if reduce_scatter_unused_params:
            raise UnsupportedError(
                "set_reduce_scatter_unused_params(True) is for ranks that use different parameters in a step, which "
                "run different graphs here and gather differently, too; compute with all of them on every rank (a mask "
                "or a factor of zero), which reduces zeros"
            )

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients by ``factor`` instead of the number of ranks. The group adds, and a
        kernel over the shard divides; types that could overflow are divided in part before."""
        engine, unit = place(self)
        if not is_positive(factor):
            raise ValueError(f"factor must be a positive number, got {factor!r}")
        check_reduced(engine, "set_gradient_divide_factor")
        factors = {**dict(engine.settings.divide_factors), unit: float(factor)}
        change(engine, divide_factors=tuple(sorted(factors.items())))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # its older name

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Have the group add this unit's gradients and nothing else; a kernel of our own divides the shard."""
        engine, unit = place(self)
        check_bool(enable=enable)
        check_reduced(engine, "set_force_sum_reduction_for_comms")
        now = engine.settings.summed
        change(engine, summed=now | {unit} if enable else now - {unit})

    def set_all_reduce_hook(self, hook: Callable[[Tensor], Any] | None, *, stream: Any = None) -> None:
        """Call ``hook(reduced)`` for each bucket of this unit once its gradients are reduced over all groups of the
        mesh; None removes it. ``reduced``: this rank's flat shard of them, in ``reduce_dtype``, which it may change in
        place. Collectives in it run in the same order on all ranks. ``stream``: of an accelerator, to call it on."""
        engine, unit = place(self)
        if hook is not None and not callable(hook):
            raise TypeError(f"hook must be a function of one tensor, or None, got {hook!r}")
        check_reduced(engine, "set_all_reduce_hook")
        if stream is not None and engine.spec.mesh.replicas > 1:
            raise ValueError("stream cannot be set on a mesh that replicates: the hook follows the all-reduce there")
        now = engine.settings.hooked
        if hook is None:
            engine.kept.hooks.pop(unit, None)
        else:
            engine.kept.hooks[unit] = hook if stream is None else _on_stream(hook, stream)
        change(engine, hooked=now - {unit} if hook is None else now | {unit})

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next forward wait for ``event``, recorded after the optimizer's step: for optimizers that run on
        another stream than the current one, which every gather follows. None is nothing to wait for (on the CPU)."""
        engine, _ = place(self)
        if event is not None and not hasattr(event, "wait"):
            raise TypeError(f"event must be a torch.Event, got {event!r}")
        engine.wait_before_forward = event


def _finalized(module: object, method: str) -> Engine:
    engine, unit = place(module)
    check_cut(engine, method)
    if unit:
        raise UnsupportedError(f"{method}() is about the backward of the whole model; call it on the model")
    return engine


def check_unchanged(engine: weakref.ref[Engine], settings: Settings, stepped: Sequence[str] = ()) -> None:
    """Raise if settings are not those of the graph: FSDP2 would go by what is set when backward runs. Raise if a
    parameter that is ``stepped`` in this backward was in one before."""
    now = engine()
    if now is not None and stepped:
        now.updates.check_new(stepped)
    for name, method in (("unsynced", "set_requires_gradient_sync"), ("unreplicated", "set_requires_all_reduce")):
        if now is not None and getattr(settings, name) != getattr(now.settings, name):
            raise RuntimeError(
                f"{method} was called (or no_sync left) between a forward and its backward; call it before the "
                "forward, and again after the backward (torch's PipelineStage does so before torch 2.15: use that of "
                "graph_fsdp.integrations.pipelining)"
            )


def _on_stream(hook: Callable[[Tensor], Any], stream: Any) -> Callable[[Tensor], Any]:
    def call(reduced: Tensor) -> None:
        current = torch.accelerator.current_stream(reduced.device)
        stream.wait_stream(current)
        with stream:
            hook(reduced)
        current.wait_stream(stream)

    return call
