"""``activation_checkpointing``: what forward saves and backward computes again, on the printed graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpointed_models import Net, backward_order, saved, traced
from expecttest import assert_expected_inline
from models import GPT
from printed import calls
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import graph_fsdp
from graph_fsdp import ActivationCheckpointing, compat
from graph_fsdp.compat.traces.torch_compile import functorch_config
from graph_fsdp.passes import CheckpointActivations, PassPipeline, default_pipeline
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role

RECOMPUTES = "remat_using_tags_for_fwd_loss_bwd_graph"


def test_without_it_what_the_partitioner_chooses_is_saved() -> None:
    found = traced(None)
    assert_expected_inline(str(saved(found)), """['mm', 'gelu', 'add', 'mm', 'gelu', 'add', 'gelu', 'mm']""")
    assert_expected_inline(
        backward_order(found),
        """\
gather_root [mm] full_root gather_blocks_1 [mm gelu_backward] free_root reduce_root [mm] full_blocks_1
gather_blocks_0 [mm gelu_backward mm mm add] free_blocks_1 reduce_blocks_1 [mm] full_blocks_0 [mm gelu_backward mm
mm add] free_blocks_0 reduced_root reduce_blocks_0 reduced_blocks_1 reduced_blocks_0""",
    )


def test_unit_saves_what_goes_into_units_and_what_the_root_reads_of_them() -> None:
    found = traced("unit")
    assert_expected_inline(str(saved(found)), """['add', 'add', 'gelu', 'mm']""")
    assert_expected_inline(
        backward_order(found),
        """\
gather_root [mm] full_root gather_blocks_1 [mm gelu_backward] free_root reduce_root full_blocks_1 gather_blocks_0
[mm gelu mm mm gelu_backward mm mm add] free_blocks_1 reduced_root reduce_blocks_1 full_blocks_0 [mm gelu mm mm
gelu_backward mm mm add] free_blocks_0 reduced_blocks_1 reduce_blocks_0 reduced_blocks_0""",
    )


def test_selective_saves_matrix_multiplications_too() -> None:
    found = traced("selective")
    assert_expected_inline(str(saved(found)), """['mm', 'add', 'mm', 'add', 'gelu', 'mm']""")
    assert_expected_inline(
        backward_order(found),
        """\
gather_root [mm] full_root gather_blocks_1 [mm gelu_backward] free_root reduce_root [gelu mm] full_blocks_1
gather_blocks_0 [mm gelu_backward mm mm add] free_blocks_1 reduced_root reduce_blocks_1 [gelu mm] full_blocks_0 [mm
gelu_backward mm mm add] free_blocks_0 reduced_blocks_1 reduce_blocks_0 reduced_blocks_0""",
    )


def test_a_collection_of_operators_saves_their_results() -> None:
    found = traced([torch.ops.aten.gelu])
    assert_expected_inline(str(saved(found)), """['gelu', 'add', 'gelu', 'add', 'gelu', 'mm']""")
    assert_expected_inline(
        backward_order(found),
        """\
gather_root [mm] full_root gather_blocks_1 [mm gelu_backward] free_root reduce_root [mm] full_blocks_1
gather_blocks_0 [mm mm gelu_backward mm mm add] free_blocks_1 reduced_root reduce_blocks_1 [mm] full_blocks_0 [mm
mm gelu_backward mm mm add] free_blocks_0 reduced_blocks_1 reduce_blocks_0 reduced_blocks_0""",
    )
    assert saved(traced({torch.ops.aten.gelu.default})) == saved(found)


def test_a_memory_budget_is_the_partitioners() -> None:
    assert_expected_inline(
        "\n".join(f"{budget:g} {saved(traced(budget))}" for budget in (0, 0.5, 1.0)),
        """\
0 ['add', 'add']
0.5 ['mm', 'add', 'mm', 'add', 'mm']
1 ['mm', 'gelu', 'add', 'mm', 'gelu', 'add', 'gelu', 'mm']""",
    )


def test_a_budget_that_is_set_for_torch_compile_is_taken_where_none_is_given() -> None:
    def found(value: Any) -> list[str]:
        return saved(traced(value, reshard_after_forward=True))

    with functorch_config.patch(activation_memory_budget=0.5):
        assert found(None) == saved(traced(0.5))
        assert found("unit") == saved(traced("unit"))
        assert found(1.0) == saved(traced(1.0))


@pytest.mark.parametrize(
    ("budget", "passes", "words"),
    [
        (1.5, default_pipeline(), "a memory budget lies between 0 and 1"),
        (0.5, default_pipeline().remove("recompute"), "needs a pass that provides 'recompute_tagged'"),
    ],
)
def test_a_wrong_budget_for_torch_compile_is_named(budget: float, passes: PassPipeline, words: str) -> None:
    model = graph_fsdp.compile(nn.Sequential(nn.Linear(8, 8)), backend="eager", passes=passes)
    refused = pytest.raises(ValueError, match=f"config.activation_memory_budget={budget} is taken as .*{words}")
    with functorch_config.patch(activation_memory_budget=budget), refused:
        model(torch.ones(2, 8))
    model(torch.ones(2, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_offload_copies_what_is_saved_of_all_units_but_the_last() -> None:
    with pytest.warns(UserWarning, match="the copies save nothing"):
        found = traced("offload")
    assert_expected_inline(
        str(saved(found)), """['offloaded_mm', 'offloaded_gelu', 'add', 'mm', 'gelu', 'add', 'gelu', 'mm']"""
    )
    assert_expected_inline(
        calls(found.report.forward, "offload_activation", "activation_offloaded"),
        """\
offload_mm = offload_activation(mm)
offload_gelu = offload_activation(gelu)
offloaded_mm = activation_offloaded(offload_mm, mm)
offloaded_gelu = activation_offloaded(offload_gelu, gelu)""",
    )
    assert_expected_inline(
        backward_order(found),
        """\
gather_root [mm] full_root gather_blocks_1 [mm gelu_backward] free_root reduce_root [mm] full_blocks_1
gather_blocks_0 reload_gelu [mm gelu_backward mm mm add] free_blocks_1 reduce_blocks_1 reload_mm reloaded_gelu [mm]
full_blocks_0 reloaded_mm [mm gelu_backward mm mm add] free_blocks_0 reduced_root reduce_blocks_0 reduced_blocks_1
reduced_blocks_0""",
    )


@pytest.mark.filterwarnings("ignore:activation_checkpointing")
def test_offload_with_unit_copies_what_goes_into_units() -> None:
    found = traced(ActivationCheckpointing("unit", offload=True), lambda: Net(3))
    assert_expected_inline(str(saved(found)), """['offloaded_add', 'add', 'add', 'gelu', 'mm']""")
    assert_expected_inline(
        backward_order(found),
        """\
gather_root [mm] full_root gather_blocks_2 [mm gelu_backward] free_root reduce_root full_blocks_2 gather_blocks_1
[mm gelu mm mm gelu_backward mm mm add] free_blocks_2 reduced_root reload_add reduce_blocks_2 full_blocks_1
gather_blocks_0 reloaded_add [mm gelu mm mm gelu_backward mm mm add] free_blocks_1 reduced_blocks_2 reduce_blocks_1
full_blocks_0 [mm gelu mm mm gelu_backward mm mm add] free_blocks_0 reduced_blocks_1 reduce_blocks_0
reduced_blocks_0""",
    )


@pytest.mark.filterwarnings("ignore:activation_checkpointing")
def test_copies_that_come_back_are_started_one_region_ahead() -> None:
    found = traced("offload", lambda: Net(4))
    positions = found.backward.positions()
    seen = 0
    for start in found.backward.with_role(Role.RELOAD):
        if start.target is not dialect.reload_activation:
            continue
        (wait,) = start.users
        between = found.backward.nodes[positions[start] + 1 : positions[wait]]
        communicates = [node.target in dialect.STARTS | dialect.WAITS for node in between]
        groups = sum(now and not before for before, now in zip([False, *communicates], communicates, strict=False))
        assert groups == 1, "a region lies between, and what is communicated behind it"
        seen += 1
    assert seen == 8  # two of each unit but the last, and what goes from one to the next


def test_ranks_compare_the_operators_whose_results_are_saved() -> None:
    mm, tanh, relu = (getattr(torch.ops.aten, name) for name in ("mm", "tanh", "relu"))
    assert repr(CheckpointActivations([mm, tanh])) == repr(CheckpointActivations([tanh, mm]))
    assert repr(CheckpointActivations([mm, tanh])) != repr(CheckpointActivations([mm, relu]))
    assert repr(CheckpointActivations("unit")) != repr(CheckpointActivations("selective"))


@pytest.mark.parametrize(("dropout", "draw"), [(0.0, 0), (0.1, 6)])
def test_only_what_draws_random_numbers_keeps_a_state_of_the_generator(dropout: float, draw: int) -> None:
    # Torch tags attention as random whatever its dropout is. A block with dropout draws in attention and twice behind.
    found = traced("unit", lambda: GPT(depth=2, dropout=dropout), torch.zeros(32, 8, dtype=torch.int64))
    for graph in (found.forward, found.backward):
        assert sum(node.op == "call_function" and "rng_state" in str(node.target) for node in graph.nodes) == draw


@pytest.mark.parametrize(("backend", "own"), [("eager", False), ("inductor", True)])
def test_eager_operators_draw_what_they_draw_without_checkpointing(
    backend: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, the partitioner gives operators that it recomputes generators of their own unless it is told not to."""
    partition, found = compat.min_cut_rematerialization_partition, []

    def partitioned(*args: Any, **kwargs: Any) -> Any:
        found.append(functorch_config.graphsafe_rng_functionalization)
        return partition(*args, **kwargs)

    monkeypatch.setattr(compat, "min_cut_rematerialization_partition", partitioned)
    traced("unit", lambda: GPT(depth=2, dropout=0.1), torch.zeros(32, 8, dtype=torch.int64), backend=backend)
    assert found == [own]


class Scaled(nn.Module):
    """Dropout behind an operator that reads a parameter itself: the pass that makes buckets edits what is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.scale, 0.5).sin()


def test_dropout_of_what_was_scaled_by_a_parameter_is_drawn_again() -> None:
    model = graph_fsdp.compile(
        nn.Sequential(Scaled(), Scaled()),
        auto_wrap_policy={Scaled},
        activation_checkpointing=ActivationCheckpointing("unit"),
        backend="eager",
    )
    x, scale = torch.ones(64, 8), model[1].scale
    model(x).sum().backward()
    torch.manual_seed(0)
    scale.grad = None
    found = model(x)
    found.sum().backward()
    torch.manual_seed(0)
    first, second = (part.scale.detach().requires_grad_() for part in model)
    hidden = F.dropout(x * first, 0.5).sin()
    expected = F.dropout(hidden * second, 0.5).sin()
    expected.sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(scale.grad, second.grad)


class Gated(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.sin(x * self.scale), 0.5) * self.scale


def test_within_a_budget_dropout_is_drawn_once_with_symbolic_sizes_too() -> None:
    def gradients(**options: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(Gated(), Gated(), Gated())
        graph_fsdp.compile(model, auto_wrap_policy={Gated}, backend="eager", dynamic=True, **options)
        model(torch.rand(2, 8)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    expected = gradients()
    for budget in (0, 0.5):
        assert all(map(torch.equal, gradients(activation_checkpointing=budget), expected))
        with functorch_config.patch(activation_memory_budget=budget):
            assert all(map(torch.equal, gradients(), expected))


class Checkpointed(nn.Sequential):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=self.use_reentrant)
        return y


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_batch_statistics_of_a_checkpoint_count_once_and_its_parameters_have_gradients(use_reentrant: bool) -> None:
    plain = Checkpointed(use_reentrant=False)
    model = graph_fsdp.compile(Checkpointed(use_reentrant), backend="eager")
    for m in (plain, model):
        m(torch.randn(4, 8)).sum().backward()
    assert plain[1].num_batches_tracked == 2, "its forward was computed again"
    assert model[1].num_batches_tracked == 1
    assert all(p.grad is not None for p in model.parameters())


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: F.dropout(self.linear(x)), x, use_reentrant=False)
        return y


def test_a_checkpoint_that_needs_no_gradient_may_draw_random_numbers() -> None:
    plain = nn.Sequential(Frozen(), Frozen())
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    found = []
    for m in (plain, model):
        torch.manual_seed(0)
        found.append(m(torch.ones(4, 8)))
    assert torch.equal(*found)


class OwnDerivative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y: Tensor = checkpoint(lambda x: self.second(self.first(x).sigmoid()).tanh(), x, use_reentrant=False)
        return torch.autograd.grad(y.sum(), x)[0].detach()


@pytest.mark.skipif(not hasattr(functorch_config, RECOMPUTES), reason="torch.compile recomputes in no such graph")
def test_a_graph_with_a_backward_of_its_own_recomputes_for_it() -> None:
    model = OwnDerivative()
    expected = model(torch.ones(4, 8))
    graph_fsdp.compile(model, backend="eager")
    torch.testing.assert_close(model(torch.ones(4, 8)), expected)
    assert len(calls(graph_fsdp.inspect(model).inference, "sigmoid").splitlines()) == 2, "for the derivative again"


class Noisy(nn.Module):
    """Draws the same shapes twice in a layer, by operators that torch's partitioner takes for no draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.linear(x) * (torch.zeros(6, 1).uniform_() < 0.5)
            x = x + torch.zeros(8).normal_() * torch.empty_like(x).exponential_()
        return x + torch.randn_like(x).mul(2) - torch.randn_like(x).mul(2)


@pytest.mark.parametrize("activation_checkpointing", [None, "unit"])
def test_equal_draws_are_drawn_each_by_itself(activation_checkpointing: str | None) -> None:
    def step(model: nn.Module) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        loss = model(torch.ones(6, 8)).square().sum()
        loss.backward()
        return loss.detach(), torch.rand(1), *(p.grad for p in model.parameters())

    torch.manual_seed(0)
    plain = nn.Sequential(*(Noisy() for _ in range(4)))
    expected = step(copy.deepcopy(plain))
    model = graph_fsdp.compile(plain, activation_checkpointing=activation_checkpointing, backend="eager")
    found = step(model)
    assert all(torch.equal(whole(a), b) for a, b in zip(found, expected, strict=True))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
