"""Tensor-parallel models on the meta device: each rank's part of the values that one process draws."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from experts import Experts, MoE
from facts import Facts
from reference import parameters_of
from safetensors.torch import save_file
from test_meta import on_meta
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import graph_fsdp
from graph_fsdp import MetaDeviceError, RankDisagreement, compat
from graph_fsdp.checkpoint import Safetensors

FACTS = Facts(__name__)
WIDTH, VOCABULARY = 16, 31  # the second is uneven over two times two ranks
HIDDEN = 34 if torch.__version__ >= (2, 10) else 36  # so is 34; torch 2.9 puts such parts together wrongly
SEED = 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh["dp"], mesh["tp"]


def divided(model: nn.Module, tp: DeviceMesh) -> Any:
    """Embedding and matrices are; norms are whole on each rank, as DTensors, and a batch norm's buffers too."""
    parallelize_module(model, tp, {"embedding": RowwiseParallel(input_layouts=Replicate())})
    plan = {"norm": SequenceParallel(), "batch_norm": SequenceParallel(use_local_output=True)}
    plan |= {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
    for block in model.blocks:
        parallelize_module(block, tp, plan)
    return model


def of_one_process() -> Model:
    torch.manual_seed(SEED)
    return Model()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def different(model: nn.Module, but: str = "-") -> list[str]:
    """Names of what has not the bits of one process, or has no memory."""
    expected = of_one_process().state_dict()
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(found) == [*dict(Model().named_parameters()), *dict(Model().named_buffers())]
    wrong = [name for name, value in found.items() if compat.local_part(value).is_meta]
    return wrong + [name for name in found if but not in name and not torch.equal(whole(found[name]), expected[name])]


def compiled(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    return graph_fsdp.compile(model, mesh, backend="eager", **options)


@FACTS
def values_are_those_of_one_process_with_the_first_ranks_seed() -> None:
    dp, tp = meshes()
    torch.manual_seed(SEED + dist.get_rank())  # as for dropout
    model = compiled(divided(on_meta(Model), tp), dp)
    drawn = torch.rand(3)
    of_one_process()
    goes_on = torch.rand(3)
    own = torch.rand(3, generator=torch.Generator().manual_seed(SEED + dist.get_rank()))
    assert torch.equal(drawn, own if dist.get_rank() else goes_on), "other ranks are where they were"
    assert isinstance(model.blocks[0].batch_norm.running_mean, DTensor)
    assert not different(model)


@FACTS
def training_is_that_of_a_model_with_values() -> None:
    dp, tp = meshes()

    def losses(model: nn.Module) -> list[float]:
        torch.manual_seed(SEED)
        compiled(parallelize_module(model, tp, {"head": ColwiseParallel(output_layouts=Replicate())}), dp)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dp.get_local_rank())
            loss = model(torch.randint(VOCABULARY, (4, 8), generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        torch._dynamo.reset()
        return found

    assert losses(on_meta(Model)) == losses(of_one_process())


def folder() -> Path:
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return Path(str(found[0]))


@FACTS
def values_come_from_files() -> None:
    """Each rank's rows of its part; what the files lack is initialised, where a piece has what they do not."""
    dp, tp = meshes()
    file = folder() / "model.safetensors"
    values = of_one_process().state_dict()
    if dist.get_rank() == 0:
        save_file(values, file)
        save_file({name: value for name, value in values.items() if "down" not in name}, file.with_name("some"))
    dist.barrier()
    torch.manual_seed(SEED + 1)
    assert not different(compiled(divided(on_meta(Model), tp), dp, checkpoint=file))
    assert not different(compiled(divided(Model(), tp), dp, checkpoint=file))
    some = compiled(divided(on_meta(Model), tp), dp, checkpoint=Safetensors(file.with_name("some"), strict=False))
    assert not different(some, but="down")
    assert "blocks.0.down.weight" in different(some)


@FACTS
def values_come_from_the_first_rank() -> None:
    dp, tp = meshes()
    model: nn.Module = of_one_process() if dp.get_local_rank() == 0 else on_meta(Model)
    assert not different(compiled(divided(model, tp), dp, sync_module_states=True))


@FACTS
def experts_of_their_own_ranks_are_parts_too() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))

    def draw(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.normal_()

    torch.manual_seed(SEED + dist.get_rank())
    model = on_meta(lambda: MoE(4, 16, 1)).distribute(mesh["ep"])
    assert isinstance(model.layers[0].experts.w1, DTensor)
    compiled(model, mesh._flatten("dp"), meshes={Experts: mesh["efsdp"]}, param_init_fn=draw)
    torch.manual_seed(SEED)
    undivided = graph_fsdp.compile(on_meta(lambda: MoE(4, 16, 1)), param_init_fn=draw, backend="eager")
    found, expected = parameters_of(model), parameters_of(undivided)
    assert found.keys() == expected.keys() and all(map(torch.equal, found.values(), expected.values()))


@FACTS
def ranks_that_divide_otherwise_are_told() -> None:
    """One of two data-parallel ranks would otherwise wait for the random state of a tensor-parallel rank."""
    dp, tp = meshes()
    model = on_meta(Model)
    if dp.get_local_rank() == 0:
        divided(model, tp)
    with pytest.raises(RankDisagreement, match="divided as"):
        compiled(model, dp)
    assert all(p.is_meta for p in model.parameters())


test_on_four_ranks = FACTS.on(4)


# On a fake process group


def test_an_initialisation_sees_whole_plain_tensors_and_after_an_error_nothing_has_changed(fake_group: Any) -> None:
    mesh, seen = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")), []
    model = divided(on_meta(Model), mesh["tp"])
    before = dict(model.named_parameters())

    def raises(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen.append([(type(p), tuple(p.shape), p.device.type) for p in module.parameters()])
            raise ValueError("no values")
        for p in module.parameters(recurse=False):
            p.zero_()

    with pytest.raises(MetaDeviceError, match=r"param_init_fn of module 'blocks.0.up' .*no values"):
        compiled(model, mesh["dp"], param_init_fn=raises)
    assert seen == [[(nn.Parameter, (HIDDEN, WIDTH), "cpu"), (nn.Parameter, (HIDDEN,), "cpu")]]
    assert all(p is before[name] and p.is_meta for name, p in model.named_parameters())
    assert isinstance(before["blocks.0.up.weight"], DTensor)
    assert compiled(model, mesh["dp"]) is model and not model.blocks[0].up.weight.is_meta


def test_a_part_that_nobody_initialises_is_named(fake_group: Any) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        MetaDeviceError, match=r"'embedding.weight' is on the meta device, and nothing has written to it"
    ):
        compiled(divided(on_meta(Model), mesh["tp"]), mesh["dp"], param_init_fn=lambda module: None)
