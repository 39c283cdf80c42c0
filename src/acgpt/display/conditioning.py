"""Pictures of conditioning sets: the regimes of the paper and others, as rows of squares.

    Structured  {r_max: 0.6, b_max: 3}                             ■ given   □ asked   · unknown
    □□□□□■■■■■■■■■■□□□□□□□□□■■□□□□□□  12
    □□□□□□□□■■■■■□□□□□□□□□□□□□□□□□□□   5
    …
    ▂▂▂▂▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▂▂▂▂  how often each position is given

Sets come from `Conditioning.roles`, which training uses too, so a picture cannot differ from training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

import numpy as np

from acgpt.common.notation import read_notation
from acgpt.display.pictures import check_format, save_picture
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN, Conditioning, generator

REGIMES = {  # notation as in recipes, and remark
    "Fully arbitrary": ("{r_min: 0, r_max: 1, b_min: size, b_max: size}", "all sets of a size are equally likely"),
    "Interpolated": ("{r_min: 0, r_max: 0.6, b_min: 1, b_max: size}", "any number of blocks: the paper's experiments"),
    "In stretches": ("{r_min: 0, r_max: 0.6, placement: stretches}", "placed as in the authors' code: clustered"),
    "Structured": ("{r_min: 0, r_max: 0.6, b_min: 1, b_max: 3}", "a few long blocks"),
    "Infilling": (
        "{r_min: 0, r_max: 0.6, infilling: 1, f_min: 0.2, f_max: 0.8}",
        "both ends are given, the middle is asked",
    ),
    "Empty": ("{empty: 1}", "plain left-to-right language modelling"),
    "With unknown tokens": (
        "{r_min: 0, r_max: 0.6, b_min: 1, b_max: size, unknown: 0.3}",
        "some tokens are neither given nor asked",
    ),
}
DRAWS = 10_000  # samples for the share of each position: the error is at most 0.01 in 19 of 20 cases
LETTERS = {GIVEN: "g", ASKED: "a", UNKNOWN: "u"}
MARKS = {GIVEN: "■", ASKED: "□", UNKNOWN: "·"}
COLOURS = {GIVEN: "#4f9d69", ASKED: "#efe3c8", UNKNOWN: "#9aa0a6"}
NAMES = {GIVEN: "given", ASKED: "asked", UNKNOWN: "unknown"}
BARS = " ▁▂▃▄▅▆▇█"


def read_conditioning(notation: str) -> Conditioning:
    """Parse a distribution in the notation of recipes: `{r_max: 0.6, empty: 0.1}`."""
    return Conditioning.from_dict(read_notation(notation, repr(notation)))


@dataclass(frozen=True)
class Panel:
    """Sets sampled from one distribution: those of items 0, 1, … of epoch 0.

    Args:
        title: Name of the distribution.
        notation: The distribution as in a recipe.
        remark: Short description.
        length: Tokens per text.
        rows: Number of sets to show.
        seed: Seed of `generator`.
        draws: Number of sets for the share of each position.
    """

    title: str
    notation: str
    remark: str = ""
    _: KW_ONLY
    length: int
    rows: int
    seed: int
    draws: int

    @cached_property
    def conditioning(self) -> Conditioning:
        """The distribution."""
        return read_conditioning(self.notation)

    @cached_property
    def sets(self) -> np.ndarray:
        """(draws, length) roles of the sampled sets."""
        items = range(max(self.rows, self.draws))
        return np.stack([self.conditioning.roles(self.length, generator(self.seed, 0, item)) for item in items])

    @property
    def shown(self) -> np.ndarray:
        """(rows, length) roles of the sets to show."""
        return self.sets[: self.rows]

    def share(self, role: int) -> np.ndarray:
        """Return the share of sets in which each position has a role; shape (length,)."""
        shares: np.ndarray = (self.sets == role).mean(axis=0)
        return shares

    def as_dict(self) -> dict[str, Any]:
        """Return JSON content, with sets as strings of the letters g, a and u."""
        return {
            "title": self.title,
            "notation": self.notation,
            "conditioning": self.conditioning.as_dict(),
            "sets": ["".join(LETTERS[role] for role in row) for row in self.shown.tolist()],
            "given": self.share(GIVEN).tolist(),
            "unknown": self.share(UNKNOWN).tolist(),
        }


# ---- in the terminal ------------------------------------------------------------------------------------------------


def terminal(panels: Sequence[Panel]) -> str:
    """Return the sets as text, one line per set, followed by |x_c|."""
    lines = []
    for drawn in panels:
        lines.append(f"{drawn.title}  {drawn.notation}")
        for row in drawn.shown.tolist():
            lines.append("".join(MARKS[role] for role in row) + f" {row.count(GIVEN):3}")
        lines += ["".join(BARS[round(8 * share)] for share in drawn.share(GIVEN)), ""]
    legend = "   ".join(f"{MARKS[role]} {name}" for role, name in NAMES.items())
    lines.append(f"{legend}   The number is |x_c|. The bars: how often each position is given.")
    return "\n".join(lines)


# ---- as a picture ---------------------------------------------------------------------------------------------------

WIDTH, CELL, ROW = 5.6, 0.16, 0.1  # inches: of the squares of a panel, at most of one, and at least from row to row
HEAD, GAP, CHART, TAIL = 0.62, 0.1, 0.8, 0.3  # inches: above the squares, below them, the shares, and below those
GREY = "#666666"
LEGEND = {"ncols": 3, "fontsize": 9, "frameon": False, "borderaxespad": 0.0, "borderpad": 0.3, "handlelength": 1.2}


def draw_conditioning(path: str | Path, panels: Sequence[Panel]) -> None:
    """Draw the panels to a file with matplotlib. The suffix is the format: .png, .svg, .pdf.

    Raises:
        InputError: matplotlib is missing, the format is unknown, or the file cannot be written.
    """
    check_format(path)
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    length, rows = panels[0].length, panels[0].rows
    cell = min(CELL, WIDTH / length)
    grid = rows * max(cell, ROW)
    left, right, foot = 0.45, 0.55, 0.65
    panel_width, panel_height = left + WIDTH + right, HEAD + grid + GAP + CHART + TAIL
    width, height = columns * panel_width, lines * panel_height + foot
    figure = Figure(figsize=(width, height))
    roles = sorted(COLOURS)
    colours = ListedColormap([COLOURS[role] for role in roles])

    def axes(x: float, y: float, high: float) -> Any:
        """Add axes over the positions of a text; the offset from the top left corner is in inches."""
        box = (x / width, 1 - (y + high) / height, cell * length / width, high / height)
        result = figure.add_axes(box, xlim=(0.5, length + 0.5))
        result.tick_params(length=0, labelsize=7, labelcolor=GREY, pad=2)
        result.spines[:].set_visible(False)
        return result

    for number, drawn in enumerate(panels):
        x = number % columns * panel_width + left
        y = number // columns * panel_height + HEAD
        squares = axes(x, y, grid)
        edges = np.arange(length + 1) + 0.5, np.arange(rows + 1)
        squares.pcolormesh(
            *edges, drawn.shown, cmap=colours, vmin=-0.5, vmax=2.5, edgecolor="white", linewidth=7 * cell
        )
        squares.set(ylim=(rows, 0), xticks=[], yticks=[])
        words: dict[str, Any] = {"textcoords": "offset points", "color": GREY, "annotation_clip": False}
        for row, size in enumerate((drawn.shown == GIVEN).sum(axis=1).tolist()):
            squares.annotate(str(size), (length + 0.5, row + 0.5), (6, 0), va="center", fontsize=6.5, **words)
        squares.annotate("$|x_c|$", (length + 0.5, 0), (6, 6), fontsize=7.5, **words)
        words |= {"parse_math": False}  # the following texts may come from the user
        notation = shorten(drawn.notation, 80, placeholder=" …")
        squares.annotate(notation, (0.5, 0), (0, 6), fontsize=7.5, family="monospace", **words)
        heading = words | {"color": "#222222", "weight": "bold", "fontsize": 11}
        title = squares.annotate(drawn.title, (0.5, 0), (0, 19), **heading)
        squares.annotate(drawn.remark, (1, 0), (6, 1), title, va="bottom", fontsize=8.5, **words)

        chart = axes(x, y + grid + GAP, CHART)
        chart.set_facecolor("#f8f3e7")  # the rest up to 1 is asked
        given, unknown = drawn.share(GIVEN), drawn.share(UNKNOWN)
        chart.stairs(given, edges[0], fill=True, color=COLOURS[GIVEN])
        chart.stairs(given + unknown, edges[0], baseline=given, fill=True, color=COLOURS[UNKNOWN])
        chart.axhline(given.mean(), color="#1f5134", linewidth=0.8, linestyle=(0, (4, 3)))
        chart.set(ylim=(0, 1), yticks=[0, 0.5, 1], yticklabels=["0", "½", "1"])
        chart.set_xticks(sorted({1, *(round(length * quarter / 4) for quarter in range(1, 5))} - {0}))

    patches = [Patch(facecolor=COLOURS[role], label=name) for role, name in NAMES.items()]
    figure.legend(handles=patches, loc="lower left", bbox_to_anchor=(left / width, 0.35 / height), **LEGEND)
    caption = (
        f"A row is a set. Below them: how often each position has each role, in {len(panels[0].sets):,} draws; dashed: "
        "the mean share given."
    )
    caption = fill(caption, 100 * columns)
    figure.text(left / width, 0.33 / height, caption, fontsize=8, color=GREY, va="top", linespacing=1.35)
    save_picture(figure, path)
