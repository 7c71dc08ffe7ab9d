"""Weights that train in float32 and are gathered as MXFP8 or NVFP4, by torchao's functions: in the graph, with FSDP2's
bits, and with those of one process."""

from __future__ import annotations

import copy
import io
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from facts import Facts
from launch import run_ranks
from models import MLP
from printed import calls
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graph_fsdp
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.integrations.torchao import FORMATS, QuantizedGather, gather_in
from graph_fsdp.passes import default_pipeline

pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")

FACTS = Facts(__name__)
WIDTH = 64
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def blocks(module: nn.Module, name: str) -> bool:
    return name.startswith("blocks")


def model_of(format: Any, of: Callable[[nn.Module, str], bool] | None = None, width: int = WIDTH) -> MLP:
    torch.manual_seed(0)
    return gather_in(MLP(depth=1, width=width), format, of)


def compiled(format: Any, of: Callable[[nn.Module, str], bool] | None = None, **options: Any) -> Any:
    return graph_fsdp.compile(model_of(format, of), **{"backend": "eager", **options})


# Graphs


@pytest.mark.usefixtures("fake_group")
def test_values_and_scales_are_one_message_and_dequantized_again_in_backward() -> None:
    found = {}
    for format, bits in (("mxfp8", 8.25), ("nvfp4", 4.5)):
        torch._dynamo.reset()
        options = {"reshard_after_forward": True, "auto_wrap_policy": {MLP}, "mp_policy": BF16}
        model = graph_fsdp.compile(model_of(format, blocks, width=256), backend="eager", **options)
        model(torch.randn(4, 256)).sum().backward()
        report = graph_fsdp.inspect(model)
        found[format] = calls(report.forward, "all_gather_start", "reduce_payloads")
        again = calls(report.backward, "all_gather_start")
        assert again.count("gather_root_payload") == 1
        weights = [p for p in report.spec.parameters.values() if p.extended]
        saved = [v.meta["val"] for v in report.forward.graph.outputs[1:] if isinstance(v, fx.Node)]
        full = {value.shape for value in saved} & {torch.Size(p.shape) for p in weights}
        assert not full, "no full weight is saved for backward"
        (row,) = (row for row in report.forward.buckets if "payload" in row.name)
        assert row.nbytes == sum(math.prod(p.shape) for p in weights) * bits / 8
    assert_expected_inline(
        "\n\n".join(found.values()),
        """\
gather_root_payload = all_gather_start([_to_copy, where, _to_copy, where], uint8, world_size=8)
gather_root_1 = all_gather_start([blocks.0.{up.bias, down.bias}, head.{weight, bias}], bfloat16, world_size=8)

reduced_payloads = reduce_payloads([amax, amax], op=max)
gather_root_payload = all_gather_start([bitwise_or, _to_copy, bitwise_or, _to_copy], uint8, world_size=8)
gather_root_1 = all_gather_start([blocks.0.{up.bias, down.bias}, head.{weight, bias}], bfloat16, world_size=8)""",
    )


# Numbers


def batch_of(rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for step in range(steps):
        loss = model(batch_of(10 * step + dist.get_rank())).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss{step}"] = loss.detach()
    for name, p in model.named_parameters():
        value: Any = p.detach()
        value = value.to_local() if isinstance(value, DTensor) else value
        found[name] = getattr(value, "data_", value).clone()
    return found


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not wrong, wrong


def fsdp2(format: str, **options: Any) -> nn.Module:
    model = model_of(format, blocks)
    fully_shard(model.blocks[0], **options)
    return fully_shard(model, **options)


@FACTS
def training_has_the_bits_of_fsdp2() -> None:
    ours = {"reshard_after_forward": False, "passes": default_pipeline(bucket="none")}
    equal(train(compiled("nvfp4", blocks, mp_policy=BF16, **ours)), train(fsdp2("nvfp4", mp_policy=BF16)))


@FACTS.long
def training_has_the_bits_of_fsdp2_in_mxfp8() -> None:
    equal(train(compiled("mxfp8", blocks, reshard_after_forward=True)), train(fsdp2("mxfp8")))


def dequantized(format: str) -> nn.Module:
    """A plain model, with the weights that one process makes of what it would gather."""
    model = model_of(format)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight: Any = module.weight
            payloads, metadata = weight.fsdp_pre_all_gather(None)
            module.weight = nn.Parameter(weight.fsdp_post_all_gather(payloads, metadata, torch.float32)[0])
    return model


def mean_gradients(format: str, ranks: int | None = None) -> list[Tensor]:
    found = []
    for rank in range(ranks or dist.get_world_size()):
        model = dequantized(format)
        model(batch_of(rank)).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    return [sum(of_ranks) / len(of_ranks) for of_ranks in zip(*found, strict=True)]


@FACTS
def gradients_have_the_bits_of_one_process_with_uneven_rows_too() -> None:
    """The head has five rows."""
    for format in FORMATS:
        torch._dynamo.reset()
        model = compiled(format)
        x = batch_of(dist.get_rank())
        out = model(x)
        assert torch.equal(out, dequantized(format)(x)), format
        out.square().mean().backward()
        for p, expected in zip(model.parameters(), mean_gradients(format), strict=True):
            assert torch.equal(p.grad.full_tensor(), expected), format


@FACTS
def shards_are_plain_and_are_saved_and_loaded() -> None:
    model = compiled("mxfp8")
    assert all(type(p.to_local().detach()) is Tensor for p in model.parameters())
    train(model, steps=1)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    graph_fsdp.checkpoint.save(Path(folder[0]) / "saved", model)
    expected = train(model, steps=1)
    graph_fsdp.checkpoint.load(Path(folder[0]) / "saved", model)
    equal(train(model, steps=1), expected)


@FACTS.long
def gradients_may_be_quantized_too() -> None:
    model = compiled("mxfp8", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.int8))
    model(batch_of(dist.get_rank())).square().mean().backward()
    found = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    expected = torch.cat([gradient.flatten() for gradient in mean_gradients("mxfp8")])
    assert 0 < (found - expected).norm() / expected.norm() < 0.05


test_on_two_ranks = FACTS.on(2)


def with_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for format in FORMATS:
        torch._dynamo.reset()
        model = compiled(format, mesh=mesh)
        x = batch_of(dist.get_rank())
        out = model(x)
        assert torch.equal(out, dequantized(format)(x))
        out.square().mean().backward()
        for p, expected in zip(model.parameters(), mean_gradients(format), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), expected)


def tensor_parallel_with_the_values_of_one_process() -> None:
    """Blocks of a row are whole on each rank, so MXFP8 has the same scales. A format is given before or behind."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()}
    x = batch_of(dist.get_rank() // 2)
    for behind in (False, True):
        torch.manual_seed(0)
        model: nn.Module = MLP(depth=1, width=WIDTH) if behind else model_of("mxfp8")
        parallelize_module(model, mesh["tp"], plan)
        if behind:
            gather_in(model, "mxfp8")
        torch._dynamo.reset()
        graph_fsdp.compile(model, mesh["dp"], backend="eager")
        out = model(x)
        torch.testing.assert_close(out, dequantized("mxfp8")(x))
        out.square().mean().backward()
        for p, expected in zip(model.parameters(), mean_gradients("mxfp8", ranks=2), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), expected)
    model = parallelize_module(MLP(depth=1, width=32), mesh["tp"], plan)  # a part of ``down`` has rows of 32
    gather_in(model, "mxfp8")
    model = gather_in(MLP(depth=1, width=16), "nvfp4", blocks)
    parallelize_module(model, mesh["tp"], {"blocks.0.up": RowwiseParallel()})
    with pytest.raises(ValueError, match="'nvfp4', has rows of 8 elements on this rank"):
        graph_fsdp.compile(model, mesh["dp"], backend="eager")


@pytest.mark.long
@pytest.mark.parametrize("run", [with_replicas, tensor_parallel_with_the_values_of_one_process])
def test_on_four_ranks(run: Callable[[], None]) -> None:
    run_ranks(run, 4)


def test_a_model_computes_as_before_until_it_is_compiled() -> None:
    torch.manual_seed(0)
    plain, x = MLP(depth=1, width=WIDTH), batch_of(0)
    for format in FORMATS:
        model = gather_in(copy.deepcopy(plain), format)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        others = copy.deepcopy(model)
        with torch.no_grad():
            for p in others.parameters():
                p.zero_()
        others.load_state_dict(torch.load(file, weights_only=False))
        for m in (model, others):
            assert torch.equal(m(x), plain(x)) and type(m.head.weight) is QuantizedGather
        one_process = graph_fsdp.compile(others, backend="eager")
        assert torch.equal(one_process(x), dequantized(format)(x)) and not torch.equal(one_process(x), plain(x))
        torch._dynamo.reset()


def test_a_model_on_the_meta_device_is_initialised_as_without_a_format() -> None:
    torch.manual_seed(0)
    plain, x = MLP(depth=1, width=WIDTH), batch_of(0)
    on_meta = model_of("nvfp4").to("meta")
    torch.manual_seed(0)
    model = graph_fsdp.compile(on_meta, backend="eager")
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert torch.equal(model(x), dequantized("nvfp4")(x))


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False))
    model[1].weight = model[0].weight
    gather_in(model, "mxfp8")
    assert model[0].weight is model[1].weight and type(model[0].weight) is QuantizedGather


# What is refused


@pytest.mark.parametrize(
    ("make", "format", "error", "words"),
    [
        (lambda: MLP(), "mxfp4", ValueError, "format must be 'mxfp8' or 'nvfp4', got 'mxfp4'"),
        (lambda: MLP(width=16), "mxfp8", ValueError, r"'blocks.0.up.weight' has rows of 16 elements.* 32 of a row"),
        (lambda: MLP(width=64).half(), "nvfp4", UnsupportedError, "is torch.float16, of which torchao makes no nvfp4"),
        (lambda: model_of("mxfp8"), "nvfp4", UnsupportedError, "is a QuantizedGather already"),
        (lambda: nn.Sequential(nn.ReLU()), "mxfp8", ValueError, r"no nn.Linear of the model is left"),
    ],
)
def test_weights_that_have_no_such_format_are_refused(
    make: Callable[[], nn.Module], format: Any, error: type[Exception], words: str
) -> None:
    model = make()
    before = list(model.parameters())
    with pytest.raises(error, match=words):
        gather_in(model, format)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reshard_after_forward": 2}, "not available with reshard_after_forward=2; leave one out"),
        ({"backend": "inductor", "regions": "whole"}, "not available with regions='whole'; leave one out"),
    ],
)
def test_options_that_extensions_do_not_have_are_refused(options: dict[str, Any], words: str) -> None:
    model = model_of("mxfp8")
    with pytest.raises(UnsupportedError, match=words):
        graph_fsdp.compile(model, **{"backend": "eager", **options})
    assert type(model) is MLP and type(model.head.weight) is QuantizedGather
