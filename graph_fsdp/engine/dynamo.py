"""Define the functions that enter compiled code, of models, units and registered methods, and readable errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import threading
import traceback
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graph_fsdp import compat
from graph_fsdp.engine.recompilation import Call, Cause
from graph_fsdp.errors import EmptyPlaceholderError, GraphBreakError, UnsupportedError
from graph_fsdp.module.structure import OF_BACKWARD, Structure
from graph_fsdp.parameters.inputs import tensors_of
from graph_fsdp.parameters.placeholder import NOT_OF_USERS, line_of

_FORWARD = "graph_fsdp_forward"
_forwards = itertools.count()


@dataclasses.dataclass(frozen=True)
class Entry:
    """Names a compiled function of a model or unit, which takes the module first. Each has graphs and plans of its
    own."""

    unit: str
    name: str
    function: Callable[..., Any]

    @property
    def suffix(self) -> str:
        """Return the suffix of its graphs' kinds, equal on all ranks."""
        return "" if (self.unit, self.name) == ("", "forward") else f"/{self.unit}.{self.name}"


class Entered:
    """Holds the number of the engine whose code runs or is traced; functions of its model are then the plain ones.
    ``thread``: the one that runs it."""

    engine, thread = -1, 0
    _lock = threading.RLock()

    @classmethod
    @contextlib.contextmanager
    def by(cls, engine: int) -> Iterator[None]:
        before = cls.engine, cls.thread
        cls.engine, cls.thread = engine, threading.get_ident()
        try:
            yield
        finally:
            cls.engine, cls.thread = before

    @classmethod
    @contextlib.contextmanager
    def turn(cls, *, waits: bool) -> Iterator[None]:
        """Run one forward at a time: others in this thread and, of autograd's threads, what a backward computes again.
        Those of other threads wait for it, or raise where ranks could start collectives in other orders."""
        if compat.current_backward() >= 0:
            yield
            return
        if not cls._lock.acquire(blocking=waits):
            raise RuntimeError(
                "a forward was called in one thread while another thread runs one, of this model or of another that is "
                "compiled by graph_fsdp: ranks would start their collectives in different orders. Hold one lock around "
                "the calls of all models, on all ranks in the same order"
            )
        try:
            yield
        finally:
            cls._lock.release()


def _thread_is_here() -> bool:
    return Entered.thread == threading.get_ident()


_in_this_thread: Any = torch.compiler.assume_constant_result(_thread_is_here)  # of a trace: it is that of the trace


def runs(engine: int) -> bool:
    """Say whether code of this engine's model runs, or is traced, in this thread. Dynamo traces this."""
    return Entered.engine == engine and bool(_in_this_thread())


def name_of_code() -> str:
    """Return a name that no other code of this process has."""
    return f"{_FORWARD}_{next(_forwards)}"


def own_code(forward: Callable[..., Any], fullgraph: bool, sharded: bool, name: str) -> types.FunctionType:
    """Return a function that calls ``forward``, with this name, and is like no other. Where parameters are ``sharded``,
    it returns copies of whole ones, which are operators of the graph and have gradients."""

    def graph_fsdp_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if fullgraph and not torch.compiler.is_compiling():  # else what it reads is gathered (python_reads.py)
            raise EmptyPlaceholderError(
                "torch.compile is off (TORCHDYNAMO_DISABLE=1, torch.compiler.set_stance('force_eager')), and the model "
                "would run on placeholders without memory; turn it on, or compile the model with fullgraph=False, "
                "which gathers each unit for the code that reads it"
            )
        # In no variable, whose name Dynamo would give to a node.
        return whole_parameters(forward(self, *args, **kwargs)) if sharded else forward(self, *args, **kwargs)

    return like_no_other(graph_fsdp_forward, name)


def like_no_other(function: Any, name: str) -> types.FunctionType:
    """Return a function that does the same, with a code object and globals of its own, and this ``name``. Two models
    must not share them: Dynamo caches and limits recompilations by code object, remembers by name and place which sizes
    have changed, and puts what it compiles into the globals, where it would outlive the model."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, dict(function.__globals__), name, None, function.__closure__)


def apart(fullgraph: bool) -> dict[str, bool]:
    """Return the arguments with which ``torch.compile``, from torch 2.13 on, keeps apart what it makes of the functions
    that a broken model calls, whose code models share. Where it gives up on one of them, it would run in it what it has
    made for other models and settings."""
    known = not fullgraph and "isolate_recompiles" in inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if known else {}


def holds_parameter(outputs: Any) -> bool:
    """Say whether there is a parameter among ``outputs``, in lists, tuples, dicts and dataclasses. Dynamo traces
    this."""
    if isinstance(outputs, (dict, list, tuple)) or compat.fields_of(type(outputs)):
        return any(map(holds_parameter, _values(outputs)))
    return isinstance(outputs, nn.Parameter)


def whole_parameters(outputs: Any) -> Any:
    """Return ``outputs`` with a copy in the place of each parameter. Dynamo traces this: returned as it is, a parameter
    is no output of a graph but the placeholder that stands in the model, and would be without a value."""
    if not holds_parameter(outputs):
        return outputs
    if isinstance(outputs, nn.Parameter):
        return outputs.clone()
    values, kind = list(map(whole_parameters, _values(outputs))), type(outputs)
    if fields := compat.fields_of(kind):
        return kind(**dict(zip(fields, values, strict=True)))
    if isinstance(outputs, dict):
        # torch 2.15's Dynamo knows this class by its name alone.
        return (OrderedDict if kind is OrderedDict else kind)(zip(outputs, values, strict=True))
    return kind(*values) if hasattr(outputs, "_fields") else kind(values)


def _values(outputs: Any) -> list[Any]:
    """Return what lies in a list, tuple, dict or dataclass."""
    if fields := compat.fields_of(type(outputs)):  # transformers' outputs are dicts, too, without their fields of None
        return [getattr(outputs, name) for name in fields]
    return list(outputs.values() if isinstance(outputs, dict) else outputs)


# Where Python calls them, they are no frames to compile.
for _function in (holds_parameter, whole_parameters, _values):
    compat.leave_to_python(_function)


def forget_programs(function: types.FunctionType) -> None:
    """Clear a function's globals, where Dynamo has put what it compiled. Dynamo does so when the code object goes, but
    a process group keeps that with the stacks of its last 2,000 collectives (``TORCH_FR_BUFFER_SIZE``)."""
    scope = function.__globals__
    for name in scope:
        scope[name] = None


def differentiable_once(outputs: Any, recorded: bool, before: Callable[[Any], None] | None) -> Any:
    """Have the backward of ``outputs`` refuse ``create_graph=True``, as what it recorded could not be differentiated,
    and gradients in a batch, as its programs run operators on memory. ``before``: called when their backward begins.
    There is one if graphs ``recorded`` gradients, or there is a ``before``."""
    found = tensors_of(outputs) if recorded or before is not None else ()
    for node in dict.fromkeys(tensor.grad_fn for tensor in found):
        if node is not None:
            compat.hook_before(node, _refuse_kinds_of_backward)
            if before is not None:
                compat.hook_before(node, before)
    return outputs


def _refuse_kinds_of_backward(gradients: Any) -> None:
    if any(isinstance(grad, Tensor) and compat.is_batch_of_gradients(grad) for grad in gradients):
        raise UnsupportedError(
            "a backward of several gradients at once (is_grads_batched=True, jacobian(vectorize=True)) goes through a "
            "model compiled by graph_fsdp, whose collectives are not of a batch; ask for one gradient after another"
        )
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "backward with create_graph=True goes through a model compiled by graph_fsdp, and torch.compile cannot "
            "differentiate a backward again; compute a gradient penalty in the model's forward, where "
            "torch.autograd.grad(…, create_graph=True) is traced (from torch 2.11 on), on a model that is neither "
            "compiled nor sharded, or by finite differences of the model's outputs"
        )


def what_to_raise(error: Exception, entry: Entry, call: Call, structure: Structure, fullgraph: bool) -> Exception:
    """Return what the caller of a model is to see for an ``error`` of Dynamo's."""
    if fullgraph and (raised := raised_by_forward(error, call)) is not None:
        return raised
    if isinstance(error, compat.TorchRuntimeError) or (isinstance(error, compat.OF_USERS) and not fullgraph):
        return error
    told = graph_break(error, entry, call, structure)
    told.__cause__ = error
    return told


def raised_by_forward(error: Exception, call: Call) -> Exception | None:
    """Return the exception that the model's own code raises for these arguments, if that is why Dynamo gave up. Its
    Python code is run for it, on fake tensors and up to the line that raises."""
    text = str(error)
    if not any(words in text for words in _RAISES) and not isinstance(error, compat.TorchRuntimeError):
        return None
    try:
        with compat.all_fake():
            call.function(call.module, *call.args, **call.kwargs)
    except Exception as raised:
        return raised if isinstance(raised, AssertionError) or type(raised).__name__ in text else None
    return None


# What Dynamo says of a raise, of an assertion and of a function of torch that raises.
_RAISES = ("Observed exception", "Data-dependent assertion failed", "when making fake tensor call")


def graph_break(error: Exception, entry: Entry, call: Call, structure: Structure) -> GraphBreakError:
    """Return what to raise for ``error``. Raises TypeError if wrong arguments were the cause."""
    try:
        inspect.signature(call.function).bind(call.module, *call.args, **call.kwargs)
    except TypeError as wrong:
        raise TypeError(f"{type(call.module).__name__}.forward(): {wrong}") from None
    stack = [frame for frame in (getattr(error, "real_stack", None) or []) if not frame.name.startswith(_FORWARD)]
    internal = isinstance(error, compat.InternalTorchDynamoError)
    if internal and not stack:  # it has failed after tracing, where it made guards
        stack = traceback.extract_tb(error.__traceback__)[-1:]
    if stack and stack[-1].filename == nn.modules.module.__file__ and (hooks := structure.hooks(*OF_BACKWARD)):
        return GraphBreakError(
            f"{', '.join(hooks)}: the one graph of a model has no place for it; put it on the model itself or on a "
            "tensor (Tensor.register_hook, and register_post_accumulate_grad_hook of a parameter), or pass "
            "fullgraph=False, which leaves that module's call to Python"
        )
    where = f" at {line_of(stack[-1])}" if stack else ""
    called = [frame for frame in stack if not frame.filename.startswith(NOT_OF_USERS)]
    if called and called[-1] is not stack[-1]:
        where += f"\n  called at {line_of(called[-1])}"
    reason = str(error).split("\n\n")[0].strip().splitlines()
    if reason and reason[0].startswith("Observed exception"):
        raised = re.search("raised exception (.+)", str(error))
        reason = [f"this line raises {raised[1] if raised else 'an exception'} for these inputs"]
    if internal:
        return GraphBreakError(
            f"the model cannot be traced: Dynamo, the part of torch.compile that traces, failed{where}\n  reason: "
            f"{reason[0] if reason else error}\n  Change that line, or pass fullgraph=False, with "
            "torch.compiler.disable on the function or module that has it where that alone does not help. Dynamo's own "
            "error is above."
        )
    hooks = structure.hooks()
    return GraphBreakError(
        f"the model cannot be traced in one graph: it breaks{where}\n  reason: {reason[0] if reason else error}\n"
        "  Change that line, or pass fullgraph=False to compile each piece by itself. Dynamo's explanation is above."
        + (f"\n  Traced with the model: {', '.join(hooks)}." if hooks else "")
        + (
            f"\n  A method that calls the model in a loop of Python, as {entry.name}() may, need not be registered: "
            "each call of the model is compiled."
            if entry.name != "forward"
            else ""
        )
    )


def warn_of_traces(structure: Structure, causes: Sequence[Cause]) -> None:
    """Warn, once, of a model that Dynamo has traced for ``causes``, more often than torch lets it by default."""
    again = causes and causes[-1].kind == "guard"  # and not another piece of the model
    if again and compat.goes_on_at_torchs_limit(len(causes)):
        warnings.warn(traced_often(structure, causes, gives_up=False), stacklevel=2)


def traced_often(structure: Structure, causes: Sequence[Cause], *, gives_up: bool) -> str:
    """Say that Dynamo has traced a model again and again, for ``causes``."""
    hooks = structure.hooks()
    return (
        (f"{', '.join(hooks)}: " if hooks else "")
        + f"torch.compile has traced the model {len(causes)} times"
        + (" and gives up (torch._dynamo.config.recompile_limit)" if gives_up else ", and compiles one more graph")
        + (f". The last time: {[*causes[-1].guards, causes[-1]][0]}" if causes else "")
        + ". "
        + (
            "What a hook reads and writes in Python is traced too: a list that grows in each call is another one each "
            "time. Put the hook on the model itself, where it runs outside of the graph, have it write to a key of a "
            "dict, or pass fullgraph=False"
            if hooks
            else "What a forward reads in Python (a number, a text, the length of a list) is a constant of its graph: "
            f"pass what changes in each call as a tensor, keep it in a buffer, {'raise the limit, ' * gives_up}or pass "
            "fullgraph=False"
        )
    )


def trace_composable_checkpoints(model: nn.Module) -> None:
    """Have torch's composable ``checkpoint(module)``, applied before ``compile``, traced as ``torch.utils.checkpoint``
    is: the module's forward gets such a checkpoint instead of the hooks, whose generator Dynamo does not trace."""
    for module in model.modules():
        options = compat.take_composable_checkpoint(module)
        if options is not None:
            of_class = types.MethodType(_forward_of(type(module)), module)
            forward = vars(module).get("forward", of_class)
            run = functools.partial(checkpoint, forward, use_reentrant=False, **options)
            vars(module)["forward"] = functools.update_wrapper(run, forward)


def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return a function that calls the forward that a class has at the time of a call."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    return functools.wraps(kind.forward)(forward)
