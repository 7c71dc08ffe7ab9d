"""What is held between steps: shards, gradients, optimizer states, and nothing that a run has gathered or made."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import mostly_long
from models import MLP
from test_extensions import extended
from test_extensions_float8 import Scaled
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp.compat import FakeTensor, storage_id, without_torch_function
from graph_fsdp.runtime.slots import Slots

pytestmark = pytest.mark.usefixtures("older_objects_frozen", "fake_group")


def memory() -> Counter[int]:
    """Bytes of the storages in the memory of the host that some tensor refers to, with how many there are of each."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and not issubclass(type(o), FakeTensor)]
    with without_torch_function():  # placeholders
        storages = {storage_id(o): o.untyped_storage().nbytes() for o in tensors if in_memory_of_the_host(o)}
    return Counter(nbytes for nbytes in storages.values() if nbytes)


def in_memory_of_the_host(tensor: Tensor) -> bool:
    try:
        return tensor.device.type == "cpu"
    except RuntimeError as error:  # torch 2.9 leaves undefined tensors behind
        assert "does not have a device" in str(error)
        return False


def train(model: nn.Module) -> None:
    model(torch.ones(4, 16)).sum().backward()
    model.zero_grad()


def accumulate(model: nn.Module) -> None:
    for _ in range(3):
        model(torch.ones(4, 16)).sum().backward()
    model.zero_grad()


def accumulate_without_reductions(model: Any) -> None:
    for last in (False, False, True):
        model.set_requires_gradient_sync(last)
        model(torch.ones(4, 16)).sum().backward()
    model.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module) -> None:
    model(torch.ones(4, 16))


def compiled(**options: Any) -> nn.Module:
    return graph_fsdp.compile(MLP(), backend="eager", **options)


CASES: dict[str, tuple[Callable[[], nn.Module], list[Callable[[Any], None]]]] = {
    "resharded": (lambda: compiled(reshard_after_forward=True), [train, evaluate, accumulate]),
    "kept": (lambda: compiled(reshard_after_forward=False), [train, evaluate, accumulate_without_reductions]),
    "reshards to two": (lambda: compiled(reshard_after_forward=2), [train, evaluate]),
    "replicated": (
        lambda: compiled(mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))),
        [train, accumulate],
    ),
    "bfloat16": (lambda: compiled(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), [train, evaluate]),
    "offloaded": (lambda: compiled(offload_policy=CPUOffloadPolicy(pin_memory=False)), [train, evaluate]),
    "float8": (lambda: graph_fsdp.compile(extended(Scaled), backend="eager"), [train, evaluate]),
}


@pytest.mark.filterwarnings("ignore:.*offload")
@pytest.mark.parametrize("case", mostly_long(CASES, ["resharded", "kept", "offloaded"]))
def test_nothing_that_was_gathered_is_held_between_steps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train(compiled())  # torch 2.9 keeps a scalar of the first compilation of a process
    buffers: list[weakref.ref[Any]] = []

    def seen(take: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def taking(*args: Any, **given: Any) -> Tensor:
            buffer = take(*args, **given)
            buffers.append(weakref.ref(buffer.untyped_storage()))
            return buffer

        return taking

    for name in ("take", "take_escaping"):
        monkeypatch.setattr(Slots, name, seen(vars(Slots)[name]))
    make, works = CASES[case]
    model = make()
    before = memory()
    for work in works:
        for _ in range(2):
            work(model)
        held = memory() - before
        assert buffers, "it gathers"
        assert not [buffer for buffer in buffers if buffer() is not None], f"gathered and held after {work.__name__}"
        assert not held, f"made and held after {work.__name__}: (bytes, storages) {held}"
