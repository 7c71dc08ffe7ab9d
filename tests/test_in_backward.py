"""``distribute_optimizer(…, in_backward=True)``: a bucket is stepped in backward, and its gradient is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocations import SLACK, measure
from expecttest import assert_expected_inline
from facts import Facts
from models import MLP
from printed import stage_text
from test_distribute_optimizer import assert_same
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import Optimizer

import graph_fsdp
from graph_fsdp import UnsupportedError, VerificationError
from graph_fsdp.compat import fake_process_group
from graph_fsdp.passes import Graph, GraphPass, PassContext, PassPipeline, Role, default_pipeline
from graph_fsdp.passes.transforms.edits import with_results

WORLD_SIZE, STEPS = 2, 3
FACTS = Facts(__name__)


class Net(nn.Module):
    """An MLP with a scalar, and a head that a loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other = MLP(depth=3), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return hidden * self.scale, self.other(hidden * self.scale)


def adamw(model: nn.Module) -> Optimizer:
    return optim.AdamW(model.parameters(), lr=0.01)


def compiled(model: nn.Module, in_backward: bool, make: Any = adamw, **options: Any) -> tuple[Any, Any]:
    graph_fsdp.compile(model, backend="eager", **options)
    return model, graph_fsdp.distribute_optimizer(make(model), in_backward=in_backward)


def trained(in_backward: bool, make: Callable[[nn.Module], Optimizer] = adamw, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, optimizer = compiled(Net(), in_backward, make, **options)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(STEPS):
        first, second = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step + 9 * dist.get_rank())))
        loss = first.square().mean()
        (loss if step == 1 else loss + second.square().mean()).backward()
        if in_backward:  # what a loss may leave out waits for step()
            left = {name for name, p in model.named_parameters() if p.grad is not None}
            assert left == ({"scale"} if step == 1 else {"scale", "other.weight", "other.bias"})
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    state = optimizer.state_dict()
    return {"model": dict(model.named_parameters()), "state": state["state"], "groups": state["param_groups"]}


@FACTS
def values_states_and_schedules_are_those_of_steps_after_backward() -> None:
    assert_same(trained(True), trained(False))


@FACTS.long
def whole_parameters_in_backward_and_groups_of_sgd() -> None:
    def groups(model: Any) -> Optimizer:
        body, rest = model.body.parameters(), [model.scale, *model.other.parameters()]
        return optim.SGD([{"params": body, "momentum": 0.9}, {"params": rest, "lr": 0.3}], lr=0.1)

    assert_same(*(trained(x, groups, reshard_after_forward=False) for x in (True, False)))


@FACTS
def replicas_reduce_nothing_to_shards() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    with pytest.raises(UnsupportedError, match=r"no parameter of optimizer is sharded over several ranks"):
        compiled(Net(), True, mesh=mesh)


@FACTS.long
def two_optimizers_share_a_model() -> None:
    def model_of(in_backward: bool) -> Any:
        torch.manual_seed(0)
        model = graph_fsdp.compile(MLP(), backend="eager")
        weights = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        both = [optim.AdamW(weights, lr=0.01), optim.SGD(others, lr=0.1)]
        both = [graph_fsdp.distribute_optimizer(optimizer, in_backward=in_backward) for optimizer in both]
        for step in range(STEPS):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        return dict(model.named_parameters())

    assert_same(model_of(True), model_of(False))


test_on_two_ranks = FACTS.on(WORLD_SIZE)


@FACTS
def a_backward_of_inputs_alone_steps_nothing() -> None:
    model, optimizer = compiled(MLP(depth=1), in_backward=True)
    before = [p.full_tensor().clone() for p in model.parameters()]
    x = torch.ones(4, 16, requires_grad=True)
    torch.autograd.grad(model(x).square().mean(), x)
    assert all(map(torch.equal, before, (p.full_tensor() for p in model.parameters())))
    model(x).square().mean().backward()
    torch.autograd.grad(model(x).square().mean(), x)  # before the step, too
    optimizer.step()
    assert not any(map(torch.equal, before, (p.full_tensor() for p in model.parameters())))


def step(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()


@pytest.mark.usefixtures("fake_group")
def test_the_graph_gives_gradients_to_the_optimizer() -> None:
    model, optimizer = compiled(MLP(), True)
    step(model, optimizer)
    assert_expected_inline(
        stage_text(graph_fsdp.inspect(model).backward),
        """\
takes kept(root)
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, down.weight}], float32, world_size=8)
    mm(head.weight), ...
free(kept(root))
reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8)
full_blocks_1 = all_gather_wait(gather_blocks_1)
gather_blocks_0 = all_gather_start([blocks.0.down.weight], float32, world_size=8)
    mm(blocks.1.down.weight), ..., mm(blocks.1.up.weight), ...
free(full_blocks_1)
reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
full_blocks_0 = all_gather_wait(gather_blocks_0)
    mm(blocks.0.down.weight), ...
free(full_blocks_0)
reduced_root = reduce_wait(reduce_root)
head_weight_updated = update_shard(head.weight: head.weight.grad, last=False)
head_bias_updated = update_shard(head.bias: head.bias.grad, last=True)
reduce_blocks_0 = reduce_scatter_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
reduced_blocks_1 = reduce_wait(reduce_blocks_1)
blocks_1_up_weight_updated = update_shard(blocks.1.up.weight: blocks.1.up.weight.grad, last=False)
blocks_1_up_bias_updated = update_shard(blocks.1.up.bias: blocks.1.up.bias.grad, last=False)
blocks_1_down_weight_updated = update_shard(blocks.1.down.weight: blocks.1.down.weight.grad, last=False)
blocks_1_down_bias_updated = update_shard(blocks.1.down.bias: blocks.1.down.bias.grad, last=True)
reduced_blocks_0 = reduce_wait(reduce_blocks_0)
blocks_0_up_weight_updated = update_shard(blocks.0.up.weight: blocks.0.up.weight.grad, last=False)
blocks_0_up_bias_updated = update_shard(blocks.0.up.bias: blocks.0.up.bias.grad, last=False)
blocks_0_down_weight_updated = update_shard(blocks.0.down.weight: blocks.0.down.weight.grad, last=False)
blocks_0_down_bias_updated = update_shard(blocks.0.down.bias: blocks.0.down.bias.grad, last=True)
return blocks_0_up_weight_updated, blocks_0_up_bias_updated, ..., blocks_0_down_weight_updated,
    blocks_0_down_bias_updated, blocks_1_up_weight_updated, blocks_1_up_bias_updated, blocks_1_down_weight_updated,
    blocks_1_down_bias_updated, head_weight_updated, head_bias_updated""",
    )


def peaks(in_backward: bool) -> tuple[int, int, int]:
    """Predicted and measured bytes at the peak of backward, without what was there before, and bytes of gradients."""
    model, optimizer = compiled(MLP(depth=16, width=128), in_backward, lambda m: optim.SGD(m.parameters(), lr=0.1))
    x = torch.randn(4, 128)

    def forward_and_backward() -> None:
        model(x).square().mean().backward()

    for _ in range(2):
        forward_and_backward()
        optimizer.step()
        optimizer.zero_grad()
    _, backward = measure(forward_and_backward)
    return (
        graph_fsdp.inspect(model).backward.memory.peak,
        backward.peak,
        sum(p.to_local().nbytes for p in model.parameters()),
    )


def test_the_peak_falls_by_gradients() -> None:
    """By those of all buckets but the last few: memory is then highest while two of these are gathered and reduced."""
    with fake_process_group(WORLD_SIZE):
        predicted, measured, nbytes = peaks(False)
        less_predicted, less_measured, _ = peaks(True)
    assert predicted - less_predicted > 0.65 * nbytes
    assert abs((predicted - less_predicted) - (measured - less_measured)) < SLACK


# What is refused


@pytest.mark.usefixtures("fake_group")
def test_clipping_by_the_norm() -> None:
    model, optimizer = compiled(MLP(), True)
    step(model, optimizer)
    with pytest.raises(UnsupportedError, match=r"clip_grad_norm_\(\) needs all gradients .* \(in_backward=True\)"):
        model.clip_grad_norm_(1.0)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaling(fused: bool) -> None:
    model, optimizer = compiled(MLP(), True, lambda m: optim.AdamW(m.parameters(), fused=fused))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(4, 16)).square().mean()).backward()
    with pytest.raises(UnsupportedError, match=r"GradScaler.step\(\) was called .* \(in_backward=True\)"):
        scaler.step(optimizer)


@pytest.mark.usefixtures("fake_group")
def test_accumulation() -> None:
    model, optimizer = compiled(MLP(), True)
    step(model, optimizer)
    model(torch.randn(4, 16)).sum().backward()
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    loss = model(torch.randn(4, 16)).sum()
    with pytest.raises(UnsupportedError, match=r"a second gradient of parameter 'head.weight' before optimizer"):
        loss.backward()
    after = {name: p.to_local() for name, p in model.named_parameters()}
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)  # the group gathers whatever memory has
    optimizer.step()
    step(model, optimizer)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("by_hook", [False, True], ids=["", "hook"])
def test_values_that_change_between_backward_and_step(lr: Any, by_hook: bool) -> None:
    model, optimizer = compiled(MLP(), True, lambda m: optim.AdamW(m.parameters(), lr=lr, foreach=False))
    (group,) = optimizer.param_groups

    def set_rate(value: float) -> None:
        group["lr"] = lr.fill_(value) if isinstance(lr, Tensor) else value

    step(model, optimizer)
    set_rate(0.2)
    step(model, optimizer)
    model(torch.randn(4, 16)).sum().backward()
    if by_hook:
        optimizer.register_step_pre_hook(lambda *_: set_rate(0.3))
    else:
        set_rate(0.3)
    with pytest.raises(
        UnsupportedError, match=r"'lr' of group 0 was .*2.*, and is .*3.* now; set it before the forward"
    ):
        optimizer.step()


class ReadTwice(nn.Module):
    """Reads a weight in a graph, and again outside of graphs or in another graph."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.outside, self.tied, self.other = outside, nn.Linear(16, 16, bias=False), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.other(x), self.tied(x)
        if self.outside:
            return self.product(first + second)
        torch._dynamo.graph_break()
        return self.tied(first) + second

    @torch.compiler.disable
    def product(self, x: Tensor) -> Tensor:
        return x @ self.tied.weight


@pytest.mark.usefixtures("fake_group")
@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_a_gradient_from_code_outside_of_graphs() -> None:
    model, optimizer = compiled(ReadTwice(outside=True), True, fullgraph=False)
    for _ in range(2):
        loss = model(torch.randn(4, 16)).sum()
        before = {name: p.to_local().clone() for name, p in model.named_parameters()}
        with pytest.raises(UnsupportedError, match=r"a second gradient of parameter 'tied.weight' before optimizer"):
            loss.backward()
        after = {name: p.to_local() for name, p in model.named_parameters()}
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    model.tied.requires_grad_(False)  # of one that is frozen there is none
    step(model, optimizer)


@pytest.mark.usefixtures("fake_group")
def test_a_gradient_of_another_graph_that_a_loss_might_have_left_out() -> None:
    model, optimizer = compiled(ReadTwice(outside=False), True, fullgraph=False)
    model(torch.randn(4, 16)).sum().backward()
    assert model.tied.weight.grad is not None
    with pytest.raises(UnsupportedError, match=r"parameter 'tied.weight' was stepped in backward, and has a second"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.usefixtures("fake_group")
def test_gradients_that_are_not_reduced() -> None:
    model, _ = compiled(MLP(), True)
    refused = r"have gradients accumulated, and an optimizer steps in backward \(in_backward=True\)"
    with pytest.raises(UnsupportedError, match=refused):
        model.set_requires_gradient_sync(False)
    with pytest.raises(UnsupportedError, match=refused):
        model.set_manual_backward_finalization(True)
    with pytest.raises(UnsupportedError, match=refused), model.no_sync():
        pass
    model = graph_fsdp.compile(MLP(), backend="eager")
    model.set_requires_gradient_sync(False)
    with pytest.raises(UnsupportedError, match=r"in_backward=True is not available .* gradients are not reduced now"):
        graph_fsdp.distribute_optimizer(adamw(model), in_backward=True)
    model.set_requires_gradient_sync(True)
    optimizer = graph_fsdp.distribute_optimizer(adamw(model), in_backward=True)
    assert isinstance(optimizer, optim.AdamW)


@pytest.mark.usefixtures("fake_group")
def test_models_and_optimizers_that_cannot() -> None:
    model, _ = compiled(MLP(), True)
    give = graph_fsdp.distribute_optimizer
    with pytest.raises(UnsupportedError, match=r"another optimizer steps its parameters in backward"):
        give(adamw(model), in_backward=True)
    with pytest.raises(UnsupportedError, match=r"in_backward=True: Muon needs whole matrices"):
        give(optim.Muon([p for p in model.parameters() if p.dim() == 2]), in_backward=True)
    whole = graph_fsdp.compile(MLP(), regions="whole", backend="inductor")
    with pytest.raises(UnsupportedError, match=r"regions='whole'"):
        give(adamw(whole), in_backward=True)


class GathersLate(GraphPass):
    """Waits for the first layer's gather at the end of backward, where the gradient of its input is computed."""

    name, phases, requires = "gathers_late", ("backward",), ("scheduled",)

    def run(self, graph: Graph, context: PassContext) -> None:
        (gather,) = (g for g in graph.gathers if g.bucket == "0")
        assert gather.wait is not None
        for node in sorted(with_results(gather.wait), key=graph.positions().__getitem__):
            graph.output.prepend(node)


def layers(passes: PassPipeline) -> nn.Module:
    model, _ = compiled(
        nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), True, auto_wrap_policy={nn.Linear}, passes=passes
    )
    return model


@pytest.mark.usefixtures("fake_group")
def test_a_bucket_is_stepped_when_it_has_been_gathered() -> None:
    model = layers(default_pipeline().insert_after("prefetch", GathersLate()))
    model(torch.randn(4, 16, requires_grad=True)).sum().backward()
    nodes = [n for n in graph_fsdp.inspect(model).backward.stages["update"].graph.nodes if "fsdp" in n.meta]
    roles = [n.meta["fsdp"].role for n in nodes if n.meta["fsdp"].bucket == "0"]
    assert roles.index(Role.REDUCE_WAIT) < roles.index(Role.GATHER_WAIT) < roles.index(Role.UPDATE)


@pytest.mark.usefixtures("fake_group")
def test_the_verifier_sees_a_gather_behind_a_step() -> None:
    model = layers(default_pipeline().insert_after("free", GathersLate()))
    with pytest.raises(VerificationError, match=r"a parameter is stepped when it has been gathered"):
        model(torch.randn(4, 16, requires_grad=True))
