"""``copy.deepcopy`` of a compiled model: another one that trains alike, and shares nothing with it but its mesh."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import MLP, MLPBlock
from printed import events, stage_text
from test_calls_ranks import check_gradients, pair, rows, whole
from test_extensions import Float8, extended
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import graph_fsdp
from graph_fsdp.report.report import engine_of

FACTS = Facts(__name__)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)  # amid others
Setting = Callable[[Any], Any]


def report_of(model: nn.Module) -> graph_fsdp.GraphReport:
    model(torch.ones(4, 16)).sum().backward()
    return graph_fsdp.inspect(model)


def text(model: nn.Module) -> str:
    """The graphs of one training step."""
    report = report_of(model)
    return "\n".join(stage_text(view) for view in (report.forward, report.backward))


def compiled(model: nn.Module | None = None, **options: Any) -> Any:
    return graph_fsdp.compile(MLP() if model is None else model, backend="eager", **options)


@pytest.mark.usefixtures("fake_group")
class TestFakeGroup:
    def test_it_is_compiled_and_has_its_own_shards_and_graphs(self) -> None:
        model = compiled()
        expected = text(model)
        copied = copy.deepcopy(model)
        assert isinstance(copied, FSDPModule) and isinstance(copied, MLP) and type(copied).__name__ == "FSDPMLP"
        assert [type(m).__name__ for m in copied.modules()] == [type(m).__name__ for m in model.modules()]
        for (name, p), (copied_name, q) in zip(model.named_parameters(), copied.named_parameters(), strict=True):
            assert name == copied_name and isinstance(q, DTensor) and q.placements == p.placements and q.grad is None
            assert torch.equal(p.to_local(), q.to_local()) and p.to_local().data_ptr() != q.to_local().data_ptr()
        assert not graph_fsdp.inspect(copied).graphs
        assert text(copied) == expected
        assert text(copy.deepcopy(copied)) == expected, "of a copy"

    @pytest.mark.parametrize(
        "options",
        [
            {"mp_policy": BF16},
            {"mp_policy": {MLPBlock: IN_BF16}},
            {"reshard_after_forward": False},
            {"reshard_after_forward": 2},
            {"fullgraph": False},
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            {"auto_wrap_policy": {MLPBlock}},
            {"activation_checkpointing": "unit"},
        ],
        ids=str,
    )
    @pytest.mark.filterwarnings("ignore:offload_policy")
    def test_its_graphs_are_those_of_the_model(self, options: dict[str, Any]) -> None:
        model = compiled(**options)
        assert text(copy.deepcopy(model)) == text(model)

    def test_functions_that_know_the_models_parameters_are_not_asked_again(self) -> None:
        """A function that compares with them would say something else of the copy's."""
        plain = MLP()
        sharded_by_columns, ignored = plain.blocks[0].up.weight, plain.head.bias
        model = compiled(
            plain,
            auto_wrap_policy=[plain.blocks[0], (plain.blocks[1], plain.head)],
            shard_placement_fn=lambda p: Shard(1) if p is sharded_by_columns else None,
            mp_policy=lambda module: IN_BF16 if module is plain.blocks[1] else None,
            ignored_params=[ignored],
        )
        copied = copy.deepcopy(model)
        assert copied.blocks[0].up.weight.placements == (Shard(1),)
        assert not isinstance(copied.head.bias, DTensor) and copied.head.bias is not model.head.bias
        assert engine_of(copied).spec == engine_of(model).spec
        assert text(copied) == text(model)

    def test_meshes_of_parameters_and_replicas(self) -> None:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = graph_fsdp.compile(MLP(), mesh, backend="eager", meshes={nn.Linear: mesh["shard"]})
        copied = copy.deepcopy(model)
        assert [p.device_mesh for p in copied.parameters()] == [p.device_mesh for p in model.parameters()]
        assert text(copied) == text(model)

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.set_reshard_after_forward(False),
            lambda m: m.blocks[0].set_modules_to_forward_prefetch([m.blocks[1], m]),
            lambda m: m.set_requires_gradient_sync(False),
            lambda m: m.set_gradient_divide_factor(3.0),
            lambda m: m.set_all_reduce_hook(torch.Tensor.neg_),
            lambda m: m.set_separate_reduce_scatter_group(),
        ],
    )
    def test_settings_are_the_models(self, change: Setting) -> None:
        model = compiled()
        change(model)
        copied = copy.deepcopy(model)
        assert engine_of(copied).settings == engine_of(model).settings
        assert engine_of(copied).own_reduce_group == engine_of(model).own_reduce_group
        assert text(copied) == text(model)
        assert text(copied) != text(compiled()) or engine_of(copied).own_reduce_group, "whose name is not printed"
        copied.set_force_sum_reduction_for_comms(True)
        assert engine_of(model).settings != engine_of(copied).settings

    def test_hooks_buffers_and_what_else_a_module_has(self) -> None:
        class Counting(MLP):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))
                self.tags, self.group = ["a"], dist.group.WORLD

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return super().forward(x)

        model, seen = compiled(Counting()), []
        model.register_forward_hook(lambda module, *_: seen.append(module))
        model(torch.ones(4, 16))
        copied = copy.deepcopy(model).eval()
        copied(torch.ones(4, 16))
        copied.tags.append("b")
        assert seen == [model, copied]
        assert (model.calls.item(), copied.calls.item()) == (1, 2)
        assert model.training and model.tags == ["a"] and not copied.blocks[0].training
        assert copied.group is dist.group.WORLD

    def test_tied_and_frozen_parameters_and_an_lstm(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
                self.head.weight = self.embedding.weight
                self.rnn = nn.LSTM(16, 16)
                self.kept = [self.embedding.weight]

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.rnn(x @ self.embedding.weight)[0])

        model = compiled(Tied())
        model.rnn.requires_grad_(False)
        copied = copy.deepcopy(model)
        assert copied.head.weight is copied.embedding.weight is not model.head.weight
        assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]
        assert text(copied) == text(model)
        with pytest.raises(graph_fsdp.EmptyPlaceholderError, match="reference from before"):
            copied.kept[0].sum()

    @pytest.mark.parametrize("fullgraph", [True, False])
    def test_a_forward_that_was_set_on_it(self, fullgraph: bool) -> None:
        plain = MLP()
        plain.forward = functools.partial(MLP.forward, plain)  # type: ignore[method-assign]
        plain.blocks[0].forward = functools.partial(MLPBlock.forward, plain.blocks[0])
        model = compiled(plain, fullgraph=fullgraph)
        copied = copy.deepcopy(model)
        assert type(copied).forward.__wrapped__.__wrapped__.args == (copied,)
        assert text(copied) == text(model)

    @pytest.mark.parametrize("fullgraph", [True, False])
    def test_registered_methods(self, fullgraph: bool) -> None:
        class Encoder(MLP):
            def encode(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = block(x)
                return x

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.encode(x))

        model = compiled(Encoder(), fullgraph=fullgraph)
        register_fsdp_forward_method(model, "encode")
        copied = copy.deepcopy(model)
        copied.encode(torch.ones(4, 16)).sum().backward()
        assert not graph_fsdp.inspect(model).graphs
        report = graph_fsdp.inspect(copied)
        assert ">blocks.1" in events(report) and "root" not in events(report)

    def test_late_modules_are_late_in_the_copy(self) -> None:
        model = compiled()
        model.late = nn.Linear(2, 2).requires_grad_(False)
        copied = copy.deepcopy(model)
        copied(torch.ones(4, 16))
        copied.late.requires_grad_(True)
        with pytest.raises(graph_fsdp.ParameterChangedError, match=r"'late.weight'"):
            copied(torch.ones(4, 16))

    def test_units_that_are_whole_stay_whole_and_are_shards_in_the_copy(self) -> None:
        model = compiled()
        model.blocks[0].unshard()
        copied = copy.deepcopy(model)
        assert type(model.blocks[0].up.weight) is nn.Parameter and isinstance(copied.blocks[0].up.weight, DTensor)
        assert ">blocks.0" not in events(report_of(model)) and ">blocks.0" in events(report_of(copied))

    def test_an_object_around_it(self) -> None:
        class Around(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model, self.also = model, [model.blocks[0], model.head.weight]

        around = Around(compiled())
        copied: Any = copy.deepcopy(around)
        assert copied.also[0] is copied.model.blocks[0] and copied.also[1] is copied.model.head.weight
        assert text(copied.model) == text(around.model)

    @pytest.mark.usefixtures("older_objects_frozen")
    def test_either_may_go(self) -> None:
        for first in (True, False):
            pair_ = [compiled()]
            pair_.append(copy.deepcopy(pair_[0]))
            list(map(text, pair_))
            gone = weakref.ref(engine_of(pair_[not first]).storage)
            del pair_[not first]
            gc.collect()
            assert gone() is None
            text(pair_[0])

    def test_a_copy_that_fails_leaves_the_model_as_it_was(self) -> None:
        class Interrupts:
            def __deepcopy__(self, memo: Any) -> None:
                raise KeyboardInterrupt

        model = compiled()
        expected, classes, state = text(model), list(map(type, model.modules())), list(map(vars, model.modules()))
        for value, error in ((threading.Lock(), TypeError), (Interrupts(), KeyboardInterrupt)):
            model.blocks[0].held = value
            with pytest.raises(error):
                copy.deepcopy(model)
            assert list(map(type, model.modules())) == classes
            assert all(vars(m) is before for m, before in zip(model.modules(), state, strict=True))
        assert text(model) == expected and len(graph_fsdp.inspect(model).graphs) == 1
        del model.blocks[0].held
        assert text(copy.deepcopy(model)) == expected

    def test_in_inference_mode(self) -> None:
        with torch.inference_mode():
            copied = copy.deepcopy(compiled())
        assert text(copied)

    def test_what_cannot_be_copied_is_refused(self) -> None:
        model = compiled()
        with pytest.raises(graph_fsdp.UnsupportedError, match=r"given 'blocks.1', a unit .* copy the whole model"):
            copy.deepcopy(model.blocks[1])
        with pytest.raises(graph_fsdp.UnsupportedError, match=r"'blocks.0.up.weight' was copied before it"):
            copy.deepcopy([model.blocks[0].up.weight, model])
        with graph_fsdp.unsharded(model), pytest.raises(graph_fsdp.UnsupportedError, match="outside of the block"):
            copy.deepcopy(model)
        text(copy.deepcopy(model))
        model.blocks[0].up = nn.Linear(16, 32).requires_grad_(False)
        with pytest.raises(graph_fsdp.UnsupportedError, match=r"^MLP, .* modules of it were exchanged"):
            copy.deepcopy(model)

    def test_a_class_that_copies_without_the_memo_is_refused(self) -> None:
        class Forgets(nn.Linear):
            reads = True

            def __deepcopy__(self, memo: Any) -> Any:
                made = nn.Linear(self.in_features, self.out_features)
                if self.reads:
                    made.weight = copy.deepcopy(self.weight)
                return made

        plain = MLP()
        plain.head = Forgets(16, 5)
        model = compiled(plain)
        with pytest.raises(graph_fsdp.UnsupportedError, match=r"reads a parameter meanwhile.* give memo"):
            copy.deepcopy(model)
        Forgets.reads = False
        with pytest.raises(graph_fsdp.UnsupportedError, match=r"copy of Forgets has another .* give memo"):
            copy.deepcopy(model)

    def test_extensions(self) -> None:
        plain = MLP()
        plain.head.weight = nn.Parameter(Float8(plain.head.weight.detach()))
        model = compiled(plain)
        assert text(copy.deepcopy(model)) == text(model)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_forward_that_is_set_later_on_one_process(fullgraph: bool) -> None:
    def doubled(self: nn.Module, x: Tensor) -> Tensor:
        return 2 * type(self).forward(self, x)

    model, x = compiled(fullgraph=fullgraph), torch.ones(2, 16)
    before = model(x)
    model.forward = MethodType(doubled, model)
    copied = copy.deepcopy(model)
    assert type(copied.head.weight) is nn.Parameter
    with torch.no_grad():
        copied.head.bias.add_(1)
    torch.testing.assert_close((copied(x), model(x)), (2 * before + 2, 2 * before))


def steps(model: nn.Module, count: int, averages: AveragedModel | None = None, optimizer: Any = None) -> list[Tensor]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(count):
        model(rows(4, 16, seed=step)).square().mean().backward()
        for p in model.parameters():
            if not isinstance(p, DTensor) and p.grad is not None:
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        if averages is not None:
            averages.update_parameters(model)
    return [whole(p).detach().clone() for p in model.parameters()]


@FACTS
def a_copy_trains_as_the_model() -> None:
    plain, float8 = MLP, functools.partial(extended, Float8)
    for make, options in ((plain, {}), (plain, {"fullgraph": False}), (plain, {"mp_policy": BF16}), (float8, {})):
        torch.manual_seed(0)
        model = compiled(make(), **options)
        steps(model, 1)
        found, values = steps(copy.deepcopy(model), 2), [p.to_local().clone() for p in model.parameters()]
        expected = steps(model, 2)
        assert all(map(torch.equal, found, expected))
        assert not any(map(torch.equal, [p.to_local() for p in model.parameters()], values)), "it was as it was"


@FACTS
def a_copy_with_its_optimizer_goes_on_as_the_model() -> None:
    torch.manual_seed(0)
    model = compiled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(model, 1, optimizer=optimizer)
    copied, of_copy = copy.deepcopy((model, optimizer))
    assert all(map(torch.equal, steps(copied, 2, optimizer=of_copy), steps(model, 2, optimizer=optimizer)))


@FACTS
def averages_are_those_of_plain_models() -> None:
    torch.manual_seed(0)
    found, outputs = [], []
    for made in pair(MLP()):
        averages = AveragedModel(made, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        steps(made, 3, averages)
        found.append([whole(p) for p in averages.parameters()])
        outputs.append(averages(rows(4, 16)))
        outputs[-1].sum().backward()
    for p, expected in zip(*found, strict=True):
        torch.testing.assert_close(p, expected)
    torch.testing.assert_close(*outputs)


@FACTS
def a_copy_follows_casts_and_distributed_optimizers() -> None:
    model, plain = pair(MLP())
    graph_fsdp.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), in_backward=True)
    copied = copy.deepcopy(model)
    for m in (copied, plain):
        m(rows(4, 16)).sum().backward()
    check_gradients(copied, plain)  # which no optimizer has stepped
    copied.to(torch.bfloat16)
    again = copy.deepcopy(copied)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert torch.equal(again(rows(4, 16).bfloat16()), copied(rows(4, 16).bfloat16()))


@FACTS
def one_rank_may_copy_by_itself() -> None:
    # Ranks find each other's plans by the numbers of models.
    model, plain = pair(MLP())
    alone = [copy.deepcopy(model) for _ in range(2 * (dist.get_rank() == 0))]
    both, other = copy.deepcopy(model), graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    for made in (other, copy.deepcopy(both), both):
        for m in (made, plain):
            m(rows(4, 16)).sum().backward()
        check_gradients(made, plain)
    number = int(engine_of(model).schedules.index)
    assert [engine_of(m).schedules.index for m in (other, both)] == [str(number + 1), f"{number}.1"]
    assert len(alone) == 2 * (dist.get_rank() == 0)


test_on_two_ranks = FACTS.on(2)
