"""A picture of the five modes: the role of every token of a sentence, and which tokens each prediction reads.

    Infilling               The   cat   sat   on    the   mat   .          a box a token, coloured by its role
                             ■     ?                       □     □          a line a prediction: the token itself,
                             ■     ■     ?                 □     □          what it is predicted from before it (■)
                             …                                              and after it (□)

Roles come from `EvaluationDataset` and lines from `layout`, as in evaluation, so the picture cannot differ from
what is computed. No model or tokenizer is needed: tokens are words.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from acgpt.common.files import disk_errors
from acgpt.display.formats import check_format
from acgpt.display.show import COLOURS, FONTS, shortened
from acgpt.engine.layout import build, visible
from acgpt.errors import InputError
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.evaluation.perplexity import queries_of
from acgpt.query.conditioning import ASKED, GIVEN
from acgpt.query.modes import MODES, Mode

TEXT = "The cat sat on the mat."
EXAMPLE = 352  # a seed under which the sets of that sentence have two ends, and two blocks of different sizes
MOST_WORDS = 14
NOT_SCORED, PAST, FUTURE, UNREAD = "#868e96", "#2a9d8f", "#e09f3e", "#f1f1f1"
WORDS = {  # description of each mode
    "unconditional": "Nothing is given.\nEvery token is asked.",
    "infilling": "Both ends are given,\nthe middle is asked.",
    "training": "Blocks are given, as in training,\nthe rest is asked.",
    "infilling-no-future": "What infilling asks,\nfrom the past alone.",
    "training-no-future": "What training asks,\nfrom the past alone.",
}


@dataclass(frozen=True)
class Panel:
    """One mode on one sentence; positions count from 1.

    Args:
        mode: The mode.
        roles: "given", "asked" or "not scored" for each token.
        reads: Positions that each asked position is predicted from.
    """

    mode: Mode
    roles: tuple[str, ...]
    reads: dict[int, frozenset[int]]


def panels(words: int, seed: int, r_max: float = 0.6) -> list[Panel]:
    """Return the five modes on a text of `words` words."""
    drawn = EvaluationDataset.build(np.arange(words), tokenizer_hash="", length=words, r_max=r_max, seed=seed)
    result = []
    for mode in MODES.values():
        roles = drawn.roles(mode)
        (query,) = queries_of(drawn.tokens, mode.model_roles(roles))
        layout = build([query], bos=0, mask=None, future=True)  # in modes without the future nothing is given
        positions = layout.positions.tolist()
        seen = visible(torch.tensor(layout.copies), len(positions))[0]
        reads = {
            positions[row] + 1: frozenset(positions[slot] for slot in seen[row].nonzero()[:, 0].tolist()) - {0}
            for row in layout.rows.tolist()
        }
        given = "given" if mode.future else "not scored"
        names = tuple({GIVEN: given, ASKED: "asked"}[role] for role in roles[0].tolist())
        asked = {position: reads[position] for position, name in enumerate(names, start=1) if name == "asked"}
        result.append(Panel(mode, names, asked))
    return result


def draw_modes(path: str | Path, text: str = TEXT, *, seed: int = 0) -> None:
    """Draw the five modes to a file with matplotlib. The suffix is the format: .png, .svg, .pdf.

    Args:
        path: Path of the file.
        text: A sentence of 3 to 14 words; punctuation marks count as words.
        seed: Seed of the conditioning sets; 0 is the running example.

    Raises:
        InputError: matplotlib is missing, the format is unknown, the file cannot be written, or the text does not fit.
    """
    check_format(path)
    from matplotlib import font_manager, rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import FancyBboxPatch, Rectangle

    words = [shortened(word, 16) for word in re.findall(r"\w+|[^\w\s]", text)]
    if not 3 <= len(words) <= MOST_WORDS:
        raise InputError(f"the text has {len(words)} words and marks; a picture of the modes takes 3 to {MOST_WORDS}.")
    drawn = panels(len(words), EXAMPLE + seed)

    # In inches, downwards from the top: a heading of boxes for each mode, and a line for each prediction.
    cell, box, line, gap, left = max(0.75, 0.11 * max(map(len, words)) + 0.2), 0.42, 0.17, 0.42, 3.1
    right = left + cell * len(words)
    height = sum(box + 0.08 + line * len(panel.reads) + gap for panel in drawn) + 0.85
    canvas = Canvas(figsize=(right, height))
    FigureCanvasAgg(canvas)
    axes = canvas.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, right), ylim=(height, 0))
    axes.set_axis_off()
    families = {font.name for font in font_manager.fontManager.ttflist}
    roles = {"given": COLOURS["given"], "asked": COLOURS["asked"], "not scored": NOT_SCORED}

    def write(x: float, y: float, what: str, colour: str = "#555555", points: float = 9.0, **style: Any) -> None:
        style = {"va": "center", "ha": "left", "family": [f for f in FONTS if f in families], **style}
        axes.text(x, y, what, color=colour, fontsize=points, parse_math=False, **style)

    def mark(x: float, y: float, width: float, colour: str, *, hollow: bool = False) -> None:
        style: dict[str, Any] = {"facecolor": "none" if hollow else colour, "edgecolor": colour, "linewidth": 1.2}
        axes.add_patch(Rectangle((x + 0.06, y + 0.025), width - 0.12, line - 0.05, **style))

    top = 0.0
    for panel in drawn:
        write(0, top + 0.1, panel.mode.title, "#111111", 11, weight="bold")
        write(0, top + 0.26, WORDS[panel.mode.name], va="top", linespacing=1.35)
        for index, (word, role) in enumerate(zip(words, panel.roles, strict=True)):
            x = left + index * cell
            shape = FancyBboxPatch(
                (x + 0.09, top + 0.03), cell - 0.18, box - 0.06, boxstyle="round,pad=0.03,rounding_size=0.06",
                facecolor=roles[role], edgecolor="none",
            )  # fmt: skip
            axes.add_patch(shape)
            write(x + cell / 2, top + box / 2, word, "white", 11, ha="center", weight="bold")
        top += box + 0.08
        for position, read in panel.reads.items():
            for other in range(1, len(words) + 1):
                x = left + (other - 1) * cell
                if other == position:
                    mark(x, top, cell, COLOURS["asked"], hollow=True)
                else:
                    mark(x, top, cell, (PAST if other < position else FUTURE) if other in read else UNREAD)
            top += line
        top += gap

    write(0, top, "a box is a token", "#111111")
    write(left + 0.09, top, "a line under the boxes is a prediction", "#111111")
    keys = {
        0.0: [("given", roles["given"]), ("asked", roles["asked"]), ("not scored", roles["not scored"])],
        left + 0.09: [("the token itself", COLOURS["asked"]), ("read: its past", PAST), ("read: its future", FUTURE)],
        left + 2.2: [("not read", UNREAD)],
    }
    for x, entries in keys.items():
        for number, (name, colour) in enumerate(entries, start=1):
            mark(x - 0.06, top + 0.24 * number - line / 2, 0.42, colour, hollow=name == "the token itself")
            write(x + 0.42, top + 0.24 * number, name)
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "acgpt"}):
        warnings.filterwarnings("ignore", message="Glyph")  # no installed font has the script: boxes are drawn
        with disk_errors(path):
            canvas.savefig(path, dpi=200, bbox_inches="tight", pad_inches=0.25)
