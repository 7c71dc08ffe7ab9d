"""An optimizer's step takes the time of its memory traffic: it computes little with each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import optim

from graph_fsdp.passes.analysis.hardware import Hardware


@dataclass(frozen=True)
class Traffic:
    """Says what an optimizer keeps and moves, in values per parameter: ``kept`` in its state, ``moved`` as reads and
    writes in a step (all are read, and all but the gradient written), ``temporaries`` allocated in a step, and
    ``over_link`` copied between the device and the CPU."""

    kept: int
    moved: int
    temporaries: int = 0
    over_link: int = 0


class Stepping(NamedTuple):
    """Says what steps a parameter: the optimizer's class, its name in ``OPTIMIZERS`` (None where that has none),
    and whether it steps in backward."""

    cls: str
    known_as: str | None
    in_backward: bool


# "foreach" runs kernels one after the other over all parameters, as torch.optim does with neither fused nor capturable:
# mul, lerp, mul, addcmul, sqrt, div, add, addcdiv; sqrt's results are no state. Of "on_cpu" gradients and parameters go
# to the CPU, and parameters back at the same time.
OPTIMIZERS: Mapping[str | None, Traffic] = {
    None: Traffic(0, 0),
    "sgd": Traffic(0, 3),
    "momentum": Traffic(1, 5),
    "adamw": Traffic(2, 7),
    "adamw_foreach": Traffic(2, 20, temporaries=1),
    "adamw_on_cpu": Traffic(0, 0, over_link=2),
}
_CLIPPING = 3  # gradients are read for their norm, read and written for the factor


def optimizer_seconds(
    optimizer: str | None, nbytes: int, hardware: Hardware, *, clips: bool = False, straggler: float = 1.0
) -> float:
    """Return the seconds of a step over ``nbytes`` of parameters, and of clipping their gradients by the norm."""
    traffic = OPTIMIZERS[optimizer]
    moved = traffic.moved + _CLIPPING * clips
    sustained = hardware.memory_bandwidth * hardware.memory_efficiency / straggler
    return moved * nbytes / sustained + traffic.over_link * nbytes / hardware.host.bandwidth


def known_as(cls: type[optim.Optimizer], group: Mapping[str, Any], on_cpu: bool = False) -> str | None:
    """Return the name in ``OPTIMIZERS`` of what a class does with a group; None where it has none."""
    fused = bool(group.get("fused") or group.get("capturable"))
    if cls in (optim.Adam, optim.AdamW) and not group["amsgrad"]:
        return "adamw_on_cpu" if on_cpu else "adamw" if fused else "adamw_foreach"
    if cls is optim.SGD and not on_cpu and (fused or not group["momentum"]):
        return "momentum" if group["momentum"] else "sgd"
    return None
