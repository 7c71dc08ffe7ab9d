"""Trace the graphs of a model on any number of ranks, in one process without devices or weights.

[Note: tensors without memory]
A model is built on the meta device, and each of its tensors is replaced by one of the same shape, on the device of the
plan, that has no memory. Dynamo and AOTAutograd read shapes only and take them for ordinary tensors. The capture is
that of ``graph_fsdp.compile``, through the same engine with a fake process group, and ends when the passes have run:
nothing is executed, no region is compiled and nothing is agreed on with other ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.api import compile
from graph_fsdp.errors import MeshError, UnsupportedError
from graph_fsdp.mesh import shapes_of_groups
from graph_fsdp.options import CompileOptions
from graph_fsdp.parameters.placements import as_model_uses_it
from graph_fsdp.passes import Graph, PassContext, memory_profile
from graph_fsdp.passes.ir.fake_values import fake_mode_of
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.passes.ir.settings import is_count
from graph_fsdp.passes.pipeline import PassesHaveRun
from graph_fsdp.planning.dimensions import Dimensions, Parallelize, named_meshes
from graph_fsdp.report.report import GraphReport, inspect
from graph_fsdp.runtime import RegionCache

log = logging.getLogger(__name__)

_COMPUTES_NOTHING = "the model's forward returns nothing that it computes of tensors; there is no graph of it"


@dataclass(frozen=True)
class Traced:
    """Holds a model's graphs after all passes. They cannot be run: the process group of their collectives is gone.

    ``finalization``: what reduces the gradients that backwards have kept, and its context; None where each backward
    reduces, or nothing is to be reduced. ``whole``: whether parameters were whole before the forward began.
    ``regions``: of the engine that has traced them; None where graphs are compiled whole.
    """

    graphs: Mapping[Phase, Graph]
    context: PassContext
    report: GraphReport
    finalization: tuple[Graph, PassContext] | None = None
    whole: bool = False
    regions: RegionCache | None = None

    def build_kernels(self) -> None:
        """Compile the regions of the graphs as a start does, which leaves them in the backend's cache on disk."""
        if self.regions is None:
            log.info("graphs that are compiled whole have their kernels built at the first start")
            return
        graphs = list(self.graphs.values())
        with compat.tracing_in(fake_mode_of(graphs[0].fx_graph.nodes)):
            self.regions.prepare(graphs)

    @property
    def forward(self) -> Graph:
        """Return the forward graph; of a model without trainable parameters, the inference graph."""
        return self.graphs.get("forward") or self.graphs["inference"]

    @property
    def backward(self) -> Graph:
        if "backward" not in self.graphs:
            raise LookupError(
                "the model was traced without gradients and has no backward graph; trace it without torch.no_grad()"
            )
        return self.graphs["backward"]


def trace(
    model_fn: Callable[[], nn.Module],
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    mesh_shape: Mapping[str, int] | Sequence[int] | Dimensions | None = None,
    parallelize: Parallelize | None = None,
    finalization: bool = False,
    device: str | torch.device | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    **compile_options: Any,
) -> Traced:
    """Trace the forward and backward graph of a model on a mesh of ranks, after all passes, as rank 0 has them.

    Allocates no parameter, shard or activation. The default process group must be free (a fake one takes its place
    during the call) or have as many ranks.

    Args:
        model_fn: builds the model. Called under ``torch.device("meta")``, so that it allocates nothing.
        example_inputs: positional, or a mapping of keyword arguments; tensors count by shape and dtype, on any device.
        world_size: ranks that parameters are sharded over.
        mesh_shape: instead, ``(ranks that shard,)``, ``(replicas, ranks that shard)``, or ``{name: size}`` of the
            dimensions of :mod:`graph_fsdp.planning.dimensions`. The graphs are those of one stage.
        parallelize: divides the model over ``tp``, ``cp`` and ``ep``, as the training program does.
        finalization: keep gradients, and reduce them in a graph of its own, as a pipeline does after all microbatches.
            Parameters are whole before the forward where they can be.
        device: that the graphs are for. None is CUDA or XPU if torch finds one, and the CPU otherwise. A GPU's graph
            needs a GPU: autograd asks the device for its streams even when tracing. The CPU's graph has the same
            collectives, with attention as ``_scaled_dot_product_flash_attention_for_cpu``.
        loss: computes the loss of the model's outputs, within the graph. None if the model computes it, or if the
            gradients of its outputs shall be inputs of the backward graph.
        compile_options: of :func:`graph_fsdp.compile`; ``param_init_fn`` is not called. ``meshes`` has the names of
            meshes that ``parallelize`` is given, as in ``{Experts: "efsdp"}``: meshes are made here.

    Raises:
        ValueError, TypeError: an argument has a value that cannot be.
        MeshError: the default process group has another size.
        UnsupportedError: torch has no ``device`` here, the model is no single graph (``fullgraph=False``) or cannot be
            built on the meta device.
        All that ``graph_fsdp.compile`` raises, and what the model's forward raises.
    """
    dimensions = find_dimensions(mesh_shape, parallelize, world_size, compile_options)
    own = compile_options.pop("meshes", None)
    if compile_options.get("fullgraph") is False:
        raise UnsupportedError("fullgraph=False: only a model of one graph can be traced; leave fullgraph out")
    target = _device(device)
    inputs = _inputs_on(target, example_inputs)
    model = _built(model_fn, loss)
    compile_options.pop("param_init_fn", None)
    compile_options.setdefault("programs", False)  # a trace says what the passes do
    with _process_group(dimensions.stage_ranks):
        meshes = _meshes(dimensions, target)
        if parallelize is not None and not dimensions.is_plain:
            compile_options |= parallelize(model, meshes) or {}
        if own is not None:
            if compile_options.get("meshes") is not None:
                raise ValueError("meshes: parallelize returns meshes, too; leave one of the two out")
            compile_options["meshes"] = named_meshes(own, meshes)
        _take_memory(model, target)
        compile(model, meshes.get("dp"), **compile_options)
        engine: Any = model.__dict__["_graph_fsdp"]
        engine.run_passes_only = True
        for mesh in meshes.values():
            engine.cost.groups.update(shapes_of_groups(mesh))
        if finalization:
            _keep_gradients(model, engine)
        if (dtype := model.__dict__["_graph_fsdp_called"].inputs) is not None:  # nothing can be cast without memory
            inputs = compat.tree_map_only(Tensor, functools.partial(_in_dtype, dtype), inputs)
        try:
            model(*inputs[0], **inputs[1])
        except PassesHaveRun as end:
            graphs = {graph.phase: graph for graph in end.graphs}
            _check_computes(end.graphs)
            report = inspect(model)
            for phase, graph in graphs.items():
                report.graphs[-1].views[phase].predict_memory = functools.partial(memory_profile, graph, end.context)
            last = _finalization(model) if finalization else None
            regions = None if engine.whole else engine.regions
            return Traced(graphs, end.context, report, last, bool(engine.unsharded.units), regions)
    raise UnsupportedError(_COMPUTES_NOTHING)


def _check_computes(graphs: Sequence[Graph]) -> None:
    if not any(node.op == "call_function" for graph in graphs for node in graph.nodes):
        raise UnsupportedError(_COMPUTES_NOTHING) from None


def _inputs_on(target: torch.device, given: tuple[Any, ...] | Mapping[str, Any]) -> Any:
    """Return positional and keyword inputs, with tensors on a device; without memory where they are not there."""
    if not isinstance(given, (tuple, list, Mapping)):
        raise TypeError(
            "example_inputs must be a tuple of positional inputs or a mapping of keyword inputs, got "
            f"{type(given).__name__}"
        )
    inputs: Any = ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
    return compat.tree_map_only(Tensor, lambda t: t if t.device == target else _without_memory(t, target), inputs)


def _built(model_fn: Callable[[], nn.Module], loss: Callable[[Any], Tensor] | None) -> nn.Module:
    """Build the model, with the loss within its forward."""
    model = built_on_meta(model_fn)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model_fn must return an nn.Module, it returned {type(model).__name__}")
    if loss is not None:
        forward = model.forward
        model.forward = functools.wraps(forward)(lambda *args, **kwargs: loss(forward(*args, **kwargs)))
    return model


def built_on_meta(model_fn: Callable[[], Any]) -> Any:
    """Return what ``model_fn`` returns under ``torch.device("meta")``.

    Raises:
        TypeError: it is a model, and not what builds one, or it needs arguments.
        UnsupportedError: it raises there, as a model does that reads values while it is built.
    """
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        raise TypeError(
            f"model_fn must be a function that builds the model, got {type(model_fn).__name__}; pass the model's "
            "class, or lambda: Model(…)"
        )
    try:
        with torch.device("meta"):
            return model_fn()
    except Exception as error:
        reason = " ".join(str(error).split())
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise TypeError(  # of the call itself
                f"model_fn is called without arguments: {reason}; pass a function that needs none, such as "
                "lambda: Model(…)"
            ) from None
        raise UnsupportedError(
            f"model: cannot be built on the meta device, where tensors have no values: {type(error).__name__}: "
            f"{reason}; let it be built without reading values or moving them to a device"
        ) from error


def find_dimensions(
    mesh_shape: Any, parallelize: Any, world_size: Any, compile_options: Mapping[str, Any]
) -> Dimensions:
    """Return the dimensions of a mesh. Raises TypeError, ValueError and MeshError on anything else, and where what
    divides the model over them is missing. With ``meshes`` the model may have been built with this rank's experts."""
    if "mesh" in compile_options:
        raise TypeError("mesh: there are no ranks here to make it of; give mesh_shape")
    known = {field.name for field in dataclasses.fields(CompileOptions)}
    if unknown := [name for name in compile_options if name not in known]:
        raise TypeError(
            f"{unknown[0]}: there is no such argument here, and no such option of graph_fsdp.compile, which has "
            f"{', '.join(sorted(known))}"
        )
    if parallelize is not None and not callable(parallelize):
        raise TypeError(f"parallelize must be a function of the model and meshes, or None, got {parallelize!r}")
    if (world_size is None) == (mesh_shape is None):
        raise ValueError("mesh_shape or world_size: give one of them")
    if mesh_shape is None:
        if not is_count(world_size):
            raise ValueError(f"world_size must be a number of ranks, 1 or more, got {world_size!r}")
        mesh_shape = (world_size,)
    found = Dimensions.of(mesh_shape)
    if parallelize is None and max(found.cp, found.tp, found.ep if compile_options.get("meshes") is None else 1) > 1:
        raise ValueError(
            f"parallelize: mesh_shape is {found}; give a function (model, meshes) that divides the model over tp, cp "
            "and ep as the training program does (for a model built with a rank's experts, meshes will do)"
        )
    return found


def _meshes(dimensions: Dimensions, device: torch.device) -> dict[str, DeviceMesh]:
    """Make the meshes of one stage. Data parallelism alone has one of no names."""
    if not dimensions.is_plain:
        return dimensions.meshes(device.type)
    return {"dp": init_device_mesh(device.type, dimensions.plain_shape)} if dimensions.ranks > 1 else {}


def _keep_gradients(model: Any, engine: Any) -> None:
    """Set what a pipeline sets (``integrations/pipelining.py``): gradients are kept, and parameters whole."""
    model.set_manual_backward_finalization(True)
    if engine.spec.mesh.world_size > 1 and not engine.unsharded.unavailable():
        for unit, members in engine.unsharded.members.items():
            values = {p.spec.name: (p.spec.shape, p.spec.param_dtype, p.input.device) for p in members}
            engine.unsharded.note_versions(unit)
            engine.unsharded.put(unit, {name: compat.without_memory(*like) for name, like in values.items()})


def _finalization(model: Any) -> tuple[Graph, PassContext] | None:
    try:
        model.finalize_backward()
    except PassesHaveRun as end:
        return end.graphs[0], end.context
    return None


def _device(device: str | torch.device | None) -> torch.device:
    here = torch.accelerator.current_accelerator(check_available=True)
    wanted = torch.device(device) if device is not None else here or torch.device("cpu")
    if wanted.type != "cpu" and (here is None or here.type != wanted.type):
        raise UnsupportedError(
            f"device {str(device)!r}: torch finds none here, and cannot trace a backward for it without; leave "
            "device out to trace for the CPU"
        )
    return torch.empty(0, device=wanted).device  # with its index


def _process_group(world_size: int) -> contextlib.AbstractContextManager[Any]:
    """Use the default process group, which must have as many ranks; without one, a fake one during the call."""
    if not dist.is_initialized():
        return compat.fake_process_group(world_size) if world_size > 1 else contextlib.nullcontext()
    if dist.get_world_size() != world_size:
        raise MeshError(
            f"the mesh has {world_size} ranks and the default process group has {dist.get_world_size()} ranks; plan "
            "before init_process_group or in a process of its own"
        )
    return contextlib.nullcontext()


def _take_memory(model: nn.Module, device: torch.device) -> None:
    """Replace every tensor of the model, also in attributes, by one without memory; shared ones stay shared."""
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # by what is replaced, which is kept alive

    def replacement(value: Tensor) -> Tensor:
        if id(value) not in replaced:
            empty = _without_memory(value, device)
            if isinstance(value, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=value.requires_grad)
                empty.__dict__.update(value.__dict__)
            replaced[id(value)] = value, empty
        return replaced[id(value)][1]

    for module in model.modules():
        for owned in (module._parameters, module._buffers, module.__dict__):
            for name, value in list(owned.items()):
                if isinstance(value, (Tensor, list, tuple)):  # nn.LSTM keeps a list of its parameters
                    owned[name] = compat.tree_map_only(Tensor, replacement, value)


def _without_memory(value: Tensor, device: torch.device) -> Tensor:
    if isinstance(value, DTensor):
        return as_model_uses_it(value)(_without_memory(compat.local_part(value), device))
    if value.numel() <= 1:  # Dynamo reads the values of integer scalars (BatchNorm counts its batches in one)
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    return compat.without_memory(value.shape, value.dtype, device).requires_grad_(_is_input_with_gradient(value))


def _in_dtype(dtype: torch.dtype, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    if value.numel() <= 1:
        return value.to(dtype)
    return compat.without_memory(value.shape, dtype, value.device).requires_grad_(_is_input_with_gradient(value))


def _is_input_with_gradient(value: Tensor) -> bool:
    """Say whether a gradient is computed of a value that is no parameter: what a stage gets from the one before."""
    return value.requires_grad and not isinstance(value, nn.Parameter)
