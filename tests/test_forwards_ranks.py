"""What a forward may do beside calling layers: the model computes what plain PyTorch does, each rank on its rows."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import llama
from test_calls_ranks import check_gradients, pair, rows, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import graph_fsdp
from graph_fsdp.report.report import engine_of

FACTS = Facts(__name__)


class Two(nn.Module):
    """Two layers, and a forward of one's own."""

    def __init__(self, forward: Callable[[Two, Tensor], Tensor], first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8) if first is None else first
        self.second = nn.Linear(8, 8)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def trains_as_plain(
    forward: Callable[[Two, Tensor], Tensor], first: nn.Module | None = None, x: Tensor | None = None, **options: Any
) -> None:
    torch.manual_seed(0)
    for made in (pair_ := pair(Two(forward, first), **options)):
        for seed in range(2):
            made(rows(6, 8, seed=seed) if x is None else x).square().mean().backward()
    check_gradients(*pair_)


def of_positive(x: Tensor) -> Tensor:
    return x[:, 0] > 0


@FACTS
def rows_that_the_data_chooses() -> None:
    trains_as_plain(lambda m, x: m.second(torch.relu(m.first(x))[of_positive(x)]))
    trains_as_plain(lambda m, x: m.second(m.first(x)).masked_select(x > 0), activation_checkpointing="unit")


def of_the_rows_chosen_again(m: Two, x: Tensor) -> Tensor:
    """Layers for themselves choose the same rows, of which one choice stays in the graph, as graph neural networks do
    that take self-loops out of the edges."""
    first = m.first(torch.cat([x[of_positive(x)], x.new_ones(3, 8)]))
    return first * m.second(torch.cat([x[of_positive(x)], x.new_ones(3, 8)]))


@FACTS
def rows_that_layers_choose_alike() -> None:
    trains_as_plain(of_the_rows_chosen_again)
    trains_as_plain(of_the_rows_chosen_again, activation_checkpointing="unit")


@torch.compiler.disable
def left_to_python(layer: nn.Module, x: Tensor) -> Any:
    return layer(x)


def of_jagged_rows(m: Two, x: Tensor) -> Tensor:
    lengths = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6]))
    first, second = torch.relu(m.first(lengths)), m.second(lengths)  # a graph returns both, with their offsets
    return (left_to_python(m.second, first) + first * second).values()  # type: ignore[no-any-return]


@FACTS
def nested_tensors_in_code_outside_of_graphs() -> None:
    """They come before parameters where torch asks for ``__torch_function__``."""
    trains_as_plain(of_jagged_rows, fullgraph=False)


def mean_over_the_rows_of_all_ranks(m: Two, x: Tensor) -> Tensor:
    count = torch.tensor(len(x))
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    dist.all_reduce(count)
    positive = x[of_positive(x)][:1, 0].square()  # of as many elements as the data decides
    dist.all_reduce(positive)
    return m.second(m.first(x)).sum() / count.item() * sum(counts) / torch.stack(counts).max() * positive.sum()


@FACTS
def numbers_that_ranks_exchange_where_one_of_them_traces_alone() -> None:
    """A number that is known when the forward is traced is exchanged when it runs."""
    torch.manual_seed(0)
    model, plain = pair(Two(mean_over_the_rows_of_all_ranks), dynamic=False)
    for sizes in ((6, 6), (6, 4), (3, 4)):
        losses = [m(rows(sizes[dist.get_rank()], 8)) for m in (model, plain)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        check_gradients(model, plain)


class Counted(torch.autograd.Function):
    """Its gradient of ``bias`` depends on what came in, and on no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grads[0], x.square().sum(0)


@FACTS
def gradients_that_depend_on_none() -> None:
    trains_as_plain(lambda m, x: m.second(x) + Counted.apply(x.detach().sin(), m.first.bias))


@FACTS
def effects_of_backward() -> None:
    trains_as_plain(lambda m, x: m.second(x) * torch.view_as_real(torch.linalg.eigvals(m.first.weight)).square().sum())


@FACTS.long
def rows_that_the_data_chooses_through_inductor() -> None:
    torch.manual_seed(0)
    made = Two(lambda m, x: m.second(torch.relu(m.first(x))[of_positive(x)]))
    plain = copy.deepcopy(made)
    model = graph_fsdp.compile(made)
    for seed in range(3):  # other numbers of rows each time
        for m in (model, plain):
            m(rows(6, 8, seed=seed)).square().sum().backward()
        check_gradients(model, plain)


def residual(m: Two, x: Tensor) -> Tensor:
    """Of a differential equation, as in physics-informed networks."""
    u = m.second(torch.tanh(m.first(x)))
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return u - slope


@FACTS.marked(
    pytest.mark.skipif(
        not hasattr(torch._dynamo.config, "trace_autograd_ops"),
        reason="torch.autograd.grad is traced from torch 2.11 on",
    )
)
def derivatives_in_a_forward() -> None:
    x = rows(6, 8).requires_grad_()
    trains_as_plain(residual, x=x)
    trains_as_plain(residual, x=x, fullgraph=False)

    def penalty(m: Two, x: Tensor) -> Tensor:
        u = m.second(torch.tanh(m.first(x)))
        (of_weight,) = torch.autograd.grad(u.sum(), m.first.weight, create_graph=True)
        return u.mean() + of_weight.square().sum()

    trains_as_plain(penalty)


@FACTS
def a_backward_in_a_forward() -> None:
    def trained(m: Two, x: Tensor) -> Tensor:
        y = m.second(m.first(x))
        y.square().mean().backward()
        return y.detach()

    model, plain = pair(Two(trained), fullgraph=False)
    for m in (model, plain):
        m(rows(6, 8))
    check_gradients(model, plain)
    model, _ = pair(Two(trained))
    of_old_torch = graph_fsdp.GraphBreakError
    with pytest.raises(
        (graph_fsdp.UnsupportedError, of_old_torch), match=r"'first\.weight' a gradient|Tensor\.backward"
    ):
        model(rows(6, 8))


@FACTS
def an_lstm_of_data() -> None:
    trains_as_plain(lambda m, x: m.second(m.first(x)[0]), nn.LSTM(8, 8, 2))


@FACTS.long
def hidden_states_of_transformers_that_were_asked_for_before() -> None:
    torch.manual_seed(0)
    plain, ids = llama(), torch.arange(8)[None] + dist.get_rank()
    assert len(plain(ids, output_hidden_states=True).hidden_states) == 3  # with hooks on layers from now on
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    found, expected = (m(ids, output_hidden_states=True).hidden_states for m in (model, plain))
    torch.testing.assert_close(found, expected)
    for states in (found, expected):
        states[1].square().sum().backward()
    check_gradients(model, plain)
    late = graph_fsdp.compile(llama(), backend="eager")
    with pytest.raises(graph_fsdp.GraphBreakError, match=r"output_capturing\.py"):
        late(ids, output_hidden_states=True)


@FACTS
def two_backwards_of_what_is_computed_again() -> None:
    for made in (pair_ := pair(Two(lambda m, x: m.second(torch.tanh(m.first(x)))), activation_checkpointing="unit")):
        loss = made(rows(6, 8)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    check_gradients(*pair_)


@FACTS
def writes_to_a_parameter_are_told_and_lost_as_with_fsdp2() -> None:
    def halves(m: Two, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.first.weight.mul_(0.5)
        return m.second(m.first(x))

    def halves_data(m: Two, x: Tensor) -> Tensor:
        m.first.weight.data.mul_(0.5)
        return m.second(m.first(x))

    def assigns_data(m: Two, x: Tensor) -> Tensor:
        m.first.weight.data = m.first.weight.data * 0.5  # as MoCo's momentum encoder is written
        return m.second(m.first(x))

    for forward in (halves, halves_data, assigns_data):
        torch.manual_seed(0)
        plain = Two(forward)
        model, sharded = graph_fsdp.compile(copy.deepcopy(plain), backend="eager"), fully_shard(copy.deepcopy(plain))
        with pytest.warns(UserWarning, match=r"the forward writes to 'first.weight' in place.* lost"):
            found = model(rows(6, 8))
        torch.testing.assert_close(found, sharded(rows(6, 8)))
        found.sum().backward()
        sharded(rows(6, 8)).sum().backward()
        for p, expected in zip(model.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(whole(p), whole(expected))
    # What FSDP2 has not gathered when the root's code writes to it is the shard, which keeps what is written.
    plain = Two(halves)
    model, sharded = (copy.deepcopy(plain) for _ in range(2))
    fully_shard(sharded.first)
    fully_shard(sharded)(rows(6, 8))
    model = graph_fsdp.compile(model, backend="eager", auto_wrap_policy=[model.first])
    with pytest.warns(UserWarning, match=r"the forward writes to 'first.weight' in place.* lost"):
        model(rows(6, 8))
    torch.testing.assert_close(whole(sharded.first.weight), plain.first.weight / 2)
    torch.testing.assert_close(whole(model.first.weight), plain.first.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trains_as_plain(lambda m, x: m.second(m.first(x)), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))


class Fused(NamedTuple):
    y: Tensor
    head: OrderedDict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Given:
    of_a_layer: Fused
    nothing: Tensor | None = None

    def __getitem__(self, name: str) -> Any:
        fused = self.of_a_layer
        return [fused.y] if name == "y" else list(fused.head.values())


@FACTS
def parameters_among_outputs_are_whole_and_have_gradients() -> None:
    def outputs(m: Two, x: Tensor) -> Any:
        if m.training:
            return {"y": (m.first(x), x), "of a layer": [m.second.weight, m.second.bias]}
        return Given(Fused(m.first(x), OrderedDict(weight=m.second.weight, bias=m.second.bias)))

    for fullgraph in (True, False):
        torch.manual_seed(0)
        model, plain = pair(Two(outputs), fullgraph=fullgraph)
        for m, train in itertools.product((model, plain), (True, False)):
            found = m.train(train)(rows(6, 8))
            torch.nn.functional.linear(found["y"][0], *found["of a layer"]).square().mean().backward()
        check_gradients(model, plain)
        with torch.no_grad():
            torch.testing.assert_close(model.train()(rows(6, 8)), plain.train()(rows(6, 8)))


@FACTS
def an_output_has_no_gradient_of_another_that_was_computed_from_it() -> None:
    model, plain = pair(Two(lambda m, x: (h := m.first(x), m.second(h))))  # type: ignore[arg-type,return-value]
    for m in (model, plain):
        h, y = m(rows(6, 8))
        h.retain_grad()
        y.square().mean().backward()
        assert (h.grad is None) == (m is model)
    check_gradients(model, plain)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        h, y = model(rows(6, 8))
        torch.autograd.grad(y.sum(), h)


@FACTS
def a_parameter_that_is_the_output_of_a_unit_that_is_called_is_whole() -> None:
    model, plain = pair(nn.Sequential(Two(lambda m, x: m.second.bias), Two(lambda m, x: m.first(x))))
    torch.testing.assert_close(model[0](rows(6, 8)), plain[0].second.bias)


@FACTS
def a_sparse_gradient_is_refused() -> None:
    model, _ = pair(Two(lambda m, x: m.second(m.first(x)), nn.Embedding(8, 8, sparse=True)))
    with pytest.raises(graph_fsdp.UnsupportedError, match=r"the gradient of parameter 'first.weight' is a sparse"):
        model(torch.arange(4))


@FACTS
def a_model_made_in_inference_mode_trains() -> None:
    with torch.inference_mode():
        model, plain = pair(Two(lambda m, x: m.second(m.first(x))))
        torch.testing.assert_close(model(rows(6, 8)), plain(rows(6, 8)))
    model(rows(6, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@torch._dynamo.disable
def in_python(layer: nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight.t() + layer.bias


@FACTS
def a_forward_under_no_grad_records_its_blocks_of_enable_grad() -> None:
    def last(m: Two, x: Tensor) -> Tensor:
        h = m.first(x)
        with torch.enable_grad():
            return m.second(h)

    def both(m: Two, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return m.second(m.first(x))

    def read_by_python(m: Two, x: Tensor) -> Tensor:
        h = in_python(m.first, x)  # which has the same unit
        with torch.enable_grad():
            return in_python(m.second, h)

    for forward, fullgraph, policy in ((last, True, {nn.Linear}), (both, False, None), (read_by_python, False, None)):
        torch.manual_seed(0)
        model, plain = pair(Two(forward), fullgraph=fullgraph, auto_wrap_policy=policy)
        for mode in (torch.no_grad, torch.enable_grad, torch.no_grad, torch.inference_mode):
            for m in (model, plain):
                with mode():
                    y = m(rows(6, 8))
                assert y.requires_grad is not (mode is torch.inference_mode)
                if y.requires_grad:
                    y.square().mean().backward()
            check_gradients(model, plain)
        assert engine_of(model).counter.current == 0


test_on_two_ranks = FACTS.on(2)
