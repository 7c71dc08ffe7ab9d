"""From a forward call to XLA programs: what is different from other devices in ``graph_fsdp/engine/engine.py``.

[Note: gradients of the whole program]
The program of all devices has one logical batch, and its gradients are those of autograd on that: of what leaves
stacked, the sum over devices, and of a loss that leaves as the mean, the mean. The graphs reduce to the mean, as
everywhere. So gradients of stacked outputs enter backward multiplied by the number of devices, and gradients of inputs,
which nothing reduces, leave divided by it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from graph_fsdp import compat
from graph_fsdp.compat import pytree
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.engine.engine import Engine
from graph_fsdp.engine.entry import Entry
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.parameters.shards import Storage
from graph_fsdp.passes import Graph, PassContext, memory_profile
from graph_fsdp.report.report import CapturedGraph
from graph_fsdp.runtime.backends.xla import XlaBackend
from graph_fsdp.runtime.xla.lower import Exit, ProgramInput, lower, varying_nodes
from graph_fsdp.runtime.xla.placement import Placement, read_placement
from graph_fsdp.runtime.xla.program import XlaProgram
from graph_fsdp.xla.checkpoint import XlaTensors
from graph_fsdp.xla.storage import LocalViews, XlaStorage


class _Capture:
    """What forward and backward of one captured graph have to know of each other."""

    def __init__(self, placements: list[Placement | None], shapes: list[tuple[int, ...] | None]) -> None:
        self.placements = placements  # of the graph's inputs; None for what is no tensor
        self.shapes = shapes  # of parameters, as the model has them
        self.saved: list[ProgramInput | None] = []
        self.stacked_outputs: list[bool] = []  # of those that backward is given a gradient of


class XlaEngine(Engine):
    """An engine whose graphs run on all XLA devices of one program."""

    storage: XlaStorage  # type: ignore[assignment]  # it has what Engine's methods call
    backend: XlaBackend

    def __init__(self, forward: Callable[..., Any], spec: Any, storage: XlaStorage, *args: Any, **kwargs: Any) -> None:
        super().__init__(forward, spec, cast(Storage, storage), *args, whole=True, **kwargs)
        self.mesh = storage.xla_mesh
        self.unsharded.refused = _unavailable()
        self._views: LocalViews | None = None
        self._captures: list[_Capture] = []
        self._functions: dict[Any, dict[Any, Callable[..., Any]]] = {}
        self._told = False  # that no input is sharded

    def run(self, entry: Entry, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        views = LocalViews(self.mesh, self.storage.device)
        args, kwargs = views.of((args, kwargs))
        if not views.has_sharded and not self._told and self.mesh.size > 1:
            self._told = True
            warn_unsharded(entry.function, args, kwargs)
        # Graphs are of the local view, whose shapes do not tell how the inputs are sharded.
        self._compiled, self._layout = self._functions.setdefault(views.signature, {}), views.signature
        before, self._views = self._views, views
        try:
            return views.back(super().run(entry, module, *args, **kwargs))
        finally:
            self._views = before

    def checkpoint_access(self) -> XlaTensors:
        return XlaTensors(self.storage)

    def _compile_graph(
        self, settings: Any, entry: Entry, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        self._captures.append(self._describe_inputs(module))
        _clone_outputs(module)
        if self._call is not None and self._views is not None:  # what the user has called it with, for the report
            given, named = self._views.back((self._call.args, self._call.kwargs))
            self._call = replace(self._call, args=given, kwargs=named)
        call = Engine._compile_graph(self, settings, entry, module, example_inputs)

        def on_all_devices(*args: Any) -> Any:
            return call(*map(self._real, args))

        return on_all_devices

    def _real(self, value: Any) -> Any:
        """The tensor of the whole program that an argument of a graph stands for."""
        if not isinstance(value, Tensor):
            return value
        found = self._views.real.get(id(value)) if self._views is not None else None
        if found is None:
            return value.to(self.storage.device) if value.device.type == "cpu" else value
        return found

    def _describe_inputs(self, module: fx.GraphModule) -> _Capture:
        placements: list[Placement | None] = []
        shapes: list[tuple[int, ...] | None] = []
        assert self._views is not None
        for node in module.graph.nodes:
            if node.op != "placeholder":
                continue
            example = getattr(node.meta.get("grapharg"), "example", None)
            parameter = self.storage.by_placeholder.get(id(example))
            shapes.append(None if parameter is None else tuple(parameter.spec.shape))
            if parameter is not None:
                placements.append(self.storage.placement(parameter.spec))
            elif isinstance(example, Tensor):
                placements.append(self._views.placements.get(id(example), self.mesh.whole))
                _check_whole(node, example, self._views)
            else:
                placements.append(None)
        return _Capture(placements, shapes)

    # --- programs

    def program(self, graph: Graph, context: PassContext, captured: CapturedGraph) -> Callable[[list[Any]], Any]:
        graph.cost = context.cost
        capture = self._captures[captured.index]
        if graph.phase == "backward":
            entries, exits = self._backward(graph, context, capture)
        else:
            entries, exits = self._forward_or_inference(graph, context, capture)
        lowered = lower(graph, self.mesh.groups, entries, exits, self.mesh.batch)
        program = XlaProgram(
            graph,
            lowered,
            entries,
            self.regions,
            self.counter,
            each=self.mesh.batch,
            on_host_fallback=self.backend.on_host_fallback,
        )
        captured.add_program(graph, context, program, memory_profile(graph, context))
        self.programs[captured.index, graph.phase] = program
        return program

    def _forward_or_inference(
        self, graph: Graph, context: PassContext, capture: _Capture
    ) -> tuple[list[ProgramInput | None], list[Exit | None]]:
        inputs = zip(graph.placeholders, capture.placements, capture.shapes, strict=True)
        entries = [_entry(place, node, is_shard=shape is not None) for node, place, shape in inputs]
        varying = varying_nodes(graph, [e is not None and not e.placement.is_replicated for e in entries])
        written, differentiable = compat.forward_outputs()
        outputs: Any = graph.output.args[0]
        first_saved = len(written) + len(differentiable)
        exits: list[Exit | None] = []
        for index, value in enumerate(outputs):
            if not isinstance(value, fx.Node) or value.op == "placeholder":
                exits.append(None)
            elif index < len(written):
                exits.append(self._written(value, value in varying, capture.placements[written[index]]))
            elif index < first_saved:
                exits.append(self._output(value, value in varying, index - len(written)))
            else:
                exits.append(Exit(self.mesh.batch))
        for value in outputs[first_saved:]:
            if isinstance(value, fx.Node) and value.op == "placeholder":
                capture.saved.append(entries[graph.placeholders.index(value)])
            else:
                capture.saved.append(_entry(self.mesh.batch, value))
        of_outputs = zip(exits[len(written) : first_saved], differentiable, strict=True)
        capture.stacked_outputs = [e is not None and not e.placement.is_replicated for e, given in of_outputs if given]
        return entries, exits

    def _output(self, value: fx.Node, varies: bool, index: int) -> Exit:
        if not varies:
            return Exit(self.mesh.whole)
        if value.meta["val"].dim():
            return Exit(self.mesh.batch)
        if value.meta["val"].is_floating_point():
            return Exit(self.mesh.whole, mean=True)
        raise UnsupportedError(
            f"output {index} of the model is a single {value.meta['val'].dtype} that each device has its own of, and "
            "no mean can be taken of it; return it as a floating-point number, or one per row of the batch"
        )

    def _written(self, value: fx.Node, varies: bool, place: Placement | None) -> Exit:
        """Of the new value of an input: a buffer's is the mean over devices."""
        if place is not None and not place.is_replicated:
            return Exit(place)
        if varies and not value.meta["val"].is_floating_point():
            raise UnsupportedError(
                f"the model writes other values of type {value.meta['val'].dtype} into a buffer on each device, and a "
                "buffer is the same on all; write floating-point numbers, of which the mean is kept"
            )
        return Exit(self.mesh.whole, mean=varies)

    def _backward(
        self, graph: Graph, context: PassContext, capture: _Capture
    ) -> tuple[list[ProgramInput | None], list[Exit | None]]:
        nodes = graph.placeholders
        tangents = nodes[len(capture.saved) :]
        entries = list(capture.saved)
        for node, stacked in zip(tangents, capture.stacked_outputs, strict=True):
            # See [Note: gradients of the whole program].
            entries.append(_entry(self.mesh.batch, node, self.mesh.size) if stacked else _entry(self.mesh.whole, node))
        exits: list[Exit | None] = []
        outputs: Any = graph.output.args[0]
        for value, place, shape in zip(outputs, capture.placements, capture.shapes, strict=True):
            if not isinstance(value, fx.Node):
                exits.append(None)
            elif shape is not None:
                assert place is not None
                exits.append(Exit(place, shape))
            else:
                exits.append(self._input_gradient(place))
        return entries, exits

    def _input_gradient(self, place: Placement | None) -> Exit:
        assert place is not None
        if place.is_replicated:
            return Exit(place, mean=True)
        if place != self.mesh.batch:
            raise UnsupportedError(
                "an input that is sharded over a part of the mesh requires grad; shard it over all devices"
            )
        return Exit(place, scale=1 / self.mesh.size)


def _entry(place: Placement | None, node: fx.Node, scale: float = 1.0, is_shard: bool = False) -> ProgramInput | None:
    value = node.meta.get("val")
    if place is None or not isinstance(value, Tensor):
        return None
    return ProgramInput(place, tuple(value.shape), scale, is_shard)


def warn_unsharded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """By the names that the model's forward has for them."""
    names = list(inspect.signature(function).parameters)[1:]
    given = [*zip(names, args, strict=False), *kwargs.items()]
    tensors = [name for name, value in given if any(isinstance(v, Tensor) for v in pytree.tree_leaves(value))]
    if tensors:
        warnings.warn(
            f"no input of the model is sharded ({', '.join(tensors)}), so all devices compute the same; shard the "
            "batch: graph_fsdp.xla.shard_batch(batch, mesh), or torch_xla's MpDeviceLoader with input_sharding",
            stacklevel=4,
        )


def _check_whole(node: fx.Node, example: Tensor, views: LocalViews) -> None:
    if id(example) in views.placements or example.device.type != "xla":
        return
    (spec,) = compat_xla.sharding_specs([example])
    found = read_placement(spec, views.mesh.ranks)
    if found is None or not found.is_replicated:
        raise UnsupportedError(
            f"{node.name} is a tensor of shape {tuple(example.shape)} that is sharded as {spec}, and is no argument of "
            "the model: a buffer, or in an object that torch.utils._pytree does not know; pass it as an argument, in a "
            "list, tuple or dict"
        )


def _clone_outputs(module: fx.GraphModule) -> None:
    """What the graph returns shares memory with nothing: AOTAutograd would otherwise take views of its inputs outside
    of the graph, where they have the shapes of the whole program."""
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    clones: dict[fx.Node, fx.Node] = {}
    for value in output.all_input_nodes:
        if isinstance(value.meta.get("example_value"), Tensor):
            with module.graph.inserting_before(output):
                clones[value] = module.graph.call_function(torch.clone, (value,))
            clones[value].meta = {k: v for k, v in value.meta.items() if k not in ("grapharg", "fsdp")}
    output.args = fx.map_arg(output.args, lambda node: clones.get(node, node))
    module.recompile()


def _unavailable() -> str:
    return "on XLA devices parameters are whole in compiled code alone"
