"""Functions of torch that Dynamo does not trace are in the one graph of a model, with the numbers of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from reexecution import cpu_graphs
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint_sequential

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.engine import stand_ins
from graph_fsdp.passes.ir.ctc import ctc_loss, ctc_loss_backward

CLASSES, LENGTH, BATCH = 7, 6, 3


class Layers(nn.Module):
    def __init__(self, forward: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self._forward = forward

    def forward(self, *given: Any) -> Any:
        return self._forward(self.layers, *given)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def check_step(plain: nn.Module, *given: Any, **options: Any) -> nn.Module:
    """Compare one step of both, bit for bit where nothing else is said; return the compiled model."""
    close = options.pop("close", {"rtol": 0, "atol": 0})
    model = graph_fsdp.compile(copy.deepcopy(plain), **{"backend": "eager", **options})
    found, expected = model(*given), plain(*given)
    torch.testing.assert_close(found, expected, **close)
    for outputs in (found, expected):
        outputs.square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        gradient = mine.grad.full_tensor() if isinstance(mine.grad, compat.DTensor) else mine.grad
        torch.testing.assert_close(gradient, theirs.grad, **close)
    return model


def targets(model: nn.Module, phase: str) -> list[Any]:
    graph = graph_fsdp.inspect(model).graphs[-1].views[phase].graph
    assert graph is not None
    return [node.target for node in graph.fx_graph.nodes]


# --- batch norm


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"backend": "inductor"}], ids=str)
def test_running_means_of_all_batches(options: dict[str, Any]) -> None:
    """Each updates them by one divided by the number of batches, which a buffer counts."""
    dtype = options.pop("dtype", torch.float32)
    plain = nn.Sequential(nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8, momentum=None), nn.Conv1d(8, 2, 1)).to(dtype)
    model = graph_fsdp.compile(copy.deepcopy(plain), **{"backend": "eager", **options})
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.01, "atol": 0.01}
    for step in range(3):
        outputs = [m(rows(4, 4, 3).to(dtype) + step) for m in (model, plain)]
        for output in outputs:
            output.square().sum().backward()
        torch.testing.assert_close(*outputs, **close)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), **close)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4 if dtype is torch.float32 else 0.05, atol=0.01)
    assert len(graph_fsdp.inspect(model).captures) == 1


@pytest.mark.parametrize("training", [True, False])
def test_a_momentum_of_the_data_in_a_forward_of_ones_own(training: bool) -> None:
    class Norm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            momentum = 1 / float(x.abs().max() + 2)
            return F.batch_norm(x, self.running_mean, self.running_var, training=training, momentum=momentum)

    plain = nn.Sequential(nn.Linear(8, 8), Norm(8))
    model = check_step(plain, rows(4, 8), close={"rtol": 1e-5, "atol": 1e-6})
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_update_bn_is_traced_once() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    for m in (model, plain):
        swa_utils.update_bn([rows(4, 8) + step for step in range(3)], m)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert len(graph_fsdp.inspect(model).captures) == 1


# --- checkpoint_sequential


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList, list])
def test_checkpoint_sequential_is_traced_in_segments(kind: Callable[..., Any], use_reentrant: bool) -> None:
    def run(layers: nn.Sequential, x: Tensor) -> Tensor:
        functions = layers if kind is nn.Sequential else kind(layers)
        return checkpoint_sequential(functions, 2, x, use_reentrant=use_reentrant)

    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    model = check_step(Layers(run, *layers), rows(4, 8).requires_grad_())
    tanh = torch.ops.aten.tanh.default
    assert targets(model, "forward").count(tanh) == 3
    assert targets(model, "backward").count(tanh) == 1, "of the first segment"


# --- masks


def causal(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


def test_masks_are_applied_without_a_look_at_their_values() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    close = {"rtol": 1e-5, "atol": 1e-5}  # torch's kernel for causal masks is another
    for mask in (causal(5), torch.ones(5, 5).tril(1).log()):
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        model = check_step(Layers(lambda m, x, mask: m[0](x, mask), encoder), rows(3, 5, 16), mask, close=close)
        assert torch.ops.aten.all.default not in targets(model, "forward")
    whole = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    run = Layers(lambda m, x, y: m[0](x, y, tgt_mask=causal(4)), whole)
    check_step(run, rows(3, 5, 16), rows(3, 4, 16), close=close)


def test_other_models_are_traced_as_ever() -> None:
    check_step(Layers(lambda m, x: m(x), nn.Linear(8, 8)), rows(4, 8))  # what stands for functions is there
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1, enable_nested_tensor=False)
    for function in (
        lambda x: encoder(x, causal(5)),
        lambda x: checkpoint_sequential(nn.Sequential(nn.Tanh(), nn.Tanh()), 2, x, use_reentrant=False),
    ):
        traced = torch.compile(function, backend="eager", fullgraph=True)
        with pytest.raises((compat.Unsupported, compat.UserError)):
            traced(rows(3, 5, 16))


# --- nested_compile_region


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "unit"}, {"fullgraph": False}])
def test_regions_to_compile_once_are_layers_as_others(options: dict[str, Any]) -> None:
    model = check_step(nn.Sequential(Region(), Region(), Region()), rows(4, 8), **options)
    assert targets(model, "forward").count(torch.ops.aten.tanh.default) == 3, "no graph of its own has them"


class Unmarked(Region):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


@pytest.mark.usefixtures("fake_group")
def test_graphs_of_regions_are_those_of_layers_that_are_not_marked() -> None:
    printed = []
    for kind in (Region, Unmarked):
        model = graph_fsdp.compile(nn.Sequential(kind(), kind(), kind()), backend="eager", auto_wrap_policy={kind})
        model(rows(4, 8)).sum().backward()
        report = graph_fsdp.inspect(model)
        printed.append([str(view.graph.fx_graph) for view in (report.forward, report.backward) if view.graph])
    assert printed[0] == printed[1] and "gather_2" in printed[0][0], "each layer by its own name"


def test_regions_of_other_models_are_compiled_once_as_ever() -> None:
    check_step(nn.Sequential(Region()), rows(4, 8))  # what stands for them is there
    found: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return lambda *_: (rows(4, 8),)

    torch.compile(nn.Sequential(Region(), Region(), Region()), backend=backend, fullgraph=True)(rows(4, 8))
    assert torch.ops.higher_order.invoke_subgraph in found


# --- ctc_loss


def losses(**options: Any) -> nn.Module:
    def run(layers: nn.Module, x: Tensor, *given: Any) -> Tensor:
        return F.ctc_loss(layers(x).log_softmax(-1), *given, **options)

    torch.manual_seed(0)
    return Layers(run, nn.Linear(4, CLASSES))


GOALS = torch.tensor([[1, 2, 3], [3, 3, 1], [5, 4, 4]])
TENSORS = torch.tensor([6, 5, 1]), torch.tensor([3, 2, 3])
NUMBERS = (6, 5, 6), (3, 1, 2)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("lengths", [TENSORS, NUMBERS], ids=["tensors", "numbers"])
def test_ctc_loss_has_eager_bits(reduction: str, lengths: tuple[Any, Any]) -> None:
    plain = losses(reduction=reduction, zero_infinity=True, blank=6)
    model = check_step(plain, rows(LENGTH, BATCH, 4), GOALS, *lengths)
    assert targets(model, "forward").count(ctc_loss) == 1
    assert targets(model, "backward").count(ctc_loss_backward) == 1


def test_ctc_loss_of_one_sequence_and_of_targets_behind_each_other() -> None:
    check_step(losses(), rows(LENGTH, 4), GOALS[0], torch.tensor(6), torch.tensor(3))
    check_step(losses(), rows(LENGTH, BATCH, 4), GOALS.flatten()[:7], torch.tensor([6, 6, 6]), torch.tensor([3, 2, 2]))


def test_ctc_loss_under_autocast_and_without_gradients() -> None:
    plain = losses()
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    given = rows(LENGTH, BATCH, 4), GOALS, *NUMBERS
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(*given), plain(*given))
    with torch.no_grad():
        assert torch.equal(model(*given), plain(*given))


def test_ctc_loss_is_in_no_cuda_graph(fake_group: None) -> None:
    with cpu_graphs():
        model = graph_fsdp.compile(
            Layers(
                lambda m, x: F.ctc_loss(m[1](m[0](x)).log_softmax(-1), GOALS, *TENSORS),
                nn.Linear(4, 4),
                nn.Linear(4, CLASSES),
            ),
            backend="eager",
            auto_wrap_policy={nn.Linear},
            reshard_after_forward=True,
            cuda_graphs=True,
        )
        model(rows(LENGTH, BATCH, 4))
        said = str(graph_fsdp.inspect(model).forward.cuda_graphs)
    assert "CUDA graphs: 1 of 2 regions" in said and "an operator that no CUDA graph may have (ctc_loss" in said, said


@pytest.mark.long
def test_ctc_loss_through_inductor() -> None:
    close = {"rtol": 1e-5, "atol": 1e-5}
    check_step(losses(), rows(LENGTH, BATCH, 4), GOALS, *NUMBERS, backend="inductor", close=close)


# --- what torch is asked for by its own settings


@pytest.mark.parametrize("settings", [inductor_config.patch(freezing=True), dynamo_config.patch(prepare_freezing=True)])
def test_parameters_as_constants_are_refused(settings: Any) -> None:
    model = graph_fsdp.compile(nn.Sequential(nn.Linear(8, 8)), backend="eager")
    expected = model(rows(4, 8))
    refused = pytest.raises(graph_fsdp.UnsupportedError, match=r"'0.weight' would be a constant of the graph")
    with settings, torch.no_grad(), refused:
        model(rows(4, 8))
    with torch.no_grad():
        assert torch.equal(model(rows(4, 8)), expected)


SETTINGS = {"pre_grad_custom_pass": lambda graph: None, "pre_grad_fusion_options": {"batch_linear": {}}}


@pytest.mark.parametrize("name", SETTINGS)
def test_passes_of_inductor_that_would_not_run_are_refused(name: str) -> None:
    model = graph_fsdp.compile(nn.Sequential(nn.Linear(8, 8)))
    refused = pytest.raises(graph_fsdp.UnsupportedError, match=rf"_inductor.config.{name} .* of the phase 'capture'")
    with inductor_config.patch({name: SETTINGS[name]}), refused:
        model(rows(4, 8))
    assert model(rows(4, 8)).shape == (4, 8)


def test_torch_does_not_keep_compiled_code_itself() -> None:
    with dynamo_config.patch(caching_precompile=True):
        check_step(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), rows(LENGTH, 4))


# --- functions of torch that look for classes of tensors


class Padded(nn.Module):
    """This layer calls Python functions of torch with its parameters, which Dynamo traces into."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(CLASSES, CLASSES), nn.RMSNorm(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight = F.threshold(F.pad(self.up.weight, (1, 0)), -1.0, 0.0)
        return F.linear(F.pad(self.norm(x), (1, 0), value=1.0), weight=weight)


@pytest.mark.filterwarnings("error:code outside of graphs reads parameter")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_functions_that_look_for_classes_of_tensors_take_parameters_into_the_graph(fullgraph: bool) -> None:
    model = check_step(nn.Sequential(Padded(), Padded()), rows(BATCH, CLASSES).requires_grad_(), fullgraph=fullgraph)
    assert len(graph_fsdp.inspect(model).graphs) == 1


def test_classes_of_tensors_of_users_are_asked_as_ever() -> None:
    class Marked(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return "asked" if func is F.pad else super().__torch_function__(func, types, args, kwargs or {})

    given = rows(BATCH, CLASSES).as_subclass(Marked)
    check_step(nn.Sequential(Padded()), rows(BATCH, CLASSES), fullgraph=False)
    assert stand_ins.of_plain_tensors(F.pad, (given,), given, (1, 0)) == "asked"


class AsksForTheClass(nn.Module):
    """This layer asks where a parameter's class is from, as PEFT's DoRA does, and adds a number for the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        kind = type(self.layer.weight)
        return self.layer(x) + kind.__module__.startswith("torch.nn.") + 2 * kind.__qualname__.endswith("Parameter")


def test_methods_of_the_names_of_classes_are_traced() -> None:
    model = check_step(nn.Sequential(AsksForTheClass(), AsksForTheClass()), rows(BATCH, CLASSES).requires_grad_())
    assert len(graph_fsdp.inspect(model).graphs) == 1
