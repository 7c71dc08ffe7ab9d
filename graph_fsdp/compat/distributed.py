"""The private names of torch.distributed are used here: for process groups, meshes and collectives."""

from __future__ import annotations

import contextlib
import inspect
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _coalescing_manager,
    _get_default_store,
    _resolve_process_group,
    _world,
)
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor.placement_types import _StridedShard

StridedShard = _StridedShard
# The attribute of a module that says which of torch's composable functions were applied to it.
APPLIED: str = REGISTRY_KEY

_CHECKPOINT = "torch.distributed._composable.checkpoint_activation"
_CHECKPOINT_OPTIONS = {
    "preserve_rng_state": "preserve_rng_state",
    "user_context_fns": "context_fn",
    "determinism_check": "determinism_check",
}


def take_composable_checkpoint(module: nn.Module) -> dict[str, Any] | None:
    """Take the hooks of torch's composable ``checkpoint`` from a module; return the same options for
    ``torch.utils.checkpoint``, or None where it was not applied."""
    options: dict[str, Any] | None = None
    for hooks, with_kwargs in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_always_called),
    ):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", "") == _CHECKPOINT]:
            given = inspect.getclosurevars(hooks.pop(key)).nonlocals
            with_kwargs.pop(key, None)
            found = {name: given[own] for own, name in _CHECKPOINT_OPTIONS.items() if given.get(own) is not None}
            options = {**(options or {}), **found}
    return options


# torch 2.13 renamed the two and warns on the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def uses_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Say whether a process group runs collectives of a device's tensors by gloo."""
    return f"{device.type}:gloo" in dist.get_backend_config(group).split(",")


def launches_groups(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Say whether a process group launches several collectives of a device's tensors as one."""
    return device.type != "cpu" and not uses_gloo(group, device)


def grouped(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    group: dist.ProcessGroup,
    collective: Callable[..., Any] = all_gather_single,
    **options: Any,
) -> list[dist.Work | Any]:
    """Start a collective for each (target, source) pair, as one group where the process group can (NCCL, xccl), else
    one after the other; return what to wait for."""
    if len(pairs) > 1 and launches_groups(group, pairs[0][1].device):
        try:
            with _coalescing_manager(group=group, async_ops=True) as manager:
                for target, source in pairs:
                    collective(target, source, group=group, **options)
        except BaseException:
            _world.pg_coalesce_state.pop(group, None)  # or every later group of collectives is refused
            raise
        return [manager]
    return [collective(target, source, group=group, async_op=True, **options) for target, source in pairs]


def resolve_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]  # a NewType of str since 2.13


def allocate_from_group(
    group: dist.ProcessGroup, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate memory by a process group, where it can; else by the device."""
    backend = group._get_backend(device)
    if backend.supports_tensor_alloc(device):
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(*size)
    return torch.empty(*size, dtype=dtype, device=device)


def default_store() -> dist.Store:
    return _get_default_store()


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the dimensions of two slices of one mesh; in 2.9 they have the mesh's order. Raises
    RuntimeError or KeyError if they are no slices of one mesh, or share ranks."""
    concatenate = getattr(DeviceMesh, "_concatenate", None)
    if concatenate is not None:
        return concatenate([first, second])
    assert first.mesh_dim_names is not None and second.mesh_dim_names is not None
    root: DeviceMesh = getattr(device_mesh, "_mesh_resources").get_root_mesh(first)  # noqa: B009
    return root[(*first.mesh_dim_names, *second.mesh_dim_names)]


_WRAPPERS = {c for c in register_fsdp_forward_method.__code__.co_consts if isinstance(c, types.CodeType)}


def registered_forward_method(value: object) -> Callable[..., Any] | None:
    """Return the user's method, if ``value`` is what torch's ``register_fsdp_forward_method`` sets in its place."""
    function = getattr(value, "__func__", None)
    if getattr(function, "__code__", None) not in _WRAPPERS:
        return None
    return getattr(function, "__wrapped__")  # noqa: B009


@contextlib.contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """For a time, make the default process group this process as rank 0, with collectives that do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
