"""``regions="whole"`` on gloo ranks: the numbers of FSDP2, as those of graphs that are cut are.

Uncompiled, what is lowered gives the same bits: the same operators and collectives on the same data. With Inductor it
gives those of one process, to what other kernels' sums differ by.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functional import FunctionalBackend, register
from launch import run_ranks
from marks import mostly_long, selected
from models import CASES, GPT, MLP, Case, GPTBlock, tokens
from reference import Outcome, Step, check_close, check_outcome, train_reference, train_sharded
from test_option_numbers import CHEAP_MESSAGES
from test_train import fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp.passes import default_pipeline
from graph_fsdp.runtime.backends import BACKENDS

STEPS = [Step(), Step()]
WITH_EVALUATION = [*STEPS, Step(evaluate=True)]  # another capture, and compiling is what takes time
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16_REDUCED = MixedPrecisionPolicy(reduce_dtype=torch.float16)
IN_MESSAGES = default_pipeline(hardware=CHEAP_MESSAGES)

# model, shape of the mesh, options
Setting = tuple[str, tuple[int, ...], dict[str, Any]]
ON_TWO: dict[str, Setting] = {
    **{name: (name, (2,), {}) for name in ("gpt of one block", "cnn_batchnorm", "frozen", "uneven")},
    "gathered again, two ahead": (
        *("mlp", (2,)),
        {"passes": default_pipeline(prefetch=2, reductions_in_flight=3), "reshard_after_forward": True},
    ),
    "kept, bfloat16": ("mlp", (2,), {"mp_policy": BF16, "reshard_after_forward": False}),
    "reduced in float16": ("mlp", (2,), {"mp_policy": FP16_REDUCED}),
    "messages of their own, kept": ("mlp", (2,), {"passes": IN_MESSAGES, "reshard_after_forward": False}),
    "symbolic sizes": ("mlp", (2,), {"dynamic": True}),
}
KEPT_FP16 = {"reshard_after_forward": False, "mp_policy": FP16_REDUCED}
ON_FOUR: dict[str, Setting] = {
    "hybrid": ("mlp", (2, 2), {"reshard_after_forward": True}),
    "hybrid, uneven, kept, reduced in float16": ("uneven", (2, 2), KEPT_FP16),
    "resharded to two, messages of their own": ("mlp", (4,), {"reshard_after_forward": 2, "passes": IN_MESSAGES}),
    "resharded to two, uneven, bfloat16": ("uneven", (4,), {"reshard_after_forward": 2, "mp_policy": BF16}),
    "replicated": ("uneven", (4, 1), {}),
}
# Registered on the ranks alone: a case of models.py is one of many files.
OWN_CASES = {
    "gpt of one block": Case(lambda: GPT(depth=1, dropout=0.2, tied=True, checkpointed=True), tokens),
}
SHORT = ["uneven", "messages of their own, kept", "reduced in float16", "symbolic sizes"]

Outcomes = dict[str, list[Outcome]]


def train_both(settings: dict[str, Setting], *forms: dict[str, Any]) -> Outcomes:
    """On a rank: each setting in each form. Where only the schedule is another one, the first form is that of the first
    such setting: its numbers are the same (see test_option_numbers.py). ``FSDP2`` takes no scalars: there it is the cut
    form."""
    register()
    CASES.update(OWN_CASES)
    outcomes: Outcomes = {}
    cut: dict[str, Outcome] = {}
    for key, (name, shape, options) in settings.items():
        numbers = repr((name, shape, options.get("mp_policy")))
        outcomes[key] = []
        for form in forms:
            if form is not forms[-1] and numbers in cut:
                outcomes[key].append(cut[numbers])
                continue
            torch._dynamo.reset()
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
            steps = steps_of(name)
            if form == FSDP2 and name != "uneven":
                policy = {key: value for key, value in options.items() if key == "mp_policy"}
                outcomes[key].append(train_sharded(name, steps, "adamw", fsdp2, mesh=mesh, **policy))
                continue
            outcomes[key].append(train_sharded(name, steps, "adamw", mesh=mesh, **form, **options))
        cut[numbers] = outcomes[key][0]
    return outcomes


def steps_of(name: str) -> list[Step]:
    return WITH_EVALUATION if name == "cnn_batchnorm" else STEPS


FSDP2: dict[str, Any] = {"backend": "eager"}
UNCOMPILED = (FSDP2, {"backend": "functional", "regions": "whole"})


@pytest.fixture(scope="module")
def two_ranks() -> list[Outcomes]:
    settings = {key: ON_TWO[key] for key in selected(ON_TWO, __name__, "setting")}
    return run_ranks(train_both, 2, settings, *UNCOMPILED)


@pytest.fixture(scope="module")
def four_ranks() -> list[Outcomes]:
    settings = {key: ON_FOUR[key] for key in selected(ON_FOUR, __name__, "setting")}
    return run_ranks(train_both, 4, settings, *UNCOMPILED)


def check_equal(ranks: list[Outcomes], setting: str) -> None:
    for outcomes in ranks:
        other, whole = outcomes[setting]
        check_outcome(whole, other, bound=0.0)
        assert any(gradient is not None and gradient.any() for gradient in whole.gradients.values())


@pytest.mark.parametrize("setting", mostly_long(ON_TWO, SHORT))
def test_what_is_lowered_gives_the_same_bits(two_ranks: list[Outcomes], setting: str) -> None:
    check_equal(two_ranks, setting)


@pytest.mark.parametrize("setting", mostly_long(ON_FOUR, ["hybrid", "resharded to two, uneven, bfloat16"]))
def test_what_is_lowered_gives_the_same_bits_on_four_ranks(four_ranks: list[Outcomes], setting: str) -> None:
    check_equal(four_ranks, setting)


WHOLE = {"backend": "inductor", "regions": "whole"}


def test_a_graph_that_inductor_compiles_whole_trains_as_one_process() -> None:
    settings: dict[str, Setting] = {"uneven": ("uneven", (2,), {"reshard_after_forward": False})}
    expected = train_reference("uneven", STEPS, "adamw", world_size=2)
    for outcomes, wanted in zip(run_ranks(train_both, 2, settings, WHOLE, timeout=290), expected, strict=True):
        check_outcome(outcomes["uneven"][0], wanted, bound=1e-4)


@pytest.mark.long
def test_more_graphs_that_inductor_compiles_whole_do_so_too() -> None:
    settings: dict[str, Setting] = {
        "gpt": ("gpt_of_one_block", (2,), {"auto_wrap_policy": {GPTBlock}}),
        "BatchNorm": ("cnn_batchnorm", (2,), {}),
    }
    ranks = run_ranks(train_both, 2, settings, WHOLE)
    for setting, (name, _, _) in settings.items():
        expected = train_reference(name, steps_of(name), "adamw", world_size=2)
        for outcomes, wanted in zip(ranks, expected, strict=True):
            # Inductor fuses other kernels and so reorders float32 sums, which Adam's division amplifies: hence 1e-4.
            check_outcome(outcomes[setting][0], wanted, bound=1e-4)


@pytest.mark.long
def test_dropout_is_that_of_graphs_that_are_cut() -> None:
    """Its random numbers are Inductor's own."""
    settings: dict[str, Setting] = {"dropout": ("mlp_dropout", (2,), {"auto_wrap_policy": {nn.Linear}})}
    for outcomes in run_ranks(train_both, 2, settings, {"backend": "inductor"}, WHOLE):
        cut, whole = outcomes["dropout"]
        check_outcome(whole, cut, bound=1e-4)


@pytest.mark.long
def test_on_four_ranks_too() -> None:
    settings: dict[str, Setting] = {
        "hybrid": ("one_block", (2, 2), {"auto_wrap_policy": {nn.Linear}, "reshard_after_forward": True}),
        "resharded to two": ("one_block", (4,), {"auto_wrap_policy": {nn.Linear}, "reshard_after_forward": 2}),
    }
    (expected,) = train_reference("one_block", STEPS, "adamw", world_size=4, global_batch=True)
    for outcomes in run_ranks(train_both, 4, settings, WHOLE):
        for setting in settings:
            check_close(outcomes[setting][0].parameters, expected.parameters, 1e-4, setting)


def test_one_process_communicates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "functional", FunctionalBackend)
    model = graph_fsdp.compile(MLP(), backend="functional", regions="whole")
    model(torch.ones(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert "c10d" not in str(report.forward.program) + str(report.backward.program)
    assert report.collectives == {} and all(p.grad is not None for p in model.parameters())
