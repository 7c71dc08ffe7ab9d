"""A compiled model's class is a subclass of its own, with a forward that runs the programs."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from graph_fsdp import compat
from graph_fsdp.classes import preceded
from graph_fsdp.engine.casting import follow_cast
from graph_fsdp.engine.engine import Engine
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.module.collective_methods import CollectiveMethods
from graph_fsdp.module.communication import CommunicationMethods
from graph_fsdp.module.entering import (
    CalledAs,
    compiled_method,
    entering,
    forward_in_its_place,
    original_forward,
    whole_in,
)
from graph_fsdp.module.refusals import (
    NoState,
    Refusals,
    Registry,
    already_sharded,
    saving_whole,
    watch_steps,
)
from graph_fsdp.module.structure import Structure
from graph_fsdp.module.unit_methods import UnitMethods
from graph_fsdp.parameters.mixed_precision import ModulePolicies
from graph_fsdp.parameters.own_rows import own_rows
from graph_fsdp.passes.repeat.segments import WORTH
from graph_fsdp.units import Unit


class CallableAlone:
    """Comes before the own class of a module of the root unit, among the bases of its class: a loss that calls a head
    by itself runs compiled. It is no unit, and what is copied or pickled is a module of the own class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        state = {name: value for name, value in made[2].items() if name != "_graph_fsdp_called"}
        return object.__new__, (plain_class(type(self)),), state


def plain_class(kind: type) -> type:
    """Return the class that an object of the compiled class ``kind`` had before ``compile``."""
    kinds = kind.__mro__
    return kinds[kinds.index(CallableAlone if CallableAlone in kinds else FSDPModule) + 1]


def compiled_modules(model: nn.Module, engine: Engine) -> list[nn.Module]:
    """Return the modules of ``model`` that have a class by ``compile``, which has made ``engine``."""
    called = ((module, vars(module).get("_graph_fsdp_called")) for module in model.modules())
    return [module for module, called_as in called if called_as is not None and called_as.engine is engine]


class _NotStatically(property):
    """Is false as an object: since torch 2.15 Dynamo reads the property uncalled, and refuses what FSDP1 manages."""

    def __bool__(self) -> bool:
        return False


class GraphFSDPModule(Refusals, UnitMethods, CommunicationMethods, CollectiveMethods, FSDPModule):
    """Comes before the model's or unit's own class among the bases of its class.

    It is an ``FSDPModule``, so that code which looks for FSDP2 finds it. Methods of ``FSDPModule`` that this version
    does not have say so instead of doing nothing.
    """

    _graph_fsdp: Engine
    _graph_fsdp_unit: str  # "" for the model's
    _graph_fsdp_called: CalledAs

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the model's own class instead of a compiled model's (indexing into a container does that)."""
        original: Any = plain_class(cls)
        instance = original.__new__(original)
        instance.__init__(*args, **kwargs)
        return instance

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return another compiled model with equal shards (``copying.py``)."""
        copied = vars(self).get("_graph_fsdp_copied")
        if copied is None:
            raise UnsupportedError(
                f"copy.deepcopy was given {vars(self)['_graph_fsdp_called'].name!r}, a unit of a model compiled by "
                "graph_fsdp, which has its parameters' storage and graphs; copy the whole model and take the unit of "
                "the copy, or copy the unit before graph_fsdp.compile"
            )
        return copied(self, memo)

    def __setattr__(self, name: str, value: Any) -> None:
        # This is how torch's ``register_fsdp_forward_method`` reaches us.
        if not torch.compiler.is_compiling() and (method := compat.registered_forward_method(value)) is not None:
            return self._register(name, method)
        if name == "forward" and not torch.compiler.is_compiling() and not self._graph_fsdp.fullgraph:
            given, value = value, forward_in_its_place(cast(nn.Module, self), value)
            self._given()[name] = value, given
        super().__setattr__(name, value)

    def _register(self, name: str, method: Callable[..., Any]) -> None:
        calls = _called_by(self, method)
        if calls != "the model":
            made = whole_in if calls == "parts" else compiled_method
            value = made(cast(nn.Module, self), name, method)
            self._given()[name] = value, method
            super().__setattr__(name, value)

    def _given(self) -> dict[str, tuple[Any, Any]]:
        """Return, by name, what stands for a function that a user has set, and that function: copies get another."""
        given: dict[str, tuple[Any, Any]] = vars(self).setdefault("_graph_fsdp_given", {})
        return given

    def _get_name(self) -> str:
        """Return the name of the model's own class, by which transformers' Trainer knows whether labels are shifted."""
        name: str = super()._get_name()  # type: ignore[misc]  # torch's, of modules
        return name.removeprefix("FSDP")

    def _is_managed(self) -> bool:
        """Tell transformers, before it generates, whether ranks have to stop together, because each forward gathers.
        False while Dynamo traces, which would leave out guards for FSDP2's sake."""
        return not compat.is_tracing() and bool(self._graph_fsdp.unsharded.sharded)

    def _manage(self, _: bool) -> NoReturn:
        raise already_sharded("FullyShardedDataParallel")  # which sets it before all else

    _is_fsdp_managed_module = _NotStatically(_is_managed, _manage)

    def _get_fsdp_state(self) -> Any:
        return NoState()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # FSDPModule's looks for FSDP2's state.
        found = self._resharded()._apply(*args, **kwargs)
        if "_graph_fsdp_structure" in vars(self):  # the model, all of which is moved or cast now
            self._graph_fsdp.storage.after_apply()
            follow_cast(self._graph_fsdp, vars(self)["_graph_fsdp_policies"])
        return found

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Apply ``fn`` to all modules; those in no unit have their own classes meanwhile (``type(m) == nn.Linear``)."""
        modules = cast(nn.Module, self).modules()
        alone = {module: type(module) for module in modules if isinstance(module, CallableAlone)}
        for module in alone:
            module.__class__ = plain_class(type(module))
        try:
            return self._after_fsdp_module().apply(fn)
        finally:
            for module, kind in alone.items():
                module.__class__ = kind

    def zero_grad(self, set_to_none: bool = True) -> None:
        method = self._after_fsdp_module().zero_grad
        structure = vars(self).get("_graph_fsdp_structure")  # of the model, not of units
        plain = set_to_none and getattr(method, "__func__", None) is nn.Module.zero_grad
        if not plain or structure is None or not structure.drop_gradients():
            method(set_to_none)
        if self._graph_fsdp.unsharded.units:  # then ``parameters()`` are whole, and backward adds to shards' gradients
            inside = set(cast(nn.Module, self).modules())
            for module, _, p in self._graph_fsdp.storage.places:
                if module in inside and p.whole is not None and p.shard.grad is not None:
                    p.shard.grad = None if set_to_none else torch.zeros_like(p.shard.grad)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a state dict of DTensors, as FSDP2 does. What ``unshard()`` gathered is resharded."""
        with _no_inference_mode():
            return self._resharded().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load DTensors, as ``state_dict()`` gives them; or whole tensors, the same on all ranks, of which each takes
        its own rows. Nothing is communicated. Raises CheckpointError for DTensors of another rank."""
        with _no_inference_mode():
            return self._resharded().load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
        # torch's own, also of a module that holds this one, loads modules inside from the same copy of its argument.
        model = self._resharded()
        state_dict.update(own_rows(cast(nn.Module, self), self._graph_fsdp.storage, state_dict, prefix))
        return model._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _resharded(self) -> Any:
        """Reshard what ``unshard()`` gathered, and return the methods of the model's own classes."""
        self._graph_fsdp.unsharded.release()
        return self._after_fsdp_module()


def _no_inference_mode() -> contextlib.AbstractContextManager[None]:
    """Return a context out of ``torch.inference_mode``, in which DTensors cannot be detached."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def unsupported(name: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name}() of FSDP2 is not available on models compiled by graph_fsdp yet")

    method.__name__ = name
    method.__doc__ = f"Not available yet: raises UnsupportedError. See ``FSDPModule.{name}``."
    return method


for _name, _value in vars(FSDPModule).items():
    if callable(_value) and not _name.startswith("_") and getattr(GraphFSDPModule, _name) is _value:
        setattr(GraphFSDPModule, _name, unsupported(_name))


_Classes = dict[tuple[type, type, Callable[..., Any]], type]


def become_compiled(model: nn.Module, engine: Engine, policies: ModulePolicies, units: list[Unit]) -> None:
    """Give ``model`` and the modules of its units their new classes. The names are FSDP2's for the same modules, which
    other libraries strip. A unit's forward is the plain one within the model's, and compiled when called by itself."""
    watch_steps()
    places = {
        module: (name, unit.name if unit.gathered_by is None else unit.gathered_by)
        for unit in units
        for name, module in unit.modules.items()
    }
    places.setdefault(model, ("", ""))
    for name, module in _generators_inside(model):
        places.setdefault(module, (name, places[model][1]))
    owners = {module for p in engine.storage.parameters.values() for module, _ in p.owners}
    for module in model.modules():
        registry = vars(module)[compat.APPLIED] = Registry(vars(module).get(compat.APPLIED, {}))
        registry.has_shards = module in owners
    classes: _Classes = {}
    for module, (name, unit_name) in places.items():
        called = CalledAs(engine, name, *policies.casts_of(name))
        _let_enter(module, called, f"FSDP{type(module).__name__}", GraphFSDPModule, classes)
        vars(module).update(_graph_fsdp=engine, _graph_fsdp_unit=unit_name)
    for name, module in _callable_alone(model, units):
        if module not in places:
            inside = set(module.modules())
            called = CalledAs(engine, name, places=[at for at in engine.storage.places if at[0] in inside])
            _let_enter(module, called, type(module).__name__, CallableAlone, classes)
    counts = Counter(map(type, places))
    engine.equal_layers = compat.EqualLayers(frozenset(kind for kind, number in counts.items() if number >= WORTH))
    vars(model)["_graph_fsdp_policies"] = {name: policies.around(name) for name in engine.spec.parameters}
    structure = vars(model)["_graph_fsdp_structure"] = Structure(model, engine.storage)
    engine.structure_of_model = weakref.ref(structure)


def _let_enter(module: nn.Module, called: CalledAs, name: str, first: type, classes: _Classes) -> None:
    """Give ``module`` a class of this name, with ``first`` before its own one, whose forward enters compiled code; one
    of ``classes`` where there is one for its own class and forward."""
    cls, forward = type(module), original_forward(module)
    if "forward" in vars(module):
        vars(module)["_graph_fsdp_forward"] = vars(module).pop("forward")
    if (first, cls, forward) not in classes:
        namespace: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        if forward is not nn.Module.forward:  # else torch's raises
            # What the class makes of another object, such as a partialmethod, is another function each time.
            of = cls if forward is inspect.getattr_static(cls, "forward") else None
            namespace["forward"] = entering("forward", forward, called.engine.number, of=of)
        if callable(save_pretrained := getattr(cls, "save_pretrained", None)):
            namespace["save_pretrained"] = saving_whole(save_pretrained)
        classes[first, cls, forward] = preceded(name, (first,), cls, namespace)
    module.__class__ = classes[first, cls, forward]
    vars(module)["_graph_fsdp_called"] = called


def _callable_alone(model: nn.Module, units: list[Unit]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the root unit that have parameters, and a forward that is Python and their class's, by name.
    A copy of another would be without the forward that was set on it."""
    inside = {m for unit in units for module in unit.modules.values() if module is not model for m in module.modules()}
    for name, module in model.named_modules():
        known = module is model or module in inside
        other = isinstance(module, (torch.jit.ScriptModule, ParametrizationList)) or is_parametrized(module)
        of_class = type(module).forward is not nn.Module.forward and "forward" not in vars(module)
        if of_class and not known and not other and [*module.parameters()]:
            yield name, module


def _generators_inside(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with a ``generate`` that have all of a model's parameters, by name: that of a PeftModel calls them
    instead of the model, and ranks have to stop together in it."""
    name, module = "", model
    while not any(p is not None for p in module._parameters.values()):
        inside = [(key, child) for key, child in module.named_children() if any(True for _ in child.parameters())]
        if len(inside) != 1:
            return
        [(key, module)] = inside
        name = f"{name}.{key}" if name else key
        if callable(getattr(type(module), "generate", None)):
            yield name, module


def _called_by(module: Any, method: Any) -> str:
    """Say what the ``generate`` of a model of transformers, or PEFT's, calls; "" of any other method. That of a decoder
    is a loop of Python, in which each call of "the model" is compiled already: transformers' Trainer registers it. That
    of an encoder and a decoder, and those that models have of their own, also call "parts" of it by themselves."""
    library, name = getattr(method, "__module__", ""), getattr(method, "__name__", "")
    if name == "generate" and any(kind.__module__ == "transformers.modeling_utils" for kind in type(module).__mro__):
        is_loop = library == "transformers.generation.utils" and not getattr(module.config, "is_encoder_decoder", False)
        return "the model" if is_loop else "parts"
    if name == "generate" and library == "peft.peft_model":
        base: Any = module.get_base_model()
        return "" if not isinstance(base, GraphFSDPModule) else _called_by(base, getattr(base, name))
    return ""
