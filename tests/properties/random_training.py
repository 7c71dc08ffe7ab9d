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
import dataclasses
import functools
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from random_actions import Actions, CompiledActions
from random_cases import Case, MeshCase
from random_layers import OVER_ROWS, Checkpointed
from random_meta import without_values
from random_models import LENGTH, VOCABULARY, Block, RandomModel, loss_of, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

import graph_fsdp
from graph_fsdp.passes import HARDWARE, ActivationCheckpointing, default_pipeline

# Of ranks that are started with it; Inductor draws other random numbers than plain PyTorch.
BACKEND = os.environ.get("GRAPH_FSDP_BACKEND", "eager")

POLICIES: dict[str, Any] = {
    "block": {Block},
    "linear": {nn.Linear},
    "block and linear": {Block, nn.Linear},
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=20),
    "model": {RandomModel},
}
RECOMPUTE: dict[str, Any] = {
    "mm": [torch.ops.aten.mm, torch.ops.aten.tanh],
    "unit, offload": ActivationCheckpointing(recompute="unit", offload=True),
    "selective, offload": ActivationCheckpointing(recompute="selective", offload=True),
}
# One more message costs less than a copy: buckets are gathered in several.
_QUICK = dataclasses.replace(HARDWARE["h100"].intra, latency=1e-12)
NAMED: dict[str, dict[Any, Any]] = {
    "prefetch": {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST},
    "hardware": {"cheap messages": dataclasses.replace(HARDWARE["h100"], intra=_QUICK, inter=_QUICK)},
}


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
    return over_rows or case.skewed or bool({"mp", "mp_blocks"} & set(case.options.compile))


def mp_policies(case: Case) -> dict[type[nn.Module], MixedPrecisionPolicy]:
    """Of the model, and of its blocks if they have their own."""
    found = {}
    for name, cls in (("mp", RandomModel), ("mp_blocks", Block)):
        names = case.options.compile.get(name, {})
        if names or cls is RandomModel:
            found[cls] = MixedPrecisionPolicy(**{key: getattr(torch, dtype) for key, dtype in names.items()})
    return found


def compile_options(case: Case) -> dict[str, Any]:
    """The keyword arguments of ``graph_fsdp.compile``."""
    given = dict(case.options.compile)
    policies = mp_policies(case)
    policy = policies[RandomModel]
    of_all = policy.output_dtype is None and len(policies) == 1  # units need not take what others give
    options: dict[str, Any] = {"backend": BACKEND, "mp_policy": policy if of_all else policies}
    given.pop("mp", None)
    given.pop("mp_blocks", None)
    given.pop("own_mesh", None)
    given.pop("values", None)
    if (offload := given.pop("offload", None)) is not None:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=offload)
    if given.pop("columns", False):
        options["shard_placement_fn"] = functools.partial(_last_dimension, _sharding_ranks(case))
    if "auto_wrap_policy" in given:
        options["auto_wrap_policy"] = wrap_policy(case)
        del given["auto_wrap_policy"]
    if "activation_checkpointing" in given:
        what = given.pop("activation_checkpointing")
        options["activation_checkpointing"] = RECOMPUTE.get(what, what)
    if case.model.graph_break:
        options["fullgraph"] = False
    pipeline = dict(case.options.pipeline)
    if pipeline:
        pipeline |= {key: NAMED[key].get(value, value) for key, value in pipeline.items() if key in NAMED}
        options["passes"] = default_pipeline(**pipeline)
    return options | given


def wrap_policy(case: Case) -> Any:
    return POLICIES.get(case.options.compile.get("auto_wrap_policy"))


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


def _inputs(case: Case, step: int, microbatch: int, call: int = 0) -> Tensor:
    """The rows of all ranks."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 100 * call + 10 * step + microbatch)
    rows = _rows(case, step, None).stop
    if case.model.tokens:
        return torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    return torch.randn(rows, case.model.width, generator=generator, dtype=torch.float64)


def _train(
    case: Case,
    model: RandomModel,
    call: Callable[[Tensor], Any],
    rank: int | None,
    actions: Actions,
    device: str = "cpu",
) -> Generator[None, None, Outcome]:
    """Yields once a step, to average ``.grad``. ``rank``: whose rows; None for all."""
    outcome = Outcome()
    actions.begin()
    for step in range(len(case.rows)):
        mine = _rows(case, step, rank)
        for microbatch in range(case.microbatches):
            losses, inputs = [], []
            for number in range(case.calls):
                x = _inputs(case, step, microbatch, number)[mine].clone().to(device)
                x.requires_grad_(case.input_grad and x.is_floating_point())
                actions.before_forward(microbatch == case.microbatches - 1)
                torch.manual_seed(1000 * step + microbatch)  # the masks of all ranks and of the reference are the same
                losses.append(loss_of(case.model, _whole_outputs(call(x))))
                inputs.append(x)
            actions.before_backward()
            loss = torch.stack(losses).sum()
            if loss.requires_grad:
                loss.backward()
            outcome.losses.append(loss.item())
            outcome.inputs += [x.detach().clone() for x in inputs]
            outcome.input_gradients += [x.grad for x in inputs]
        yield
        actions.with_gradients()
        outcome.gradients.append({name: _copy(p.grad) for name, p in model.named_parameters()})
        actions.step(step)
        if case.evaluate:
            model.eval()
            with torch.no_grad():
                output = call(_inputs(case, step, 0)[mine].clone().to(device))
            outcome.evaluations.append(loss_of(case.model, _whole_outputs(output)).item())
            model.train()
    actions.end()
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


class Sharded:
    """A case's model on a rank of the mesh, which can be trained again from its first values."""

    def __init__(self, case: Case, mesh: DeviceMesh | None, rank: int, find: Callable[[MeshCase], Any]) -> None:
        """``find``: the mesh of a description."""
        self.case, self.rank = case, rank
        self.device = mesh.device_type if mesh is not None else "cpu"
        torch.manual_seed(case.seed)
        self.model, ignored = make_model(case.model)
        options = compile_options(case)
        if "own_mesh" in case.options.compile:
            options["meshes"] = {nn.Linear: find(case.options.compile["own_mesh"])}
        compiled = parts_of(self.model, ignored) if case.parts else [self.model]
        if options.get("sync_module_states") and rank:
            for value in itertools.chain.from_iterable(map(state, compiled)):
                value.mul_(3)
        self.actions = CompiledActions(case, self.model, wrap_policy(case), ignored)
        with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="values-") as folder:
            options |= without_values(case, self.model, set(ignored), rank, Path(folder))
            # Options that save nothing on a CPU say so.
            warnings.filterwarnings("ignore", message=".*(offload|OffloadPolicy|reshard_after_forward=1).*")
            for module in compiled:
                own = [p for p in module.parameters() if any(p is out for out in ignored)]
                graph_fsdp.compile(module, mesh, ignored_params=own, **options)
                self.actions.compiled.append(module)
        self.actions.made()
        self.first = [value.clone() for value in state(self.model)]

    def train(self) -> Outcome:
        for value, first in zip(state(self.model), self.first, strict=True):
            value.copy_(first)
        model: Any = self.model
        outcome = _finish([_train(self.case, model, model, self.rank, self.actions, self.device)], lambda: None)[0]
        assert self.case.parts or str(graph_fsdp.inspect(model))
        return outcome


def state(module: nn.Module) -> list[Tensor]:
    """A rank's parts of parameters and buffers."""
    values = (*module.parameters(), *module.buffers())
    return [(value.to_local() if isinstance(value, DTensor) else value).detach() for value in values]


def parts_of(model: RandomModel, ignored: list[nn.Parameter]) -> list[nn.Module]:
    """Modules that are compiled each by itself, where the model is not: those that have something to shard."""
    embedding, out = [model.tokens] if model.case.tokens else [], set(map(id, ignored))
    found = (*embedding, *dict.fromkeys(model.blocks), model.head)
    return [module for module in found if not out.issuperset(map(id, module.parameters()))]


def train_sharded(case: Case, mesh: DeviceMesh | None, rank: int, find: Callable[[MeshCase], Any]) -> Outcome:
    """On a rank of the mesh."""
    return Sharded(case, mesh, rank, find).train()


def train_reference(case: Case) -> list[Outcome]:
    """What each rank must see; one outcome for all rows, if not ``is_per_rank``."""
    torch.manual_seed(case.seed)
    model, ignored = make_model(case.model)
    if not is_per_rank(case):
        return _finish([_train(case, model, model, None, _plain(case, model, ignored))], lambda: None)
    made = [copy.deepcopy((model, ignored)) for _ in range(case.mesh.ranks)]
    models = [m for m, _ in made]
    for module in itertools.chain.from_iterable(m.modules() for m in models):
        if isinstance(module, (Checkpointed, RandomModel)):
            module.recompute = False  # it would find parameters that are not cast any more
    cast = [functools.partial(_call_cast, m, mp_policies(case)) for m in models]
    trainings = [_train(case, m, cast[rank], rank, _plain(case, m, out)) for rank, (m, out) in enumerate(made)]
    return _finish(trainings, functools.partial(_average_gradients, models))


def _plain(case: Case, model: RandomModel, ignored: list[nn.Parameter]) -> Actions:
    actions = Actions(case, model, wrap_policy(case), ignored)
    actions.made()
    return actions


def _finish(trainings: list[Generator[None, None, Outcome]], average: Callable[[], None]) -> list[Outcome]:
    """Run trainings in step with each other."""
    while True:
        outcomes = list(map(_advance, trainings))
        if outcomes[0] is not None:
            return [outcome for outcome in outcomes if outcome is not None]
        average()


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
            mean = torch.stack(grads).to(torch.promote_types(grads[0].dtype, torch.float64)).mean(0)
            for p in same:
                p.grad = mean.to(p.dtype, copy=True)  # gradients are written to


def _call_cast(model: RandomModel, policies: dict[type[nn.Module], MixedPrecisionPolicy], x: Tensor) -> Any:
    """A forward as FSDP2's mixed precision makes it, without sharding."""
    root, blocks = policies[RandomModel], policies.get(Block)
    of = dict.fromkeys(model.modules(), root)
    inner = [module for module in model.modules() if blocks is not None and isinstance(module, Block)]
    for block in inner:
        assert blocks is not None
        of |= dict.fromkeys(block.modules(), blocks)
    slots = [(of[m], m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items()]
    slots = [slot for slot in slots if slot[-1] is not None]
    cast = {id(p): _to(policy.param_dtype, p) for policy, _, _, p in slots}
    hooks = []
    for block in inner:
        assert blocks is not None
        before, after = functools.partial(_to, blocks.param_dtype), functools.partial(_to, blocks.output_dtype)
        hooks.append(
            block.register_forward_pre_hook(lambda _, args, before=before: tuple(map(before, args)), prepend=True)
        )
        hooks.append(block.register_forward_hook(lambda _, args, output, after=after: after(output)))
    try:
        for _, registered, name, p in slots:
            registered[name] = cast[id(p)]
        output = model(_to(root.param_dtype, x))
    finally:
        for _, registered, name, p in slots:
            registered[name] = p
        for hook in hooks:
            hook.remove()
    return pytree.tree_map_only(Tensor, functools.partial(_to, root.output_dtype), output)


def _to(dtype: torch.dtype | None, value: Any) -> Any:
    return value if dtype is None or not value.is_floating_point() else value.to(dtype)
