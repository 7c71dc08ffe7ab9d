"""DTensor finds out once for equal tensors how an operator on lists of them is sharded, as an optimizer's first step.

Torch looks at each place of such an operator's lists by itself (a parameter, its gradient, its state), and in each at
all tensors that the operator is given, so that 577 parameters take half a CPU second, and twice as many four times as
long. A model of equal layers has few places that differ. Torch is asked about an operator with these alone, and each
place of the lists gets what the first of its equals got. Where a tensor has to be redistributed, torch is asked about
all of them.

[Note: gradients on several meshes]
``GradScaler`` looks for what is not finite in all gradients at once, and DTensor tells it of that on other ranks: those
over which the first gradient of the list is sharded. A list may begin with a parameter that tensor-parallel ranks have
copies of, while others are sharded over these. Then one rank would skip the step that another takes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from graph_fsdp.compat.distributed import resolve_group
from graph_fsdp.compat.tensors import local_parts

ASKED = "propagate_op_sharding_non_cached"
_ON_LISTS = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")  # by places, for torch, too


def _once_for_equals(propagator: Any, torchs: Any, schema: OpSchema) -> OutputSharding:
    numbers = _numbers_of_places(schema)
    if numbers is None or len({*numbers}) == len(numbers):
        return cast(OutputSharding, torchs(propagator, schema))
    firsts = [numbers.index(number) for number in range(max(numbers) + 1)]
    args = (_at(argument, firsts) if _is_list(argument) else argument for argument in schema.args_schema)
    asked = OpSchema(schema.op, tuple(args), schema.kwargs_schema, schema.schema_info)
    found: OutputSharding = torchs(propagator, asked)
    output: Any = found.output_spec
    if found.needs_redistribute or not (output is None or (_is_list(output) and len(output) == len(firsts))):
        return cast(OutputSharding, torchs(propagator, schema))
    return dataclasses.replace(found, output_spec=None if output is None else _at(output, numbers))


def _numbers_of_places(schema: OpSchema) -> list[int] | None:
    """Return for each place of an operator's lists a number, the same for places in which it is given the same. None
    where it has no lists, or not of places."""
    lists: list[Any] = [argument for argument in schema.args_schema if _is_list(argument)]
    if not schema.op.name().startswith(_ON_LISTS) or len({*map(len, lists)}) != 1:
        return None
    if any(map(_is_list, schema.kwargs_schema.values())):
        return None
    numbers: dict[Any, int] = {}
    try:
        places = zip(*lists, strict=True)
        return [numbers.setdefault((place, *map(type, place)), len(numbers)) for place in places]
    except TypeError:  # a symbolic size
        return None


def _is_list(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and bool(argument)


def _at(values: Any, places: list[int]) -> Any:
    return type(values)(values[place] for place in places)


def begin_equal_places() -> None:
    """Have equal places of lists be looked at once, until ``end_equal_places``; where both are called again, too."""
    torchs = vars(ShardingPropagator)[ASKED]
    if not isinstance(torchs, functools.partialmethod):
        setattr(ShardingPropagator, ASKED, functools.partialmethod(_once_for_equals, torchs))


def end_equal_places() -> None:
    found = vars(ShardingPropagator)[ASKED]
    if isinstance(found, functools.partialmethod):
        setattr(ShardingPropagator, ASKED, found.args[0])


def unscale_on_all_meshes(groups_of: Callable[[torch.Tensor], Iterable[str]]) -> None:
    """Have the ranks of all gradients agree on whether one is not finite, where torch's ``GradScaler`` unscales some
    ([Note: gradients on several meshes]). ``groups_of``: the names of the groups that a gradient is sharded over."""

    def unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gradients: Sequence[torch.Tensor] = args[0]
        found_inf: torch.Tensor = args[1]
        operator(local_parts(gradients), *args[1:], **kwargs)
        for group in dict.fromkeys(name for gradient in gradients for name in groups_of(gradient)):
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, resolve_group(group))

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[_UNSCALE] = unscale


_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
