"""A model's ``Structure`` notices changes to its modules, parameters and hooks.

A parameter that comes after ``graph_fsdp.compile`` would be trained on each rank by itself. So each call looks whether
modules were exchanged or parameters added, and refuses those that would train. A look at a thousand modules takes a
tenth of a millisecond; Dynamo's guards on their hooks would take longer. Graphs of a model without hooks are traced
without such guards, and used as long as it has none. Nor has Dynamo guards on what forward a class has.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

from torch import nn

from graph_fsdp.errors import ParameterChangedError

_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "full backward pre-hook",
    "_backward_hooks": "full backward hook",
}
OF_BACKWARD = ("full backward pre-hook", "full backward hook")
_MAX_NAMES = 4  # in a message


class Structure:
    """Finds what was added to one model, whose parameters ``storage`` has sharded. The model keeps it, and not the
    other way round."""

    def __init__(self, model: nn.Module, storage: Any) -> None:
        self._weak, self._storage = weakref.ref(model), storage
        self._known = {(weakref.ref(module), leaf) for _, module, leaf, _ in _parameters(model)}
        self._frozen: list[tuple[str, nn.Parameter]] = []  # that came later
        self._forwards_of: dict[type, list[Any]] = {}  # the first is that of ``compile``
        self._look()

    def check(self) -> None:
        """Check for new parameters, before each call of the model or of one of its units.

        Raises:
            ParameterChangedError: the model has a parameter that would be trained and that ``compile`` has not seen, or
                one that it has under a new name.
        """
        if self._now() != self._seen or any(p.requires_grad for _, p in self._frozen):
            self._check_new()
            self._look()
        elif any(map(operator.is_not, self._forwards_now(), self._forwards)):
            self._look_at_forwards()

    @property
    def has_hooks(self) -> bool:
        """Say whether modules within the model have hooks. Those on the model itself run outside of its graphs."""
        return any(self._hooks)

    def hooks(self, *kinds: str) -> list[str]:
        """Describe the hooks on modules within the model; those of ``kinds`` (``"full backward hook"``), or all."""
        return [
            f"a {kind} of module {name!r}"
            for name, module in self._model.named_modules()
            for attribute, kind in _HOOKS.items()
            if module is not self._model and getattr(module, attribute) and kind in (kinds or _HOOKS.values())
        ]

    @property
    def _model(self) -> nn.Module:
        model = self._weak()
        assert model is not None, "it has this"
        return model

    def drop_gradients(self) -> bool:
        """Set the gradients of all parameters to None, without a walk through all modules; return False, and do
        nothing, where modules were exchanged or parameters added since the last ``check``."""
        if self._now() != self._seen:
            return False
        for parameters in self._parameter_dicts:
            for p in parameters.values():
                if p is not None and p.grad is not None:
                    p.grad = None
        return True

    def take_late(self, other: Structure) -> None:
        """Take for late what was that in ``other``, of the model that this one's is a copy of."""
        late = {name for name, _ in other._frozen}
        known = _parameters(self._model)
        self._known -= {(weakref.ref(module), leaf) for name, module, leaf, _ in known if name in late}
        self._frozen = [(name, p) for name, _, _, p in _parameters(self._model) if name in late]

    # --- what is looked at

    def _look(self) -> None:
        modules = list(self._model.modules())
        self._module_dicts = [module._modules for module in modules]
        self._parameter_dicts = [module._parameters for module in modules]
        self._hooks = [getattr(module, name) for module in modules[1:] for name in _HOOKS]
        self._seen = self._now()
        kinds = dict.fromkeys(base for kind in dict.fromkeys(map(type, modules)) for base in kind.__mro__)
        self._class_dicts = {kind: vars(kind) for kind in kinds}
        self._look_at_forwards()

    def _look_at_forwards(self) -> None:
        """Know classes with another forward than at first: each of their forwards has a number."""
        self._forwards = self._forwards_now()
        changed = set()
        for kind, forward in zip(self._class_dicts, self._forwards, strict=True):
            known = self._forwards_of.setdefault(kind, [forward])
            if not any(other is forward for other in known):
                known.append(forward)
            if forward is not known[0]:
                changed.add((kind, next(i for i, other in enumerate(known) if other is forward)))
        self.forwards = frozenset(changed)

    def _forwards_now(self) -> list[Any]:
        """Return what each class of the model, and each class above it, has in itself for a forward."""
        return [own.get("forward") for own in self._class_dicts.values()]

    def _now(self) -> tuple[list[nn.Module | None], int]:
        """Return the children of all modules, and the number of parameters under all their names. ``Storage.refresh``
        sees whether those are other ones."""
        children = chain.from_iterable(map(dict.values, self._module_dicts))
        registered = chain.from_iterable(map(dict.values, self._parameter_dicts))
        return list(children), sum(map(operator.is_not, registered, repeat(None)))

    # --- what was added

    def _check_new(self) -> None:
        sharded = {id(p.registered) for p in self._storage.parameters.values()}
        modules = ((module(), leaf) for module, leaf in self._known)
        known = {id(module._parameters.get(leaf)) for module, leaf in modules if module is not None}
        new = [
            (name, p)
            for name, module, leaf, p in _parameters(self._model)
            if (weakref.ref(module), leaf) not in self._known
        ]
        tied = [name for name, p in new if id(p) in sharded]
        if tied:
            raise ParameterChangedError(
                f"{self._named(tied)} put into the model after graph_fsdp.compile, which has sharded the same "
                "parameter in other modules: tie parameters, and exchange modules that share them, before compile"
            )
        frozen = [(name, p) for name, p in new if id(p) not in known]
        trained = [name for name, p in frozen if p.requires_grad]
        if trained:
            raise ParameterChangedError(
                f"{self._named(trained)} put into the model after graph_fsdp.compile, which has not sharded "
                "what was not there: each rank would train values of its own. Exchange modules and add layers or "
                "adapters before compile, and make the optimizer after it; what is not to be trained may come later, "
                "with requires_grad_(False)"
            )
        self._frozen = frozen

    def _named(self, names: list[str]) -> str:
        owner = names[0].rpartition(".")[0]
        kind = type(self._model.get_submodule(owner)).__name__
        where = f" of module {owner!r} ({kind})" if owner else " of the model itself"
        listed = ", ".join(map(repr, names[:_MAX_NAMES]))
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        if len(names) == 1:
            return f"parameter {listed}{where} was"
        return f"parameters {listed}{more} (the first{where}) were"


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield full name, module, name in the module and parameter, once for each module that has it."""
    for path, module in model.named_modules():
        for leaf, p in module._parameters.items():
            if p is not None:
                yield f"{path}.{leaf}" if path else leaf, module, leaf, p


_OF_NONE = nn.Identity()
NO_STRUCTURE = Structure(_OF_NONE, None)  # of a model that is gone, one of whose units is still called
