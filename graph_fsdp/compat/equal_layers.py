"""Dynamo traces one of a model's equal layers, and its nodes are copied for the others.

[Note: equal layers in Dynamo]
While Dynamo traces the call of a layer, it is noted which nodes and inputs the call adds to the graph, and which
guards are on what belongs to the layer. A later call, of another layer of the same class, gets copies of these if a
trace of it would give the same:

- It is called at the same line, under the same context managers, with arguments that are alike, and equal where they
  are no tensors.
- Each guard on something of the first layer holds for the same thing of the other one (``layer_guards.py``). Dynamo
  guards on all that it reads.
- The call changes no object that was there before it, and reads no attribute that the frame has changed: Dynamo has no
  guard on these. Between the calls no such object was changed. Nor has the call added to what Dynamo keeps anything but
  nodes, guards and inputs.

Otherwise Dynamo traces the call, as without this. A copy has the guards of a trace, on the other layer, so that the
graph is stale when any of the layers is changed. torch's ``nested_compile_region`` reuses graphs under about the same
conditions, but installs no guards for the calls that it has not traced.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import LocalSource
from torch._dynamo.utils import get_fake_value, set_example_value
from torch._dynamo.variables import ConstantVariable, ListVariable, SymNodeVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.base import AttributeMutationNew, MutationType, ValueMutationNew
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable, record_nn_module_stack
from torch._guards import Source, TracingContext

from graph_fsdp.compat.layer_guards import Counterparts, Differs, LayerGuards, is_under, modules_of, tensor_facts

log = logging.getLogger(__name__)

# torch 2.9 has no values of sources.
EQUAL_LAYERS = hasattr(Source, "get_value")

_TRACES = 4  # kept of one call: beyond, layers that differ from all of them are traced as ever

_NEW = (ValueMutationNew, AttributeMutationNew)  # of objects that the frame has made


class EqualLayers:
    """Holds the traces of a frame while Dynamo traces it. ``classes``: those of layers of which one is traced."""

    def __init__(self, classes: frozenset[type[nn.Module]]) -> None:
        self.classes = classes if EQUAL_LAYERS else frozenset()
        self.copied = 0  # layers, in all frames
        self._output: Any = None
        self._traces: dict[Any, list[_Trace | None]] = {}  # None: of a call that cannot be copied
        self._lists_changed = False  # or dicts, that were there before the frame
        self._recording: _Recording | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Trace one of equal layers in each frame that Dynamo traces in this context."""
        if not self.classes:
            yield
            return
        layer, effects, kind = cast("tuple[Any, ...]", (UnspecializedNNModuleVariable, SideEffects, MutationType))
        call, init = layer.call_function, kind.__init__
        store, load, mutate = effects.store_attr, effects.load_attr, effects.mutation

        def call_function(module: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            return self._call(functools.partial(call, module, tx, args, kwargs), module, tx, args, kwargs)

        def store_attr(effects: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_change(effects, item)
            return store(effects, item, *args, **kwargs)

        def load_attr(effects: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
            if self._recording is not None:
                self._recording.note(item)
            return load(effects, item, *args, **kwargs)

        def mutation(effects: Any, item: Any) -> Any:
            self._note_change(effects, item)
            own = isinstance(item.source, LocalSource) and item.source.is_varkw  # nothing else has the dict
            self._lists_changed |= not (own or isinstance(item.mutation_type, _NEW))
            return mutate(effects, item)

        def created(mutation_type: Any, *args: Any, **kwargs: Any) -> None:
            init(mutation_type, *args, **kwargs)
            if self._recording is not None:
                self._recording.created[id(mutation_type)] = mutation_type

        try:
            layer.call_function, kind.__init__ = call_function, created
            effects.store_attr, effects.load_attr, effects.mutation = store_attr, load_attr, mutation
            yield
        finally:
            layer.call_function, kind.__init__ = call, init
            effects.store_attr, effects.load_attr, effects.mutation = store, load, mutate
            self._output, self._traces = None, {}

    def _enter(self, output: Any) -> None:
        if output is not self._output:
            self._output, self._traces, self._lists_changed = output, {}, False

    def _note_change(self, effects: Any, item: Any) -> None:
        self._enter(effects.output_graph_weakref())
        if self._recording is not None:
            self._recording.note(item)
        if not isinstance(item.mutation_type, _NEW):
            self._traces.clear()

    def _call(self, call: Callable[[], Any], module: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        output = tx.output
        self._enter(output)
        if (
            type(module.value) not in self.classes
            or module.source is None
            or self._lists_changed
            or self._recording is not None
            or output.current_tracer.parent is not None
            or output.export
        ):
            return call()
        try:
            given = _Given(args, kwargs)
            key = type(module.value), given.key, _surroundings(tx)
            hash(key)
        except (Differs, TypeError) as reason:
            log.debug("%s is not compared with other layers: %s", module.source.name, reason)
            return call()
        traces = self._traces.get(key, [])
        for trace in filter(None, traces):
            try:
                counterparts = Counterparts(output, trace.guards.source, module.source)
                trace.guards.check(module.value, counterparts)
            except Differs as reason:
                log.debug("%s is not copied: %s", module.source.name, reason)
                continue
            self.copied += 1
            return trace.copy(tx, module, given, counterparts)
        if len(traces) == _TRACES:
            return call()
        result, made = self._recorded(call, module, tx, given)
        self._traces.setdefault(key, []).append(made)
        return result

    def _recorded(self, call: Callable[[], Any], module: Any, tx: Any, given: _Given) -> tuple[Any, _Trace | None]:
        recording = self._recording = _Recording(module, tx, given)
        try:
            with recording.names():
                result = call()
        finally:
            self._recording = None
        try:
            return result, recording.trace(result)
        except Differs as reason:
            log.debug("%s is not copied for other layers: %s", module.source.name, reason)
            return result, None


def _surroundings(tx: Any) -> tuple[Any, ...]:
    """Return where a call is, as a key: its lines, modules, context managers and global state."""
    state: dict[str, Any] = {}
    tx.output.save_global_state(state)
    frames: list[Any] = [torch.is_inference_mode_enabled(), *(value for _, value in state.values())]
    modules = tuple(tx.nn_module_stack.items())
    while tx is not None:
        contexts = tuple(entry.with_context for entry in tx.block_stack if entry.with_context is not None)
        frames.append((tx.f_code, tx.instruction_pointer, tuple(map(_ByIdentity, contexts))))
        tx = getattr(tx, "parent", None)
    return (modules, *frames)


@dataclass(frozen=True, eq=False)
class _ByIdentity:
    of: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


class _Given:
    """Describes arguments by ``key``; ``nodes``, ``variables``: of the tensors and symbols in them, in their order.

    Raises:
        Differs: an argument is of a kind that is not described here.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.nodes: list[fx.Node] = []
        self.variables: list[Any] = []
        self._memory: dict[int, int] = {}  # number of a storage
        self.key = tuple(map(self._described, args)), tuple((name, self._described(a)) for name, a in kwargs.items())

    def _described(self, variable: Any) -> Any:
        if isinstance(variable, LazyVariableTracker):
            if not variable.is_realized():  # realized, it would be guarded, which a trace may not do
                return "not read", variable.source or _ByIdentity(variable)
            variable = variable.realize()
        kind = type(variable)
        if kind is ConstantVariable:
            return "constant", type(variable.value), variable.value
        if kind is TupleVariable or kind is ListVariable:
            return kind, variable.source, tuple(map(self._described, variable.items))
        if kind is TensorVariable:
            node = variable.as_proxy().node
            value = node.meta["example_value"]
            memory = self._memory.setdefault(value.untyped_storage()._cdata, len(self._memory))
            return "tensor", variable.source, self._place(node, variable), memory, tensor_facts(value)
        if kind is SymNodeVariable:
            return "size", self._place(variable.as_proxy().node, variable), str(variable.sym_num)
        if variable.source is not None:
            return kind, variable.source
        raise Differs(f"an argument is a {kind.__name__}")

    def _place(self, node: fx.Node, variable: Any) -> int:
        if node not in self.nodes:
            self.nodes.append(node)
            self.variables.append(variable)
        return self.nodes.index(node)


class _Recording:
    """Notes what the call of a layer adds to the graph and to what else Dynamo keeps."""

    def __init__(self, module: Any, tx: Any, given: _Given) -> None:
        self._module, self._tx, self._given = module, tx, given
        self._output, self._graph = tx.output, tx.output.graph
        self._start = self._last()
        self._placeholders = set(self._output.placeholders)
        self._calls = dict(tx.num_calls)
        self._kept, self._written = self._counts(), self._versions()
        self._renamed: dict[fx.Node, list[tuple[fx.Node, str]]] = {}
        self.created: dict[int, Any] = {}  # mutation types of the objects that the call makes, by id
        self._outside: str | None = None

    def note(self, item: Any) -> None:
        """Note that the call changes an object, or reads an attribute of it that has changed."""
        if id(item.mutation_type) not in self.created or not isinstance(item.mutation_type, _NEW):
            self._outside = type(item).__name__ if item.source is None else item.source.name

    def _last(self) -> fx.Node:
        return cast(fx.Node, self._graph._root._prev)

    def _counts(self) -> tuple[Any, ...]:
        """Return how much there is of what copies of nodes, guards and inputs would not bring along."""
        output, effects = self._output, self._output.side_effects
        return (
            len(output.nn_modules),
            len(output.random_calls),
            len(effects.save_for_backward),
            len(effects.tensor_hooks),
            _surroundings(self._tx),
        )

    @contextlib.contextmanager
    def names(self) -> Iterator[None]:
        """Note which nodes are renamed. Dynamo gives a value the name of the variable that it is stored in."""
        rename = fx.Node._rename

        def renamed(node: fx.Node, candidate: str) -> None:
            if node.graph is self._graph:
                self._renamed.setdefault(self._last(), []).append((node, candidate))
            rename(node, candidate)

        patched = cast(Any, fx.Node)
        patched._rename = renamed
        try:
            yield
        finally:
            patched._rename = rename

    def trace(self, result: Any) -> _Trace:
        """Return what can be copied. Raises Differs if that is not all that the call has done."""
        if self._outside is not None:
            raise Differs(f"{self._outside} changes, or has changed")
        if self._counts() != self._kept:
            raise Differs("the call has left more than nodes")
        nodes, inputs = self._nodes(), self._inputs()
        source, layer = self._module.source, self._module.value
        guards = LayerGuards(self._output, layer, source)
        found = {given for _, given in inputs}
        if missing := [read.name for read in guards.tensors() if read not in found]:
            raise Differs(f"{missing[0]} was read before")
        self._check_reads(nodes, dict(inputs), layer)
        returned = _result(result, {*nodes, *self._given.nodes})
        calls = {name: (self._calls.get(name, 0), after) for name, after in self._tx.num_calls.items()}
        return _Trace(
            name=_name_in_stacks(self._module, self._tx),
            given=self._given,
            start=self._start,
            nodes=nodes,
            run=self._run(nodes, returned),
            inputs=inputs,
            renamed=self._renamed,
            named={node for renamed in self._renamed.values() for node, _ in renamed},
            calls={name: (before, after) for name, (before, after) in calls.items() if before != after},
            guards=guards,
            result=returned,
        )

    def _nodes(self) -> list[fx.Node]:
        found, node = [], self._start.next
        while node is not self._graph._root:
            if node.op != "placeholder":
                found.append(node)
            node = node.next
        for node in found:
            if node.op not in ("call_function", "call_method") or "example_value" not in node.meta:
                raise Differs(f"{node} is no ordinary operator")
            if "unbacked_bindings" in node.meta:
                raise Differs(f"{node} has a size that is data")
        return found

    def _run(self, nodes: list[fx.Node], returned: Any) -> set[fx.Node]:
        seen = {*_nodes_in(returned), *self._given.nodes}
        values = {node: list(_tensors_of(node)) for node in {*nodes, *seen}}
        if any(value._version for node in nodes for value in values[node]) or self._versions() != self._written:
            return set(nodes)  # an operator writes to a tensor
        memory = {value.untyped_storage()._cdata for node in seen for value in values[node]}
        return {n for n in nodes if n in seen or any(v.untyped_storage()._cdata in memory for v in values[n])}

    def _versions(self) -> list[int]:
        return [value._version for node in self._given.nodes for value in _tensors_of(node)]

    def _inputs(self) -> list[tuple[fx.Node, Source]]:
        added = [node for node in self._output.placeholders if node not in self._placeholders]
        sources = {node: node.meta["grapharg"].source for node in added}
        found = [(node, source) for node, source in sources.items() if is_under(source, self._module.source)]
        for node, _ in found:
            if not isinstance(node.meta["example_value"], torch.Tensor) or node.meta["grapharg"].pass_arg_as_tensor:
                raise Differs(f"{node} is no tensor of the layer's")
        return found

    def _check_reads(self, nodes: list[fx.Node], inputs: dict[fx.Node, Source], layer: nn.Module) -> None:
        """Raise Differs if a node reads something of the layer that is none of ``inputs``."""
        own = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
        for node in nodes:
            for read in node.all_input_nodes:
                if read.op == "placeholder" and read not in inputs and read not in self._given.nodes:
                    argument = read.meta.get("grapharg")
                    if argument is not None and (
                        id(argument.example) in own or is_under(argument.source, self._module.source)
                    ):
                        raise Differs(f"{read} has another name, or was read before")


def _tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    value = node.meta["example_value"]
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


def _nodes_in(result: Any) -> Iterator[fx.Node]:
    if isinstance(result, list):
        for item in result[1:]:
            yield from _nodes_in(item)
    elif isinstance(result, fx.Node):
        yield result


def _result(variable: Any, known: set[fx.Node]) -> Any:
    """Describe what a call returns: a node, ``(constant,)``, or a class with what is in it. Raises Differs."""
    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    kind = type(variable)
    if kind is ConstantVariable:
        return (variable.value,)
    if kind is TensorVariable and (node := variable.as_proxy().node) in known:
        return node
    if (kind is TupleVariable or kind is ListVariable) and variable.source is None:
        return [kind, *(_result(item, known) for item in variable.items)]
    raise Differs(f"it returns a {kind.__name__}")


@dataclass(frozen=True)
class _Trace:
    """Holds what the call of a layer has added to the graph.

    ``run``: nodes whose operators are run for each copy, as their values lie in memory that is seen outside; the values
    of others are shared by copies. ``inputs``: placeholders with their sources. ``renamed``: by the node behind which
    it was done, what was renamed as what; ``named``: all that was. ``calls``: how often modules had been called before
    and after, by name.
    """

    name: str
    given: _Given
    start: fx.Node
    nodes: list[fx.Node]
    run: set[fx.Node]
    inputs: list[tuple[fx.Node, Source]]
    renamed: dict[fx.Node, list[tuple[fx.Node, str]]]
    named: set[fx.Node]
    calls: dict[str, tuple[int, int]]
    guards: LayerGuards
    result: Any

    def copy(self, tx: Any, module: Any, given: _Given, counterparts: Counterparts) -> Any:
        """Add the same for the call of another layer, whose guards were checked, and return what the call returns."""
        output = tx.output
        self.guards.install(output, counterparts)
        placed = dict(zip(self.given.nodes, given.nodes, strict=True))
        stacks = _ModuleStacks(self, tx, module)
        for node, source in self.inputs:
            there = counterparts.source(source)
            lines = list(self.guards.lines(source))
            number = len(output.graph.nodes)
            with TracingContext.patch(frame_summary_stack=lines, loc_in_frame=None):  # what guards say of themselves
                placed[node] = VariableBuilder(tx, there)(counterparts.value(there)).as_proxy().node
            if len(output.graph.nodes) != number:  # else it is tied to an earlier one
                placed[node].meta.update(stacks.origin(node))
        variables = dict(zip(self.given.nodes, given.variables, strict=True))
        for node in (self.start, *self.nodes):
            if node is not self.start:
                placed[node] = self._copied(node, placed, stacks, tx)
            for renamed, candidate in self.renamed.get(node, ()):
                if renamed in variables:  # an argument, which may have a name by now
                    variables[renamed].set_name_hint(candidate)
                elif renamed in placed:
                    placed[renamed]._rename(candidate)
        stacks.count()
        return self._returned(self.result, placed, variables, tx)

    def _copied(self, node: fx.Node, placed: dict[fx.Node, fx.Node], stacks: _ModuleStacks, tx: Any) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda read: placed.get(read, read))
        copy: fx.Node = tx.output.create_node(node.op, node.target, args, kwargs, None, node.type)
        own = ("example_value", "creation_timestamp")
        copy.meta.update({key: value for key, value in node.meta.items() if key not in own} | stacks.origin(node))
        if "source_fn_stack" in node.meta:
            *around, (_, function) = node.meta["source_fn_stack"]
            copy.meta["source_fn_stack"] = [*around, (copy.name, function)]
        if node in self.run:
            set_example_value(copy, get_fake_value(copy, tx, allow_non_graph_fake=True))
        else:
            copy.meta["example_value"] = node.meta["example_value"]
        return copy

    def _returned(self, result: Any, placed: dict[fx.Node, fx.Node], given: dict[fx.Node, Any], tx: Any) -> Any:
        if isinstance(result, tuple):
            return ConstantVariable.create(*result)
        if isinstance(result, list):
            kind, *items = result
            return kind([self._returned(item, placed, given, tx) for item in items], mutation_type=ValueMutationNew())
        if result not in given:
            proxy = fx.Proxy(placed[result], tx.output.current_tracer)
            given[result] = wrap_fx_proxy(tx, proxy, example_value=proxy.node.meta.pop("example_value"))
            given[result]._is_name_set = result in self.named
        return given[result]


class _ModuleStacks:
    """Gives the module stacks of copies: modules of another layer in the places of those of ``trace``."""

    def __init__(self, trace: _Trace, tx: Any, module: Any) -> None:
        self._trace, self._counts, self._name = trace, tx.num_calls, _name_in_stacks(module, tx)
        there = modules_of(module.value)
        self._modules = {id(here): id(there[name]) for name, here in trace.guards.modules.items()}
        self._made: dict[str, tuple[str, tuple[str, type]]] = {}
        self._before = dict(tx.num_calls)

    def origin(self, node: fx.Node) -> dict[str, Any]:
        """Return the metadata of a node's copy that says where it comes from."""
        found = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
        if (stack := found.get("nn_module_stack")) is not None:
            for key in stack.keys() - self._made.keys():
                self._made[key] = self._replaced(key, *stack[key])
            found["nn_module_stack"] = dict(map(self._made.__getitem__, stack))
        return found

    def _replaced(self, key: str, name: str, kind: type) -> tuple[str, tuple[str, type]]:
        if name not in self._trace.calls:  # around the layer
            return key, (name, kind)
        module, _, number = key.partition("@")
        there = self._renamed(name)
        calls = int(number or 0) - self._trace.calls[name][0] + self._before.get(there, 0)
        own = str(self._modules.get(int(module), module))
        return (f"{own}@{calls}" if calls else own), (there, kind)

    def _renamed(self, name: str) -> str:
        return self._name + name.removeprefix(self._trace.name) if name.startswith(self._trace.name) else name

    def count(self) -> None:
        """Count the calls, as Dynamo does."""
        for name, (before, after) in self._trace.calls.items():
            there = self._renamed(name)
            self._counts[there] = self._before.get(there, 0) + after - before


def _name_in_stacks(module: Any, tx: Any) -> str:
    """Return the name of a layer in module stacks."""
    calls = dict(tx.num_calls)
    with record_nn_module_stack("", module.get_nn_module_stack_source(), tx, module.value):
        name, _ = next(reversed(tx.nn_module_stack.values()))
    tx.num_calls.clear()
    tx.num_calls.update(calls)
    return cast(str, name)
