"""``reduce_dtype`` of 8 bits: gradients are quantized in blocks, exchanged, and summed in float32."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from facts import Facts
from launch import run_ranks
from models import MLP, WIDTH
from printed import calls
from test_custom_collectives import CountingReduction
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import graph_fsdp
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.layout import quantized_sends
from graph_fsdp.planning import trace
from graph_fsdp.report.report import engine_of

FACTS = Facts(__name__)
INT8, E4M3, E5M2 = TYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = {INT8: 127.0, E4M3: 448.0, E5M2: 57344.0}


def policy(dtype: torch.dtype, **others: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(reduce_dtype=dtype, **others)


def report_of(mp_policy: Any, build: Callable[[], nn.Module] = MLP, width: int = WIDTH, **options: Any) -> Any:
    batch = (torch.ones(4, width),)
    return trace(build, batch, world_size=8, backend="eager", mp_policy=mp_policy, **options).report


# The graphs


def test_a_bucket_is_sent_quantized_in_one_message_and_summed_in_float32() -> None:
    report = report_of(policy(INT8, param_dtype=torch.bfloat16))
    assert_expected_inline(
        calls(report.backward, "reduce_scatter_start"),
        """\
reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8, int8)
reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8, int8)
reduce_blocks_0 = reduce_scatter_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8, int8)""",
    )
    sums = [node.meta["val"] for node in report.backward.graph.with_role(Role.REDUCE_START)]
    assert {value.dtype for value in sums} == {torch.float32}


def test_modules_may_have_policies_of_their_own() -> None:
    policies = {MLP: policy(E4M3), nn.Linear: MixedPrecisionPolicy()}
    assert calls(report_of(policies).backward, "reduce_scatter_start").count("float8") == 0
    policies = lambda module: policy(E5M2) if module.__class__.__name__ == "MLPBlock" else None  # noqa: E731
    found = calls(report_of(policies).backward, "reduce_scatter_start")
    assert found.count("float8_e5m2") == 2 and found.count("reduce_scatter_start") == 3, found


def test_replicas_are_reduced_in_float32() -> None:
    traced = trace(
        MLP, (torch.ones(4, WIDTH),), mesh_shape=(2, 4), backend="eager", mp_policy=policy(INT8), auto_wrap_policy={MLP}
    )
    assert_expected_inline(
        calls(traced.report.backward, "reduce_scatter_start", "all_reduce_shard_start"),
        """\
reduce_root = reduce_scatter_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum},
    blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}, head.{weight: mm, bias: sum}],
    float32, world_size=4, replicas=2, int8)
replicate_root = all_reduce_shard_start(reduced_root, ranks=8)""",
    )
    seconds = [node.meta["val"].dtype for node in traced.report.backward.graph.with_role(Role.REPLICATE_START)]
    assert seconds == [torch.float32]


# The numbers


class Sent(TorchDispatchMode):
    """Counts the bytes that all-to-alls are given."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.alltoall_base_.default:
            self.nbytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


def rounded(chunk: Tensor, dtype: torch.dtype) -> Tensor:
    """What comes out of flat gradients that are sent."""
    out = []
    for block in chunk.split(256):
        scale = (block.abs().max().float() / LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = block.float() / scale
        out.append((scaled.round() if dtype is INT8 else scaled).to(dtype).float() * scale)
    return torch.cat(out)


def mean_of(gradients: list[list[Tensor]], dtype: torch.dtype, rank: int) -> list[Tensor]:
    """The shards of a bucket's mean gradients. ``gradients``: by rank, then by parameter, in the bucket's order."""
    world, sums = len(gradients), None
    for of_rank in gradients:
        rows = [(g, -(-g.shape[0] // world)) for g in of_rank]
        padded = [torch.cat([g, g.new_zeros(n * world - len(g), *g.shape[1:])]) for g, n in rows]
        chunk = torch.cat([p.chunk(world)[rank].flatten() for p in padded])
        sums = rounded(chunk, dtype) if sums is None else sums + rounded(chunk, dtype)
    found, begin = [], 0
    for g in gradients[0]:
        n = -(-g.shape[0] // world)
        count = max(0, min(n, len(g) - rank * n))
        numel = n * g[0].numel()
        found.append((sums / world)[begin : begin + numel].view(n, *g.shape[1:])[:count])
        begin += numel
    return found


def batch_of(rank: int, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(rank)).to(dtype)


def gradients_of_ranks(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> list[list[Tensor]]:
    """By rank, as one process has them."""
    found = []
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        dtype = next(model.parameters()).dtype
        loss(model, batch_of(rank, dtype)).backward()
        found.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
    return found


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def plain(param_dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(0)
    return MLP(depth=1, width=WIDTH).to(param_dtype)


def compiled(dtype: torch.dtype, **options: Any) -> Any:
    param_dtype = options.pop("param_dtype", None)
    mp_policy = policy(dtype, param_dtype=param_dtype)
    # All parameters are one bucket, as they are registered.
    return graph_fsdp.compile(
        plain(), mp_policy=mp_policy, **{"backend": "eager", "auto_wrap_policy": {MLP}, **options}
    )


@functools.cache
def shared(dtype: torch.dtype) -> Any:
    return compiled(dtype)


def backward(model: nn.Module, loss: Tensor) -> nn.Module:
    model.zero_grad()
    loss.backward()
    return model


def local_gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr,operator]


def equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape and torch.equal(one, other), (index, one, other)


@FACTS
def each_contribution_is_rounded_once() -> None:
    rank = dist.get_rank()
    for dtype in TYPES:
        model = shared(dtype)
        loss = square(model, batch_of(rank))
        with Sent() as sent:
            backward(model, loss)
        gradients = gradients_of_ranks(plain(), square)
        equal(local_gradients(model), mean_of(gradients, dtype, rank))
        exact = [sum(of_ranks) / 2 for of_ranks in zip(*gradients, strict=True)]
        got = [p.grad.full_tensor() for p in model.parameters()]
        assert not all(map(torch.equal, got, exact)), "nothing was rounded"
        assert sent.nbytes == quantized_sends(graph_fsdp.inspect(model).backward.graph)[0], "as the report counts"


@FACTS
def what_is_not_finite_arrives_as_nan_where_it_belongs() -> None:
    for dtype in TYPES:
        for bad in (float("nan"), float("inf")):
            model, x = shared(dtype), batch_of(dist.get_rank())
            if dist.get_rank() == 0:
                x[0, 0] = bad
            backward(model, model(x).sum())
            assert all(p.grad.full_tensor().isnan().any() for p in model.parameters() if p.grad.numel() > 100)
            assert not nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().isfinite()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, scaler.scale(model(x).sum()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 65536, "on all ranks"
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(before, model.parameters(), strict=True))


@FACTS
def zeros_stay_zeros() -> None:
    for dtype in TYPES:
        model = shared(dtype)
        backward(model, (model(batch_of(dist.get_rank())) * 0).sum())
        assert all(torch.equal(p.grad, torch.zeros_like(p.grad)) for p in model.parameters())


@FACTS
def gradients_of_bfloat16_are_not_rounded_twice() -> None:
    model = compiled(E4M3, param_dtype=torch.bfloat16)
    square(model, batch_of(dist.get_rank())).backward()
    gradients = gradients_of_ranks(plain(torch.bfloat16), square)
    equal(local_gradients(model), mean_of(gradients, E4M3, dist.get_rank()))


@FACTS
def accumulated_gradients_are_rounded_in_the_end() -> None:
    rank = dist.get_rank()
    model = compiled(INT8)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        square(model, (1.0 + last) * batch_of(rank)).backward()
    both = [gradients_of_ranks(plain(), lambda model, x, times=times: square(model, times * x)) for times in (1.0, 2.0)]
    summed = [[a + b for a, b in zip(one, other, strict=True)] for one, other in zip(*both, strict=True)]
    equal(local_gradients(model), mean_of(summed, INT8, rank))


@FACTS
def sums_are_divided_in_float32() -> None:
    rank = dist.get_rank()
    expected = mean_of(gradients_of_ranks(plain(), square), INT8, rank)
    model = compiled(INT8)
    model.set_gradient_divide_factor(8.0)
    equal(local_gradients(backward(model, square(model, batch_of(rank)))), [g / 4 for g in expected])
    model.zero_grad()
    model.set_gradient_divide_factor(2.0)
    model.set_force_sum_reduction_for_comms(True)
    square(model, batch_of(rank)).backward()
    equal(local_gradients(model), expected)


@FACTS
def a_training_is_saved_and_goes_on() -> None:
    model = compiled(INT8, auto_wrap_policy=None, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: Any, seed: int) -> Tensor:
        loss = square(model, batch_of(2 * seed + dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first = step(model, optimizer, 0)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    second = step(model, optimizer, 1)
    assert first != second
    file.seek(0)
    state, of_optimizer = torch.load(file, weights_only=False)
    model.load_state_dict(state)
    optimizer.load_state_dict(of_optimizer)
    assert torch.equal(step(model, optimizer, 1), second)


@FACTS
def ranks_that_quantize_differently_are_told() -> None:
    model = compiled(TYPES[dist.get_rank()])
    with pytest.raises(graph_fsdp.RankDisagreement, match="sent as"):
        model(batch_of(0))


@FACTS
def a_collective_of_the_users_own_is_refused() -> None:
    model = compiled(INT8)
    with pytest.raises(UnsupportedError, match=r"the gradient of 'blocks.0.up.weight' sent as torch.int8 by an all-to"):
        model.set_custom_reduce_scatter(CountingReduction())
    assert engine_of(model).comms.reduce_scatter is None


test_on_two_ranks = FACTS.on(2)


def replicas_add_up_in_float32() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = compiled(INT8, mesh=mesh)
    square(model, batch_of(dist.get_rank())).backward()
    by_rank = gradients_of_ranks(plain(), square)
    shard = dist.get_rank() % 2
    means = [mean_of(by_rank[begin : begin + 2], INT8, shard) for begin in (0, 2)]
    equal(local_gradients(model), [(a + b) / 2 for a, b in zip(*means, strict=True)])


@pytest.mark.long
def test_replicas_on_four_ranks() -> None:
    run_ranks(replicas_add_up_in_float32, 4)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_error_of_an_element_is_bounded(dtype: torch.dtype) -> None:
    """As ``runtime/comm/quantized.py`` and docs/low_precision.md say it."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1 << 16, generator=generator) * 10 ** (4 * torch.randn(1 << 16, generator=generator)).clamp(
        -9, 9
    )
    largest = values.abs().view(-1, 256).amax(1, keepdim=True).expand(-1, 256).flatten()
    error = (rounded(values, dtype) - values).abs()
    of_element, of_largest = BOUNDS[dtype]
    bound = torch.maximum(of_element * values.abs(), of_largest * largest)
    assert (error <= bound * 1.0001).all()
    assert (error > 0.9 * bound).any(), "no smaller bound holds"


# of its own magnitude, and of the largest in its block
BOUNDS = {INT8: (0.0, 1 / 254), E4M3: (1 / 16, 2**-10 / 448), E5M2: (1 / 8, 2**-17 / 57344)}


def test_one_process_reduces_nothing() -> None:
    model, x = plain(), batch_of(0)
    ours = graph_fsdp.compile(copy.deepcopy(model), backend="eager", mp_policy=policy(INT8))
    for m in (model, ours):
        square(m, x).backward()
    for a, b in zip(model.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


# What is refused


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"backend": "xla"}, UnsupportedError, "not available with backend='xla'; leave one out"),
        ({"regions": "whole"}, UnsupportedError, "not available with regions='whole'; leave one out"),
        (
            {"mp_policy": policy(torch.int16)},
            ValueError,
            "reduce_dtype=torch.int16.* 16 bits or more, or, .*torch.int8",
        ),
        ({"mp_policy": {MLP: policy(torch.uint8)}}, ValueError, "reduce_dtype=torch.uint8"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = MLP()
    parameters = list(model.parameters())
    with pytest.raises(error, match=words):
        graph_fsdp.compile(model, **{"mp_policy": policy(INT8), **options})
    assert type(model) is MLP and all(map(Tensor.is_set_to, parameters, model.parameters()))


@pytest.mark.usefixtures("fake_group")
def test_replicas_alone_are_refused() -> None:
    model = MLP()
    mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(UnsupportedError, match=r"'blocks.0.up.weight' is not sharded; over replicas"):
        graph_fsdp.compile(model, mesh, backend="eager", mp_policy=policy(INT8))
    assert type(model) is MLP
