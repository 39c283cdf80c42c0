"""A picture of what the future is worth by distance, see `evaluation.distance`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acgpt.common.files import disk_errors
from acgpt.display.pictures import check_format, save_picture
from acgpt.errors import InputError
from acgpt.evaluation.distance import LABELS
from acgpt.query.modes import MODES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1b7f5c", "#b5651d")
PANELS = {"distance": "distance to the next given token", "run": "length of the run of asked tokens"}


def draw_distances(path: str | Path, by_distance: Mapping[str, Any]) -> None:
    """Draw the gains of an evaluation by distance, and by the length of the run, to a file.

    Args:
        path: The file; its suffix is the format.
        by_distance: As in the result of `acgpt.evaluate`.

    Raises:
        InputError: No mode has gains, matplotlib is missing, or the format is unknown.
        OutputError: The file cannot be written.
    """
    check_format(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    answered = {mode: gains for mode, gains in by_distance.items() if gains is not None}
    if not answered:
        raise InputError(f"{path} is not drawn: no mode was answered with and without the future.")
    for axes, (name, title) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
        for colour, (mode, gains) in zip(COLOURS, answered.items(), strict=False):
            draw_curve(axes, gains[name], MODES[mode].title, colour)
        axes.set_xlabel(title)
    figure.axes[0].set_ylabel("gain from the future, nats a token")
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.axes[1].set_xticks(range(len(LABELS) - 1), LABELS[:-1])
    with disk_errors(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_picture(figure, path)


def draw_curve(axes: Axes, gains: Mapping[str, Mapping[str, Any]], name: str | None, colour: str) -> None:
    """Draw one curve of gains by bin with its intervals; bins without a finite gain are left out."""
    points = [(LABELS.index(label), entry) for label, entry in gains.items() if entry["gain"] is not None]
    xs, ys = [column for column, _ in points], [entry["gain"] for _, entry in points]
    errors = [
        [abs(entry["gain"] - entry["interval"][end]) if entry["interval"] else math.nan for _, entry in points]
        for end in (0, 1)
    ]
    axes.errorbar(xs, ys, errors, color=colour, linewidth=1.4, marker="o", markersize=4, capsize=2, label=name)
    axes.set_xticks(range(len(LABELS)), LABELS)
    axes.axhline(0, color="#666666", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
