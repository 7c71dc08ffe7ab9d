"""What other code asks of a compiled model and cannot have: one error each, and the model goes on as it was."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import FAKE_WORLD_SIZE
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import fsdp
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import graph_fsdp
from graph_fsdp.errors import AlreadyShardedError, MetaDeviceError, UnsupportedError


class Saving(nn.Module):
    """As models of Transformers: it writes what its state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.saved: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def save_pretrained(self, folder: str, state_dict: Any = None) -> None:
        self.saved = state_dict if state_dict is not None else self.state_dict()


@pytest.fixture
def mesh(fake_group: dist.ProcessGroup) -> DeviceMesh:
    return init_device_mesh("cpu", (FAKE_WORLD_SIZE,))


def with_tangent(model: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        model(torch.ones(1, 4))  # without one, it runs
        return model(forward_ad.make_dual(torch.ones(1, 4), torch.ones(1, 4)))


OF_FSDP1 = {
    "state_dict_type": "get_model_state_dict",
    "set_state_dict_type": "model.state_dict()",
    "summon_full_params": "use graph_fsdp.unsharded(model)",
    "optim_state_dict": "get_optimizer_state_dict",
    "full_optim_state_dict": "get_optimizer_state_dict",
    "sharded_optim_state_dict": "get_optimizer_state_dict",
    "optim_state_dict_to_load": "set_optimizer_state_dict",
    "shard_full_optim_state_dict": "set_optimizer_state_dict",
}


def of_fsdp1(name: str, model: nn.Module, _: DeviceMesh) -> None:
    """Call the method of FSDP1's class, as scripts that were FSDP1's may still do."""
    method, optimizer = getattr(fsdp.FullyShardedDataParallel, name), torch.optim.SGD(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if name.endswith("state_dict_type"):
            result = method(model, fsdp.StateDictType.FULL_STATE_DICT)
        elif name == "summon_full_params":
            result = method(model)
        elif name == "shard_full_optim_state_dict":
            result = method(optimizer.state_dict(), model, optim=optimizer)
        else:
            result = method(model, optimizer, *([optimizer.state_dict()] if name.endswith("load") else []))
        with result:
            pass


Action = Callable[[nn.Module, DeviceMesh], Any]
REFUSED: dict[str, tuple[Action, type[Exception], str]] = {
    "torch.save": (lambda m, _: torch.save(m, io.BytesIO()), TypeError, "save model.state_dict()"),
    "pickle": (lambda m, _: pickle.dumps(m), TypeError, "graph_fsdp.checkpoint.save"),
    "copy": (lambda m, _: copy.copy(m), TypeError, "cannot be pickled"),
    "DDP": (lambda m, _: DistributedDataParallel(m), AlreadyShardedError, "DistributedDataParallel"),
    "FSDP1": (lambda m, _: fsdp.FullyShardedDataParallel(m, device_id="cpu"), AlreadyShardedError, "Parallel, and"),
    **{
        f"FSDP.{name}": (functools.partial(of_fsdp1, name), UnsupportedError, words) for name, words in OF_FSDP1.items()
    },
    "fully_shard": (lambda m, mesh: fully_shard(m, mesh=mesh), AlreadyShardedError, "use it as it is"),
    "fully_shard of a part": (lambda m, mesh: fully_shard(m.body, mesh=mesh), AlreadyShardedError, "fully_shard"),
    "replicate": (lambda m, _: replicate(m), AlreadyShardedError, "replicate"),
    "share_memory": (lambda m, _: m.share_memory(), UnsupportedError, "to_local()"),
    "meta": (lambda m, _: m.to("meta"), MetaDeviceError, "moved to the meta device"),
    "meta of a device": (lambda m, _: m.to(device=torch.device("meta")), MetaDeviceError, "meta device"),
    "torch.jit.trace": (lambda m, _: torch.jit.trace(m, torch.ones(1, 4)), AlreadyShardedError, "given to torch.jit"),
    "torch.jit.script": (lambda m, _: torch.jit.script(m), AlreadyShardedError, "given to torch.jit"),
    "torch.export": (lambda m, _: torch.export.export(m, (torch.ones(1, 4),)), UnsupportedError, "export the model"),
    "vmap": (lambda m, _: torch.func.vmap(m)(torch.ones(2, 4)), UnsupportedError, "under a transform of torch.func"),
    "jvp": (lambda m, _: torch.func.jvp(m, (torch.ones(1, 4),), (torch.ones(1, 4),)), UnsupportedError, "torch.func"),
    "make_dual": (lambda m, _: with_tangent(m), UnsupportedError, "make_dual"),
    "make_dual without gradients": (lambda m, _: torch.no_grad()(with_tangent)(m), UnsupportedError, "make_dual"),
    "save_pretrained": (lambda m, _: m.save_pretrained("folder"), UnsupportedError, "graph_fsdp.unsharded(model)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_and_nothing_has_changed(mesh: DeviceMesh, name: str) -> None:
    action, error, words = REFUSED[name]
    model = graph_fsdp.compile(Saving(), mesh, backend="eager")
    before = dict(model.named_parameters())
    with pytest.raises(error) as raised:
        action(model, mesh)
    assert words in str(raised.value)
    assert all(before[n] is p for n, p in model.named_parameters())
    model(torch.ones(1, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_what_is_not_refused(mesh: DeviceMesh) -> None:
    model = graph_fsdp.compile(Saving(), mesh, backend="eager")
    with fsdp.FullyShardedDataParallel.summon_full_params(model, recurse=False):  # of nothing; TRL generates in it
        model(torch.ones(1, 4))
    assert model.to("cpu") is model and model.to(torch.float32) is model
    if hasattr(fsdp, "share_comm_ctx"):  # not in torch 2.9
        fsdp.share_comm_ctx([model, graph_fsdp.compile(Saving(), mesh, backend="eager")])
    given = {"body.0.weight": torch.ones(4, 4)}
    model.save_pretrained("folder", state_dict=given)
    assert model.saved is given
    with graph_fsdp.unsharded(model):
        model.save_pretrained("folder")
    assert [type(value) for value in model.saved.values()] == [Tensor, Tensor]


def test_an_optimizer_of_what_parameters_were_is_told_once(mesh: DeviceMesh) -> None:
    model = Saving()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    model = graph_fsdp.compile(model, mesh, backend="eager")
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.warns(UserWarning, match=r"made before graph_fsdp.compile and holds 2 parameters .*'body.0.weight'"):
        early.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        early.step()
        late.step()
