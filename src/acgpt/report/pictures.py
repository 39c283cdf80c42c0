"""The figures of a report, drawn with matplotlib, which is imported only when one is drawn."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITH_FUTURE, WITHOUT_FUTURE, CAUSAL, PAPER = "#1b7f5c", "#8fcbb4", "#b5651d", "#adb5bd"
LINES = (WITH_FUTURE, "#3a6ea5", "#d1495b", "#7b5ea7", "#e09f3e", "#2a9d8f")
KINDS = {"Unconditional": "unconditional", "Infilling": "infilling", "Training dist.": "training"}


def rendered(draw: Callable[[], Figure]) -> dict[str, bytes]:
    """A figure as PNG and SVG, the same bytes each time."""
    from matplotlib import rc_context

    files = {}
    with rc_context({"svg.hashsalt": "acgpt", "text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a script that no font here has: boxes stand for it
        figure = draw()
        for form, metadata in (("png", {}), ("svg", {"Date": None})):
            file = io.BytesIO()
            figure.savefig(file, format=form, dpi=150, metadata=metadata)
            files[form] = file.getvalue()
    return files


def canvas(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure, in inches, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def modes(panels: Sequence[tuple[str, Mapping[str, float | None], Mapping[str, float | None] | None]]) -> Figure:
    """Perplexities of AC-GPT with and without the future, beside the causal baseline's; a panel a run.

    Args:
        panels: A title, the run's perplexities by mode, and the baseline's if there is one.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = canvas(5.6 * columns, 3.6 * rows + 0.3, rows, columns)
    for place, (title, ours, baseline) in zip(axes, panels, strict=False):
        for x, kind in enumerate(KINDS.values()):
            past = kind if kind == "unconditional" else f"{kind}-no-future"
            future = None if kind == "unconditional" else ours[kind]
            bars = [(future, WITH_FUTURE), (ours[past], WITHOUT_FUTURE), ((baseline or {}).get(past), CAUSAL)]
            heights = [(value, colour) for value, colour in bars if value is not None and math.isfinite(value)]
            for number, (value, colour) in enumerate(heights):
                at = x + 0.27 * (number - (len(heights) - 1) / 2)
                place.bar_label(place.bar(at, value, 0.25, color=colour), fmt="{:.2f}", fontsize=8, padding=2)
        place.set_title(title, fontsize=9)
        place.set_xticks(range(len(KINDS)), list(KINDS))
        place.set_ylabel("perplexity")
        place.margins(y=0.12)
        place.spines[["top", "right"]].set_visible(False)
    for place in axes[len(panels) :]:
        place.set_axis_off()
    names = {"AC-GPT, with the future": WITH_FUTURE, "AC-GPT, without": WITHOUT_FUTURE, "causal baseline": CAUSAL}
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def bars(rows: Sequence[tuple[str, Any, bool]]) -> Figure:
    """The advantage on the training distribution, a bar a row.

    Args:
        rows: A label, the advantage in percent, and whether it is the paper's.
    """
    figure, (axes,) = canvas(8, 0.32 * len(rows) + 1.2)
    for place, (_, value, paper) in enumerate(rows):
        bar = axes.barh(place, value, 0.7, color=PAPER if paper else WITH_FUTURE)
        axes.bar_label(bar, fmt="{:+.2f}%", fontsize=8, padding=3)
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_xlabel("TD advantage over the causal baseline, %")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def sweep(curves: Sequence[tuple[str, bool, Sequence[tuple[Any, Any]]]]) -> Figure:
    """The advantage on the training distribution against r_max.

    Args:
        curves: A name, whether it is the paper's, and points of r_max and percent.
    """
    figure, (axes,) = canvas(6, 4 + 0.18 * len(curves))
    colours = iter(LINES * len(curves))
    for name, paper, points in curves:
        style: dict[str, Any] = {"color": PAPER, "linestyle": "--"} if paper else {"color": next(colours)}
        axes.plot(*zip(*points, strict=True), marker="o", label=name, **style)
    return finish(figure, axes, "r_max", "TD advantage over the causal baseline, %")


def curve(curves: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Figure:
    """The advantages in the course of training, of two modes.

    Args:
        curves: A name, and rows with `tokens`, `unconditional` and `training`.
    """
    figure, (axes,) = canvas(7, 4 + 0.36 * len(curves))
    colours = iter(LINES * len(curves))
    for name, rows in curves:
        colour = next(colours)
        for mode, style in (("unconditional", ":"), ("training", "-")):
            points = [(row["tokens"] / 1e6, row[mode]) for row in rows if row[mode] is not None]
            if points:
                axes.plot(
                    *zip(*points, strict=True), style, color=colour, marker="o", markersize=3, label=f"{name}, {mode}"
                )
    return finish(figure, axes, "million tokens read", "advantage over the causal twin, %")


def finish(figure: Figure, axes: Axes, across: str, up: str) -> Figure:
    """What curves have in common."""
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False)
    return figure
