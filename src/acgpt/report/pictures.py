"""The figures of a report, drawn with matplotlib, which is imported only when a figure is drawn."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from textwrap import fill
from typing import TYPE_CHECKING, Any

from acgpt.methods import METHODS
from acgpt.query.modes import MODES
from acgpt.report.entries import Entry
from acgpt.report.tables import Row, comparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITH_FUTURE, WITHOUT_FUTURE, PAPER = "#1b7f5c", "#8fcbb4", "#adb5bd"
LINES = (WITH_FUTURE, "#3a6ea5", "#d1495b", "#7b5ea7", "#e09f3e", "#2a9d8f")
Panel = tuple[str, Sequence[Entry]]  # a title, and entries that are comparable with each other
LEGEND_WIDTH = 140  # characters of all names in a line of a legend
LOG_SCALE_RATIO = 4  # largest over smallest perplexity from which an axis is logarithmic


def render_figure(draw: Callable[[], Figure], png_metadata: Mapping[str, str] | None = None) -> dict[str, bytes]:
    """Render a figure as PNG and SVG, with the same bytes each time.

    Args:
        draw: Draws the figure.
        png_metadata: Metadata of the PNG file, by keyword.
    """
    from matplotlib import rc_context

    files = {}
    with rc_context({"svg.hashsalt": "acgpt", "text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # scripts without a font are shown as boxes
        figure = draw()
        for format_name, metadata in (("png", png_metadata or {}), ("svg", {"Date": None})):
            file = io.BytesIO()
            figure.savefig(file, format=format_name, dpi=150, metadata=metadata)
            files[format_name] = file.getvalue()
    return files


def canvas(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Create an empty figure, with its size in inches, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # More padding between rows of panels: a title must not touch the labels above it.
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.04 if rows == 1 else 0.12))
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def add_legend(figure: Figure, handles: Mapping[str, Any], size: int = 8) -> None:
    """Add a legend below a figure, with as many columns as fit below ten inches: at most four."""
    columns = max(1, min(4, LEGEND_WIDTH // max(map(len, handles), default=1)))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=size
    )


def sweep(groups: Sequence[Sequence[Row]]) -> Figure:
    """Draw the advantage on the training distribution against r_max.

    Args:
        groups: Rows of the table of sweeps, those of a curve together.
    """
    figure, (axes,) = canvas(6, 4 + 0.18 * len(groups))
    colours = iter(LINES * len(groups))
    for rows in groups:
        paper, points = rows[0].paper, [(row.cells["r_max"], comparable(row.cells["advantage"])) for row in rows]
        style: dict[str, Any] = {"color": PAPER, "linestyle": "--"} if paper else {"color": next(colours)}
        name = "the paper: " * paper + f"{rows[0].cells['backbone']}, {rows[0].cells['adapter']}"
        axes.plot(*zip(*points, strict=True), marker="o", label=name, **style)
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.set_xlabel("r_max")
    axes.set_ylabel("TD advantage over the causal baseline, %")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False)
    return figure


def methods(panels: Sequence[Panel]) -> Figure:
    """Draw every method in every mode as bars with deviations, one panel below the other."""
    from matplotlib.patches import Patch

    figure, axes = canvas(10, 3.1 * len(panels) + 0.5, len(panels))
    styles: dict[str, dict[str, Any]] = {}
    for ax, (title, entries) in zip(axes, panels, strict=True):
        width, used = 0.8 / len(entries), list[str]()
        for number, entry in enumerate(entries):
            colour = colour_of(entry.method)
            style = styles.setdefault(entry.name, {"color": colour, "alpha": 0.6 ** used.count(colour)})
            used.append(colour)  # further rows of a method in a panel are paler
            for x, mode in enumerate(MODES):
                mean = entry.modes[mode]
                if mean is not None and math.isfinite(mean.mean):
                    position = x + width * (number - (len(entries) - 1) / 2)
                    bar = ax.bar(
                        position, mean.mean, 0.9 * width, yerr=mean.std, **style, edgecolor="white",
                        hatch="///" if mean.bound else None, error_kw={"elinewidth": 0.8, "ecolor": "0.25"},
                    )  # fmt: skip
                    label = "≤{:.1f}" if mean.bound else "{:.1f}"
                    ax.bar_label(bar, fmt=label, fontsize=6.5, padding=2, rotation=90)
        ax.set_title(fill(title, 110), fontsize=10)
        ax.set_xticks(range(len(MODES)), [mode.title for mode in MODES.values()], fontsize=8)
        scale_y_axis(ax, [mean.mean for entry in entries for mean in entry.modes.values() if mean is not None])
        ax.spines[["top", "right"]].set_visible(False)
    add_legend(figure, {name: Patch(**style) for name, style in styles.items()})
    return figure


def colour_of(method: str) -> str:
    """Return the colour of a method in figures."""
    return METHODS[method].colour if method in METHODS else PAPER


def scale_y_axis(axes: Axes, values: Sequence[float]) -> None:
    """Leave room above the bars for labels; use a log scale if some bars are much higher than others."""
    finite = [value for value in values if math.isfinite(value)]
    axes.set_ylabel("perplexity")
    if use_log_scale(axes, finite):
        axes.set_ylim(min(finite) / 2, max(finite) * 4)
    else:
        axes.margins(y=0.28)


def use_log_scale(axes: Axes, values: Sequence[float]) -> bool:
    """Use a log scale with plain numbers as labels if some values are much higher than others; return whether."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if not values or max(values) <= LOG_SCALE_RATIO * min(values):
        return False
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("perplexity, logarithmic")
    return True


def with_and_without(panels: Sequence[Panel]) -> Figure:
    """Draw the training distribution with and without the future, method by method; two panels per row."""
    from matplotlib.patches import Patch

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = canvas(5.5 * columns, 3.4 * rows + 0.3, rows, columns)
    for ax, (title, entries) in zip(axes, panels, strict=False):
        values, names = [], []
        for x, entry in enumerate(entries):
            future, without = entry.modes["training"], entry.modes["training-no-future"]
            assert future is not None and without is not None
            for position, mean, colour in ((x - 0.2, future, WITH_FUTURE), (x + 0.2, without, WITHOUT_FUTURE)):
                bar = ax.bar(position, mean.mean, 0.38, yerr=mean.std, color=colour, error_kw={"elinewidth": 0.8})
                values.append(mean.mean)
                ax.bar_label(bar, fmt="{:.1f}", fontsize=7, padding=2)
            names.append(f"{entry.name}\n{100 * (future.mean / without.mean - 1):+.1f} %")
        ax.set_title(fill(title, 64), fontsize=8)
        ax.set_xticks(range(len(names)), names, fontsize=8)
        scale_y_axis(ax, values)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    add_legend(figure, {"with the future": Patch(color=WITH_FUTURE), "without it": Patch(color=WITHOUT_FUTURE)}, size=9)
    return figure


def ranges(sizes: Sequence[tuple[str, Sequence[Sequence[Entry]]]]) -> Figure:
    """Draw perplexity against r_max: training distribution (left) and unconditional (right).

    Args:
        sizes: A row per size: its title, and curves, whose entries are sorted by r_max.
    """
    figure, axes = canvas(10, 3.6 * len(sizes) + 0.6, len(sizes), 2)
    handles: dict[str, Any] = {}
    for ax, ((title, curves), mode) in zip(axes, product(sizes, ("training", "unconditional")), strict=True):
        values = []
        for curve in curves:
            paper = not curve[0].evaluations
            points = [(entry.r_max, mean) for entry in curve if (mean := entry.modes[mode])]
            points = [(r_max, mean) for r_max, mean in points if math.isfinite(mean.mean)]
            if not points:
                continue
            values += [mean.mean for _, mean in points]
            line = ax.errorbar(
                [r_max for r_max, _ in points], [mean.mean for _, mean in points],
                [mean.std or 0.0 for _, mean in points], color=colour_of(curve[0].method), capsize=2,
                linestyle="--" if paper else "-", alpha=0.5 if paper else 1, marker="o", markersize=4,
            )  # fmt: skip
            handles.setdefault(curve[0].name + ", the paper" * paper, line)
        ax.set_ylabel("perplexity")
        use_log_scale(ax, values)
        ax.set_title(f"{title}: {MODES[mode].title.lower()}", fontsize=10)
        ax.set_xlabel("r_max")
        ax.grid(alpha=0.3)
    add_legend(figure, handles)
    return figure
