"""Random numbers differ by device here, and backward computes them again.

In a program of all devices, torch_xla's random numbers are the same on every device, and new in every replay: a mask
that backward recomputes would be another one. So the joint graph gets one ``seed`` before it is partitioned, and each
operator that draws becomes a function of the seed and its own number. Forward is given a seed per device, from the
CPU's generator (``torch.manual_seed``); backward gets it saved.

Numbers are a hash of the element's index: two rounds of MurmurHash3's finaliser, each with a key of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp.compat import CheckpointPolicy
from graph_fsdp.passes.ir.effects import is_random
from graph_fsdp.passes.ir.fake_values import VALUES, fake_mode_of
from graph_fsdp.passes.ir.operands import arguments
from graph_fsdp.runtime.xla.operators import define

aten = torch.ops.aten


def _int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _shifted(h: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    return (h >> bits) & ((1 << (32 - bits)) - 1)


def _mixed(h: Tensor) -> Tensor:
    h = (h ^ _shifted(h, 16)) * _int32(0x85EBCA6B)
    h = (h ^ _shifted(h, 13)) * _int32(0xC2B2AE35)
    return h ^ _shifted(h, 16)


def bits(seed: Tensor, number: int, numel: int) -> Tensor:
    """Return ``numel`` random 32-bit integers."""
    key = _mixed(seed + _int32(0x9E3779B9 * (2 * number + 1)))
    other = _mixed(key ^ _int32(0x7F4A7C15))
    index = torch.arange(numel, dtype=torch.int32, device=seed.device)
    return _mixed(_mixed(index ^ key) + other)


def _fractions(seed: Tensor, number: int, numel: int) -> Tensor:
    """Return float32 numbers from 0 to below 1, multiples of 2**-24."""
    return _shifted(bits(seed, number, numel), 8).to(torch.float32) * 2.0**-24


def _uniform(seed: Tensor, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _fractions(seed, 2 * number, math.prod(shape)).reshape(list(shape)).to(dtype)


def _normal(seed: Tensor, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw by Box and Muller."""
    numel = math.prod(shape)
    radius = (-2 * torch.log(1 - _fractions(seed, 2 * number, numel))).sqrt()
    angle = 2 * math.pi * _fractions(seed, 2 * number + 1, numel)
    return (radius * torch.cos(angle)).reshape(list(shape)).to(dtype)


def _like(seed: Tensor, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return seed.new_empty(shape, dtype=dtype)


_DRAWS = "(Tensor seed, int number, SymInt[] shape, ScalarType dtype) -> Tensor"
seed = define(
    "seed(Device device) -> Tensor",
    lambda device: torch.zeros((), dtype=torch.int32, device=device),
    torch.Tag.nondeterministic_seeded,
)
uniform = define(f"uniform{_DRAWS}", _like, XLA=_uniform, CPU=_uniform)
normal = define(f"normal{_DRAWS}", _like, XLA=_normal, CPU=_normal)


def number_random_operators(module: fx.GraphModule) -> fx.GraphModule:
    """Make each operator that draws random numbers a function of one seed and of its number among them. Raises
    NotImplementedError if one draws in a way that is not known here."""
    drawing = [node for node in module.graph.nodes if is_random(node)]
    if not drawing:
        return module
    if unknown := [node.target for node in drawing if node.target not in _REPLACEMENTS]:
        raise NotImplementedError(
            f"{unknown[0]} draws random numbers, and backend='xla' has uniform and normal ones alone; draw with "
            "torch.rand, torch.randn or torch.bernoulli"
        )
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    device = next(node.meta["val"].device for node in drawing)
    with module.graph.inserting_before(first):
        seeds = module.graph.call_function(seed, (device,))
    with fake_mode_of([drawing[0]]):
        seeds.meta["val"] = seed(device)
    seeds.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for number, node in enumerate(drawing):
        node.replace_all_uses_with(_REPLACEMENTS[node.target](node, seeds, number))
        module.graph.erase_node(node)
    module.recompile()
    return module


def _call(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call that does a part of what ``node`` does."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs)
    made.meta = dict(node.meta)
    made.meta["val"] = VALUES.of(made)
    return made


def _drawn(operator: Any, node: fx.Node, seeds: fx.Node, number: int) -> fx.Node:
    value = node.meta["val"]
    dtype = value.dtype if value.is_floating_point() else torch.float32
    return _call(node, operator, seeds, number, list(value.shape), dtype)


def _bernoulli(node: fx.Node, seeds: fx.Node, number: int) -> fx.Node:
    """Draw of a tensor of probabilities, or of a tensor of the result's shape and one probability."""
    drawn = _call(node, uniform, seeds, number, list(node.meta["val"].shape), torch.float32)
    given = vars(arguments(node))
    probability = given.get("p", given["self"])
    less = aten.lt.Tensor if isinstance(probability, fx.Node) else aten.lt.Scalar
    return _call(node, aten._to_copy.default, _call(node, less, drawn, probability), dtype=node.meta["val"].dtype)


def _between(node: fx.Node, seeds: fx.Node, number: int) -> fx.Node:
    """Replace ``uniform(x, low, high)``."""
    given = vars(arguments(node))
    low, high = given["from"], given["to"]
    scaled = _call(node, aten.mul.Tensor, _drawn(uniform, node, seeds, number), high - low)
    return _call(node, aten.add.Tensor, scaled, low)


_REPLACEMENTS: dict[Any, Callable[[fx.Node, fx.Node, int], fx.Node]] = {
    **dict.fromkeys((aten.rand.default, aten.rand_like.default), functools.partial(_drawn, uniform)),
    **dict.fromkeys((aten.randn.default, aten.randn_like.default), functools.partial(_drawn, normal)),
    **dict.fromkeys((aten.bernoulli.default, aten.bernoulli.p), _bernoulli),
    aten.uniform.default: _between,
}
