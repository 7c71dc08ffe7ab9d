"""For tests: trainings that are saved, and resumed by others."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_files import uneven
from models import CLASSES, WIDTH
from reference import whole
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import graph_fsdp
from graph_fsdp import checkpoint

ROWS = 24  # of all ranks together: as many for each of 1, 2, 3, 4 or 8
SAVED_AT, STEPS = 3, 6


def odd() -> nn.Module:
    """Rows that no world size divides, and fewer than ranks; no scalar, which ``fully_shard`` does not take."""
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1), nn.Tanh(), nn.Linear(1, CLASSES))


class Training:
    """A model, an optimizer and a schedule; rows of a step are the same however many ranks share them out."""

    def __init__(
        self, wrap: Callable[[nn.Module], nn.Module], seed: int = 0, make: Callable[[], nn.Module] = uneven
    ) -> None:
        torch.manual_seed(seed)
        self.model = wrap(make())
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = StepLR(self.optimizer, 2, gamma=0.5)
        self.average = {name: torch.zeros_like(p.detach()) for name, p in self.model.named_parameters()}
        self.step = 0

    def train(self, until: int) -> list[float]:
        """The mean loss of each step."""
        alone = not dist.is_initialized()
        rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        losses = []
        while self.step < until:
            generator = torch.Generator().manual_seed(self.step)
            x = torch.randn(ROWS, WIDTH, generator=generator)
            rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
            loss = self.model(x[rows]).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    self.average[name].mul_(0.5).add_(parameter)
            mean = loss.detach().clone()
            if not alone:
                dist.all_reduce(mean)
            losses.append(mean.item() / world)
            self.step += 1
        return losses

    def kept(self) -> Callable[[], None]:
        """A function that brings back what everything is now; another compilation would cost more."""
        values = [value.clone() for value in self.model.state_dict().values()]
        optimizer, schedule = copy.deepcopy(self.optimizer.state_dict()), copy.deepcopy(self.schedule.state_dict())
        average, step = {name: value.clone() for name, value in self.average.items()}, self.step

        def restore() -> None:
            for value, kept in zip(self.model.state_dict().values(), values, strict=True):
                value.copy_(kept)
            self.optimizer.zero_grad()
            self.optimizer.load_state_dict(copy.deepcopy(optimizer))
            self.schedule.load_state_dict(copy.deepcopy(schedule))
            self.average, self.step = {name: value.clone() for name, value in average.items()}, step

        return restore

    def extra(self) -> dict[str, Any]:
        position = {"file": ("a.txt", 3), 7: torch.arange(3)}
        return {"step": self.step, "schedule": self.schedule, "position": position, "average": self.average}

    def save(self, path: Path, **options: Any) -> checkpoint.PendingSave:
        return checkpoint.save(path, self.model, self.optimizer, extra=self.extra(), **options)

    def load(self, path: Path, **options: Any) -> dict[str, Any]:
        found = checkpoint.load(
            path, self.model, self.optimizer, extra={"schedule": self.schedule, "average": self.average}, **options
        )
        self.step = found["step"]
        self.average = found["average"]
        return found

    def values(self) -> dict[str, Tensor]:
        """All of the model's and the optimizer's, whole."""
        found = {name: whole(value) for name, value in self.model.state_dict().items()}
        found |= {f"average of {name}": whole(value) for name, value in self.average.items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            found |= {f"{names[parameter]}: {key}": whole(value) for key, value in state.items()}
        return dict(sorted(found.items()))


def compiled(mesh: Any = None, **options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: graph_fsdp.compile(model, mesh, backend="eager", **options)


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names that only one has, or whose values differ in any bit."""
    names = found.keys() | expected.keys()
    return sorted(n for n in names if n not in found or n not in expected or not torch.equal(found[n], expected[n]))


def save_and_load(model: nn.Module, optimizer: Optimizer) -> None:
    """Save all with ``torch.save``, and load it again into what it is of."""
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    of_model, of_optimizer = torch.load(file, weights_only=False)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
