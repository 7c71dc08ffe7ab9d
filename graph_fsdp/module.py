"""The class that a compiled model gets: the model's own, with a forward that runs the programs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from graph_fsdp import communication
from graph_fsdp.capture import Engine
from graph_fsdp.errors import UnsupportedError


class GraphFSDPModule(FSDPModule):
    """Mixed into a compiled model's class, before the model's own class.

    It is an ``FSDPModule``, so that code which looks for FSDP2 finds it. Methods of ``FSDPModule`` that this
    version does not have say so instead of doing nothing.
    """

    _graph_fsdp: Engine

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing a compiled model's class makes the model's own (indexing into a container does that)."""
        original: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        instance = original.__new__(original)
        instance.__init__(*args, **kwargs)
        return instance

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a model compiled by graph_fsdp cannot be deep-copied; copy it before graph_fsdp.compile")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # FSDPModule's looks for FSDP2's state; nn.Module's is the one to use.
        return super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]


def _unsupported(name: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name}() of FSDP2 is not available on models compiled by graph_fsdp yet")

    method.__name__ = name
    method.__doc__ = f"Not available yet: raises UnsupportedError. See ``FSDPModule.{name}``."
    return method


for _name, _value in vars(FSDPModule).items():
    if callable(_value) and not _name.startswith("_"):
        setattr(GraphFSDPModule, _name, _unsupported(_name))


for _name, _method in communication.METHODS.items():
    setattr(GraphFSDPModule, _name, _method)


def original_forward(model: nn.Module) -> Callable[..., Any]:
    """The model's forward as a function of (self, …), also where it was set on the instance."""
    own = model.__dict__.get("forward")
    if own is None:
        return type(model).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    functools.update_wrapper(forward, own)
    self_first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [self_first, *inspect.signature(own).parameters.values()]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def become_compiled(model: nn.Module, engine: Engine, convert: InputOutputCasts) -> None:
    """Give ``model`` its new class. Its name is FSDP2's for the same model, which other libraries strip."""
    cls = type(model)
    forward = original_forward(model)
    model.__dict__.pop("forward", None)

    @functools.wraps(forward)
    def compiled_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = convert.inputs(args, kwargs)
        return convert.outputs(engine(self, *args, **kwargs))

    namespace = {"forward": compiled_forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    model.__class__ = type(f"FSDP{cls.__name__}", (GraphFSDPModule, cls), namespace)
    model.__dict__["_graph_fsdp"] = engine


class InputOutputCasts:
    """``cast_forward_inputs`` and ``output_dtype`` of the mixed-precision policy: floating-point tensors only."""

    def __init__(self, input_dtype: torch.dtype | None, output_dtype: torch.dtype | None) -> None:
        self.input_dtype, self.output_dtype = input_dtype, output_dtype

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args, kwargs) if self.input_dtype is None else _cast((args, kwargs), self.input_dtype)

    def outputs(self, value: Any) -> Any:
        return value if self.output_dtype is None else _cast(value, self.output_dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    from graph_fsdp.passes.compat import tree_map_only

    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)
