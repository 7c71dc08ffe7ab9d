"""The private names of Dynamo and AOTAutograd are used here, and of what torch logs about them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import keyword
import logging
import os
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import OptimizedModule as OptimizedModule
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import get_debug_dir
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_rematerialization_partition
from torch._guards import TracingContext as TracingContext
from torch._guards import tracing as tracing
from torch._logging import trace_structured
from torch._logging._internal import trace_log
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import profiler as autograd_profiler
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

from graph_fsdp.compat.traces.quick_graphs import arguments_unsearched


@contextlib.contextmanager
def random_states_only_where(draws: Callable[[torch.fx.Node], bool], *, draws_as_eager: bool = False) -> Iterator[None]:
    """Let the partitioner keep a state of the generator for those recomputed operators alone of which ``draws`` is
    true. Its own rule is torch's tag for random operators. Calls that it makes have fake values, as all others do.

    torch 2.9 looks for each in both graphs, and fails with a ``KeyError`` where only one draws.

    On CUDA it gives each such operator a generator of its own, which CUDA graphs need: forward then draws other numbers
    than without recomputing. ``draws_as_eager``: it keeps states of the default generator there too.
    """
    functionalize = partitioners.functionalize_rng_ops

    def functionalized(
        joint: torch.fx.GraphModule, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, *args: Any
    ) -> Any:
        both = {node.name for node in forward.graph.nodes} & {node.name for node in backward.graph.nodes}
        tagged = [node for node in joint.graph.nodes if "recompute" in node.meta]
        others = [node for node in tagged if not draws(node) or node.name not in both]
        tags = {node: node.meta.pop("recompute") for node in others}
        try:
            made = functionalize(joint, forward, backward, *args)
            for module in made:
                _give_values(module.graph)
            return made
        finally:
            for node, tag in tags.items():
                node.meta["recompute"] = tag

    own = {"graphsafe_rng_functionalization": False} if draws_as_eager else {}
    with functorch_config.patch(own), unittest.mock.patch.object(partitioners, "functionalize_rng_ops", functionalized):
        yield


def _give_values(graph: torch.fx.Graph) -> None:
    """Give the calls that keep or restore a state of the generator their fake values."""
    for node in graph.nodes:
        if node.target in (rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            with current_fake_mode():
                node.meta["val"] = node.target(*args, **kwargs)


def recomputed_for_own_backward(graph: torch.fx.Graph) -> contextlib.AbstractContextManager[Any]:
    """Let AOTAutograd recompute within a graph only where it has a backward of its own (``torch.autograd.grad`` in a
    forward). Of checkpoints in others, where nothing needs a gradient, torch 2.13 and 2.15 refuse random numbers."""
    name = "remat_using_tags_for_fwd_loss_bwd_graph"
    metas = [node.meta for node in graph.nodes]
    own = any(m.get("autograd_backward") or (m.get("custom") or {}).get("phase") == "backward" for m in metas)
    return functorch_config.patch({name: False} if hasattr(functorch_config, name) and not own else {})


@contextlib.contextmanager
def quick_minimum_cuts() -> Iterator[None]:
    """Let the partitioner find its minimum cut by ``minimum_cut.py``. Its import of networkx is its own, and late.
    torch 2.15 has a cut of its own."""
    import networkx

    from graph_fsdp.compat.traces.minimum_cut import Network, minimum_cut

    with unittest.mock.patch.multiple(networkx, minimum_cut=minimum_cut, DiGraph=Network):
        yield


@contextlib.contextmanager
def graphs_without_code() -> Iterator[None]:
    """Let graph modules of torch's own class write no code. The partitioner makes some on its way, has each write its
    code more than once, and runs none of them."""
    with unittest.mock.patch.object(torch.fx.GraphModule, "recompile", lambda self: None):
        yield


def leave_to_python(function: Any) -> None:
    """Have Dynamo not compile ``function`` where Python calls it. Called from traced code, it is traced."""
    skip_code(getattr(function, "__func__", function).__code__)


def profiler_is_active() -> bool:
    """Say whether ``torch.profiler``, ``torch.autograd.profiler`` or ``emit_nvtx`` records in this process."""
    return autograd_profiler._is_profiler_enabled


def is_tracing() -> bool:
    """Say whether Dynamo traces in this thread: in traced code (where this is a constant) or in Dynamo's own."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


leave_to_python(is_tracing)  # compiled by itself it would return what is so while Dynamo traces


# Runs a function when the backward that is under way has computed all gradients.
when_backward_ends: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def current_fake_mode() -> FakeTensorMode:
    """Return the fake mode of the capture that is under way."""
    mode = TracingContext.get().fake_mode
    assert mode is not None, "called outside of a torch.compile capture"
    return mode


@contextlib.contextmanager
def tracing_in(mode: FakeTensorMode) -> Iterator[None]:
    """Compile under this fake mode what a capture that has ended left. It has made constants of floats where it must,
    which torch knows until the next capture: nobody could trace again here."""
    constant = unittest.mock.patch.object(TensorifyState, "should_specialize", lambda _: True)
    with constant, tracing(TracingContext(mode)):
        yield


def forward_outputs() -> tuple[list[int], list[bool]]:
    """Describe the outputs of the graph that AOTAutograd has just traced, which do not alias its inputs: which inputs
    are written, whose new values come first; and for each of the user's outputs, which follow, whether backward is
    given a gradient of it."""
    found: Any = TracingContext.get().fw_metadata
    return list(found.mutated_inp_runtime_indices), [
        bool(info.requires_grad) and issubclass(info.raw_type, torch.Tensor) for info in found.output_info
    ]


def inputs_written_later(forward: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the inputs of a forward of AOTAutograd's that it writes to itself, when the graph has run: what has a
    gradient, and buffers where graphs write to nothing."""
    described: Any = forward.output_node().meta.get("desc") or ()
    written = {of.mutated_input for of in described if isinstance(of, InputMutationAOTOutput)}
    return [node for node in forward.find_nodes(op="placeholder") if node.meta.get("desc") in written]


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function, and return it: AOTAutograd then hands over its own list of inputs, so that they can be dropped
    early. The mark is on the instance: wrappers that torch puts around backward copy instance attributes only."""
    vars(run)["_boxed_call"] = True
    return run


def let_backward_run_twice() -> None:
    """Let the backward of the graph that AOTAutograd has just traced run with ``retain_graph=True`` whatever it saves,
    which only Inductor would write to, where it compiled the graph as a whole."""
    found: Any = TracingContext.get().fw_metadata
    found.bw_donated_idxs = []


def tangents_of_outputs(number: int) -> list[int | None] | None:
    """Return, for each output of the autograd node of the graph that AOTAutograd has just traced, which of its
    ``number`` tangents is the gradient, or None for none. None as a whole where this torch counts them otherwise."""
    found: Any = TracingContext.get().fw_metadata
    written = [found.input_info[index] for index in found.mutated_inp_runtime_indices]
    returned = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
    has_tangent = [info.mutates_data and info.requires_grad for info in written]
    has_tangent += [
        info.output_type in returned
        and issubclass(info.raw_type, torch.Tensor)
        and getattr(info, "requires_grad_for_backward", info.requires_grad)
        for info in found.output_info
    ]
    has_tangent += [True] * found.num_intermediate_bases
    if sum(has_tangent) != number:
        return None
    numbers = itertools.count()
    return [next(numbers) if has else None for has in has_tangent]


def is_compiled_backward(node: Any) -> bool:
    """Say whether a node of autograd runs the backward of a graph of AOTAutograd's."""
    return type(node).__name__ == "CompiledFunctionBackward"


_OF_TRANSFORMERS = ("warning_once", "info_once", "warning_advice")
_LOGGING = ("debug", "info", "warning", "error", "exception", "critical", "log", "warn", *_OF_TRANSFORMERS)


_RECOMPILE_LIMIT: int = dynamo_config._config["recompile_limit"].default  # type: ignore[attr-defined]


def goes_on_at_torchs_limit(traces: int) -> bool:
    """Say whether so many traces of a function are what torch lets Dynamo make by default, and it may make more."""
    return traces == _RECOMPILE_LIMIT < dynamo_config.recompile_limit


@contextlib.contextmanager
def tracing_options(
    fullgraph: bool = False, *, hooks: bool = False, integers: bool = False, shared: bool = False
) -> Iterator[None]:
    """Trace under the configuration that the models of this package need.

    - Calls of ``logging.Logger`` methods, and of what transformers adds to them, are left out of the graph.
    - Recurrent modules (``nn.LSTM``) are traced; Dynamo's default refuses them because they trace slowly.
    - Derivatives in a forward (``torch.autograd.grad``) are traced, from torch 2.11 on.
    - No weak references to inputs stay, which ``torch.utils.swap_tensors`` refuses, from torch 2.13 on.
    - With ``fullgraph``, sizes that are data (``torch.nonzero``) are traced, as newer versions of torch do.
    - With it, and among several ranks (``shared``), the limit of all graphs of a process holds alone: torch's of eight
      would end a training, or have a rank that meets more lengths than another gather differently.
    - With ``hooks``, graphs are guarded by the hooks that they were traced with.
    - With ``integers``, one of a module that has changed (a counter of calls) is an input of the next graph, as an
      argument of forward is, and does not make a graph for each value.
    - Compiled code is not kept by torch's ``caching_precompile``, which drops guards and pickles what they read, the
      model among it; ``programs`` keeps it.
    - To save time, graph modules write their code when asked, no garbage is collected after a compilation, and guards
      are timed only if the log wants it (docs/decisions/tracing.md).
    """
    name = "ignore_logging_functions" if hasattr(dynamo_config, "ignore_logging_functions") else "ignore_logger_methods"
    options = {
        name: getattr(dynamo_config, name) | _logging_functions(len(vars(logging.Logger))),
        "allow_rnn": True,
        "caching_precompile": False,
        "skip_nnmodule_hook_guards": not hooks,
        "allow_unspec_int_on_nn_module": integers,
    }
    other = {"run_gc_after_compile": False, "trace_autograd_ops": True, "invalidate_compile_context_weakrefs": True}
    options |= {name: value for name, value in other.items() if hasattr(dynamo_config, name)}
    if fullgraph:
        options |= {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    if (fullgraph or shared) and dynamo_config.recompile_limit == _RECOMPILE_LIMIT:
        options["recompile_limit"] = dynamo_config.accumulated_recompile_limit
    config_for_log = dynamo_utils._get_dynamo_config_for_logging

    def without_functions() -> str | None:  # torch 2.11 sorts the functions and logs an error for each graph
        with dynamo_config.patch({name: set()}):
            return config_for_log()

    # Each call of a model comes here: ``mock.patch`` and ``config.patch`` take ten times as long.
    restore = dynamo_config._make_closure_patcher(**options)()
    profile: Any = getattr(guards, "profile_guard_manager", None)
    untimed = profile is not None and not guards.guards_log.isEnabledFor(logging.DEBUG)
    try:
        dynamo_utils._get_dynamo_config_for_logging = without_functions
        if untimed:
            guards.profile_guard_manager = lambda *_, **__: 0.0
        with _use_lazy_graph_module(True), arguments_unsearched():
            yield
    finally:
        dynamo_utils._get_dynamo_config_for_logging = config_for_log
        if untimed:
            guards.profile_guard_manager = profile
        restore()


@functools.cache
def _logging_functions(_: int) -> frozenset[Any]:
    """Return the functions that log; anew when ``logging.Logger`` has more of them."""
    owners = (logging.Logger, logging)
    return frozenset(getattr(owner, method) for owner in owners for method in _LOGGING if hasattr(owner, method))


def writes_code_when_asked(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return the same graph in a module that writes its code when asked, under ``tracing_options``."""
    lazy: torch.fx.GraphModule = _make_graph_module(module, module.graph)
    lazy.meta = module.meta
    return lazy


def aot_autograd_settings() -> dict[str, Any]:
    """Return the configuration of AOTAutograd and its partitioner by name."""
    settings: dict[str, Any] = functorch_config.save_config_portable(ignore_private_configs=False)
    return settings


def module_of(graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor] | None = None) -> torch.fx.GraphModule:
    """Return a module of a graph with these constants, which writes its code when asked, under ``tracing_options``.
    Raises ValueError for a name of a constant that is no name of Python's, KeyError for one that a module has."""
    owner = torch.nn.Module()
    for name, value in (constants or {}).items():
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"{name!r} is no name of a constant")
        owner.register_buffer(name, value)
    return _make_graph_module(owner, graph)


def unlogged_graphs_unprinted() -> contextlib.AbstractContextManager[Any]:
    """For a time, let AOTAutograd print graphs only if a log wants them; torch 2.13 always does."""
    patches = contextlib.ExitStack()
    written = (("_log_fw_bw_graphs", (None, None), "aot_graphs_log"), ("_log_joint_graph", None, "aot_joint_log"))
    for name, text, log in written:
        if not hasattr(graph_compile, name) or trace_log.handlers:
            continue
        if not getattr(graph_compile, log).isEnabledFor(logging.INFO):
            patch = unittest.mock.patch.object(graph_compile, name, lambda *_, text=text, **__: text)
            patches.enter_context(patch)
    return patches


# Calls the graph of a checkpoint on its inputs.
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


class _Traced(BaseException):  # AOTAutograd retells every Exception as one of its own
    def __init__(self, graph: torch.fx.GraphModule, forward_outputs: int) -> None:
        self.graph, self.forward_outputs = graph, forward_outputs


def traced_by_aot_autograd(
    module: torch.fx.GraphModule,
    arguments: Sequence[torch.Tensor],
    decompositions: dict[Any, Callable[..., Any]] | None,
) -> tuple[torch.fx.GraphModule, int]:
    """Return the joint graph of ``module`` on fake ``arguments``, or that of inference, apart from the capture that is
    under way; and how many of its outputs are forward's."""

    def partition(joint: torch.fx.GraphModule, _: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        raise _Traced(joint, num_fwd_outputs)

    def compile_inference(graph: torch.fx.GraphModule, _: Any) -> Any:
        outputs: Any
        (outputs,) = graph.graph.output_node().args
        raise _Traced(graph, len(outputs))

    compiler = aot_autograd(
        fw_compiler=compile_inference,
        inference_compiler=compile_inference,
        partition_fn=partition,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )
    try:
        with tracing(TracingContext(current_fake_mode())):
            compiler(module, arguments)
    except _Traced as traced:
        return traced.graph, traced.forward_outputs
    raise AssertionError("AOTAutograd returned without a graph")


def is_of_backward(node: torch.fx.Node) -> bool:
    """Say whether AOTAutograd traced a node of a joint graph while it ran autograd."""
    return node.meta.get("partitioner_tag") == "is_backward"


def with_graph(
    module: torch.fx.GraphModule, graph: torch.fx.Graph, copies: Mapping[torch.fx.Node, torch.fx.Node]
) -> torch.fx.GraphModule:
    """Return Dynamo's ``module`` with another graph of the same inputs, which AOTAutograd guards on by their sources.
    ``copies`` maps nodes of the old graph to those of the new one, which get no references to the user's tensors."""
    made = _make_graph_module(module, graph)
    made.meta = dict(module.meta)
    if hasattr(module, "_param_name_to_source"):
        made._param_name_to_source = module._param_name_to_source
    for node, copy in copies.items():
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source
        copy.meta.pop("grapharg", None)
    return made


def debug_directory() -> Path | None:
    """Return where torch keeps what it writes for debugging, with ``TORCH_COMPILE_DEBUG=1``; None without."""
    if os.environ.get("TORCH_COMPILE_DEBUG", "0") != "1":
        return None
    return Path(get_debug_dir())


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text to ``TORCH_TRACE`` that ``tlparse`` shows with the compilation that is under way."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
