"""Training steps of an implementation, and whether they are those of a reference."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from harness import Disagreement, gather
from implementations import REFERENCE, REFERENCE_ALONE, Implementation, Setup
from torch import Tensor, nn
from workloads import Workload, loss_of

LEARNING_RATE = 3e-4  # Llamas without a warmup: larger ones make rounding differences grow to more than is allowed

# Difference of a loss from the reference's, at any step: relative, and absolute below one nat, since the loss of a
# model that has learnt nearly all is a small difference of large logits, which were rounded. Kernels that are fused
# otherwise round otherwise, and Adam's division makes a difference of the first steps larger.
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2}

Losses = dict[str, list[float]]  # of this rank, step by step


class Trainer:
    """One implementation, ready to train: AdamW, and batches counted from zero. Makes ``model`` where it is not given,
    and shards it."""

    def __init__(
        self, implementation: Implementation, workload: Workload, setup: Setup, model: nn.Module | None = None
    ) -> None:
        self.workload, self.device = workload, setup.device
        self.model = implementation.build(workload.make(setup.device) if model is None else model, setup)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self._losses: list[Tensor] = []

    def step(self) -> None:
        """Forward, backward, optimizer, on this rank's next batch. Gradients are gone afterwards."""
        batch = self.workload.tokens(len(self._losses), dist.get_rank(), self.device)
        loss = loss_of(self.model(**batch))
        loss.backward()
        self.update()
        self._losses.append(loss.detach())

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def losses(self) -> list[float]:
        return [loss.item() for loss in self._losses]


def reference_losses(
    steps: int, workload: Workload, setup: Setup, *, alone: bool, reference: Implementation | None = None
) -> list[float]:
    """This rank's losses as plain PyTorch trains, or ``reference`` where replicas of the model are too large."""
    chosen = REFERENCE_ALONE if alone else reference or REFERENCE
    trainer = Trainer(chosen, workload, setup)
    for _ in range(steps):
        trainer.step()
    losses = trainer.losses()
    del trainer
    gc.collect()
    return losses


def check_losses(found: Mapping[str, Sequence[float]], expected: Mapping[str, Sequence[float]], bound: float) -> float:
    """Compare losses by implementation, on all ranks alike; the largest difference of all (see TOLERANCES).

    Raises:
        Disagreement: a loss differs by more than ``bound``; names the implementation, the first such step, the rank
            and both values. All ranks raise.
    """
    complaints, largest = [], 0.0
    for name, losses in found.items():
        assert len(losses) == len(expected[name]) > 0
        for step, (ours, theirs) in enumerate(zip(losses, expected[name], strict=True)):
            difference = abs(ours - theirs) / max(abs(theirs), 1.0)
            if not difference <= bound:  # a NaN too
                complaints.append(
                    f"{name} does not train as the reference does: at step {step} rank {dist.get_rank()} has loss "
                    f"{ours:.7g} and the reference {theirs:.7g}, a difference of {difference:.2g} where "
                    f"{bound:g} is allowed"
                )
                break
            largest = max(largest, difference)
    of_ranks = gather((complaints, largest))
    all_complaints = [line for lines, _ in of_ranks for line in lines]
    if all_complaints:
        raise Disagreement("\n".join(all_complaints))
    return max(value for _, value in of_ranks)
