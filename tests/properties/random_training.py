"""A case, trained twice: sharded on the ranks of its mesh, and whole on one process.

[Note: reference]
Where rows are independent of each other, the reference makes one pass over the rows of all ranks, which is the
definition of data parallelism for a mean loss. Where they are not (statistics of a batch), where ranks have
other numbers of rows, and where parameters are cast (sums of other lengths round otherwise), it runs each rank's rows
by themselves, with buffers of their own, and averages the gradients. Casts are FSDP2's: parameters and inputs to
``param_dtype``, outputs to ``output_dtype``.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from random_cases import Case, OptionsCase
from random_layers import OVER_ROWS, Checkpointed
from random_models import LENGTH, VOCABULARY, Block, RandomModel, loss_of, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

import graph_fsdp
from graph_fsdp.passes import default_pipeline

LEARNING_RATE = 0.1

POLICIES: dict[str, Any] = {
    "block": {Block},
    "linear": {nn.Linear},
    "block and linear": {Block, nn.Linear},
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=20),
    "model": {RandomModel},
}
RECOMPUTE: dict[str, Any] = {"mm": [torch.ops.aten.mm, torch.ops.aten.tanh]}
PREFETCH: dict[str, Any] = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST}


@dataclass
class Outcome:
    """What a rank has seen. Parameters and gradients are whole; ``inputs``: after forward, and their gradients."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)  # per step
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)


def is_per_rank(case: Case) -> bool:
    over_rows = any(layer.kind in OVER_ROWS for block in case.model.blocks for layer in block)
    return over_rows or case.skewed or "mp" in case.options.compile


def mp_policy(options: OptionsCase) -> MixedPrecisionPolicy:
    names = options.compile.get("mp", {})
    return MixedPrecisionPolicy(**{name: getattr(torch, dtype) for name, dtype in names.items()})


def compile_options(case: Case) -> dict[str, Any]:
    """The keyword arguments of ``graph_fsdp.compile``."""
    given = dict(case.options.compile)
    policy = mp_policy(case.options)
    by_module = policy if policy.output_dtype is None else {RandomModel: policy}  # units need not take what others give
    options: dict[str, Any] = {"backend": "eager", "mp_policy": by_module}
    given.pop("mp", None)
    if given.pop("offload", False):
        options["offload_policy"] = CPUOffloadPolicy()
    if given.pop("columns", False):
        options["shard_placement_fn"] = functools.partial(_last_dimension, _sharding_ranks(case))
    if "auto_wrap_policy" in given:
        options["auto_wrap_policy"] = POLICIES[given.pop("auto_wrap_policy")]
    if "activation_checkpointing" in given:
        what = given.pop("activation_checkpointing")
        options["activation_checkpointing"] = RECOMPUTE.get(what, what)
    if case.model.graph_break:
        options["fullgraph"] = False
    pipeline = dict(case.options.pipeline)
    if pipeline:
        pipeline |= {key: PREFETCH.get(value, value) for key, value in pipeline.items() if key == "prefetch"}
        options["passes"] = default_pipeline(**pipeline)
    return options | given


def _sharding_ranks(case: Case) -> int:
    if case.mesh.kind == "hybrid":
        return case.mesh.shape[1]
    return case.mesh.ranks if case.mesh.kind == "shard" else 1


def _last_dimension(ranks: int, p: nn.Parameter) -> Shard | None:
    return Shard(p.dim() - 1) if p.dim() > 1 and p.shape[-1] % ranks == 0 and p.shape[-1] else None


def _rows(case: Case, step: int, rank: int | None) -> slice:
    """Of a rank; None for all of them."""
    sizes = [case.rows[step] + case.skewed * other for other in range(case.mesh.ranks)]
    return slice(0, sum(sizes)) if rank is None else slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def _inputs(case: Case, step: int, microbatch: int) -> Tensor:
    """The rows of all ranks."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * step + microbatch)
    rows = _rows(case, step, None).stop
    if case.model.tokens:
        return torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    return torch.randn(rows, case.model.width, generator=generator, dtype=torch.float64)


def _train(
    case: Case,
    model: RandomModel,
    call: Callable[[Tensor], Any],
    rank: int | None,
    sync: Callable[[bool], None],
    device: str = "cpu",
) -> Generator[None, None, Outcome]:
    """Yields twice a step: to average ``.grad``, and for the optimizer. ``rank``: whose rows; None for all."""
    outcome = Outcome()
    for step in range(len(case.rows)):
        mine = _rows(case, step, rank)
        for microbatch in range(case.microbatches):
            x = _inputs(case, step, microbatch)[mine].clone().to(device)
            x.requires_grad_(case.input_grad and x.is_floating_point())
            if case.no_sync:
                sync(microbatch == case.microbatches - 1)
            torch.manual_seed(1000 * step + microbatch)  # the masks of all ranks and of the reference are the same
            loss = loss_of(case.model, _whole_outputs(call(x)))
            if loss.requires_grad:
                loss.backward()
            outcome.losses.append(loss.item())
            outcome.inputs.append(x.detach().clone())
            outcome.input_gradients.append(x.grad)
        yield
        outcome.gradients.append({name: _copy(p.grad) for name, p in model.named_parameters()})
        yield
        if case.evaluate:
            model.eval()
            with torch.no_grad():
                output = call(_inputs(case, step, 0)[mine].clone().to(device))
            outcome.evaluations.append(loss_of(case.model, _whole_outputs(output)).item())
            model.train()
    outcome.parameters = {name: _copy(p) for name, p in model.named_parameters()}
    outcome.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return outcome


def _copy(tensor: Any) -> Any:
    """All of a tensor, of which ranks may hold parts."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _whole_outputs(output: Any) -> Any:
    """A parameter that a model returns is its shard."""
    return pytree.tree_map_only(DTensor, lambda value: value.full_tensor(), output)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, foreach=False)


class Sharded:
    """A case's model on a rank of the mesh, which can be trained again from its first values."""

    def __init__(self, case: Case, mesh: DeviceMesh | None, rank: int) -> None:
        self.case, self.rank = case, rank
        self.device = mesh.device_type if mesh is not None else "cpu"
        torch.manual_seed(case.seed)
        self.model, ignored = make_model(case.model)
        with warnings.catch_warnings():
            # Options that save nothing on a CPU say so.
            warnings.filterwarnings("ignore", message=".*(offload|OffloadPolicy|reshard_after_forward=1).*")
            graph_fsdp.compile(self.model, mesh, ignored_params=ignored, **compile_options(case))
        self.first = [value.clone() for value in self.state()]

    def state(self) -> list[Tensor]:
        values = (*self.model.parameters(), *self.model.buffers())
        return [(value.to_local() if isinstance(value, DTensor) else value).detach() for value in values]

    def train(self) -> Outcome:
        for value, first in zip(self.state(), self.first, strict=True):
            value.copy_(first)
        model: Any = self.model
        training = _train(self.case, model, model, self.rank, model.set_requires_gradient_sync, self.device)
        outcome = _finish([training], [_optimizer(model)], lambda: None)[0]
        assert str(graph_fsdp.inspect(model))
        return outcome


def train_sharded(case: Case, mesh: DeviceMesh | None, rank: int) -> Outcome:
    """On a rank of the mesh."""
    return Sharded(case, mesh, rank).train()


def train_reference(case: Case) -> list[Outcome]:
    """What each rank must see; one outcome for all rows, if not ``is_per_rank``."""
    torch.manual_seed(case.seed)
    model, _ = make_model(case.model)
    if not is_per_rank(case):
        return _finish([_train(case, model, model, None, lambda _: None)], [_optimizer(model)], lambda: None)
    models = [copy.deepcopy(model) for _ in range(case.mesh.ranks)]
    policy = mp_policy(case.options)
    for module in itertools.chain.from_iterable(m.modules() for m in models):
        if isinstance(module, (Checkpointed, RandomModel)):
            module.recompute = False  # it would find parameters that are not cast any more
    trainings = [
        _train(case, m, functools.partial(_call_cast, m, policy), rank, lambda _: None) for rank, m in enumerate(models)
    ]
    return _finish(trainings, [_optimizer(m) for m in models], functools.partial(_average_gradients, models))


def _finish(
    trainings: list[Generator[None, None, Outcome]],
    optimizers: list[torch.optim.Optimizer],
    average: Callable[[], None],
) -> list[Outcome]:
    """Run trainings in step with each other."""
    while True:
        outcomes = list(map(_advance, trainings))
        if outcomes[0] is not None:
            return [outcome for outcome in outcomes if outcome is not None]
        average()
        for training in trainings:
            next(training)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _advance(training: Generator[None, None, Outcome]) -> Outcome | None:
    """To where it yields next; what it returns at the end."""
    try:
        return next(training)
    except StopIteration as end:
        return end.value


def _average_gradients(models: list[RandomModel]) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        grads = [p.grad for p in same if p.grad is not None]
        if grads:
            mean = torch.stack(grads).double().mean(0)
            for p in same:
                p.grad = mean.to(p.dtype)


def _call_cast(model: RandomModel, policy: MixedPrecisionPolicy, x: Tensor) -> Any:
    """A forward as FSDP2's mixed precision makes it, without sharding."""
    dtype = policy.param_dtype
    slots = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    cast = {id(p): p for _, _, p in slots}
    if dtype is not None:
        x = x.to(dtype) if x.is_floating_point() else x
        cast = {key: p.to(dtype) if p.is_floating_point() else p for key, p in cast.items()}  # type: ignore[misc]
    try:
        for registered, name, p in slots:
            registered[name] = cast[id(p)]
        output = model(x)
    finally:
        for registered, name, p in slots:
            registered[name] = p
    to = policy.output_dtype
    if to is None:
        return output
    return pytree.tree_map_only(Tensor, lambda value: value.to(to) if value.is_floating_point() else value, output)
