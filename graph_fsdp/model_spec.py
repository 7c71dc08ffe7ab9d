"""What the passes are told of a model and of the machine, from its units and its mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from graph_fsdp import compat
from graph_fsdp.mesh import Mesh
from graph_fsdp.parameters.extensions import is_extended
from graph_fsdp.parameters.mixed_precision import ModulePolicies
from graph_fsdp.passes import CostModel, GroupShape, PassPipeline, find_hardware
from graph_fsdp.passes.analysis.hardware import detect_hardware
from graph_fsdp.passes.ir.spec import ModelSpec, ParameterSpec, make_model_spec
from graph_fsdp.units import Unit


def model_spec(
    units: Sequence[Unit],
    names: Mapping[nn.Parameter, list[str]],
    mesh: Mesh | None,
    policies: ModulePolicies,
    shard_dims: Mapping[str, int],
) -> ModelSpec:
    """The parameters of ``units``, in order of registration, which is about the order of use. ``names``: parameter →
    its names. ``mesh``: None for one process. ``shard_dims``: name → the dimension that is sharded, where it is not
    the first."""
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
                    shard_dims.get(name, 0),
                    is_extended(p),
                )
            )
    specs = _together(specs, units)
    spec = make_model_spec(specs, mesh.group if mesh is not None else "", world_size)
    if mesh is None:
        return spec
    return dataclasses.replace(spec, replicate_group=mesh.replicate_group, replicas=mesh.replicas)


def _together(specs: list[ParameterSpec], units: Sequence[Unit]) -> list[ParameterSpec]:
    """What lies in several modules of one unit is gathered as one: where its first parameter is."""
    several = {unit.name for unit in units if unit.others}
    first: dict[str, int] = {}
    for index, spec in enumerate(specs):
        first.setdefault(spec.unit, index)
    places = [first[spec.unit] if spec.unit in several else index for index, spec in enumerate(specs)]
    return [spec for _, spec in sorted(zip(places, specs, strict=True), key=lambda pair: pair[0])]


def cost_model(
    pipeline: PassPipeline, groups: Mapping[str, GroupShape], device: torch.device, backend: str
) -> CostModel:
    """Seconds of kernels and collectives on the hardware that the pipeline names, or else on the ``device`` found."""
    hardware = detect_hardware(device) if pipeline.hardware is None else find_hardware(pipeline.hardware)
    return CostModel(hardware, groups, measured=pipeline.measured, fused=backend != "eager", combining=backend == "xla")
