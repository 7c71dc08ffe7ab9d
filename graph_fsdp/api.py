"""``compile`` is the entry point of the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from graph_fsdp import compat
from graph_fsdp.engine.dynamo import trace_composable_checkpoints
from graph_fsdp.initialise.initial_values import initial_values
from graph_fsdp.initialise.safetensors_files import AnyPath, Safetensors
from graph_fsdp.mesh import DataParallelMesh
from graph_fsdp.module.module import become_compiled, original_forward
from graph_fsdp.options import CompileOptions
from graph_fsdp.parameters.extensions import extend, is_extended, plain
from graph_fsdp.parameters.mixed_precision import ModulePolicies, PrecisionPolicies, find_policies
from graph_fsdp.parameters.placements import ShardPlacementFn
from graph_fsdp.parameters.sharded import owners_of
from graph_fsdp.passes import ActivationCheckpointing, CostModel, GroupShape, PassPipeline, find_hardware
from graph_fsdp.passes.analysis.hardware import detect_hardware
from graph_fsdp.passes.ir.spec import ModelSpec, ParameterSpec, make_model_spec
from graph_fsdp.passes.transforms.activation_checkpointing import Recompute
from graph_fsdp.place import Place, check_model, ignored_parameters, place_on_ranks
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
) -> Model:
    """Shard ``model`` over ``mesh`` and compile it, fully sharded data parallel by graph passes.

    The model is changed in place and returned. Its parameters become DTensors sharded on dimension 0 (scalars are
    replicated) under unchanged names; DTensors that ``parallelize_module`` made over another dimension of the mesh
    become DTensors over both. Make the optimizer afterwards. The model's class becomes a subclass of its own and of
    ``torch.distributed.fsdp.FSDPModule``. Graphs are captured at the first call for each kind of input.

    Args:
        model: has its values on the mesh's device or on the CPU; all or parts of it may be on the meta device. What is
            there is initialised unit by unit on the mesh's device, by each module's ``reset_parameters()`` or by
            ``param_init_fn``, with the random numbers of the mesh's first rank: one seed gives the same values on any
            number of ranks. What has values keeps them.
        mesh: of the model's device type, or of an accelerator for a model on the CPU. One dimension shards parameters,
            or, if its name is "replicate" or "dp_replicate", replicates them (DDP); of two dimensions the first
            replicates and the second shards (HSDP). Further dimensions are recognised by name: ``("dp_replicate",
            "dp_shard", "tp")``; see :mod:`graph_fsdp.mesh`. None means all ranks of ``torchrun``, on the model's device
            (a model on the meta device goes to the accelerator if torch finds one and the process group is not gloo,
            else to the CPU); or one process, whose parameters stay plain tensors. Gradients are means over the mesh.
        auto_wrap_policy: says which parameters are gathered together; see :func:`graph_fsdp.units.find_units`.
        reshard_after_forward: True gathers every unit again in backward (ZeRO-3), False keeps every unit gathered
            (ZeRO-2), None keeps only the unit used last. ``"auto"`` keeps what the pipeline's budget has room for, the
            buckets that save most time per byte: ``passes=default_pipeline(budget=…)``. An int n, as in FSDP2, divides
            the number of ranks that shard: after forward each rank keeps 1/n of every unit, and backward gathers it
            over n consecutive ranks (all ranks means True, 1 means False).
        mp_policy: ``param_dtype`` of gathers and compute, ``reduce_dtype`` of reductions, ``output_dtype`` and
            ``cast_forward_inputs``, for the model and each unit, as in the installed torch's FSDP2. Shards, optimizer
            state and buffers keep their dtype. A dict from module classes to policies, or a function from a module to
            its policy or None, gives modules policies of their own: see :mod:`graph_fsdp.parameters.mixed_precision`.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, their gradients and so the optimizer's state on the CPU, as
            in FSDP2: shards are copied to the device before they are gathered, gradients to the CPU after they are
            reduced. ``pin_memory`` page-locks the CPU's memory for it.
        ignored_params: parameters, or modules with all theirs, that are not sharded nor their gradients reduced.
        shard_placement_fn: a function from a parameter to the dimension on which it is sharded: ``Shard(dim)``, or None
            for dimension 0. Any other dimension must be divisible by the number of ranks that shard.
        activation_checkpointing: says what becomes of the activations that backward needs. ``"unit"`` saves only the
            inputs of each unit but the root, and recomputes the rest in backward. ``"selective"`` also saves the
            results of matrix multiplications, convolutions and attention; a collection of operators, such as
            ``[torch.ops.aten.mm]``, saves theirs instead. A number from 0 to 1 is the partitioner's memory budget, as a
            part of what it saves by itself. ``"offload"`` recomputes nothing, and copies what units save to the CPU and
            back. :class:`ActivationCheckpointing` combines offloading with one of the others. A
            bucket is gathered no more than once in forward and once in backward. ``torch.utils.checkpoint`` in the
            model works with all of these, and alone.
        sync_module_states: give every rank the values (parameters and buffers) of the mesh's first rank; of a parameter
            each rank is sent its shard. On the other ranks all or parts of the model may be on the meta device.
        param_init_fn: initialises one module of a model on the meta device (a Hugging Face model's is
            ``model._init_weights``). As by ``nn.Module.apply`` it is called on each module with anything on the meta
            device in it or below it, children first. It finds the module on the mesh's device, with what is below it in
            its unit, and must write to all of it with torch's operators.
        checkpoint: safetensors files with the values: a path, or a :class:`graph_fsdp.checkpoint.Safetensors`. Each
            rank reads its own rows. Of a model on the meta device, only what the files lack is initialised (buffers
            that are in no state dict).
        passes: a pipeline to use instead of ``graph_fsdp.passes.default_pipeline()``.
        backend: ``"inductor"``; ``"eager"``, which runs the same graphs operator by operator; or ``"xla"``, which runs
            each graph as one program of all devices of an XLA mesh, a torch_xla ``Mesh`` with an axis named ``fsdp``
            (docs/xla.md).
        regions: ``"cut"`` compiles what lies between two collectives, each distinct piece once; collectives run between
            the pieces. ``"whole"`` compiles each graph in one piece, with functional collectives in the same order; it
            needs Inductor, takes longer with every layer, and leaves buffers to Inductor.
        sharding: for ``backend="xla"``. With ``"manual"`` each device runs the graph of its rows, with our collectives
            in the verified order. With ``"auto"`` XLA's partitioner divides the graph of the global batch, as for
            torch_xla's FSDPv2, under constraints in the places of the collectives. With ``"replicas"`` SPMD is off and
            this process (on XLA's CPU client: thread) is one of ``torch_xla.launch``'s, with one device: parameters
            become its rows, plain tensors padded with zeros to ``ceil(rows / n)``.
        shard_output: for ``sharding="auto"``: called with the model's output and ``mesh`` while the model is traced, to
            mark what is to be sharded with torch_xla's ``mark_sharding``. None shards outputs with the batch's rows.
        fullgraph, dynamic: as in ``torch.compile``. For a tensor-parallel model, and with ``cuda_graphs``,
            ``dynamic=None`` means False: each size of inputs has a graph of its own.
        cuda_graphs: on CUDA, run each compute region as a CUDA graph, captured in the third run of a program and
            replayed in later ones. Regions that draw random numbers, communicate, call other graphs or make the host
            wait are left out; ``inspect`` says which. The memory of gathered parameters, of activations and of copies
            of the inputs is then kept between runs. A forward whose predecessor's activations are still alive runs
            without CUDA graphs. Never run on CUDA so far.
        on_host_fallback: for ``backend="xla"``: an operator that XLA lacks would run on the host in every step.
            ``"error"`` refuses it, ``"warn"`` runs it.

    Raises:
        MeshError, MetaDeviceError, AlreadyShardedError, AlreadyCompiledError, UnsupportedError, ValueError, TypeError:
            before anything of the model is changed.
        CheckpointError: the checkpoint cannot be read, or does not fit the model; likewise.
        RankDisagreement: ranks would get their values in different ways; likewise.
    """
    given = locals()
    check_model(model)
    options = CompileOptions(**{field.name: given[field.name] for field in dataclasses.fields(CompileOptions)})
    return _compile(model, mesh, options)


def _compile(model: Model, mesh: DeviceMesh | Any, options: CompileOptions) -> Model:
    policies = find_policies(model, options.mp_policy)
    trace_composable_checkpoints(model)
    ignored = ignored_parameters(model, options.ignored_params)
    names = parameter_names(model)
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
    spec = dataclasses.replace(spec, offload=options.offload(place.device))
    reshard, size = options.reshard_size(spec.world_size)
    groups = place.mesh.group_shapes() if place.mesh is not None else {"": GroupShape(1)}
    if size:
        assert ranks is not None
        spec = dataclasses.replace(spec, reshard_group=ranks.subgroup(size).group_name, reshard_size=size)
        groups[spec.reshard_group] = GroupShape(size, groups[spec.group].stride)
    pipeline, backend = place.pipeline, options.backend
    hardware = detect_hardware(place.device) if pipeline.hardware is None else find_hardware(pipeline.hardware)
    cost = CostModel(hardware, groups, measured=pipeline.measured, fused=backend != "eager", combining=backend == "xla")
    spec = pipeline.arrange(spec, cost)

    originals = {p_names[0]: p for p, p_names in names.items() if p_names[0] in spec.parameters}
    owners = {name: owners_of(model, names[p]) for name, p in originals.items()}
    spec, extensions = extend(spec, originals, owners, ranks, policies.around, place.device)
    originals |= {name: plain(originals[name]) for name in extensions}  # nothing of the model refers to them yet
    storage = place.storage(spec, originals, owners, place.mesh, place.device)
    if storage.has_memory:
        put_values(storage)
    engine = place.engine(
        original_forward(model), spec, storage, place, cost, reshard_after_forward=reshard, fullgraph=options.fullgraph
    )
    engine.extensions = extensions
    if options.cuda_graphs:
        engine.capture_regions(model)
    storage.install(model, options.fullgraph)
    policies.install(name for unit in units for name in unit.modules)
    place.before_compiled(model)
    become_compiled(model, engine, policies, units)
    return model


def _model_spec(
    units: Sequence[Unit], names: Mapping[nn.Parameter, list[str]], place: Place, policies: ModulePolicies
) -> ModelSpec:
    """Return the spec of the parameters of ``units``, in order of registration, which is about the order of use.
    ``names``: parameter → its names."""
    mesh = place.mesh
    world_size = mesh.world_size if mesh is not None else 1
    unit_of = {name: unit.name for unit in units for name in unit.parameters}
    specs = []
    for p, (name, *others) in names.items():
        if name in unit_of:
            param_dtype, reduce_dtype = policies.dtypes_of(p, [name, *others])
            specs.append(
                ParameterSpec(
                    name,
                    unit_of[name],
                    tuple(compat.local_part(p).shape),
                    p.dtype,
                    param_dtype,
                    reduce_dtype,
                    p.requires_grad,
                    world_size,
                    place.shard_dims.get(name, 0),
                    is_extended(p),
                )
            )
    # The modules of one unit are gathered as one, where its first parameter is.
    several = {unit.name for unit in units if len(unit.modules) > 1}
    first = {spec.unit: index for index, spec in reversed(list(enumerate(specs)))}
    places = [first[spec.unit] if spec.unit in several else index for index, spec in enumerate(specs)]
    specs = [specs[index] for index in sorted(range(len(specs)), key=places.__getitem__)]
    spec = make_model_spec(specs, mesh.group if mesh is not None else "", world_size)
    if mesh is None:
        return spec
    return dataclasses.replace(spec, replicate_group=mesh.replicate_group, replicas=mesh.replicas)
