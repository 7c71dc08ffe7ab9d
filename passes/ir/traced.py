"""An operator of ours is traced in place of each of these operators of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graph_fsdp import compat
from graph_fsdp.passes.ir import ctc, recurrent

TRACED: dict[compat.OpOverload[..., Any], Callable[..., Any]] = {**recurrent.TRACED, **ctc.TRACED}
