"""``sharding="replicas"``: one device per replica, on threads of XLA's CPU client, against one device without sharding.

All facts share a launch, which compiles on four threads one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import GPT, MLP, VOCABULARY, UnevenBlock
from torch import Tensor, nn
from xla_launch import DEVICES
from xla_replicas import ReplicaFacts, built, exchange, ordinal, own_rows

from graph_fsdp.report.report import engine_of

pytestmark = pytest.mark.timeout(2000)  # the first test waits for all facts

FACTS = ReplicaFacts(__name__)
BOUND = 1e-5
Batches = Callable[[int], tuple[Tensor, Tensor]]


def text(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(step))
    return x, (5 * x + 3) % VOCABULARY


def vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=generator), torch.randint(5, (8,), generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[float]:
    import torch_xla

    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if x.device.type == "xla":
            torch_xla.sync()
        losses.append(loss.item())
    return losses


def compare(make: Callable[[], nn.Module], data: Batches, steps: int = 8, mesh: Any = None, **options: Any) -> Any:
    """Train on all replicas, and a copy on the CPU by the first of them; the compiled model and its optimizer."""
    import graph_fsdp
    from graph_fsdp.xla import full_state_dict

    model = built(make)
    reference = copy.deepcopy(model)
    graph_fsdp.compile(model, mesh, backend="xla", sharding="replicas", **options)
    optimizer = adamw(model)
    found = exchange(trained(model, optimizer, [own_rows(data(step)) for step in range(steps)]))
    whole = full_state_dict(model)
    if ordinal() == 0:
        expected = trained(reference, adamw(reference), [data(step) for step in range(steps)])
        means = [sum(losses) / DEVICES for losses in zip(*found, strict=True)]
        assert max(abs(a - b) for a, b in zip(means, expected, strict=True)) < BOUND, (means, expected)
        assert expected[0] - expected[-1] > 0.01 * expected[0], "it learned"
        for name, p in reference.state_dict().items():
            assert whole[name].shape == p.shape, name
            assert not p.numel() or (whole[name] - p).abs().max() < BOUND * max(1.0, p.abs().max()), name
    return model, optimizer


def hlo(model: Any) -> dict[str, dict[str, int]]:
    """Phase → collectives in the program that XLA runs, on the first replica; {} on others."""
    return {phase: program.hlo().collectives for (_, phase), program in engine_of(model).programs.items()}


def small_gpt() -> nn.Module:
    return GPT(depth=1)


@FACTS
def gpt_with_adamw() -> None:
    from graph_fsdp.xla import shard_metadata

    model, optimizer = compare(small_gpt, text, steps=8)
    assert all(type(p) is nn.Parameter and p.device.type == "xla" for p in model.parameters())
    names = dict(built(small_gpt).named_parameters())
    metadata = shard_metadata(model)
    for name, p in model.named_parameters():
        rows = names[name].shape[0]
        assert p.shape == (rows // DEVICES, *names[name].shape[1:]), name
        assert (metadata[name].begin, metadata[name].rows) == (ordinal() * rows // DEVICES, rows // DEVICES), name
        for state in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[p][state].shape == p.shape, name
    bytes_here = sum(p.numel() * p.element_size() for p in model.parameters())
    assert bytes_here * DEVICES == sum(p.numel() * p.element_size() for p in names.values())


def one_bucket_per_unit() -> Any:
    from graph_fsdp.passes import Bucket, default_pipeline

    return default_pipeline().replace("bucket", Bucket("unit"))


@FACTS
def zero_3_gathers_again_in_backward_and_zero_2_does_not() -> None:
    for again in (True, False):
        model, _ = compare(
            lambda: MLP(depth=2), vectors, steps=2, reshard_after_forward=again, passes=one_bucket_per_unit()
        )
        programs = {phase: program for (_, phase), program in engine_of(model).programs.items()}
        texts = {phase: str(program.source) for phase, program in programs.items()}
        assert not any("enter" in text or "exit" in text for text in texts.values())
        if ordinal() == 0:
            found = hlo(model)
            for phase in ("forward", "backward"):
                counted = texts[phase].count("graph_fsdp_xla.all_gather.default")
                assert counted == found[phase].get("all-gather", 0), (phase, found)
            assert found["forward"]["all-gather"] >= 2
            assert ("all-gather" in found["backward"]) == again, found
            assert found["backward"]["reduce-scatter"] >= 2
            assert "all-reduce" not in found["backward"], "each gradient is reduced to its rows"


class WithNothing(UnevenBlock):
    """Has a parameter without elements, too."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.nothing = nn.Parameter(torch.ones(0, width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum(0)


@FACTS
def uneven_rows_scalars_and_nothing_on_a_hybrid_mesh() -> None:
    import numpy
    import torch_xla.distributed.spmd as xs

    mesh = xs.Mesh(numpy.arange(DEVICES), (2, 2), ("replicate", "fsdp"))
    model, _ = compare(lambda: MLP(depth=1, block=WithNothing), vectors, steps=4, mesh=mesh)
    block = model.blocks[0]
    assert block.up.weight.shape == (4, 16), "seven rows over two replicas"
    assert block.scale.shape == ()
    if ordinal() % 2:
        assert not block.up.weight[3].detach().cpu().any(), "what fills up stays zero"


class DropoutSeen(nn.Module):
    """The output's zeros are the mask; what passes is the gradient's mask too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self._dropped, x, use_reentrant=False)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.scale, 0.5).sin()


@FACTS
def dropout_differs_by_replica_and_is_computed_again_alike() -> None:
    import torch.utils.checkpoint

    import graph_fsdp
    from graph_fsdp.xla import full_state_dict

    model = graph_fsdp.compile(built(DropoutSeen), backend="xla", sharding="replicas")
    x = built(lambda: nn.Linear(64, 8)).weight.detach() + 1.5  # eight rows, the same on all replicas
    masks, gradients = [], []
    for _ in range(2):
        y = model(own_rows((x,))[0])
        y.sum().backward()
        masks.append((y.detach().cpu() != 0).float())
        gradients.append(model.scale.grad.cpu())
        model.zero_grad()
    assert "uniform" in str(graph_fsdp.inspect(model).backward.program), "it is computed again"
    masks_of = exchange(masks)
    for i in range(DEVICES):
        assert not torch.equal(masks_of[i][0], masks_of[i][1]), "each step draws anew"
        for j in range(i):
            assert 0.2 < (masks_of[i][0] == masks_of[j][0]).float().mean() < 0.8, (i, j)
    kept = torch.cat([of[0] for of in masks_of])
    expected = (kept * 2 * x * (2 * x).cos()).sum(0) / DEVICES
    assert (torch.cat([of[0] for of in exchange(gradients)]) - expected).abs().max() < BOUND
    assert torch.equal(full_state_dict(model)["scale"], torch.ones(64))


@FACTS
def buffers_are_a_replicas_own() -> None:
    import graph_fsdp

    model = built(lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)))
    reference = copy.deepcopy(model)
    graph_fsdp.compile(model, backend="xla", sharding="replicas")
    x, _ = vectors(0)
    output = model(own_rows((x,))[0])
    expected = reference(x[2 * ordinal() : 2 * ordinal() + 2])
    assert (output.detach().cpu() - expected).abs().max() < 1e-4
    for name in ("running_mean", "running_var"):
        assert (getattr(model[1], name).cpu() - getattr(reference[1], name)).abs().max() < BOUND, name
    assert int(model[1].num_batches_tracked) == 1


@FACTS
def values_are_the_first_replicas() -> None:
    import graph_fsdp
    from graph_fsdp.xla import full_state_dict

    own = nn.Linear(6, 6)
    with torch.no_grad():
        own.weight.fill_(float(ordinal() + 1))
    graph_fsdp.compile(own, backend="xla", sharding="replicas", sync_module_states=True)
    assert torch.equal(full_state_dict(own)["weight"], torch.ones(6, 6))
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    graph_fsdp.compile(model, backend="xla", sharding="replicas")
    whole = exchange(full_state_dict(model)["weight"])
    assert whole[0].std() > 0.1 and all(torch.equal(whole[0], other) for other in whole[1:])


@FACTS
def an_argument_that_would_be_baked_in_is_refused() -> None:
    """As in ``test_xla_training.py``."""
    import graph_fsdp
    from graph_fsdp.runtime.xla.program import BakedInputError

    model = graph_fsdp.compile(built(lambda: MLP(depth=1)), backend="xla", sharding="replicas")
    (batch, _) = own_rows(vectors(0))
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
def a_copy_has_the_rows_of_the_model() -> None:
    import graph_fsdp
    from graph_fsdp.xla import full_state_dict

    model = graph_fsdp.compile(built(lambda: MLP(depth=1)), backend="xla", sharding="replicas")
    batches = [own_rows(vectors(step)) for step in range(2)]
    trained(model, adamw(model), batches)
    copied = copy.deepcopy(model)
    losses = [trained(each, torch.optim.SGD(each.parameters(), lr=0.1), batches) for each in (copied, model)]
    assert losses[0] == losses[1]
    found, expected = full_state_dict(copied), full_state_dict(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@FACTS
def bad_input_is_refused() -> None:
    import numpy
    import torch_xla.distributed.spmd as xs

    import graph_fsdp
    from graph_fsdp import MeshError, UnsupportedError, checkpoint
    from graph_fsdp.xla import shard_metadata

    model = built(lambda: nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match="fullgraph=False with sharding='replicas'"):
        graph_fsdp.compile(model, backend="xla", sharding="replicas", fullgraph=False)
    with pytest.raises(UnsupportedError, match=r"SPMD must be on.*sharding='replicas'"):
        graph_fsdp.compile(model, backend="xla")
    with pytest.raises(MeshError, match="'data' of size 4"):
        mesh = xs.Mesh(numpy.arange(DEVICES), (DEVICES,), ("data",))
        graph_fsdp.compile(model, mesh, backend="xla", sharding="replicas")
    with pytest.raises(ValueError, match="model is not compiled with"):
        shard_metadata(model)
    compiled = graph_fsdp.compile(built(lambda: nn.Linear(4, 4)), backend="xla", sharding="replicas")
    for act in (checkpoint.save, checkpoint.load):
        with pytest.raises(UnsupportedError, match="full_state_dict"):
            act("not_written", compiled)
    assert type(model) is nn.Linear and model.weight.device.type == "cpu" and model.weight.shape == (4, 4)


test_on_four_replicas = FACTS.on_replicas(timeout=1800)
