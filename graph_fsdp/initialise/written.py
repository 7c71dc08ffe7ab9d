"""Which tensors a user's initialisation writes to, seen operator by operator.

[Note: initialised]
A tensor is initialised when an operator has written to the memory that it has at the end, through whatever view,
``detach`` or ``.data``, or when it was given memory that an operator has computed. That holds for every dtype and for
buffers that no state dict has, costs no pass over the memory, and does not take a value for a sign: a tensor that
was filled with NaN beforehand would tell nothing about integers. What is written behind torch's back (through NumPy)
is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.errors import MetaDeviceError
from graph_fsdp.passes.ir.effects import memory_effects
from graph_fsdp.passes.ir.fake_values import iterate_tensors

_aten = torch.ops.aten
_ALLOCATING = frozenset(
    {
        _aten.empty, _aten.empty_like, _aten.empty_permuted, _aten.empty_strided, _aten.new_empty,
        _aten.new_empty_strided,
    }
)  # fmt: skip


class Writes(compat.TorchDispatchMode):
    """While it is active: keeps ``unwritten`` up to date, and lets no operator write to what is ``protected``.

    Both hold memory by ``compat.storage_id``; ``protected`` has the name of the tensor that it belongs to.
    """

    def __init__(self, protected: Mapping[int, str]) -> None:
        super().__init__()
        self.protected = protected
        self.unwritten: set[int] = set()

    def allocated(self, tensor: Tensor) -> None:
        """The tensor's memory has no contents yet."""
        if tensor.numel():
            self.unwritten.add(compat.storage_id(tensor))

    def initialised(self, tensor: Tensor) -> bool:
        return not tensor.numel() or compat.storage_id(tensor) not in self.unwritten

    def forget_all_but(self, tensors: Iterable[Tensor]) -> None:
        """Memory that is given back may come again as another tensor's."""
        self.unwritten &= {compat.storage_id(tensor) for tensor in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, memory = kwargs or {}, memory_effects(func)
        values = (args[index] if index < len(args) else kwargs.get(name) for index, name in memory.mutated)
        written = [tensor for value in values for tensor in iterate_tensors(value)]
        for tensor in written:
            name = self.protected.get(compat.storage_id(tensor))
            if name is not None:
                raise MetaDeviceError(
                    f"it writes to {name}, which is not one of those that are initialised with this module: a module "
                    "may initialise itself and what is below it in its unit (of parameters() it sees those of other "
                    "units too: parameters(recurse=False))"
                )
        result = func(*args, **kwargs)
        self.unwritten.difference_update(map(compat.storage_id, written))
        if not memory.aliased:
            made = map(compat.storage_id, iterate_tensors(result))
            if func.overloadpacket in _ALLOCATING:
                self.unwritten.update(made)
            else:
                self.unwritten.difference_update(made)
        return result
