"""Write a graph as plain data, of which another process makes the same graph.

What is written is JSON: operators by their names, values by shape, strides, dtype, device and the memory that they lie
in, records by their fields. Nothing that is read is code: an operator is looked up in torch's own libraries and this
package's, and a name that is no name is refused.

Process groups are called otherwise on each rank, and devices have other indices: both are written by what they are for
(``Names``). Constants, as those of ``torch.tensor([1, 2])``, are written by their bytes. A graph of which more is known
than is written here is refused (``NotPortable``): symbolic sizes, graphs within it, tensor subclasses, operators that
others have registered.
"""

from __future__ import annotations

import base64
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir.canonical_form import NotDescribed, describe_value
from graph_fsdp.passes.ir.dialect import NodeRecord, Role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import by_name

# Of operators that have one meaning in all processes.
NAMESPACES = frozenset({"aten", "prims", "graph_fsdp", "_c10d_functional"})
# What a node says of where it comes from that no later step reads.
_LEFT_OUT = frozenset(
    {"tensor_meta", "desc", "from_node", "source_fn_stack", "fwd_source_fn_stack", "output_stack_traces"}
    | {"seq_nr", "autograd_backward", "mutation_region_id", "partitioner_tag"}
)
_STACKS = frozenset({"nn_module_stack", "fwd_nn_module_stack"})
# What passes find of a graph, and what is left to whoever makes a program of it.
_FOUND = ("order", "slots", "unsharded", "taken", "given", "kept", "offloaded", "delayed", "recomputes_activations")
_KINDS_OF_LITERALS = (torch.dtype, torch.layout, torch.memory_format)
_LITERALS: dict[str, Any] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, _KINDS_OF_LITERALS)
}
LARGEST_CONSTANT = 1 << 20  # bytes that a constant may have: code that names its values has few
_RECORD = [field.name for field in fields(NodeRecord)]


class NotPortable(Exception):
    """Says what of a graph cannot be written."""


@dataclass(frozen=True)
class Names:
    """Says what differs between ranks that run the same graph: the names of process groups, by what each is for, and
    the device of the rank."""

    groups: Mapping[str, str]
    device: torch.device

    def of_group(self, group: str) -> str:
        """Return what a process group is for. Raises NotPortable for one that is not the model's."""
        if not group:
            return ""
        found = next((what for what, name in self.groups.items() if name == group), None)
        if found is None:
            raise NotPortable(f"process group {group!r} is none of the model's own")
        return found

    def of_device(self, device: torch.device) -> str:
        index: int | None = device.index
        if device == self.device and index is not None:
            return f"{device.type}:own"
        if index is not None:
            raise NotPortable(f"a value is on {device}, and the model on {self.device}")
        return device.type

    def device_of(self, text: str) -> torch.device:
        """Return the device of a text that ``of_device`` gave. Raises ValueError for any other."""
        kind, _, index = text.partition(":")
        try:
            return self.device if index == "own" and kind == self.device.type else torch.device(kind)
        except RuntimeError:
            raise ValueError(f"{text!r} is no device") from None


def operator_name(target: Any) -> str:
    """Return the name of what a node calls. Raises NotPortable for what is not torch's or this package's."""
    if isinstance(target, compat.OpOverload) and target.namespace in NAMESPACES:
        return str(target)
    if target is operator.getitem:
        return "getitem"
    raise NotPortable(f"it calls {target}")


def operator_of(name: str) -> Any:
    """Return the operator of a name that ``operator_name`` gave. Raises ValueError for any other."""
    if name == "getitem":
        return operator.getitem
    namespace, packet, overload = name.split(".")
    if namespace not in NAMESPACES:
        raise ValueError(f"{name!r} is no operator of torch's or of this package")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


# Writing


def to_data(graph: Graph, names: Names) -> dict[str, Any]:
    """Return a graph as data that ``json.dumps`` takes.

    Raises:
        NotPortable: there is more to it than can be written.
    """
    return _Writer(names).graph(graph)


class _Writer:
    def __init__(self, names: Names) -> None:
        self._names = names
        self._places: dict[fx.Node, int] = {}
        self._texts: dict[str, int] = {}
        self._metas: dict[str, int] = {}
        self._numbers: dict[tuple[str, int], int] = {}  # the same by identity: the graph holds what its nodes say
        self._said: list[list[Any]] = []  # of nodes, each once, by the number that ``_metas`` gives it
        self._values: dict[Any, int] = {}
        self._written: list[Any] = []  # values, by the number that ``_values`` gives them
        self._memory: dict[int, int] = {}
        self._sizes: list[int] = []  # bytes of each memory
        self._alive: list[Any] = []  # memory is known by its address

    def graph(self, graph: Graph) -> dict[str, Any]:
        constants = {
            str(node.target): self._constant(node, getattr(graph.module, str(node.target), None))
            for node in graph.fx_graph.find_nodes(op="get_attr")
        }
        nodes = [self._node(node) for node in graph.fx_graph.nodes]
        found = {name: self.argument(getattr(graph, name)) for name in _FOUND}
        return {
            "phase": graph.phase,
            "facts": sorted(graph.facts),
            "found": found,
            "constants": constants,
            "nodes": nodes,
            "texts": list(self._texts),
            "metas": self._said,
            "values": self._written,
            "memory": self._sizes,
        }

    def _node(self, node: fx.Node) -> list[Any]:
        target = operator_name(node.target) if node.op == "call_function" else str(node.target)
        if node.op not in ("call_function", "get_attr", "placeholder", "output"):
            raise NotPortable(f"{node} is a {node.op}")
        args, kwargs = self._arguments(node)
        meta = [self._said_once(key, value) for key, value in node.meta.items() if key not in _LEFT_OUT]
        self._places[node] = len(self._places)
        return [node.name, node.op, self._text(target), args, kwargs, meta]

    def _constant(self, node: fx.Node, value: Any) -> list[Any]:
        if isinstance(value, fx.GraphModule):
            raise NotPortable(f"{node} is a graph within it")
        if type(value) is not torch.Tensor or value.layout is not torch.strided or not value.is_contiguous():
            raise NotPortable(f"{node} is a constant that is no ordinary tensor")
        if value.requires_grad or value.is_conj() or value.is_neg() or value.nbytes > LARGEST_CONSTANT:
            raise NotPortable(f"{node} is a constant of {value.nbytes} bytes, or one that is more than its bytes")
        with compat.without_dispatch_modes():
            data = bytes(value.cpu().reshape(-1).view(torch.uint8).tolist())
        layout = [str(value.dtype).removeprefix("torch."), self._names.of_device(value.device), *value.shape]
        return [base64.b64encode(data).decode(), *layout]

    def _arguments(self, node: fx.Node) -> tuple[Any, Any]:
        groups: set[int] = set()
        if isinstance(node.target, compat.OpOverload) and node.target.namespace not in ("aten", "prims"):
            named = by_name(node.target, node.args, {})
            groups = {place for place, name in enumerate(named) if name.endswith("group") or name == "group_name"}
            if any(name.endswith("group") or name == "group_name" for name in node.kwargs):
                raise NotPortable(f"{node} is given a process group by name")
        args = [
            ["group", self._names.of_group(str(value))] if place in groups else self.argument(value)
            for place, value in enumerate(node.args)
        ]
        return args, {key: self.argument(value) for key, value in node.kwargs.items()}

    def argument(self, value: Any) -> Any:
        """Write an argument: itself, or a list that begins with its kind."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is complex:
            return ["complex", value.real, value.imag]
        if isinstance(value, fx.Node):
            return ["n", self._places[value]]
        if isinstance(value, torch.Size):
            return ["size", *map(self.argument, value)]
        if isinstance(value, (list, tuple)) and (isinstance(value, list) or kind is tuple):
            return ["l" if isinstance(value, list) else "t", *map(self.argument, value)]
        if isinstance(value, Mapping):
            return ["d", *([self.argument(key), self.argument(item)] for key, item in value.items())]
        if kind is slice:
            return ["slice", *map(self.argument, (value.start, value.stop, value.step))]
        if kind in _KINDS_OF_LITERALS:
            return ["torch", str(value).removeprefix("torch.")]
        if kind is torch.device:
            return ["device", self._names.of_device(value)]
        if isinstance(value, compat.OpOverload):
            return ["op", operator_name(value)]
        raise NotPortable(f"an argument is a {kind.__name__}")

    def _said_once(self, key: str, value: Any) -> int | list[Any]:
        """Write an entry of a node's metadata: its value, or the number of what other nodes have too."""
        if key == "val":
            return [self._value(value)]
        number = self._numbers.get((key, id(value)))  # nodes of one line have one text, and one stack of modules
        if number is None:
            said = [key, self._meta(key, value)]
            number = self._numbers[key, id(value)] = self._metas.setdefault(repr(said), len(self._said))
            if number == len(self._said):
                self._said.append(said)
        return number

    def _meta(self, key: str, value: Any) -> Any:
        if isinstance(value, NodeRecord):
            return ["record", [value.role.value, *(self.argument(getattr(value, name)) for name in _RECORD[1:])]]
        if key in _STACKS and value is not None:
            texts = ((str(key), path, class_name(kind)) for key, (path, kind) in value.items())
            return ["stack", [list(map(self._text, found)) for found in texts]]
        if isinstance(value, compat.CheckpointPolicy):
            return ["policy", value.name]
        if key == "original_aten":
            return self.argument(value) if isinstance(value, compat.OpOverload) else None
        if type(value) is str:
            return ["text", self._text(value)]
        try:
            return ["argument", self.argument(value)]
        except NotPortable:
            raise NotPortable(f"{key!r} of a node is a {type(value).__name__}") from None

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _value(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return ["l" if isinstance(value, list) else "t", *map(self._value, value)]
        if value is None or type(value) in (bool, int, float):
            return value
        try:
            described: Any = describe_value(value, unread=True)
        except NotDescribed as reason:
            raise NotPortable(f"a value is {reason}") from None
        _, sizes, dtype, device, *bits = described
        memory = self._memory.setdefault(compat.storage_id(value), len(self._memory))
        if memory == len(self._sizes):
            self._sizes.append(value.untyped_storage().nbytes())
            self._alive.append(value)
        key = (described, memory)
        if key not in self._values:
            self._values[key] = len(self._written)
            layout = [str(dtype).removeprefix("torch."), self._names.of_device(device), memory, *bits]
            self._written.append([value.dim(), *sizes, *layout])
        return ["v", self._values[key]]


def class_name(kind: Any) -> str:
    """Return the name of a class, also where torch has written it already."""
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


# Reading


def from_data(data: Mapping[str, Any], names: Names, mode: Any) -> Graph:
    """Return the graph that ``to_data`` has written, with its values in a fake mode.

    Raises:
        ValueError, TypeError, KeyError, IndexError, AttributeError: the data are not what it has written.
    """
    with compat.without_dispatch_modes(), compat.arguments_unsearched():
        return _Reader(data, names, mode).graph()


class _Reader:
    def __init__(self, data: Mapping[str, Any], names: Names, mode: Any) -> None:
        self._data, self._names = data, names
        self._mode = mode
        self._texts: list[str] = data["texts"]
        self._nodes: list[fx.Node] = []
        self._targets: dict[int, Any] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._said: dict[int, tuple[str, Any]] = {}  # what nodes say of themselves, which nobody changes
        self._devices: dict[str, torch.device] = {}
        self._kinds: dict[str, Callable[[list[Any]], Any]] = {
            "n": lambda given: self._nodes[given[0]],
            "l": lambda given: [self._argument(item) for item in given],
            "t": lambda given: tuple([self._argument(item) for item in given]),
            "size": lambda given: torch.Size(given),
            "d": lambda given: {self._argument(key): self._argument(item) for key, item in given},
            "complex": lambda given: complex(*given),
            "slice": lambda given: slice(*map(self._argument, given)),
            "torch": lambda given: _LITERALS[given[0]],
            "device": lambda given: names.device_of(given[0]),
            "op": lambda given: operator_of(given[0]),
            "group": lambda given: names.groups[given[0]] if given[0] else "",
        }
        self._metas: dict[str, Callable[[Any], Any]] = {
            "record": self._record,
            "stack": self._stack,
            "policy": lambda given: compat.CheckpointPolicy[given],
            "text": lambda given: self._texts[given],
            "argument": self._argument,
            "op": operator_of,
        }

    def graph(self) -> Graph:
        graph = fx.Graph()
        for name, op, target, args, kwargs, meta in self._data["nodes"]:
            called = self._target(target) if op == "call_function" else self._texts[target]
            if op == "get_attr" and called not in self._data["constants"]:
                raise ValueError(f"{called!r} is no constant of the graph")
            given = tuple([self._argument(value) for value in args])
            named = {key: self._argument(value) for key, value in kwargs.items()} if kwargs else {}
            node = graph.create_node(op, called, given, named, name)
            if node.name != name:
                raise ValueError(f"{name!r} is no name of a node")
            found = node.meta
            for said in meta:
                if type(said) is list:
                    found["val"] = self._value(said[0])
                    continue
                if said not in self._said:
                    key, value = self._data["metas"][said]
                    self._said[said] = key, self._meta(value)
                key, value = self._said[said]
                found[key] = value
            self._nodes.append(node)
        constants = {name: self._constant(*written) for name, written in self._data["constants"].items()}
        made = Graph(compat.module_of(graph, constants), self._data["phase"])
        made.facts = frozenset(self._data["facts"])
        for name in _FOUND:
            setattr(made, name, self._argument(self._data["found"][name]))
        return made

    def _constant(self, text: str, dtype: str, device: str, *shape: int) -> torch.Tensor:
        kind, data = _LITERALS[dtype], base64.b64decode(text, validate=True)
        if math.prod(shape) * kind.itemsize != len(data):
            raise ValueError(f"a constant of {dtype} and shape {shape} has {len(data)} bytes")
        made = torch.tensor(list(data), dtype=torch.uint8, device="cpu").view(kind).reshape(shape)
        where = self._names.device_of(device)
        if where not in (torch.device("cpu"), self._names.device):
            raise ValueError(f"a constant is on {where}")
        return made.to(where)

    def _target(self, number: int) -> Any:
        if number not in self._targets:
            self._targets[number] = operator_of(self._texts[number])
        return self._targets[number]

    def _argument(self, value: Any) -> Any:
        return self._kinds[value[0]](value[1:]) if type(value) is list else value

    def _meta(self, value: Any) -> Any:
        return self._metas[value[0]](value[1]) if value is not None else None

    def _record(self, given: list[Any]) -> NodeRecord:
        role, *others = given
        return NodeRecord(Role(role), *map(self._argument, others))

    def _stack(self, given: list[Any]) -> dict[str, tuple[str, str]]:
        texts = self._texts
        return {texts[number]: (texts[path], texts[kind]) for number, path, kind in given}

    def _value(self, value: Any) -> Any:
        if type(value) is not list:
            return value
        if value[0] != "v":
            return (list if value[0] == "l" else tuple)(map(self._value, value[1:]))
        dim, *sizes, dtype, device, memory, requires_grad, conjugated, negated = self._data["values"][value[1]]
        shape, stride, offset = sizes[:dim], sizes[dim : 2 * dim], sizes[-1]
        if memory not in self._memory:
            nbytes = self._data["memory"][memory]
            self._memory[memory] = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        if device not in self._devices:
            self._devices[device] = self._names.device_of(device)
        where = self._devices[device]
        lies_in = self._memory[memory], offset
        made = compat.fake_tensor(self._mode, shape, stride, _LITERALS[dtype], where, *lies_in)
        if conjugated or negated:
            compat.change_when_read(made, conjugated, negated)
        return made.requires_grad_() if requires_grad else made
