"""A record is what a monitor reports: as a line, as numbers by name, and as OpenMetrics text."""

from __future__ import annotations

import math
from dataclasses import dataclass

PREFIX = "graph_fsdp"
STRAGGLES = 1.1  # a rank that computes so many times longer than the median one is worth a colour

# Number → its type in OpenMetrics, its unit, and what it is.
METRICS = {
    "steps": ("counter", "", "Steps of an optimizer that were reported."),
    "step_seconds": ("gauge", "seconds", "Mean time of a step."),
    "tokens_per_second": ("gauge", "", "Tokens per second of a rank."),
    "exposed_seconds": ("gauge", "seconds", "Time for which the last step waited for collectives."),
    "predicted_exposed_seconds": ("gauge", "seconds", "The same, as the schedule's clock predicts it."),
    "peak_bytes": ("gauge", "bytes", "Most memory that was held, on the rank that held most."),
    "gradient_norm": ("gauge", "", "2-norm of all gradients in the last step."),
    "straggler_factor": ("gauge", "", "Time of the slowest rank without waits, by that of the median one."),
    "straggler_rank": ("gauge", "", "The slowest rank."),
    "recompilations": ("counter", "", "Graphs that were captured again."),
}


@dataclass(frozen=True)
class MonitorRecord:
    """Holds what :func:`graph_fsdp.monitor` reports of some steps. What is not known is None.

    step: the last of them, counted from 1 since the monitor was made. steps: how many they are.
    step_seconds: mean seconds of a step, without those in which a graph was captured if there are others.
    tokens_per_second: of a rank, the mean of the ranks that were compared.
    exposed_seconds: for which the last step waited for collectives, on this rank. predicted_exposed_seconds: as the
    schedule's clock predicts it.
    peak_bytes: largest of the ranks that were compared: what torch's allocator had allocated at most, on the CPU the
    process's resident memory.
    gradient_norm: 2-norm of all gradients in the last step; before clipping by ``model.clip_grad_norm_``.
    straggler_factor: seconds of the last step without waits on the rank on which they are most, ``straggler_rank``, by
    those of the median rank.
    recompilations: graphs captured again since the monitor was made; ``causes``: why, those of these steps.
    """

    step: int
    steps: int
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    exposed_seconds: float | None = None
    predicted_exposed_seconds: float | None = None
    peak_bytes: int | None = None
    gradient_norm: float | None = None
    straggler_factor: float | None = None
    straggler_rank: int | None = None
    recompilations: int = 0
    causes: tuple[str, ...] = ()

    def numbers(self) -> dict[str, float]:
        """Return what is known as numbers by name, with ``step``."""
        names = ("step", *(name for name in METRICS if name != "steps"))
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def parts(self) -> list[tuple[str, str]]:
        """Return the parts of the line, each with the colour in which a terminal shows it."""
        found = [(f"step {self.step}", "bold")]
        if self.step_seconds is not None:
            found.append((f"{self.step_seconds * 1e3:,.1f} ms", ""))
        if self.tokens_per_second is not None:
            found.append((f"{self.tokens_per_second:,.0f} tokens/s", ""))
        if self.exposed_seconds is not None:
            predicted = self.predicted_exposed_seconds
            said = f" (predicted {predicted * 1e3:,.1f})" if predicted is not None else ""
            found.append((f"exposed {self.exposed_seconds * 1e3:,.1f} ms{said}", ""))
        if self.peak_bytes is not None:
            found.append((f"peak {self.peak_bytes / 1e9:.2f} GB", ""))
        if self.gradient_norm is not None:
            found.append((f"norm {self.gradient_norm:.4g}", "" if math.isfinite(self.gradient_norm) else "red"))
        if self.straggler_factor is not None:
            colour = "yellow" if self.straggler_factor > STRAGGLES else ""
            found.append((f"slowest rank {self.straggler_rank} x{self.straggler_factor:.2f}", colour))
        found += [(f"captured again: {cause}", "red") for cause in self.causes]
        return found

    def __str__(self) -> str:
        return ", ".join(text for text, _ in self.parts())

    def open_metrics(self, model: str) -> str:
        """Return the text of an exposition of OpenMetrics 1.0; ``model``: the value of its label."""
        labels = f'{{model="{_escaped(model)}"}}'
        values = {**self.numbers(), "steps": self.step}
        lines = []
        for name, (kind, unit, help_text) in METRICS.items():
            if name not in values:
                continue
            metric = f"{PREFIX}_{name}"
            lines.append(f"# TYPE {metric} {kind}")
            lines += [f"# UNIT {metric} {unit}"] if unit else []
            lines.append(f"# HELP {metric} {help_text}")
            lines.append(f"{metric}{'_total' if kind == 'counter' else ''}{labels} {_number(values[name])}")
        return "\n".join([*lines, "# EOF", ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{'+' if value > 0 else '-'}Inf" if math.isinf(value) else repr(value)
