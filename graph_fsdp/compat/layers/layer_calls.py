"""A call of a layer is known by what it is given, its conditions, and what it adds to the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch._dynamo.variables import ConstantVariable, ListVariable, SymNodeVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._guards import Source
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor

from graph_fsdp.compat.layers.layer_copies import LayerTrace, check_body, fresh, name_in_stacks
from graph_fsdp.compat.layers.layer_guards import Differs, LayerGuards, is_under, tensor_facts
from graph_fsdp.compat.traces.torch_compile import CHECKPOINT

NEW = (ValueMutationNew, AttributeMutationNew)  # of objects that the frame has made


def surroundings(tx: Any) -> tuple[Any, ...]:
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


class Given:
    """Describes arguments by ``key``; ``nodes``, ``variables``: of the tensors and symbols in them, in their order.

    Raises:
        Differs: an argument is of a kind that is not described here.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.nodes: list[fx.Node] = []
        self.variables: list[Any] = []
        self.containers: list[Any] = []  # lists and tuples
        self._memory: dict[int, int] = {}  # number of a storage
        self.key = tuple(map(self._described, args)), tuple((name, self._described(a)) for name, a in kwargs.items())

    def _described(self, variable: Any) -> Any:
        if isinstance(variable, LazyVariableTracker):
            if not variable.is_realized():  # realized, it would be guarded, which a trace may not do
                return "not read", variable.source or _ByIdentity(variable)
            variable = variable.realize()
        kind = type(variable)
        if kind is ConstantVariable:
            return "constant", type(variable.value), variable.value, repr(variable.value)  # 0.0 and -0.0 are equal
        if kind is TupleVariable or kind is ListVariable:
            self.containers.append(variable)
            return kind, variable.source, tuple(map(self._described, variable.items))
        if kind is TensorVariable:
            node = variable.as_proxy().node
            value = _ordinary(node.meta["example_value"])
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


class Recording:
    """Notes what the call of a layer adds to the graph and to what else Dynamo keeps."""

    def __init__(self, module: Any, tx: Any, given: Given) -> None:
        self._module, self._tx, self._given = module, tx, given
        self._output, self._graph = tx.output, tx.output.graph
        self._start = self._last()
        self._placeholders = set(self._output.placeholders)
        self._calls, self._modules = dict(tx.num_calls), set(tx.output.nn_modules)
        self._kept, self._written = self._counts(), self._versions()
        self._renamed: dict[fx.Node, list[tuple[fx.Node, str]]] = {}
        self.created: dict[int, Any] = {}  # mutation types of the objects that the call makes, by id
        self._outside: str | None = None

    def note(self, item: Any) -> None:
        """Note that the call changes an object, or reads an attribute of it that has changed."""
        if id(item.mutation_type) not in self.created or not isinstance(item.mutation_type, NEW):
            self._outside = type(item).__name__ if item.source is None else item.source.name

    def _last(self) -> fx.Node:
        return cast(fx.Node, self._graph._root._prev)

    def _counts(self) -> tuple[Any, ...]:
        """Return how much there is of what copies of nodes, guards and inputs would not bring along."""
        output, effects = self._output, self._output.side_effects
        return (
            len(output.random_calls),
            len(effects.save_for_backward),
            len(effects.tensor_hooks),
            surroundings(self._tx),
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

    def trace(self, result: Any) -> LayerTrace:
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
        returned = _result(result, {*nodes, *self._given.nodes}, list(self._given.containers))
        calls = {name: (self._calls.get(name, 0), after) for name, after in self._tx.num_calls.items()}
        return LayerTrace(
            name=name_in_stacks(self._module, self._tx),
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
        bodies = set()
        for node in found:
            if node.op == "get_attr":
                check_body(node, self._output.nn_modules[str(node.target)])
                bodies.add(node.target)
            elif node.op not in ("call_function", "call_method") or "example_value" not in node.meta:
                raise Differs(f"{node} is no ordinary operator")
            elif isinstance(node.target, HigherOrderOperator) and node.target is not CHECKPOINT:
                raise Differs(f"{node} is an operator on graphs")
            elif "unbacked_bindings" in node.meta:
                raise Differs(f"{node} has a size that is data")
        if self._output.nn_modules.keys() - self._modules != bodies:
            raise Differs("the call has left more than nodes")
        return found

    def _run(self, nodes: list[fx.Node], returned: Any) -> set[fx.Node]:
        seen = {*_nodes_in(returned), *self._given.nodes}
        values = {node: list(_tensors_of(node)) for node in {*nodes, *seen}}
        memory = {value.untyped_storage()._cdata for node in seen for value in values[node]}
        given = {value.untyped_storage()._cdata for node in self._given.nodes for value in values[node]}
        written = self._versions() != self._written
        for node in nodes:
            if node.target is CHECKPOINT:
                if [*map(tensor_facts, values[node])] != [tensor_facts(fresh(value)) for value in values[node]]:
                    raise Differs(f"{node} has a value in the memory of another")
                if written or not given.isdisjoint(value.untyped_storage()._cdata for value in values[node]):
                    raise Differs(f"{node} writes to what it is given, or returns it")
        if written or any(value._version for node in nodes for value in values[node]):
            return set(nodes)  # an operator writes to a tensor
        return {n for n in nodes if n in seen or any(v.untyped_storage()._cdata in memory for v in values[n])}

    def _versions(self) -> list[int]:
        return [value._version for node in self._given.nodes for value in _tensors_of(node)]

    def _inputs(self) -> list[tuple[fx.Node, Source]]:
        added = [node for node in self._output.placeholders if node not in self._placeholders]
        sources = {node: node.meta["grapharg"].source for node in added}
        found = [(node, source) for node, source in sources.items() if is_under(source, self._module.source)]
        for node, _ in found:
            _ordinary(node.meta["example_value"])
            if node.meta["grapharg"].pass_arg_as_tensor:
                raise Differs(f"{node} is a number")
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
    value = node.meta.get("example_value")
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, torch.Tensor):
            yield _ordinary(item)


def _ordinary(value: Any) -> torch.Tensor:
    """Return a fake tensor. Raises Differs if it is one of another class, as DTensor, or something else."""
    if type(value) is not FakeTensor:
        raise Differs(f"a value is a {type(value).__name__}")
    return value


def _nodes_in(result: Any) -> Iterator[fx.Node]:
    if isinstance(result, list):
        for item in result[1:]:
            yield from _nodes_in(item)
    elif isinstance(result, fx.Node):
        yield result


def _result(variable: Any, known: set[fx.Node], containers: list[Any]) -> Any:
    """Describe what a call returns: a node, ``(constant,)``, or a class with what is in it. ``containers``: lists and
    tuples that are known by now. Raises Differs."""
    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    kind = type(variable)
    if kind is ConstantVariable:
        return (variable.value,)
    if kind is TensorVariable and (node := variable.as_proxy().node) in known:
        return node
    if (kind is TupleVariable or kind is ListVariable) and variable.source is None:
        if any(variable is other for other in containers):
            raise Differs("it returns a list that it was given, or returns one twice")
        containers.append(variable)
        return [kind, *(_result(item, known, containers) for item in variable.items)]
    raise Differs(f"it returns a {kind.__name__}")
