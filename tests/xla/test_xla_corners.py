"""What few programs do with ``backend="xla"``: it works as without XLA, or is refused by a clear error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import GPT, MLP, VOCABULARY
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from xla_compare import BOUND, ROWS, compare, mesh, text, vectors
from xla_launch import DEVICES, XlaFacts

pytestmark = pytest.mark.timeout(2000)  # the first test waits for all facts

FACTS = XlaFacts(__name__)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x)


@FACTS
def a_graph_break_is_refused_by_the_local_view() -> None:
    import graph_fsdp

    model = Broken()
    with pytest.raises(graph_fsdp.UnsupportedError, match=r"fullgraph=False: .* or pass sharding='auto'"):
        graph_fsdp.compile(model, mesh(DEVICES), backend="xla", fullgraph=False)
    assert type(model) is Broken and model.first.weight.device.type == "cpu"


@FACTS
def pieces_of_the_global_view_train() -> None:
    import graph_fsdp

    model = compare(Broken(), vectors, fullgraph=False, sharding="auto")
    captured = [view for c in graph_fsdp.inspect(model).graphs for view in c.views.values() if view.phase == "forward"]
    assert len(captured) >= 2, captured


class Scores(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.model(x).logits
        return scores


@FACTS
def mixtures_of_experts_of_transformers_multiply_by_batches() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(vocab_size=VOCABULARY, num_hidden_layers=1, num_local_experts=4, **sizes)
    model = Scores(MixtralForCausalLM(config))
    with pytest.raises(graph_fsdp.HostFallbackError, match="histc"):  # how many tokens an expert has, for the host
        graph_fsdp.compile(copy.deepcopy(model), axes, backend="xla")(shard_batch(text(0)[0], axes))
    model.model.set_experts_implementation("batched_mm")
    compare(model, text, steps=2, axes=axes)


@FACTS
def regions_are_whole_already() -> None:
    import graph_fsdp

    with pytest.raises(ValueError, match=r"regions='whole': .* leave it out"):
        graph_fsdp.compile(MLP(depth=1), mesh(DEVICES), backend="xla", regions="whole")


@FACTS
def a_device_mesh_of_xla() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh(DEVICES)  # SPMD
    compare(MLP(depth=1), vectors, axes=init_device_mesh("xla", (DEVICES,)))


@FACTS
def a_device_mesh_of_two_dimensions_replicates() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from graph_fsdp.compat import xla as compat_xla

    mesh(DEVICES)
    model = compare(MLP(depth=1), vectors, axes=init_device_mesh("xla", (2, DEVICES // 2)))
    weight = model.model.head.weight.detach()
    assert {len(shard.padded) for shard in compat_xla.device_shards(weight)} == {-(-len(weight) // 2)}


@FACTS
def a_device_mesh_of_some_devices_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    import graph_fsdp

    mesh(DEVICES)
    with pytest.raises(graph_fsdp.MeshError, match=r"mesh has 2 devices and the XLA program 4"):
        graph_fsdp.compile(MLP(depth=1), init_device_mesh("xla", (2,)), backend="xla")


def same_output(model: nn.Module, reference: nn.Module, axes: Any) -> None:
    from graph_fsdp.xla import shard_batch

    x, _ = vectors(0)
    with torch.no_grad():
        assert (model(shard_batch(x, axes)).cpu() - reference(x)).abs().max() < BOUND


@FACTS
def a_model_that_is_on_xla_stays_the_same_parameters() -> None:
    import torch_xla.distributed.spmd as xs

    import graph_fsdp
    from graph_fsdp.compat import xla as compat_xla

    axes = mesh(DEVICES)
    model = MLP(depth=1)
    reference = copy.deepcopy(model)
    model.to("xla")
    xs.mark_sharding(model.head.weight, axes, (None, None))
    before = [id(p) for p in model.parameters()]
    graph_fsdp.compile(model, axes, backend="xla")
    assert [id(p) for p in model.parameters()] == before
    same_output(model, reference, axes)
    for p in model.parameters():
        assert len(compat_xla.device_shards(p.detach())[0].padded) == -(-len(p) // DEVICES)


@FACTS
def a_parameter_that_is_divided_otherwise_is_refused() -> None:
    import torch_xla.distributed.spmd as xs

    import graph_fsdp

    axes = mesh(DEVICES)
    model = MLP(depth=1).to("xla")
    xs.mark_sharding(model.head.weight, axes, (None, "fsdp"))
    with pytest.raises(ValueError, match=r"parameter 'head\.weight' is sharded as .* by mark_sharding"):
        graph_fsdp.compile(model, axes, backend="xla")
    xs.clear_sharding(model.head.weight)
    graph_fsdp.compile(model, axes, backend="xla")


@FACTS
def inputs_on_the_cpu_are_copied_to_the_devices() -> None:
    import graph_fsdp

    for sharding in ("manual", "auto"):
        model = MLP(depth=1)
        reference = copy.deepcopy(model)
        with pytest.warns(UserWarning, match=r"no input of the model is sharded \(x\)"):
            graph_fsdp.compile(model, mesh(DEVICES), backend="xla", sharding=sharding)(vectors(0)[0])
        same = model(x=vectors(0)[0]).detach().cpu() - reference(vectors(0)[0])
        assert same.abs().max() < BOUND


@FACTS
def buffers_stay_whole_when_a_checkpoint_is_loaded() -> None:
    """Those of a batch norm have the shape of its weight, which is divided."""
    from tempfile import TemporaryDirectory

    import torch_xla

    import graph_fsdp
    from graph_fsdp import checkpoint
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    x = shard_batch(vectors(0)[0], axes)

    def compiled() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        graph_fsdp.compile(model, axes, backend="xla")
        return model, torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(x).square().sum() + model[1].running_mean.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        return loss.item()

    saved, loaded = compiled(), compiled()
    step(*saved)
    with TemporaryDirectory() as folder:
        checkpoint.save(f"{folder}/saved", *saved)
        checkpoint.load(f"{folder}/saved", *loaded)
    assert step(*saved) == step(*loaded)


class ComplexFilter(nn.Module):
    """Filters of complex numbers, of 16 rows and of 3, which four devices do not share equally."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(3, 16, dtype=torch.complex64))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.view_as_real(x * self.filter * self.mix.sum(0))
        return self.head(y[..., 0] + 2 * y[..., 1])


@FACTS
def complex_parameters_train() -> None:
    compare(ComplexFilter(), vectors)


class Float8Table(nn.Module):
    """Five rows in float8, which four devices do not share equally."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 16).to(torch.float8_e4m3fn), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(3, 16).to(torch.float8_e4m3fn), requires_grad=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.table.float().sum(0) + self.bias.float().sum(0))


@FACTS
def frozen_float8_parameters_are_gathered() -> None:
    import graph_fsdp

    model = graph_fsdp.compile(Float8Table(), mesh(DEVICES), backend="xla")
    reference = Float8Table()
    reference.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    same_output(model, reference, mesh(DEVICES))


def a_unit_by_itself(sharding: str) -> None:
    import torch_xla

    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    model = MLP(depth=2)
    reference = copy.deepcopy(model)
    graph_fsdp.compile(model, axes, backend="xla", sharding=sharding)
    x, _ = vectors(0)
    for times in (1, 2):
        found, expected = model.blocks[0](shard_batch(x, axes)), reference.blocks[0](x)
        assert (found.detach().cpu() - expected).abs().max() < BOUND
        found.sum().backward()
        expected.sum().backward()
        torch_xla.sync()
        for (name, p), q in zip(reference.blocks[0].named_parameters(), model.blocks[0].parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert (q.grad.cpu() - p.grad).abs().max() < times * 1e-5, name
    assert model.blocks[1].up.weight.grad is None
    same_output(model, reference, axes)


@FACTS
def a_unit_by_itself_in_the_local_view() -> None:
    a_unit_by_itself("manual")


@FACTS
def a_unit_by_itself_in_the_global_view() -> None:
    a_unit_by_itself("auto")


@FACTS
def gradients_add_up_in_the_global_view() -> None:
    compare(GPT(depth=1), accumulate=2, sharding="auto")


@FACTS
def units_are_computed_again_in_the_global_view() -> None:
    import graph_fsdp

    usual = compare(GPT(), sharding="auto", steps=2)
    again = compare(GPT(), sharding="auto", activation_checkpointing="unit")
    products = [str(graph_fsdp.inspect(m).backward.program).count("mm.default(") for m in (usual, again)]
    assert products[1] > products[0], products


@FACTS
def torchs_checkpoint_in_the_global_view() -> None:
    compare(GPT(depth=1, checkpointed=True), sharding="auto")


@FACTS
def bfloat16_in_the_global_view() -> None:
    import graph_fsdp

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = compare(MLP(depth=1), vectors, mp_policy=policy, bound=0.1, sharding="auto")
    assert "torch.bfloat16" in str(graph_fsdp.inspect(model).forward.program)
    assert all(p.dtype is torch.float32 for p in model.parameters())


class Counted(nn.Module):
    """The gradient of ``gain`` depends on a buffer after it was written to."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.linear, self.gain = nn.Linear(16, 5), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return torch.tanh(self.linear(x)) + self.gain * (self.count % 3).to(x.dtype)


@FACTS
def buffers_that_forward_writes_to_are_saved_as_they_were() -> None:
    for sharding in ("manual", "auto"):
        model = compare(Counted(), vectors, activation_checkpointing=0.0, sharding=sharding)
        assert model.model.count.item() == 6


class Constants(nn.Module):
    """Returns tensors that forward makes, on the device and on the host, beside what depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scales = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], device=x.device)
        loss = (torch.sin(self.linear(x)) * scales * scales.exp()).mean()
        constants = {"none": torch.zeros(()), "positions": torch.arange(3), "given": torch.tensor([1.0, 2.0])}
        constants["rows"] = torch.zeros(ROWS)  # as many as the batch has
        return {"loss": loss, "scales": scales, **constants}


def constants_are_returned(sharding: str) -> None:
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes, reference = mesh(DEVICES), Constants()
    model = graph_fsdp.compile(copy.deepcopy(reference), axes, backend="xla", sharding=sharding)
    for step in range(3):
        x, _ = vectors(step)
        expected, found = reference(x), model(shard_batch(x, axes))
        expected.pop("loss").backward()
        found.pop("loss").backward()
        for name, value in expected.items():
            assert found[name].device.type == "xla" and torch.equal(found[name].cpu(), value), name
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(q.grad.cpu(), p.grad)


@FACTS
def constants_are_returned_on_the_device_in_the_local_view() -> None:
    constants_are_returned("manual")


@FACTS
def constants_are_returned_on_the_device_in_the_global_view() -> None:
    constants_are_returned("auto")


test_on_four_devices = FACTS.on_devices(timeout=1800)
