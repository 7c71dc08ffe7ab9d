"""Mixed precision, also by module: what is gathered, reduced and cast in the graphs, and the numbers of FSDP2."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from launch import run_ranks
from marks import mostly_long
from models import MLP, WIDTH, MLPBlock
from reference import gradients_of, parameters_of
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.planning import trace
from graph_fsdp.units import find_units

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x * self.scale.to(x.dtype)
        return x + weight * self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Its blocks are given a tensor of ``weight_dtype``, which the model makes itself; what they give it is taken in
    ``head_dtype``."""

    weight_dtype = FP32
    head_dtype: torch.dtype | None = None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.weight.exact = self.norm.bias.exact = True  # type: ignore[attr-defined]
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.full((x.shape[0], 1), 0.3, dtype=self.weight_dtype, device=x.device)
        for block in self.blocks:
            x = block(x, weight)
        return self.head(self.norm(x if self.head_dtype is None else x.to(self.head_dtype)))


def norms_in_float32_and_linears_that_cast(module: nn.Module) -> MixedPrecisionPolicy | None:
    if isinstance(module, nn.LayerNorm):
        return MixedPrecisionPolicy(param_dtype=FP32)
    return POLICY if isinstance(module, (Model, nn.Linear)) else None


def head_is_reduced_in_float32(module: nn.Module) -> MixedPrecisionPolicy | None:
    if isinstance(module, nn.Linear) and module.out_features == 6:
        return MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)
    return MixedPrecisionPolicy(param_dtype=BF16) if isinstance(module, Model) else None


BY_CLASS = {Model: POLICY, nn.LayerNorm: MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16)}
# name → (our mp_policy, FSDP2's policy of a unit)
SETTINGS: dict[str, tuple[Any, MixedPrecisionPolicy]] = {
    "bfloat16": (POLICY, POLICY),
    "float16": (MixedPrecisionPolicy(param_dtype=FP16), MixedPrecisionPolicy(param_dtype=FP16)),
    "float16, reduced in float32": 2 * (MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32),),
    "reduce_dtype alone": 2 * (MixedPrecisionPolicy(reduce_dtype=BF16),),
    "output_dtype of every unit": 2 * (MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16),),
    "output_dtype of the model alone": (
        {Model: MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)},
        POLICY,
    ),
    "inputs are not cast": 2 * (MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False),),
    "norms in float32, by class": (BY_CLASS, POLICY),
    "norms in float32, by function": (norms_in_float32_and_linears_that_cast, POLICY),
    "a reduction by function": (head_is_reduced_in_float32, MixedPrecisionPolicy(param_dtype=BF16)),
}
# From torch 2.15.
OVERRIDES = "param_dtype_override_fn" in {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}


def policy_with_override(override: Callable[[nn.Parameter], Any]) -> MixedPrecisionPolicy:
    if OVERRIDES:
        return MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=override)  # type: ignore[call-arg]
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    object.__setattr__(policy, "param_dtype_override_fn", override)
    return policy


def exact_in_float32(p: nn.Parameter) -> torch.dtype | None:
    return FP32 if getattr(p, "exact", False) else None


if OVERRIDES:
    SETTINGS["some parameters in float32"] = 2 * (policy_with_override(exact_in_float32),)


# The graphs


def graphs(mp_policy: Any) -> Any:
    return trace(Model, (torch.ones(4, WIDTH),), world_size=8, backend="eager", mp_policy=mp_policy).report


def lines_with(code: str, *words: str) -> str:
    return "\n".join(line.strip() for line in code.splitlines() if any(word in line for word in words))


def test_norms_in_float32_are_buckets_of_their_own_and_cast_in_the_graph() -> None:
    report = graphs(BY_CLASS)
    gathers = lines_with(report.forward.stages["free"].body, "all_gather_start")
    assert_expected_inline(
        re.sub(r"\(\[.*?\], \[.*?\]", "(...", gathers),
        """\
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default(..., 32, torch.float32, 8, '0')
gather_blocks_0_1 = torch.ops.graph_fsdp.all_gather_start.default(..., 160, torch.bfloat16, 8, '0')
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default(..., 32, torch.float32, 8, '0')
gather_blocks_1_1 = torch.ops.graph_fsdp.all_gather_start.default(..., 160, torch.bfloat16, 8, '0')
gather_root = torch.ops.graph_fsdp.all_gather_start.default(..., 32, torch.float32, 8, '0')
gather_root_1 = torch.ops.graph_fsdp.all_gather_start.default(..., 32, torch.bfloat16, 8, '0')""",
    )
    reductions = lines_with(report.backward.stages["free"].body, "reduce_scatter_start")
    assert_expected_inline(
        re.sub(r"\(\[.*?\]", "(...", reductions),
        """\
reduce_root_1 = torch.ops.graph_fsdp.reduce_scatter_start.default(..., torch.float32, 8, '0')
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default(..., torch.float32, 8, '0')
reduce_blocks_1_1 = torch.ops.graph_fsdp.reduce_scatter_start.default(..., torch.float32, 8, '0')
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default(..., torch.float32, 8, '0')
reduce_blocks_0_1 = torch.ops.graph_fsdp.reduce_scatter_start.default(..., torch.float32, 8, '0')
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default(..., torch.float32, 8, '0')""",
    )
    casts = lines_with(report.forward.stages["free"].body, "_to_copy.default(", "native_layer_norm.default(")
    assert_expected_inline(
        casts.replace("torch.ops.aten.", ""),
        """\
_to_copy = _to_copy.default(full, dtype = torch.bfloat16)
_to_copy_1 = _to_copy.default(primals_2, dtype = torch.bfloat16)
_to_copy_2 = _to_copy.default(mul, dtype = torch.float32)
native_layer_norm = native_layer_norm.default(_to_copy_2, [16], blocks_0_norm_weight, blocks_0_norm_bias, 1e-05)
_to_copy_3 = _to_copy.default(getitem, dtype = torch.bfloat16)
_to_copy_5 = _to_copy.default(primals_9, dtype = torch.bfloat16)
_to_copy_6 = _to_copy.default(mul_2, dtype = torch.float32)
native_layer_norm_1 = native_layer_norm.default(_to_copy_6, [16], blocks_1_norm_weight, blocks_1_norm_bias, 1e-05)
_to_copy_7 = _to_copy.default(getitem_3, dtype = torch.bfloat16)
_to_copy_8 = _to_copy.default(add_1, dtype = torch.float32)
native_layer_norm_2 = native_layer_norm.default(_to_copy_8, [16], norm_weight, norm_bias, 1e-05)
_to_copy_9 = _to_copy.default(getitem_6, dtype = torch.bfloat16)""",
    )


@pytest.mark.parametrize(("in_own_dtype", "expected"), [(True, "float32"), (False, "bfloat16")])
def test_without_reduce_dtype_gradients_are_reduced_as_the_installed_fsdp2_does_it(
    in_own_dtype: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "REDUCES_IN_OWN_DTYPE", in_own_dtype)
    report = graphs(MixedPrecisionPolicy(param_dtype=BF16))
    reductions = lines_with(report.backward.stages["free"].body, "reduce_scatter_start").splitlines()
    assert reductions and all(f"torch.{expected}, 8" in line for line in reductions)


def test_param_dtype_override_fn_gives_parameters_a_dtype_of_their_own() -> None:
    report = graphs(policy_with_override(exact_in_float32))
    gathers = lines_with(report.forward.stages["free"].body, "all_gather_start")
    found = re.findall(r"^gather_([a-z]+_?[01]?).* torch\.(\w+), 8", gathers, re.MULTILINE)
    assert sorted({(name.rstrip("_1") if "root" in name else name, dtype) for name, dtype in found}) == [
        ("blocks_0", "bfloat16"),
        ("blocks_1", "bfloat16"),
        ("root", "bfloat16"),
        ("root", "float32"),
    ]


def test_a_unit_casts_what_it_is_given() -> None:
    capture = graphs(POLICY).capture.stages["insert_gathers"].body
    assert_expected_inline(
        lines_with(capture, ".to(", "full("),
        """\
weight = torch.full((4, 1), 0.3, dtype = torch.float32, device = device(type='cpu'))
to = weight.to(torch.bfloat16)
to_1 = l_self_modules_blocks_modules_0_buffers_scale_.to(torch.bfloat16)
to_2 = weight.to(torch.bfloat16)
to_3 = l_self_modules_blocks_modules_1_buffers_scale_.to(torch.bfloat16)""",
    )
    uncast = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    capture = graphs(uncast).capture.stages["insert_gathers"].body
    assert ".to(torch.bfloat16)" not in capture.replace("scale_.to", "scale"), "but for what the model itself casts"


def test_a_unit_casts_what_it_returns() -> None:
    policy = MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16)
    model = nn.Sequential(MLPBlock(), MLPBlock())
    traced = trace(lambda: model, (torch.ones(4, WIDTH),), world_size=8, backend="eager", mp_policy=policy)
    capture = traced.report.capture.stages["insert_gathers"].body
    assert_expected_inline(
        lines_with(capture, ".to(", "linear("),
        """\
linear = torch._C._nn.linear(l_args_0_, gather_param_default, gather_param_default_1)
linear_1 = torch._C._nn.linear(gelu, gather_param_default_2, gather_param_default_3)
hook_result = add.to(torch.bfloat16)
to_1 = hook_result.to(torch.float32)
linear_2 = torch._C._nn.linear(to_1, gather_param_default_4, gather_param_default_5)
linear_3 = torch._C._nn.linear(gelu_1, gather_param_default_6, gather_param_default_7)
hook_result_1 = add_1.to(torch.bfloat16)""",
    )
    of_model = graphs({Model: policy}).capture.stages["insert_gathers"].body
    assert ".to(torch.bfloat16)" not in of_model.replace("scale_.to", "scale"), (
        "a policy of the model alone is no unit's"
    )


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.exact = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return self.exact(self.gain * self.layer(x))


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def test_scalars_are_reduced_in_the_dtype_of_their_policies() -> None:
    policies = {Scalars: MixedPrecisionPolicy(reduce_dtype=BF16), Gain: MixedPrecisionPolicy()}
    traced = trace(Scalars, (torch.ones(4, WIDTH),), world_size=8, backend="eager", mp_policy=policies)
    assert_expected_inline(
        lines_with(traced.report.backward.stages["free"].body, "all_reduce_start"),
        """\
reduce_root_scalars_in_float32 = torch.ops.graph_fsdp.all_reduce_start.default([sum_1], torch.float32, 8, '0')
reduce_root_scalars = torch.ops.graph_fsdp.all_reduce_start.default([sum_2], torch.bfloat16, 8, '0')""",
    )


# The numbers


def fsdp2(model: nn.Module, mp_policy: Any, of_unit: MixedPrecisionPolicy) -> nn.Module:
    """As a user of FSDP2 writes it: modules with a policy of their own are sharded first."""
    root = mp_policy
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        policy_of = mp_policy if callable(mp_policy) else lambda module: mp_policy.get(type(module))
        root = policy_of(model)
        for module in reversed(list(model.modules())):
            if module is not model and policy_of(module) is not None:
                fully_shard(module, mp_policy=policy_of(module))
    for unit in find_units(model):
        if unit.modules[unit.name] is not model:
            fully_shard(unit.modules[unit.name], mp_policy=of_unit)
    return fully_shard(model, mp_policy=root)


def ours(model: nn.Module, mp_policy: Any, of_unit: MixedPrecisionPolicy) -> nn.Module:
    return graph_fsdp.compile(model, backend="eager", mp_policy=mp_policy)


def train(shard: Callable[..., nn.Module], name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    cast = name != "inputs are not cast"
    model.weight_dtype = FP32 if cast else BF16
    model.head_dtype = FP32 if name == "output_dtype of every unit" else None
    model = shard(model, *SETTINGS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    outputs, gradients = [], []
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH, generator=generator)
        outputs.append(model(x if cast else x.to(BF16)))
        outputs[-1].float().square().mean().backward()
        gradients.append(gradients_of(model))
        optimizer.step()
    values = {"outputs": dict(enumerate(outputs)), "parameters": parameters_of(model)}
    values |= {f"gradients of step {index}": value for index, value in enumerate(gradients)}
    return {**values, "buffers": dict(model.named_buffers())}


def train_both(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    results = {}
    for name in names:
        torch._dynamo.reset()
        results[name] = [train(shard, name) for shard in (fsdp2, ours)]
    return results


SHORT = (
    *("reduce_dtype alone", "output_dtype of every unit", "inputs are not cast"),
    *("norms in float32, by function", "a reduction by function"),
)


@functools.cache
def on_two_ranks(short: bool) -> list[dict[str, list[dict[str, Any]]]]:
    return run_ranks(train_both, 2, [name for name in SETTINGS if (name in SHORT) == short])


@pytest.mark.parametrize("name", mostly_long(SETTINGS, SHORT))
def test_three_steps_equal_fsdp2_bit_for_bit(name: str) -> None:
    for results in on_two_ranks(name in SHORT):
        theirs, own = results[name]
        for kind, values in theirs.items():
            assert list(own[kind]) == list(values)
            different = [
                key
                for key, v in values.items()
                if own[kind][key].dtype != v.dtype or not torch.equal(own[kind][key], v)
            ]
            assert not different, f"{kind} of {different}"
        assert all(buffer.dtype is FP32 for buffer in own["buffers"].values())


# Bad input


def refuse(error: type[Exception], *words: str, model: nn.Module | None = None, mp_policy: Any) -> None:
    model = model or MLP()
    parameters = list(model.parameters())
    with pytest.raises(error) as raised:
        graph_fsdp.compile(model, backend="eager", mp_policy=mp_policy)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert type(model).__name__ in ("MLP", "Sequential")


def test_policies_that_are_none() -> None:
    refuse(TypeError, "mp_policy must be", "a dict from module classes to policies", mp_policy=POLICY.__class__)
    refuse(TypeError, "'head'", "not a module class", mp_policy={"head": POLICY})
    refuse(TypeError, "mp_policy gives torch.bfloat16 for a MLP", mp_policy=lambda module: BF16)
    refuse(ValueError, "gives no module of the model a policy", mp_policy=lambda module: None)
    refuse(ValueError, "policy for LayerNorm, and the model has no module", mp_policy={nn.LayerNorm: POLICY})


def test_overrides_that_are_none() -> None:
    refuse(TypeError, "gives 'bfloat16' for 'blocks.0.up.weight'", mp_policy=policy_with_override(lambda p: "bfloat16"))
    refuse(ValueError, "gives torch.float16", "or torch.bfloat16", mp_policy=policy_with_override(lambda p: FP16))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_gradients_in_another_dtype_than_their_parameters_are_refused() -> None:
    model = MLP()
    name, p = next(iter(model.named_parameters()))
    p.grad_dtype = BF16
    refuse(ValueError, repr(name), "grad_dtype is torch.bfloat16", "reduce_dtype", model=model, mp_policy=POLICY)


def test_fsdp1s_policy_is_told_apart() -> None:
    policy = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    refuse(TypeError, "FSDP1's class", "MixedPrecisionPolicy(param_dtype", "cast buffers", mp_policy=policy)


def test_a_parameter_of_two_modules_has_one_policy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    model[1][0].weight = model[0].weight
    policy_of = lambda module: POLICY if module is model[1] else None  # noqa: E731
    refuse(ValueError, "'0.weight'", "'1.0.weight'", "same param_dtype", model=model, mp_policy=policy_of)
