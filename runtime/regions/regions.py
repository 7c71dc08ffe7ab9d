"""A compute region is what lies between two communication nodes. Each distinct one is compiled once.

Two regions are equal when their graphs are the same up to the names of nodes: operators, constants, shapes, strides,
dtypes, devices, inputs and outputs. Layers of one class give equal regions, so compile time does not grow with depth.

A region that returns less than another one, and otherwise computes the same, uses the other one's function and drops
the rest, if that runs at least as often: only the head reads the last layer's result, the next layer those before, too.

[Note: large buffers]
Inductor indexes a kernel by 64 bits where any of its inputs has 2^31 elements or more. A gathered bucket may, of which
each kernel reads a parameter: the views that cut parameters out of such a bucket are a region of their own, without a
kernel, and other regions get the parameters.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.canonical_form import canonical_form, digest
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.effects import aliased_inputs, is_view, mutated_inputs
from graph_fsdp.passes.ir.graph import Graph, Phase
from graph_fsdp.passes.ir.operands import operand

_INT32_MAX = torch.iinfo(torch.int32).max
_FILLS = frozenset({torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default})

_CUTS = frozenset({torch.ops.aten.slice.Tensor, torch.ops.aten.view.default})

_PARAMETERS = frozenset({Role.GATHER_WAIT, Role.KEPT, Role.UNPACK})
_REDUCTIONS = frozenset({Role.REDUCE_START, Role.ACCUMULATE})

Compiled = Callable[[list[Any]], Sequence[Any]]


@dataclass(eq=False)
class Region:
    """Holds nodes of a graph. ``inputs`` and ``outputs`` are the graph's; ``module`` takes and returns them in that
    order. ``nodes`` are the region's, in the graph's order; ``body`` is what it computes, with constants and views
    repeated before their first use in each region, so that the first layer does not differ from the others."""

    nodes: list[fx.Node]
    body: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    owner: fx.GraphModule
    keys: dict[str, RegionKey] = field(default_factory=dict, init=False)  # by the kind of its graph

    @property
    def is_view_only(self) -> bool:
        """Say whether the region has nothing but views, and so no kernel to compile."""
        return all(aliased_inputs(n) for n in self.body)

    @cached_property
    def module(self) -> fx.GraphModule:
        """Make the region's module, once for all equal ones. Names follow from the operators, not from the layer:
        compilers look graphs up in their caches by their text."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"arg_{index}")
        for node in self.body:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs)
        for node, copy in copies.items():
            copy.meta = dict(node.meta)
        graph.output(tuple(copies[node] for node in self.outputs))
        return fx.GraphModule(self.owner, graph)

    def called(self, node: fx.Node) -> Any:
        """Return what a node of the body calls, or the constant that it reads."""
        return operator.attrgetter(str(node.target))(self.owner) if node.op == "get_attr" else node.target

    def key(self, kind: str) -> RegionKey:
        """Return the region's key in a graph of a kind. The nodes must not change any more."""
        if kind not in self.keys:
            self.keys[kind] = region_key(self, kind)
        return self.keys[kind]


def unit_of(region: Region) -> str:
    """Name the units whose gathered parameters a region computes with, in order; else those whose gradients it makes
    for a reduction; else ""."""
    found = _units([*region.inputs, *region.nodes, *region.body], _PARAMETERS)
    return found or _units([user for node in region.outputs for user in node.users], _REDUCTIONS)


def _units(nodes: Iterable[fx.Node], roles: Set[Role]) -> str:
    records = (node.meta.get("fsdp") for node in nodes)
    return ", ".join(dict.fromkeys(r.unit or "root" for r in records if r is not None and r.role in roles))


Step = Region | fx.Node  # a region, or a node that the executor runs itself


def cut(graph: Graph) -> list[Step]:
    """Cut the graph into steps in its own order: regions, and the communication nodes between them."""
    symbols = _symbol_inputs(graph.placeholders)
    steps: list[list[fx.Node] | fx.Node] = []
    region_of: dict[fx.Node, list[fx.Node]] = {}
    cut_out: dict[fx.Node, list[fx.Node]] = {}  # views, by their buffer: see [Note: large buffers]
    for node in graph.fx_graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.target in dialect.EXECUTED:
            steps.append(node)
            continue
        if _is_cut_out(node):
            cut_out.setdefault(node.all_input_nodes[0], []).append(node)
            continue
        if node.target is operator.getitem and (source := operand(node)) in region_of:
            region = region_of[source]  # a region returns tensors, not tuples of them
        elif steps and isinstance(steps[-1], list):
            region = steps[-1]
        else:
            steps.append(region := [])
        region.append(node)
        region_of[node] = region
    for buffer, views in cut_out.items():
        steps.insert(steps.index(buffer) + 1 if buffer in steps else 0, views)
    kept = set(graph.output.all_input_nodes)  # values that are read outside of regions
    kept.update(source for step in steps if isinstance(step, fx.Node) for source in step.all_input_nodes)
    bodies = {id(s): _body(s, [n for n in s if n in kept]) for s in steps if isinstance(s, list)}
    read = kept.union(*(inputs for _, inputs in bodies.values()))
    found: list[Step] = []
    for step in steps:
        if isinstance(step, fx.Node):
            found.append(step)
        elif bodies[id(step)][0]:  # more than views that other regions repeat
            body, inputs = bodies[id(step)]
            outputs = [node for node in step if node in read]
            found.append(Region(step, body, _with_symbols(inputs, body, symbols), outputs, graph.module))
    return found


def _with_symbols(inputs: list[fx.Node], body: list[fx.Node], symbols: dict[Any, fx.Node]) -> list[fx.Node]:
    """Add inputs for symbols: a region's compiler reads symbolic sizes from its inputs, so each symbol must be one."""
    if not symbols:
        return inputs
    # By name: a set of symbols has an order of each process's own.
    values = (node.meta.get("val") for node in [*body, *inputs])
    found = (symbol for value in values for symbol in sorted(compat.free_symbols(value), key=str))
    return list(dict.fromkeys([*inputs, *(symbols[symbol] for symbol in found if symbol in symbols)]))


def _body(nodes: list[fx.Node], outputs: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return what a region computes, in order, and the inputs of that, in the order of their first use."""
    inside = set(nodes)
    body: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}

    def need(node: fx.Node) -> None:
        if node in body:
            return
        if node not in inside and not _is_repeated(node):
            inputs[node] = None
            return
        for source in node.all_input_nodes:
            need(source)
        body[node] = None

    for node in nodes:
        if not _is_repeated(node):
            need(node)
    for node in outputs:
        need(node)
    return list(body), list(inputs)


def _is_repeated(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    value = node.meta.get("val")
    if node.op != "call_function" or node.target in dialect.EXECUTED or not isinstance(value, torch.Tensor):
        return False
    if node.target in _FILLS:
        return not node.all_input_nodes and not any(node in mutated_inputs(user) for user in node.users)
    if node.target is operator.getitem or len(node.all_input_nodes) != 1 or not is_view(node):
        return False
    base = node.all_input_nodes[0].meta.get("val")
    in_its_memory = isinstance(base, torch.Tensor) and compat.storage_id(value) == compat.storage_id(base)
    return in_its_memory and not _is_cut_out(node)


def _is_cut_out(node: fx.Node) -> bool:
    """Say whether a node is a view of a buffer that is larger than regions may be given; see [Note: large buffers]."""
    if len(node.all_input_nodes) != 1 or not is_view(node):
        return False
    (buffer,) = node.all_input_nodes
    if buffer.op != "placeholder" and buffer.target not in dialect.EXECUTED:
        return False
    sizes = [value.numel() if isinstance(value := n.meta.get("val"), torch.Tensor) else 0 for n in (node, buffer)]
    return all(isinstance(size, int) for size in sizes) and sizes[0] <= _INT32_MAX < sizes[1]


def _symbol_inputs(placeholders: list[fx.Node]) -> dict[Any, fx.Node]:
    """Map each symbol to the graph input that is exactly that symbol."""
    values = ((node, node.meta.get("val")) for node in placeholders)
    numbers = ((node, value.node.expr) for node, value in values if isinstance(value, torch.SymInt))
    return {expr: node for node, expr in numbers if expr.is_Symbol}


@dataclass(frozen=True)
class RegionKey:
    """Identifies what one compiled function can serve: regions of equal keys. ``body`` is a digest of what is computed
    from which inputs; ``called`` has the ids of its operators and constants; ``returned`` says which of its nodes are
    returned; ``devices`` are those of its values, in the order in which ``body`` numbers them."""

    kind: str
    body: str
    called: tuple[int, ...]
    returned: tuple[int, ...]
    devices: tuple[torch.device, ...]

    @property
    def digest(self) -> str:
        """Return a digest that is equal in all processes for regions that are equal, or differ in constants alone, or
        in the indices of devices: each rank of a host has another."""
        return digest([f"{self.kind} {self.returned} {self.body}"])


def region_key(region: Region, kind: str) -> RegionKey:
    called: list[int] = []
    devices: dict[torch.device, str] = {}

    def named(argument: Any) -> Any:
        if not isinstance(argument, torch.device):
            return argument
        return devices.setdefault(argument, f"{argument.type}, device {len(devices)}")

    def value_key(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            layout = map(str, (value.shape, value.stride(), value.storage_offset(), value.dtype))
            return (*layout, named(value.device))
        return tuple(map(value_key, value)) if isinstance(value, (list, tuple)) else str(value)

    def target(node: fx.Node) -> str:
        value = region.called(node)
        called.append(id(value))
        if node.op == "get_attr":
            return "constant"
        if isinstance(value, compat.OpOverload):
            return str(value)
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"

    parts, index = canonical_form(region.inputs, region.body, lambda n: value_key(n.meta.get("val")), target, named)
    if any(mutated_inputs(node) for node in region.body):
        parts = (*parts, _shared_memory(region.inputs))
    return RegionKey(kind, digest(parts), tuple(called), tuple(index[node] for node in region.outputs), tuple(devices))


def _shared_memory(inputs: Sequence[fx.Node]) -> tuple[int, ...]:
    """Return for each input the first one in the same storage. Where nothing is written, it does not matter."""
    values = ((node, node.meta.get("val")) for node in inputs)
    memory = [compat.storage_id(value) if isinstance(value, torch.Tensor) else node for node, value in values]
    return tuple(map(memory.index, memory))


def run_as_graph(module: fx.GraphModule) -> Compiled:
    """Run the region as FX does, operator by operator, and drop inputs at their last use.

    ``aten.view`` becomes ``aten.reshape``, the same where a view is possible. Some kernels lay their results out
    otherwise than torch's fake ones say (``softplus_backward`` of a transposed gradient), and a traced view would
    raise.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return module.forward


def run_as_views(region: Region) -> Compiled | None:
    """Return what makes slices of a flat buffer, in any shape, without their operators; None for other regions.

    Where they lie is found by running the operators on a flat buffer without memory. The traced values do not say it:
    they may have been made of another buffer than the region is given.
    """
    given: Any = region.inputs[0].meta.get("val")
    is_flat = isinstance(given, torch.Tensor) and given.dim() == 1 and isinstance(given.shape[0], int)
    if len(region.inputs) > 1 or not is_flat or any(node.target not in _CUTS for node in region.body):
        return None
    shape = given.shape
    with compat.without_dispatch_modes():
        made = region.module(torch.empty(shape, device="meta"))
    places = [(tuple(view.shape), view.stride(), view.storage_offset()) for view in made]
    ordinary = run_as_graph(region.module)

    def run(inputs: list[Any]) -> Sequence[Any]:
        buffer = inputs[0]
        if buffer.shape != shape or buffer.stride() != (1,):
            return ordinary(inputs)
        inputs.clear()
        return [compat.reinterpreted(buffer, *place) for place in places]

    return run


class _BoxedCodeGen(fx.graph.CodeGen):
    """Generates code that takes its inputs in a list and empties it: the caller's references would keep them alive."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        unpack = f"    {', '.join(free_vars)}, = inputs\n" if free_vars else ""
        return f"def forward(self, inputs){maybe_return_annotation}:\n{unpack}    inputs.clear()"


class RegionCache:
    """Caches the compiled regions of one model, over all its graphs. ``regions`` counts those in programs, ``compiled``
    the functions that were made for them."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.regions = 0
        self.compiled = 0
        self._cache: dict[RegionKey, Compiled] = {}
        self._alive: list[Region] = []  # keys know operators and constants by their ids
        self._cuts: dict[fx.Graph, list[Step]] = {}  # of graphs whose programs come next

    def prepare(self, graphs: Iterable[Graph], cuts: Mapping[fx.Graph, list[Step]] | None = None) -> None:
        """Compile what the programs of these graphs will ask for, at once, so that a backend can divide the work.
        ``cuts``: of graphs that are cut already."""
        found: dict[RegionKey, Region] = {}
        counts: Counter[RegionKey] = Counter()
        self._cuts.clear()
        for graph in graphs:
            steps = self._cuts[graph.fx_graph] = (cuts or {}).get(graph.fx_graph) or cut(graph)
            for region in steps:
                if isinstance(region, Region):
                    key = region.key(graph.phase)
                    found.setdefault(key, region)
                    counts[key] += 1
        new = {key: region for key, region in found.items() if key not in self._cache}
        larger = {key: _larger(key, counts) for key in new}
        self._compile({key: region for key, region in new.items() if larger[key] is key})
        for key, other in larger.items():
            if other is not key:
                places = [other.returned.index(node) for node in key.returned]
                self._cache[key] = partial(_part_of, self._cache[other], places)

    def cut(self, graph: Graph) -> list[Step]:
        """Cut a graph, once if it was prepared last: such a graph does not change until its program is written."""
        prepared = self._cuts.pop(graph.fx_graph, None)
        if prepared is None:  # AOTAutograd gives a copy, and the graph that was prepared is of no use
            self._cuts.clear()
            return cut(graph)
        return prepared

    def compile(self, region: Region, kind: Phase) -> Compiled:
        self.regions += 1
        key = region.key(kind)
        if key not in self._cache:
            self._compile({key: region})
        return self._cache[key]

    def compile_whole(self, module: fx.GraphModule, kind: Phase) -> Compiled:
        """Compile a graph that is not cut; no other is equal to it."""
        self.regions += 1
        self.compiled += 1
        whole: Compiled = self.backend.compile_whole(module, kind)
        return whole

    def _compile(self, regions: dict[RegionKey, Region]) -> None:
        given = {key: region for key, region in regions.items() if not region.is_view_only}
        compiled = self.backend.compile_regions(given)
        for key, region in regions.items():
            # Autograd counts writes to what forward returns, and has nothing to do with gradients.
            views = run_as_views(region) if key.kind == "backward" and key not in given else None
            self._cache[key] = compiled[key] if key in given else views or run_as_graph(region.module)
            self._alive.append(region)
        self.compiled += len(regions)


def _larger(key: RegionKey, counts: Counter[RegionKey]) -> RegionKey:
    """Return the region whose function serves this one: itself, or the one that returns most among those that return
    all that it returns and run at least as often."""
    alike = [other for other in counts if replace(other, returned=key.returned) == key and counts[other] >= counts[key]]
    serves = (other for other in alike if set(key.returned) < set(other.returned))
    return max(serves, key=lambda other: len(other.returned), default=key)


def _part_of(function: Compiled, places: Sequence[int], inputs: list[Any]) -> Sequence[Any]:
    results = function(inputs)
    return [results[place] for place in places]
