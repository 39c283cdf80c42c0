"""The figures of benchmarks, drawn with matplotlib from result files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from acgpt.report.pictures import CAUSAL, WITH_FUTURE, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = {"length": "tokens per text", "share": "share of given tokens", "batch": "texts"}
TITLES = {"score": "scoring", "sample": "sampling"}


def draw_scaling(points_json: str) -> Figure:
    """Draw the time of scoring and sampling over each number that was varied, with what the arithmetic predicts.

    Args:
        points_json: The points of `benchmarks/scaling.py`, as JSON.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    points = json.loads(points_json)
    kinds = [kind for kind in TITLES if any(point["kind"] == kind for point in points)]
    figure, axes = canvas(10, 3.2 * len(kinds), len(kinds), len(AXES))
    for row, kind in enumerate(kinds):
        for column, (axis, label) in enumerate(AXES.items()):
            panel = axes[row * len(AXES) + column]
            chosen = [point for point in points if point["kind"] == kind and point["axis"] == axis]
            xs = [point["case"][axis] for point in chosen]
            panel.plot(xs, [point["seconds"] for point in chosen], "o-", color=WITH_FUTURE, label="measured")
            panel.plot(xs, [point["floor"] for point in chosen], "--", color=CAUSAL, label="floor")
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.yaxis.set_minor_formatter(NullFormatter())
            if axis != "share":
                panel.set_xscale("log", base=2)
                panel.set_xticks(xs, [f"{x:,}" for x in xs], rotation=30 if axis == "length" else 0)
            panel.set_xlabel(label)
            panel.set_ylabel("seconds" if column == 0 else "")
            panel.set_title(TITLES[kind])
            panel.grid(visible=True, which="major", alpha=0.3)
            if row == column == 0:
                panel.legend(frameon=False)
    return figure
