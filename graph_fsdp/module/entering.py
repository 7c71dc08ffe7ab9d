"""Functions of a module enter compiled code: its forward, and methods that the user has registered beside it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from graph_fsdp.engine.dynamo import Entry, like_no_other, name_of_code, runs
from graph_fsdp.engine.engine import Engine
from graph_fsdp.module.refusals import refuse_transforms
from graph_fsdp.parameters.inputs import cast_floats, on_device
from graph_fsdp.parameters.sharded import ShardedParameter, is_foreign
from graph_fsdp.parameters.unshard import unsharded


class CalledAs(NamedTuple):
    """Is what a module has whose forward runs compiled: the engine, the module's name, and the dtypes, or None, to
    which the forward's inputs and outputs are cast; of a module in no unit, its parameters with their modules, too."""

    engine: Engine
    name: str
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    places: Sequence[tuple[nn.Module, str, ShardedParameter]] = ()

    def is_given_values(self) -> bool:
        """Say whether a caller has put something else where the shards were, as ``torch.func.functional_call`` does."""
        return any(is_foreign(p, module._parameters.get(leaf)) for module, leaf, p in self.places)


def original_forward(model: nn.Module) -> Callable[..., Any]:
    """Return the model's forward as a function of (self, …), also where it was set on the instance."""
    own = model.__dict__.get("forward")
    return type(model).forward if own is None else _taking_the_module(own)


def _taking_the_module(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (self, …) that calls ``own``, which was set on a module."""

    def function(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    functools.update_wrapper(function, own)
    self_first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [self_first, *inspect.signature(own).parameters.values()]
    vars(function)["__signature__"] = inspect.Signature(parameters)
    return function


def entering(
    name: str, function: Callable[..., Any], number: int, *given: Any, of: type[nn.Module] | None = None
) -> Callable[..., Any]:
    """Return ``function`` as a method of the model and of units that runs compiled; ``number``: the engine's;
    ``given``: its arguments before those of a call; ``of``: a class whose forward it is, and whose forward at the time
    of a call runs."""

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        now = function if of is None else of.forward
        if runs(number):  # traced with the model
            return now(self, *given, *args, **kwargs)
        refuse_transforms(args, kwargs)
        # The engine is not of the closure: graphs keep classes, and classes would keep it.
        called: CalledAs = vars(self)["_graph_fsdp_called"]
        if called.is_given_values():
            return now(self, *given, *args, **kwargs)
        engine, called_as, of_inputs, of_outputs, _ = called
        if engine.storage.device.type != "cpu":
            args, kwargs = on_device((args, kwargs), engine.storage.device)
        if of_inputs is not None:
            args, kwargs = cast_floats((args, kwargs), of_inputs)
        entry = Entry(called_as, name, now)
        outputs = engine.run(entry, self, *given, *args, **kwargs)
        return outputs if of_outputs is None else cast_floats(outputs, of_outputs)

    # In a model that breaks it is a frame by itself.
    return functools.wraps(function)(like_no_other(run, name_of_code()))


def forward_in_its_place(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs a forward that is set on a compiled module as the model's code, which may break (with
    ``fullgraph=True`` it runs as it is). Fabric and TRL set one for each call: it is an argument of the one function
    that is compiled, for which Dynamo has guards, as graphs for each of them would be traced for each call."""
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if inspect.iscode(code) and (code.co_filename, code.co_firstlineno) in _COMPILED:
        return forward  # the one before, set again
    run = entering("forward", _call_given, vars(module)["_graph_fsdp"].number, forward)

    @functools.wraps(forward, updated=())
    def given(*args: Any, **kwargs: Any) -> Any:
        return run(module, *args, **kwargs)

    return given


_CODE = [code for f in (entering, forward_in_its_place) for code in f.__code__.co_consts if inspect.iscode(code)]
_COMPILED = {(code.co_filename, code.co_firstlineno) for code in _CODE}


def _call_given(_: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def whole_in(module: nn.Module, _: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that the user has registered beside forward, in which parameters are whole."""

    @functools.wraps(method)
    def whole(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with unsharded(self, writeback=False):
            return method(*args, **kwargs)

    return MethodType(whole, module)


def compiled_method(module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that the user has registered beside forward, compiled."""
    own = method.__func__ if isinstance(method, MethodType) and method.__self__ is module else None
    function = _taking_the_module(method) if own is None else own
    return MethodType(entering(name, function, vars(module)["_graph_fsdp"].number), module)
