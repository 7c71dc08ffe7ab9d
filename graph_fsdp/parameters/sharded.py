"""``Shards`` takes the place of a model's parameters: ``Storage`` (``shards.py``) on ranks, ``XlaStorage`` on XLA.

[Note: Ctrl-C]
Python raises KeyboardInterrupt where it begins a function, jumps, or is back from a call. What it leaves half restored
nobody else would restore, so restoring runs again. It stands in the ``finally`` itself: a function that did this for
all could be interrupted at its beginning.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import ParameterChangedError
from graph_fsdp.mesh import DataParallelMesh
from graph_fsdp.parameters.placeholder import set_guarded
from graph_fsdp.passes.ir.spec import ModelSpec, ParameterSpec

Owners: TypeAlias = tuple[tuple[nn.Module, str], ...]  # modules that hold a parameter, and its name in each


@dataclass
class ShardedParameter:
    """Describes one parameter of the model, under all its names."""

    spec: ParameterSpec
    owners: Owners
    placeholder: nn.Parameter
    shard: nn.Parameter
    input: Tensor  # padded local shard as it is gathered, a view of the storage
    local: Tensor  # the shard's own local tensor: the same memory without padding, in a storage of its own
    filled: bool = False  # it has the parameter's values
    seen: tuple[Any, Any] = None, None  # local tensor and storage of the shard at the last ``refresh``
    hooks: int = -1  # that others had made when the shard and its ``AccumulateGrad`` had none
    whole: nn.Parameter | None = None  # stands in the modules while the unit is unsharded (see unshard.py)
    as_used: Callable[[Tensor], Any] | None = None  # makes the tensor subclass that the model uses of what is gathered
    used_like: Tensor | None = None  # of its shape and dtype, where these are others than what is gathered has
    layout: str = ""  # of a quantized parameter's bytes

    @functools.cached_property
    def is_whole(self) -> bool:
        """Say whether the input is the shard, with no padding and in the same order of dimensions."""
        return not self.spec.shard_dim and self.local.shape == self.input.shape

    @property
    def registered(self) -> nn.Parameter:
        """Return what modules hold while no forward runs."""
        return self.shard if self.whole is None else self.whole

    @property
    def in_modules(self) -> nn.Parameter | None:
        """Return what stands in the model now, which may be somebody else's."""
        module, leaf = self.owners[0]
        return module._parameters.get(leaf)

    def register(self, value: nn.Parameter) -> None:
        """Put ``value`` into the modules."""
        for module, leaf in self.owners:
            module._parameters[leaf] = value


class Shards(ABC):
    """Holds all shards of a model. Construction allocates; ``install`` changes the model and cannot fail.

    In between, ``fill`` and ``keep_whole`` give the model other values than its own.
    """

    reads_in_place: bool  # whether a file's rows can be read into the shards
    is_of_replica = False  # whether parameters are this process's parts, which do not say of what they are parts

    def __init__(self, spec: ModelSpec, mesh: DataParallelMesh | None, device: torch.device) -> None:
        self.spec, self.mesh = spec, mesh
        self.device = device  # of gathered parameters
        self.has_memory = True
        self.buffers: list[Tensor] = []  # in which shards lie
        self.keeps_buffers = False  # also while the model is on another device: CUDA graphs have their addresses
        self.parameters: dict[str, ShardedParameter] = {}
        self.by_placeholder: dict[int, ShardedParameter] = {}
        self.by_original: dict[int, ShardedParameter] = {}  # of parameters of the model, until ``install``
        self.active = False
        # Of memory to placeholders (python_reads.py).
        self.refusal: Callable[[Sequence[str]], str] = lambda names: "the model is not compiled yet"
        self.unguarded_in_forward = False
        self.updates: Any = None  # the engine's ``Updates``
        self._whole: list[tuple[Tensor, Tensor]] = []  # (the model's tensor, its value)

    @abstractmethod
    def fill(self, p: ShardedParameter, full: Tensor) -> None:
        """Shard the value of a whole parameter, which may be on another device."""

    @abstractmethod
    def plain_copy(self, p: ShardedParameter) -> nn.Parameter:
        """Return a parameter without values, for the plain model of which a copy of the compiled one is made."""

    @abstractmethod
    def fill_from(self, other: Shards) -> None:
        """Fill the shards with those of ``other``, of the model that this one's is a copy of."""

    def keep_whole(self, tensor: Tensor, value: Tensor) -> None:
        """Have ``install`` give ``tensor``, one of the model's that is not sharded, this value on this device; a
        DTensor this part of it."""
        self._whole.append((tensor, value))

    @abstractmethod
    def install(self, model: nn.Module, fullgraph: bool) -> None:
        """Fill the shards that are not filled yet with the originals' values, register them, and free the originals'
        memory, parameter by parameter. With ``fullgraph``, placeholders need no guard while the forward runs."""

    @abstractmethod
    def after_apply(self) -> None:
        """Give the memory of shards back if the model was moved to another device (``model.to("cpu")``)."""

    @abstractmethod
    def inputs(self) -> dict[str, Tensor]:
        """Return parameter name → the padded shard that the graphs take, connected to the parameter's ``grad``."""

    @abstractmethod
    def refresh(self) -> None:
        """Take over what the user did to parameters since the last forward: ``requires_grad``, a replaced Parameter
        object (``load_state_dict(assign=True)``), other memory (``p.data = …`` of one process). Raises
        ParameterChangedError if it cannot be taken over."""

    @contextlib.contextmanager
    def placeholders_registered(self) -> Iterator[None]:
        """Put placeholders into the modules for the time of a forward, and shards again, whatever happens in it."""
        placeholders = [p.placeholder for p in self.parameters.values()]

        def restore() -> None:
            if self.unguarded_in_forward:
                set_guarded(placeholders, True)
            for module, leaf, p in self.places:
                module._parameters[leaf] = p.shard if p.whole is None else p.whole
            self.active = False

        try:
            self.active = True
            if self.unguarded_in_forward:
                set_guarded(placeholders, False)
            for module, leaf, p in self.places:
                module._parameters[leaf] = p.placeholder
            yield
        finally:
            try:
                restore()
            except BaseException:  # [Note: Ctrl-C]
                restore()
                raise

    @functools.cached_property
    def places(self) -> list[tuple[nn.Module, str, ShardedParameter]]:
        """Return the modules that hold each parameter, and its name in each."""
        return [(module, leaf, p) for p in self.parameters.values() for module, leaf in p.owners]

    def without_placeholders(self, outputs: Any) -> Any:
        """Return the shard for a parameter among ``outputs``: Dynamo hands back the very object that it read."""

        def registered(p: nn.Parameter) -> nn.Parameter:
            found = self.by_placeholder.get(id(p))
            return p if found is None else found.registered

        with compat.without_torch_function():
            return compat.tree_map_only(nn.Parameter, registered, outputs)

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return the gradients of the model's ``parameters``: of a whole one, its shard's, to which backward adds."""
        shards = {id(p.registered): p.shard for p in self.parameters.values()}
        return [p.grad for found in parameters if (p := shards.get(id(found), found)).grad is not None]

    def set_whole(self, p: ShardedParameter, whole: nn.Parameter | None) -> None:
        """Put ``whole`` into the modules; None: the shard."""
        p.whole = whole
        p.register(p.registered)

    def checked_whole(self, p: ShardedParameter) -> nn.Parameter:
        """Return what stands in the modules for an unsharded parameter, and check it: it may have been replaced."""
        found: Any = p.whole
        of_kind = isinstance(found, nn.Parameter) and isinstance(found, DTensor) == isinstance(p.placeholder, DTensor)
        shape = compat.local_part(found).shape if of_kind else None
        if shape != torch.Size(p.spec.shape) or found.device != p.input.device:
            kind = "DTensor over its tensor-parallel ranks" if isinstance(p.placeholder, DTensor) else "plain parameter"
            raise ParameterChangedError(
                f"parameter {p.spec.name!r} was replaced by {type(found).__name__} while it was unsharded; a {kind} "
                f"of shape {tuple(p.spec.shape)} per rank on {p.input.device} has to stand there"
            )
        whole: nn.Parameter = found
        return whole


def can_replace(p: ShardedParameter, found: Any) -> bool:
    """Say whether the next forward takes ``found`` for a parameter's shard, where it stands in its place."""
    same_kind = isinstance(found, nn.Parameter) and isinstance(found, DTensor) == isinstance(p.shard, DTensor)
    return same_kind and found.shape == p.shard.shape


def take_replacement(p: ShardedParameter) -> None:
    """Take for the shard what stands in its place. The one before keeps its values where somebody still has it, as
    ``torch.func.functional_call``, which puts it back: what it had of the storage will be the replacement's."""
    if p.in_modules is not p.shard:
        before = weakref.ref(p.shard)
        p.shard, p.hooks = checked_replacement(p, p.in_modules), -1
        shard, here = before(), compat.local_part(p.shard)
        if shard is not None and compat.local_part(shard).data_ptr() != here.data_ptr():
            local = compat.local_part(shard).detach().clone()
            if isinstance(shard, DTensor):
                compat.set_local_tensor(shard, local)
            else:
                shard.data = local


def checked_replacement(p: ShardedParameter, found: Any) -> nn.Parameter:
    if found is None:
        raise ParameterChangedError(
            f"parameter {p.spec.name!r} was removed from its module, which has been compiled with it; remove it before "
            "graph_fsdp.compile, or exchange the whole module"
        )
    if not can_replace(p, found):
        raise ParameterChangedError(
            f"parameter {p.spec.name!r} was replaced by {type(found).__name__} that is not a sharded parameter "
            f"of shape {tuple(p.spec.shape)}; copy into the parameter, or load with load_state_dict on DTensors "
            "(torch.func.functional_call of a compiled model takes parameters like those that it has)"
        )
    replacement: nn.Parameter = found
    return replacement


def is_foreign(p: ShardedParameter, found: Any) -> bool:
    """Say whether ``found`` stands where a parameter was, and is not to be taken for it."""
    return found is not p.registered and (p.whole is not None or not can_replace(p, found))


def owners_of(model: nn.Module, names: Sequence[str]) -> Owners:
    """Return the modules that hold a parameter of these names, and its name in each."""
    found = (name.rpartition(".") for name in names)
    return tuple((model.get_submodule(path), leaf) for path, _, leaf in found)


def can_be_written(tensor: Tensor) -> bool:
    """Say whether torch copies values into ``tensor``: not where it was expanded, so that elements share memory, nor
    where it was made in inference mode."""
    expanded = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not expanded and not tensor.is_inference()
