"""Compiled models run under the user's dispatch modes (``CommDebugMode``, ``FlopCounterMode``).

torch.compile is off under a ``TorchDispatchMode``, so that the mode sees each operator. A model of ours has nothing but
its programs: they run under the mode, operator by operator and region by region, and Dynamo is made to ignore it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

Value = TypeVar("Value")

# Whether Dynamo is off: what torch's modules keep of it, each from the release that has it on.
_FLAGS = ("_is_in_non_infra_torch_dispatch_mode", "_is_in_any_mode_without_ignore_compile_internals")
_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")

try:
    from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals as _set_in_mode
except ImportError:  # before 2.10

    def _set_in_mode(value: bool) -> None:
        pass


without_dispatch_modes = python_dispatch._disable_current_modes
# What torch.func transforms at the moment, None where there is nothing.
transform_stack: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
is_batch_of_gradients: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def differentiates_forward() -> bool:
    """Say whether this is a block of ``torch.autograd.forward_ad.dual_level()``."""
    return forward_ad._current_level >= 0


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the user's modes in this thread, the outermost first, without those that torch itself traces with."""
    if not torch._C._len_torch_dispatch_stack():  # as in nearly every call
        return []
    return [mode for mode in _stack() if not mode.is_infra_mode() and not type(mode).__module__.startswith("torch._")]


def _stack() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]


@contextlib.contextmanager
def dynamo_ignores_modes() -> Iterator[None]:
    """Let what is called under the user's dispatch modes be compiled, and run under them."""
    modes = [mode for mode in dispatch_modes() if not getattr(mode, "ignore_compile_internals", lambda: False)()]
    if not modes:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in filter(vars(python_dispatch).__contains__, _FLAGS):
            stack.enter_context(patch.object(python_dispatch, name, False))
        _set_in_mode(False)
        stack.callback(_set_in_mode, True)
        for mode in modes:  # newer releases ask the modes themselves
            stack.enter_context(patch.object(mode, "ignore_compile_internals", lambda: True, create=True))
        stack.enter_context(_without_hooks_of_torch())
        yield


@contextlib.contextmanager
def _without_hooks_of_torch() -> Iterator[None]:
    """Take away the modes' hooks on all modules, which Dynamo refuses to trace: a compiled model calls no module."""
    taken = [(hooks, dict(hooks)) for hooks in map(vars(nn_module).__getitem__, _HOOKS)]
    for hooks, before in taken:
        for key, hook in before.items():
            if str(getattr(hook, "__module__", "")).partition(".")[0] == "torch":
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in taken:  # in the order in which they were registered
            since = {key: hook for key, hook in hooks.items() if key not in before}
            hooks.clear()
            hooks.update({**before, **since})


# --- fake tensors


@contextlib.contextmanager
def all_fake() -> Iterator[None]:
    """Compute on fake tensors alone, whatever operators are given. ``FakeTensorMode(allow_non_fake_inputs=True)`` runs
    ``parameter * 2``, which is given no fake tensor, on the parameter's memory, and placeholders have none."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _AllFake(mode):
        yield


class _AllFake(TorchDispatchMode):
    """Gives operators the fake tensors of ``mode`` in the place of those with memory."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) or is_traceable_wrapper_subclass(tensor)
        return self._mode.from_tensor(tensor) if is_plain else tensor


# --- collectives


def seen_as(operator: str, group: dist.ProcessGroup, call: Callable[[], Any], run: Callable[[], Value]) -> Value:
    """Return ``run()``, which starts a collective in however many messages. Dispatch modes see ``call()`` instead,
    which calls ``operator`` of ``torch.ops.c10d`` once: what runs must not depend on a mode, as other ranks may have
    none. Modes do not see the collectives of a group that is written in Python."""
    if not dispatch_modes() or type(group) is not dist.ProcessGroup:
        return run()
    below = _Below(getattr(torch.ops.c10d, operator).default, run)
    _become([below, *_stack()])
    try:
        call()
    finally:
        _become([mode for mode in _stack() if mode is not below])
    return below.value[0]


class _Below(TorchDispatchMode):
    """Does, below all other modes, what ``run`` does in place of ``operator``."""

    def __init__(self, operator: Any, run: Callable[[], Any]) -> None:
        super().__init__()
        self.operator, self._run = operator, run
        self.value: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self.operator or self.value:
            return func(*args, **(kwargs or {}))
        self.value.append(self._run())
        return args[0], _Started().boxed()


class _Started(dist.Work):
    """Stands for the collective's work in what the operator returns; nobody waits for it."""


def _become(modes: Sequence[Any]) -> None:
    """Make these, the outermost first, the dispatch modes of this thread."""
    for _ in _stack():
        python_dispatch._pop_mode()
    for mode in modes:
        python_dispatch._push_mode(mode)
