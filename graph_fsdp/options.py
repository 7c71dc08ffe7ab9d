"""``CompileOptions`` holds the options of ``graph_fsdp.compile``, checked before anything is changed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from graph_fsdp.errors import MeshError, UnsupportedError
from graph_fsdp.initialise.safetensors_files import AnyPath, Safetensors
from graph_fsdp.parameters.meshes import Meshes
from graph_fsdp.parameters.mixed_precision import PrecisionPolicies
from graph_fsdp.parameters.placements import ShardPlacementFn
from graph_fsdp.passes import ActivationCheckpointing, PassPipeline, default_pipeline, find_hardware
from graph_fsdp.passes.ir.settings import check_path, check_signature
from graph_fsdp.passes.ir.spec import Offload
from graph_fsdp.passes.transforms.activation_checkpointing import Recompute, with_activation_checkpointing
from graph_fsdp.passes.transforms.reshard import keeps_for_backward
from graph_fsdp.programs.folder import Folder
from graph_fsdp.runtime.backends import BACKENDS
from graph_fsdp.runtime.cuda.capture import CAPTURES
from graph_fsdp.units import AutoWrapPolicy

_PROGRAMS = "GRAPH_FSDP_PROGRAMS"  # 0: none is kept where ``programs`` is None
_MOST_BYTES = 2**30  # of programs beside Inductor's cache


@dataclass(frozen=True)
class CompileOptions:
    """Holds the arguments of ``graph_fsdp.compile`` besides the model and the mesh, under the same names.

    Raises:
        ValueError, TypeError, UnsupportedError: an option cannot be, or not together with another one.
    """

    auto_wrap_policy: AutoWrapPolicy | None
    reshard_after_forward: bool | int | Literal["auto"] | None
    mp_policy: PrecisionPolicies
    offload_policy: OffloadPolicy
    ignored_params: Iterable[nn.Parameter | nn.Module] | None
    shard_placement_fn: ShardPlacementFn | None
    meshes: Meshes | None
    dp_mesh_dims: Any
    activation_checkpointing: ActivationCheckpointing | Recompute | Literal["offload"]
    sync_module_states: bool
    param_init_fn: Callable[[nn.Module], Any] | None
    checkpoint: Safetensors | AnyPath | Sequence[AnyPath] | None
    passes: PassPipeline | None
    backend: str
    regions: Literal["cut", "whole"]
    sharding: Literal["manual", "auto", "replicas"]
    shard_output: Callable[[Any, Any], Any] | None
    fullgraph: bool
    dynamic: bool | None
    cuda_graphs: bool
    on_host_fallback: Literal["error", "warn"]
    programs: AnyPath | Literal[False] | None = None

    def __post_init__(self) -> None:
        for name in ("sync_module_states", "fullgraph", "dynamic", "cuda_graphs"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (name != "dynamic" or value is not None):
                allowed = "True, False or None" if name == "dynamic" else "True or False"
                raise TypeError(f"{name} must be {allowed}, got {value!r}")
        self._check_backend()
        self._check_passes()
        self._check_offload_policy()
        self._check_activation_checkpointing()
        self._check_param_init_fn()
        self._check_xla()
        self._check_programs()

    @property
    def checkpointing(self) -> ActivationCheckpointing | None:
        """Return ``activation_checkpointing``, whichever way it was written."""
        return ActivationCheckpointing.of(self.activation_checkpointing)

    @property
    def files(self) -> Safetensors | None:
        """Return ``checkpoint``, whichever way it was written."""
        return self.checkpoint if isinstance(self.checkpoint, Safetensors | None) else Safetensors(self.checkpoint)

    @property
    def pipeline(self) -> PassPipeline:
        """Return the pipeline with the passes of ``activation_checkpointing`` in it."""
        pipeline = self.passes if self.passes is not None else default_pipeline()
        return pipeline if self.checkpointing is None else with_activation_checkpointing(pipeline, self.checkpointing)

    @property
    def reshards_to_groups(self) -> bool:
        return isinstance(self.reshard_after_forward, int) and not isinstance(self.reshard_after_forward, bool)

    @property
    def offloads(self) -> bool:
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    def reshard_size(self, world_size: int) -> tuple[Any, int]:
        """Return ``reshard_after_forward`` as a value that is no number, and the size of the groups to reshard to (0:
        none). The rules are FSDP2's. Raises ValueError for a number that does not divide ``world_size``, the ranks that
        shard."""
        value: Any = self.reshard_after_forward
        if not self.reshards_to_groups:
            return value, 0
        if value < 1 or value > world_size or world_size % value:
            possible = "".join(f"{n}, " for n in range(2, world_size) if world_size % n == 0)
            raise ValueError(
                f"reshard_after_forward={value} is a number of ranks that has to divide the {world_size} that "
                f"parameters are sharded over; pass {possible}True or False"
            )
        if value == 1:
            warnings.warn(
                "reshard_after_forward=1 keeps every parameter whole after forward, as False does; pass True to gather "
                "parameters again in backward",
                stacklevel=4,
            )
            return False, 0
        return (True, 0) if value == world_size else (True, value)

    def offload(self, device: torch.device) -> Offload | None:
        """Return what ``offload_policy`` asks for on ``device``. Warns of copies to the CPU that save nothing."""
        policy, hardware = self.offload_policy, self.passes.hardware if self.passes is not None else None
        computes_here = device.type == "cpu" and (hardware is None or not find_hardware(hardware).overlaps)
        if self.checkpointing is not None and self.checkpointing.offload and computes_here:
            warnings.warn(
                "activation_checkpointing: activations are offloaded to the CPU's memory, and the model is on the CPU: "
                "the copies save nothing there",
                stacklevel=4,
            )
        if not isinstance(policy, CPUOffloadPolicy):
            return None
        if computes_here:
            warnings.warn(
                "offload_policy=CPUOffloadPolicy(): the model computes on the CPU, where its shards are anyway; they "
                "are copied before each gather and gradients after each reduction all the same, which saves no "
                "memory. Nothing is pinned",
                stacklevel=4,
            )
        return Offload(device, policy.pin_memory and device.type != "cpu")

    def check_meshes(self) -> None:
        """Raise for options that do not go with parameters that ``meshes`` gives meshes of their own."""
        if self.reshards_to_groups:
            raise UnsupportedError(
                f"reshard_after_forward={self.reshard_after_forward} divides the ranks of one mesh into groups, and "
                "meshes gives parameters others; pass True or False"
            )

    def check_cuda_graphs(self, device: torch.device) -> None:
        """Raise for options and devices that do not go with ``cuda_graphs=True``."""
        if not BACKENDS[self.backend].captures_regions:
            raise UnsupportedError(
                f"cuda_graphs=True: backend {self.backend!r} launches no kernels that could be captured; leave "
                f"cuda_graphs out, or pass {_backends('captures_regions')}"
            )
        if device.type not in CAPTURES:
            raise MeshError(
                f"cuda_graphs=True needs a mesh of CUDA devices, this one is of {device.type}; leave cuda_graphs out"
            )
        if self.regions == "whole":
            raise UnsupportedError(
                "cuda_graphs=True captures what lies between collectives, and regions='whole' leaves nothing between "
                "them; leave one of the two out"
            )
        if self.dynamic:
            raise ValueError(
                "cuda_graphs=True needs fixed sizes, and dynamic=True makes graphs for all sizes; leave one of the "
                "two out"
            )
        if self.offloads:
            raise UnsupportedError(
                "cuda_graphs=True keeps what it reads at fixed addresses of the device, and offload_policy="
                "CPUOffloadPolicy() copies there anew in each run; leave one of the two out"
            )
        if self.checkpointing is not None and self.checkpointing.offload:
            raise UnsupportedError(
                "cuda_graphs=True writes activations where those of the last run lay, and activation_checkpointing "
                "with offload still copies them; leave one of the two out"
            )

    def _check_backend(self) -> None:
        backend, regions = self.backend, self.regions
        if not isinstance(backend, str) or backend not in BACKENDS:
            raise ValueError(f"backend {backend!r} does not exist; there are {', '.join(map(repr, sorted(BACKENDS)))}")
        if regions not in ("cut", "whole"):
            raise ValueError(f"regions must be 'cut' or 'whole', got {regions!r}")
        if regions == "whole" and not BACKENDS[backend].compiles_whole:
            raise ValueError(
                f"regions='whole' has a graph compiled in one piece, and backend {backend!r} runs it operator by "
                f"operator; leave regions out, or pass {_backends('compiles_whole')}"
            )

    def _check_passes(self) -> None:
        passes, reshard = self.passes, self.reshard_after_forward
        if passes is not None and not isinstance(passes, PassPipeline):
            raise TypeError(f"passes must be a PassPipeline (see graph_fsdp.passes.default_pipeline), got {passes!r}")
        if not isinstance(reshard, (bool, int, type(None))) and reshard != "auto":
            raise TypeError(
                f"reshard_after_forward must be True, False, None, 'auto' or a number of ranks, got {reshard!r}"
            )
        if reshard == "auto" and not any(getattr(p, "budget", None) for p in passes or ()):
            raise ValueError(
                "reshard_after_forward='auto' keeps what a budget of gathered bytes has room for, and there is none; "
                "pass passes=graph_fsdp.passes.default_pipeline(budget=…) with a number of bytes"
            )
        if passes and reshard is not None and reshard is not True and not keeps_for_backward(passes):
            raise ValueError(
                f"reshard_after_forward={reshard!r} needs a pass that provides 'resharded', and passes has none: every "
                "bucket is gathered again in backward; leave one of the two out"
            )

    def _check_offload_policy(self) -> None:
        policy = self.offload_policy
        if not isinstance(policy, OffloadPolicy):
            raise TypeError(
                "offload_policy must be torch.distributed.fsdp's OffloadPolicy() or CPUOffloadPolicy(pin_memory=…), "
                f"got {policy!r}"
            )
        if type(policy) not in (OffloadPolicy, CPUOffloadPolicy):
            raise UnsupportedError(
                f"offload_policy is a {type(policy).__name__}, of which only its author knows what it does; pass "
                "OffloadPolicy() or CPUOffloadPolicy(pin_memory=…)"
            )
        if self.regions == "whole" and self.offloads:
            raise UnsupportedError(
                "offload_policy=CPUOffloadPolicy() has copies run between regions, and regions='whole' leaves no place "
                "between them; leave one of the two out"
            )

    def _check_activation_checkpointing(self) -> None:
        checkpointing = self.checkpointing
        if checkpointing is None:
            return
        if self.passes is not None:
            with_activation_checkpointing(self.passes, checkpointing)
        if checkpointing.offload and self.regions == "whole":
            raise ValueError(
                "activation_checkpointing with offload copies activations between compiled pieces, and regions='whole' "
                "compiles a graph in one; leave regions out"
            )

    def _check_param_init_fn(self) -> None:
        function = self.param_init_fn
        if function is not None and not callable(function):
            raise TypeError(f"param_init_fn must be a function that initialises a module, or None, got {function!r}")
        if function is not None:
            check_signature("param_init_fn", function, "pass a function of a module", "module")
        if function is not None and self.sync_module_states:
            raise ValueError(
                "param_init_fn would never be called: sync_module_states=True gives every rank the values of the "
                "mesh's first rank; leave one of the two out"
            )

    def kept_programs(self) -> Callable[[], Folder | None]:
        """Return what finds the folder of ``programs``, when the first graph is compiled. Makes the one that is named.

        Raises:
            ValueError: the folder cannot be made.
        """
        given = self.programs
        if given is False or (given is None and os.environ.get(_PROGRAMS) == "0"):
            return lambda: None
        if given is None:
            find = BACKENDS[self.backend]().programs_folder
            return lambda: Folder(path, _MOST_BYTES) if (path := find()) is not None else None
        folder = Folder.named("programs", given, "name another one, or pass programs=False")
        return lambda: folder

    def _check_programs(self) -> None:
        given = self.programs
        if given is None or given is False:
            return
        check_path("programs", given, "the path of a folder, False to keep none, or None")
        if self.backend == "xla":
            raise UnsupportedError(
                "programs: backend='xla' compiles through torch_xla, whose own cache keeps programs; leave programs out"
            )

    def _check_xla(self) -> None:
        """Check the options that only ``backend="xla"`` has."""
        backend, sharding, fallback = self.backend, self.sharding, self.on_host_fallback
        if fallback not in ("error", "warn"):
            raise ValueError(f"on_host_fallback must be 'error' or 'warn', got {fallback!r}")
        if fallback != "error" and backend != "xla":
            raise ValueError(
                f"on_host_fallback={fallback!r} is about operators that XLA does not have, and backend {backend!r} has "
                "all of them; leave it out, or pass backend='xla'"
            )
        if sharding not in ("manual", "auto", "replicas"):
            raise ValueError(f"sharding must be 'manual', 'auto' or 'replicas', got {sharding!r}")
        if sharding == "replicas" and backend != "xla":
            raise ValueError(
                f"sharding='replicas' is for one process per XLA device and takes backend='xla'; backend is "
                f"{backend!r}, which always has one process per device: leave sharding out"
            )
        if sharding == "auto" and backend != "xla":
            raise ValueError(
                f"sharding='auto' lets XLA divide the model and takes backend='xla'; backend is {backend!r}"
            )
        for name in ("meshes", "dp_mesh_dims"):
            if getattr(self, name) is not None and backend == "xla":
                raise UnsupportedError(f"{name}: backend='xla' has one mesh of its own for all; leave {name} out")
        if self.shard_output is not None and sharding != "auto":
            raise ValueError("shard_output says how XLA divides outputs, and takes backend='xla' and sharding='auto'")
        if self.shard_output is not None and not callable(self.shard_output):
            raise TypeError(f"shard_output must be a function of the output and the mesh, got {self.shard_output!r}")


def _backends(ability: str) -> str:
    """Return the argument with which ``compile`` takes a backend that has an ability."""
    return f"backend={', '.join(repr(name) for name, b in sorted(BACKENDS.items()) if getattr(b, ability))}"
