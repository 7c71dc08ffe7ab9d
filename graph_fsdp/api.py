"""``compile`` is the entry point of the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.initialise.initial_values import initial_values
from graph_fsdp.initialise.safetensors_files import AnyPath, Safetensors
from graph_fsdp.mesh import DataParallelMesh, shapes_of_groups
from graph_fsdp.module.build import Decisions, build
from graph_fsdp.module.copying import let_be_copied
from graph_fsdp.options import CompileOptions
from graph_fsdp.parameters.extensions import is_extended
from graph_fsdp.parameters.meshes import Meshes
from graph_fsdp.parameters.mixed_precision import ModulePolicies, PrecisionPolicies, find_policies
from graph_fsdp.parameters.placements import ShardPlacementFn
from graph_fsdp.parameters.sharded import owners_of
from graph_fsdp.passes import ActivationCheckpointing, CostModel, GroupShape, PassPipeline, find_hardware
from graph_fsdp.passes.analysis.hardware import detect_hardware
from graph_fsdp.passes.ir.spec import MeshSpec, ModelSpec, ParameterSpec, make_model_spec
from graph_fsdp.passes.transforms.activation_checkpointing import Recompute
from graph_fsdp.place import (
    Place,
    check_gradients,
    check_model,
    failures_told,
    ignored_parameters,
    place_on_ranks,
)
from graph_fsdp.units import AutoWrapPolicy, Unit, find_units, parameter_names

Model = TypeVar("Model", bound=nn.Module)


def compile(
    model: Model,
    mesh: DeviceMesh | Any = None,
    *,
    auto_wrap_policy: AutoWrapPolicy | None = None,
    reshard_after_forward: bool | int | Literal["auto"] | None = None,
    mp_policy: PrecisionPolicies = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # frozen
    ignored_params: Iterable[nn.Parameter | nn.Module] | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    meshes: Meshes | None = None,
    dp_mesh_dims: Any = None,
    activation_checkpointing: ActivationCheckpointing | Recompute | Literal["offload"] = None,
    sync_module_states: bool = False,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    checkpoint: Safetensors | AnyPath | Sequence[AnyPath] | None = None,
    passes: PassPipeline | None = None,
    backend: str = "inductor",
    regions: Literal["cut", "whole"] = "cut",
    sharding: Literal["manual", "auto", "replicas"] = "manual",
    shard_output: Callable[[Any, Any], Any] | None = None,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    cuda_graphs: bool = False,
    on_host_fallback: Literal["error", "warn"] = "error",
    programs: AnyPath | Literal[False] | None = None,
) -> Model:
    """Shard ``model`` over ``mesh`` and compile it, fully sharded data parallel by graph passes.

    The model is changed in place and returned; its class becomes a subclass of its own and of
    ``torch.distributed.fsdp.FSDPModule``. Its parameters become DTensors sharded on dimension 0 (scalars are
    replicated) under unchanged names, tensor-parallel ones DTensors over both meshes: make the optimizer afterwards.
    Graphs are captured at the first call for each kind of input.

    Args:
        model: on the mesh's device or the CPU. What of it is on the meta device is initialised unit by unit on the
            mesh's device, by each module's ``reset_parameters()`` or ``param_init_fn``, with the random numbers of the
            mesh's first rank: one seed gives the same values on any number of ranks. What has values keeps them. On
            an accelerator its forward, as FSDP2's, copies tensors of the CPU in its arguments there.
        mesh: one dimension shards parameters, of two the first replicates and the second shards (HSDP), and names say
            more: see :mod:`graph_fsdp.mesh`. None means all ranks of ``torchrun``, on the model's device (of a model on
            the meta device the accelerator, without one or with gloo the CPU); or one process, whose parameters stay
            plain tensors. Gradients are means over the mesh.
        auto_wrap_policy: says which modules are units, whose parameters are gathered together: a set of module classes;
            a list of modules, in which a tuple is one unit of several; or one of torch's wrap policies. None: repeated
            blocks are. See :func:`graph_fsdp.units.find_units`.
        reshard_after_forward: True gathers every unit again in backward (ZeRO-3), False keeps every unit gathered
            (ZeRO-2), None keeps only the unit used last, and without a budget the one before it where an accelerator
            would wait for it in backward; ``"auto"`` what a budget has room for, the buckets that save most time per
            byte: ``passes=default_pipeline(budget=…)``. With an int n, as in FSDP2, each rank keeps 1/n of every unit,
            and backward gathers it over n consecutive ranks (all ranks means True, 1 means False).
        mp_policy: FSDP2's policy, for the model and each unit; or a dict from module classes to policies, or a function
            from a module to its policy or None: see :mod:`graph_fsdp.parameters.mixed_precision`. Shards, optimizer
            state and buffers keep their dtype. A ``reduce_dtype`` of int8 or float8 quantizes gradients on their way:
            see docs/low_precision.md.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and so the optimizer's state on the CPU.
        ignored_params: parameters, or modules with all theirs, that are not sharded nor their gradients reduced.
        shard_placement_fn: a function from a parameter to the dimension on which it is sharded: ``Shard(dim)``, or None
            for dimension 0. Any other dimension must be divisible by the number of ranks that shard. Or torch's
            ``ShardPlacementResult``, with a mesh for this parameter.
        meshes: classes of modules, or modules → the mesh of their parameters (``{Experts: mesh["dp_shard", …]}``), or a
            function from a parameter to its mesh, or None: for the model's. It has ranks of the model's mesh, by whose
            number of ranks gradients are divided: see :mod:`graph_fsdp.parameters.meshes`.
        dp_mesh_dims: torch's ``DataParallelMeshDims(shard=…, replicate=…)`` (torch 2.13): which dimensions of ``mesh``
            shard and which replicate, whatever their names. Several of a kind become one (``("dp_shard", "cp")``).
        activation_checkpointing: ``"offload"``, an :class:`ActivationCheckpointing`, or its ``recompute`` alone. Where
            it recomputes nothing, ``torch._functorch.config.activation_memory_budget`` is taken, if it is set.
        sync_module_states: gives every rank the values (parameters and buffers) of the mesh's first rank; of a
            parameter each is sent its shard. On the other ranks the model may be on the meta device.
        param_init_fn: initialises one module of a model on the meta device (a Hugging Face model's is
            ``model._init_weights``), called as by ``nn.Module.apply``, children first. It finds the module on the
            mesh's device, with what is below it in its unit, and must write to all of it with torch's operators.
        checkpoint: safetensors files with the values: a path, or a :class:`graph_fsdp.checkpoint.Safetensors`. Each
            rank reads its own rows; of a model on the meta device, only what the files lack is initialised.
        passes: a pipeline to use instead of ``graph_fsdp.passes.default_pipeline()``.
        backend: ``"inductor"``; ``"eager"``, which runs the same graphs operator by operator; or ``"xla"``.
        regions: ``"cut"`` compiles what lies between two collectives, each distinct piece once. ``"whole"`` compiles
            each graph in one piece, with functional collectives in the same order; it needs Inductor, takes longer with
            every layer, and leaves buffers to Inductor.
        sharding, shard_output, on_host_fallback: for ``backend="xla"``: see docs/xla.md.
        fullgraph, dynamic: as in ``torch.compile``. For a tensor-parallel model, and with ``cuda_graphs``,
            ``dynamic=None`` means False: each size of inputs has a graph of its own.
        cuda_graphs: on CUDA, run each compute region that can be captured (``inspect`` says which) as a CUDA graph. The
            memory of gathered parameters, activations and copies of inputs is kept between runs.
        programs: a folder in which graphs after the passes are kept for later starts, and those of earlier ones, and
            of :func:`graph_fsdp.precompile`, are found: see :mod:`graph_fsdp.programs`. None is a folder in Inductor's
            cache, with ``backend="inductor"`` and unless ``GRAPH_FSDP_PROGRAMS=0`` is set. False keeps and finds none.

    Raises:
        MeshError, MetaDeviceError, AlreadyShardedError, AlreadyCompiledError, UnsupportedError, ValueError, TypeError,
        CheckpointError, RankDisagreement: before anything of the model is changed.
    """
    given = locals()
    with torch.inference_mode(False), failures_told(mesh, dp_mesh_dims):  # shards made in that mode cannot be trained
        check_model(model)
        options = CompileOptions(**{field.name: given[field.name] for field in dataclasses.fields(CompileOptions)})
        return _compile(model, mesh, options)


def _compile(model: Model, mesh: DeviceMesh | Any, options: CompileOptions) -> Model:
    policies = find_policies(model, options.mp_policy)
    policies.check_quantized(
        **{"backend='xla'": options.backend == "xla", "regions='whole'": options.regions == "whole"}
    )
    ignored = ignored_parameters(model, options.ignored_params)
    names = parameter_names(model)
    check_gradients(names, ignored)
    units = find_units(model, options.auto_wrap_policy, ignored)
    if options.backend == "xla":
        from graph_fsdp.xla.compile import place_on_xla

        place = place_on_xla(mesh, names, options)
    else:
        place = place_on_ranks(model, mesh, names, ignored, options)
    ranks = place.mesh if isinstance(place.mesh, DataParallelMesh) else None
    gathered = {module for unit in units if unit.parameters for module in unit.modules.values()}
    put_values = initial_values(model, gathered, place, options)
    spec = _model_spec(units, names, place, policies)
    policies.check_sharded(spec)
    spec = dataclasses.replace(spec, offload=options.offload(place.device))
    reshard, size = options.reshard_size(spec.mesh.world_size)
    groups = place.mesh.group_shapes() if place.mesh is not None else {"": GroupShape(1)}
    if ranks is not None:  # and those of tensor and expert parallelism
        for p in names:
            groups |= shapes_of_groups(p.device_mesh) if isinstance(p, DTensor) else {}
    if size:
        assert ranks is not None
        spec = dataclasses.replace(spec, reshard_group=ranks.subgroup(size).group_name, reshard_size=size)
        groups[spec.reshard_group] = GroupShape(size, groups[spec.mesh.group].stride)
    pipeline, backend = place.pipeline, options.backend
    hardware = detect_hardware(place.device) if pipeline.hardware is None else find_hardware(pipeline.hardware)
    cost = CostModel(hardware, groups, measured=pipeline.measured, fused=backend != "eager", combining=backend == "xla")
    spec = pipeline.arrange(spec, cost)

    decisions = Decisions(place, spec, policies, units, cost, reshard, options.fullgraph, options.cuda_graphs)
    originals = {p_names[0]: p for p, p_names in names.items() if p_names[0] in spec.parameters}
    build(model, decisions, originals, {name: owners_of(model, names[p]) for name, p in originals.items()}, put_values)
    let_be_copied(model, decisions)
    return model


def _model_spec(
    units: Sequence[Unit], names: Mapping[nn.Parameter, list[str]], place: Place, policies: ModulePolicies
) -> ModelSpec:
    """Return the spec of the parameters of ``units``, in order of registration, which is about the order of use.
    ``names``: parameter → its names."""
    mesh = place.mesh.spec if place.mesh is not None else MeshSpec("", "", 1)
    own = {n: m.own_spec for n, m in place.mesh.own.items()} if isinstance(place.mesh, DataParallelMesh) else {}
    unit_of = {name: unit.name for unit in units for name in unit.parameters}
    specs = []
    for p, (name, *others) in names.items():
        if name in unit_of:
            if name in place.quantized:
                p = place.quantized[name].sharded
            param_dtype, reduce_dtype, sent_as = policies.dtypes_of(p, [name, *others])
            specs.append(
                ParameterSpec(
                    name,
                    unit_of[name],
                    tuple(compat.local_part(p).shape),
                    p.dtype,
                    param_dtype,
                    reduce_dtype,
                    p.requires_grad,
                    own.get(name, mesh),
                    place.shard_dims.get(name, 0),
                    is_extended(p),
                    sent_as,
                )
            )
    # The modules of one unit are gathered as one, where its first parameter is.
    several = {unit.name for unit in units if len(unit.modules) > 1}
    first = {spec.unit: index for index, spec in reversed(list(enumerate(specs)))}
    places = [first[spec.unit] if spec.unit in several else index for index, spec in enumerate(specs)]
    specs = [specs[index] for index in sorted(range(len(specs)), key=places.__getitem__)]
    return make_model_spec(specs, mesh)
