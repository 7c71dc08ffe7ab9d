"""Plots of results, as small SVG files. Without matplotlib there are none, and a line says so."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

AVAILABLE = importlib.util.find_spec("matplotlib") is not None
MISSING = "no plot: matplotlib is not installed (pip install -e '.[benchmarks]')"
OURS, OTHERS = "#c44e52", "#8c8c8c"


@contextlib.contextmanager
def _axes(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Axes of a figure that is written to ``path`` in the end, the same bytes for the same data."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "graph_fsdp", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _colour(name: str) -> str:
    return OURS if name.startswith("ours") else OTHERS


def bars_with_quartiles(quartiles: Mapping[str, Sequence[float]], label: str, path: Path) -> None:
    """One bar per name, as long as the median, with a line from the first to the third quartile; a rule at 1."""
    if not AVAILABLE:
        return print(MISSING)
    with _axes(path, (6, 0.6 + 0.32 * len(quartiles))) as axes:
        for name, (low, median, high) in quartiles.items():
            axes.barh(name, median, xerr=[[median - low], [high - median]], color=_colour(name), height=0.7)
            axes.annotate(f" {median:.2f}", (high, name), va="center")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel(label)


def lines(series: Mapping[str, Mapping[int, float]], labels: tuple[str, str], path: Path) -> None:
    """One line per name, from x to y; from zero upwards."""
    if not AVAILABLE:
        return print(MISSING)
    styles = iter(["-", "--", ":", "-."] * len(series))
    with _axes(path, (6, 3.2)) as axes:
        for name, points in series.items():
            axes.plot(list(points), list(points.values()), next(styles), marker="o", color=_colour(name), label=name)
        axes.set(xlabel=labels[0], ylabel=labels[1])
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({x for points in series.values() for x in points}))
        axes.legend(frameon=False)


def grouped_bars(groups: Mapping[str, Mapping[str, float]], label: str, path: Path) -> None:
    """For each group a bar per name."""
    if not AVAILABLE:
        return print(MISSING)
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    with _axes(path, (7, 3.2)) as axes:
        width = 0.8 / len(names)
        for index, name in enumerate(names):
            places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(groups))]
            heights = [bars.get(name, 0) for bars in groups.values()]
            shade = 0.45 + 0.55 * (index + 1) / len(names)
            axes.bar(places, heights, 0.92 * width, color=_colour(name), alpha=shade, label=name)
        axes.set_xticks(range(len(groups)), list(groups))
        axes.set_ylabel(label)
        axes.legend(frameon=False, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, 1.18))
