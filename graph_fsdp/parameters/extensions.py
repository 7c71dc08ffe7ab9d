"""FSDP2's tensor extensions are parameters of a subclass that says what is gathered of them, and what that becomes.

``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` are traced into the graphs (``passes/transforms/sources.py``), so
they must do the same at every call, on every rank. They may communicate by an all-reduce over the ranks that shard, and
in no other way. Shards themselves are plain tensors, for optimizers and checkpoints.

What ``fsdp_post_all_gather`` makes may be a tensor subclass (torchao's float8 training tensor is one). Dynamo, and
Python code of the model, see a plain parameter; AOTAutograd traces the subclass's operators. Of a tensor-parallel
parameter all of this holds for each rank's part, of which the graph makes a DTensor.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.mesh import DataParallelMesh
from graph_fsdp.parameters.placements import as_model_uses_it
from graph_fsdp.parameters.sharded import Owners
from graph_fsdp.passes.ir.dialect import gather_param, reduce_grad, reduce_payloads
from graph_fsdp.passes.ir.spec import HOST, MeshSpec, ModelSpec, Offload, ParameterSpec, named_buckets, unit_runs

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(parameter: Tensor) -> bool:
    """Say whether a parameter, or this rank's part of a tensor-parallel one, is a tensor extension."""
    part = compat.local_part(parameter)
    return hasattr(part, _PRE) or hasattr(part, _POST)


def plain(parameter: Tensor) -> nn.Parameter:
    """Return a parameter of the tensor that an extended one wraps, a DTensor if it is one; the same memory."""
    part: Any = compat.local_part(parameter)
    (attribute,), _ = part.__tensor_flatten__()
    value = getattr(part, attribute).detach()
    if isinstance(parameter, DTensor):
        value = as_model_uses_it(parameter)(value)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def check_extensions(names: dict[nn.Parameter, list[str]], **unsupported: bool) -> None:
    """Refuse extended parameters that cannot be gathered, or not with an option. ``unsupported``: option → is set."""
    for parameter, (name, *_) in names.items():
        p: Any = compat.local_part(parameter)
        what = f"parameter {name!r} is a {type(p).__name__}"
        if not is_extended(p):
            if isinstance(parameter, DTensor) and hasattr(p, "__tensor_flatten__"):
                raise UnsupportedError(
                    f"{what} on each rank of tensor parallelism; give it {_PRE} and {_POST}, make its parts plain "
                    "tensors, or leave the tensor parallelism out"
                )
            continue
        if not (hasattr(p, _PRE) and hasattr(p, _POST)):
            raise ValueError(f"{what}, which has one of {_PRE} and {_POST}; define both")
        if len(inspect.signature(getattr(p, _PRE)).parameters) not in (1, 5):
            raise ValueError(
                f"{what}: {_PRE} must take (mesh) or (mesh, outer_size, outer_stride, module, mp_policy), it takes "
                f"{inspect.signature(getattr(p, _PRE))}"
            )
        if not hasattr(p, "__tensor_flatten__"):
            raise UnsupportedError(f"{what} without __tensor_flatten__ and __tensor_unflatten__; define both")
        unflatten = inspect.signature(p.__tensor_unflatten__)
        try:
            unflatten.bind({}, None, (), ())
        except TypeError:
            raise UnsupportedError(
                f"{what} whose __tensor_unflatten__ takes {unflatten}; graphs call it as torch.compile does: define it "
                "with (inner_tensors, metadata, outer_size, outer_stride)"
            ) from None
        inner = [getattr(p, attribute) for attribute in p.__tensor_flatten__()[0]]
        if [(t.shape, t.dtype) for t in inner] != [(p.shape, p.dtype)] or type(inner[0]) not in (Tensor, nn.Parameter):
            raise UnsupportedError(
                f"{what}, which wraps {len(inner)} tensors; what is sharded is one plain tensor of the parameter's own "
                "shape and dtype, of which the extension computes what is gathered"
            )
        for option, is_set in unsupported.items():
            if is_set:
                raise UnsupportedError(f"{what} with {_PRE}, which is not available with {option}; leave one out")


def check_extended_rows(shard_dims: Mapping[str, int], names: Mapping[nn.Parameter, Sequence[str]]) -> None:
    """Refuse extended parameters that ``shard_placement_fn`` shards on another dimension than the first."""
    for p, (name, *_) in names.items():
        if shard_dims.get(name) and is_extended(p):
            raise UnsupportedError(
                f"shard_placement_fn: parameter {name!r} is to be sharded on dimension {shard_dims[name]}, and its "
                f"{_PRE} is given rows; return Shard(0) or None for it"
            )


class ExtendedGather(nn.Module):
    """Makes a full parameter of a shard, as a module of the captured graph."""

    def __init__(
        self,
        p: ParameterSpec,
        parameter: Tensor,
        owner: nn.Module,
        mesh: DataParallelMesh | None,
        policy: MixedPrecisionPolicy,
        offload: Offload | None,
    ) -> None:
        super().__init__()
        self.spec, self.policy = p, policy
        # Where shards are kept on the CPU: the copy on the device, and the devices of the copy and of the gradient.
        self.fetched = None if offload is None else _of_this_rank(p)
        self.devices = (None, None) if offload is None else (offload.device, HOST)
        part: Any = compat.local_part(parameter)
        (self.attribute,), self.context = part.__tensor_flatten__()
        self.subclass = type(part)
        # Not as submodules: the graph has their parameters as inputs of its own.
        self.__dict__["outside"] = (owner, _mesh_of_shards(mesh))
        self.payloads: tuple[ParameterSpec, ...] = ()

    def of_copy(self, owner: nn.Module) -> ExtendedGather:
        """Return what does the same in a copy of the model, where ``owner`` has the parameter."""
        copied = copy.copy(self)
        copied.__dict__["outside"] = (owner, self.__dict__["outside"][1])
        return copied

    def forward(self, shard: Tensor) -> Tensor:
        full: Tensor = _GatherByExtension.apply(shard, self)
        return full

    def local(self, shard: Tensor) -> Any:
        return self.subclass.__tensor_unflatten__({self.attribute: shard}, self.context, shard.shape, shard.stride())

    def pre(self, local: Any, shard: Tensor) -> tuple[list[Tensor], list[torch.dtype], Any]:
        """Return the payloads, at least one-dimensional and each in memory of its own, their dtypes, and the metadata.
        Those of different dtypes of one byte are bytes, so that one message gathers values and scales."""
        owner, mesh = self.__dict__["outside"]
        arguments = [mesh]
        if len(inspect.signature(local.fsdp_pre_all_gather).parameters) == 5:
            size = torch.Size(self.spec.shape)
            arguments += [size, tuple(torch.empty(size, device="meta").stride()), owner, self.policy]
        group = self.spec.mesh.group
        with compat.traceable_all_reduces(group), _OwnCollectives(self.spec.name, group):
            inputs, metadata = local.fsdp_pre_all_gather(*arguments)
        payloads: list[Tensor] = []
        for value in inputs:
            value = value.contiguous().reshape(-1) if value.dim() == 0 else value.contiguous()
            payloads.append(value.clone() if value is shard or any(value is other for other in payloads) else value)
        dtypes = [value.dtype for value in payloads]
        if len({dtype for dtype in dtypes if dtype.itemsize == 1}) > 1:
            payloads = [_viewed(value, torch.uint8) if value.itemsize == 1 else value for value in payloads]
        return payloads, dtypes, metadata

    def post(self, local: Any, gathered: Sequence[Tensor], dtypes: Sequence[torch.dtype], metadata: Any) -> Tensor:
        outputs = tuple(map(_viewed, gathered, dtypes))
        with _OwnCollectives(self.spec.name, None):
            full: Tensor = local.fsdp_post_all_gather(outputs, metadata, self.spec.param_dtype)[0]
        return full if full.shape[0] == self.spec.shape[0] else full[: self.spec.shape[0]]

    def trace(self, device: torch.device) -> tuple[ParameterSpec, ...]:
        """Run both methods on fake tensors, and return what is gathered, as parameters.

        Raises:
            UnsupportedError: they communicate otherwise than by an all-reduce over the ranks that shard, before the
                gather; or what they gather is no plain tensor. Other errors of theirs pass.
        """
        p = self.spec
        with compat.FakeTensorMode():
            shard = torch.empty(p.shard_shape, dtype=p.dtype, device=device)
            local = self.local(shard)
            payloads, dtypes, metadata = self.pre(local, shard)
            if any(type(v) not in (Tensor, compat.FakeTensor) for v in payloads):
                raise UnsupportedError(f"{_PRE} of parameter {p.name!r} must return plain tensors to gather")
            whole = [v.new_empty((v.shape[0] * p.world_size, *v.shape[1:])) for v in payloads]
            full = self.post(local, whole, dtypes, metadata)
        traceable: bool = compat.is_traceable_wrapper_subclass(full)
        if type(full) not in (Tensor, compat.FakeTensor) and not traceable:
            raise UnsupportedError(
                f"{_POST} of parameter {p.name!r} makes a {type(full).__name__} without __tensor_flatten__ and "
                "__tensor_unflatten__, which cannot be traced; define both"
            )
        found, due = (tuple(full.shape), full.dtype), (p.shape, p.param_dtype)
        if found != due:
            raise ValueError(
                f"{_POST} of parameter {p.name!r} makes {found[1]}{list(found[0])}, not {due[1]}{list(due[0])}"
            )
        return tuple(
            ParameterSpec(f"{p.name}#{index}", p.unit, tuple(v.shape), v.dtype, v.dtype, v.dtype, False, p.mesh)
            for index, v in enumerate(whole)
        )


def _of_this_rank(p: ParameterSpec) -> ParameterSpec:
    """Return the shard of a parameter as a parameter that this rank alone has."""
    name, alone = f"{p.name}#shard", MeshSpec("", "", 1)
    return ParameterSpec(name, p.unit, p.shard_shape, p.dtype, p.dtype, p.dtype, trainable=False, mesh=alone)


def _viewed(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype is dtype else value.view(dtype)


class _GatherByExtension(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, extension: ExtendedGather) -> Tensor:
        ctx.extension, ctx.shard_shape, ctx.dtype = extension, list(shard.shape), shard.dtype
        if (p := extension.fetched) is not None:
            own = (p.name, p.mesh.group, p.mesh.replicate_group)
            shard = gather_param(shard, list(p.shape), p.dtype, p.dtype, *own, extension.devices[0])
        local = extension.local(shard)
        payloads, dtypes, metadata = extension.pre(local, shard)
        gathered = [
            gather_param(value, list(p.shape), p.dtype, p.dtype, p.name, p.mesh.group)
            for value, p in zip(payloads, extension.payloads, strict=True)
        ]
        return extension.post(local, gathered, dtypes, metadata)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        p: ParameterSpec = ctx.extension.spec
        options = (p.reduce_dtype, p.name, p.mesh.group, p.mesh.replicate_group, ctx.extension.devices[1])
        return reduce_grad(grad, ctx.shard_shape, ctx.dtype, *options), None


class _OwnCollectives(compat.TorchDispatchMode):
    """Turns traceable all-reduces over ``group`` into the dialect's, and refuses all else that communicates."""

    def __init__(self, name: str, group: str | None) -> None:
        super().__init__()
        self.name, self.group = name, group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            return func(*args, **(kwargs or {}))
        functional = torch.ops._c10d_functional
        if func is functional.wait_tensor.default:  # what it waits for is there
            return args[0]
        if func is functional.all_reduce.default and self.group and args[2] == self.group:
            value, op, group = args
            return reduce_payloads([value], op, group).reshape(value.shape)
        raise UnsupportedError(
            f"the extension of parameter {self.name!r} communicates ({func}): ranks could start that in another "
            f"order than their gathers; {_PRE} may all-reduce over the ranks that shard, and nothing else"
        )


def extend(
    spec: ModelSpec,
    originals: dict[str, nn.Parameter],
    owners: dict[str, Owners],
    mesh: DataParallelMesh | None,
    policy_of: Callable[[str], MixedPrecisionPolicy],
    device: torch.device,
) -> tuple[ModelSpec, dict[str, ExtendedGather]]:
    """Return the model with the payloads of its extended parameters, in buckets, and what gathers each parameter."""
    gathers = {
        name: ExtendedGather(
            spec.parameters[name],
            p,
            owners[name][0][0],
            mesh and mesh.of_parameter(name),
            policy_of(name),
            spec.offload,
        )
        for name, p in originals.items()
        if spec.parameters[name].extended
    }
    for gather in gathers.values():
        gather.payloads = gather.trace(device)
    payloads = {p.name: p for gather in gathers.values() for p in (gather.fetched, *gather.payloads) if p is not None}
    runs = ((f"{run[0].unit or 'root'}#payload", run) for run in unit_runs(payloads.values()))
    buckets = (*spec.buckets, *named_buckets(runs))
    return dataclasses.replace(spec, payloads=payloads, buckets=buckets), gathers


def _mesh_of_shards(mesh: DataParallelMesh | None) -> Any:
    """Return the dimension that shards, as FSDP2 gives it to extensions; None in one process."""
    if mesh is None or mesh.mesh.ndim == 1:
        return None if mesh is None else mesh.mesh
    if mesh.mesh.mesh_dim_names is None:
        raise UnsupportedError(
            "mesh has two dimensions without names, and a tensor extension is given the one that shards; make the mesh "
            "with mesh_dim_names"
        )
    return mesh.mesh[mesh.mesh.mesh_dim_names[-1]]
