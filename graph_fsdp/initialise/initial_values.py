"""A sharded model's values come from its own tensors, files, the mesh's first rank, or an initialisation.

Ranks agree on it through the store before the first collective: a rank on the meta device and one with values would
otherwise wait for each other.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import MetaDeviceError, UnsupportedError
from graph_fsdp.initialise.materialise import ParamInitFn, Piece, find_pieces, materialise, tensor_names
from graph_fsdp.initialise.safetensors_files import SafetensorsFiles
from graph_fsdp.initialise.state_keys import Matched
from graph_fsdp.mesh import START_TIMEOUT_SECONDS, DataParallelMesh, Mesh
from graph_fsdp.parameters.placements import part_of_rank
from graph_fsdp.parameters.sharded import Shards
from graph_fsdp.runtime.ranks.agreement import RankDisagreement, RunnableProgram, agree, is_shared
from graph_fsdp.runtime.ranks.lockstep import lockstep_of

if TYPE_CHECKING:
    from graph_fsdp.options import CompileOptions
    from graph_fsdp.place import Place

FillStorage: TypeAlias = Callable[[Shards], None]

# Models started so far per mesh: its ranks count alike.
_starts: Counter[tuple[int, ...]] = Counter()


def initial_values(
    model: nn.Module, units: Collection[nn.Module], place: Place, options: CompileOptions
) -> FillStorage:
    """Return what puts the values into a storage that the model's own tensors lack; ``install`` does the rest. Nothing
    of the model is changed, here or by what is returned. ``units``: the modules that are units.

    Raises:
        MetaDeviceError, CheckpointError, ValueError: this rank's model cannot be given values so.
        RankDisagreement: another rank's cannot, or ranks would get their values in different ways.
    """
    mesh, device, param_init_fn = place.mesh, place.values_on, options.param_init_fn
    names = tensor_names(model)
    steps: list[FillStorage] = [functools.partial(_move_buffers, model, device)]
    pieces: list[Piece] = []
    name = next((name for tensor, name in names.items() if tensor.is_meta), None)
    facts = _facts(names, name, options.sync_module_states, param_init_fn)
    with agreeing_on_values(mesh, facts):
        _check_references(model, names)
        if (checkpoint := options.files) is not None:
            if options.sync_module_states:
                raise ValueError(
                    "checkpoint and sync_module_states=True both say where values come from; leave one of the two out"
                )
            files, matched = checkpoint.match(model)
            facts += checkpoint_facts(files, matched)
            pieces = find_pieces(model, units, param_init_fn, matched.key_of)
            steps.append(functools.partial(_load, files, matched, device))
        elif options.sync_module_states:
            if name is not None and (mesh is None or mesh.is_first):
                raise MetaDeviceError(
                    f"sync_module_states=True gives all ranks the values of the mesh's first rank, and there {name} is "
                    "on the meta device; build the model with values on that rank, or leave sync_module_states out: a "
                    "model on the meta device is initialised to the same values on all ranks"
                )
            if name is not None and isinstance(mesh, DataParallelMesh) and mesh.own:
                raise MetaDeviceError(
                    f"sync_module_states=True gives parameters with meshes of their own the values of the first rank "
                    f"of each, and {name} is on the meta device; build the model with values on all ranks"
                )
            for tensor, name in names.items() if mesh is not None else ():
                if tensor.layout is not torch.strided:
                    raise UnsupportedError(
                        f"sync_module_states=True sends values as bytes, and {name} is of the layout {tensor.layout}; "
                        "make it dense, or leave sync_module_states out and give it the same values on all ranks"
                    )
            if mesh is not None:
                steps = [functools.partial(_receive, tensor, mesh, device) for tensor in names]
        elif name is not None:
            pieces = find_pieces(model, units, param_init_fn)
        if param_init_fn is not None and name is None:
            raise ValueError(
                "param_init_fn is for parameters and buffers on the meta device, and model has none; leave it out, or "
                "build the model under torch.device('meta')"
            )
        facts += [f"parameter {name!r} sharded on dimension {dim}" for name, dim in place.shard_dims.items()]
    if pieces:
        steps.insert(0, functools.partial(materialise, pieces, names, mesh, device))

    def fill(storage: Shards) -> None:
        sends = options.sync_module_states or pieces
        with _in_step(mesh, type(model).__name__) if sends else contextlib.nullcontext():
            for step in steps:
                step(storage)

    return fill


def _in_step(mesh: Mesh | None, name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which values go from rank to rank: if one raises there, the others learn of it as in a
    graph's program. ``name``: of the model's class."""
    if mesh is None or not is_shared(mesh.ranks):
        return contextlib.nullcontext()
    lockstep = lockstep_of(mesh.ranks)
    lockstep.begin(lockstep.know(RunnableProgram(f"a {name}", "initial", (), "values")))
    return lockstep.telling()


def _facts(
    names: Mapping[Tensor, str], on_meta: str | None, sync_module_states: bool, param_init_fn: ParamInitFn | None
) -> list[str]:
    """Return what ranks must have in common before values go from one to another."""
    lines = [f"sync_module_states={sync_module_states}", f"{'a' if param_init_fn else 'no'} param_init_fn"]
    if not sync_module_states:
        where = f"{on_meta} is on the meta device" if on_meta else "all parameters and buffers have values"
        lines.append(f"{where} (without sync_module_states)")
    if sync_module_states or on_meta:
        for tensor, name in names.items():
            where = " on the meta device" if tensor.is_meta and not sync_module_states else ""
            divided = f" divided as {tensor.placements}" if isinstance(tensor, DTensor) else ""
            lines.append(f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{divided}{where}")
    return lines


def checkpoint_facts(files: SafetensorsFiles, matched: Matched) -> list[str]:
    """Return what ranks that read a checkpoint must have in common."""
    entries = [(key, files.entries[key]) for key in matched.key_of.values()]
    return [f"of the checkpoint {key!r} {list(entry.shape)} {entry.dtype}" for key, entry in entries]


@contextlib.contextmanager
def agreeing_on_values(mesh: Mesh | None, facts: list[str]) -> Iterator[None]:
    """Tell the other ranks what is raised within, and raise if one of them has a problem or other ``facts``, to which
    more may be added within."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if mesh is not None and is_shared(mesh.ranks):
        index = _starts[mesh.ranks]
        _starts[mesh.ranks] += 1
        entries = facts if problem is None else [f"{type(problem).__name__}: {problem}"]
        lockstep = lockstep_of(mesh.ranks)
        lockstep.compiling()
        try:
            agree(f"start{index}", entries, mesh.ranks, START_TIMEOUT_SECONDS, lockstep.check_refused)
        except RankDisagreement as error:
            raise (problem or error) from None
        finally:
            lockstep.compiled()
    if problem is not None:
        raise problem


def _check_references(model: nn.Module, names: Mapping[Tensor, str]) -> None:
    """Check that nothing is on the meta device that cannot be given memory later."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and value not in names:
                raise MetaDeviceError(
                    f"attribute {attribute!r} of module {path!r} ({type(module).__name__}) is a tensor on the meta "
                    "device and neither a parameter nor a buffer, so nothing can give it values; register it "
                    "(register_buffer(…, persistent=False)), or assign a tensor with values before graph_fsdp.compile"
                )
    for tensor, name in names.items():
        if tensor.is_meta:
            twin = torch.empty_like(tensor).requires_grad_(tensor.requires_grad)
            try:
                compat.swap(tensor, twin)
                compat.swap(tensor, twin)
            except RuntimeError as error:
                raise MetaDeviceError(
                    f"{name} is on the meta device and cannot be given memory, as something holds on to it: {error}; "
                    "build the model anew"
                ) from error


def _load(files: SafetensorsFiles, matched: Matched, device: torch.device, storage: Shards) -> None:
    wanted: list[tuple[str, Tensor]] = []
    for tensor, key in matched.key_of.items():
        parameter = storage.by_original.get(id(tensor))
        if parameter is not None and not storage.reads_in_place:
            full = torch.empty(parameter.spec.shape, dtype=parameter.spec.dtype)
            files.read([(key, full)])  # one after the other: no more than one is whole on the host
            storage.fill(parameter, full)
        elif parameter is not None:
            parameter.filled = True
            wanted.append((key, parameter.shard))
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            storage.keep_whole(tensor, part_of_rank(tensor, value) if isinstance(tensor, DTensor) else value)
            wanted.append((key, value))
    files.read(wanted)


def _move_buffers(model: nn.Module, device: torch.device, storage: Shards) -> None:
    """Move the buffers of a model on the CPU to the accelerator that it is sharded onto."""
    for buffer in model.buffers():
        if buffer.device.type == "cpu" != device.type:
            storage.keep_whole(buffer, buffer.detach().to(device))


@torch.no_grad()
def _receive(tensor: Tensor, mesh: Mesh, device: torch.device, storage: Shards) -> None:
    """Fill in the first rank's value: of a parameter each rank's shard, of what is not sharded all of it."""
    parameter = storage.by_original.get(id(tensor))
    tensor = compat.local_part(tensor if parameter is None else parameter.placeholder)
    if parameter is not None and isinstance(mesh, DataParallelMesh):
        mesh = mesh.of_parameter(parameter.spec.name)
    # As bytes, which a conjugate or negative view is not.
    value = tensor.detach().to(device).resolve_conj().resolve_neg().contiguous() if mesh.is_first else None
    if parameter is None or not storage.reads_in_place or parameter.spec.replicated:
        received = value if value is not None else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if tensor.numel():
            mesh.broadcast(received)
        if parameter is not None:
            storage.fill(parameter, received)
        elif value is None or tensor.device != device:
            storage.keep_whole(tensor, received)
        return
    assert isinstance(mesh, DataParallelMesh)
    shard = parameter.input.to(device).contiguous()  # a process group of the device knows no shards on the CPU
    if not parameter.spec.empty:
        mesh.scatter(shard, None if value is None else parameter.spec.as_stored(value))
    if shard is not parameter.input:
        parameter.input.copy_(shard)
    parameter.filled = True
