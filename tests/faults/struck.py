"""A model in which something happens in the middle of a forward or a backward, and what must be true afterwards."""

from __future__ import annotations

import datetime
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from models import MLP
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime import GatheredBytes
from graph_fsdp.runtime.ranks import agreement

# What will happen, once, where the key says: in "forward" or "backward", between the first and the second block, or in
# "later", between the second and the third of a forward.
FAULTS: dict[str, Callable[[], object]] = {}

DEVICE = torch.device("cpu")


def happen(where: str) -> None:
    fault = FAULTS.pop(where, None)
    if fault is not None:
        fault()


@torch.library.custom_op("graph_fsdp_faults::struck", mutates_args=())
def struck(x: Tensor, where: str) -> Tensor:
    happen(where)
    return x.clone()


@torch.library.custom_op("graph_fsdp_faults::struck_backward", mutates_args=())
def struck_backward(grad: Tensor, where: str) -> Tensor:
    happen("backward" if where == "forward" else "")
    return grad.clone()


for op in (struck, struck_backward):
    op.register_fake(lambda x, where: x.clone())
struck.register_autograd(
    lambda context, grad: (struck_backward(grad, context.where), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "where", inputs[1]),
)


class Struck(MLP):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = struck(first(x), "forward")
        x = struck(second(x), "later")
        return self.head(third(x))


def batch(rows: int = 4) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(dist.get_rank())).to(DEVICE)


def compiled(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return graph_fsdp.compile(Struck(depth=3).to(DEVICE), **{"backend": "eager", **options})


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> float:
    """A training step; its loss."""
    loss = model(batch()).square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def warm(model: nn.Module, steps: int = 3) -> nn.Module:
    """Until programs are predicted, as in the middle of a run."""
    for _ in range(steps):
        step(model)
    model.zero_grad()
    return model


def assert_whole(model: nn.Module, shards: Sequence[nn.Parameter]) -> None:
    """The shards that the model had are its parameters, and nothing gathered is counted or held."""
    found = list(model.parameters())
    assert [id(p) for p in found] == [id(p) for p in shards]
    assert all(isinstance(p, DTensor) for p in found), "a placeholder is left"
    engine = engine_of(model)
    assert not engine.storage.active
    if any(_held(engine.counter)):
        gc.collect()  # frames of what was raised
    assert _held(engine.counter) == (0, 0, 0)


def _held(counter: GatheredBytes) -> tuple[int, int, int]:
    return counter.current, counter.slots.current, counter.landing.current


def caught(function: Callable[[], object]) -> BaseException:
    """What a function raises, without its frames, which hold what they worked on."""
    try:
        function()
    except BaseException as error:
        link: BaseException | None = error
        while link is not None:
            link.__traceback__, link = None, link.__cause__ or link.__context__
        return error
    raise AssertionError("nothing was raised")


def rank() -> int:
    return dist.get_rank()


def start_group(timeout: float) -> None:
    """The default group from torchrun's variables, whose collectives end after ``timeout`` seconds."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))


ROUNDS = itertools.count()  # of this process, which all ranks count alike


def rounds(*functions: Callable[[], None], backend: str = "gloo") -> Iterator[Callable[[], None]]:
    """Each function with a process group of its own: a fault leaves the ranks out of step. What a round writes to the
    store no other round finds, also where the same function runs again."""
    agreement.PATIENCE_SECONDS = 0.3
    store = compat.default_store()
    me, size = rank(), dist.get_world_size()
    for function in functions:
        torch._dynamo.reset()
        FAULTS.clear()
        dist.destroy_process_group()
        prefix = dist.PrefixStore(f"round {next(ROUNDS)}: {function.__name__}", store)
        dist.init_process_group(backend, store=prefix, rank=me, world_size=size)
        yield function
