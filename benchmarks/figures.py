"""The figures of benchmarks, drawn with matplotlib from result files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from acgpt.display.distances import draw_curve
from acgpt.report.pictures import LINES, WITH_FUTURE, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = {"length": "tokens per text", "share": "share of given tokens", "batch": "texts"}
MARKERS = {"gaps": "o", "stretches": "s", "infilling": "^"}
PLACEMENTS = {"gaps": "-", "stretches": ":"}
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
            panel.plot(xs, [point["floor"] for point in chosen], "--", color="#b5651d", label="floor")
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


def draw_distances(texts_json: str) -> Figure:
    """Draw the gain from the future by distance for both placements of blocks, and predicted gains over measured ones.

    Args:
        texts_json: The record of `benchmarks/distances.py`, as JSON.
    """
    record = json.loads(texts_json)
    texts, r_max = record["texts"], record["curve"]
    figure, (left, right) = canvas(10.4, 4.2, 1, 2)
    for colour, (text, entry) in zip(LINES, texts.items(), strict=False):
        for placement, style in PLACEMENTS.items():
            name = text if placement == "gaps" else None
            draw_curve(left, entry["gains"][f"{placement} {r_max:g}"]["by_distance"], name, colour, style)
        for name, gain in entry["gains"].items():
            kind, share = name.split()
            fill = "full" if float(share) == r_max else "none"
            if gain["predicted"] is not None:
                point = {"marker": MARKERS[kind], "fillstyle": fill, "color": colour, "markersize": 6}
                right.plot(gain["predicted"], gain["measured"], **point)
    left.set_title(f"Gain by distance, r_max {r_max:g} (solid: gaps; dotted: stretches)", fontsize=9)
    left.set_xlabel("distance to the next given token")
    left.set_ylabel("nats a token")
    left.legend(frameon=False, fontsize=8)
    right.axline((0, 0), slope=1, color="#adb5bd", linewidth=1)
    for kind, marker in MARKERS.items():
        right.plot([], [], marker, color="#666666", markersize=6, label=kind)
    right.set_title(f"Mean gain of a distribution (filled: r_max {r_max:g}; open: others)", fontsize=9)
    right.set_xlabel("predicted from the solid curve, nats a token")
    right.set_ylabel("measured, nats a token")
    right.legend(frameon=False, fontsize=8)
    right.spines[["top", "right"]].set_visible(False)
    return figure


DRAWN = {"scaling": (draw_scaling, "points"), "distances": (draw_distances, None)}  # by benchmark: what of its record
