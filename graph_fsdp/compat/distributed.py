"""The private names of torch.distributed are used here: for process groups, meshes and collectives."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import inspect
import threading
import types
import unittest.mock
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import nn
from torch._C._distributed_c10d import AllgatherOptions, FakeWork, ReduceScatterOptions
from torch.distributed import _functional_collectives as _functional
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed._functional_collectives import REDUCE_OP_TO_STR
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group, _world
from torch.distributed.distributed_c10d import new_group as _new_group
from torch.distributed.fsdp import MixedPrecision, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import _Policy, _recursive_wrap
from torch.distributed.tensor.placement_types import _StridedShard

StridedShard = _StridedShard
WrapPolicy = _Policy
default_store = _get_default_store
# The attribute of a module that says which of torch's composable functions were applied to it.
APPLIED: str = REGISTRY_KEY
# What collectives of users are traced as. 2.9 has the gather under another name.
all_gather: Any = getattr(_functional, "all_gather_single", _functional.all_gather_tensor)
TRACED_COLLECTIVES: tuple[Any, ...] = (_functional.all_reduce, _functional.broadcast, _functional.all_to_all_single)

_NEVER_SENT = 2**30  # a message's tag
# Methods of a pipeline's stage in which it sends shapes to others, or runs its module to find them.
FIND_SHAPES_OF_STAGES = (
    *("_prepare_forward_infra", "_prepare_backward_infra"),
    *("_warmup_forward_vote", "_warmup_backward_result"),  # torch 2.12, 2.13
)

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


def gathers_at_once(groups: Iterable[dist.ProcessGroup], device: torch.device) -> bool:
    """Say whether several functional all-gathers of a device's tensors may be under way. gloo's run in two threads,
    which corrupt the heap, once in thousands (torch 2.13)."""
    return not any(uses_gloo(group, device) for group in groups)


def host_waits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Say whether waiting for a process group's collectives of a device's tensors makes the host wait. Otherwise a
    stream of the device waits."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends.get(device.type) in ("gloo", "mpi")


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds after which a process group ends a collective; torch's default where it does not say."""
    options = getattr(_backend_of(group, device), "options", None)
    return float(getattr(options, "_timeout", default_pg_timeout).total_seconds())


def is_done(work: Any) -> bool:
    """Say whether a collective has ended on its device, or several that were launched as a group, or an event."""
    parts = getattr(work, "works", None) or [work]
    asked = (getattr(part, "is_completed", None) or getattr(part, "query", None) for part in parts)
    return all(is_completed() for is_completed in asked if is_completed is not None)


def abort_process_groups(device: torch.device) -> None:
    """Abort the collectives of all process groups that the host does not wait for, as torch's ``_abort_process_group``
    does, which also forgets the groups: ``get_rank`` and ``destroy_process_group`` then fail. Raises RuntimeError where
    a backend cannot."""
    groups = sorted(_world.pg_names, key=lambda group: _world.pg_names[group], reverse=True)
    # A group that is written in Python is its own backend.
    backends: list[Any] = [_backend_of(group, device) or group for group in groups if not host_waits(group, device)]
    # NCCL's communicators wait for each other unless they are aborted as a group.
    grouped = [backend for backend in backends[-1:] if hasattr(backend, "_group_start")]
    for backend in grouped:
        backend._group_start()
    for backend in backends:
        backend.abort()
    for backend in grouped:
        backend._group_end()


def close_connections(group: dist.ProcessGroup, device: torch.device) -> None:
    """Close this rank's connections in a group of gloo, so that ranks that wait for it get an error at once: gloo does
    that when a message does not come in time. Other groups have connections of their own."""
    if not uses_gloo(group, device):
        return
    peer = (dist.get_rank(group) + 1) % dist.get_world_size(group)
    with contextlib.suppress(RuntimeError):
        work = dist.irecv(torch.empty(1, device=device), group=group, group_src=peer, tag=_NEVER_SENT)
        assert work is not None
        work.wait(datetime.timedelta(milliseconds=1))


def launches_groups(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Say whether a process group launches several collectives of a device's tensors as one (NCCL and xccl do)."""
    backend = _backend_of(group, device)
    if backend is None or dist.get_backend(group) == "fake":  # which stands for any
        return backend is not None and device.type != "cpu"
    return bool(backend.supports_coalescing)


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what runs a process group's collectives on a device; None for a group that is written in Python."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def grouped(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    group: dist.ProcessGroup,
    collective: Callable[..., Any] = all_gather_single,
    *,
    async_op: bool = True,
    **options: Any,
) -> list[dist.Work | Any]:
    """Start a collective for each (target, source) pair, as one group where the process group can, else one after the
    other; return what to wait for, with None for nothing."""
    one_by_one = len(pairs) == 1 or not launches_groups(group, pairs[0][1].device)
    if collective not in _METHODS or (one_by_one and pairs[0][0].is_complex()):  # a user's, or torch views it as real
        return [collective(target, source, group=group, async_op=async_op, **options) for target, source in pairs]
    single, coalesced, kind = _METHODS[collective]
    arguments = _launch_options(kind, async_op, **options)
    if one_by_one:  # torch's functions of these names take 10 us more
        launch = getattr(group, single)
        works = [launch(target, source, arguments) for target, source in pairs]
    else:
        launch = getattr(group, coalesced)
        works = [launch([target for target, _ in pairs], [source for _, source in pairs], arguments)]
    if async_op:
        return works
    for work in works:
        if work is not None:
            work.wait()  # a process group that launches on a stream of its own nevertheless
    return []


@functools.cache
def _launch_options(kind: Callable[[], Any], async_op: bool, op: dist.ReduceOp.RedOpType | None = None) -> Any:
    options = kind()
    options.asyncOp = async_op
    if op is not None:
        options.reduceOp = dist.ReduceOp(op)
    return options


# The methods of a process group, for one and for several at once: torch 2.13 has renamed them, and warns on the old
# names.
_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
_GATHER = "all_gather_single" if _RENAMED else "_allgather_base"
_GATHERS = "all_gather_single_coalesced" if _RENAMED else "allgather_into_tensor_coalesced"
_REDUCE = "reduce_scatter_single" if _RENAMED else "_reduce_scatter_base"
_REDUCES = "reduce_scatter_single_coalesced" if _RENAMED else "reduce_scatter_tensor_coalesced"
_METHODS: dict[Any, tuple[str, str, Callable[[], Any]]] = {
    all_gather_single: (_GATHER, _GATHERS, AllgatherOptions),
    reduce_scatter_single: (_REDUCE, _REDUCES, ReduceScatterOptions),
}


# By their ranks, since the process group of all ranks was made: a process that takes another's place counts from then.
_groups_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def group_of_members(
    ranks: Sequence[int], timeout: datetime.timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group that its own ``ranks`` alone make. Where ``init_process_group`` was given a ``device_id``,
    torch would divide NCCL's communicator of all ranks, which hangs until each of them takes part. torch_xla puts a
    function of fewer arguments in the place of ``dist.new_group``.

    torch would name the group by the number of groups that this process has, or in 2.15 has made. That differs
    where ranks are members of some groups and not of others, and they would wait for each other under several names.
    """
    members, world = tuple(ranks), cast(Any, dist.group.WORLD)
    made = _groups_made.setdefault(world, Counter())
    made[members] += 1  # all of them make these together
    name = hashlib.sha1(f"graph_fsdp {members} {made[members]}".encode(), usedforsecurity=False).hexdigest()
    c10d: Any = distributed_c10d
    bound, world.bound_device_id = world.bound_device_id, None
    name_as_torch, c10d._process_group_name = c10d._process_group_name, lambda *_, **__: name
    try:
        return _new_group(list(members), timeout, backend, use_local_synchronization=True)
    finally:
        world.bound_device_id = bound
        c10d._process_group_name = name_as_torch


def resolve_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]  # a NewType of str since 2.13


@contextlib.contextmanager
def traceable_all_reduces(shards: str) -> Iterator[None]:
    """For a time and in this thread, make ``dist.all_reduce`` the operator that can be traced, as Dynamo does. It names
    the group ``shards`` where it is given one of the same ranks."""
    thread, before = threading.get_ident(), dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        given = group or dist.group.WORLD
        if threading.get_ident() != thread or given is None or op not in REDUCE_OP_TO_STR:
            return before(tensor, op, group, async_op)
        if given.size() > 1:
            name = shards if shards and _ranks(given) == _ranks(resolve_group(shards)) else given.group_name
            tensor.copy_(torch.ops._c10d_functional.all_reduce(tensor, REDUCE_OP_TO_STR[op], name))
        return FakeWork() if async_op else None

    with _replacing_all_reduce, contextlib.ExitStack() as stack:
        for module in (dist, distributed_c10d):
            stack.enter_context(unittest.mock.patch.object(module, "all_reduce", all_reduce))
        yield


_ranks = dist.get_process_group_ranks
_replacing_all_reduce = threading.RLock()


def allocate_from_group(group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate flat memory by a process group, where it can: NCCL's is registered. Else by the device."""
    backend = _backend_of(group, device)
    if backend is not None and backend.supports_tensor_alloc(device):
        return backend.allocate_tensor(numel, dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


def why_no_symmetric_memory(group: dist.ProcessGroup, device: torch.device, backend: str) -> str:
    """Say why a process group cannot gather into symmetric memory of ``backend`` on a device; "" where it can."""
    if backend != "NCCL" or f"{device.type}:nccl" not in dist.get_backend_config(group).split(","):
        running = dist.get_backend_config(group)
        return f"backend must be 'NCCL' and gather parameters on {device.type}, which {running!r} does"
    return "" if hasattr(symmetric, "get_mem_pool") else f"torch {torch.__version__} has no pool of such memory"


def symmetric_memory(groups: Sequence[dist.ProcessGroup], backend: Any) -> Callable[..., torch.Tensor]:
    """Return what allocates flat memory whose addresses the ranks of each group exchange, which is a collective."""
    symmetric.set_backend(backend)

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            made = torch.empty(numel, dtype=dtype, device=device)
        for group in groups:
            dist.barrier(group=group)  # an exchange needs the communicator
            symmetric.rendezvous(made, group=group.group_name)
        vars(made.untyped_storage())["is_symmetric"] = True
        return made

    return allocate


def is_symmetric(tensor: torch.Tensor) -> bool:
    return "is_symmetric" in vars(tensor.untyped_storage())


def append(store: dist.Store, name: str, value: str) -> None:
    """Append to what stands under a name, which nobody has to have written to."""
    any_store: Any = store  # torch's stubs lack it
    any_store.append(name, value)


def is_default_store(store: dist.Store) -> bool:
    """Say whether it is the store of the default process group that there is now."""
    try:
        return _get_default_store() is store
    except ValueError:  # there is none
        return False


def clone_store(store: dist.Store) -> dist.Store:
    """Return another connection to the same store, which does not wait for what the first one waits for."""
    any_store: Any = store  # torch's stubs lack it
    try:
        cloned: dist.Store = any_store.clone()
    except (AttributeError, RuntimeError):
        return store
    return cloned


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the dimensions of two slices of one mesh; in 2.9 they have the mesh's order. Raises
    RuntimeError or KeyError if they are no slices of one mesh, or share ranks."""
    concatenate = getattr(DeviceMesh, "_concatenate", None)
    if concatenate is not None:
        return concatenate([first, second])
    assert first.mesh_dim_names is not None and second.mesh_dim_names is not None
    root, root_of = first, getattr(device_mesh, "_mesh_resources").get_root_mesh  # noqa: B009
    while (above := root_of(root)) != root:  # a slice of a slice
        root = above
    return root[(*first.mesh_dim_names, *second.mesh_dim_names)]


def one_dimension(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the dimensions of these names as one, whose ranks are in their order."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


_WRAPPERS = {c for c in register_fsdp_forward_method.__code__.co_consts if isinstance(c, types.CodeType)}


def registered_forward_method(value: object) -> Callable[..., Any] | None:
    """Return the user's method, if ``value`` is what torch's ``register_fsdp_forward_method`` sets in its place."""
    function = getattr(value, "__func__", None)
    if getattr(function, "__code__", None) not in _WRAPPERS:
        return None
    return getattr(function, "__wrapped__")  # noqa: B009


def select_by_function(model: nn.Module, policy: Callable[..., bool], ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Return the modules that FSDP1 would wrap by a policy function, which has no effect on the model here: on the way
    down the policy is told of all elements, on the way up only of those that no module below has taken."""
    selected: list[nn.Module] = []

    def wrap(module: nn.Module, **_: Any) -> nn.Module:
        selected.append(module)
        return module

    _recursive_wrap(model, policy, wrap, set(), ignored)
    return selected


def stage_backward(*args: Any) -> Any:
    """Run a backward as torch's pipeline stages do. They are imported here: that takes long, and few need them."""
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward(*args)


def stages_of_schedule(schedule: Any) -> list[Any]:
    """Return this rank's stages of a schedule of ``torch.distributed.pipelining``."""
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def classes_in_full_precision(policy: MixedPrecision) -> tuple[type[nn.Module], ...]:
    """Return the classes whose modules FSDP1 leaves out of its mixed precision: those of BatchNorm, unless told."""
    return tuple(policy._module_classes_to_ignore)


@contextlib.contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """For a time, make the default process group this process as rank 0, with collectives that do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
