"""Optimizers that need whole matrices step by owners: each matrix is computed with by one rank of its mesh.

[Note: a step by owners]
A *rule* (``MatrixRule``) is an optimizer's step of one parameter as a generator. What it does before and after its
``yield`` is element-wise and runs on every rank's shards; what it yields, a function and DTensors, is brought whole to
the owner, which calls the function, and each rank gets its shards of the results. So a function runs once in the mesh.

Matrices are owned by shapes alone: from the largest to the smallest, each goes to the rank that has the least to do
(R. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). Buckets are cut from that order, so that all ranks work
in each. A bucket's shards go to owners in one all-to-all, results come back in another, and replicas that do not own a
matrix get their shards by a broadcast from those that do; tensor-parallel ranks exchange theirs by all-to-alls, too
([Note: two dimensions] of ``exchange.py``). While one bucket is computed, the next one's shards and the last one's
results are under way: memory is a few buckets', each about one matrix a rank.

Before a bucket is exchanged, the ranks compare what they are about to exchange (``runtime/ranks/lockstep.py``).
"""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.optimizers.exchange import Exchange, MatrixRanks, Work, is_sharding
from graph_fsdp.optimizers.groups import NOT_COMPILED, count_writes, parameters_of, restored, shards_of
from graph_fsdp.runtime.ranks.agreement import RunnableProgram, is_shared
from graph_fsdp.runtime.ranks.lockstep import Lockstep, lockstep_of

# Of (parameter, gradient, its state, its group).
MatrixRule: TypeAlias = Callable[
    [nn.Parameter, Tensor, dict[str, Any], dict[str, Any]], Generator[Work, Sequence[Tensor], None]
]

BUCKET_NBYTES = 2**22  # of parameters for each rank; a bucket has at least one matrix for each rank
_END = object()


def muon(
    p: nn.Parameter, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> Generator[Work, Sequence[Tensor], None]:
    """Step ``torch.optim.Muon``. What travels is bfloat16, to which its iteration casts first of all."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    average, own = compat.local_part(state["momentum_buffer"]), compat.local_part(gradient)
    average.lerp_(own, 1 - group["momentum"])
    settings = group["ns_coefficients"], group["ns_steps"], group["eps"]

    def orthogonalised(matrix: Tensor) -> list[Tensor]:
        return [compat.newton_schulz(matrix, *settings)]

    update = own.lerp(average, group["momentum"]) if group["nesterov"] else average
    given = [compat.make_dtensor(update.bfloat16(), p)]
    del update  # while others are exchanged
    (found,) = yield orthogonalised, [given.pop()]
    lr = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    shard = compat.local_part(p)
    shard.mul_(1 - lr * group["weight_decay"])
    shard.add_(compat.local_part(found), alpha=-compat.adjusted_muon_lr(lr, group["adjust_lr_fn"], p.shape))


MATRIX_WISE: dict[type[optim.Optimizer], MatrixRule] = {optim.Muon: muon}


def ranks_of(name: str, p: nn.Parameter) -> MatrixRanks | None:
    """Return the ranks that a parameter is on; None where it is one, or the parameter a scalar. Raises UnsupportedError
    where more than two dimensions of a mesh shard it."""
    if not isinstance(p, DTensor) or not p.dim():
        return None
    mesh, placements = p.device_mesh, p.placements
    several = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    sharding = [dim for dim in several if not placements[dim].is_replicate()]
    # A strided dimension divides what the later one has left (FSDP within tensor parallelism).
    strided = [isinstance(placements[dim], compat.StridedShard) for dim in sharding]
    if len(sharding) > 2 or not all(is_sharding(placements[dim]) for dim in sharding) or True in strided[1:]:
        raise UnsupportedError(
            f"optimizer: parameter {name!r} is placed as {placements}, and an optimizer that needs whole matrices "
            "takes those that one or two dimensions of a mesh shard; give others to another optimizer"
        )
    replicating = [dim for dim in several if dim not in sharding]
    line, across = [*sharding, None][0], [*sharding[1:], *replicating, None][0]
    return MatrixRanks(mesh, line, across, divides=len(sharding) > 1) if several else None


@dataclass(frozen=True, eq=False)
class _KnownParameter:
    """One parameter of a compiled model, the ranks that it is on, and what keeps the model's ranks in step."""

    name: str
    p: nn.Parameter
    ranks: MatrixRanks | None
    lockstep: Lockstep | None


@dataclass(eq=False)
class _Matrix:
    """One parameter in one step. ``owner``: a line of the ranks, and a place in it."""

    name: str
    p: nn.Parameter
    ranks: MatrixRanks
    lockstep: Lockstep | None
    steps: Generator[Work, Sequence[Tensor], None]
    owner: tuple[int, int] = (0, 0)

    @property
    def cost(self) -> int:
        """Return a number in proportion to the operations of a product of the matrix with its transpose."""
        return self.p.numel() * min(self.p.shape, default=1)


class Owners:
    """Steps parameters of an optimizer by a rule; ``step`` as that of ``Slices``."""

    def __init__(self, optimizer: optim.Optimizer, rule: MatrixRule) -> None:
        self._rule = rule
        self._known: dict[int, _KnownParameter] = {}  # by the id of the parameter
        self._find(parameters_of(optimizer))
        if not self._known:
            raise ValueError(NOT_COMPILED)

    @torch.no_grad()
    def step(self, optimizer: optim.Optimizer, own_step: Callable[[], Any]) -> None:
        """Step the matrices that are on several ranks by their owners, and call ``own_step`` for all others."""
        self._find(parameters_of(optimizer))
        matrices: list[_Matrix] = []
        with restored(optimizer) as params:
            for group, members in zip(optimizer.param_groups, params, strict=True):
                found = [self._matrix(p, optimizer.state, group) for p in members]
                matrices += filter(None, found)
                group["params"] = [p for p, matrix in zip(members, found, strict=True) if matrix is None]
            own_step()
        with contextlib.ExitStack() as stack:
            for lockstep in dict.fromkeys(m.lockstep for m in matrices if m.lockstep is not None):
                stack.enter_context(lockstep.telling())
            _pipeline([self._travel(bucket) for bucket in buckets_of(matrices)])
        count_writes(parameters_of(optimizer))

    def _find(self, params: Sequence[nn.Parameter]) -> None:
        for storage, found in shards_of(p for p in params if id(p) not in self._known):
            for name, held in found.items():
                p = held.shard
                ranks = ranks_of(name, p)
                in_step = () if storage.mesh is None else storage.mesh.ranks
                if ranks is not None and ranks.divides:
                    in_step = ranks.everyone
                lockstep = lockstep_of(in_step) if is_shared(in_step) else None
                if lockstep is not None and ranks is not None and ranks.divides:
                    names = [ranks.mesh.get_group(dim).group_name for dim in (ranks.sharding, ranks.across)]
                    lockstep.runs_on(names, p.device)
                self._known[id(p)] = _KnownParameter(name, p, ranks, lockstep)

    def _matrix(self, p: nn.Parameter, state: Any, group: dict[str, Any]) -> _Matrix | None:
        """Return a parameter that has a gradient and is on several ranks as such; else None."""
        known = self._known.get(id(p))
        if known is None or known.ranks is None or p.grad is None or not compat.is_placed_like(p.grad, p):
            return None
        return _Matrix(known.name, p, known.ranks, known.lockstep, self._rule(p, p.grad, state[p], group))

    def _travel(self, bucket: Sequence[_Matrix]) -> Iterator[None]:
        """Bring a bucket to its owners and back, and stop where something is under way."""
        works = [(m, work) for m in bucket if (work := next(m.steps, None)) is not None]
        if not works:
            return
        exchange = Exchange(bucket[0].ranks, [(m.owner, work) for m, work in works])
        members = [m for m, _ in works]
        del works  # what is yielded is free once it is sent
        if (lockstep := bucket[0].lockstep) is not None:
            what = (", ".join(m.name for m in members), *exchange.described)
            lockstep.begin(lockstep.know(RunnableProgram("an optimizer", "step", what, "exchange")))
        if bucket[0].ranks.divides:
            exchange.start_across()
            yield
        exchange.start_to_owners()
        yield
        exchange.start_back(exchange.compute())
        yield
        exchange.start_to_lines()
        yield
        for m, results in zip(members, exchange.shards(), strict=True):
            with contextlib.suppress(StopIteration):
                m.steps.send(results)
                raise UnsupportedError(f"the rule of parameter {m.name!r} yields a second time; yield all work at once")


def _pipeline(travels: Sequence[Iterator[None]]) -> None:
    """Run travels so that each starts while those before it are under way."""
    waiting, under_way = deque(travels), list[Iterator[None]]()
    while waiting or under_way:
        if waiting:
            under_way.insert(0, waiting.popleft())
        under_way = [travel for travel in under_way if next(travel, _END) is not _END]


def buckets_of(matrices: Sequence[_Matrix]) -> list[list[_Matrix]]:
    """Give each matrix an owner, and divide all into buckets that are exchanged at once ([Note: a step by owners])."""
    alike: dict[Any, list[_Matrix]] = {}
    for m in matrices:
        alike.setdefault((m.ranks, m.lockstep, m.p.dtype), []).append(m)
    found = []
    for (ranks, *_), members in alike.items():
        lines, size = ranks.place(ranks.across)[0], ranks.place(ranks.sharding)[0]
        loads = [(0, index) for index in range(lines * size)]
        bucket: list[_Matrix] = []
        nbytes = 0
        for m in sorted(members, key=lambda m: (-m.cost, m.name)):
            load, index = heapq.heappop(loads)
            m.owner = divmod(index, size)
            heapq.heappush(loads, (load + m.cost, index))
            bucket.append(m)
            nbytes += m.p.numel() * m.p.dtype.itemsize
            if len(bucket) >= len(loads) and nbytes >= BUCKET_NBYTES * len(loads):
                found.append(bucket)
                bucket, nbytes = [], 0
        found += [bucket] if bucket else []
    return [sorted(bucket, key=lambda m: m.owner) for bucket in found]
