"""Models on the meta device that cannot be initialised: an error that names what is missing, and nothing is changed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import FAKE_WORLD_SIZE, fake_process_group
from models import CLASSES, MLP, WIDTH, MLPBlock, llama
from test_meta import Norm, Shift, initialised, on_meta
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graph_fsdp
from graph_fsdp import MeshError, MetaDeviceError

# Errors


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """The model and the state of the random numbers are what they were."""

    def state() -> list[Any]:
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return [(name, id(t), t.device, t.dtype, t.shape, t.requires_grad) for name, t in tensors]

    before, random_state = state(), torch.get_rng_state()
    yield
    assert state() == before and type(model).__name__ != f"FSDP{type(model).__name__}"
    assert torch.equal(torch.get_rng_state(), random_state)


def refuse(model: nn.Module, error: type[Exception], *words: str, mesh: Any = None, **options: Any) -> None:
    with unchanged(model), pytest.raises(error) as raised:
        graph_fsdp.compile(model, mesh, backend="eager", **options)
    assert raised.type is error
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Norm(), nn.Linear(WIDTH, CLASSES))


def fill(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 0.5)


def test_a_module_that_nobody_can_initialise(fake_group: None) -> None:
    model = on_meta(with_norm)
    words = ("parameter '1.weight' is on the meta device", "module '1' (Norm) has no reset_parameters()")
    refuse(model, MetaDeviceError, *words, "param_init_fn")
    assert initialised(model, param_init_fn=fill)[1].weight.to_local().eq(0.5).all()


def test_a_buffer_that_nobody_can_initialise(fake_group: None) -> None:
    refuse(on_meta(llama), MetaDeviceError, "LlamaR", "has no reset_parameters()", "model._init_weights")
    model = on_meta(MLP)
    model.blocks[0].register_buffer("mask", torch.ones(3, device="meta"), persistent=False)
    refuse(model, MetaDeviceError, "buffer 'blocks.0.mask'", "module 'blocks.0' (MLPBlock) has no reset_parameters()")


@pytest.mark.parametrize("tensor", ["weight", "shift"])
def test_something_that_an_initialisation_leaves_out(fake_group: None, tensor: str) -> None:
    def init(module: nn.Module) -> None:
        for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if name != tensor or not isinstance(module, Shift):
                value.zero_()

    model = on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Shift()))
    kind = "buffer" if tensor == "shift" else "parameter"
    refuse(model, MetaDeviceError, f"{kind} '1.{tensor}'", "nothing has written to it", param_init_fn=init)
    assert initialised(model, param_init_fn=fill)[1].shift.eq(0.5).all()


def test_memory_without_contents_is_no_value() -> None:
    """What FSDP1's users pass on ranks that get their values from another one."""
    refuse(on_meta(MLP), MetaDeviceError, "nothing has written", param_init_fn=lambda m: m.to_empty(device="cpu"))


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.data.fill_(1.0),
        lambda t: t.view(-1)[:].copy_(torch.ones(t.numel())),
        lambda t: torch._foreach_zero_([t]),
        lambda t: torch.ones(t.shape, out=t),
        lambda t: setattr(t, "data", torch.ones(t.shape)),
    ],
)
def test_every_way_to_write_counts(write: Callable[[Tensor], Any]) -> None:
    initialised(on_meta(MLP), param_init_fn=lambda module: [write(p) for p in module.parameters(recurse=False)])


@pytest.mark.parametrize("real", [False, True])
def test_an_initialisation_that_reaches_into_another_unit(fake_group: None, real: bool) -> None:
    def init(module: nn.Module) -> None:
        for p in module.parameters():
            nn.init.zeros_(p)

    model = on_meta(MLP)
    if real:
        model.blocks[1] = MLPBlock()
    before = copy.deepcopy(model.blocks[1].up.weight)
    words = ("param_init_fn of module 'blocks' (ModuleList)", "writes to parameter 'blocks.0.up.weight'")
    refuse(model, MetaDeviceError, *words, "parameters(recurse=False)", param_init_fn=init)
    if real:
        assert torch.equal(model.blocks[1].up.weight, before)


def test_an_initialisation_that_raises(fake_group: None) -> None:
    def init(module: nn.Module) -> None:
        fill(module)
        torch.rand(3)
        if isinstance(module, nn.Linear) and module.out_features == CLASSES:
            raise KeyError("gain")

    words = ("param_init_fn of module 'head' (Linear)", "KeyError: 'gain'")
    refuse(on_meta(MLP), MetaDeviceError, *words, param_init_fn=init)


def test_an_initialisation_that_changes_a_shape(fake_group: None) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias = nn.Parameter(torch.zeros(3))

    def enlarge(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            p.data = torch.zeros(3)

    words = ("replaced parameter 'blocks.0.up.bias' by float32[3] on cpu", "keep its shape")
    refuse(on_meta(MLP), MetaDeviceError, *words, param_init_fn=init)
    words = ("parameter 'blocks.0.up.weight' was float32[32, 16] on meta and float32[3] on cpu after",)
    refuse(on_meta(MLP), MetaDeviceError, *words, param_init_fn=enlarge)


def test_an_attribute_that_is_no_buffer(fake_group: None) -> None:
    model = on_meta(MLP)
    model.blocks[1].scale = torch.ones(3, device="meta")
    words = ("attribute 'scale' of module 'blocks.1' (MLPBlock)", "register_buffer")
    refuse(model, MetaDeviceError, *words)
    del model.blocks[1].scale
    initialised(model)


def test_param_init_fn_without_anything_to_initialise(fake_group: None) -> None:
    refuse(MLP(), ValueError, "param_init_fn", "model has none", "leave it out", param_init_fn=fill)


def test_param_init_fn_that_would_never_be_called(fake_group: None) -> None:
    words = ("param_init_fn would never be called", "sync_module_states=True", "leave one")
    refuse(on_meta(MLP), ValueError, *words, param_init_fn=fill, sync_module_states=True)
    refuse(on_meta(MLP), TypeError, "param_init_fn must be a function", "got 'zeros'", param_init_fn="zeros")


@pytest.mark.parametrize("world_size", [1, FAKE_WORLD_SIZE])
def test_a_first_rank_without_values_to_give(world_size: int) -> None:
    with fake_process_group() if world_size > 1 else contextlib.nullcontext():
        words = ("sync_module_states=True", "parameter 'blocks.0.up.weight' is on the meta device", "leave")
        refuse(on_meta(MLP), MetaDeviceError, *words, sync_module_states=True)


def test_a_mesh_of_the_meta_device(fake_group: None) -> None:
    mesh = DeviceMesh("meta", list(range(FAKE_WORLD_SIZE)))
    refuse(on_meta(MLP), MeshError, "mesh is of device type 'meta'", "holds no values", mesh=mesh)
