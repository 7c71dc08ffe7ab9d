"""A backward in two halves: gradients of inputs first, those of weights later, as zero-bubble pipelines need."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from marks import fake_reductions
from printed import stage_text
from test_pipelining import Part, batch, trained
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graph_fsdp
from graph_fsdp.report.report import engine_of


def divided_gradients(model: Any, x: Tensor, divided: bool) -> dict[str, Tensor]:
    """The sums that a backward keeps, and the gradient of its input."""
    model.set_manual_backward_finalization(True)
    engine = engine_of(model)
    loss = model(x).square().sum()
    if not divided:
        loss.backward()
        return {name: g for (name, _), g in engine.kept.gradients.items()} | {"x": x.grad}
    with engine.division.deferring() as of_weights:
        loss.backward()
    assert x.grad is not None and not engine.kept
    for run in of_weights:
        run()
    return {name: g for (name, _), g in engine.kept.gradients.items()} | {"x": x.grad}


@fake_reductions
@pytest.mark.parametrize(
    "options",
    [{}, {"activation_checkpointing": "unit"}, {"backend": "inductor"}, {"mesh": None}],
    ids=["gathered", "checkpointed", "inductor", "tensor_parallel"],
)
def test_halves_have_the_gradients_of_a_whole_backward(fake_group: None, options: dict[str, Any]) -> None:
    found = []
    for divided in (False, True):
        torch.manual_seed(0)
        model, options = Part(), dict(options)
        if "mesh" in options:
            mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
            options["mesh"] = mesh["dp"]
        backend = {} if divided else {"backend": "eager"}
        compiled = graph_fsdp.compile(model, **{"backend": "eager", **options, **backend})
        found.append(divided_gradients(compiled, batch(0).requires_grad_(), divided))
    whole, halves = found
    assert whole.keys() == halves.keys() and len(whole) == 5
    rtol = 0.0 if options.get("backend") != "inductor" else 1e-6  # kernels are fused otherwise
    for name, gradient in whole.items():
        torch.testing.assert_close(halves[name], gradient, rtol=rtol, atol=rtol)


def test_one_process_divides_its_backward() -> None:
    found = []
    for divided in (False, True):
        model, x = trained(), batch(0).requires_grad_()
        loss = model(x)[:, 0].sum()
        with engine_of(model).division.deferring() if divided else contextlib.nullcontext([]) as of_weights:
            loss.backward()
        assert (model.head.weight.grad is None) == divided
        for run in of_weights:
            run()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for whole, halves in zip(*found, strict=True):
        torch.testing.assert_close(halves, whole, rtol=0, atol=0)


def test_the_graphs_of_both_halves(fake_group: None) -> None:
    model = trained()
    divided_gradients(model, batch(0).requires_grad_(), divided=True)
    report = graph_fsdp.inspect(model)
    first, second = report.graphs[1:]
    assert "graph 1 was captured because graph 0's backward is divided; this half is of the inputs" in str(report)
    of_inputs, of_weights = (captured.views["backward"] for captured in (first, second))
    assert_expected_inline(
        stage_text(of_inputs, "mm", stage="divide"),
        """\
takes kept(root)
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, down.weight}], float32, world_size=8)
    mm(tangent, head.weight)
free(kept(root))
full_blocks_1 = all_gather_wait(gather_blocks_1)
gather_blocks_0 = all_gather_start([blocks.0.{up.weight, down.weight}], float32, world_size=8)
    mm(mm, blocks.1.down.weight), ..., mm(gelu_backward, blocks.1.up.weight), ...
free(full_blocks_1)
full_blocks_0 = all_gather_wait(gather_blocks_0)
    mm(add, blocks.0.down.weight), ..., mm(gelu_backward, blocks.0.up.weight), ...
free(full_blocks_0)
return ...""",
    )
    assert_expected_inline(
        stage_text(of_weights, "mm", stage="divide"),
        """\
    mm(tangent, input), ...
head_bias_kept = accumulate_grad(head.bias: sum, shard_shape=[1], float32, float32)
head_weight_kept = accumulate_grad(head.weight: mm, shard_shape=[1, 16], float32, float32)
    mm(input, input), ..., mm(input, input), ...
blocks_1_down_bias_kept = accumulate_grad(blocks.1.down.bias: sum, shard_shape=[2], float32, float32)
blocks_1_down_weight_kept = accumulate_grad(blocks.1.down.weight: mm, shard_shape=[2, 32], float32, float32)
blocks_1_up_bias_kept = accumulate_grad(blocks.1.up.bias: sum, shard_shape=[4], float32, float32)
blocks_1_up_weight_kept = accumulate_grad(blocks.1.up.weight: mm, shard_shape=[4, 16], float32, float32)
    mm(input, input), ..., mm(input, input), ...
blocks_0_down_bias_kept = accumulate_grad(blocks.0.down.bias: sum, shard_shape=[2], float32, float32)
blocks_0_down_weight_kept = accumulate_grad(blocks.0.down.weight: mm, shard_shape=[2, 32], float32, float32)
blocks_0_up_bias_kept = accumulate_grad(blocks.0.up.bias: sum, shard_shape=[4], float32, float32)
blocks_0_up_weight_kept = accumulate_grad(blocks.0.up.weight: mm, shard_shape=[4, 16], float32, float32)
return blocks_0_up_weight_kept, blocks_0_up_bias_kept, ..., blocks_0_down_weight_kept, blocks_0_down_bias_kept,
    blocks_1_up_weight_kept, blocks_1_up_bias_kept, blocks_1_down_weight_kept, blocks_1_down_bias_kept,
    head_weight_kept, head_bias_kept""",
    )


def test_halves_of_whole_parameters(fake_group: None) -> None:
    model = trained()
    model.set_reshard_after_backward(False)
    divided_gradients(model, batch(0).requires_grad_(), divided=True)
    of_inputs, of_weights = (c.views["backward"] for c in graph_fsdp.inspect(model).graphs[-2:])
    assert_expected_inline(
        stage_text(of_inputs, "mm", stage="divide"),
        """\
takes whole_blocks_0_up_weight, whole_blocks_0_down_weight, whole_blocks_1_up_weight, whole_blocks_1_down_weight,
    whole_head_weight
    mm(tangent, whole_head_weight), mm(mm, whole_blocks_1_down_weight), ..., mm(gelu_backward,
        whole_blocks_1_up_weight), ..., mm(add, whole_blocks_0_down_weight), ..., mm(gelu_backward,
        whole_blocks_0_up_weight), ...
return ...""",
    )
    assert "whole" not in stage_text(of_weights, "mm", stage="divide"), "weights' gradients need no weights"


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.square()


def test_a_bucket_that_both_halves_read_is_gathered_in_both(fake_group: None) -> None:
    torch.manual_seed(0)
    model: Any = graph_fsdp.compile(Squared(), backend="eager", reshard_after_forward=True)
    divided_gradients(model, batch(0).requires_grad_(), divided=True)
    of_inputs, of_weights = (c.views["backward"] for c in graph_fsdp.inspect(model).graphs[-2:])
    assert_expected_inline(
        stage_text(of_inputs, "mm", stage="divide"),
        """\
gather_root = all_gather_start([weight], float32, world_size=8)
full_root = all_gather_wait(gather_root)
    pow(weight), mm(tangent, pow)
free(full_root)
return ...""",
    )
    assert_expected_inline(
        stage_text(of_weights, "mm", stage="divide"),
        """\
gather_root = all_gather_start([weight], float32, world_size=8)
    mm(input, tangent)
full_root = all_gather_wait(gather_root)
    pow(weight), ...
weight_kept = accumulate_grad(weight: mul, shard_shape=[2, 16], float32, float32)
free(full_root)
return weight_kept, ...""",
    )


def test_what_crosses_is_freed_after_the_second_half(fake_group: None) -> None:
    torch.manual_seed(0)
    model: Any = graph_fsdp.compile(Part(), backend="eager", activation_checkpointing="unit")
    divided_gradients(model, batch(0).requires_grad_(), divided=True)  # torch 2.9 holds the first batch longer
    x = batch(1).requires_grad_()
    with engine_of(model).division.deferring() as of_weights:
        model(x).sum().backward()
    held = weakref.ref(x)
    del x
    assert held() is not None, "the gradient of the first weight is computed of it"
    of_weights.pop()()
    assert held() is None
