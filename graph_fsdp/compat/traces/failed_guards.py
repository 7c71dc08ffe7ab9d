"""Find out why Dynamo traces again: which guards of earlier graphs have failed."""

from __future__ import annotations

import re

from torch._dynamo import utils as dynamo_utils
from torch._guards import CompileContext

_REASON = re.compile(r"(?P<compilation>\S+): (?P<guard>.*)", re.DOTALL)
_WHERE = re.compile(r"(?P<file>[^\s#]+\.py):(?P<line>\d+) in (?P<function>\S+)")


def current_compilation() -> str | None:
    """Return the name of the compilation that is under way in torch's logs, "0/1"; None where there is none."""
    found = CompileContext.current_compile_id()
    return None if found is None else str(found)


def failed_guards() -> list[tuple[str, str, str | None]]:
    """Return, in a Dynamo backend, which guards of earlier graphs of the same code failed, the graph that ran last
    first: the graph's compilation, as torch's logs name it ("0/1"); what did not hold, in Dynamo's words; and the line
    that the guard is due to, if Dynamo says it. Empty at the first compilation of a piece of code, and where torch does
    not say."""
    metrics = getattr(dynamo_utils.get_metrics_context(), "_metrics", {})
    first = metrics.get("recompile_reason")
    if not first:
        return []
    # The other graphs' reasons follow the first in the list of their code object.
    for reasons in dynamo_utils.guard_failures.values():
        if first in reasons:
            last = len(reasons) - 1 - reasons[::-1].index(first)
            return list(map(_parsed, reasons[last:]))
    return [_parsed(first)]


def _parsed(reason: str) -> tuple[str, str, str | None]:
    found = _REASON.match(reason)
    compilation, text = (found["compilation"], found["guard"]) if found else ("", reason)
    guard, _, comment = text.partition("  #")  # 2.13 adds the user's stack in further lines
    where = _WHERE.search(comment.split("\n", 1)[0])
    return compilation, guard.strip(), where[0] if where else None
