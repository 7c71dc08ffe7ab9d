"""Graphs as tests print them: nodes of the dialect by the names that passes give, and what computes with them.

A line per node of the dialect, in order. Values go by the names of parameters and buckets and never by those that torch
gives to inputs; a value that torch's operators have computed goes by the operator, seen through views. Between two
nodes of the dialect one line lists what reads a gathered parameter, and ``...`` stands for everything else. So what is
pinned is what this package does, and not how torch traces a model.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from graph_fsdp.compat import OpOverload, schema_arguments
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, record
from graph_fsdp.passes.ir.effects import is_view
from graph_fsdp.passes.ir.operands import argument
from graph_fsdp.report.report import GraphReport, GraphView

_WIDTH = 115
_NAMESPACES = ("graph_fsdp", "_c10d_functional")
_OTHERS = "..."
# Names of process groups, and where in a bucket its parameters lie, which the tests of the layout pin.
_LEFT_OUT = {"group", "group_name", "replicate_group", "offsets", "length", "numels", "param", "device", "unit"}
_SIGNS = {"gather_start": ">", "gather_wait": ".", "free": "x", "reduce_start": "-"}


def graph_text(graph: fx.Graph, *operators: str) -> str:
    """The nodes of the dialect, and calls of ``operators`` (names as ``mm``) with their arguments."""
    return "\n".join(map(_wrapped, _lines(graph, *operators)))


def _lines(graph: fx.Graph, *operators: str) -> list[str]:
    lines = [f"takes {_joined(given)}"] if (given := _given(graph)) else []
    run: list[str] = []
    for node in graph.nodes:
        if node.op == "output" or _is_ours(node):
            lines += [f"    {', '.join(run)}"] if run else []
            run = []
            lines.append(_returned(node) if node.op == "output" else _line(node))
        elif node.op not in ("placeholder", "get_attr") and not (_is_view(node) and _operator(node) not in operators):
            said = _said(node, operators)
            run += [said] if said != _OTHERS or run[-1:] != [_OTHERS] else []
    return lines


def stage_text(view: GraphView, *operators: str, stage: str = "free") -> str:
    return graph_text(view.stages[stage].graph, *operators)


def stage_diff(view: GraphView, stage: str) -> str:
    """What a pass changed, each change with the line before and after it."""
    names = list(view.stages)
    before = names[names.index(stage) - 1]
    texts = [_lines(view.stages[name].graph) for name in (before, stage)]
    lines = list(difflib.unified_diff(*texts, lineterm="", n=1))[2:]
    return "\n".join("@@" if line.startswith("@@") else line[0] + _wrapped(line[1:]) for line in lines)


def calls(view: GraphView, *operators: str, stage: str = "free") -> str:
    """Calls of these operators alone, a line each, of the dialect or not."""
    found = [node for node in view.stages[stage].graph.nodes if node.op == "call_function"]
    lines = (_line(n) if _is_ours(n) else _call(n) for n in found if _operator(n) in operators)
    return "\n".join(map(_wrapped, lines))


def sequence(view: GraphView, *operators: str) -> str:
    """The names of nodes of the dialect, and in brackets the operators of these names between them, in order."""
    words: list[str] = []
    for node in view.stages["free"].graph.nodes:
        if _is_ours(node):
            words.append(node.name)
        elif node.op == "call_function" and _operator(node) in operators:
            words.append(f"[{_operator(node)}]")
    text = " ".join(words).replace("] [", " ")
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def bucket_table(view: GraphView) -> str:
    """A line per bucket in the order of the graph: its kind, parameters, bytes. Their places count torch's nodes."""
    ends = ("", " kept")
    return "\n".join(
        f"{row.name} {row.kind} {len(row.parameters)} {row.nbytes:,}{ends[row.escapes]}" for row in view.buckets
    )


def bucket_tables(report: GraphReport) -> str:
    return f"forward\n{bucket_table(report.forward)}\nbackward\n{bucket_table(report.backward)}"


def events(report: GraphReport, *phases: str) -> str:
    """Per graph, the buckets in the order of what happens to them: > starts, . has arrived, x is freed, and - a
    reduction starts."""
    lines = []
    for phase in phases or ("forward", "backward"):
        graph = getattr(report, phase).stages["free"].graph
        records = [node.meta["fsdp"] for node in graph.nodes if "fsdp" in node.meta]
        found = [f"{_SIGNS[r.role.value]}{r.bucket}" for r in records if r.role.value in _SIGNS]
        lines.append(_wrapped(" ".join([f"{phase}:", *found])))
    return "\n".join(lines)


# Names of values


def label(node: fx.Node) -> str:
    """A parameter, a node of the dialect, or the operator that has computed the value."""
    while True:
        found = record(node)
        if node.target in (dialect.gather_param, dialect.reduce_grad):
            return str(argument(node, "param")) + (".grad" if node.target is dialect.reduce_grad else "")
        if found is not None and found.role in (Role.SHARD, Role.UNPACK):
            return found.params[0]
        if found is not None and found.role is Role.SHARD_GRAD and len(found.params) == 1:
            return f"{found.params[0]}.grad"
        if node.op == "placeholder":
            return _input(node)
        if _is_ours(node):
            return node.name
        if not _is_view(node):
            return _operator(node)
        node = node.all_input_nodes[0]


def _input(node: fx.Node) -> str:
    found = record(node)
    if found is None and node.name.startswith("shards_"):  # a slice of the storage, where graphs are whole
        return node.name
    if found is None or found.role is Role.TANGENT:
        return "input" if found is None else "tangent"
    return f"{found.role.value}({found.bucket})" if re.fullmatch(r"(kept|shard)_\d+", node.name) else node.name


def _given(graph: fx.Graph) -> list[str]:
    """Inputs that other graphs have made."""
    found = [n for n in graph.nodes if n.op == "placeholder" and record(n) is not None]
    return [label(n) for n in found if record(n).role not in (Role.SHARD, Role.TANGENT)]  # type: ignore[union-attr]


def _is_ours(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace in _NAMESPACES


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and bool(node.all_input_nodes) and is_view(node)


def _operator(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return node.target.name().partition("::")[2].partition(".")[0]
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


# Lines


def _line(node: fx.Node) -> str:
    named = not (node.target is dialect.free or node.target in (dialect.gather_param, dialect.reduce_grad))
    return f"{node.name} = {_call(node)}" if named else _call(node)


def _call(node: fx.Node) -> str:
    """The operands by their names, and of the other arguments those that have no default value."""
    if not isinstance(node.target, OpOverload):
        return f"{_operator(node)}({', '.join(map(_value, node.args))})"
    said = []
    for index, described in enumerate(schema_arguments(node.target)):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(described.name)
        if value is None or value == described.default_value or described.name in _LEFT_OUT:
            continue
        if described.name in ("shard", "grad", "grads"):
            said.append(_of_parameters(node, value))
        elif _is_tensors(value) or isinstance(value, torch.dtype) or not _is_ours(node):
            said.append(_value(value))
        else:
            said.append(f"{described.name}={_value(value)}")
    return f"{_operator(node)}({', '.join(said)})"


def _is_tensors(value: Any) -> bool:
    return isinstance(value, fx.Node) or (isinstance(value, (list, tuple)) and isinstance(value[0], fx.Node))


def _of_parameters(node: fx.Node, value: Any) -> str:
    """Operands with the parameters that they belong to: a gradient behind the name of its parameter."""
    if node.target is dialect.gather_param:
        return str(argument(node, "param"))
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    found = record(node)
    if node.target in (dialect.reduce_grad, dialect.accumulate_grad):
        params: tuple[str, ...] = (str(argument(node, "param")),)
    elif found is not None and len(found.params) == len(values) and node.target is not dialect.all_reduce_shard_start:
        params = found.params
    else:
        return _value(value)
    said = _joined(f"{param}: {label(v)}" for param, v in zip(params, values, strict=True))
    return f"[{said}]" if isinstance(value, (list, tuple)) else said


def _value(value: Any) -> str:
    if isinstance(value, fx.Node):
        return label(value)
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(v, fx.Node) for v in value):
            return f"[{_joined(map(label, value))}]"
        return f"[{', '.join(map(_value, value))}]"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def _said(node: fx.Node, operators: tuple[str, ...]) -> str:
    if _operator(node) in operators:
        return _call(node)
    touched = [source for source in node.all_input_nodes if _touches(source)]
    return f"{_operator(node)}({_joined(map(label, touched))})" if touched else _OTHERS


def _touches(node: fx.Node) -> bool:
    """Whether the value is memory of a parameter or of a node of the dialect."""
    while _is_view(node) and not _is_ours(node) and record(node) is None:
        node = node.all_input_nodes[0]
    found = record(node)
    return _is_ours(node) or (found is not None and found.role is not Role.TANGENT)


def _returned(node: fx.Node) -> str:
    names: list[str] = []
    for value in node.args[0] if isinstance(node.args[0], (list, tuple)) else (node.args[0],):  # type: ignore[union-attr]
        name = label(value) if isinstance(value, fx.Node) and _touches(value) else _OTHERS
        names += [name] if name != _OTHERS or names[-1:] != [_OTHERS] else []
    return f"return {_joined(names)}"


def _joined(names: Iterable[str]) -> str:
    """Names that follow each other share what they begin with: ``blocks.0.{up.weight, up.bias}``."""
    return ", ".join(_shared(list(names)))


def _shared(names: list[str]) -> Iterator[str]:
    while names:
        end = 1
        prefix = _unit(names[0])
        while prefix and end < len(names) and _unit(names[end]) == prefix:
            end += 1
        group, names = names[:end], names[end:]
        if len(group) == 1:
            yield group[0]
            continue
        common = prefix
        while len({name.removeprefix(common).partition(".")[0] for name in group}) == 1:
            common += group[0].removeprefix(common).partition(".")[0] + "."
        yield f"{common}{{{', '.join(name.removeprefix(common) for name in group)}}}"


def _unit(name: str) -> str:
    """What is in front of a parameter's last module; of names of other things nothing."""
    found = re.match(r"((?:\w+\.\d+|\w+)\.)", name)
    return found[1] if found else ""


def _wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    lines = textwrap.wrap(
        line.strip(),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)
