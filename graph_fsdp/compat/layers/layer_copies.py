"""What Dynamo has traced of one layer is copied for another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch._dynamo.utils import get_fake_value, set_example_value
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.nn_module import record_nn_module_stack
from torch._guards import Source, TracingContext
from torch._ops import HigherOrderOperator

from graph_fsdp.compat.layers.layer_guards import Counterparts, Differs, LayerGuards, modules_of, tensor_facts
from graph_fsdp.compat.tensors import fake_tensor
from graph_fsdp.compat.traces.torch_compile import CHECKPOINT


@dataclass(frozen=True)
class LayerTrace:
    """Holds what the call of a layer has added to the graph.

    ``run``: nodes whose operators are run for each copy, as their values lie in memory that is seen outside; the values
    of others are shared by copies. ``inputs``: placeholders with their sources. ``renamed``: by the node behind which
    it was done, what was renamed as what; ``named``: all that was. ``calls``: how often modules had been called before
    and after, by name.
    """

    name: str
    given: Any
    start: fx.Node
    nodes: list[fx.Node]
    run: set[fx.Node]
    inputs: list[tuple[fx.Node, Source]]
    renamed: dict[fx.Node, list[tuple[fx.Node, str]]]
    named: set[fx.Node]
    calls: dict[str, tuple[int, int]]
    guards: LayerGuards
    result: Any

    def copy(self, tx: Any, module: Any, given: Any, counterparts: Counterparts) -> Any:
        """Add the same for the call of another layer, whose guards were checked, and return what the call returns."""
        output = tx.output
        self.guards.install(output, counterparts)
        placed = dict(zip(self.given.nodes, given.nodes, strict=True))
        stacks = _ModuleStacks(self, tx, module)
        for node, source in self.inputs:
            there = counterparts.source(source)
            lines = list(self.guards.lines(source))
            number = len(output.graph.nodes)
            value = counterparts.value(there)
            known = _known_as(value, node.meta["example_value"])  # held, as the fake mode does not hold it
            with TracingContext.patch(frame_summary_stack=lines, loc_in_frame=None):  # what guards say of themselves
                placed[node] = VariableBuilder(tx, there)(value).as_proxy().node
            del known
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
        target = node.target
        if node.op == "get_attr":
            name, _, _ = str(target).rpartition("_")
            target = tx.output.install_subgraph(name, _copied_body(node, placed, stacks, tx.output.nn_modules))
        copy: fx.Node = tx.output.create_node(node.op, target, args, kwargs, None, node.type)
        own = ("example_value", "creation_timestamp")
        copy.meta.update({key: value for key, value in node.meta.items() if key not in own} | stacks.origin(node))
        if "source_fn_stack" in node.meta:
            *around, (_, function) = node.meta["source_fn_stack"]
            copy.meta["source_fn_stack"] = [*around, (copy.name, function)]
        if node in self.run and node.target is CHECKPOINT:
            copy.meta["example_value"] = tuple(map(fresh, node.meta["example_value"]))
        elif node in self.run and node.op != "get_attr":
            set_example_value(copy, get_fake_value(copy, tx, allow_non_graph_fake=True))
        elif "example_value" in node.meta:
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


def _known_as(tensor: torch.Tensor, like: Any) -> torch.Tensor | None:
    """Have the fake mode of ``like`` know a tensor as a fake one like it, and return that: the mode takes ten times as
    long to make one. None, and nothing is known, where the tensor is more than its facts: a view, in memory that the
    mode knows, with a gradient, or with a value that Dynamo reads."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.is_leaf or tensor._is_view():
        return None
    if tensor.grad is not None or not tensor.dim() or getattr(tensor, "grad_dtype", tensor.dtype) != tensor.dtype:
        return None
    converter, storage = like.fake_mode.fake_tensor_converter.meta_converter, tensor.untyped_storage()
    if storage in converter.describer.lookup_storage:
        return None
    made = fake_tensor(like.fake_mode, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, None, 0)
    made.requires_grad = tensor.requires_grad
    if tensor_facts(made) != tensor_facts(like) or vars(like).keys() - vars(made).keys() - {"_is_param"}:
        return None
    if not storage.nbytes():  # a placeholder's
        made.untyped_storage().resize_(0)
    if type(tensor) is nn.Parameter:
        cast(Any, made)._is_param = True
    converter.storage_memo[converter.describer.get_storage_id(storage)] = made.untyped_storage()
    converter.tensor_memo[converter.describer.get_tensor_id(tensor)] = made
    return made


def fresh(value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like the result of an operator, in memory of its own."""
    with cast(Any, value).fake_mode:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_().clone() if value.requires_grad else made


def check_body(node: fx.Node, body: Any) -> None:
    """Raise Differs unless the graph that a node stands for is a checkpoint's, and has none in it."""
    if not isinstance(body, fx.GraphModule) or any(user.target is not CHECKPOINT for user in node.users):
        raise Differs(f"{node} is no graph of a checkpoint")
    for inner in body.graph.nodes:
        if inner.op not in ("placeholder", "call_function", "call_method", "output"):
            raise Differs(f"{inner}, in {node}, is no ordinary operator")
        if "unbacked_bindings" in inner.meta or isinstance(inner.target, HigherOrderOperator):
            raise Differs(f"{inner}, in {node}, is no ordinary operator")


def _copied_body(
    node: fx.Node, placed: dict[fx.Node, fx.Node], stacks: _ModuleStacks, modules: dict[str, Any]
) -> fx.GraphModule:
    """Return the graph of a layer's checkpoint for another layer. ``placed``: what it is called on."""
    body = modules[str(node.target)]
    (call,) = node.users
    given = iter(call.args[1:])
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for inner in body.graph.nodes:
        args, kwargs = fx.map_arg((inner.args, inner.kwargs), copies.__getitem__)
        meta = {**inner.meta, **stacks.origin(inner)}
        name = target = inner.name
        if inner.op == "placeholder":
            old = cast(fx.Node, next(given))
            new = placed.get(old, old)
            name = target = new.name if inner.name == old.name else inner.name
            meta["example_value"] = new.meta["example_value"]
        else:
            target = inner.target
        copies[inner] = graph.create_node(inner.op, target, args, kwargs, name, inner.type)
        copies[inner].meta = meta
    made = fx.GraphModule(modules, graph)
    made.meta = dict(body.meta)
    return made


class _ModuleStacks:
    """Gives the module stacks of copies: modules of another layer in the places of those of ``trace``."""

    def __init__(self, trace: LayerTrace, tx: Any, module: Any) -> None:
        self._trace, self._counts, self._name = trace, tx.num_calls, name_in_stacks(module, tx)
        there = modules_of(module.value)
        self._modules = {id(here): id(there[name]) for name, here in trace.guards.modules.items()}
        self._made: dict[str, tuple[str, tuple[str, type]]] = {}

    def origin(self, node: fx.Node) -> dict[str, Any]:
        """Return the metadata of a node's copy that says where it comes from."""
        found: dict[str, Any] = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
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
        calls = int(number or 0) - self._trace.calls[name][0] + self._counts.get(there, 0)
        own = str(self._modules.get(int(module), module))
        return (f"{own}@{calls}" if calls else own), (there, kind)

    def _renamed(self, name: str) -> str:
        rest = name.removeprefix(self._trace.name)
        return self._name + rest if len(rest) < len(name) and rest[:1] in ("", ".", "[") else name

    def count(self) -> None:
        """Count the calls, as Dynamo does."""
        for name, (before, after) in self._trace.calls.items():
            there = self._renamed(name)
            self._counts[there] = self._counts.get(there, 0) + after - before


def name_in_stacks(module: Any, tx: Any) -> str:
    """Return the name of a layer in module stacks."""
    with record_nn_module_stack("", module.get_nn_module_stack_source(), tx, module.value):
        name, _ = next(reversed(tx.nn_module_stack.values()))
    tx.num_calls[name] -= 1  # that was no call
    if not tx.num_calls[name]:
        del tx.num_calls[name]
    return cast(str, name)
