"""FSDP2's methods on gradients: which are reduced, over what, and how.

Graphs depend on them, and are captured at the first forward under each setting. Compute regions are compiled once for
all. What holds for a gradient is what was set when the forward ran that it belongs to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graph_fsdp.errors import UnsupportedError

if TYPE_CHECKING:
    from graph_fsdp.capture import Engine


class GradientMethods:
    """Mixed into a compiled model's class. Every method is for all units of the model."""

    _graph_fsdp: Engine

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the gradients of later forwards are reduced. Without, each rank adds its own up, whole, in the type
        of the reduction: as many bytes as the trainable parameters have in it (``inspect(model).kept_nbytes``).
        The next backward that reduces takes them along, and ``.grad`` stays as it is until then."""
        engine, units = self._graph_fsdp, _all_units(self._graph_fsdp, recurse)
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        _check_cut(engine, "set_requires_gradient_sync")
        if engine.spec.ranks == 1:
            return  # a gradient is added to ``.grad``, and there is nothing else that it could be
        _replace(engine, unsynced=frozenset() if requires_gradient_sync else units, unreplicated=frozenset())

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a mesh that replicates (HSDP): whether the gradients of later forwards are reduced over the replicas.
        Without, they are reduced over the ranks that shard, and each rank adds up its shards."""
        engine, units = self._graph_fsdp, _all_units(self._graph_fsdp, recurse)
        _check_bool("requires_all_reduce", requires_all_reduce)
        _check_cut(engine, "set_requires_all_reduce")
        if engine.spec.replicas == 1:
            warnings.warn(
                "set_requires_all_reduce has no effect: nothing is replicated, so no gradient is all-reduced; "
                "set_requires_gradient_sync leaves out the reduction there is",
                stacklevel=2,
            )
            return
        _replace(engine, unreplicated=frozenset() if requires_all_reduce else units)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """FSDP1's: within, ``set_requires_gradient_sync(False)``. Forward and backward have to be within."""
        before = self._graph_fsdp.settings
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._graph_fsdp.settings = before

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted, for scripts that call it: every backward ends with its reductions waited for."""
        _check_bool("is_last_backward", is_last_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sums of gradients by ``factor`` instead of the number of ranks. The group adds, and a kernel over
        the shard divides; types that could overflow are divided in part before."""
        engine = self._graph_fsdp
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"factor must be a positive number, got {factor!r}")
        _check_cut(engine, "set_gradient_divide_factor")
        _check_reduced(engine, "set_gradient_divide_factor")
        _replace(engine, divide_factors=tuple((unit, float(factor)) for unit in sorted(_units(engine))))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Have the group add and nothing else, and divide in a kernel of our own over the shard."""
        engine = self._graph_fsdp
        _check_bool("enable", enable)
        _check_cut(engine, "set_force_sum_reduction_for_comms")
        _check_reduced(engine, "set_force_sum_reduction_for_comms")
        _replace(engine, summed=_units(engine) if enable else frozenset())

    def set_all_reduce_hook(self, hook: Callable[[Tensor], Any] | None, *, stream: Any = None) -> None:
        """``hook(reduced)`` is called for each bucket once its gradients are reduced over all groups of the mesh, with
        this rank's flat shard of them, in the type of the reduction, and may change it in place; None takes it away.
        Collectives in it run in the same order on all ranks. ``stream``: of an accelerator, to call it on."""
        engine = self._graph_fsdp
        if hook is not None and not callable(hook):
            raise TypeError(f"hook must be a function of one tensor, or None, got {hook!r}")
        _check_cut(engine, "set_all_reduce_hook")
        _check_reduced(engine, "set_all_reduce_hook")
        if stream is not None and engine.spec.replicas > 1:
            raise ValueError("stream cannot be set on a mesh that replicates: the hook follows the all-reduce there")
        units = _units(engine) if hook is not None else frozenset()
        engine.kept.hooks = dict.fromkeys(units, _on_stream(hook, stream)) if hook is not None else {}
        _replace(engine, hooked=units)

    def set_post_optim_event(self, event: Any) -> None:
        """The next forward waits for ``event``, recorded after the optimizer's step: for optimizers that run on another
        stream than the current one, which every gather follows."""
        if not hasattr(event, "wait"):
            raise TypeError(f"event must be a torch.Event, got {event!r}")
        self._graph_fsdp.wait_before_forward = event


def _units(engine: Engine) -> frozenset[str]:
    return frozenset(p.unit for p in engine.spec.parameters.values())


def _all_units(engine: Engine, recurse: bool) -> frozenset[str]:
    _check_bool("recurse", recurse)
    return _units(engine) if recurse else frozenset({""})


def _replace(engine: Engine, **changes: Any) -> None:
    engine.settings = dataclasses.replace(engine.settings, **changes)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_cut(engine: Engine, method: str) -> None:
    if engine.whole:
        raise UnsupportedError(
            f"{method}() is for graphs that are cut at their collectives; compile with regions='cut' to use it"
        )


def _check_reduced(engine: Engine, method: str) -> None:
    if engine.spec.ranks == 1:
        raise UnsupportedError(f"{method}() has no effect on one process, whose gradients are not reduced")


def _on_stream(hook: Callable[[Tensor], Any], stream: Any) -> Callable[[Tensor], Any]:
    if stream is None:
        return hook

    def call(reduced: Tensor) -> None:
        current = torch.accelerator.current_stream(reduced.device)
        stream.wait_stream(current)
        with stream:
            hook(reduced)
        current.wait_stream(stream)

    return call
