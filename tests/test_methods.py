"""What FSDP2's methods change in the graphs of a compiled model, on 8 ranks. (Numbers: test_unshard_ranks.py.)"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import GPT, MLP
from printed import calls, events, stage_text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report.report import engine_of

pytestmark = pytest.mark.usefixtures("fake_group")


def compiled(depth: int = 3, **options: Any) -> Any:
    return graph_fsdp.compile(MLP(depth=depth), backend="eager", **options)


def step(model: Any) -> None:
    model(torch.randn(4, 16)).sum().backward()


def events_after(change: Callable[[Any], None], **options: Any) -> str:
    model = compiled(**options)
    change(model)
    step(model)
    return events(graph_fsdp.inspect(model))


def units(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def test_units_are_fsdp_modules_and_what_they_were() -> None:
    model = compiled()
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert names == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert type(model.blocks[0]).__name__ == "FSDPMLPBlock"
    assert isinstance(model.blocks[0], type(MLP().blocks[0]))
    assert type(model.blocks[1]) is type(model.blocks[0])
    assert not hasattr(model.blocks[0].up, "unshard")


def test_the_graphs_of_whole_parameters_gather_nothing() -> None:
    model = compiled(depth=1)
    for unit in units(model):
        unit.unshard()
    step(model)
    report = graph_fsdp.inspect(model)
    assert_expected_inline(
        f"{stage_text(report.forward)}\n\n{stage_text(report.backward)}",
        """\
takes whole_blocks_0_up_weight, whole_blocks_0_up_bias, whole_blocks_0_down_weight, whole_blocks_0_down_bias,
    whole_head_weight, whole_head_bias
    addmm(whole_blocks_0_up_bias, whole_blocks_0_up_weight), ..., addmm(whole_blocks_0_down_bias,
        whole_blocks_0_down_weight), ..., addmm(whole_head_bias, whole_head_weight)
return ..., whole_blocks_0_down_weight, whole_head_weight, ..., blocks.0.down.weight, head.weight, ...

takes whole_blocks_0_down_weight, whole_head_weight
    mm(whole_head_weight), ..., mm(whole_blocks_0_down_weight), ...
reduce_root = reduce_scatter_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum},
    head.{weight: mm, bias: sum}], float32, world_size=8)
reduced_root = reduce_wait(reduce_root)
return blocks.0.up.{weight.grad, bias.grad}, ..., blocks.0.down.{weight.grad, bias.grad}, head.{weight.grad,
    bias.grad}""",
    )


def test_a_unit_that_is_whole() -> None:
    model = compiled()
    model.blocks[1].unshard()
    step(model)
    report = graph_fsdp.inspect(model)
    assert_expected_inline(
        events(report),
        """\
forward: >blocks.0 .blocks.0 >blocks.2 xblocks.0 .blocks.2 >root xblocks.2 .root
backward: >blocks.2 xroot -root .blocks.2 >blocks.0 xblocks.2 -blocks.2 -blocks.1 .blocks.0 xblocks.0 -blocks.0""",
    )
    model(torch.randn(4, 16))
    assert len(graph_fsdp.inspect(model).graphs) == 2, "backward has resharded: other graphs"
    handle = model.blocks[1].unshard(async_op=True)
    assert repr(handle) == "<Handle of unit 'blocks.1': being gathered>"
    handle.wait()
    assert repr(handle) == "<Handle of unit 'blocks.1': whole>"
    step(model)
    assert len(graph_fsdp.inspect(model).graphs) == 2, "both kinds are there"
    assert repr(handle) == "<Handle of unit 'blocks.1': sharded>"


def test_inference_on_whole_parameters() -> None:
    model = compiled(depth=1)
    for unit in units(model):
        unit.unshard()
    with torch.no_grad():
        model(torch.randn(4, 16))
    assert_expected_inline(
        stage_text(graph_fsdp.inspect(model).inference),
        """\
takes whole_blocks_0_up_weight, whole_blocks_0_up_bias, whole_blocks_0_down_weight, whole_blocks_0_down_bias,
    whole_head_weight, whole_head_bias
    addmm(whole_blocks_0_up_bias, whole_blocks_0_up_weight), ..., addmm(whole_blocks_0_down_bias,
        whole_blocks_0_down_weight), ..., addmm(whole_head_bias, whole_head_weight)
return ...""",
    )


def test_reshard_after_forward_of_units() -> None:
    again = events_after(lambda m: m.set_reshard_after_forward(True))
    assert_expected_inline(
        again,
        """\
forward: >blocks.0 .blocks.0 >blocks.1 xblocks.0 .blocks.1 >blocks.2 xblocks.1 .blocks.2 >root xblocks.2 .root
    xroot
backward: >root .root >blocks.2 xroot -root .blocks.2 >blocks.1 xblocks.2 -blocks.2 .blocks.1 >blocks.0 xblocks.1
    -blocks.1 .blocks.0 xblocks.0 -blocks.0""",
    )
    assert events_after(lambda m: m.set_reshard_after_forward(True, recurse=False)) == again
    assert_expected_inline(
        events_after(lambda m: m.blocks[0].set_reshard_after_forward(False)),
        """\
forward: >blocks.0 .blocks.0 >blocks.1 .blocks.1 >blocks.2 xblocks.1 .blocks.2 >root xblocks.2 .root
backward: >blocks.2 xroot -root .blocks.2 >blocks.1 xblocks.2 -blocks.2 .blocks.1 xblocks.1 -blocks.1 xblocks.0
    -blocks.0""",
    )
    assert events_after(lambda m: m.set_reshard_after_forward(True), reshard_after_forward=False) == again


def test_reshard_after_forward_true_undoes_resharding_to_a_smaller_group() -> None:
    model = compiled(reshard_after_forward=2)
    model.blocks[1].set_reshard_after_forward(True)
    step(model)
    assert_expected_inline(
        calls(graph_fsdp.inspect(model).backward, "all_gather_start"),
        """\
gather_root = all_gather_start([kept_shard(root)], float32, world_size=2)
gather_blocks_2 = all_gather_start([kept_shard(blocks.2)], float32, world_size=2)
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, down.weight}], float32, world_size=8)
gather_blocks_0 = all_gather_start([kept_shard(blocks.0)], float32, world_size=2)""",
    )


def test_reshard_after_forward_false_gathers_once_for_evaluations() -> None:
    model = compiled()
    model.blocks[0].set_reshard_after_forward(False)
    with torch.no_grad():
        model(torch.randn(4, 16))
    assert_expected_inline(
        events(graph_fsdp.inspect(model), "inference"),
        """inference: >blocks.1 .blocks.1 >blocks.2 xblocks.1 .blocks.2 >root xblocks.2 .root xroot""",
    )
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    model.blocks[0].set_reshard_after_forward(True)
    assert isinstance(model.blocks[0].up.weight, DTensor)


def test_reshard_after_backward_false_keeps_units_whole_until_it_is_true() -> None:
    model = compiled()
    model.set_reshard_after_backward(False)
    for _ in range(2):
        step(model)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert events(graph_fsdp.inspect(model)) == "forward:\nbackward: -root -blocks.2 -blocks.1 -blocks.0"
    assert graph_fsdp.inspect(model).collectives["all_gather"] == 4
    model.set_reshard_after_backward(True)
    step(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_unshard_in_backward_false_keeps_nothing_for_it() -> None:
    def step_of(unshard: bool) -> str:
        model: Any = graph_fsdp.compile(
            GPT(depth=1), backend="eager", auto_wrap_policy={nn.Embedding}, reshard_after_forward=False
        )
        model.tokens.set_unshard_in_backward(unshard)
        model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
        return graph_fsdp.inspect(model).forward.stages["reshard"].summary or ""

    assert_expected_inline(step_of(True), """kept for backward: tokens, positions, root; gathered again: 0""")
    assert_expected_inline(step_of(False), """kept for backward: positions, root; gathered again: 1""")


def test_unshard_in_backward_false_is_refused_where_backward_reads_the_unit() -> None:
    model = compiled()
    model.blocks[1].set_unshard_in_backward(False)
    with pytest.raises(graph_fsdp.SettingError, match=r"unit 'blocks.1', and backward reads .* 'blocks.1"):
        step(model)
    model.blocks[1].set_unshard_in_backward(True)
    step(model)


def test_forward_prefetch_lists() -> None:
    serial = {"passes": default_pipeline(prefetch=0), "reshard_after_forward": True}
    assert_expected_inline(
        events_after(lambda m: m.blocks[0].set_modules_to_forward_prefetch([m.blocks[1], m.blocks[2]]), **serial),
        """\
forward: >blocks.0 .blocks.0 >blocks.1 >blocks.2 xblocks.0 .blocks.1 xblocks.1 .blocks.2 xblocks.2 >root .root
    xroot
backward: >root .root xroot -root >blocks.2 .blocks.2 xblocks.2 -blocks.2 >blocks.1 .blocks.1 xblocks.1 -blocks.1
    >blocks.0 .blocks.0 xblocks.0 -blocks.0""",
    )
    nothing = events_after(lambda m: None, **serial)

    def set_and_unset(m: Any) -> None:
        m.blocks[0].set_modules_to_forward_prefetch([m.blocks[1], m.blocks[2]])
        m.blocks[0].set_modules_to_forward_prefetch([])

    assert events_after(set_and_unset, **serial) == nothing


def test_backward_prefetch_lists() -> None:
    serial = {"passes": default_pipeline(prefetch=0), "reshard_after_forward": True}
    assert_expected_inline(
        events_after(lambda m: m.set_modules_to_backward_prefetch([m.blocks[2], m.blocks[0]]), **serial),
        """\
forward: >blocks.0 .blocks.0 xblocks.0 >blocks.1 .blocks.1 xblocks.1 >blocks.2 .blocks.2 xblocks.2 >root .root
    xroot
backward: >root .root >blocks.2 >blocks.1 >blocks.0 xroot -root .blocks.2 xblocks.2 -blocks.2 .blocks.1 xblocks.1
    -blocks.1 .blocks.0 xblocks.0 -blocks.0""",
    )
    kept = {"passes": default_pipeline(prefetch=BackwardPrefetch.BACKWARD_POST)}
    assert_expected_inline(
        events_after(lambda m: m.set_modules_to_backward_prefetch([m.blocks[2], m.blocks[1]]), **kept),
        """\
forward: >blocks.0 .blocks.0 >blocks.1 xblocks.0 .blocks.1 >blocks.2 xblocks.1 .blocks.2 >root xblocks.2 .root
backward: >blocks.2 >blocks.1 xroot -root .blocks.2 xblocks.2 -blocks.2 .blocks.1 xblocks.1 -blocks.1 >blocks.0
    .blocks.0 xblocks.0 -blocks.0""",
    )


def test_a_prefetch_list_against_the_order_is_refused() -> None:
    model = compiled()
    model.blocks[1].set_modules_to_forward_prefetch([model.blocks[0]])
    with pytest.raises(graph_fsdp.SettingError, match=r"of unit 'blocks.1' names 'blocks.0', which the forward graph"):
        step(model)


class Encoder(MLP):
    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)

    def loop(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self(x).sum()
            torch._dynamo.graph_break()
        return x


def test_a_registered_method_has_graphs_of_its_own() -> None:
    model: Any = graph_fsdp.compile(Encoder(), backend="eager")
    step(model)
    register_fsdp_forward_method(model, "encode")
    model.encode(torch.randn(4, 16)).sum().backward()
    assert_expected_inline(
        events(graph_fsdp.inspect(model)),
        """\
forward: >blocks.0 .blocks.0
backward: xblocks.0 -blocks.0""",
    )


def test_a_forward_that_was_exchanged_runs_as_it_is_or_compiled_where_it_is_registered() -> None:
    model: Any = graph_fsdp.compile(Encoder(), backend="eager")
    x = torch.randn(4, 16)
    expected, own = model(x), model.forward
    model.forward = lambda x: own(x) * 2
    torch.testing.assert_close(model(x), expected * 2)
    model.forward = lambda x: model.head.weight @ x.T
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        model(x)
    model.forward = lambda x: model.head(x)
    register_fsdp_forward_method(model, "forward")
    model(x).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["head.weight", "head.bias"]


def test_forwards_that_were_exchanged_are_compiled_where_graphs_may_break() -> None:
    model: Any = graph_fsdp.compile(Encoder(), backend="eager", fullgraph=False)
    x = torch.randn(4, 16)
    expected, own = model(x), model.forward
    model.forward = lambda x: own(x) * 2
    twice = model.forward
    model.forward = lambda first, /: twice(first) * 2
    torch.testing.assert_close(model(x), expected * 4)
    assert list(inspect.signature(model.forward).parameters) == ["first"]
    model.forward = lambda x: model.head(model.encode(x))
    model(x).sum().backward()
    names = [name for name, p in model.named_parameters() if p.grad is not None]
    assert {name.rpartition(".")[0] for name in names} == {"blocks.0.up", "blocks.0.down", "head"}
    del model.forward
    torch.testing.assert_close(model(x), expected)


def test_a_registered_method_that_cannot_be_traced_says_what_to_do() -> None:
    model: Any = graph_fsdp.compile(Encoder(), backend="eager")
    register_fsdp_forward_method(model, "loop")
    with pytest.raises(graph_fsdp.GraphBreakError, match=r"as loop\(\) may, need not be registered"):
        model.loop(torch.randn(4, 16))


@pytest.mark.parametrize("regions", ["cut", pytest.param("whole", marks=pytest.mark.long)])
def test_inductor_computes_with_what_is_written_to_whole_parameters(regions: str) -> None:
    model, plain = MLP(depth=1), MLP(depth=1)
    graph_fsdp.compile(model, regions=regions)  # type: ignore[arg-type]
    x, y = (torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    with graph_fsdp.unsharded(model):
        model.load_state_dict(plain.state_dict())
        found, expected = model(x), plain(y)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        found.square().mean().backward()
        expected.square().mean().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-7)
        with torch.inference_mode():
            torch.testing.assert_close(model(x), plain(y), rtol=1e-5, atol=1e-6)
    assert torch.equal(model.head.weight.to_local(), plain.head.weight[:1])  # type: ignore[attr-defined]


def test_unsharded_without_recurse_is_of_the_modules_own_unit() -> None:
    model = compiled()
    with graph_fsdp.unsharded(model, recurse=False):
        assert [name for name, p in model.named_parameters() if not isinstance(p, DTensor)] == [
            "head.weight",
            "head.bias",
        ]
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_an_optimizer_of_whole_parameters_is_told_that_it_changes_nothing() -> None:
    model = compiled()
    model.unshard()
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.randn(4, 16)).sum().backward()
    with pytest.warns(UserWarning, match="SGD was made of a model that was unsharded and holds 2 whole parameters"):
        optimizer.step()
    model.reshard()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(model.parameters()).step()
        optimizer.step()  # told once


def test_a_forward_may_call_its_own_model() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            y = super().forward(x)
            return self(y, again=False) if again else y

    model: Any = graph_fsdp.compile(Twice(16, 16), backend="eager")
    step(model)
    assert events(graph_fsdp.inspect(model), "forward") == "forward: >root .root"


def test_wrong_arguments() -> None:
    model = compiled()
    other = compiled()
    with pytest.raises(ValueError, match="reshard_after_forward must be True or False, got 2"):
        model.set_reshard_after_forward(2)
    with pytest.raises(ValueError, match="modules holds Linear, which is no unit of this model"):
        model.set_modules_to_forward_prefetch([model.head])
    with pytest.raises(ValueError, match="modules holds FSDPMLPBlock, which is no unit"):
        model.set_modules_to_backward_prefetch([other.blocks[0]])
    with pytest.raises(TypeError, match="modules must be a list"):
        model.set_modules_to_backward_prefetch(model.blocks[0])
    with pytest.raises(RuntimeError, match=r"was called on the unit 'blocks\.0'"):
        model.blocks[0].reset_iter_state()
    with pytest.raises(TypeError, match="Linear is no unit of a model compiled by graph_fsdp and holds none"):
        graph_fsdp.unsharded(nn.Linear(2, 2)).__enter__()
    assert engine_of(model).settings == engine_of(other).settings


def test_a_mesh_that_only_replicates_gathers_nothing() -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("replicate",))
    model = compiled(mesh=mesh)
    with pytest.raises(graph_fsdp.UnsupportedError, match="every rank holds all parameters whole"):
        model.set_reshard_after_forward(True)
    model.unshard()
    assert type(model.head.weight) is nn.Parameter
    model.reshard()
    assert isinstance(model.head.weight, DTensor)
    step(model)
