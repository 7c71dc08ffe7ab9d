"""``cuda_graphs=True`` changes no number: on two gloo ranks, with graphs that are executed again (``reexecution.py``).

Each fact compares bit for bit with FSDP2, or with one process (where a fact is about our own programs, with those).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from facts import Facts
from models import CLASSES, MLP, WIDTH
from reexecution import Reexecution, cpu_graphs
from reference import Outcome, Step, parameters_of, train_reference, train_sharded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import graph_fsdp
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report.report import GraphView

FACTS = Facts(__name__)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.scale)


STEPS = [Step(), Step(), Step(evaluate=True), Step(), Step(), Step(evaluate=True)] + [Step(), Step(evaluate=True)] * 3
OTHER_ROWS = [Step(rows=2)] * 4 + [Step()] * 2 + [Step(rows=2)] * 2


def equal(actual: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=False, msg=lambda text: f"{what}: {text}")


def same_outcome(name: str, steps: list[Step], **options: Any) -> None:
    expected = train_reference(name, steps, world_size=dist.get_world_size())[dist.get_rank()]
    with cpu_graphs():
        actual = train_sharded(name, steps, backend="eager", cuda_graphs=True, **options)
    for field in Outcome.__dataclass_fields__:
        equal(getattr(actual, field), getattr(expected, field), f"{name}, {field}")
    assert Reexecution.replays > Reexecution.captures > 0, name


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    for module in model.children():
        fully_shard(module)
    return fully_shard(model)


def ours(model: nn.Module, **options: Any) -> nn.Module:
    return graph_fsdp.compile(model, **{"backend": "eager", "auto_wrap_policy": {nn.Linear}, **options})


def with_graphs(model: nn.Module, **options: Any) -> nn.Module:
    return ours(model, cuda_graphs=True, **options)


def both(
    train: Callable[[nn.Module, list[Tensor]], Any], shard: Callable[..., nn.Module] = fsdp2, **options: Any
) -> nn.Module:
    """``train`` on a model without CUDA graphs, of ``shard``, and on one with, on equal batches. Returns the latter."""
    seen: list[tuple[Any, dict[str, Tensor]]] = []
    for each in (shard, with_graphs):
        torch.manual_seed(1)
        torch._dynamo.reset()
        with cpu_graphs():
            model = each(Scaled(), **options)
            torch.manual_seed(2 + dist.get_rank())
            values = train(model, [torch.randn(4, WIDTH) for _ in range(24)])
        seen.append((values, parameters_of(model)))
    equal(seen[1], seen[0], train.__name__)
    return model


def runs(view: GraphView) -> dict[str, int]:
    assert view.cuda_graphs is not None
    return dict(view.cuda_graphs.runs)


def step(model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= 0.1 * p.grad
    model.zero_grad()


@FACTS.long
def models_train_and_are_evaluated_in_turns() -> None:
    same_outcome("cnn_batchnorm", STEPS)


@FACTS.long
def every_way_to_reshard() -> None:
    steps = [Step()] * 5
    same_outcome("mlp", steps, reshard_after_forward=True, passes=default_pipeline(prefetch=3))
    same_outcome("mlp", steps, reshard_after_forward=False)


@FACTS.long
def sizes_that_change_have_graphs_of_their_own() -> None:
    same_outcome("mlp", [*[Step()] * 4, *OTHER_ROWS])


@FACTS
def regions_with_dropout_are_left_out_and_the_others_are_replayed() -> None:
    same_outcome("mlp_dropout", STEPS[:8], auto_wrap_policy={nn.Linear})


@FACTS
def a_step_is_replayed_from_the_fourth_on() -> None:
    def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        losses = []
        for batch in batches[:6]:
            loss = model(batch).square().mean()
            step(model, loss)
            losses.append(loss)  # held, with its history
        return losses

    report = graph_fsdp.inspect(both(train))
    expected = {"warming up": 2, "captured": 1, "replayed": 3}
    assert runs(report.forward) == runs(report.backward) == expected


@FACTS.long
def regions_that_inductor_compiled() -> None:
    def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        losses = []
        for batch in batches[:6]:
            loss = F.dropout(model(batch)).square().mean()
            step(model, loss)
            losses.append(loss.detach())
        return losses

    report = graph_fsdp.inspect(both(train, ours, backend="inductor"))
    assert runs(report.forward)["replayed"] == runs(report.backward)["replayed"] == 3


@FACTS
def what_the_user_holds_is_not_written_again() -> None:
    def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        held = []
        for batch in batches[:8]:
            batch.requires_grad_()
            out = model(batch)
            step(model, out.square().mean())
            held += [out.detach(), batch.grad]
        with torch.no_grad():
            held += [model(batch) for batch in batches[8:14]]
        with torch.inference_mode():
            held += [model(batch) for batch in batches[14:20]]
        return held

    report = graph_fsdp.inspect(both(train))
    assert runs(report.inference)["replayed"] > 0


@FACTS
def two_forwards_before_their_backwards() -> None:
    def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        losses = []
        for index in range(0, 20, 2):
            first, second = (model(batch).square().mean() for batch in batches[index : index + 2])
            if index % 4:
                first.backward()
                step(model, second)
            else:
                step(model, first + second)  # autograd runs the second's backward first
            losses += [first.detach(), second.detach()]
        return losses

    report = graph_fsdp.inspect(both(train, ours))  # FSDP2 adds what two backwards give before it reduces
    assert runs(report.forward) == {
        "warming up": 2,
        "captured": 1,
        "with saved tensors of another run alive": 9,
        "replayed": 8,
    }
    assert runs(report.backward)["replayed"] == 8
    report = graph_fsdp.inspect(both(train, ours, reshard_after_forward=False))
    assert runs(report.backward)["replayed"] == 8


@FACTS
def gradients_that_are_accumulated_and_not_reduced() -> None:
    def train(model: Any, batches: list[Tensor]) -> list[Tensor]:
        losses = []
        for index, batch in enumerate(batches):
            last = index % 3 == 2
            model.set_requires_gradient_sync(last)
            loss = model(batch).square().mean()
            losses.append(loss.detach())
            step(model, loss) if last else loss.backward()
        return losses

    def summed(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        losses = []
        for index, batch in enumerate(batches):
            loss = model(batch).square().mean()
            losses.append(loss.detach())
            step(model, loss) if index % 3 == 2 else loss.backward()
        return losses

    model = both(train)
    views = [captured.views["backward"] for captured in graph_fsdp.inspect(model).graphs]
    assert len(views) == 2 and all(runs(view)["replayed"] > 2 for view in views)
    both(summed)


@FACTS.long
def a_backward_that_runs_twice() -> None:
    def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        losses = []
        for batch in batches[:8]:
            loss = model(batch).square().mean()
            loss.backward(retain_graph=True)
            step(model, loss)
            losses.append(loss.detach())
        return losses

    both(train)


@FACTS
def a_buffer_that_is_replaced_is_captured_anew() -> None:
    def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        losses = []
        for index, batch in enumerate(batches[:14]):
            if index == 5:
                model.scale = torch.full((WIDTH,), 0.5)
            loss = model(batch).square().mean()
            step(model, loss)
            losses.append(loss.detach())
        return losses

    report = graph_fsdp.inspect(both(train))
    assert runs(report.forward) == {"warming up": 2, "captured": 2, "replayed": 8, "with inputs that lie elsewhere": 2}
    assert runs(report.backward)["captured"] == 2


@FACTS.long
def outputs_outlive_their_model() -> None:
    with cpu_graphs():
        model = graph_fsdp.compile(MLP(), backend="eager", cuda_graphs=True)
        batch = torch.ones(4, WIDTH)
        for _ in range(4):
            out = model(batch)
            expected = out.detach().clone()
            torch.autograd.backward(out.sum())
        out = model(batch)
        assert runs(graph_fsdp.inspect(model).forward)["replayed"] == 2
        parameters = list(model.parameters())
        before = [p.grad.to_local().clone() for p in parameters]  # type: ignore[union-attr]
        del model
        out.sum().backward()
        equal(out.detach(), expected, "output")
        for p, grad in zip(parameters, before, strict=True):
            equal(p.grad.to_local(), grad * 5 / 4, "gradient")  # type: ignore[union-attr]


@FACTS.long
def a_run_within_a_run_has_memory_of_its_own() -> None:
    def train(model: Any, batches: list[Tensor]) -> list[Tensor]:
        seen: list[Tensor] = []

        def call_the_model(_: Tensor) -> None:
            with torch.no_grad():
                seen.append(model(batches[0]))

        model.up.set_all_reduce_hook(call_the_model)
        for batch in batches[:6]:
            step(model, model(batch).square().mean())
        return seen

    report = graph_fsdp.inspect(both(train, ours, reshard_after_forward=True))
    assert set(runs(report.inference)) == {"within another run"}
    assert runs(report.backward)["replayed"] == 3


test_on_two_ranks = FACTS.on(2)  # many, and one compiles with Inductor
