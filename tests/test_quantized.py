"""Frozen quantized weights are gathered as they are stored and dequantized in the graph, with adapters that train."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import io
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from expecttest import assert_expected_inline
from facts import Facts, shared_folder
from printed import bucket_tables, calls
from test_repeat import check_equal
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import graph_fsdp
from graph_fsdp.errors import UnsupportedError

FACTS = Facts(__name__)
WIDTH = 128
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


Quantize = Callable[[nn.Linear], None]


def nf4(linear: nn.Linear) -> None:
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    linear.weight = nn.Parameter(nf4_tensor.to_nf4(linear.weight.detach()), requires_grad=False)


def int8(linear: nn.Linear) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(linear, Int8WeightOnlyConfig())
    linear.weight.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self, width: int, quantize: Quantize | None) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        if quantize is not None:
            quantize(self.base)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x) + self.up(self.down(x)))


def adapted(quantize: Quantize | None, layers: int = 2, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("cpu"):
        torch.set_default_dtype(dtype)
        try:
            return nn.Sequential(*[Adapted(WIDTH, quantize) for _ in range(layers)], nn.Linear(WIDTH, 1))
        finally:
            torch.set_default_dtype(torch.float32)


def compiled(quantize: Quantize | None, **options: Any) -> nn.Sequential:
    return graph_fsdp.compile(adapted(quantize), **{"backend": "eager", "auto_wrap_policy": {Adapted}, **options})


def train(model: nn.Module, steps: int = 4) -> list[Tensor]:
    """Losses on the same data on all ranks, and the last gradients' sum."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, WIDTH, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


# Graphs


@pytest.mark.usefixtures("fake_group")
def test_stored_bytes_are_gathered_and_dequantized_again_in_backward() -> None:
    options: dict[str, Any] = {"backend": "eager", "auto_wrap_policy": {Adapted}, "reshard_after_forward": True}
    model = graph_fsdp.compile(adapted(nf4, layers=3), **options)
    model(torch.randn(8, WIDTH)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert_expected_inline(
        bucket_tables(report),
        """\
forward
0 gather 1 8,704
0#1 gather 2 6,144
1 gather 1 8,704
1#1 gather 2 6,144
2 gather 1 8,704
2#1 gather 2 6,144
root gather 2 4,608
backward
root gather 2 4,608
2#1 gather 2 6,144
2 gather 1 8,704
root reduce 2 516
1#1 gather 2 6,144
2#1 reduce 2 768
1 gather 1 8,704
0#1 gather 2 6,144
1#1 reduce 2 768
0#1 reduce 2 768""",
    )
    assert_expected_inline(
        calls(report.backward, "all_gather_wait", "__rshift__"),
        """\
full_root = all_gather_wait(gather_root)
full_2_1 = all_gather_wait(gather_2_1)
full_2 = all_gather_wait(gather_2)
__rshift__(2.base.weight, 4)
full_1_1 = all_gather_wait(gather_1_1)
full_1 = all_gather_wait(gather_1)
__rshift__(1.base.weight, 4)
full_0_1 = all_gather_wait(gather_0_1)""",
    )
    saved = [v.meta["val"] for v in report.forward.graph.output.args[0][1:] if v is not None]
    assert all(v.shape != (WIDTH, WIDTH) for v in saved), "no dequantized weight is saved for backward"


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(("quantize", "share"), [(nf4, 0.27), (int8, 0.52)])
def test_a_share_of_the_bytes_of_bfloat16_is_gathered(quantize: Quantize, share: float) -> None:
    def gathered(how: Quantize | None) -> int:
        """Count the bytes of the first layer's weight, without its adapter's."""
        model = graph_fsdp.compile(adapted(how, dtype=torch.bfloat16), backend="eager", auto_wrap_policy={Adapted})
        with torch.no_grad():
            model(torch.randn(8, WIDTH, dtype=torch.bfloat16))
        first, *_ = graph_fsdp.inspect(model).inference.buckets
        return first.nbytes - (2 * 4 * WIDTH * 2 if how is None else 0)

    assert gathered(quantize) < share * gathered(None)


@pytest.mark.usefixtures("fake_group")
def test_equal_layers_have_the_graphs_of_a_whole_trace(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        check_equal(lambda: adapted(nf4, layers=4), {"input": torch.ones(8, WIDTH)}, backend="eager")
    assert "3 layers have 1 traces" in caplog.messages


# Numbers


@functools.cache
def alone(quantize: Quantize) -> list[Tensor]:
    return train(adapted(quantize))


def is_close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert found[0] != found[-1]


@FACTS
def nf4_weights_train_adapters_as_one_process_does() -> None:
    is_close(train(compiled(nf4)), alone(nf4))


@FACTS
def int8_weights_train_adapters_as_one_process_does() -> None:
    is_close(train(compiled(int8)), alone(int8))


@FACTS.long
def other_options_change_no_number() -> None:
    for options in (
        {"reshard_after_forward": False},
        {"activation_checkpointing": graph_fsdp.ActivationCheckpointing("unit")},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"meshes": {Adapted: torch.distributed.device_mesh.init_device_mesh("cpu", (2,))}},
        {"fullgraph": False},
    ):
        torch._dynamo.reset()
        is_close(train(compiled(nf4, **options)), alone(nf4))


@FACTS
def mixed_precision_leaves_stored_bytes_alone() -> None:
    model = compiled(nf4, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    torch.testing.assert_close(train(model), alone(nf4), rtol=0.05, atol=1e-3)


@FACTS.long
def weights_of_which_every_rank_has_another_number_of_bytes() -> None:
    def odd(linear: nn.Linear) -> None:
        from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

        weight = nf4_tensor.to_nf4(linear.weight.detach(), 2, 8192)  # 0-dimensional and small inner tensors
        linear.weight = nn.Parameter(weight, requires_grad=False)

    is_close(train(compiled(odd)), alone(odd))


@FACTS.long
def with_inductor_numbers_are_close() -> None:
    torch.set_num_threads(1)
    for regions in ("cut", "whole"):
        torch._dynamo.reset()
        is_close(train(compiled(nf4, backend="inductor", regions=regions)), alone(nf4))


@FACTS
def evaluation_is_exact() -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(compiled(nf4)(x), adapted(nf4)(x))


@FACTS
def ranks_with_other_blocks_of_as_many_bytes_disagree() -> None:
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    def in_blocks(linear: nn.Linear) -> None:
        size = 256 if torch.distributed.get_rank() == 0 else 128
        weight = nf4_tensor.to_nf4(linear.weight.detach(), scaler_block_size=size)
        linear.weight = nn.Parameter(weight, requires_grad=False)

    model = compiled(in_blocks)
    assert model.get_parameter("0.base.weight").shape == compiled(nf4).get_parameter("0.base.weight").shape
    with pytest.raises(graph_fsdp.RankDisagreement, match=r"parameter 0.base.weight .* NF4Tensor \[128, 128\] of \("):
        train(model, 1)


# What people do


@FACTS
def state_dicts_hold_bytes_and_are_saved_copied_and_loaded() -> None:
    model, other = compiled(nf4), compiled(nf4)
    train(model, 2)
    state: dict[str, Any] = model.state_dict()
    assert state["0.base.weight"].dtype is torch.uint8 and isinstance(state["0.base.weight"], DTensor)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    other.load_state_dict(copy.deepcopy(loaded))
    is_close(train(other), train(model))


@FACTS
def checkpoints_are_read_by_other_numbers_of_ranks() -> None:
    folder = shared_folder() / "quantized"
    model = compiled(nf4)
    train(model, 2)
    dcp.save(model.state_dict(), checkpoint_id=str(folder))
    torch.distributed.barrier()
    one = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    whole = graph_fsdp.compile(adapted(nf4), one, backend="eager")
    with torch.no_grad():
        for p in whole.parameters():
            p.zero_()
    state = whole.state_dict()
    dcp.load(state, checkpoint_id=str(folder))
    whole.load_state_dict(state)
    is_close(train(whole), train(model))


@FACTS
def nothing_holds_the_whole_weights() -> None:
    model = adapted(nf4)
    whole = [weakref.ref(layer.base.weight.quantized_data) for layer in model[:-1]]
    model = graph_fsdp.compile(model, backend="eager", auto_wrap_policy={Adapted})
    gc.collect()
    assert [tensor() for tensor in whole] == [None] * 2
    with pytest.raises(UnsupportedError, match=r"'0.base.weight' is quantized: copy it before graph_fsdp.compile"):
        copy.deepcopy(model)
    train(model, 1)


# Refusals


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sync_module_states": True}, "sync_module_states"),
        ({"shard_placement_fn": lambda p: Shard(0)}, "shard_placement_fn"),
        ({"checkpoint": "model.safetensors"}, "checkpoint"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], reason: str) -> None:
    model = adapted(nf4)
    before = dict(model.named_parameters())
    with pytest.raises(UnsupportedError, match=f"parameter '0.base.weight' is a NF4Tensor, .* {reason}; leave one out"):
        graph_fsdp.compile(model, backend="eager", **options)
    assert all(p is before[name] for name, p in model.named_parameters()) and type(model) is nn.Sequential


@pytest.mark.usefixtures("fake_group")
def test_a_trainable_tensor_subclass_is_refused() -> None:
    model = adapted(int8)
    model[0].base.weight.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"requires a gradient, which .* freeze it by requires_grad_"):
        graph_fsdp.compile(model, backend="eager")


@pytest.mark.usefixtures("fake_group")
def test_whole_parameters_and_exports_are_refused_by_name() -> None:
    model = compiled(nf4)
    with pytest.raises(UnsupportedError, match="parameters of it are quantized"), graph_fsdp.unsharded(model):
        pass
    with pytest.raises(UnsupportedError, match=r"'0\.base\.weight', which is quantized"):
        next(graph_fsdp.export(model))


# bitsandbytes


def bnb4(linear: nn.Linear, storage: torch.dtype = torch.bfloat16) -> nn.Linear:
    import bitsandbytes

    quantized = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4",
        quant_storage=storage,
    )  # fmt: skip
    quantized.load_state_dict(linear.state_dict())
    quantized.weight.requires_grad_(False)
    return quantized.to("cpu")


def with_bitsandbytes(storage: torch.dtype) -> nn.Sequential:
    model = adapted(None)
    for layer in model[:-1]:
        layer.base = bnb4(layer.base, storage)
    return model


@FACTS
def weights_of_bitsandbytes_train_adapters_as_one_process_does() -> None:
    for storage, policy in (
        (torch.uint8, MixedPrecisionPolicy()),
        (torch.bfloat16, MixedPrecisionPolicy()),
        (torch.bfloat16, MixedPrecisionPolicy(param_dtype=torch.float32)),  # which is no dtype of packed values
    ):
        torch._dynamo.reset()
        model = with_bitsandbytes(storage)
        graph_fsdp.compile(model, backend="eager", auto_wrap_policy={Adapted}, mp_policy=policy)
        is_close(train(model), train(with_bitsandbytes(storage)))
        saved = [v.meta["val"] for v in graph_fsdp.inspect(model).forward.graph.output.args[0][1:] if v is not None]
        assert all(v.shape != (WIDTH, WIDTH) for v in saved)


test_on_two_ranks = FACTS.on(2)
