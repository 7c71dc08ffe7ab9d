"""``auto_wrap_policy``: the units that each kind of policy selects, and policies that cannot be."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
from test_units import Block, OtherBlock, Stack, block, by_size, check, linear
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from graph_fsdp.units import find_units

BLOCKS = {**block("blocks.0"), **block("blocks.1")}

# Policies


POLICIES = {
    "set of classes": {Block},
    "list of classes": [Block],
    "generator of classes": (cls for cls in [Block]),
    "ModuleWrapPolicy": ModuleWrapPolicy({Block}),
    "CustomPolicy": CustomPolicy(lambda module: isinstance(module, Block)),
    "CustomPolicy with options": CustomPolicy(lambda module: {"x": 1} if isinstance(module, Block) else False),
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
    "function": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=32),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_every_kind_of_policy_can_select_the_blocks(policy: object) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(2, 4), "a": Block(), "b": Block()})
    check(model, {"": ["embed.weight"], **block("a"), **block("b")}, policy)


def test_always_wrap_makes_a_unit_of_every_module_that_has_parameters_of_its_own() -> None:
    check(
        Stack(depth=1),
        {n: [f"{n}.weight"] for n in ("embed", "blocks.0.up", "blocks.0.down", "head")},
        always_wrap_policy,
    )


def test_subclasses_are_selected_with_their_class() -> None:
    check(nn.ModuleDict({"a": OtherBlock()}), block("a"), {Block})


def test_a_parameter_belongs_to_the_innermost_of_nested_units() -> None:
    model = Stack(depth=1)
    policy = CustomPolicy(lambda module: module in (model.blocks, model.blocks[0], model.blocks[0].down))
    expected = {
        "": ["embed.weight", "head.weight"],
        "blocks.0": ["blocks.0.up.weight"],
        "blocks.0.down": ["blocks.0.down.weight"],
    }
    check(model, expected, policy)


def test_a_policy_function_that_does_not_recurse_leaves_the_modules_below_alone() -> None:
    model = nn.ModuleDict({"open": nn.Sequential(Block()), "closed": nn.ModuleList([Block()])})

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return not isinstance(module, nn.ModuleList) if recurse else isinstance(module, Block)

    check(model, {"": ["closed.0.up.weight", "closed.0.down.weight"], **block("open.0")}, policy)


# Size-based policies: the numbers that a policy is shown are part of its contract


def test_a_size_policy_counts_only_what_no_unit_below_has_taken() -> None:
    model = nn.Sequential(nn.Sequential(linear(10), linear(3)), nn.Sequential(linear(6), linear(5)))
    # 0.0 is large enough, which leaves 3 of 13 in "0": too few. "1" holds 11 together.
    check(model, {"": ["0.1.weight"], "0.0": ["0.0.weight"], "1": ["1.0.weight", "1.1.weight"]}, by_size(10))


def test_a_size_policy_passes_by_lists_and_multihead_attention() -> None:
    attention = nn.MultiheadAttention(4, 2, bias=False)
    model = nn.Sequential(nn.ModuleList([linear(6), linear(6)]), attention)
    lists, heads = ["0.0.weight", "0.1.weight"], ["1.in_proj_weight", "1.out_proj.weight"]
    # torch neither wraps a ModuleList, though it holds 12, nor looks into attention, though it holds 64.
    check(model, {"": lists + heads}, by_size(10))
    # Both rules are the policy's own arguments.
    policy = by_size(10, force_leaf_modules=set(), exclude_wrap_modules=set())
    check(model, {"0": lists, "1": heads[:1], "1.out_proj": heads[1:]}, policy)


def test_a_size_policy_does_not_count_ignored_parameters() -> None:
    model = nn.Sequential(nn.Sequential(linear(6), linear(6)), linear(20))
    check(model, {"0": ["0.0.weight", "0.1.weight"], "1": ["1.weight"]}, by_size(10))
    check(model, {"": ["0.1.weight"], "1": ["1.weight"]}, by_size(10), ignored=[model[0][0].weight])


def test_a_size_policy_that_is_satisfied_by_the_root_alone_is_fine() -> None:
    check(nn.Sequential(linear(6), linear(6)), {"": ["0.weight", "1.weight"]}, by_size(10))


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("minimum", [1, 5, 17, 33, 40, 65, 100])
def test_policy_functions_select_what_fsdp1_would_wrap(minimum: int) -> None:
    from torch.distributed.fsdp.wrap import _recursive_wrap

    model = nn.Sequential(
        Stack(3), nn.Sequential(Block(), linear(7), nn.Sequential(Block(6))), nn.MultiheadAttention(4, 2)
    )
    wrapped, _ = _recursive_wrap(copy.deepcopy(model), by_size(minimum), Wrapped, set(), set(), only_wrap_children=True)
    names = [name for name, module in wrapped.named_modules() if isinstance(module, Wrapped)]
    ours = [name for name, module in model.named_modules() if module in selected_modules(model, by_size(minimum))]
    assert ours == [name.replace(".module", "") for name in names]


def selected_modules(model: nn.Module, policy: Callable[..., bool]) -> set[nn.Module]:
    """All modules that a policy selects below the root, those left without parameters too."""
    from graph_fsdp.units import _select

    return {module for (module,) in _select(model, policy, set())} - {model}


def test_modules_that_are_listed_are_units_and_a_tuple_of_them_is_one() -> None:
    model = Stack()
    check(
        model,
        {"embed": ["embed.weight", "head.weight"], **block("blocks.0"), **block("blocks.1")},
        [(model.head, model.embed), Block],
    )
    (unit, *_) = find_units(model, [[model.head, model.embed], Block])
    assert unit.modules == {"embed": model.embed, "head": model.head}
    check(
        model,
        {"": ["embed.weight", "head.weight"], "blocks.0": [name for part in BLOCKS.values() for name in part]},
        [tuple(model.blocks)],
    )


def test_a_tied_parameter_of_two_modules_of_a_unit_is_the_units() -> None:
    model = Stack(tied=True)
    check(model, {"embed": ["embed.weight"], **BLOCKS}, [(model.embed, model.head), Block])


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (lambda m: [(m.embed, Block)], TypeError, r"which is not a module class, a module or modules"),
        (lambda m: [nn.Linear(1, 1)], ValueError, r"lists a Linear that is no module of the model"),
        (lambda m: [(m.embed, m.head), m.head], ValueError, r"lists module 'head' twice"),
        (lambda m: [(m.blocks, m.blocks[0])], ValueError, r"one unit of 'blocks' and of 'blocks.0' inside it"),
        (lambda m: [(m, m.blocks[0])], ValueError, r"one unit of 'the model' and of 'blocks.0' inside it"),
    ],
)
def test_modules_that_cannot_be_a_unit(policy: Callable[[nn.Module], object], error: type, message: str) -> None:
    model = Stack()
    with pytest.raises(error, match=message):
        find_units(model, policy(model))


# Errors


def nothing(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ({nn.LSTM}, "{LSTM}"),
        (set(), "{}"),
        (ModuleWrapPolicy({nn.LSTM}), "ModuleWrapPolicy"),
        (CustomPolicy(lambda module: False), "CustomPolicy"),
        (by_size(10_000), "functools.partial(size_based_auto_wrap_policy, min_num_params=10000)"),
        (nothing, "nothing"),
    ],
)
def test_a_policy_that_selects_nothing_is_an_error(policy: object, shown: str) -> None:
    with pytest.raises(ValueError) as caught:
        find_units(Stack(), policy)
    message = str(caught.value)
    assert message.startswith("auto_wrap_policy ")
    assert shown in message
    assert "all 10 modules of Stack" in message
    assert "The classes that do: Linear (5), Block (2), Stack (1), Embedding (1), ModuleList (1)." in message
    assert "auto_wrap_policy=None" in message


def test_a_policy_that_selects_only_modules_without_parameters_is_an_error() -> None:
    with pytest.raises(ValueError, match="selects none that holds parameters"):
        find_units(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), {nn.ReLU})


def test_a_policy_that_selects_only_the_root_is_fine() -> None:
    check(nn.Linear(1, 1), {"": ["weight", "bias"]}, {nn.Linear})
    check(nn.Linear(1, 1), {"": ["weight", "bias"]}, always_wrap_policy)
    check(nn.Linear(1, 1), {"": ["weight", "bias"]}, ModuleWrapPolicy({nn.Linear}))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (7, r"auto_wrap_policy is 7 of type int; pass None"),
        ("Block", r"auto_wrap_policy is 'Block' of type str; pass None"),
        (Block, r"auto_wrap_policy is the class Block; did you mean {Block}\? pass None"),
        (int, r"auto_wrap_policy is the class int; pass None"),
        (Block(), r"of type Block; pass None"),
        (nn.ModuleList(), r"of type ModuleList; pass None"),
        (["Block"], r"auto_wrap_policy holds 'Block', which is not a module class"),
        ({Block, 3}, r"auto_wrap_policy holds 3, which is not a module class"),
        (
            transformer_auto_wrap_policy,
            r"auto_wrap_policy transformer_auto_wrap_policy cannot be called .*transformer_layer_cls",
        ),
        (lambda module: True, r"cannot be called with \(module=, recurse=, nonwrapped_numel=\)"),
    ],
)
def test_a_policy_of_the_wrong_type_is_an_error(policy: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        find_units(Stack(), policy)


def test_an_error_of_the_policy_itself_is_not_hidden() -> None:
    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        find_units(Stack(), policy)
