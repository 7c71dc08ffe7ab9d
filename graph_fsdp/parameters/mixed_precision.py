"""Modules may have precision policies of their own, and cast where they begin and end.

[Note: what a policy of its own means]
A module that ``mp_policy`` names is treated as one that FSDP2 shards by itself, ``fully_shard(module, mp_policy=…)``:
the policy holds for all parameters in it but those in a named module below; floating-point inputs of its forward are
cast to ``param_dtype`` (``cast_forward_inputs``) and outputs to ``output_dtype``. It does not become a unit. One policy
for all is that of the root and of every unit. Where modules are named, units cast their inputs to the ``param_dtype``
that holds for them, and outputs are cast only at named modules and the root.

A ``reduce_dtype`` of 8 bits (``QUANTIZED``) is what gradients are quantized to on their way to the ranks that shard;
sums are float32.

Casts below the root are forward hooks, which Dynamo traces. As FSDP2's, they run before a module's own hooks when it
begins, and after them when it ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.utils.hooks import RemovableHandle

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.parameters.inputs import cast_floats
from graph_fsdp.passes.ir.layout import QUANTIZED
from graph_fsdp.passes.ir.settings import check_signature
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.units import modules_on_path

PrecisionPolicies: TypeAlias = (
    MixedPrecisionPolicy
    | Mapping[type[nn.Module], MixedPrecisionPolicy]
    | Callable[[nn.Module], MixedPrecisionPolicy | None]
)
_ACCEPTED = (
    "pass one, a dict from module classes to policies, or a function that is given a module and returns its policy or "
    "None"
)


@dataclass(frozen=True)
class ModulePolicies:
    """Holds ``named``, module → the policy that the user gave it by name, and ``root``, the model's policy. ``of_all``:
    ``root`` was given for the model and all of its units."""

    model: nn.Module
    root: MixedPrecisionPolicy
    named: Mapping[nn.Module, MixedPrecisionPolicy]
    of_all: bool = False

    def of_module(self, name: str) -> MixedPrecisionPolicy:
        """Return the policy of the module with this name: its own, or that of the innermost named module around it."""
        found = [self.named[module] for module in modules_on_path(self.model, name) if module in self.named]
        return found[-1] if found else self.root

    def around(self, parameter: str) -> MixedPrecisionPolicy:
        """Return the policy of the module that the parameter of this name lies in."""
        return self.of_module(parameter.rpartition(".")[0])

    @property
    def quantizing(self) -> torch.dtype | None:
        """Return a type of 8 bits that a policy has gradients sent in, None where none has."""
        reduced_in = (policy.reduce_dtype for policy in (self.root, *self.named.values()))
        return next((dtype for dtype in reduced_in if dtype in QUANTIZED), None)

    def check_quantized(self, **unsupported: bool) -> None:
        """Refuse gradients of 8 bits with an option. ``unsupported``: option → is set."""
        for option, is_set in unsupported.items():
            if self.quantizing and is_set:
                raise UnsupportedError(
                    f"mp_policy: reduce_dtype={self.quantizing} quantizes gradients, which is not available with "
                    f"{option}; leave one out"
                )

    def check_sharded(self, spec: ModelSpec) -> None:
        """Refuse gradients of 8 bits that only replicas would exchange."""
        for p in spec.parameters.values():
            if p.sent_as and p.trainable and p.world_size == 1 and p.mesh.replicas > 1:
                raise UnsupportedError(
                    f"mp_policy: reduce_dtype={p.sent_as} quantizes gradients on their way to the ranks that shard, "
                    f"and parameter {p.name!r} is not sharded; over replicas gradients are reduced in float32: leave "
                    "reduce_dtype out"
                )

    def dtypes_of(self, p: nn.Parameter, names: Iterable[str]) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
        """Return in which dtypes the parameter with these names is gathered, its gradient summed, and quantized (None:
        not).

        Raises:
            TypeError, ValueError: see ``dtypes_under``; its modules want different dtypes; it has a ``grad_dtype``.
        """
        found = {name: self.around(name) for name in names}
        (first, policy), *others = found.items()
        dtypes = dtypes_under(policy, p, first)
        if p.requires_grad and (grad_dtype := getattr(p, "grad_dtype", p.dtype)) is not p.dtype:
            raise ValueError(
                f"parameter {first!r} is {p.dtype} and its grad_dtype is {grad_dtype}; graph_fsdp gives gradients the "
                "dtype of their parameters: leave grad_dtype as it is; mp_policy's reduce_dtype is that of reductions"
            )
        for name, other in others:
            if dtypes_under(other, p, name) != dtypes:
                raise ValueError(
                    f"mp_policy gives one parameter two policies: it is {first!r} with {policy} and {name!r} with "
                    f"{other}; give both modules the same param_dtype and reduce_dtype"
                )
        return dtypes

    def casts_of(self, unit_name: str) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Return the dtypes, or None, to which inputs and outputs of a unit's (or the model's, "") forward are cast."""
        policy = self.of_module(unit_name)
        outputs = not unit_name or self.of_all or self.model.get_submodule(unit_name) in self.named
        return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype if outputs else None

    def install(self, unit_names: Iterable[str]) -> None:
        """Make named modules and units cast, except the model, whose casts are those of the compiled forward.

        Equal modules have equal hooks, down to their numbers, which traced code reads: Dynamo traces one of them.
        """
        names = {self.model.get_submodule(name): name for name in unit_names}
        names |= {module: name for name, module in self.model.named_modules() if module in self.named}
        number = RemovableHandle.next_id
        for module, name in names.items():
            if module is self.model:
                continue
            RemovableHandle.next_id = number
            inputs, outputs = self.casts_of(name)
            known = cast_hooks(module)  # of the copy of a compiled model
            if inputs is not None and not known:
                module.register_forward_pre_hook(_casts(_cast_inputs, inputs), prepend=True, with_kwargs=True)
            if outputs is not None and not known:
                module.register_forward_hook(_casts(_cast_outputs, outputs))
        RemovableHandle.next_id = number + 2


@functools.cache
def _casts(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    return functools.partial(function, dtype)


def cast_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks of ``module`` that are casts of ours. Equal ones are one object."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    ours = (_cast_inputs, _cast_outputs)
    return [hook for hook in hooks if isinstance(hook, functools.partial) and hook.func in ours]


def find_policies(model: nn.Module, mp_policy: PrecisionPolicies) -> ModulePolicies:
    """Find the policy of each module.

    Raises:
        TypeError, ValueError: ``mp_policy`` is not one of these, or changes nothing.
    """
    if isinstance(mp_policy, MixedPrecisionPolicy):
        _check_policy(mp_policy)
        return ModulePolicies(model, mp_policy, {}, of_all=True)
    modules = list(model.modules())
    if isinstance(mp_policy, Mapping):
        _check_mapping(modules, mp_policy)
        # Of a module's class, or of the nearest of its base classes.
        given = {m: next((mp_policy[cls] for cls in type(m).__mro__ if cls in mp_policy), None) for m in modules}
    elif callable(mp_policy) and not isinstance(mp_policy, (type, nn.Module)):
        check_signature("mp_policy", mp_policy, "pass a function of a module that returns its policy or None", "module")
        given = {module: mp_policy(module) for module in modules}
    else:
        kind = "a torch.distributed.fsdp.MixedPrecisionPolicy"
        raise TypeError(f"mp_policy must be {kind}, got {mp_policy!r}; {_hint(mp_policy)}")
    named: dict[nn.Module, Any] = {module: policy for module, policy in given.items() if policy is not None}
    for module, policy in named.items():
        if not isinstance(policy, MixedPrecisionPolicy):
            raise TypeError(f"mp_policy gives {policy!r} for a {type(module).__name__}; {_hint(policy)}")
        _check_policy(policy)
    if not named:
        raise ValueError("mp_policy gives no module of the model a policy; return one for some, or leave mp_policy out")
    return ModulePolicies(model, named.get(model, MixedPrecisionPolicy()), named)


def _check_policy(policy: MixedPrecisionPolicy) -> None:
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if not isinstance(dtype, torch.dtype | None):
            raise TypeError(f"mp_policy has {name}={dtype!r}; pass a torch.dtype, such as torch.bfloat16, or None")
        if name != "reduce_dtype" and dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"mp_policy has {name}={dtype}; pass a floating-point type, or None to leave dtypes alone")
    if not isinstance(policy.cast_forward_inputs, bool):
        raise TypeError(f"mp_policy has cast_forward_inputs={policy.cast_forward_inputs!r}; pass True or False")
    dtype = policy.reduce_dtype
    if dtype is None or dtype in QUANTIZED or (dtype.is_floating_point and dtype.itemsize > 1):
        return
    raise ValueError(
        f"mp_policy has reduce_dtype={dtype}, in which gradients cannot be reduced; pass a floating-point type of 16 "
        f"bits or more, or, to have them quantized, {', '.join(map(str, QUANTIZED))}"
    )


def dtypes_under(
    policy: MixedPrecisionPolicy, p: nn.Parameter, name: str
) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
    """Return ``param_dtype`` and ``reduce_dtype`` of one parameter, as FSDP2 of the installed torch takes the policy,
    and the type that its gradient is quantized to; it is then summed in float32. Raises TypeError or ValueError if
    ``param_dtype_override_fn`` gives no dtype, or another than the two it may."""
    if not p.is_floating_point() or getattr(p, "quant_state", None) is not None:  # bitsandbytes' packed 4-bit values
        return p.dtype, p.dtype, None
    param_dtype = policy.param_dtype or p.dtype
    override = getattr(policy, "param_dtype_override_fn", None)
    if override is not None and (asked := override(p)) is not None:
        allowed = f"return None, {p.dtype} (its own) or {param_dtype} (param_dtype)"
        if not isinstance(asked, torch.dtype):
            raise TypeError(f"mp_policy: param_dtype_override_fn gives {asked!r} for {name!r}; {allowed}")
        if asked not in (p.dtype, param_dtype):
            raise ValueError(f"mp_policy: param_dtype_override_fn gives {asked} for {name!r}; {allowed}")
        param_dtype = asked
    if policy.reduce_dtype in QUANTIZED:
        return param_dtype, torch.float32, policy.reduce_dtype
    return param_dtype, policy.reduce_dtype or (p.dtype if compat.REDUCES_IN_OWN_DTYPE else param_dtype), None


def _check_mapping(modules: list[nn.Module], mp_policy: Mapping[Any, Any]) -> None:
    for cls in mp_policy:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"mp_policy has the key {cls!r}, which is not a module class; {_ACCEPTED}")
        if not any(isinstance(module, cls) for module in modules):
            raise ValueError(f"mp_policy has a policy for {cls.__name__}, and the model has no module of that class")


def _hint(value: Any) -> str:
    if not isinstance(value, MixedPrecision):
        return _ACCEPTED
    return (
        "that is FSDP1's class: pass torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=…, reduce_dtype=…), and "
        "cast buffers, for which it has buffer_dtype, before graph_fsdp.compile"
    )


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast_floats((args, kwargs), dtype)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast_floats(output, dtype)
