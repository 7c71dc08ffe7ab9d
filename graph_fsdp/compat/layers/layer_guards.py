"""Compare what Dynamo has read of one layer with what it would read of another, and guard the other one likewise."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import functools
import operator
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo.source import AttrSource, TypeSource
from torch._guards import ChainedSource, Guard, Source

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size)

# Guards that look at a value's class, its keys or its length, and at nothing that it holds.
_OF_THE_OUTSIDE = frozenset(
    {
        "TYPE_MATCH",
        "HASATTR",
        "DICT_CONTAINS",
        "DICT_KEYS_MATCH",
        "MAPPING_KEYS_CHECK",
        "SEQUENCE_LENGTH",
        "NOT_PRESENT_IN_GENERIC_DICT",
    }
)


class Differs(Exception):
    """Says why what Dynamo has traced of one layer is not certain to be what it would trace of another."""


def tensor_facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what Dynamo may know of a tensor, real or fake, as a key. Symbols are written as they are; nothing is
    asked of them."""
    if tensor.layout is not torch.strided:
        raise Differs(f"a tensor of layout {tensor.layout}")
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    written = tuple([size if type(size) is int else str(size) for size in sizes])
    flags = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
    return (type(tensor), len(tensor.shape), written, tensor.dtype, tensor.device, *flags)


def modules_of(layer: nn.Module) -> dict[str, nn.Module]:
    """Return a layer and all modules in it, by name."""
    return dict(layer.named_modules(remove_duplicate=False))


def is_under(source: Source, layer: Source) -> bool:
    """Say whether a source is a layer's, or leads to something through it."""
    while source != layer:
        base = getattr(source, "base", None)
        if base is None:
            return False
        source = base
    return True


def _is_of_a_class(source: Source) -> bool:
    while not isinstance(source, TypeSource) and getattr(source, "member", "") != "__class__":
        if (base := getattr(source, "base", None)) is None:
            return False
        source = base
    return True


class Counterparts:
    """Finds what another layer has in the places of what a layer has, by sources in the frame that is traced.
    ``layer``, ``other``: their sources."""

    def __init__(self, output: Any, layer: Source, other: Source) -> None:
        self._globals = {"G": output.root_tx.f_globals, "L": output.root_tx.f_locals}
        self._values: dict[Source, Any] = {}
        self._sources = {layer: other}

    def source(self, of: Source) -> Source:
        """Return the source of the same thing of the other layer; of what is not the layer's the source itself."""
        found = self._sources.get(of)
        if found is None:
            found = of
            base = getattr(of, "base", None)
            if base is not None and (there := self.source(base)) is not base:
                found = dataclasses.replace(cast(Any, of), base=there)
            self._sources[of] = found
        return found

    def argument(self, of: Any) -> Any:
        """Return what a guard on the other layer keeps in the place of what one on the layer keeps."""
        return self.source(of) if isinstance(of, Source) else of

    def read(self, guard: Guard, source: Source) -> Any:
        """Return what a guard reads of ``source``. Raises Differs if there is none."""
        if getattr(guard.create_fn, "__name__", "") == "HASATTR":  # before torch 2.13 on the attribute, there or not
            attribute = cast(AttrSource, source)
            return hasattr(self.value(attribute.base), attribute.member)
        return self.value(source)

    def value(self, source: Source) -> Any:
        """Return the value of a source. Raises Differs if there is none."""
        if source in self._values:
            return self._values[source]
        try:
            get = None
            if isinstance(source, ChainedSource) and type(source).get_value is ChainedSource.get_value:
                get = _getter(source._name_template)
            if get is None:
                return source.get_value(self._globals, {}, self._values)
            found = get(self.value(cast(ChainedSource, source).base))
        except Differs:
            raise
        except Exception as error:
            raise Differs(f"{source.name} has no value") from error
        self._values[source] = found
        return found


@functools.lru_cache(maxsize=10_000)
def _getter(template: str) -> Callable[[Any], Any] | None:
    """Return what a source takes of its base, an attribute or an item, by the template of its expression; None for any
    other, which torch compiles each time that it evaluates it."""
    if attribute := re.fullmatch(r"\{0\}\.([A-Za-z_]\w*)", template):
        return operator.attrgetter(attribute[1])
    if item := re.fullmatch(r"\{0\}\[([^{}]+)\]", template):
        with contextlib.suppress(ValueError, SyntaxError):
            return operator.itemgetter(ast.literal_eval(item[1]))
    return None


@dataclass(frozen=True)
class _Read:
    """Holds a guard on something of a layer, and what that was; ``copied``: whether other layers get one like it."""

    guard: Guard
    value: Any
    copied: bool


class LayerGuards:
    """Holds all guards on what belongs to ``layer``, whose source is ``source``.

    Raises:
        Differs: one of them is of a kind that is not known here, or something of the layer has another source, too.
    """

    def __init__(self, output: Any, layer: nn.Module, source: Source) -> None:
        values = Counterparts(output, source, source)
        self.source, self.modules = source, modules_of(layer)
        self._reads: list[_Read] = []
        own = {id(module) for module in self.modules.values()}
        for guard in output.guards:
            read = guard.originating_source
            if is_under(read, source):
                if unknown := _arguments(guard, object, but=(*_CONSTANTS, Source)):
                    raise Differs(f"{guard.create_fn_name()} on {guard.name} keeps a {type(unknown[0]).__name__}")
                value = values.read(guard, read)
                copied = not isinstance(value, torch.Tensor) and not _is_of_a_class(read)
                self._reads.append(_Read(guard, value, copied))
            elif any(is_under(other, source) for other in _arguments(guard, Source)):
                raise Differs(f"{read.name} is guarded to be something of the layer")
            elif hasattr(read, "base") and id(values.read(guard, read)) in own:
                raise Differs(f"{read.name} is another name of something of the layer")
        self._lines: dict[Source, Any] = {}
        for one in self._reads:
            self._lines.setdefault(one.guard.originating_source, one.guard.user_stack)
        self._ordered = [read for read in output.guard_on_key_order if is_under(read, source)]

    def tensors(self) -> Iterator[Source]:
        """Yield the sources of tensors that are guarded."""
        for read in self._reads:
            if isinstance(read.value, torch.Tensor):
                yield read.guard.originating_source

    def lines(self, source: Source) -> Any:
        """Return the user's lines that have read a tensor."""
        return self._lines[source]

    def check(self, layer: nn.Module, counterparts: Counterparts) -> None:
        """Raise Differs unless each of the guards holds for ``layer``, too."""
        modules = modules_of(layer)
        if modules.keys() != self.modules.keys():
            raise Differs("it has other modules")
        pairs = {id(module): modules[name] for name, module in self.modules.items()}
        for name, module in self.modules.items():
            if pairs[id(module)] is not modules[name]:
                raise Differs("its modules share others")
        for read in self._reads:
            there = counterparts.source(read.guard.originating_source)
            outside = read.guard.create_fn_name() in _OF_THE_OUTSIDE
            value = counterparts.read(read.guard, there)
            equal = _same(read.value, value, pairs, outside=outside)
            for other in _arguments(read.guard, Source):  # a guard that both are one
                equal &= counterparts.value(counterparts.source(other)) is value
            if not equal:
                raise Differs(f"{there.name} is not what {read.guard.originating_source.name} is")

    def install(self, output: Any, counterparts: Counterparts) -> None:
        """Guard another layer likewise. Tensors are guarded where they become inputs of the graph; what belongs to a
        class is guarded already, and so is that a module is of it."""
        for read in self._reads:
            if read.copied:
                there, made = counterparts.source(read.guard.originating_source), read.guard.create_fn
                if isinstance(made, functools.partial):
                    keywords = {name: counterparts.argument(kept) for name, kept in made.keywords.items()}
                    made = functools.partial(made.func, *map(counterparts.argument, made.args), **keywords)
                copy = Guard(there, made, user_stack=read.guard.user_stack)
                output.guards.add(copy, collect_debug_stack=False)
        for ordered in self._ordered:
            output.guard_on_key_order.add(counterparts.source(ordered))


def _arguments(guard: Guard, kind: type, but: tuple[type, ...] = ()) -> list[Any]:
    """Return what of a kind a guard keeps beside its source, other than a tensor's metadata."""
    made = guard.create_fn
    if not isinstance(made, functools.partial) or guard.create_fn_name() == "TENSOR_MATCH":
        return []
    kept = (*made.args, *made.keywords.values())
    return [argument for argument in kept if isinstance(argument, kind) and not isinstance(argument, but)]


def _same(one: Any, other: Any, pairs: Mapping[int, nn.Module], *, outside: bool = False) -> bool:
    """Say whether no guard can tell ``other``, of a layer, from ``one`` of the other layer, whose modules have those
    of ``pairs`` in their places. ``outside``: the guard looks at the class, the keys or the length alone."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, nn.Module):
        return pairs.get(id(one)) is other and all(
            getattr(one, registry).keys() == getattr(other, registry).keys()
            for registry in ("__dict__", "_parameters", "_buffers", "_modules")
        )
    if isinstance(one, torch.Tensor):
        return tensor_facts(one) == tensor_facts(other) and _marks(one) == _marks(other)
    if isinstance(one, dict):
        keys = list(one) == list(other)
        return keys and (outside or all(_same(one[key], other[key], pairs) for key in one))
    if isinstance(one, (list, tuple)) and not isinstance(one, torch.Size):
        return len(one) == len(other) and (outside or all(map(functools.partial(_same, pairs=pairs), one, other)))
    if isinstance(one, (*_CONSTANTS, enum.Enum)):
        return bool(one == other)
    if isinstance(one, types.MethodType):
        return _same(one.__func__, other.__func__, pairs) and _same(one.__self__, other.__self__, pairs)
    return outside


def _marks(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor's attributes, with the values of those of Dynamo's, as which sizes are dynamic."""
    return {name: value if name.startswith("_dynamo") else None for name, value in vars(tensor).items()}
