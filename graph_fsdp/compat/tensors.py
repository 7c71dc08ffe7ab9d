"""The private names of torch for operators as objects, DTensors, fake tensors and tensors' memory are used here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch._decomp import get_decompositions as get_decompositions
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
from torch.fx.experimental.symbolic_shapes import free_symbols as free_symbols
from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor
from torch.nn.attention import _cur_sdpa_kernel_backends
from torch.optim import _muon
from torch.utils import _pytree, dlpack
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.flop_counter import flop_registry as flop_registry

pytree = _pytree  # its functions for values of any structure: lists, dicts, dataclasses

chunk_cat: Callable[..., Any] = torch._chunk_cat
foreach_copy: Callable[..., Any] = torch._foreach_copy_
foreach_add: Callable[..., Any] = torch._foreach_add_
foreach_mul: Callable[..., Any] = torch._foreach_mul_
flattened: Callable[..., torch.Tensor] = torch._utils._flatten_dense_tensors  # all tensors, one behind the other
newton_schulz: Callable[..., torch.Tensor] = _muon._zeropower_via_newtonschulz  # of a whole matrix
adjusted_muon_lr: Callable[..., Any] = _muon._adjust_lr
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
preserving_version: Callable[..., Any] = torch.autograd._unsafe_preserve_version_counter
set_grad_enabled: Callable[..., Any] = torch._C._set_grad_enabled
log_api_usage: Callable[..., Any] = torch._C._log_api_usage_once

# As torch's own CUDA graph trees do before and after each capture.
clear_cublas_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)

_functorch: Any = torch._C._functorch

# Operators on tensor subclasses run as on plain tensors.
without_torch_function: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass

_from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack

# Exchanges all of two tensors but their Python objects. ``torch.utils.swap_tensors`` would exchange classes and
# attributes too, and refuses what has weak references (those of ``nn.LSTM`` to its parameters).
swap: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl

# Returns a tensor in another one's memory, by sizes, strides, and where in it (in elements) it begins: a view that
# autograd knows nothing of, and that nobody checks.
_guards: Any = torch._C._dynamo.guards
reinterpreted: Callable[..., torch.Tensor] = _guards._reinterpret_tensor

# Whether a tensor's ``data`` may be another one: not the CPU's for a meta tensor, nor that of a device in PrivateUse1.
can_be_data: Callable[[torch.Tensor, torch.Tensor], bool] = torch._has_compatible_shallow_copy_type


def schema_arguments(operator: OpOverload[..., Any]) -> list[Any]:
    """Return an operator's arguments, each with ``name`` and ``default_value``."""
    return list(operator._schema.arguments)


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share a storage, fake ones too, as long as one of them lives. What
    ``torch.func`` wraps, as ``vmap`` does, has the storage of the tensor that it maps over."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)


# 2.9 has it under another name.
_hint: Callable[..., int] = next(
    getattr(symbolic_shapes, name) for name in ("optimization_hint", "hint_int") if hasattr(symbolic_shapes, name)
)

# A size that only the data decides (what ``nonzero`` returns) counts as this many elements.
UNBACKED_HINT = 1024


def size_hint(size: int | torch.SymInt) -> int:
    """Return the size itself, or the value that a symbolic size had when it was traced. Guards on nothing."""
    return size if isinstance(size, int) else int(_hint(size, fallback=UNBACKED_HINT))


def with_sizes_of(node: torch.fx.Node, mode: Any, compute: Callable[[], Any]) -> Any:
    """Return what ``compute`` does with fake tensors, with the sizes that only data decides named as in a node's value,
    which was computed of the same inputs before."""
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        value = compute()
        symbolic_shapes.rebind_unbacked(mode.shape_env, node, value)
    return value


def unify_sizes(value: Any, same: Any) -> None:
    """Replace sizes of a value that only data decides by those of one that is computed alike, in all values of their
    trace."""
    for one, other in zip(pytree.tree_leaves(value), pytree.tree_leaves(same), strict=True):
        sizes = zip(one.shape, other.shape, strict=True) if isinstance(one, torch.Tensor) else [(one, other)]
        for size, target in sizes:
            if isinstance(size, torch.SymInt) and isinstance(target, torch.SymInt):
                one_size, same_size = size.node.expr, target.node.expr
                if one_size.is_symbol and one_size != same_size:
                    size.node.shape_env._set_replacement(one_size, same_size, "computed alike")


def local_shape_and_offset(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the rank's part of a DTensor, and where it begins in the whole tensor."""
    assert isinstance(tensor, DTensor)
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank's part of a DTensor, outside autograd (``to_local`` would record an op); any other tensor
    itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``local_part`` of each."""
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange all of two tensors but their Python objects; of two DTensors their parts on this rank too."""
    swap(one, other)
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        one._local_tensor, other._local_tensor = other._local_tensor, one._local_tensor
        one._spec, other._spec = other._spec, one._spec


def writes_to(tensor: torch.Tensor) -> tuple[int, int]:
    """Return torch's numbers of writes: to the tensor, and to the rank's part of a DTensor, which has one of its own.
    What was made in inference mode has none."""
    part = local_part(tensor)
    return 0 if tensor.is_inference() else tensor._version, 0 if part.is_inference() else part._version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set what autograd compares to see that what it has saved was written since."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def set_local_tensor(parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Make ``local`` the memory of a DTensor parameter (same shape, dtype and device as before)."""
    assert isinstance(parameter, DTensor)
    parameter._local_tensor = local


def make_dtensor(local: torch.Tensor, like: torch.Tensor) -> DTensor:
    """Return a DTensor of ``local``, placed and shaped as ``like``, without the checks of ``DTensor.from_local``, which
    cost more than the gradient of a small parameter, and without the constructor, which does nothing."""
    any_like: Any = like
    return DTensor.__new__(DTensor, local, any_like._spec, requires_grad=False)


def is_placed_like(value: torch.Tensor, like: torch.Tensor) -> bool:
    """Say whether a gradient is a DTensor with a parameter's mesh, placements and sizes, and no history."""
    if not isinstance(value, DTensor) or not isinstance(like, DTensor) or value.requires_grad:
        return False
    return value._spec is like._spec or value._spec == like._spec


def parts_of_gradients(parameters: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor | None]:
    """Return the rank's parts of the gradients of parameters, each given with its own part: None for a gradient that is
    not there, or is not placed as the parameter and of its dtype, or for a parameter that has another part now."""
    found: list[torch.Tensor | None] = []
    for p, local in parameters:
        grad: Any = p.grad
        part = None
        if isinstance(p, DTensor):
            if isinstance(grad, DTensor) and p._local_tensor is local:
                part = grad._local_tensor
                # Where both have one description, backward has made it.
                if grad._spec is not p._spec and (grad._spec != p._spec or part.dtype is not local.dtype):
                    part = None
        elif p is local and type(grad) is torch.Tensor and grad.layout is torch.strided and grad.dtype is local.dtype:
            part = grad
        found.append(part)
    return found


def forget_fake_values(shape_envs: Iterable[Any]) -> None:
    """Drop what torch remembers of fake tensors: caches of all models, which are filled again, and what ``shape_envs``
    hold. Torch would keep these for good: their fake tensors have their symbols as sizes, in C++, where the garbage
    collector does not find the cycle."""
    FakeTensorMode.cache_clear()
    for cached in vars(ShapeEnv).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    for shape_env in shape_envs:
        getattr(shape_env, "fake_tensor_cache", {}).clear()
        shape_env.tracked_fakes = None


def change_when_read(value: torch.Tensor, conjugated: bool, negated: bool) -> None:
    """Say of a tensor that its values are conjugated, or negated, when they are read."""
    torch._C._set_conj(value, conjugated)
    torch._C._set_neg(value, negated)


def fake_tensor(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    memory: torch.Tensor | None,
    offset: int,
) -> torch.Tensor:
    """Make a fake tensor without running an operator, in the memory of another (offset and strides in elements) or in
    its own, as FakeTensorMode makes the value of a call that it has seen before."""
    with torch._C._DisableTorchDispatch():  # no mode sees what is made on the meta device
        if memory is None:
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=dtype, device="meta").set_(memory.untyped_storage(), offset, shape, stride)
    if device not in _FAKE:
        made: Any = FakeTensor(mode, meta, device)
        _FAKE[device] = made.fake_device, {name: value for name, value in vars(made).items() if name != "fake_mode"}
        return cast(torch.Tensor, made)
    # The constructor takes three times as long.
    there, attributes = _FAKE[device]
    make: Any = torch.Tensor._make_subclass
    made = make(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=there)
    unsafe = mode._allow_unsafe_data_ptr_access
    (torch._C._set_warn_deprecated_on_mutable_data_ptr if unsafe else torch._C._set_throw_on_mutable_data_ptr)(made)
    vars(made).update(attributes)
    made.fake_mode = mode
    return cast(torch.Tensor, made)


_FAKE: dict[torch.device, tuple[torch.device, dict[str, Any]]] = {}  # what fake tensors of a device have in common


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a contiguous tensor that looks like an ordinary one but has no memory: who reads it crashes the process.
    (torch 2.9's tracer refuses FakeTensors of another mode than its own.)"""
    like = torch.empty(shape, dtype=dtype, device="meta")
    storage = storage_at(0, like.numel() * like.element_size(), device)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, like.shape, like.stride())


def emptied(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a contiguous tensor whose storage has no bytes, as after ``resize_(0)`` of it. No memory is allocated."""
    stride = torch.empty(shape, device="meta").stride()
    return reinterpreted(torch.empty(0, dtype=dtype, device=device), tuple(shape), stride)


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Make a new storage in memory that somebody else owns, and must keep for as long as it is used."""
    construct: Any = torch._C._construct_storage_from_data_pointer
    return construct(address, device, nbytes)


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and other objects hold a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def tensor_uses(tensor: torch.Tensor) -> int:
    """Return how many references to a tensor C++ has, that of its Python object among them."""
    any_tensor: Any = tensor  # torch's stubs lack it
    return int(any_tensor._use_count())


def values_in(mode: FakeTensorMode, values: Iterable[Any]) -> list[Any]:
    """Return ``values`` with those of another fake mode as values of this one, which torch 2.9 does not do itself."""
    return [mode.from_tensor(v) if isinstance(v, FakeTensor) and v.fake_mode is not mode else v for v in values]


def with_storage_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous, plain tensor's memory, without a copy, in a storage of exactly its bytes that keeps the
    memory alive. A DTensor of a tensor that lies further back in its storage cannot be pickled or copied, since torch
    gives it the offset, and ``torch.save`` writes storages, not tensors."""
    shape = tensor.shape
    if 0 in shape:
        return torch.empty_like(tensor)
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():  # which DLPack of torch 2.9 has not
        return with_storage_of_its_own(tensor.view(torch.uint8)).view(tensor.dtype)
    if 1 not in shape:
        return _from_dlpack(dlpack.to_dlpack(tensor))
    return _from_dlpack(dlpack.to_dlpack(tensor.view(-1))).view(shape)  # it changes strides of dimensions of 1


def has_memory(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has memory; False for what ``without_memory`` made. One without elements needs none, and its
    address is zero, also where it is a part of another."""
    return not tensor.numel() or tensor.data_ptr() != 0 or tensor.untyped_storage().nbytes() == 0


def lay_out(path: str, shapes: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, int]:
    """Write a file as ``torch.save`` does for a dict of tensors, with room for their values, which are not written.
    Return where in the file they belong, in bytes; 0 for tensors without elements."""
    with FakeTensorMode():
        tensors = {name: torch.empty(tuple(shape), dtype=dtype) for name, (shape, dtype) in shapes.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tensors, path)
    with FakeTensorMode():
        loaded = torch.load(path, weights_only=True)
    return {name: getattr(t.untyped_storage(), "_checkpoint_offset", 0) or 0 for name, t in loaded.items()}


def tensor_offset(file: Any, offset: int, length: int) -> int:
    """Return where in a file a tensor's bytes begin, which ``torch.save`` wrote into ``length`` bytes from ``offset``
    on."""
    from torch.distributed.checkpoint.utils import _create_file_view

    entry: Any = _create_file_view(file, offset, length)
    reader: Any = torch._C.PyTorchFileReader(entry)
    return offset + int(reader.get_record_offset("data/0"))


def saved_tensors_are_hooked() -> bool:
    """Say whether ``torch.autograd.graph.saved_tensors_hooks`` are in effect in this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def attention_backends() -> str:
    """Return which kernels of attention torch may choose, in its order."""
    return str(_cur_sdpa_kernel_backends(with_priority=True))
