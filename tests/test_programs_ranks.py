"""Programs of earlier starts on two gloo ranks, of which both, one or none has found one: the numbers are the same."""

from __future__ import annotations

from typing import TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from facts import Facts, shared_folder
from models import MLP, WIDTH
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp.engine import engine
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report.report import GraphReport, engine_of
from graph_fsdp.runtime.ranks import agreement

FACTS = Facts(__name__)
STEPS = 2


Start: TypeAlias = tuple[list[Tensor], list[Tensor], GraphReport]


def start(programs: object) -> Start:
    """Losses, parameters and the report after some steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = graph_fsdp.compile(MLP(4), backend="eager", programs=programs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        batch = torch.full((4, WIDTH), 0.1 * (step + 1 + dist.get_rank()))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [p.to_local().detach() for p in model.parameters()], graph_fsdp.inspect(model)


def found(report: GraphReport) -> bool:
    return report.graphs[-1].remake is not None


def check_same(one: Start, two: Start) -> None:
    assert all(map(torch.equal, one[0], two[0])) and all(map(torch.equal, one[1], two[1]))
    for phase in ("forward", "backward"):
        a, b = one[2].latest(phase), two[2].latest(phase)
        assert (a.program, a.stages["slots"].body) == (b.program, b.stages["slots"].body)


@FACTS
def ranks_that_share_a_folder_find_what_one_has_kept() -> None:
    folder = shared_folder()
    cold = start(folder)
    dist.barrier()
    assert len(list(folder.glob("*.json"))) == 1
    warm = start(folder)
    assert (found(cold[2]), found(warm[2])) == (dist.get_rank() == 1, True), "rank 1 takes what rank 0 makes"
    check_same(cold, warm)


@FACTS
def either_rank_may_find_a_program_that_the_other_has_not() -> None:
    mine = shared_folder() / str(dist.get_rank())
    cold = start(mine)
    for has in (0, 1):
        warm = start(mine if dist.get_rank() == has else False)
        assert found(warm[2]) == (dist.get_rank() == has)
        check_same(cold, warm)


@FACTS
def a_program_of_another_plan_is_made_again_and_announced_once() -> None:
    folder, counts, texts = shared_folder(), [0, 0], list[list[str]]()
    for rows in ((8, 4096), (16384, 4096)):  # those of the first rank decide what is kept from forward to backward
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
        model = graph_fsdp.compile(
            nn.Sequential(*layers),
            backend="eager",
            programs=folder,
            dynamic=False,
            auto_wrap_policy={nn.Linear},
            passes=default_pipeline(hardware="h100"),
        )
        with mock.patch.object(engine.log, "info") as log:
            model(torch.ones(rows[dist.get_rank()], 256)).sum().backward()
        texts.append([call.args[0] for call in log.call_args_list])
        lockstep = engine_of(model).schedules.lockstep
        assert lockstep is not None
        dist.all_gather_object(counts, lockstep.compilations)
        assert counts[0] == counts[1]
    assert ("the ranks have another plan for graph %d" in texts[1]) == (dist.get_rank() == 1)


@FACTS
def ranks_compare_what_they_have_found() -> None:
    seen: list[str] = []
    compare = agreement.compare

    def noted(store: object, prefix: str, *others: object) -> str:
        seen.append(prefix)
        return compare(store, prefix, *others)  # type: ignore[arg-type]

    folder = shared_folder()
    start(folder)
    agreement.compare = noted  # type: ignore[assignment]
    try:
        report = start(folder)[2]
    finally:
        agreement.compare = compare
    assert found(report)
    assert any("/collectives" in prefix for prefix in seen)


test_on_two_ranks = FACTS.on(2)
