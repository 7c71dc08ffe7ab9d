"""``sharding="auto"``: the global view of a model, which XLA's partitioner divides under constraints."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from reference import Outcome
from torch import Tensor, nn
from xla_launch import DEVICES, XlaFacts, run_xla
from xla_models import check_training, fsdp_mesh, to_devices, train

from graph_fsdp.report.report import engine_of

FACTS = XlaFacts(__name__)
BLOCKS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def compiled(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    import graph_fsdp

    return graph_fsdp.compile(model, mesh, backend="xla", sharding="auto", **options)


def step(model: nn.Module, mesh: Any, rows: int = 8, **batch: Tensor) -> Any:
    batch = batch or {"x": torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))}
    return model(**to_devices(batch, mesh))


# --- numbers


def train_auto(name: str) -> tuple[Outcome, dict[str, int], dict[str, int]]:
    """What a training has seen; bytes of parameters and of the optimizer's state: all of them, and a device's."""
    from graph_fsdp.compat import xla as compat_xla

    whole, held = {"parameters": 0, "optimizer": 0}, {"parameters": 0, "optimizer": 0}

    def count(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        compat_xla.sync(wait=True)
        for parameter in model.parameters():
            state = [value for value in optimizer.state[parameter].values() if value.dim()]
            for kind, tensors in (("parameters", [parameter.detach()]), ("optimizer", state)):
                whole[kind] += sum(t.numel() for t in tensors)
                held[kind] += sum(compat_xla.device_shards(t)[0].padded.numel() for t in tensors)

    return train(name, compiled, after_last_step=count), whole, held


@pytest.mark.parametrize("name", ["gpt", "cnn_batchnorm"])
def test_the_global_view_equals_one_device(name: str) -> None:
    outcome, whole, held = run_xla(train_auto, name)
    check_training(name, outcome, global_batch=True)
    for kind in whole:
        padding = 1.1  # rows that do not divide by the devices, of small parameters
        assert whole[kind] / DEVICES <= held[kind] <= padding * whole[kind] / DEVICES, kind


# --- graphs


def _collectives(reshard_after_forward: bool) -> dict[str, dict[str, int]]:
    import graph_fsdp

    mesh = fsdp_mesh()
    model = compiled(Net(), mesh, reshard_after_forward=reshard_after_forward)
    step(model, mesh).square().mean().backward()
    report = graph_fsdp.inspect(model)
    hlo = {"forward": report.forward.hlo(), "backward": report.backward.hlo()}
    # The schedule has a message for each weight, and XLA a gather.
    rows = [line.split() for line in hlo["forward"].table().splitlines()]
    assert ["all-gather", str(2 * BLOCKS), str(2 * BLOCKS)] in rows, rows
    return {phase: found.collectives for phase, found in hlo.items()}


@FACTS
def zero_3_gathers_again_in_backward() -> None:
    found = _collectives(True)
    assert found["forward"]["all-gather"] == 2 * BLOCKS, found
    # All but the first weight's, whose inputs need no gradient.
    assert found["backward"]["all-gather"] == 2 * BLOCKS - 1, found
    # The CPU compiler leaves a reduce-scatter as an all-reduce of which each device takes its part.
    reductions = found["backward"].get("reduce-scatter", 0) + found["backward"].get("all-reduce", 0)
    assert 1 <= reductions <= 2 * BLOCKS, found
    assert not found["forward"].keys() & {"all-to-all", "collective-permute"}, found
    assert not found["backward"].keys() & {"all-to-all", "collective-permute"}, found


@FACTS
def zero_2_does_not() -> None:
    found = _collectives(False)
    assert found["forward"]["all-gather"] == 2 * BLOCKS, found
    assert "all-gather" not in found["backward"], found


@FACTS
def units_and_inputs_are_constrained_over_the_batch() -> None:
    import graph_fsdp

    mesh = fsdp_mesh()
    model = compiled(Net(), mesh)
    step(model, mesh).sum().backward()
    report = graph_fsdp.inspect(model)
    code = report.capture.stages["constrain_activations"].body
    assert code.count("graph_fsdp.constrain.default") == 1 + BLOCKS, code
    assert code.count("['fsdp', '']") == 1 + BLOCKS, code
    # Of each weight one constraint, beside those of the activations, and of each gradient.
    assert report.forward.lowered is not None and report.backward.lowered is not None
    assert report.forward.lowered.count("['', '']") == 2 * BLOCKS
    assert "up_weight_reduced" in report.backward.lowered
    assert "all_gather_start" not in report.forward.lowered


@FACTS
def another_size_of_batch_is_another_graph_and_evaluation_too() -> None:
    mesh = fsdp_mesh()
    net = Net()
    expected = {rows: net(torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))) for rows in (8, 16)}
    model = compiled(net, mesh)
    for rows, value in expected.items():
        torch.testing.assert_close(step(model, mesh, rows).detach().cpu(), value.detach())
    with torch.no_grad():
        torch.testing.assert_close(step(model, mesh, 8).cpu(), expected[8].detach())
    assert {phase for _, phase in engine_of(model).programs} == {"forward", "inference"}


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.net(x).t(), "loss": self.net(x).mean()}


@FACTS
def shard_output_marks_what_is_no_tensor() -> None:
    import torch_xla.distributed.spmd as xs

    import graph_fsdp
    from graph_fsdp.compat import xla as compat_xla

    def shard_output(output: Any, mesh: Any) -> None:
        xs.mark_sharding(output["logits"], mesh, (None, "fsdp"))

    mesh = fsdp_mesh()
    expected = Scores()
    model = Scores()
    model.load_state_dict(expected.state_dict())
    model = compiled(model, mesh, shard_output=shard_output)
    x = torch.randn(16, 8)
    output = step(model, mesh, x=x)
    torch.testing.assert_close(output["logits"].detach().cpu(), expected(x)["logits"].detach())
    code = graph_fsdp.inspect(model).capture.stages["constrain_activations"].body
    assert "['', 'fsdp']" in code and "mark_sharding" not in code, code
    assert compat_xla.sharding_specs([output["logits"].detach()]) == ["{devices=[1,4]0,1,2,3}"]


@FACTS
def dropout_is_drawn_for_the_global_batch() -> None:
    mesh = fsdp_mesh()
    model = compiled(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Dropout(0.5)), mesh)
    x = torch.ones(64, 8)
    first, second = (step(model, mesh, input=x) for _ in range(2))
    first.sum().backward()
    masks = [(value.detach().cpu() != 0).float() for value in (first, second)]
    assert 0.35 < masks[0].mean() < 0.65
    assert not torch.equal(*masks)
    rows = masks[0].reshape(DEVICES, -1)
    assert len({tuple(row.tolist()) for row in rows}) == DEVICES
    gradient = model[0].weight.grad.cpu()
    torch.testing.assert_close(gradient, (2 * masks[0]).sum(0)[:, None].expand(8, 8))  # the mask of forward


@FACTS
def a_batch_that_is_not_sharded_is_told() -> None:
    model = compiled(Net(), fsdp_mesh())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(8, 8).to("xla"))
    assert any("no input of the model is sharded (x)" in str(w.message) for w in caught)


@FACTS
def bfloat16_is_gathered_and_hsdp_replicates() -> None:
    import numpy
    import torch_xla.distributed.spmd as xs
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import graph_fsdp

    fsdp_mesh()
    mesh = xs.Mesh(numpy.arange(DEVICES), (2, DEVICES // 2), ("replicate", "fsdp"))
    net = Net()
    x = torch.randn(8, 8)
    expected = net(x)
    expected.square().mean().backward()
    gradients = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = compiled(net, mesh, mp_policy=policy)
    value = x.to("xla")
    xs.mark_sharding(value, mesh, (("replicate", "fsdp"), None))
    output = model(value)
    assert output.dtype is torch.bfloat16
    output.square().mean().backward()
    torch.testing.assert_close(output.detach().cpu().float(), expected.detach(), atol=0.05, rtol=0.05)
    for name, parameter in model.named_parameters():
        assert parameter.dtype is parameter.grad.dtype is torch.float32
        torch.testing.assert_close(parameter.grad.cpu(), gradients[name], atol=0.02, rtol=0.1)
    groups = {tuple(sorted(part)) for part in _groups(graph_fsdp.inspect(model).forward.hlo().text)}
    assert groups == {(0, 1), (2, 3)}, groups


def _groups(text: str) -> list[list[int]]:
    import re

    lines = [line for line in text.splitlines() if " all-gather(" in line]
    found = [re.search(r"replica_groups=\{(\{.*?\})\}", line) for line in lines]
    assert lines and all(found), lines
    return [
        [int(d) for d in group.split(",")] for match in found if match for group in re.findall(r"\{(.*?)\}", match[1])
    ]


test_on_four_devices = FACTS.on_devices()
