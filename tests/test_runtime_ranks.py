"""The runtime on two gloo ranks: collectives against torch, printed stages as programs, bytes that a rank holds.

Both ranks run each fact, in one launch for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from facts import Facts
from models import GPT, MLP, VOCABULARY
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import graph_fsdp
from graph_fsdp.passes import Role, Stage
from graph_fsdp.passes.ir.dialect import (
    all_gather_start,
    all_gather_wait,
    all_reduce_start,
    gather_param,
    has_role,
    reduce_grad,
    reduce_scatter_start,
    reduce_wait,
)
from graph_fsdp.report.report import engine_of

WORLD_SIZE = 2
FACTS = Facts(__name__)


# Collectives: what each rank gets for parameters of every shape

SHAPES: dict[str, tuple[int, ...]] = {
    "even": (4, 3),
    "uneven": (5, 3),
    "fewer rows than ranks": (1, 3),
    "vector": (7,),
    "three dimensions": (3, 2, 2),
}


def padded_shard(full: Tensor) -> Tensor:
    """This rank's rows, and zeros where there are none."""
    rows = -(-full.shape[0] // WORLD_SIZE)
    padded = torch.cat([full, full.new_zeros(WORLD_SIZE * rows - full.shape[0], *full.shape[1:])])
    return padded[dist.get_rank() * rows :][:rows].clone()


def gradients(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The gradient of each rank; all ranks know all of them."""
    return [torch.randn(shape).to(dtype) for _ in range(WORLD_SIZE)]


def mean(values: list[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([value.to(dtype) for value in values]).sum(0) / WORLD_SIZE


def group() -> str:
    return dist.group.WORLD.group_name


def equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@FACTS
def a_gathered_parameter_is_whole_on_every_rank() -> None:
    for shape in SHAPES.values():
        full = torch.randn(shape)
        shard = padded_shard(full)
        equal(gather_param(shard, shape, torch.float32, torch.float32, "p", group()), full)
        gathered = gather_param(shard, shape, torch.bfloat16, torch.float32, "p", group())
        equal(gathered, full.to(torch.bfloat16))


@FACTS
def a_scalar_is_its_own_gather() -> None:
    scalar = torch.tensor(1.5)
    gathered = gather_param(scalar, (), torch.bfloat16, torch.float32, "p", group())
    equal(gathered, scalar.to(torch.bfloat16))


@FACTS
def a_reduced_gradient_is_the_mean_of_the_ranks() -> None:
    for shape in SHAPES.values():
        values = gradients(shape)
        expected = padded_shard(mean(values))
        own = values[dist.get_rank()]
        equal(reduce_grad(own, expected.shape, torch.float32, torch.float32, "p", group()), expected)


@FACTS
def the_mean_is_taken_in_the_reductions_dtype() -> None:
    for dtype, reduce_dtype in [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float64),
    ]:
        values = gradients((5, 3), dtype)
        expected = padded_shard(mean(values, reduce_dtype)).to(torch.float32)
        own = values[dist.get_rank()]
        equal(reduce_grad(own, expected.shape, torch.float32, reduce_dtype, "p", group()), expected)


@FACTS
def the_gradient_of_a_scalar_is_all_reduced() -> None:
    values = gradients(())
    own = values[dist.get_rank()]
    equal(reduce_grad(own, (), torch.float32, torch.float32, "p", group()), mean(values))


def check_bucket(storage: Tensor | None) -> None:
    """Gather parameters of all shapes at once, from shards in one storage with gaps, or each in its own."""
    fulls = [torch.randn(shape) for shape in SHAPES.values()]
    shards = [padded_shard(full) for full in fulls]
    offsets = [16 * index for index in range(len(fulls))]
    if storage is not None:
        for index, offset in enumerate(offsets):
            place = storage[32 + offset :][: shards[index].numel()].view(shards[index].shape)
            shards[index] = place.copy_(shards[index])
    length = 16 * len(fulls)
    for dtype in (torch.float32, torch.bfloat16):
        buffer = all_gather_wait(all_gather_start(shards, offsets, length, dtype, WORLD_SIZE, group()))
        assert (buffer.shape, buffer.dtype) == ((WORLD_SIZE * length,), dtype)
        for full, offset in zip(fulls, offsets, strict=True):
            equal(buffer[WORLD_SIZE * offset :][: full.numel()].view(full.shape), full.to(dtype))


@FACTS
def a_gathered_bucket_has_each_parameter_whole_and_contiguous() -> None:
    check_bucket(torch.zeros(200))
    check_bucket(None)


@FACTS
def a_reduced_bucket_has_the_mean_of_each_gradient() -> None:
    values = [gradients(shape) for shape in SHAPES.values()]
    own = [of_rank[dist.get_rank()] for of_rank in values]
    flat = reduce_wait(reduce_scatter_start(own, torch.float32, WORLD_SIZE, group()))
    equal(flat, torch.cat([padded_shard(mean(of_rank)).view(-1) for of_rank in values]))
    flat = reduce_wait(all_reduce_start(own, torch.float32, WORLD_SIZE, group()))
    equal(flat, torch.cat([mean(of_rank).view(-1) for of_rank in values]))


@FACTS
def several_collectives_may_be_under_way() -> None:
    full, values = torch.randn(4, 3), gradients((4, 3))
    start = all_gather_start([padded_shard(full)], [0], 6, torch.float32, WORLD_SIZE, group())
    reduction = reduce_scatter_start([values[dist.get_rank()]], torch.float32, WORLD_SIZE, group())
    equal(reduce_wait(reduction).view(2, 3), padded_shard(mean(values)))
    equal(all_gather_wait(start).view(4, 3), full)


# Printed stages are programs


def execute(stage: Stage, inputs: list[Tensor]) -> list[Tensor | None]:
    """Run a stage's text as the module that it is."""
    namespace: dict[str, Callable[..., list[Tensor | None]]] = {}
    exec(stage.code, namespace)
    with torch.no_grad():
        return list(namespace["forward"](*inputs))


def inputs_of(stage: Stage) -> list[str]:
    """For each input the parameter whose shard it is, or ""."""
    placeholders = [node for node in stage.graph.nodes if node.op == "placeholder"]
    return [node.meta["fsdp"].params[0] if has_role(node, Role.SHARD) else "" for node in placeholders]


def check_stages(model: nn.Module, x: Tensor) -> None:
    """Every stage of forward, backward and inference, run on this rank's shards, gives what the model gives."""
    graph_fsdp.compile(model, backend="eager")
    output = model(x)
    output.sum().backward()
    with torch.no_grad():
        model(x)
    report = graph_fsdp.inspect(model)
    parameters = engine_of(model).storage.parameters
    for name, stage in report.forward.stages.items():
        names = inputs_of(stage)
        assert set(names) == {*parameters, ""}
        result, *saved = execute(stage, [parameters[n].input.clone() if n else x for n in names])
        equal(result, output)
        if name in report.backward.stages:  # returns a gradient, or None, per input of forward
            found = execute(report.backward.stages[name], [*saved, torch.ones_like(output)])
            for parameter, gradient in zip(names, found, strict=True):
                if parameter:
                    expected = parameters[parameter].shard.grad.to_local()
                    equal(gradient[: len(expected)], expected)
    for stage in report.inference.stages.values():
        inputs = [parameters[n].input.clone() if n else x for n in inputs_of(stage)]
        equal(execute(stage, inputs)[0], output)


@FACTS
def every_stage_of_an_mlp_computes_what_the_model_does() -> None:
    check_stages(MLP(), torch.randn(4, 16))


@FACTS
def every_stage_of_a_gpt_computes_what_the_model_does() -> None:
    check_stages(GPT(depth=1), torch.randint(VOCABULARY, (2, 8)))


# Memory


def bytes_of(tensors: list[Tensor]) -> int:
    """Bytes of the storages that local tensors lie in, each once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in local)}.values())


@FACTS
def parameters_gradients_and_adam_state_take_a_ranks_share() -> None:
    model = MLP(depth=2, width=64)
    count = len(list(model.parameters()))
    share = sum(parameter.nbytes for parameter in model.parameters()) // WORLD_SIZE
    graph_fsdp.compile(model, backend="eager")
    optimizer = AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        held = {
            "parameters": bytes_of(list(model.parameters())),
            "gradients": bytes_of([parameter.grad for parameter in model.parameters()]),
            "first moments": bytes_of([state["exp_avg"] for state in optimizer.state.values()]),
            "second moments": bytes_of([state["exp_avg_sq"] for state in optimizer.state.values()]),
        }
        for what, nbytes in held.items():
            assert share - count * 64 <= nbytes <= share + count * 64, (what, nbytes, share)
        optimizer.zero_grad()
    assert engine_of(model).counter.current == 0


test_on_two_ranks = FACTS.on(WORLD_SIZE)
