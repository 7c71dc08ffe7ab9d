"""FSDP2's methods that act on units are here: ``unshard``, ``reshard``, and settings per unit after ``compile``.

They are on the model and on the modules of its units. As in FSDP2, those with ``recurse`` act on all units below a
module, the others on its own unit (the model's: parameters that are in no other). Settings change the graphs that are
captured from then on (``passes/ir/settings.py``); all ranks must set the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from graph_fsdp.engine.dynamo import Entered
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.parameters.unshard import Handle, places
from graph_fsdp.passes.transforms.prefetch import Prefetch
from graph_fsdp.passes.transforms.reshard import keeps_for_backward

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


class UnitMethods:
    """Adds these methods to the classes of models and units (``module.py``)."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this unit, in ``param_dtype``. They are plain tensors, which the forward and its
        backward take as they are, until ``reshard()`` or the end of the next backward, which reshards as in FSDP2.

        All ranks call it, in the same order. ``async_op``: return at once, with a handle; the parameters are whole
        after its ``wait()``, which the next forward calls if nobody has. Writes to whole parameters are lost at
        ``reshard()``: :func:`graph_fsdp.unsharded` keeps them.

        Within the model's forward it does nothing, and neither does the handle: the graph gathers each unit before its
        first use, as early as its schedule says (``set_modules_to_forward_prefetch``).
        """
        if torch.compiler.is_compiling() or Entered.engine == vars(self)["_graph_fsdp"].number:
            return UnshardHandle() if async_op else None
        engine, unit = place(self)
        if engine.unsharded.optional and engine.unsharded.unavailable():
            return UnshardHandle() if async_op else None
        engine.unsharded.start(unit)
        if async_op:
            return Handle(engine.unsharded, unit)
        engine.unsharded.finish(unit)
        return None

    def reshard(self) -> None:
        """Make the parameters of this unit shards again. What was kept of it for a backward
        (``reshard_after_forward=False``) is freed, and gathered again before that backward begins. All ranks call it.
        Within the model's forward it does nothing: the graph frees each unit after its last use."""
        if torch.compiler.is_compiling() or Entered.engine == vars(self)["_graph_fsdp"].number:
            return
        engine, unit = place(self)
        if unit in engine.unsharded.held:
            raise RuntimeError("reshard() was called in a block of graph_fsdp.unsharded, which reshards at its end")
        engine.unsharded.reshard(unit)
        engine.kept_buckets.free(unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether units are gathered again in backward. With False they stay whole from forward to backward; and
        from their next forward without gradients until a backward has ended, so that evaluations gather once."""
        check_bool(reshard_after_forward=reshard_after_forward, recurse=recurse)
        engine, _ = place(self)
        check_sharded(engine, "set_reshard_after_forward")
        if not reshard_after_forward:
            check_reshards(engine, "set_reshard_after_forward(False)")
        units, before = units_of(self, recurse), dict(engine.settings.reshard_after_forward)
        for unit in sorted(units - engine.unsharded.held) if reshard_after_forward else ():
            if before.get(unit) is False:
                engine.unsharded.reshard(unit)
        now = {**before, **dict.fromkeys(units, reshard_after_forward)}
        change(engine, reshard_after_forward=tuple(sorted(now.items())))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Say whether the end of a backward reshards units. With False they are gathered before their next forward with
        gradients and stay whole over the backwards of an accumulation. Set True before the last of them: the optimizer
        changes shards, and a forward on whole parameters that are older is an error."""
        check_bool(reshard_after_backward=reshard_after_backward, recurse=recurse)
        engine, _ = place(self)
        check_sharded(engine, "set_reshard_after_backward")
        if not reshard_after_backward:
            engine.unsharded.check_available("set_reshard_after_backward(False)")
        whole, units = engine.unsharded.whole_after_backward, units_of(self, recurse)
        engine.unsharded.whole_after_backward = whole - units if reshard_after_backward else whole | units

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Accept only False. With FSDP2, True keeps the address of each gathered parameter, for CUDA graphs."""
        check_bool(keep=keep, recurse=recurse)
        if keep:
            raise UnsupportedError(
                "set_keep_unsharded_storage(True) keeps gathered parameters' memory, and here buckets share slots; "
                "for CUDA graphs compile with cuda_graphs=True; set_reshard_after_forward(False) keeps parameters whole"
            )

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say whether backward needs parameters of this unit. With False (for an embedding) none is kept for it; if
        backward reads one all the same, capturing the graph is a ``SettingError``."""
        check_bool(unshard_in_backward=unshard_in_backward)
        engine, unit = place(self)
        check_sharded(engine, "set_unshard_in_backward")
        if not unshard_in_backward:
            check_reshards(engine, "set_unshard_in_backward(False)")
        units = engine.settings.not_gathered_in_backward
        change(engine, not_gathered_in_backward=units - {unit} if unshard_in_backward else units | {unit})

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Start gathering these units when this one has arrived in forward. An empty list leaves it to the pipeline."""
        self._set_prefetch("forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Start gathering these units when this one has arrived in backward. An empty list leaves it to the
        pipeline."""
        self._set_prefetch("backward_prefetch", modules)

    def _set_prefetch(self, field: str, modules: Sequence[Any]) -> None:
        engine, unit = place(self)
        check_sharded(engine, f"set_modules_to_{field}")
        if not isinstance(modules, (list, tuple)):
            raise TypeError(f"modules must be a list of units of the model, got {type(modules).__name__}")
        for module in modules:
            if getattr(module, "__dict__", {}).get("_graph_fsdp") is not engine:
                raise ValueError(
                    f"modules holds {type(module).__name__}, which is no unit of this model; units are the modules "
                    "that are instances of FSDPModule (auto_wrap_policy chooses them)"
                )
        if modules:
            check_schedule(engine, f"set_modules_to_{field}")
        lists = {u: others for u, others in getattr(engine.settings, field) if u != unit}
        if modules:
            lists[unit] = tuple(module.__dict__["_graph_fsdp_unit"] for module in modules)
        change(engine, **{field: tuple(sorted(lists.items()))})

    def reset_iter_state(self) -> None:
        """Reshard what ``unshard()`` gathered, and give up the gradients that are kept unreduced, as FSDP2 says it does
        after a run that raised: begin its microbatches again. ``.grad`` stays, and no other state remains."""
        engine, unit = place(self)
        if unit:
            raise RuntimeError(f"reset_iter_state() was called on the unit {unit!r}; call it on the model")
        engine.unsharded.release()
        engine.kept.clear()


def place(module: object) -> tuple[Engine, str]:
    return places(module, recurse=False)[0]


def units_of(module: object, recurse: bool) -> frozenset[str]:
    return frozenset(unit for _, unit in places(module, recurse))


def change(engine: Engine, **fields: Any) -> None:
    settings = dataclasses.replace(engine.settings, **fields)
    if settings.stepped and (settings.unsynced or settings.unreplicated):
        raise UnsupportedError(
            "set_requires_gradient_sync, no_sync, set_requires_all_reduce and set_manual_backward_finalization have "
            "gradients accumulated, and an optimizer steps in backward (in_backward=True), which frees each; "
            "distribute the optimizer without in_backward"
        )
    engine.settings = settings


def check_bool(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def check_schedule(engine: Engine, method: str) -> None:
    if not any(isinstance(p, Prefetch) for p in engine.pipeline):
        raise UnsupportedError(
            f"{method}() is for the pass Prefetch, and this model's pipeline schedules with another; set it there"
        )


def check_sharded(engine: Engine, method: str) -> None:
    if engine.spec.mesh.world_size == 1 and engine.spec.mesh.ranks > 1:
        raise UnsupportedError(
            f"{method}() is about gathers, and on this mesh every rank holds all parameters whole; leave the call out"
        )


def check_reshards(engine: Engine, call: str) -> None:
    if not keeps_for_backward(engine.pipeline):
        raise UnsupportedError(
            f"{call} is for a pass that provides 'resharded', and this model's pipeline has none: every bucket is "
            "gathered again in backward; leave the call out, or compile with such a pass"
        )


def check_cut(engine: Engine, method: str) -> None:
    if engine.backend.name == "xla":
        raise UnsupportedError(
            f"{method}() is not available with backend='xla', whose programs run the collectives and reduce gradients "
            "in every backward; without it, .grad adds up what backwards return"
        )
    if engine.whole:
        raise UnsupportedError(
            f"{method}() is for graphs that are cut at their collectives, and with regions='whole' the compiler runs "
            "the collectives; compile with regions='cut' to use it"
        )


def check_reduced(engine: Engine, method: str) -> None:
    check_cut(engine, method)
    if engine.spec.mesh.ranks == 1:
        raise UnsupportedError(f"{method}() has no effect on one process, whose gradients are not reduced")


def of_whole_model(module: object, method: str, what: str, recurse: bool) -> Engine:
    engine, unit = place(module)
    check_bool(recurse=recurse)
    check_reduced(engine, method)
    if unit or not recurse:
        raise UnsupportedError(f"{method}() is about {what}; call it on the model, with recurse=True")
    return engine
