"""Bad input with ``backend="xla"``: one clear error each, before anything is changed.

What a mesh must be is in ``mesh.py``, operators that XLA does not have in ``runtime/xla/host_fallbacks.py``.
"""

from __future__ import annotations

import importlib.metadata

import torch
import torch.distributed as dist

from graph_fsdp import validate
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.errors import MeshError, UnsupportedError

_TESTED_PAIR = "torch==2.9.1 torch_xla==2.9.0"


def environment(replicas: bool = False) -> None:
    """Whether this process can run anything of the backend at all. ``replicas``: as one of several that have a device
    each.

    Raises:
        UnsupportedError: torch_xla is missing, of another release than torch, or SPMD is off, or on for replicas.
        MeshError: torch.distributed, or a launcher, counts other processes than XLA; or this one is no replica.
    """
    check_versions(torch.__version__, _installed("torch_xla"))
    if replicas:
        _replica()
        return
    if not compat_xla.is_spmd():
        raise UnsupportedError(
            "backend='xla' has one process run all devices of its host, for which SPMD must be on; call "
            "torch_xla.runtime.use_spmd() at the start of the program, before anything is on the device; or pass "
            "sharding='replicas' in each of the processes that torch_xla.launch starts, one per device"
        )
    launched = dist.get_world_size() if dist.is_initialized() else validate.world_size_of_environment()
    check_world_sizes(launched, compat_xla.process_count())


def _replica() -> None:
    if compat_xla.is_spmd():
        raise UnsupportedError(
            "sharding='replicas' has one process run one device, and SPMD is on, with which one process runs all "
            "devices of its host; leave out torch_xla.runtime.use_spmd(), or pass sharding='manual'"
        )
    found, devices = compat_xla.replica_count(), compat_xla.device_count()
    if dist.is_initialized():
        check_replica_counts(dist.get_world_size(), found)
    elif validate.world_size_of_environment() > 1:
        check_replica_counts(validate.world_size_of_environment(), found)
    if found != devices:
        raise MeshError(
            f"mesh: XLA has {devices} devices, and this process is no replica of theirs but a world of {found}; with "
            "sharding='replicas' start the training with torch_xla.launch(function), which calls it for each device"
        )


def check_versions(torch_version: str, xla_version: str | None) -> None:
    """torch_xla has the symbols of torch's own release compiled in, so 2.9 works with 2.9 only."""
    if xla_version is not None and _release(xla_version) == _release(torch_version):
        return
    found = "is not installed" if xla_version is None else f"is {xla_version}"
    raise UnsupportedError(
        f"backend='xla' needs torch_xla of torch's own release; torch is {torch_version} and torch_xla {found}. "
        f"Install a pair of one release, such as: pip install {_TESTED_PAIR}"
    )


def check_world_sizes(launched: int, found: int) -> None:
    """``launched``: processes of torch.distributed, or that a launcher started; ``found``: of XLA."""
    if launched != found:
        raise MeshError(
            f"mesh: torch.distributed (or the launcher) counts {launched} processes and XLA {found}, so they would not "
            "train one model together; start one process per host, which has all of its devices (on XLA's CPU client: "
            "python without torchrun, and CPU_NUM_DEVICES devices)"
        )


def check_replica_counts(launched: int, found: int) -> None:
    """``launched``: processes of torch.distributed, or that a launcher started; ``found``: XLA's replicas."""
    if launched != found:
        raise MeshError(
            f"mesh: torch.distributed (or the launcher) counts {launched} processes and XLA {found} replicas, so they "
            "would not train one model together; start one process per device that XLA knows of: torch_xla.launch("
            "function), or torchrun on TPU hosts (on XLA's CPU client each process of torchrun is a world of its own)"
        )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> str:
    """ "2.9" of "2.9.1+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])
