"""Change what torch traces in a forward otherwise than it should, and read what it would not tell of."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import (
    ConstantVariable,
    GetAttrVariable,
    SymNodeVariable,
    TorchInGraphFunctionVariable,
    UserFunctionVariable,
    builder,
)
from torch._ops import OpOverload
from torch.nn.modules.transformer import _detect_is_causal_mask

detect_is_causal_mask: Any = _detect_is_causal_mask


def _fields_of(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, () for another class."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


# A constant where Dynamo traces it: that of torch 2.9 does not trace ``dataclasses.is_dataclass`` of all objects.
fields_of: Any = torch.compiler.assume_constant_result(_fields_of)


def example_of(placeholder: torch.fx.Node) -> Any:
    """Return what an input of a graph that Dynamo has just traced stands for; None where that is not known."""
    return getattr(placeholder.meta.get("grapharg"), "example", None)


def given_data(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the values of a graph of Dynamo's whose ``data`` the code assigns. Their versions do not say it."""
    targets: list[Any] = [torch.Tensor.set_]
    if hasattr(torch.ops.aten, "shallow_copy_data_"):  # from torch 2.15 on
        targets.append(torch.ops.aten.shallow_copy_data_)
    return {n.all_input_nodes[0] for t in targets for n in graph.find_nodes(op="call_function", target=t)}


def inputs_given_gradients() -> set[str]:
    """Return the names of those inputs of the graph that Dynamo has just traced whose ``grad`` is set when it has run:
    Dynamo traces a whole ``backward()`` so, where it traces ``torch.autograd.grad``."""
    set_later = InstructionTranslator.current_tx().output.side_effects.store_attr_mutations
    return {variable.as_proxy().node.name for variable, attributes in set_later.items() if "grad" in attributes}


def inline_compile_regions(inlined: Callable[[], bool]) -> None:
    """Have Dynamo trace what ``torch.compiler.nested_compile_region`` marks as if it were not marked, while
    ``inlined()``; else it makes a graph of its own of it."""
    a_graph_of_its_own = builder.build_invoke_subgraph_variable

    def build(**options: Any) -> Any:
        return UserFunctionVariable(cast(Any, _called)) if inlined() else a_graph_of_its_own(**options)

    builder.build_invoke_subgraph_variable = build


def _called(marked: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return marked(*args, **kwargs)


def trace_methods_of_class_names(traced: Callable[[], bool]) -> None:
    """While ``traced()``, have Dynamo trace ``type(p).__module__.startswith(…)`` of one of torch's classes. That of
    torch 2.9 and of 2.15 does; in between it has no method for the text."""
    patched: Any = GetAttrVariable
    as_ever = patched.call_method

    def call_method(self: Any, tx: Any, name: str, *given: Any) -> Any:
        owner = self.obj.value if isinstance(self.obj, TorchInGraphFunctionVariable) else None
        text = getattr(owner, self.name, None) if isinstance(owner, type) else None
        if isinstance(text, str) and traced():
            return ConstantVariable.create(text).call_method(tx, name, *given)
        return as_ever(self, tx, name, *given)

    patched.call_method = call_method


def trace_momenta_of_data(traced: Callable[[], bool], batch_norm: Callable[..., torch.Tensor]) -> None:
    """While ``traced()``, have Dynamo trace ``batch_norm`` for ``F.batch_norm`` where the data says what the momentum
    is: that of an operator is known before it runs."""
    patched: Any = TorchInGraphFunctionVariable
    as_ever = patched.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is F.batch_norm and traced():
            momentum = kwargs.get("momentum") if len(args) < 7 else args[6]
            if isinstance(momentum, SymNodeVariable):
                return UserFunctionVariable(cast(Any, batch_norm)).call_function(tx, args, kwargs)
        return as_ever(self, tx, args, kwargs)

    patched.call_function = call_function


_tracing = threading.local()


@contextlib.contextmanager
def traced_as(functions: Mapping[OpOverload[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """For a time and in this thread, trace calls of these functions in place of operators that torch writes out."""
    for operator in functions:
        _install(operator)
    before, _tracing.functions = getattr(_tracing, "functions", {}), functions
    try:
        yield
    finally:
        _tracing.functions = before


@functools.cache
def _install(operator: OpOverload[..., Any]) -> None:
    """Let tracing ask what stands for an operator."""
    composite, autograd = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd
    for key in (composite, autograd) if composite in operator.py_kernels else (composite,):
        written_out = operator.py_kernels.get(key, functools.partial(operator._op_dk, composite))  # else in C++

        @functools.wraps(written_out)  # whose it is, other tables of decompositions ask
        def traced(*args: Any, written_out: Callable[..., Any] = written_out, **kwargs: Any) -> Any:
            return getattr(_tracing, "functions", {}).get(operator, written_out)(*args, **kwargs)

        operator.py_kernels[key] = traced
    operator._dispatch_cache.clear()
