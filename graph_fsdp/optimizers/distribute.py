"""``distribute_optimizer`` has an optimizer step over few large tensors instead of over each parameter's DTensor, by
owners of whole matrices, or in backward."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import optim

from graph_fsdp.classes import preceded
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.optimizers.ahead import Ahead, drop_ahead
from graph_fsdp.optimizers.declared import check_element_wise
from graph_fsdp.optimizers.groups import parameters_of, shards_of
from graph_fsdp.optimizers.host_state import HostState, LoadsToHost
from graph_fsdp.optimizers.in_backward import InBackward, StepsInBackward
from graph_fsdp.optimizers.owners import MATRIX_WISE, MatrixRule, Owners
from graph_fsdp.optimizers.slices import Slices, unshared
from graph_fsdp.passes.analysis.optimizers import Stepping, known_as
from graph_fsdp.passes.ir.settings import check_flags, is_count

Kind = TypeVar("Kind", bound=optim.Optimizer)

# Optimizers of torch that treat each element by itself.
ELEMENT_WISE: tuple[type[optim.Optimizer], ...] = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip


def distribute_optimizer(
    optimizer: Kind,
    *,
    in_backward: bool = False,
    offload_state: bool = False,
    gather_ahead: int = 0,
    element_wise: bool | None = None,
    matrix_wise: MatrixRule | None = None,
) -> Kind:
    """Let ``optimizer`` step over slices of the shard storage of compiled models, or, where it needs whole matrices,
    each matrix on one rank. Return the same object.

    Its class becomes a subclass of its own, of the same name. Parameters that no compiled model has shards of are
    stepped as before. Over slices, values, ``state_dict()``, hooks and settings are bit for bit what they were, and
    nothing is communicated. By owners (Muon), states are DTensors as before, ``step()`` is a collective of all ranks of
    the mesh, and values are those of one process to 1e-6 in float32.

    Args:
        optimizer: made of ``model.parameters()`` after ``graph_fsdp.compile``: one of torch's element-wise classes
            (SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop, ASGD) or Muon, with any
            settings. It may have a state already. Make learning-rate schedulers afterwards.
        in_backward: the optimizer steps the parameters of a bucket in backward, when their gradients are reduced, which
            are freed then and never in ``.grad``; call it before the first forward, and ``step()`` after each backward
            nevertheless. Scalars, and parameters whose gradient a loss may leave out, are stepped by ``step()``. Hooks
            on parameters do not run, and hooks on the optimizer run in ``step()``. What needs all gradients at once is
            refused: clipping by their norm (torch's own finds no gradients), ``GradScaler``, accumulation.
        offload_state: the optimizer's state is kept on the CPU, where parameters are stepped, while others are copied
            there and back; parameters and gradients stay on the device. For torch's element-wise classes, without
            ``fused``, ``capturable`` and ``differentiable``. Pinned memory of the CPU has as many bytes as this rank's
            shards, twice.
        gather_ahead: so many units, the first in the order of the model's parameters, are stepped first. ``step()``
            then starts to gather them for the next forward, and steps the others meanwhile. They are whole to the end
            of that forward, which saves what its backward reads of them, as activations are. If a shard changes between
            ``step()`` and the forward, on all ranks, the forward gathers it again; writes through ``.data`` and by
            ``torch._foreach_…`` operators are not seen. An evaluation gives them back. Forwards begin so until another
            optimizer steps one of the same parameters or is distributed with them, or this one is given here again with
            another number: 0 ends it. For torch's element-wise classes.
        element_wise: True declares that an optimizer of another class treats each element by itself, as Lion does: what
            ``step`` computes of an element depends on that element of the parameter, its gradient and its state, and on
            values of the group or of the whole state, such as a number of steps. A copy tries it on a few numbers.
        matrix_wise: declares how an optimizer of another class steps a parameter that is on several ranks: a generator
            function of (parameter, gradient, its state, its group) that yields, once, a function of whole tensors and
            the DTensors to call it with, placed as the parameter and of one dtype. One rank calls the function, which
            returns tensors like those it is given, in a list, and each rank is sent its shards of these.

    Raises:
        TypeError: ``optimizer`` is no ``torch.optim.Optimizer``, or ``matrix_wise`` no generator function.
        UnsupportedError: nothing says how it steps, it does not step as declared, steps by a method that was set on the
            object, is distributed already, or needs a whole matrix that more than two dimensions of a mesh shard; or
            ``in_backward`` or ``gather_ahead`` is not available on the model.
        ValueError: none of its parameters is a shard of a compiled model.
    """
    check_flags(in_backward=in_backward, offload_state=offload_state)
    if element_wise is not None:
        check_flags(element_wise=element_wise)
    if not is_count(gather_ahead, least=0):
        raise ValueError(f"gather_ahead must be a number of units, 0 for none, got {gather_ahead!r}")
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, and is a {type(optimizer).__name__}")
    if isinstance(optimizer, DistributedStep):
        _distribute_anew(optimizer, gather_ahead, in_backward or offload_state or matrix_wise is not None)
        return optimizer
    rule = _rule_of(type(optimizer), element_wise, matrix_wise)
    _check_options(optimizer, rule, in_backward, offload_state, gather_ahead)
    own_step, first = _own_step(type(optimizer)), list[type[Any]]()
    if element_wise and type(optimizer) not in ELEMENT_WISE:
        check_element_wise(optimizer, own_step)
    stepper: Slices | Owners | InBackward
    if in_backward:
        stepper, first = InBackward(optimizer, own_step), [StepsInBackward]
    elif offload_state:
        stepper, first = HostState(optimizer), [LoadsToHost]
    else:
        stepper = _slices(optimizer, gather_ahead) if rule is None else Owners(optimizer, rule)
    if not gather_ahead:
        drop_ahead(optimizer)
    _tell_models(optimizer, in_backward, offload_state)
    vars(optimizer)["_graph_fsdp_stepper"] = stepper
    optimizer.__class__ = _distributed_class(type(optimizer), own_step, first)
    return optimizer


def _rule_of(
    cls: type[optim.Optimizer], element_wise: bool | None, matrix_wise: MatrixRule | None
) -> MatrixRule | None:
    """Return how optimizers of a class step whole matrices; None for those that treat each element by itself."""
    if element_wise and matrix_wise is not None:
        raise ValueError("element_wise=True and matrix_wise exclude each other; leave one of them out")
    if matrix_wise is not None:
        if not inspect.isgeneratorfunction(matrix_wise):
            raise TypeError(
                f"matrix_wise must be a generator function, which yields work on whole tensors: {matrix_wise!r}"
            )
        return matrix_wise
    if element_wise or cls in ELEMENT_WISE:
        return None
    if cls not in MATRIX_WISE:
        raise UnsupportedError(
            f"optimizer: {cls.__name__} is not known to treat each element by itself, as slices of several parameters "
            "need, nor how it steps whole matrices; use it as it is, or say so with element_wise=True or matrix_wise="
        )
    return MATRIX_WISE[cls]


def _check_options(
    optimizer: optim.Optimizer, rule: MatrixRule | None, in_backward: bool, offload_state: bool, gather_ahead: int
) -> None:
    """Raise UnsupportedError where an optimizer that is not distributed yet cannot have these options."""
    name, is_of_torch = type(optimizer).__name__, type(optimizer) in ELEMENT_WISE
    if "step" in vars(optimizer):
        raise UnsupportedError(
            f"optimizer: step() of this {name} was replaced on the object, as a learning-rate scheduler does; call "
            "distribute_optimizer before a scheduler is made of it"
        )
    if isinstance(getattr(type(optimizer), "state", None), property):
        raise UnsupportedError(
            f"optimizer: this {name} has the state of an optimizer that it wraps; give that one to "
            "distribute_optimizer, and wrap it then"
        )
    if in_backward and rule is not None:
        raise UnsupportedError(
            f"in_backward=True: {name} needs whole matrices, and steps all of them at once; leave in_backward out"
        )
    if offload_state and (in_backward or not is_of_torch):
        what = "in_backward=True frees gradients on the device" if in_backward else f"{name} is none of torch's"
        raise UnsupportedError(
            f"offload_state=True is for element-wise optimizers of torch, stepped by step(), and {what}; leave it out"
        )
    if gather_ahead and offload_state:
        raise _not_ahead(gather_ahead, "offload_state=True steps one run after the other on the CPU")
    if gather_ahead and in_backward:
        raise _not_ahead(gather_ahead, "in_backward=True has nothing left to step")
    if gather_ahead and not is_of_torch:
        raise _not_ahead(gather_ahead, f"{name} is none of torch's")


class DistributedStep(optim.Optimizer):
    """Comes before an optimizer's own class among the bases of its class."""

    _graph_fsdp_class: type[optim.Optimizer]  # its own
    _graph_fsdp_stepper: Slices | Owners | InBackward

    def state_dict(self) -> Any:
        """Return the state dict of the optimizer's own class, in which parameters share nothing."""
        found = super().state_dict()
        found["state"] = {index: unshared(state) for index, state in found["state"].items()}
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle it as an optimizer of its own class, which is not distributed."""
        state = defaultdict(dict, {p: unshared(values) for p, values in self.state.items()})
        return _restored, (self._graph_fsdp_class, {**self.__getstate__(), "state": state})


def _restored(cls: type[optim.Optimizer], state: Any) -> optim.Optimizer:
    made = cls.__new__(cls)
    made.__setstate__(state)
    return made


def _tell_models(optimizer: optim.Optimizer, in_backward: bool, on_cpu: bool) -> None:
    """Let models' reports know what steps their parameters."""
    cls = type(optimizer)
    by = {
        id(p): Stepping(cls.__name__, known_as(cls, group, on_cpu), in_backward)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for storage, held in shards_of(parameters_of(optimizer)):
        storage.updates.stepping.update({name: by[id(p.shard)] for name, p in held.items()})


def _not_ahead(units: int, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"gather_ahead={units} is for element-wise optimizers of torch that step on the device, and {why}; leave it out"
    )


def _distribute_anew(optimizer: DistributedStep, gather_ahead: int, others: bool) -> None:
    """Have a distributed optimizer gather another number of units ahead; nothing else of it can be changed. ``others``:
    whether other options are given."""
    name, stepper = type(optimizer).__name__, optimizer._graph_fsdp_stepper
    before = stepper.ahead if isinstance(stepper, Slices) and not isinstance(stepper, HostState) else None
    if before in (None, gather_ahead) or others:
        raise UnsupportedError(
            f"optimizer: this {name} was given to distribute_optimizer already; use it as it is (what can be changed "
            "is gather_ahead, of an element-wise optimizer that steps in step(), on the device)"
        )
    if gather_ahead and optimizer._graph_fsdp_class not in ELEMENT_WISE:
        raise _not_ahead(gather_ahead, f"{name} is none of torch's")
    if not gather_ahead:
        drop_ahead(optimizer)
    vars(optimizer)["_graph_fsdp_stepper"] = _slices(optimizer, gather_ahead)


def _slices(optimizer: optim.Optimizer, gather_ahead: int) -> Slices:
    return Ahead(optimizer, gather_ahead) if gather_ahead else Slices(optimizer)


def _own_step(cls: type[optim.Optimizer]) -> Callable[..., Any]:
    own: Callable[..., Any] = cls.step
    # torch's hooks and profiling range are to be around all of it, once.
    return vars(own)["__wrapped__"] if getattr(own, "hooked", False) else own


def _distributed_class(cls: type[optim.Optimizer], own: Callable[..., Any], first: Sequence[type[Any]]) -> Any:
    """``first``: bases that come before all others."""

    def step(self: DistributedStep, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._graph_fsdp_stepper.step(self, lambda: own(self, **kwargs))
        return loss

    hooked: Any = optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    before = (*first, DistributedStep)
    return preceded(cls.__name__, before, cls, {**namespace, "_graph_fsdp_class": cls, "step": hooked})
