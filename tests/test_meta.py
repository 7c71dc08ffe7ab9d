"""Models on the meta device, in one process: who initialises what, and in which order. ``test_meta_memory.py`` has what
it takes."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import FAKE_WORLD_SIZE
from models import CASES, CLASSES, MLP, WIDTH, MLPBlock, gpt2, llama, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import graph_fsdp
from graph_fsdp.initialise.materialise import find_pieces
from graph_fsdp.units import find_units


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def built(make: Callable[[], nn.Module], seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def initialised(model: nn.Module, seed: int = 5, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return graph_fsdp.compile(model, backend="eager", **options)


def equal(model: nn.Module, expected: nn.Module) -> None:
    """All values are the same bits, of parameters and of buffers."""
    values, reference = dict(model.named_parameters()), dict(expected.named_parameters())
    values |= dict(model.named_buffers())
    reference |= dict(expected.named_buffers())
    assert list(values) == list(reference)
    assert not [name for name, value in reference.items() if not torch.equal(values[name], value)]


def transformer() -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 32) for _ in range(2)))


class Norm(nn.Module):
    """Its parameter has values only if somebody gives it some."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Shift(Norm):
    """A buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.arange(float(WIDTH)), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.shift.copy_(torch.arange(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


# Values


@pytest.mark.parametrize("name", ["mlp", "one_block", "gpt", "gpt_tied", "cnn_batchnorm", "lstm"])
def test_the_values_are_those_of_the_model_as_it_is_built(name: str) -> None:
    case = CASES[name]
    model, expected = initialised(on_meta(case.make)), built(case.make)
    equal(model, expected)
    batch = case.batch(4, 0)
    loss = loss_of(model, batch)
    assert_close(loss, loss_of(expected, batch), rtol=1e-6, atol=0)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_attention_initialises_the_projection_below_it() -> None:
    model = initialised(on_meta(transformer))
    equal(model, built(transformer))
    assert model[0].self_attn.out_proj.bias.eq(0).all()


def test_random_numbers_go_on_as_if_the_model_had_been_built() -> None:
    built(MLP)
    expected = torch.rand(3)
    initialised(on_meta(MLP))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("policy", [{nn.Linear}, {MLPBlock}, {MLP}, {MLP, MLPBlock, nn.Linear}])
def test_units_do_not_change_the_values(policy: set[type[nn.Module]]) -> None:
    equal(initialised(on_meta(MLP), auto_wrap_policy=policy), built(MLP))


def test_each_rank_keeps_its_own_rows(fake_group: None) -> None:
    model, expected = initialised(on_meta(MLP)), built(MLP)
    for name, p in expected.named_parameters():
        shard = model.get_parameter(name)
        assert isinstance(shard, DTensor) and shard.shape == p.shape
        assert torch.equal(shard.to_local(), p[: -(-p.shape[0] // FAKE_WORLD_SIZE)])


def test_a_hugging_face_model_initialised_by_its_own_function() -> None:
    model, expected = on_meta(llama), built(llama)
    torch.manual_seed(5)
    with torch.no_grad():
        expected.apply(expected._init_weights)
    initialised(model, param_init_fn=model._init_weights)
    assert {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"} <= dict(model.named_buffers()).keys()
    equal(model, expected)
    batch = CASES["hf_llama"].batch(4, 0)
    assert_close(loss_of(model, batch), loss_of(expected, batch), rtol=1e-6, atol=0)


def test_a_block_may_initialise_what_is_below_it() -> None:
    """GPT-2 scales the projections of its attention and MLP down; which modules those are, only the blocks know."""
    model = on_meta(gpt2)
    initialised(model, param_init_fn=model._init_weights)
    deviation = {name: p.std().item() for name, p in model.named_parameters() if name.endswith("proj.weight")}
    assert len(deviation) == 4
    assert all(0.008 < value < 0.012 for value in deviation.values()), "0.02 / sqrt(2 * 2 layers)"


def test_tied_weights_are_initialised_once_by_the_first_module_that_has_them() -> None:
    model = on_meta(lambda: CASES["gpt_tied"].make())
    called = []

    def init(module: nn.Module) -> None:
        called.append(module)
        for p in module.parameters(recurse=False):
            p.fill_(2.0 if isinstance(module, nn.Embedding) else 3.0)

    initialised(model, param_init_fn=init)
    assert model.head not in called
    assert model.head.weight is model.tokens.weight and model.head.weight.eq(2.0).all()


def test_a_module_with_a_tied_weight_initialises_what_else_it_has() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES))
        model[1].weight = model[0].weight
        return model

    model, expected = initialised(on_meta(make)), built(make)
    equal(model, expected)
    assert model[1].weight is model[0].weight and model[1].bias.abs().max() > 0


# What is initialised, and by whom


def test_param_init_fn_is_called_once_per_module_children_first_and_finds_it_on_the_device() -> None:
    model, called = on_meta(MLP), []
    names = {module: name for name, module in model.named_modules()}

    def init(module: nn.Module) -> None:
        called.append(names[module])
        for p in module.parameters(recurse=False):
            assert p.device.type == "cpu" and p.requires_grad and isinstance(p, nn.Parameter)
            nn.init.constant_(p, len(called))

    initialised(model, param_init_fn=init)
    block = [[f"blocks.{i}.up", f"blocks.{i}.down", f"blocks.{i}"] for i in range(2)]
    assert called == [*itertools.chain(*block), "blocks", "head", ""]
    assert model.head.weight.eq(8).all() and model.get_parameter("blocks.1.down.bias").eq(5).all()


def test_what_has_values_keeps_them_and_is_not_initialised() -> None:
    """As where adapters on the meta device are added to a model that was loaded."""
    model = built(MLP)
    expected = copy.deepcopy(model)
    for block in model.blocks:
        block.down = on_meta(lambda: nn.Linear(2 * WIDTH, WIDTH))
        block.up.bias = nn.Parameter(block.up.bias.to("meta"))  # its module's other parameter has values
    initialised(model, seed=6)
    for i, block in enumerate(model.blocks):
        assert torch.equal(block.up.weight, expected.blocks[i].up.weight)
        assert not torch.equal(block.up.bias, expected.blocks[i].up.bias)
        assert block.down.weight.std() > 0.05
    assert torch.equal(model.head.weight, expected.head.weight)
    model(torch.ones(2, WIDTH)).sum().backward()


def test_buffers_and_ignored_parameters_are_initialised_whole(fake_group: None) -> None:
    model = on_meta(lambda: nn.Sequential(Shift(), nn.Linear(WIDTH, CLASSES)))
    ignored, buffer = model[1].weight, model[0].shift
    expected = built(lambda: nn.Linear(WIDTH, CLASSES))
    initialised(model, ignored_params=[ignored])
    assert model[1].weight is ignored and torch.equal(ignored, expected.weight) and ignored.requires_grad
    assert model[0].shift is buffer and torch.equal(buffer, torch.arange(float(WIDTH)))
    assert isinstance(model[1].bias, DTensor) and isinstance(model[0].weight, DTensor)
    assert model(torch.ones(2, WIDTH)).shape == (2, CLASSES)


def test_the_nearest_module_above_initialises_a_list_of_parameters() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.zeros(3) for _ in range(2))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            for scale in self.scales:
                nn.init.uniform_(scale)

    make = lambda: nn.Sequential(Scales(), nn.Linear(2, 2))  # noqa: E731
    equal(initialised(on_meta(make)), built(make))


@pytest.mark.parametrize("how", ["parameter", "data", "buffer"])
def test_an_initialisation_may_replace_a_tensor(how: str) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, Shift):
            module.weight = nn.Parameter(torch.full((WIDTH,), 3.0)) if how != "data" else module.weight
            module.weight.data = torch.full((WIDTH,), 3.0)
            module.shift = torch.zeros(WIDTH) if how == "buffer" else module.shift.zero_()

    model = on_meta(lambda: nn.Sequential(Shift(), nn.Tanh()))
    initialised(model, param_init_fn=init)
    assert model[0].weight.eq(3).all() and model[0].shift.eq(0).all()
    assert [name for name, _ in model.named_parameters()] == ["0.weight"] and model.state_dict().keys() == {"0.weight"}


def test_a_partial_function_may_stand_for_a_modules_reset_parameters() -> None:
    """As litgpt sets them, before its model is sharded on the meta device."""
    model = on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model[0].reset_parameters = functools.partial(nn.init.constant_, model[0].weight, 2.0)
    model[0].bias = None
    initialised(model)
    assert model[0].weight.eq(2).all()


def test_other_references_to_a_parameter_stay_valid() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 1)
            self.also = [self.head.bias]  # as nn.LSTM keeps its parameters

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) + self.also[0]

    model, expected = on_meta(Net), built(Net)
    bias = model.head.bias
    initialised(model)
    assert model.also[0] is bias
    x = torch.ones(2, WIDTH)
    assert_close(model(x), expected(x), rtol=1e-6, atol=0)
    model(x).sum().backward()
    assert model.head.bias.grad.item() == 4


def test_pieces_are_units_and_the_modules_between_them() -> None:
    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, WIDTH))
            self.embed = nn.Sequential(nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH))
            self.encoder = nn.Module()
            self.encoder.blocks = nn.ModuleList(MLPBlock() for _ in range(2))
            self.encoder.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

        def reset_parameters(self) -> None:
            nn.init.zeros_(self.token)

    model = on_meta(ViT)
    names = {module: name for name, module in model.named_modules()}
    pieces = find_pieces(model, {unit.modules[unit.name] for unit in find_units(model)}, None)
    assert [[names[module] for module in piece.modules] for piece in pieces] == [
        ["embed.0", "embed.1", "embed"],
        ["encoder.blocks.0.up", "encoder.blocks.0.down", "encoder.blocks.0"],
        ["encoder.blocks.1.up", "encoder.blocks.1.down", "encoder.blocks.1"],
        ["encoder.norm"],
        ["head"],
        [""],
    ]


# Devices


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_a_model_on_the_cpu_is_sharded_onto_the_accelerator(fake_group: None) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    expected = built(CASES["cnn_batchnorm"].make)
    model = copy.deepcopy(expected)
    graph_fsdp.compile(model, init_device_mesh(accelerator.type, (FAKE_WORLD_SIZE,)), backend="eager")
    for name, p in expected.named_parameters():
        shard = model.get_parameter(name)
        assert isinstance(shard, DTensor) and shard.device.type == accelerator.type
        assert torch.equal(shard.to_local().cpu(), p[: -(-p.shape[0] // FAKE_WORLD_SIZE)])
    assert {b.device.type for b in model.buffers()} == {accelerator.type}
