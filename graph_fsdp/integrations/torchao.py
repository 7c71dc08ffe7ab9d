"""Weights that train in float32 or bfloat16 are gathered as MXFP8 or NVFP4, by torchao's functions.

    graph_fsdp.integrations.torchao.gather_in(model, "mxfp8")
    graph_fsdp.compile(model)

torchao's own tensors of these formats (``MXTensor``, ``NVFP4Tensor``) hold what a cast has left and have no extension
for FSDP2; a weight that trains needs its high-precision shard. So a weight becomes a tensor extension around that: what
is gathered is what torchao makes of the shard, its values and the scales of its blocks, and behind the gather they are
dequantized, in the graph. Shards, optimizers and checkpoints have what they had. The same weights work with FSDP2.

Formats are those of the Open Compute Project (Microscaling Formats 1.0) and of NVIDIA. Written for torchao 0.18, in
whose prototypes the functions lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.parameters.placements import as_model_uses_it

Model = TypeVar("Model", bound=nn.Module)
Format = Literal["mxfp8", "nvfp4"]

aten = torch.ops.aten
_WRAPPED = frozenset(  # operators that make a weight of a weight: to copy, move, shard and load it
    (
        *(aten.detach.default, aten.alias.default, aten.clone.default, aten.empty_like.default, aten.new_zeros.default),
        *(aten._to_copy.default, aten.copy_.default, aten.view.default, aten.as_strided.default),
        *(aten.slice.Tensor, aten.split.Tensor),
    )
)


class QuantizedGather(Tensor):
    """A weight that is gathered in another format than it is stored in; to every operator the plain tensor ``data_``.
    ``format``: a name of ``FORMATS``."""

    data_: Tensor
    format: str

    @staticmethod
    def __new__(cls, data: Tensor, format: str) -> QuantizedGather:
        made: QuantizedGather = compat.make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device, requires_grad=data.requires_grad
        )
        return made

    def __init__(self, data: Tensor, format: str) -> None:
        self.data_, self.format = data, format

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedGather({self.data_!r}, {self.format!r})"

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["data_"], self.format

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], format: str, size: Any, stride: Any) -> QuantizedGather:
        return QuantizedGather(inner["data_"], format)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        formats: list[str] = []

        def unwrapped(value: QuantizedGather) -> Tensor:
            formats.append(value.format)
            return value.data_

        given = args
        args, kwargs = compat.tree_map_only(QuantizedGather, unwrapped, (args, kwargs or {}))
        found = func(*args, **kwargs)
        if func is aten.copy_.default:
            return given[0]
        return compat.tree_map_only(Tensor, lambda t: cls(t, formats[0]), found) if func in _WRAPPED else found

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        _check_rows(self.data_, f"a weight of gather_in, {self.format!r},", self.format)
        return FORMATS[self.format].quantize(self.data_, mesh)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        full = FORMATS[self.format].dequantize(outputs, metadata, param_dtype)
        if out is None:
            return full, (full,)
        with torch.no_grad(), compat.preserving_version(out):
            out.copy_(full)
        return None


@dataclass(frozen=True)
class _Format:
    """``block``: elements of the last dimension that share a scale. ``quantize`` makes (what is gathered, metadata) of
    a shard and the mesh that shards, None in one process; ``dequantize`` the parameter."""

    block: int
    quantize: Callable[[Tensor, Any], tuple[tuple[Tensor, ...], Any]]
    dequantize: Callable[[tuple[Tensor, ...], Any, torch.dtype], Tensor]


def _to_mxfp8(shard: Tensor, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
    """float8_e4m3fn, and a power of two in 8 bits for 32 values, rounded up so that none overflows."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scales, values = to_mx(shard.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return (values, scales), None


def _of_mxfp8(outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype) -> Tensor:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    values, scales = outputs
    full: Tensor = to_dtype(values, scales, torch.float8_e4m3fn, 32, dtype)
    return full


def _to_nvfp4(shard: Tensor, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
    """float4_e2m1, two in a byte, a float8_e4m3fn scale for 16 values, and a float32 scale for the whole weight, of the
    largest value that any rank has."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    largest = shard.abs().amax().float()
    if mesh is not None and mesh.size() > 1:
        name = mesh.get_group().group_name
        largest = torch.ops._c10d_functional.all_reduce(largest, "max", name)
        largest = torch.ops._c10d_functional.wait_tensor(largest)
    scale = per_tensor_amax_to_scale(largest).clamp(min=torch.finfo(torch.float32).tiny)
    scales, values = nvfp4_quantize(shard.contiguous(), 16, scale)
    return (values, scales.view(*shard.shape[:-1], -1)), scale


def _of_nvfp4(outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype) -> Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    values, scales = outputs
    full: Tensor = NVFP4Tensor(values, scales, 16, dtype, metadata).dequantize(dtype)
    return full


FORMATS = {"mxfp8": _Format(32, _to_mxfp8, _of_mxfp8), "nvfp4": _Format(16, _to_nvfp4, _of_nvfp4)}


def gather_in(model: Model, format: Format, module_filter_fn: Callable[[nn.Module, str], bool] | None = None) -> Model:
    """Have the weights of ``nn.Linear`` modules gathered in ``format``, and return the model, which is changed. Call it
    before ``graph_fsdp.compile``.

    Args:
        format: ``"mxfp8"``: 8.25 bits an element; ``"nvfp4"``: 4.5 bits an element, and an all-reduce of one number a
            weight, for all weights together, in a forward.
        module_filter_fn: whether the weight of a module with this name is; None: of all linear modules. As of
            ``torchao.float8.convert_to_float8_training``.

    Raises:
        ImportError: torchao is not installed, or has none of these functions.
        ValueError: there is no such format, no weight of it, or a weight whose rows are no whole blocks of 32 (mxfp8)
            or 16 (nvfp4) elements.
        UnsupportedError: a weight is neither float32 nor bfloat16, or a tensor subclass already; tensor-parallel ones
            (DTensors) have these parts on each rank.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be {' or '.join(map(repr, FORMATS))}, got {format!r}")
    _check_torchao()
    found: list[nn.Parameter] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (module_filter_fn is None or module_filter_fn(module, name)):
            p: Any = module.weight
            _check_weight(p, f"{name}.weight" if name else "weight", format)
            found.append(p)
    if not found:
        raise ValueError("module_filter_fn: no nn.Linear of the model is left, so nothing would change")
    made = {p: nn.Parameter(_extended(p, format), requires_grad=p.requires_grad) for p in found}
    for module in model.modules():  # also where a weight is tied
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in made:
                module._parameters[name] = made[parameter]
    return model


def _check_torchao() -> None:
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx  # noqa: F401
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "gather_in takes torchao's functions for MXFP8 and NVFP4, of torchao 0.18; install graph-fsdp[float8]"
        ) from error


def _extended(p: nn.Parameter, format: str) -> Tensor:
    extended = QuantizedGather(compat.local_part(p).detach(), format)
    return as_model_uses_it(p)(extended) if isinstance(p, DTensor) else extended


def _check_weight(p: nn.Parameter, name: str, format: str) -> None:
    part = compat.local_part(p)
    if type(part) not in (Tensor, nn.Parameter):
        raise UnsupportedError(
            f"parameter {name!r} is a {type(part).__name__} already; leave its module out by module_filter_fn"
        )
    if p.dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(
            f"parameter {name!r} is {p.dtype}, of which torchao makes no {format}; cast it to float32"
        )
    _check_rows(part, f"parameter {name!r}", format)


def _check_rows(part: Tensor, said: str, format: str) -> None:
    block = FORMATS[format].block
    if part.shape[-1] % block:
        raise ValueError(
            f"{said} has rows of {part.shape[-1]} elements on this rank, and a scale of {format} is for {block} of a "
            "row; leave its module out by module_filter_fn"
        )
