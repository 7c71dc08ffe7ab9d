"""XLA engines turn a forward call into XLA programs, where that differs from ``graph_fsdp/engine/engine.py``.

[Note: gradients of the whole program]
The program of all devices has one logical batch, whose gradients are the sum over devices for what leaves stacked, and
the mean for a loss that leaves as the mean. The graphs reduce to the mean. So gradients of stacked outputs enter
backward multiplied by the number of devices; those of inputs, which nothing reduces, leave divided by it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from graph_fsdp import compat
from graph_fsdp.compat import pytree
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.engine.dynamo import Entry
from graph_fsdp.engine.engine import Engine
from graph_fsdp.engine.recompilation import CaptureKey
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.passes import Graph, PassContext
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.report.report import CapturedGraph
from graph_fsdp.runtime import Program, WholeProgram
from graph_fsdp.runtime.backends import XlaBackend
from graph_fsdp.runtime.xla.lower import Crossing, Lowered, host_data, varying_nodes
from graph_fsdp.runtime.xla.operators import Placement
from graph_fsdp.runtime.xla.program import XlaProgram
from graph_fsdp.xla.checkpoint import XlaTensors
from graph_fsdp.xla.storage import LocalViews, XlaStorage

_Crossings: TypeAlias = tuple[Sequence[Crossing | None], Sequence[Crossing | None]]  # of a graph's inputs and outputs


@dataclass
class _Capture:
    """Holds what forward and backward of one captured graph have to know of each other."""

    inputs: list[Crossing | None]  # how they enter; with a shape, the model's, where they are parameters
    saved: list[Crossing | None] = field(default_factory=list)
    stacked_outputs: list[bool] = field(default_factory=list)  # of those that backward is given a gradient of


class XlaEngine(Engine):
    """Holds what the engines of each ``sharding`` share: graphs become programs of XLA's, which do not keep in step
    with other processes, and keep nothing gathered that could be given back."""

    storage: XlaStorage
    backend: XlaBackend
    unavailable = "on XLA devices parameters are whole in compiled code alone"  # why units cannot be whole outside
    program_class = XlaProgram

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        compat_xla.decompose_for_autograd()
        self.mesh = self.storage.xla_mesh
        self.unsharded.refused = self.unavailable
        self._told = False  # that no input is sharded

    def checkpoint_access(self) -> XlaTensors:
        return XlaTensors(self.storage)

    def tell_unsharded(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn, once, that no input of the model is sharded, by the names that its forward has for them."""
        if self._told or self.mesh.size == 1:
            return
        self._told = True
        names = list(inspect.signature(function).parameters)[1:]
        given = [*zip(names, args, strict=False), *kwargs.items()]
        tensors = [name for name, value in given if any(isinstance(v, Tensor) for v in pytree.tree_leaves(value))]
        if tensors:
            warnings.warn(
                f"no input of the model is sharded ({', '.join(tensors)}), so all devices compute the same; shard the "
                "batch: graph_fsdp.xla.shard_batch(batch, mesh), or torch_xla's MpDeviceLoader with input_sharding",
                stacklevel=4,
            )

    def _compile_graph(
        self, key: CaptureKey, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        with compat_xla.in_place_views():
            call = Engine._compile_graph(self, key, module, example_inputs)

        def on_devices(*args: Any) -> Any:
            return call(*map(self._real, args))

        return on_devices

    def _real(self, value: Any) -> Any:
        """Return what a program is given for an argument of its graph."""
        on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
        return value.to(self.storage.device) if on_cpu else value

    def _lowered(self, graph: Graph, captured: CapturedGraph) -> Lowered:
        return Lowered(graph, self.mesh.groups)

    def _make_program(self, graph: Graph, context: PassContext, captured: CapturedGraph) -> XlaProgram:
        lowered, on_host = self._lowered(graph, captured), self.backend.on_host_fallback
        return self.program_class(graph, lowered, self.regions, self.counter, on_host)

    def _runnable(self, program: Program | WholeProgram, context: PassContext) -> Callable[[list[Any]], Any]:
        return program


class LocalEngine(XlaEngine):
    """Runs graphs on all XLA devices of one program, each of which has its own rows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._views: LocalViews | None = None
        self._captures: list[_Capture] = []

    def run(self, entry: Entry, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        views = LocalViews(self.mesh, self.storage.device)
        args, kwargs = views.of((args, kwargs))
        if not views.real:
            self.tell_unsharded(entry.function, args, kwargs)
        self._layout = views.signature
        before, self._views = self._views, views
        try:
            return views.back(super().run(entry, module, *args, **kwargs))
        finally:
            self._views = before

    def _compile_graph(
        self, key: CaptureKey, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        self._captures.append(self._describe_inputs(module))
        _clone_outputs(module)
        if self._call is not None and self._views is not None:  # what the user has called it with, for the report
            given, named = self._views.back((self._call.args, self._call.kwargs))
            self._call = replace(self._call, args=given, kwargs=named)
        return XlaEngine._compile_graph(self, key, module, example_inputs)

    def _real(self, value: Any) -> Any:
        """Return the tensor of the whole program that an argument stands for."""
        return super()._real(self._views.real.get(id(value), value) if self._views is not None else value)

    def _describe_inputs(self, module: fx.GraphModule) -> _Capture:
        inputs: list[Crossing | None] = []
        assert self._views is not None
        for node in module.graph.find_nodes(op="placeholder"):
            example = compat.example_of(node)
            parameter = self.storage.by_placeholder.get(id(example))
            if parameter is not None:
                inputs.append(Crossing(self.storage.placement(parameter.spec), shape=parameter.spec.shape))
            elif isinstance(example, Tensor):
                inputs.append(Crossing(self._views.placements.get(id(example), self.mesh.whole)))
                _check_whole(node, example, self._views)
            else:
                inputs.append(None)
        return _Capture(inputs)

    # --- programs

    def _lowered(self, graph: Graph, captured: CapturedGraph) -> Lowered:
        capture = self._captures[captured.index]
        make = self._backward if graph.phase == "backward" else self._forward_or_inference
        return Lowered(graph, self.mesh.groups, *make(graph, capture), self.mesh.batch)

    def _forward_or_inference(self, graph: Graph, capture: _Capture) -> _Crossings:
        entry_of = dict(zip(graph.placeholders, capture.inputs, strict=True))
        varying, of_host = varying_nodes(graph, capture.inputs), host_data(graph)
        written, differentiable = compat.forward_outputs()
        outputs = operands(graph.output)
        first_saved = len(written) + len(differentiable)
        exits: list[Crossing | None] = []
        for index, value in enumerate(outputs):
            if not isinstance(value, fx.Node) or value in entry_of:
                exits.append(None)
            elif index < len(written):
                exits.append(self._written(value, value in varying, capture.inputs[written[index]]))
            elif index < first_saved:
                exits.append(self._output(value, value in varying, index - len(written)))
            else:
                exits.append(Crossing(self.mesh.whole if value in of_host else self.mesh.batch))
        saved = zip(outputs[first_saved:], exits[first_saved:], strict=True)
        capture.saved = [entry_of.get(value, leaving) for value, leaving in saved]
        of_outputs = zip(exits[len(written) : first_saved], differentiable, strict=True)
        capture.stacked_outputs = [leaving is not None and leaving.is_divided for leaving, given in of_outputs if given]
        return capture.inputs, exits

    def _output(self, value: fx.Node, varies: bool, index: int) -> Crossing:
        if not varies:
            return Crossing(self.mesh.whole)
        if value.meta["val"].dim():
            return Crossing(self.mesh.batch)
        if value.meta["val"].is_floating_point():
            return Crossing(self.mesh.whole, mean=True)
        raise UnsupportedError(
            f"output {index} of the model is a single {value.meta['val'].dtype} that each device has its own of, and "
            "no mean can be taken of it; return it as a floating-point number, or one per row of the batch"
        )

    def _written(self, value: fx.Node, varies: bool, entry: Crossing | None) -> Crossing:
        """Say how the new value of an input leaves; a buffer's is the mean over devices."""
        if entry is not None and entry.is_divided:
            return entry
        if varies and not value.meta["val"].is_floating_point():
            raise UnsupportedError(
                f"the model writes other values of type {value.meta['val'].dtype} into a buffer on each device, and a "
                "buffer is the same on all; write floating-point numbers, of which the mean is kept"
            )
        return Crossing(self.mesh.whole, mean=varies)

    def _backward(self, graph: Graph, capture: _Capture) -> _Crossings:
        # See [Note: gradients of the whole program].
        stacked, whole = Crossing(self.mesh.batch, scale=self.mesh.size), Crossing(self.mesh.whole)
        entries = [*capture.saved, *(stacked if is_stacked else whole for is_stacked in capture.stacked_outputs)]
        exits: list[Crossing | None] = []
        for value, entry in zip(operands(graph.output), capture.inputs, strict=True):
            if not isinstance(value, fx.Node) or entry is None:
                exits.append(None)
            else:
                exits.append(self._input_gradient(entry.placement) if entry.shape is None else entry)
        return entries, exits

    def _input_gradient(self, place: Placement) -> Crossing:
        if place.is_replicated:
            return Crossing(place, mean=True)
        if place != self.mesh.batch:
            raise UnsupportedError(
                "an input that is sharded over a part of the mesh requires grad; shard it over all devices"
            )
        return Crossing(place, scale=1 / self.mesh.size)


def _check_whole(node: fx.Node, example: Tensor, views: LocalViews) -> None:
    if id(example) in views.placements or example.device.type != "xla":
        return
    (found,) = views.mesh.placements([example])
    if found is None or not found.is_replicated:
        (spec,) = compat_xla.sharding_specs([example])
        raise UnsupportedError(
            f"{node.name} is a tensor of shape {tuple(example.shape)} that is sharded as {spec}, and is no argument of "
            "the model: a buffer, or in an object that torch.utils._pytree does not know; pass it as an argument, in a "
            "list, tuple or dict"
        )


def _clone_outputs(module: fx.GraphModule) -> None:
    """Return clones from the graph: AOTAutograd would take views of inputs outside, where they have other shapes."""
    output = module.graph.output_node()
    clones: dict[fx.Node, fx.Node] = {}
    for value in output.all_input_nodes:
        if isinstance(value.meta.get("example_value"), Tensor):
            with module.graph.inserting_before(output):
                clones[value] = module.graph.call_function(torch.clone, (value,))
            clones[value].meta = {k: v for k, v in value.meta.items() if k not in ("grapharg", "fsdp")}
    output.args = fx.map_arg(output.args, lambda node: clones.get(node, node))
    module.recompile()
