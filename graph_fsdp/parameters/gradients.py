"""Gradients of padded local shards go to ``.grad`` of their parameters, through one node of autograd for all."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.parameters.sharded import ShardedParameter, Shards


@functools.cache
def leaf_of_all() -> tuple[Tensor, Any]:
    """Return a leaf that is among the sources of each node of autograd whose other sources are shards, and its
    ``AccumulateGrad``. It never gets a gradient, and nobody can ask for one: a backward that runs its node runs those
    of all leaves."""
    with compat.without_dispatch_modes(), torch.inference_mode(False):
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        return leaf, torch.autograd.graph.get_gradient_edge(leaf).node


def connected_shards(parameters: list[ShardedParameter]) -> list[Tensor]:
    """Return the padded local shards of parameters, connected to their ``grad`` where gradients are recorded."""
    trained = [p for p in parameters if p.shard.requires_grad] if torch.is_grad_enabled() else []
    if not trained:
        return [p.input for p in parameters]
    shards: Sequence[Tensor] = [p.shard for p in trained]
    if isinstance(trained[0].shard, DTensor):
        hooks = compat.hooks_of_others()
        for p in trained:
            # An accumulator that is not there yet has no hooks.
            if p.hooks != hooks and not compat.has_accumulator(p.shard) and not compat.has_hooks(p.shard):
                p.hooks = hooks
        inputs, add = [p.input for p in trained], functools.partial(_accumulate, trained)
        shards = Linked.apply(inputs, add, *shards, leaf_of_all()[0])
    elif any(compat.has_hooks(p.shard) for p in trained):
        shards = Linked.apply(shards, functools.partial(_left_to_autograd, trained), *shards)
    if len(trained) == len(parameters):
        return list(shards)
    linked = iter(shards)
    return [next(linked) if p.shard.requires_grad else p.input for p in parameters]


def accumulate_gradients(parameters: list[ShardedParameter], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients of padded local shards to the ``grad`` of their parameters, as a backward does, which runs their
    hooks; not of those that were frozen since. None stands for a gradient that is not there."""
    for p, grad in zip(parameters, gradients, strict=True):
        if grad is not None and not p.shard.requires_grad:
            found = as_gradient(p, grad)
            p.shard.grad = found if p.shard.grad is None else p.shard.grad + found
    with torch.enable_grad(), compat.without_torch_function():
        shards = connected_shards(parameters)
        pairs = zip(shards, gradients, strict=True)
        given = [(shard, grad) for shard, grad in pairs if grad is not None and shard.requires_grad]
        if given:
            torch.autograd.backward([shard for shard, _ in given], [grad for _, grad in given])


def wanted_among(storage: Shards) -> Callable[[str], bool]:
    """Return what says, by name, whether the backward under way adds to the ``grad`` of a parameter. One of
    ``torch.autograd.grad`` or with ``inputs`` need not, and none does for a parameter frozen after its forward."""
    weak = weakref.ref(storage)  # what Dynamo keeps must not keep the model

    def wanted(name: str) -> bool:
        shards = weak()
        if shards is None:
            return True
        shard = shards.parameters[name].shard
        if not shard.requires_grad:
            return False
        if compat.current_backward() == -1 or compat.is_run(leaf_of_all()[1]):
            return True
        with compat.without_torch_function():
            return compat.is_run(torch.autograd.graph.get_gradient_edge(shard).node)

    return wanted


# Gradients of what comes out of a node of autograd, and what returns (node, output) that each input came from → those
# of the inputs.
Edges: TypeAlias = Callable[[], Sequence[tuple[Any, int]]]
Gradients: TypeAlias = Callable[[Sequence[Tensor | None], Edges], Iterable[Tensor | None]]


class Linked(torch.autograd.Function):
    """Makes one node of autograd for many tensors: ``values`` come out of it, whose gradients ``backward`` turns into
    those of ``sources``. None stands for a gradient that is not there."""

    @staticmethod
    def forward(ctx: Any, values: Sequence[Tensor], backward: Gradients, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.call = backward
        ctx.set_materialize_grads(False)
        return tuple(map(Tensor.detach, values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.call(grads, lambda: ctx.next_functions))


compat.refuse_compiled_autograd(
    Linked,
    lambda: UnsupportedError(
        "compiled autograd traces the backward of a model that graph_fsdp shards, whose gradients would be lost or "
        "wrong, as with FSDP2; backward is compiled without it: leave torch._dynamo.config.compiled_autograd False"
    ),
)


def at_the_end(
    inputs: dict[str, Tensor], ended: Callable[[list[str], Sequence[Tensor | None]], Iterable[Tensor | None]]
) -> dict[str, Tensor]:
    """Return what a forward is given behind a node whose backward, ``ended``, comes when that of the forward has ended:
    autograd runs a node when all gradients of its outputs are there. It is given their names, too, and returns them."""
    trained = {name: value for name, value in inputs.items() if value.requires_grad}
    if not trained or not torch.is_grad_enabled():
        return inputs
    names, values = list(trained), list(trained.values())
    return inputs | dict(zip(names, Linked.apply(values, lambda grads, _: ended(names, grads), *values), strict=True))


def _accumulate(
    parameters: list[ShardedParameter], grads: Sequence[Tensor | None], edges: Edges
) -> list[Tensor | None]:
    """Add gradients of padded local shards to the ``grad`` of their parameters. Return those that autograd is to add,
    which takes it several times as long: they have hooks, or ``torch.autograd.grad`` wants them."""
    left: list[Tensor | None] = [None] * (len(grads) + 1)  # of ``leaf_of_all``, too
    sums: list[Tensor] = []
    added: list[Tensor] = []
    hooks, adds = compat.hooks_of_others(), not torch.is_grad_enabled()  # unlike with ``create_graph``
    runs_all = adds and compat.is_run(leaf_of_all()[1])
    nodes: Sequence[tuple[Any, int]] = ()
    for index, (p, grad) in enumerate(zip(parameters, grads, strict=True)):
        if grad is None or not p.shard.requires_grad:  # frozen after its forward
            if p.hooks != hooks:
                compat.skip_hooks(p.shard)
            continue
        shard, local = p.shard, grad if p.is_whole and grad.is_contiguous() else _local_gradient(p, grad)
        direct = runs_all and p.hooks == hooks
        if adds and not direct:
            nodes = nodes or edges()
            direct = _is_added(p, nodes[index][0], hooks)
        if direct:
            found = shard.grad
            if found is None:
                shard.grad = _as_shard(p, local)
                continue
            if compat.is_placed_like(found, shard):
                sums.append(compat.local_part(found))
                added.append(local)
                continue
        left[index] = _as_shard(p, local)
    if sums:
        compat.foreach_add(sums, added)
    return left


def _left_to_autograd(
    parameters: list[ShardedParameter], grads: Sequence[Tensor | None], _: Edges
) -> Sequence[Tensor | None]:
    """Return gradients for autograd to add, which is to call no hooks of the other parameters."""
    for p, grad in zip(parameters, grads, strict=True):
        if grad is None:
            compat.skip_hooks(p.shard)
    return grads


def _is_added(p: ShardedParameter, node: Any, hooks: int) -> bool:
    """Say whether nothing but an addition is to happen to a gradient. ``node``: the shard's ``AccumulateGrad``, which
    is asked for hooks where there are new ones on anything."""
    if compat.has_hooks(p.shard) or not compat.is_run(node) or (p.hooks != hooks and compat.is_hooked(node)):
        return False
    p.hooks = hooks
    return True


def _local_gradient(p: ShardedParameter, grad: Tensor) -> Tensor:
    """Return the gradient of a padded local shard as that of the shard itself, contiguous."""
    rows = p.local.shape[p.spec.shard_dim] if p.local.dim() else 0
    local = grad if p.spec.replicated or rows == grad.shape[0] else grad[:rows]
    return p.spec.as_used(local).contiguous()


def as_gradient(p: ShardedParameter, grad: Tensor) -> DTensor:
    """Return the gradient of a padded local shard as that of the parameter."""
    return _as_shard(p, _local_gradient(p, grad))


def _as_shard(p: ShardedParameter, local: Tensor) -> DTensor:
    """Return a DTensor of a gradient, in a storage of its own."""
    return compat.make_dtensor(compat.with_storage_of_its_own(local), p.shard)
