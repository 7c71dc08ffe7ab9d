"""Options and models through ``backend="xla"`` on four virtual devices, against one device without any sharding.

Each fact trains for six or eight updating steps: a program with a parameter baked into it would go on with its first
value, which few steps cannot tell from rounding.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import GPT, MLP, UnevenBlock, frozen_mlp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from xla_compare import BOUND, ROWS, compare, mesh, sgd, text, vectors
from xla_launch import DEVICES, XlaFacts

from graph_fsdp.report.report import engine_of

pytestmark = pytest.mark.timeout(2000)  # the first test waits for all facts

FACTS = XlaFacts(__name__)


def lowered(model: Any, phase: str, operator: str) -> int:
    """How often an operator stands in the latest lowered graph of a phase."""
    import graph_fsdp

    report = graph_fsdp.inspect(model)
    return str(getattr(report, phase).program).count(f"graph_fsdp_xla.{operator}.default")


def hlo(model: Any, phase: str) -> dict[str, int]:
    """Collectives in the program that XLA runs for the latest graph of a phase."""
    programs = engine_of(model).programs
    return next(programs[key] for key in reversed(programs) if key[1] == phase).hlo().collectives


def one_bucket_per_unit() -> Any:
    from graph_fsdp.passes import Bucket, default_pipeline

    return default_pipeline().replace("bucket", Bucket("unit"))


@FACTS
def gpt_with_adamw() -> None:
    import graph_fsdp

    model = compare(GPT(depth=1), steps=8)
    report = graph_fsdp.inspect(model)
    assert report.compiled_regions == report.regions == 2, "forward and backward, each compiled once"


@FACTS
def an_mlp_with_sgd() -> None:
    compare(MLP(depth=1), vectors, optimizer=sgd, steps=8)


@FACTS
def zero_3_gathers_again_in_backward_and_zero_2_does_not() -> None:
    again = compare(MLP(depth=2), vectors, reshard_after_forward=True, passes=one_bucket_per_unit())
    for phase in ("forward", "backward"):
        assert lowered(again, phase, "all_gather") == hlo(again, phase)["all-gather"] >= 2
    assert lowered(again, "forward", "barrier") > 0
    assert lowered(again, "backward", "reduce_scatter") == hlo(again, "backward")["reduce-scatter"] >= 2
    kept = compare(MLP(depth=2), vectors, reshard_after_forward=False, passes=one_bucket_per_unit())
    assert lowered(kept, "forward", "all_gather") == hlo(kept, "forward")["all-gather"] >= 2
    assert lowered(kept, "backward", "all_gather") == 0
    assert "all-gather" not in hlo(kept, "backward")
    # Each parameter for itself: XLA joins gathers where that is worth it, and cannot take apart what was packed.
    parameters = len(list(kept.parameters()))
    assert lowered(kept, "forward", "all_gather") == lowered(kept, "backward", "reduce_scatter") == parameters


@FACTS
def hybrid_mesh() -> None:
    model = compare(GPT(depth=1), shape=(2, 2))
    assert lowered(model, "backward", "all_reduce") > 0
    assert model.model.head.weight.grad is None


@FACTS
def gradients_accumulate_over_two_backwards() -> None:
    compare(MLP(depth=2), vectors, steps=10, accumulate=2)


@FACTS
def a_copy_trains_as_the_model_and_leaves_it_alone() -> None:
    import torch_xla

    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    def values(model: nn.Module, steps: int) -> list[Tensor]:
        for x, y in map(vectors, range(steps)):
            F.cross_entropy(model(shard_batch(x, axes)), shard_batch(y, axes)).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
            torch_xla.sync(wait=True)
        return [value.detach().cpu() for value in model.state_dict().values()]

    axes, plain = mesh(DEVICES), nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    model = graph_fsdp.compile(plain, axes, backend="xla")
    before, copied = values(model, 1), copy.deepcopy(model)
    assert all(map(torch.equal, values(copied, 0), before))
    found = values(copied, 2)
    assert all(map(torch.equal, values(model, 0), before)), "its memory is its own"
    assert all(map(torch.equal, values(model, 2), found)) and not torch.equal(found[0], before[0])


@FACTS
def evaluation_without_gradients() -> None:
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    model = GPT(depth=1)
    reference, axes = copy.deepcopy(model), mesh(DEVICES)
    compiled = graph_fsdp.compile(model, axes, backend="xla")
    for step in range(3):
        x, _ = text(step)
        with torch.no_grad():
            expected = reference(x)
            found = compiled(shard_batch(x, axes))
        assert found.shape == expected.shape
        assert (found.cpu() - expected).abs().max() < BOUND
        with torch.no_grad():
            for p, q in zip(reference.parameters(), compiled.parameters(), strict=True):
                p.mul_(1.5)
                q.mul_(1.5)


@FACTS
def tied_parameters() -> None:
    model = compare(GPT(depth=1, tied=True))
    assert model.model.head.weight is model.model.tokens.weight


@FACTS
def frozen_parameters() -> None:
    compare(frozen_mlp(), vectors)


@FACTS
def uneven_rows_and_scalars() -> None:
    model = compare(MLP(depth=2, block=UnevenBlock), vectors)
    from graph_fsdp.compat import xla as compat_xla

    shard = compat_xla.device_shards(model.model.blocks[0].up.weight.detach())[0].padded
    assert shard.shape == (2, 16), "seven rows over four devices"


@FACTS
def torchs_checkpoint() -> None:
    compare(GPT(depth=1, checkpointed=True))


@FACTS
def activation_checkpointing_by_unit() -> None:
    compare(GPT(depth=1), activation_checkpointing="unit")


@FACTS
def outputs_and_inputs_with_gradients() -> None:
    """The loss outside of the model, and a gradient for its input."""
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    model = MLP(depth=1)
    reference, axes = copy.deepcopy(model), mesh(DEVICES)
    compiled = graph_fsdp.compile(model, axes, backend="xla")
    x, target = vectors(0)
    xs, targets = shard_batch((x, target), axes)
    x, xs = x.requires_grad_(), xs.requires_grad_()
    F.cross_entropy(reference(x), target).backward()
    F.cross_entropy(compiled(xs), targets).backward()
    assert x.grad is not None and xs.grad is not None
    assert (xs.grad.cpu() - x.grad).abs().max() < 1e-6
    for (name, p), q in zip(reference.named_parameters(), compiled.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert (q.grad.cpu() - p.grad).abs().max() < 1e-6, name


class DropoutSeen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5, self.training)


@FACTS
def dropout_differs_by_device_and_by_step() -> None:
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    model = graph_fsdp.compile(DropoutSeen(), axes, backend="xla")
    x = shard_batch(torch.randn(ROWS, 64), axes)
    torch.manual_seed(1)
    first, second = (model(x).detach().cpu() == 0 for _ in range(2))
    torch.manual_seed(1)
    again = model(x).detach().cpu() == 0
    assert torch.equal(first, again), "torch.manual_seed decides"
    assert not torch.equal(first, second)
    masks = first.view(DEVICES, -1)
    for i in range(DEVICES):
        for j in range(i):
            assert 0.3 < (masks[i] == masks[j]).float().mean() < 0.7, (i, j)
    assert 0.4 < first.float().mean() < 0.6


class Repeated(nn.Module):
    """Backward of a checkpointed layer draws forward's mask, or its gradient is not that of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self._dropped, x, use_reentrant=False)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.scale, 0.5).sin()


@FACTS
def a_mask_that_is_computed_again_is_forwards() -> None:
    import torch.utils.checkpoint

    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    model = graph_fsdp.compile(Repeated(), axes, backend="xla")
    x = torch.rand(ROWS, 64) + 0.5
    y = model(shard_batch(x, axes))
    y.sum().backward()
    kept = (y.detach().cpu() != 0).float()
    expected = (kept * 2 * x * (2 * x).cos()).sum(0)
    assert model.scale.grad is not None
    assert (model.scale.grad.cpu() - expected).abs().max() < 1e-5
    assert "uniform" in str(graph_fsdp.inspect(model).backward.program), "it is computed again"


@FACTS
def bfloat16_parameters_and_float32_reductions() -> None:
    import graph_fsdp

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = compare(MLP(depth=2), vectors, mp_policy=policy, bound=0.1)
    program = str(graph_fsdp.inspect(model).forward.program)
    assert "torch.bfloat16" in program
    assert all(p.dtype is torch.float32 for p in model.parameters())


@FACTS
def a_batch_that_is_not_sharded_is_told() -> None:
    import graph_fsdp

    axes = mesh(DEVICES)
    model = graph_fsdp.compile(MLP(depth=1), axes, backend="xla")
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(ROWS, 16).to("xla"))
    found = [str(w.message) for w in caught if "shard_batch" in str(w.message)]
    assert len(found) == 1 and "(x)" in found[0], found


@FACTS
def an_argument_that_shares_memory_is_read_in_every_step() -> None:
    """The trap of torch_xla's bridge: see [Note: compiled once] in ``runtime/xla/program.py``."""
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    model = MLP(depth=1)
    reference, axes = copy.deepcopy(model), mesh(DEVICES)
    compiled = graph_fsdp.compile(model, axes, backend="xla")
    x, _ = vectors(0)
    shared = shard_batch(x, axes)
    others = [shared.clone(), shared.detach()]
    import torch_xla

    torch_xla.sync()
    for step in range(3):
        with torch.no_grad():
            found = compiled(others[0]).cpu()
        assert (found - reference(x)).abs().max() < BOUND, step
        x = vectors(step + 1)[0]
        with torch.no_grad():
            others[0].copy_(shard_batch(x, axes))


@FACTS
def an_argument_that_would_be_baked_in_is_refused() -> None:
    """Tensors that share memory with others, in the place of those that a graph is compiled on."""
    import graph_fsdp
    from graph_fsdp.runtime.xla.program import BakedInputError
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    model = graph_fsdp.compile(MLP(depth=1), axes, backend="xla")
    batch = shard_batch(vectors(0)[0], axes)
    with torch.no_grad():
        model(batch)
    (program,) = engine_of(model).programs.values()
    alone, owners = program.fresh_inputs, []

    def shared(inputs: Any) -> Any:
        owners.extend(alone(inputs))
        return [tensor.clone() for tensor in owners]

    program._compiled, program.fresh_inputs = None, shared
    with torch.no_grad(), pytest.raises(BakedInputError, match="first value"):
        model(batch)


@FACTS
def a_loaded_state_is_sharded_again() -> None:
    import graph_fsdp
    from graph_fsdp.compat import xla as compat_xla
    from graph_fsdp.xla import shard_batch

    torch.manual_seed(3)
    other, axes = MLP(depth=1), mesh(DEVICES)
    model = graph_fsdp.compile(MLP(depth=1), axes, backend="xla")
    x, _ = vectors(0)
    batch = shard_batch(x, axes)
    with torch.no_grad():
        model(batch)
        model.load_state_dict(other.state_dict())
        assert (model(batch).cpu() - other(x)).abs().max() < BOUND
    for name, p in model.named_parameters():
        shard = compat_xla.device_shards(p.detach())[0].padded
        assert shard.shape[0] == -(-p.shape[0] // DEVICES), name


@FACTS
def a_model_on_the_meta_device() -> None:
    import graph_fsdp

    torch.manual_seed(4)
    expected = GPT(depth=1)
    torch.manual_seed(4)
    with torch.device("meta"):
        model = GPT(depth=1)
    graph_fsdp.compile(model, mesh(DEVICES), backend="xla")
    for (name, p), q in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert q.device.type == "xla" and torch.equal(q.detach().cpu(), p.detach()), name


@FACTS
def batches_that_are_sharded_otherwise_have_graphs_of_their_own() -> None:
    """Two rows on each device, and two rows that all devices have, look alike to a device."""
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    model = MLP(depth=1)
    reference, axes = copy.deepcopy(model), mesh(DEVICES)
    compiled = graph_fsdp.compile(model, axes, backend="xla")
    x, _ = vectors(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (x, x[:2], x):
            batch = shard_batch(rows, axes) if len(rows) == ROWS else rows.to("xla")
            found = compiled(batch)
            assert found.shape[0] == len(rows)
            assert (found.cpu() - reference(rows)).abs().max() < BOUND


@FACTS
def what_xla_does_not_have_is_refused() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    import graph_fsdp
    from graph_fsdp.errors import UnsupportedError

    axes = mesh(DEVICES)
    for options in (
        {"offload_policy": CPUOffloadPolicy()},
        {"reshard_after_forward": 2},
        {"shard_placement_fn": lambda p: None},
        {"activation_checkpointing": "offload"},
        {"dynamic": True},
    ):
        with pytest.raises(UnsupportedError):
            graph_fsdp.compile(MLP(), axes, backend="xla", **options)
    model = graph_fsdp.compile(MLP(), axes, backend="xla")
    with pytest.raises(UnsupportedError, match="adds up"):
        model.set_requires_gradient_sync(False)
    with pytest.raises(UnsupportedError, match="XLA"):
        model.unshard()


test_on_four_devices = FACTS.on_devices(timeout=1800)
