"""Replace a graph's placeholder parameters by shards: Dynamo traces full shapes, AOTAutograd those of this rank.

[Note: a graph and its parameters]
Dynamo guards on what parameters look like, not on which they are: with ``fullgraph=False`` the graph of one layer runs
for every layer of its kind, and a module that was exchanged for another of its kind (``self.active = self.experts[1]``)
passes the guards too. So in each call a graph finds its parameters by the identity of their placeholders, and each
combination has programs of its own, made of one trace. See docs/decisions/tracing.md.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import ParameterChangedError, UnsupportedError
from graph_fsdp.parameters.sharded import ShardedParameter, Shards
from graph_fsdp.passes import PassContext
from graph_fsdp.passes.transforms.insert_gathers import records

Runnable: TypeAlias = Callable[..., Any]
Compile: TypeAlias = Callable[[fx.GraphModule, list[Any], dict[int, ShardedParameter]], Runnable]

T = TypeVar("T")

_OF_DYNAMO = ("grapharg", "example_value")


def find_parameters(module: fx.GraphModule, storage: Shards) -> dict[int, ShardedParameter]:
    """Return the parameters whose placeholders are inputs of a graph that Dynamo has just traced, by their places.
    Raises UnsupportedError where they are constants of it."""
    for node in module.graph.find_nodes(op="get_attr"):
        constant = storage.by_placeholder.get(id(operator.attrgetter(node.target)(module)))
        if constant is not None:
            raise UnsupportedError(
                f"parameter {constant.spec.name!r} would be a constant of the graph, which "
                "torch._inductor.config.freezing (TORCHINDUCTOR_FREEZING) and torch._dynamo.config.prepare_freezing "
                "ask for: parameters are gathered from shards, which change; turn it off while the model is called"
            )
    found = {}
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        parameter = storage.by_placeholder.get(id(compat.example_of(node)))
        if parameter is not None:
            found[index] = parameter
    return found


def refuse_backward(module: fx.GraphModule, parameters: Mapping[int, ShardedParameter]) -> None:
    """Raise UnsupportedError if a graph that Dynamo has just traced has a backward in it that ends in parameters: the
    gradients would be those of placeholders."""
    inputs, given = module.graph.find_nodes(op="placeholder"), compat.inputs_given_gradients()
    names = [p.spec.name for index, p in parameters.items() if inputs[index].name in given]
    if names:
        raise UnsupportedError(
            f"the forward gives {names[0]!r} a gradient (backward(), .grad = …), which graphs cannot give to shards; "
            "call backward on what the model returns, or pass fullgraph=False, which leaves it to Python"
        )


def warn_of_writes(module: fx.GraphModule, parameters: Mapping[int, ShardedParameter], unknown: Container[str]) -> None:
    """Warn if a graph that Dynamo has just traced writes to parameters, which would be lost without a word.
    ``unknown``: names of those whose versions say something else."""
    values = [v for n in module.graph.nodes if isinstance(v := n.meta.get("example_value"), Tensor)]
    written = {compat.storage_id(v) for v in values if not v.is_inference() and v._version}
    assigned = compat.given_data(module.graph)
    if not written and not assigned:
        return
    inputs = module.graph.find_nodes(op="placeholder")
    of = {p.spec.name: inputs[index] for index, p in parameters.items() if p.spec.name not in unknown}
    storages = {name: compat.storage_id(node.meta["example_value"]) for name, node in of.items()}
    names = [name for name, node in of.items() if node in assigned or storages[name] in written]
    if names:
        warnings.warn(
            f"the forward writes to {', '.join(map(repr, names))} in place. It has a gathered copy of a parameter, as "
            "with FSDP2: what it writes is lost when that is freed, and the parameter stays as it was. Write to it "
            "outside of the forward (torch.no_grad(), or a block of graph_fsdp.unsharded), or make it a buffer",
            stacklevel=2,
        )


def substitute_shards(
    module: fx.GraphModule, inputs: list[Any], parameters: dict[int, ShardedParameter], context: PassContext
) -> None:
    """Put fake shards in the places of ``parameters`` among ``inputs``, and tell ``context``."""
    mode = compat.current_fake_mode()
    nodes = module.graph.find_nodes(op="placeholder")
    for index, parameter in parameters.items():
        with mode:
            shard = torch.empty_strided(
                parameter.spec.shard_shape,
                parameter.input.stride(),
                dtype=parameter.spec.dtype,
                device=parameter.input.device,
                requires_grad=parameter.placeholder.requires_grad,
            )
        context.inputs.shards[nodes[index]] = (parameter.spec, shard)
        if parameter.as_used is not None:
            context.inputs.as_used[nodes[index]] = parameter.as_used
        inputs[index] = shard


class Inputs:
    """Gives the graphs of one call of a model its shards, by name: connected to their ``grad`` if the call or the graph
    records gradients, as one with ``torch.enable_grad()`` in it does in a call under ``torch.no_grad()``."""

    def __init__(self, connect: Callable[[], dict[str, Tensor]]) -> None:
        self._connect, self.recorded = connect, torch.is_grad_enabled()
        self._shards = connect()

    def of(self, graph: TracedGraph) -> dict[str, Tensor]:
        if graph.records and not self.recorded and not torch.is_inference_mode_enabled():
            with torch.enable_grad():
                self.recorded, self._shards = True, self._connect()
        return self._shards


class TracedGraph:
    """Holds a graph of Dynamo's, before the passes, and its programs by the names of their parameters."""

    def __init__(self, module: fx.GraphModule, parameters: dict[int, ShardedParameter], storage: Shards) -> None:
        """Copy the graph. Called in a Dynamo backend, before ``module`` is changed."""
        self._storage = storage
        self._names = {index: p.spec.name for index, p in parameters.items()}  # it was traced with these
        self._module = _copied(module)
        self.records = records(module)
        self._values = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
        self._shapes = {
            index: tuple(value.shape)
            for index, value in enumerate(self._values)
            if isinstance(value, DTensor) and index not in self._names and all(isinstance(n, int) for n in value.shape)
        }
        modes = (getattr(value, "fake_mode", None) for value in self._values)  # torch 2.9 gives the backend another one
        self._mode = next(filter(None, modes), None) or compat.current_fake_mode()
        self.programs: dict[tuple[str, ...], Runnable] = {}
        # Ids of placeholders → these, which live as long as their ids are known, and their names.
        self._known: dict[tuple[int, ...], tuple[list[Any], tuple[str, ...]]] = {}

    def run(self, args: Sequence[Any], shards: Mapping[str, Tensor], compile_graph: Compile) -> Any:
        """Run the program for the parameters among ``args``, with their ``shards``. Where there is none yet,
        ``compile_graph`` makes it of a copy of the graph, fake inputs and the parameters. Raises ParameterChangedError
        if one of them is no parameter of the model."""
        values, places = list(args), self._names
        if self._shapes:
            self._check_shapes(values)
        ids = tuple([id(values[index]) for index in places])
        if ids not in self._known:
            self._known[ids] = [values[index] for index in places], tuple(self._names_among(values))
        _, names = self._known[ids]
        for index, name in zip(places, names, strict=True):
            values[index] = shards[name]
        again = _places_of_repeated(places, names) if len(set(names)) < len(names) else {}
        if names not in self.programs:
            with compat.tracing_in(self._mode):
                self.programs[names] = self._compile(compile_graph, dict(zip(places, names, strict=True)), again)
        return self.programs[names](*_without(values, again))

    def _check_shapes(self, values: Sequence[Any]) -> None:
        """Refuse DTensors of other shapes than the graph was traced with. Dynamo of torch 2.13 and 2.15 looks at their
        parts on this rank alone, which may be alike where the ranks cannot divide a dimension."""
        for index, shape in self._shapes.items():
            if tuple(values[index].shape) != shape:
                raise UnsupportedError(
                    f"a DTensor of shape {list(values[index].shape)} goes from one graph to the next, where "
                    f"torch.compile takes it for one of shape {list(shape)}, whose part on this rank is as large; let "
                    "sizes divide by the tensor-parallel ranks, or remove the graph break"
                )

    def _compile(self, compile_graph: Compile, names: Mapping[int, str], again: Mapping[int, int]) -> Runnable:
        """Compile a copy of the graph for other parameters, without the inputs of those that it takes ``again``."""
        module = _copied(self._module)
        nodes = module.graph.find_nodes(op="placeholder")
        for node, value in zip(nodes, self._values, strict=True):
            if value is not None:
                node.meta["example_value"] = value
        for place, first in again.items():
            nodes[place].replace_all_uses_with(nodes[first])
            module.graph.erase_node(nodes[place])
        given = enumerate(_without([names.get(place) for place in range(len(nodes))], again))
        parameters = {place: self._storage.parameters[name] for place, name in given if name is not None}
        return compile_graph(module, _without(self._values, again), parameters)

    def _names_among(self, values: Sequence[Any]) -> Iterator[str]:
        """Yield the names of the parameters whose placeholders are among ``values``."""
        for index, name in self._names.items():
            found = self._storage.by_placeholder.get(id(values[index]))
            if found is None:
                raise ParameterChangedError(
                    f"a {type(values[index]).__name__} of shape {tuple(values[index].shape)} stands where parameter "
                    f"{name!r} stood when this code was compiled, and is no parameter that graph_fsdp.compile has "
                    "sharded; put modules and parameters into the model before graph_fsdp.compile"
                )
            yield found.spec.name


def _places_of_repeated(places: Iterable[int], names: Sequence[str]) -> dict[int, int]:
    """Return the places of parameters that were there before, and the first place of each: a module that took the place
    of another of its kind may be in the model twice."""
    first: dict[str, int] = {}
    found = {place: first.setdefault(name, place) for place, name in zip(places, names, strict=True)}
    return {place: other for place, other in found.items() if other != place}


def _without(values: Sequence[T], places: Container[int]) -> list[T]:
    return [value for place, value in enumerate(values) if place not in places] if places else list(values)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph of Dynamo's, without its values and sources, which would keep what the user passed."""
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {key: value for key, value in node.meta.items() if key not in _OF_DYNAMO}
    return compat.with_graph(module, graph, copies)
