"""A key says all that the programs of a graph depend on, as texts by ingredient.

Dynamo's graph is one of them: Dynamo runs in each start, and its guards stand. So neither the model's code nor its
configuration is an ingredient, but what they came to. Whatever else AOTAutograd, the backend's decompositions and
passes, or the passes of this package read is another ingredient; what cannot be written down is ``Unknown``, and the
graph is compiled as ever.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from graph_fsdp import compat
from graph_fsdp.passes import GraphPass, PassContext
from graph_fsdp.passes.ir.canonical_form import NotDescribed, describe_value, digest
from graph_fsdp.passes.ir.portable import NAMESPACES, Names, NotPortable, class_name
from graph_fsdp.passes.ir.spec import MeshSpec, ModelSpec
from graph_fsdp.programs.functions import described
from graph_fsdp.programs.plain import Unknown, is_own, plain

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine

FORMAT = 3  # of the files
_NUMBERED = re.compile(r"graph_fsdp_forward_\d+")  # a function of this process (engine/dynamo.py)
_OF_PYTHON = ("_operator.", "operator.", "math.", "builtins.")
_TRACED_IN = ("Autograd", "Autocast", "CompositeImplicit")  # dispatch keys whose functions a trace sees through


def names_of(spec: ModelSpec, device: torch.device) -> Names:
    """Return what the process groups of a model are for, and its device."""
    groups = {"reshard": spec.reshard_group, "reduce": spec.own_reduce_group}
    for mesh in (spec.mesh, *spec.own_meshes):
        groups |= {f"shard {mesh.name}": mesh.group, f"replicate {mesh.name}": mesh.replicate_group}
    return Names({what: name for what, name in groups.items() if name}, device)


def key_of(
    engine: Engine, context: PassContext, module: fx.GraphModule, inputs: list[Any], suffix: str, names: Names
) -> dict[str, str]:
    """Return the ingredients of a graph of Dynamo's, with gathers in it, and its fake ``inputs``.

    Raises:
        Unknown: something that the programs depend on cannot be written down.
    """
    if context.inputs.extensions or context.inputs.as_used:
        raise Unknown("parameters with tensor extensions, or DTensors of tensor parallelism")
    if compat.saved_tensors_are_hooked():
        raise Unknown("torch.autograd.graph.saved_tensors_hooks")
    model = _neutral(context.model, names)
    options = (engine.reshard_after_forward, engine.whole, engine.cuda_graphs is not None, suffix)
    return {
        "format": str(FORMAT),
        "graph": digest(graph_lines(module, names)),
        "inputs": digest(_input_lines(module, inputs, names)),
        "model": digest([plain(model, names)]),
        "options": plain(options, names),
        "settings": plain(context.settings, names),
        "passes": digest(_pass_line(p, names) for p in engine.pipeline),
        "cost": digest([_cost(context, names)]),
        "versions": versions(),
        "backend": digest(_backend_lines(engine, names)),
        "modes": _modes(),
        "device": _device(engine.storage.device),
    }


# Dynamo's graph


def graph_lines(module: fx.GraphModule, names: Names) -> Iterator[str]:
    known: dict[fx.Node, str] = {}
    groups = {name: f"group {what}" for what, name in names.groups.items()}
    for node in module.graph.nodes:
        known[node] = f"%{node.name}"
        if node.op == "get_attr":
            inner = dict(module.named_modules()).get(str(node.target))
            if not isinstance(inner, fx.GraphModule):
                raise Unknown(f"the constant {node.target}")
            yield f"%{node.name} = graph {_circumstances(inner, names)}"
            yield from (f"  {line}" for line in graph_lines(inner, names))
            continue
        target = _called(node)
        args = node.args
        if isinstance(node.target, compat.OpOverload) and node.target.namespace == "graph_fsdp":
            args = tuple(groups.get(a, a) if isinstance(a, str) else a for a in args)
        said = plain((args, dict(node.kwargs)), names, known)
        yield f"%{node.name} = {node.op} {target} {said} {_origin(node, names)}"


def _called(node: fx.Node) -> str:
    if node.op in ("placeholder", "output", "call_method"):
        return str(node.target)
    if node.op != "call_function":
        raise Unknown(f"a {node.op} of {node.target}")
    target: Any = node.target
    if isinstance(target, compat.OpOverload):
        if target.namespace not in NAMESPACES:
            raise Unknown(f"the operator {target}, which torch has not registered")
        return str(target)
    if isinstance(target, compat.HigherOrderOperator):
        return f"higher order {target.name()}"
    if compat.namespace_of(target) not in (None, *NAMESPACES):
        raise Unknown(f"the operator {target}, which torch has not registered")
    name = compat.name_of_function(target)
    if target is getattr:
        _, attribute, *_ = node.args
        if not compat.is_tensors(str(attribute)):
            raise Unknown(f"the attribute {attribute}, which is not one of torch.Tensor's own")
    if name is None or not (name.startswith("torch.") or name.startswith(_OF_PYTHON)):
        raise Unknown(f"a call of {name or target}")
    if not compat.is_torchs(target):
        raise Unknown(f"a call of {name}, which is not torch's")
    return name


def _circumstances(inner: fx.GraphModule, names: Names) -> str:
    """Say what there is to a graph within Dynamo's besides its nodes: what makes the contexts of a checkpoint."""
    try:
        return described(inner.meta, names)
    except Unknown as reason:
        raise Unknown(f"{reason}, with which a checkpoint or another function of torch is called") from None


def _origin(node: fx.Node, names: Names) -> str:
    """Say of which modules and lines a node is, which passes and reports read."""
    stack = node.meta.get("nn_module_stack") or {}
    modules = [f"{path} {class_name(kind)}" for path, kind in stack.values()]
    known = plain({k: node.meta[k] for k in ("custom", "recompute", "ac_graph_id") if k in node.meta}, names)
    return f"{modules} {known} {_NUMBERED.sub('', node.meta.get('stack_trace') or '')!r}"


def _input_lines(module: fx.GraphModule, inputs: list[Any], names: Names) -> Iterator[str]:
    memory: dict[int, int] = {}
    for given, node in zip(inputs, module.graph.find_nodes(op="placeholder"), strict=True):
        value = node.meta.get("example_value")
        if not isinstance(given, torch.Tensor) or type(given) not in (torch.Tensor, nn.Parameter, type(value)):
            raise Unknown(f"an input is a {type(given).__name__}")
        try:
            described = describe_value(value, storage=True)
        except NotDescribed as reason:
            raise Unknown(f"an input is {reason}") from None
        number = memory.setdefault(compat.storage_id(value), len(memory))
        yield plain((described, number, value.is_leaf, isinstance(given, nn.Parameter)), names)


# The model, its passes and what they read


def _neutral(spec: ModelSpec, names: Names) -> ModelSpec:
    """Return a spec with process groups called by what they are for."""
    of = {name: what for what, name in names.groups.items()}

    def mesh(given: MeshSpec) -> MeshSpec:
        group, replicate_group = (of.get(name, "") for name in (given.group, given.replicate_group))
        return dataclasses.replace(given, group=group, replicate_group=replicate_group)

    def parameters(given: Mapping[str, Any]) -> dict[str, Any]:
        return {name: dataclasses.replace(p, mesh=mesh(p.mesh)) for name, p in given.items()}

    known = {**parameters(spec.parameters), **parameters(spec.payloads)}
    buckets = tuple(dataclasses.replace(b, parameters=tuple(known[p.name] for p in b.parameters)) for b in spec.buckets)
    return dataclasses.replace(
        spec,
        parameters=parameters(spec.parameters),
        payloads=parameters(spec.payloads),
        buckets=buckets,
        mesh=mesh(spec.mesh),
        reshard_group=of.get(spec.reshard_group, ""),
        own_reduce_group=of.get(spec.own_reduce_group, ""),
    )


def _pass_line(p: GraphPass, names: Names) -> str:
    if not is_own(type(p)):
        raise Unknown(f"the pass {p}, which is not of this package")
    return f"{type(p).__module__}.{type(p).__qualname__} {plain(vars(p), names)}"


def _cost(context: PassContext, names: Names) -> str:
    cost = context.cost
    if cost is None:
        return "none"
    if not is_own(type(cost)):
        raise Unknown(f"a cost model of {type(cost).__qualname__}")
    try:
        groups = sorted((names.of_group(name), shape.size, shape.stride) for name, shape in cost.groups.items())
    except NotPortable as reason:
        raise Unknown(str(reason)) from None
    return plain((cost.hardware, groups, cost.measured, cost.fused, cost.combining), names)


# The software, its settings and the machine


@functools.cache
def versions() -> str:
    """Return the versions of what makes graphs, this package's by its source."""
    libraries = [f"{name} {metadata.version(name)}" for name in ("networkx", "sympy")]
    torchs = f"torch {torch.__version__} {torch.version.git_version}"
    return "; ".join([torchs, f"Python {platform.python_version()}", *libraries, f"graph_fsdp {own_source()}"])


def own_source() -> str:
    """Return a digest of this package's source. Raises Unknown where that is not in files, as in an archive."""
    found = hashlib.sha256()
    for package in ("graph_fsdp", "graph_fsdp.passes", "graph_fsdp.runtime"):
        folder = Path(str(sys.modules[package].__path__[0]))
        files = sorted(folder.rglob("*.py"))
        if not files:
            raise Unknown(f"the source of {package}, of which {folder} has no file")
        for path in files:
            found.update(f"{package}/{path.relative_to(folder).as_posix()}\n".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def _backend_lines(engine: Engine, names: Names) -> Iterator[str]:
    backend = engine.backend
    if not is_own(type(backend)):
        raise Unknown(f"the backend {backend.name!r}, which is not of this package")
    yield backend.name
    yield plain(compat.aot_autograd_settings(), names)
    if backend.name == "inductor":
        yield plain(compat.inductor_settings(), names)
    table: Mapping[Any, Any] = backend.decompositions() or {}
    for target, function in table.items():
        if getattr(target, "namespace", "") not in NAMESPACES:  # such an operator is in no graph with a key
            continue
        if not compat.is_torchs(getattr(function, "func", function)):
            raise Unknown(f"a decomposition of {target} that is not torch's")
    replaced = compat.replaced_operators()
    if found := [name for name in replaced if name.rpartition("/")[2].startswith(_TRACED_IN)]:
        raise Unknown(f"another implementation of {found[0]}")
    if found := compat.replaced_methods():
        raise Unknown(f"torch.Tensor.{found[0]}, which is not torch's")
    yield plain(sorted(replaced), names)


def _modes() -> str:
    """Return what is set in this process and thread that a trace reads."""
    paths = torch.backends.opt_einsum
    autocast = [
        (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))
        for kind in ("cpu", "cuda", "xpu")
        if torch.is_autocast_enabled(kind)
    ]
    return repr(
        {
            "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "autocast": (autocast, torch.is_autocast_cache_enabled()),
            "deterministic": (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                getattr(torch.utils.deterministic, "fill_uninitialized_memory", None),
            ),
            "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            "defaults": (str(torch.get_default_dtype()), torch.get_default_device().type),
            "precision": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
            "attention": (compat.attention_backends(), torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()),
            "einsum": (getattr(paths.get_opt_einsum(), "__version__", None), paths.enabled, paths.strategy),
            "libraries": (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled),
        }
    )


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()} {platform.machine()}"
    library: Any = getattr(torch, device.type, None)
    name = getattr(library, "get_device_name", None)
    if name is None:
        raise Unknown(f"a device of type {device.type}, which has no name")
    capability = getattr(library, "get_device_capability", lambda _: "")(device)
    return f"{device.type} {name(device)} {capability}"
