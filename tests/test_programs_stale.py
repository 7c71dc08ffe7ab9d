"""A start finds no program that was made with something else than now, also where Dynamo's graph does not show it."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from conftest import fake_process_group
from models import WIDTH
from programs import start
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graph_fsdp.passes.ir.portable import Names
from graph_fsdp.programs.functions import described
from graph_fsdp.programs.plain import Unknown

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group():
        yield


class Between(nn.Module):
    """Has a function of the test between two layers, of which the model's code says no more than its name."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


@contextlib.contextmanager
def with_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is None else setattr(owner, name, before)


@contextlib.contextmanager
def with_operator(namespace: str, schema: str, function: Any, key: str) -> Iterator[None]:
    with torch.library._scoped_library(namespace, "IMPL" if namespace == "aten" else "FRAGMENT") as library:
        if namespace != "aten":
            library.define(schema)
        library.impl(schema.partition("(")[0], function, key)
        yield


# What changes: given a number, a function between the layers and a context in which the model is compiled and runs


def a_method(number: float) -> Any:
    return lambda x: x.relu(), with_attribute(torch.Tensor, "relu", lambda x: x.clamp(min=0) * number)


def a_new_method(number: float) -> Any:
    return lambda x: x.times(), with_attribute(torch.Tensor, "times", lambda x: x * number)


def an_operator_of_python(number: float) -> Any:
    return lambda x: x + 1.5, with_attribute(torch.Tensor, "__add__", lambda x, other: torch.add(x, other) * number)


def a_function_by_the_name_of_torchs(number: float) -> Any:
    @functools.wraps(softmax)
    def function(x: Tensor) -> Tensor:
        return x * number

    return torch.compiler.allow_in_graph(function), contextlib.nullcontext()


def a_function_of_autograd_that_is_not_traced(number: float) -> Any:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * number

    torch._dynamo.allow_in_graph(Scaled)
    return lambda x: Scaled.apply(x), contextlib.nullcontext()


def a_composite_operator(number: float) -> Any:
    operator = with_operator(
        "graph_fsdp_stale", "scaled(Tensor x) -> Tensor", lambda x: x * number, "CompositeImplicitAutograd"
    )
    return lambda x: torch.ops.graph_fsdp_stale.scaled(x), operator


@contextlib.contextmanager
def autocast_to(number: float) -> Iterator[None]:
    def sin(x: Tensor) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.sin(x) * number

    with with_operator("aten", "sin", sin, "AutocastCPU"), torch.autocast("cpu", torch.bfloat16):
        yield


def a_rule_of_autocast(number: float) -> Any:
    return torch.sin, autocast_to(number)


@contextlib.contextmanager
def sums_in_bfloat16(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def sums_of_attention(number: float) -> Any:
    def attention(x: Tensor) -> Tensor:
        heads = x.bfloat16()[None, None]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return scaled_dot_product_attention(heads, heads, heads)[0, 0].float()

    return attention, sums_in_bfloat16(number > 1)


def checkpointed(x: Tensor, **options: Any) -> Tensor:
    return checkpoint(lambda y: torch.mm(y.sin(), y.t()).sigmoid() @ y, x, use_reentrant=False, **options)


def a_policy_of_a_checkpoint(number: float) -> Any:
    saved = aten.mm.default if number > 1 else aten.sigmoid.default

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator == saved else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    return functools.partial(checkpointed, context_fn=contexts), contextlib.nullcontext()


def a_policy_that_counts(number: float) -> Any:
    """As torchtitan's: every so many products are saved, by a function that a function returns."""
    products = {aten.mm.default, aten.addmm.default}

    def policy_with(counts: dict[str, int]) -> Any:
        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            key = f"{'recompute' if context.is_recompute else 'forward'} products"
            counts[key] += operator in products
            saved = operator in products and counts[key] % int(number) == 0
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return policy

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy_with(defaultdict(int)))

    return functools.partial(checkpointed, context_fn=contexts), contextlib.nullcontext()


def operators_that_a_checkpoint_saves(number: float) -> Any:
    saved = [aten.mm.default if number > 1 else aten.sigmoid.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    return functools.partial(checkpointed, context_fn=contexts), contextlib.nullcontext()


@contextlib.contextmanager
def joint_pass(number: float) -> Iterator[None]:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Scaled(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.find_nodes(op="call_function", target=aten.sin.default):
                with graph.inserting_after(node):
                    scaled = graph.call_function(aten.mul.Tensor, (node, number))
                scaled.meta = dict(node.meta)
                node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)

        def uuid(self) -> str:
            return str(number)

    with torch._inductor.config.patch(joint_custom_post_pass=Scaled()):
        yield


def a_pass_of_inductors(number: float) -> Any:
    return torch.sin, joint_pass(number)


@contextlib.contextmanager
def decomposition(number: float) -> Iterator[None]:
    from torch._inductor import decomposition as inductor

    target = aten.silu.default
    original = inductor.decompositions[target]

    @functools.wraps(original)
    def scaled(x: Tensor) -> Tensor:
        return original(x) * number

    def put(function: Any) -> None:
        inductor.decompositions[target] = function
        inductor.fast_random_decomps.cache_clear()

    put(scaled)
    try:
        yield
    finally:
        put(original)


def a_decomposition_by_the_name_of_torchs(number: float) -> Any:
    return torch.nn.functional.silu, decomposition(number)


ON_INDUCTOR = (a_pass_of_inductors, a_decomposition_by_the_name_of_torchs)
CHANGES: tuple[Callable[[float], Any], ...] = (
    *(a_method, a_new_method, an_operator_of_python, a_function_by_the_name_of_torchs),
    *(a_function_of_autograd_that_is_not_traced, a_composite_operator, a_rule_of_autocast, sums_of_attention),
    *(a_policy_of_a_checkpoint, a_policy_that_counts, operators_that_a_checkpoint_saves, *ON_INDUCTOR),
)


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_program_of_something_else_is_not_run(tmp_path: Path, change: Callable[[float], Any]) -> None:
    def graphs(folder: Path | None, number: float) -> list[str]:
        function, context = change(number)
        with context:
            options = {"backend": "inductor"} if change in ON_INDUCTOR else {}
            report = start(folder, lambda: Between(function), **options).report
        return [
            "\n".join(str(node.format_node()) for node in view.graph.fx_graph.nodes)
            for view in (report.forward, report.backward)
            if view.graph is not None
        ]

    first, other = graphs(None, 1.0), graphs(None, 2.0)
    assert first != other
    graphs(tmp_path, 1.0)
    assert graphs(tmp_path, 2.0) == other


@pytest.mark.parametrize("saves", [operators_that_a_checkpoint_saves, a_policy_of_a_checkpoint, a_policy_that_counts])
def test_what_a_checkpoint_saves_is_written_down(tmp_path: Path, saves: Callable[[float], Any]) -> None:
    assert [start(tmp_path, lambda: Between(saves(1.0)[0])).found for _ in range(2)] == [False, True]


SAVED = [aten.mm.default]


def by_a_global(_: Any, operator: Any, *args: Any, otherwise: Any = CheckpointPolicy.PREFER_SAVE) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else otherwise


def policy_around(saved: Any) -> Any:
    def policy(_: Any, operator: Any, *args: Any) -> Any:
        return policy if operator in saved else math.inf

    return policy


def test_functions_are_written_down_by_their_code_and_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names({}, torch.device("cpu"))
    text = described(by_a_global, names)
    copied = FunctionType(by_a_global.__code__, globals())
    assert described(copied, names) != text, "the default of an argument"
    copied.__kwdefaults__ = by_a_global.__kwdefaults__
    assert described(copied, names) == text
    monkeypatch.setitem(globals(), "SAVED", [aten.addmm.default])
    assert described(by_a_global, names) != text, "what a global holds"
    saved: list[Any] = [{aten.mm.default, aten.addmm.default}, {aten.addmm.default, aten.mm.default}, {aten.mm}]
    sets = [described(policy_around(operators), names) for operators in saved]
    assert sets[0] == sets[1] != sets[2]
    code = policy_around.__code__
    one_more = code.replace(
        co_consts=tuple(
            c.replace(co_name="p", co_names=("inf", "math")) if isinstance(c, CodeType) else c for c in code.co_consts
        )
    )
    assert described(FunctionType(one_more, globals()), names) != described(policy_around, names), "code within"
    partial = functools.partial(policy_around, saved=saved[0])
    assert described(partial, names) != described(functools.partial(policy_around, saved=saved[2]), names)


def by_an_import() -> Any:
    from models import WIDTH

    return WIDTH


def by_name() -> Any:
    return globals()["SAVED"]


@pytest.mark.parametrize("function", [by_an_import, by_name])
def test_functions_that_read_what_their_code_does_not_name_are_not_written_down(function: Callable[[], Any]) -> None:
    with pytest.raises(Unknown, match="what its code does not name"):
        described(function, Names({}, torch.device("cpu")))


@pytest.mark.parametrize("read", [Between, pytest, Path, object(), [lambda: Between]], ids=range(5))
def test_functions_that_read_what_only_their_author_knows_are_not_written_down(read: Any) -> None:
    with pytest.raises(Unknown):
        described(policy_around(read), Names({}, torch.device("cpu")))


def test_operators_of_which_the_results_are_saved_are_written_down_in_one_order(tmp_path: Path) -> None:
    orders = [aten.mm, aten.addmm, aten.sigmoid], [aten.sigmoid, aten.addmm, aten.mm]  # as of a set
    found = [start(tmp_path, activation_checkpointing=operators).found for operators in orders]
    assert found == [False, True]
