"""Which parameters are gathered together: exact unit lists for small models, without and with a policy."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy, size_based_auto_wrap_policy

from graph_fsdp.units import Unit, find_units, parameter_names


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)


class OtherBlock(Block):
    pass


class Stack(nn.Module):
    """An embedding, a ModuleList of blocks and a head."""

    def __init__(self, depth: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def listed(units: list[Unit]) -> dict[str, list[str]]:
    """Units as {name: parameters}; a dict keeps their order, which ``==`` on its items checks."""
    assert len({unit.name for unit in units}) == len(units)
    return {unit.name: list(unit.parameters) for unit in units}


def check(model: nn.Module, expected: dict[str, list[str]], policy: object = None, ignored: object = ()) -> None:
    units = find_units(model, policy, ignored)
    assert list(listed(units).items()) == list(expected.items())
    assert all(model.get_submodule(unit.name) is unit.modules[unit.name] for unit in units)


def block(prefix: str) -> dict[str, list[str]]:
    return {prefix: [f"{prefix}.up.weight", f"{prefix}.down.weight"]}


def linear(rows: int) -> nn.Linear:
    return nn.Linear(1, rows, bias=False)


def by_size(minimum: int, **keywords: object) -> Callable[..., bool]:
    return functools.partial(size_based_auto_wrap_policy, min_num_params=minimum, **keywords)


STACK = {"": ["embed.weight", "head.weight"], **block("blocks.0"), **block("blocks.1")}


# Without a policy


def test_repeated_blocks_are_units_and_the_root_holds_the_rest() -> None:
    check(Stack(), STACK)


def test_blocks_that_begin_with_an_empty_container_are_units() -> None:
    class Shortcut(Block):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.shortcut = nn.Sequential()
            self.up = nn.Linear(4, 4, bias=False)

    model = nn.Sequential(Shortcut(), Shortcut())
    assert listed(find_units(model)) == {"0": ["0.up.weight"], "1": ["1.up.weight"]}


def test_a_model_without_repetition_is_one_unit() -> None:
    check(nn.Linear(2, 2), {"": ["weight", "bias"]})
    check(Stack(depth=1), {"": ["embed.weight", "blocks.0.up.weight", "blocks.0.down.weight", "head.weight"]})


def test_repeated_leaves_are_not_units() -> None:
    check(
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False)),
        {"": ["0.weight", "0.bias", "2.weight"]},
    )


@pytest.mark.parametrize(
    ("container", "names"),
    [
        (lambda: nn.ModuleList([Block(), Block()]), ["0", "1"]),
        (lambda: nn.Sequential(Block(), Block()), ["0", "1"]),
        (lambda: nn.ModuleDict({"a": Block(), "b": Block()}), ["a", "b"]),
    ],
    ids=["ModuleList", "Sequential", "ModuleDict"],
)
def test_each_container_and_a_root_that_keeps_nothing(container: Callable[[], nn.Module], names: list[str]) -> None:
    check(container(), {**block(names[0]), **block(names[1])})


def test_only_the_class_that_repeats_makes_units() -> None:
    model = nn.Sequential(OtherBlock(), Block(), Block(), nn.Linear(4, 2, bias=False))
    check(model, {"": ["0.up.weight", "0.down.weight", "3.weight"], **block("1"), **block("2")})


def test_two_alternating_classes_both_make_units() -> None:
    model = nn.ModuleList([Block(), OtherBlock(), Block(), OtherBlock()])
    check(model, {**block("0"), **block("1"), **block("2"), **block("3")})


def test_blocks_without_parameters_are_not_units() -> None:
    model = nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()), nn.Linear(1, 1, bias=False)])
    check(model, {"": ["2.weight"]})


def test_nested_repetition_makes_units_of_the_outermost_only() -> None:
    model = nn.ModuleList(nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])}) for _ in range(2))
    inner = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
    check(model, {stage: [f"{stage}.{name}.weight" for name in inner] for stage in ("0", "1")})


def test_encoder_and_decoder_each_have_units() -> None:
    model = nn.ModuleDict({"encoder": Stack(), "decoder": Stack(), "bridge": nn.Linear(1, 1, bias=False)})
    root = [f"{half}.{name}.weight" for half in ("encoder", "decoder") for name in ("embed", "head")]
    # The halves repeat a class in a container themselves, so they are the outermost repetition.
    halves = find_units(model)
    assert [unit.name for unit in halves] == ["", "encoder", "decoder"]
    model = nn.Module()
    model.encoder, model.decoder = Stack(), Stack()
    blocks = [block(f"{half}.blocks.{i}") for half in ("encoder", "decoder") for i in range(2)]
    check(model, {"": root, **blocks[0], **blocks[1], **blocks[2], **blocks[3]})


# Shared modules, tied and ignored parameters


def test_a_module_registered_twice_is_one_unit_under_its_first_name() -> None:
    shared = Block()
    model = nn.ModuleList([shared, Block(), shared])
    check(model, {**block("0"), **block("1")})
    assert next(iter(parameter_names(model).values())) == ["0.up.weight", "2.up.weight"]


def test_a_parameter_tied_within_the_root_stays_there() -> None:
    check(Stack(tied=True), {**STACK, "": ["embed.weight"]})


def test_a_chosen_module_whose_parameters_are_all_tied_elsewhere_stays_a_unit() -> None:
    model = Stack(depth=1, tied=True)
    units = {"": ["embed.weight"], "embed": [], "blocks.0.up": ["blocks.0.up.weight"]}
    check(model, {**units, "blocks.0.down": ["blocks.0.down.weight"], "head": []}, {nn.Embedding, nn.Linear})
    (*_, head) = find_units(model, {nn.Embedding, nn.Linear})
    assert head.gathered_by == ""
    check(model, {"": ["embed.weight"], **block("blocks.0")}, {nn.ModuleList, Block})


def test_a_parameter_tied_across_two_blocks_belongs_to_the_root() -> None:
    model = Stack()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    check(
        model,
        {
            "": ["embed.weight", "blocks.0.up.weight", "head.weight"],
            "blocks.0": ["blocks.0.down.weight"],
            "blocks.1": ["blocks.1.down.weight"],
        },
    )


def test_a_parameter_tied_inside_a_block_belongs_to_the_block() -> None:
    model = nn.ModuleList([Block(), Block()])
    model[0].down.weight = model[0].up.weight
    check(model, {"0": ["0.up.weight"], **block("1")})


def test_a_parameter_tied_across_nested_units_belongs_to_the_one_around_them() -> None:
    model = nn.Sequential(nn.Sequential(Block(), Block()), Block())
    model[0][1].up.weight = model[0][0].up.weight
    check(
        model,
        {"0": ["0.0.up.weight"], "0.0": ["0.0.down.weight"], "0.1": ["0.1.down.weight"], **block("1")},
        {Block, nn.Sequential},
    )


def test_a_unit_shared_by_two_units_keeps_its_own_parameters() -> None:
    shared = nn.Linear(2, 2, bias=False)
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(nn.Linear(2, 2, bias=False), shared)])
    check(model, {"0.0": ["0.0.weight"], "1.0": ["1.0.weight"]}, {nn.Sequential, nn.Linear})
    # Shared, but no unit itself: both users must find it gathered.
    check(model, {"": ["0.0.weight"], "0": [], "1": ["1.0.weight"]}, {nn.Sequential})


def test_ignored_parameters_belong_to_no_unit() -> None:
    model = Stack()
    ignored = {model.embed.weight, model.blocks[0].up.weight, *model.blocks[1].parameters()}
    check(model, {"": ["head.weight"], "blocks.0": ["blocks.0.down.weight"]}, ignored=ignored)
    check(model, {}, ignored=list(model.parameters()))


# Names


def test_parameter_names_lists_every_name_in_registration_order() -> None:
    model = Stack(tied=True)
    names = parameter_names(model)
    assert list(names.values()) == [
        ["embed.weight", "head.weight"],
        ["blocks.0.up.weight"],
        ["blocks.0.down.weight"],
        ["blocks.1.up.weight"],
        ["blocks.1.down.weight"],
    ]
    assert [all_names[0] for all_names in names.values()] == [name for name, _ in model.named_parameters()]
    assert all(model.get_parameter(name) is parameter for parameter, ns in names.items() for name in ns)


def test_units_do_not_depend_on_values_or_device() -> None:
    with torch.device("meta"):
        model = Stack()
    check(model, STACK)


def test_every_parameter_is_in_exactly_one_unit() -> None:
    model = nn.Sequential(Stack(3, tied=True), nn.Sequential(Block(), linear(7)), nn.MultiheadAttention(4, 2))
    for policy in (None, always_wrap_policy, by_size(20), {Block, nn.Linear}, ModuleWrapPolicy({Stack})):
        in_units = [name for unit in find_units(model, policy) for name in unit.parameters]
        assert sorted(in_units) == sorted(name for name, _ in model.named_parameters())
