"""Write functions of Python as texts: their code, and all that it reads besides its arguments.

Dynamo's graph does not show what the policy of a checkpoint decides, as AOTAutograd runs it. Policies are functions of
the user: two that have the same text decide alike.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from graph_fsdp import compat
from graph_fsdp.passes.ir.portable import Names
from graph_fsdp.programs.plain import Unknown, collection, plain

# By these a function reads what its code does not name.
_HIDING = frozenset({"__import__", "eval", "exec", "globals"})
# Modules whose functions and classes are the same in all processes that have the same releases of torch and Python.
_KNOWN = ("torch", "builtins", "collections", "enum", "functools", "itertools", "math", "operator", "_operator")


def described(value: Any, names: Names, around: tuple[FunctionType, ...] = ()) -> str:
    """Return a function, or a value that one reads, as text. ``around``: the functions that read it.

    Raises:
        Unknown: the function reads something that cannot be written down, such as an object of the user's class.
    """
    if isinstance(value, FunctionType) and value in around:
        return f"function {around.index(value)} of those around"
    if isinstance(value, functools.partial):
        return f"partial {described((value.func, value.args, value.keywords), names, around)}"
    if isinstance(value, ModuleType):
        if value.__name__.partition(".")[0] in _KNOWN:
            return f"module {value.__name__}"
        raise Unknown(f"the module {value.__name__}")
    if isinstance(value, compat.OpOverload) or compat.namespace_of(value) is not None:
        return str(value)
    if isinstance(value, compat.HigherOrderOperator):
        return f"higher order {value.name()}"
    name = compat.name_of_function(value) if callable(value) else None
    package = name.partition(".")[0] if name else ""
    if name and package in _KNOWN and (package != "torch" or compat.is_torchs(value)):
        return name
    if isinstance(value, FunctionType):
        return _function(value, names, (*around, value))
    if isinstance(value, (dict, frozenset, list, set, tuple)):
        return collection(value, lambda item: described(item, names, around))
    return plain(value, names)


def _function(function: FunctionType, names: Names, around: tuple[FunctionType, ...]) -> str:
    codes = list(_codes(function.__code__))
    read = {name for code in codes for name in code.co_names}
    imported = {one.argval for code in codes for one in dis.get_instructions(code) if one.opname == "IMPORT_NAME"}
    unknown = (_HIDING & read) | {name for name in imported if name.partition(".")[0] not in _KNOWN}
    if unknown:
        raise Unknown(f"{function.__qualname__}, which reads by {min(unknown)} what its code does not name")
    parts = {
        "code": [_code(code) for code in codes],
        "globals": {name: function.__globals__[name] for name in sorted(read & function.__globals__.keys())},
        "around": dict(zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True)),
        "defaults": (function.__defaults__, function.__kwdefaults__),
        "attributes": vars(function),
    }
    return f"function {described(parts, names, around)}"


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _code(code: CodeType) -> tuple[Any, ...]:
    constants = tuple(None if isinstance(constant, CodeType) else constant for constant in code.co_consts)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    variables = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_code, getattr(code, "co_exceptiontable", b""), constants, counts, variables


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name without a value yet
        return None
