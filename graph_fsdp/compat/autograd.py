"""The private names of torch for nodes of autograd, and for hooks of these and of leaves, are used here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from graph_fsdp.compat.tensors import tensor_uses


def has_hooks(parameter: torch.Tensor) -> bool:
    """Say whether something is to be done with a leaf's gradient before or after it is added to ``grad``."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


# Returns a number for the backward that autograd runs in this thread; -1 where it runs none.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


class _Skipped:
    """A hook of a leaf, in its place among them, that one backward does not call: when it comes to it, the hook is put
    back."""

    def __init__(self, hooks: dict[int, Any], key: int) -> None:
        self.hooks, self.key, self.hook, self.backward = hooks, key, hooks[key], current_backward()

    def __call__(self, value: Any) -> Any:
        if self.hooks.get(self.key) is self:  # and was not removed by one before it
            self.hooks[self.key] = self.hook
        return self.hook(value) if current_backward() != self.backward else None


def skip_hooks(parameter: torch.Tensor) -> None:
    """Let the backward under way, which has no gradient of a leaf, not call the leaf's hooks: autograd would, without
    one."""
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    before: Any = parameter._backward_hooks
    for hooks in (before, after):
        for key in hooks or ():
            if not isinstance(hooks[key], _Skipped):
                hooks[key] = _Skipped(hooks, key)


def has_accumulator(leaf: torch.Tensor) -> bool:
    """Say whether a leaf's ``AccumulateGrad`` may be there, which holds it: it is made for the first graph that needs
    it, and goes with the last."""
    return tensor_uses(leaf) > 1


def is_run(node: Any) -> bool:
    """Say whether the backward under way runs a leaf's ``AccumulateGrad``. Those of ``torch.autograd.grad`` run none,
    and those with ``inputs`` not all."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def refuse_compiled_autograd(function: Any, error: Callable[[], Exception]) -> None:
    """Have a backward that compiled autograd runs raise ``error()`` before its first node, where a node of the
    ``torch.autograd.Function`` is in it: it is asked for the key under which its code is compiled."""

    def key(_: Any) -> Any:
        raise error()

    function._compiled_autograd_key = staticmethod(key)


class _Own:
    """Counts the hooks of this package that come and go in each step."""

    hooks = 0


def hook_before(node: Any, call: Callable[[Any], None]) -> RemovableHandle:
    """Have ``call`` called before a node of autograd runs."""
    _Own.hooks += 1
    return cast(RemovableHandle, node.register_prehook(call))


def hooks_of_others() -> int:
    """Count the hooks on anything that this process has ever made, but for this package's."""
    return int(RemovableHandle.next_id) - _Own.hooks


def is_hooked(node: Any) -> bool:
    """Say whether a node of autograd has hooks. Torch does not say, but for the one that is then added, and removed."""
    for register in (node.register_hook, node.register_prehook):
        _Own.hooks += 1
        handle = register(lambda *_: None)
        count = len(handle.hooks_dict_ref())
        handle.remove()
        if count > 1:
            return True
    return False


def around_backwards_of_python(
    outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], around: Callable[[Any], Any]
) -> None:
    """Have each ``torch.autograd.Function`` that Python ran between two lists of tensors run ``around(backward)`` in
    place of its backward."""
    seen = {tensor.grad_fn for tensor in inputs}
    nodes = [tensor.grad_fn for tensor in outputs]
    functions: dict[Any, Any] = {}
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        function = getattr(node, "_forward_cls", None)  # an attribute of the node once it is another than its class's
        if function is None or function.__module__.startswith(_NOT_OF_USERS) or "_forward_cls" in vars(node):
            continue
        if function not in functions:
            functions[function] = _WithBackwards(function, around)
        node._forward_cls = functions[function]


# These call nothing of a model: what AOTAutograd has compiled, collectives, DTensor, and ours.
_NOT_OF_USERS = ("torch._", "torch.distributed.", "graph_fsdp.")


class _WithBackwards:
    """Stands for a ``torch.autograd.Function``, of which a node of autograd asks for what runs backward."""

    def __init__(self, function: Any, around: Callable[[Any], Any]) -> None:
        self._function = function
        self.backward = around(function.backward)
        is_given = function.vjp is not torch.autograd.Function.vjp
        self.vjp = around(function.vjp) if is_given else function.vjp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)
