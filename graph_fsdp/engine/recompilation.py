"""A ``Cause`` says why a graph was captured: the first call, a failed guard, changed settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from graph_fsdp import compat
from graph_fsdp.passes.ir.settings import Settings

if TYPE_CHECKING:
    from graph_fsdp.engine.dynamo import Entry
    from graph_fsdp.report.report import CapturedGraph

CauseKind = (
    Literal["first", "guard", "settings", "inputs", "piece", "reset", "shared", "parameters", "python", "hooks"]
    | Literal["cast", "finalized", "divided", "forward"]
)

_INPUT = re.compile(r"(?<![\w.])(?:args\[(?P<index>\d+)\]|kwargs\[['\"](?P<name>\w+)['\"]\])")
_MODULE = re.compile(r"\._(?:modules|parameters|buffers)\[['\"](?P<name>[^'\"]+)['\"]\]")
_MAX_VALUE = 60  # characters of a value that is no tensor


@dataclass(frozen=True)
class GuardFailure:
    """Holds a failed guard. ``graph``: the number of the capture; None where it is none of this model's. ``guard``:
    what did not hold, with the model's own names of its inputs and modules. ``where``: the line that needed it."""

    graph: int | None
    guard: str
    where: str | None

    def __str__(self) -> str:
        of = f"of graph {self.graph} " if self.graph is not None else ""
        return f"a guard {of}failed: {self.guard}{f' ({self.where})' if self.where else ''}"


@dataclass(frozen=True)
class CaptureKey:
    """Keeps graphs apart before Dynamo looks at its guards. ``layout``: how a backend's inputs are sharded over
    devices, where it makes graphs of local views. ``hooks``: whether there are hooks on modules. ``cast``: the dtypes
    that the model was cast to since it was compiled. ``full_masks``: the attention masks that mask nothing, by name.
    ``forwards``: the classes that were given another forward, see ``Structure``."""

    settings: Settings
    entry: Entry
    layout: Any = None
    hooks: bool = False
    cast: str = ""
    full_masks: frozenset[str] = frozenset()
    forwards: frozenset[tuple[type, int]] = frozenset()


@dataclass(frozen=True)
class Cause:
    """Says why a graph was captured.

    ``kind`` is one of: "first" (the first call of the model or of one of its methods), "guard" (guards of earlier
    graphs failed: ``guards``, the graph that ran last first), "settings" (a method such as
    ``set_requires_gradient_sync`` has changed them), "inputs" (inputs are sharded otherwise, or an attention mask masks
    something where it did not), "piece" (what follows a graph break), "reset" (Dynamo's cache was emptied), "shared"
    (a piece that takes or gives what other pieces gather), "parameters" (what was traced before runs with other
    parameters), "cast" (parameters have another dtype), "python" (code outside of graphs reads a parameter), "hooks"
    (a module has a hook now, or none has any more), "finalized" (``finalize_backward`` reduces what is kept), "divided"
    (a pipeline runs a backward in two halves), "forward" (a class or the module that is called has
    another forward).
    ``compilation``: its name in torch's logs, "0/1".
    """

    kind: CauseKind
    text: str
    guards: tuple[GuardFailure, ...] = ()
    compilation: str | None = None
    key: CaptureKey | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.text


FIRST_CALL = Cause("first", "first call")


@dataclass(frozen=True)
class Call:
    """Holds a call of ``function`` with a module, as the user wrote it."""

    function: Callable[..., Any]
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def traces_of(graphs: Sequence[CapturedGraph], key: CaptureKey, alike: Cause | None = None) -> list[CapturedGraph]:
    """Return those of ``graphs`` that Dynamo has traced under this key. ``alike``: of that one's code."""
    found = [graph for graph in graphs if graph.cause.key == key and graph.cause.kind != "parameters"]
    return found if alike is None else [graph for graph in found if _code_of(graph.cause) == _code_of(alike)]


def _code_of(cause: Cause) -> str:
    """Return Dynamo's number of a piece of code, "0" of "0/1"."""
    return (cause.compilation or "").partition("/")[0]


def why_captured(earlier: Sequence[CapturedGraph], key: CaptureKey, call: Call | None, *, breaks: bool) -> Cause:
    """Return the cause of the capture under way, inside a Dynamo backend. ``earlier``: what the model has captured
    before. ``breaks``: whether a call may be traced in several pieces."""
    earlier = [capture for capture in earlier if capture.ran]
    compilation = compat.current_compilation()
    failed = compat.failed_guards()
    if failed:
        numbers = {c.cause.compilation: c.index for c in traces_of(earlier, key)}
        given = _arguments(call)
        guards = tuple(GuardFailure(numbers.get(n), _readable(guard, list(given)), where) for n, guard, where in failed)
        named = _inputs_named(" ".join(guard for _, guard, _ in failed), list(given))
        now = [f"{name} is {_described(value)} now" for name, value in given.items() if name in named]
        text = "; ".join([*map(str, guards), *now])
        return Cause("guard", text, guards, compilation, key)
    kind, text = _unguarded(earlier, key, breaks)
    return Cause(kind, text, (), compilation, key)


def why_run_again(first: Cause, names: Sequence[str]) -> Cause:
    """Return the cause of further programs of a graph captured for ``first``, with the parameters of these names."""
    text = f"code that was compiled for other parameters runs with {', '.join(map(repr, names))}"
    return replace(first, kind="parameters", text=text, guards=())


def _unguarded(earlier: Sequence[CapturedGraph], key: CaptureKey, breaks: bool) -> tuple[CauseKind, str]:
    of_method = [k for c in earlier if (k := c.cause.key) is not None and k.entry.suffix == key.entry.suffix]
    method = ".".join(filter(None, (key.entry.unit, key.entry.name)))
    if not of_method:
        return "first", "first call" if method == "forward" else f"first call of {method}"
    if key in of_method:
        if breaks:
            return "piece", "another piece of the model: what follows a graph break"
        return "reset", "Dynamo's cache was emptied (torch._dynamo.reset, or torch.compiler.reset)"
    last = of_method[-1]
    changed = []
    for name in (f.name for f in fields(Settings)):
        before, now = getattr(last.settings, name), getattr(key.settings, name)
        if before != now:
            plain = [sorted(value) if isinstance(value, frozenset) else value for value in (before, now)]
            changed.append(f"{name} from {plain[0]} to {plain[1]}")
    if changed:
        return "settings", f"settings changed: {', '.join(changed)}"
    if last.cast != key.cast:
        return "cast", f"the model was cast to {key.cast}"
    if last.hooks != key.hooks:
        return "hooks", f"hooks of modules were {'added' if key.hooks else 'removed'}"
    if last.forwards != key.forwards:
        set_now = key.forwards - last.forwards or last.forwards - key.forwards
        names = sorted({kind.__qualname__ for kind, _ in set_now})
        return "forward", f"another forward was set on {', '.join(names)}"
    if last.entry.function is not key.entry.function:
        return "forward", f"another function was set as {method}"
    if changed := sorted(last.full_masks ^ key.full_masks):
        says = "nothing" if changed[0] in key.full_masks else "something"
        return "inputs", f"{changed[0]} masks {says} now"
    return "inputs", "inputs are sharded over the devices in another way"


def _inputs_named(guards: str, names: Sequence[str]) -> set[str]:
    """Return the inputs, which have these ``names``, that Dynamo's words on guards speak of."""
    found = [(match["name"], match["index"]) for match in _INPUT.finditer(guards)]
    by_place = {names[int(index)] for _, index in found if index is not None and int(index) < len(names)}
    keys = {key for key in names if re.search(rf"['\"]{re.escape(key)}['\"], kwargs\b", guards)}  # there, or not
    return by_place | keys | {name for name, _ in found if name is not None}


def _readable(guard: str, names: Sequence[str]) -> str:
    """Return a guard with ``x`` for ``args[0]`` and ``self.layers.3`` for ``self._modules['layers']._modules['3']``."""

    def name(found: re.Match[str]) -> str:
        return found["name"] or (names[int(found["index"])] if int(found["index"]) < len(names) else found[0])

    return _MODULE.sub(r".\g<name>", _INPUT.sub(name, guard))


def _arguments(call: Call | None) -> dict[str, Any]:
    """Return what a function was given besides the module, by its own names: what is positional first, in order."""
    if call is None:
        return {}
    _, *parameters = inspect.signature(call.function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds]
    names += [f"args[{index}]" for index in range(len(names), len(call.args))]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (int, float, str, bool)) or value is None:
        return repr(value)[:_MAX_VALUE]
    return f"of {type(value).__name__}"
