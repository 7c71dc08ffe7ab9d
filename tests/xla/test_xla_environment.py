"""Bad input with ``backend="xla"`` that XLA itself must be asked about: one clear error, and nothing is changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from xla_launch import DEVICES, XlaFacts, run_xla

from graph_fsdp import MeshError, UnsupportedError


def refusal(launched: int, spmd: bool) -> str:
    """What ``compile`` raises: with ``launched`` processes of torch.distributed, all but one of them pretended."""
    import torch.distributed as dist
    import torch_xla.runtime as xr
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import graph_fsdp

    if launched:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=launched)
    if spmd:
        xr.use_spmd()
    model = nn.Linear(4, 4)
    try:
        graph_fsdp.compile(model, backend="xla")
    except (ValueError, NotImplementedError) as error:
        assert type(model) is nn.Linear and model.weight.device.type == "cpu"
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("launched", "spmd", "expected"),
    [
        (0, False, r"^UnsupportedError: .*SPMD must be on; call torch_xla\.runtime\.use_spmd\(\)"),
        (2, True, "^MeshError: mesh: .* counts 2 processes and XLA 1, "),
        (1, True, "^$"),
    ],
)
def test_the_environment_must_fit(launched: int, spmd: bool, expected: str) -> None:
    assert re.search(expected, run_xla(refusal, launched, spmd))


def test_a_launcher_that_xla_knows_nothing_of_is_refused() -> None:
    """As torchrun sets it, before any process group is made."""
    message = run_xla(refusal, 0, True, env={"WORLD_SIZE": "2", "RANK": "0"})
    assert message.startswith("MeshError: mesh: ") and "counts 2 processes and XLA 1, " in message


FACTS = XlaFacts(__name__)


def refuse(
    error: type[Exception], *words: str, mesh: Any = None, model: nn.Module | None = None, **options: Any
) -> None:
    """``compile`` raises exactly this class with all these words, and leaves the model as it is, on the CPU."""
    import torch_xla.runtime as xr

    import graph_fsdp

    xr.use_spmd()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [(name, id(p), p.device) for name, p in model.named_parameters()]
    kind = type(model)
    with pytest.raises(error) as raised:
        graph_fsdp.compile(model, mesh, backend="xla", **options)
    assert raised.type is error
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"
    assert (type(model), [(name, id(p), p.device) for name, p in model.named_parameters()]) == (kind, before)


def xla_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> Any:
    import numpy
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    return xs.Mesh(numpy.arange(DEVICES), shape, names)


@FACTS
def a_mesh_must_say_what_shards() -> None:
    refuse(MeshError, "mesh has no axis names", "'fsdp'", mesh=xla_mesh((4,), None))
    refuse(MeshError, "'data' of size 4", "one axis must be named 'fsdp'", mesh=xla_mesh((4,), ("data",)))
    refuse(MeshError, "'model' must have size 1", mesh=xla_mesh((2, 2), ("fsdp", "model")))
    refuse(TypeError, "mesh must be a torch_xla Mesh", "'fsdp'", mesh="fsdp")
    refuse(TypeError, "mesh must be a torch_xla Mesh", mesh=4)


@FACTS
def options_that_xla_does_not_have_are_refused() -> None:
    refuse(UnsupportedError, "offload_policy", offload_policy=CPUOffloadPolicy())
    refuse(UnsupportedError, "shard_placement_fn", shard_placement_fn=lambda p: None)
    refuse(UnsupportedError, "activation_checkpointing", "offload", activation_checkpointing="offload")
    refuse(UnsupportedError, "dynamic=True", dynamic=True)
    refuse(UnsupportedError, "reshard_after_forward=2", reshard_after_forward=2)


@FACTS
def options_of_the_other_sharding_are_refused() -> None:
    refuse(ValueError, "sharding", "'manual'", "'auto'", sharding="spmd")
    refuse(ValueError, "shard_output", "sharding='auto'", shard_output=lambda output, mesh: None)


@FACTS
def rows_that_devices_cannot_share_equally_are_refused() -> None:
    from graph_fsdp.xla import shard_batch

    mesh = xla_mesh((4,), ("fsdp",))
    with pytest.raises(ValueError, match=r"batch has a tensor of shape \(6, 4\), whose 6 rows.*4 devices"):
        shard_batch(torch.ones(6, 4), mesh)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) > 0).sum()


@FACTS
def a_single_integer_of_each_device_is_refused() -> None:
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    mesh = xla_mesh((4,), ("fsdp",))
    model = graph_fsdp.compile(Counts(), mesh, backend="xla")
    with pytest.raises(UnsupportedError, match=r"output 0 of the model is a single torch\.int64"):
        model(shard_batch(torch.ones(8, 4), mesh))


test_compile = FACTS.on_devices()
