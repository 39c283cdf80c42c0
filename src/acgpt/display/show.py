"""Answers in colour, and the input of a model drawn on the terminal or as a picture.

    The capital of {{Italy}} is Rome.                   rows read columns
                                      T c   i R     B T c
                                      h a o s o .   O h a o
    token      pos  role   predicts   1 2 3 5 6 7   0 1 2 3
    The          1  copy              ■ ■ ■ ■ ■ ■ │ · · · ·
    …
    of           3  given  → ␣Italy   ■ ■ ■ ■ ■ ■ │ ■ ■ ■ ■

The drawing is made from `layout.build` and `layout.visible`, which the model uses too, so it cannot differ from what is
computed. It needs the tokenizer only, not the weights.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Protocol

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from acgpt.display.conditioning import NAMES
from acgpt.display.pictures import check_format, save_picture
from acgpt.display.table import print_table, terminal_table
from acgpt.errors import CONTROLS, InputError, QueryError
from acgpt.models.ask import Fill, Ranking, Sample, Score
from acgpt.query.query import Query
from acgpt.query.template import Given, parse
from acgpt.query.text import encode, pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SURPRISE = {1: "black on green", 3: "black on yellow", 6: "black on bright_red"}  # style below this number of bits
NO_ANSWER = "--"  # shown where a method has no answer
BLANK = "□"  # a token that is still to be sampled
STYLES = {"copy": "cyan", "BOS": "dim", "given": "blue", "asked": "magenta", "unknown": "dim"}
COLOURS = {"copy": "#2a9d8f", "BOS": "#6c757d", "given": "#3a6ea5", "asked": "#d1495b", "unknown": "#6c757d"}
FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "Hiragino Sans", "Yu Gothic", "Noto Sans", "Arial Unicode MS")
MOST_LAID_OUT = 4096  # maximum number of slots of a layout: the mask is quadratic
MOST_DRAWN = 200  # maximum number of slots in a picture: labels must stay readable

_SPACES = {10: "⏎", 13: "⏎", 9: "⇥", 32: "␣"}


def printable(text: str) -> str:
    """Replace control characters, which could control the terminal, by symbols. Tabs and newlines are kept."""
    return text.translate(CONTROLS | {9: "\t", 10: "\n"})


def label(text: str, token_id: int | None = None) -> str:
    """Return a token on one line with visible white space, or its id if it has no text."""
    return text.translate(CONTROLS | _SPACES) if text else f"#{token_id}"


# ---- answers for people ---------------------------------------------------------------------------------------------


class Tokenizing(Protocol):
    """What the functions below need of a model: a `LanguageModel`, or a client of a server that has one."""

    def query(self, template: str) -> Query:
        """Tokenize a template."""
        ...

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token contributes."""
        ...


class Page(Console):
    """Console on stdout. No escape codes with NO_COLOR or in a pipe, where the width is 100."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = 100

    def on_broken_pipe(self) -> None:
        """Raise; rich would exit the program."""
        raise BrokenPipeError

    def note(self, text: str, style: str = "dim") -> None:
        """Print a line of text in a style."""
        self.print(Text(text, style), soft_wrap=True)

    def table(self, table: Table) -> None:
        """Print a table so that all of it can be read, see `print_table`."""
        print_table(self, table)

    @property
    def plain(self) -> bool:
        """Whether styles are unavailable."""
        return self.color_system is None


def marked(texts: Sequence[str], notes: Mapping[int, tuple[str, str]], plain: bool) -> Text:
    """Return a text with some tokens highlighted.

    Args:
        texts: The tokens' texts.
        notes: Style by position, from 1, and a note that replaces the style in plain text.
        plain: Use brackets instead of styles.
    """
    result = Text()
    for position, text in enumerate(map(printable, texts), start=1):
        style, note = notes.get(position, ("", ""))
        joined = [other in notes and not note and not notes[other][1] for other in (position - 1, position + 1)]
        if plain and position in notes:
            text = ("" if joined[0] else "⟦") + text + (note and f" {note}") + ("" if joined[1] else "⟧")
        result.append(text, style)
    return result


def bits(log_prob: float) -> float:
    """Convert a log-probability to surprise in bits: 0 is certain, 1 a coin toss."""
    return -log_prob / math.log(2)


def print_score(page: Page, lm: Tokenizing, template: str, ways: Mapping[str, Score | None]) -> None:
    """Print the text with asked tokens coloured by surprise, once per column, and a table of the numbers."""
    scores = {name: score for name, score in ways.items() if score is not None}
    query = lm.query(template)
    texts = lm.pieces([token for token in query.tokens if token is not None])
    columns = {name: [bits(token.log_prob) for token in score.tokens] for name, score in scores.items()}
    for name, surprises in columns.items():
        notes = {
            position: (
                next((style for limit, style in SURPRISE.items() if surprise < limit), "white on red"),
                f"{surprise:z.1f}",
            )
            for position, surprise in zip(query.asked_positions, surprises, strict=True)
        }
        page.print(Text.assemble((f"{name:13}", "bold"), marked(texts, notes, page.plain)), soft_wrap=True)
    if len(columns) == 2:
        columns["difference"] = [new - old for old, new in zip(*columns.values(), strict=True)]
    headings = dict.fromkeys((*ways, *columns))
    table = terminal_table(("surprise in bits", *headings))

    def cells(values: Mapping[str, float]) -> list[str]:
        signed = {name: f"{value:{'+' * (name == 'difference')}z.2f}" for name, value in values.items()}
        return [signed.get(name, NO_ANSWER) for name in headings]

    rows = [(Text(label(token.text, token.id)), i) for i, token in enumerate(next(iter(scores.values())).tokens)]
    for text, i in rows:
        table.add_row(text, *cells({name: column[i] for name, column in columns.items()}))
    if len(rows) > 1:
        sums = {name: math.fsum(column) for name, column in columns.items()}
        table.add_row("all of them", *cells(sums), style="bold")
    page.table(table)
    page.print()


def print_samples(page: Page, lm: Tokenizing, template: str, samples: Sequence[Sample]) -> None:
    """Print each sample, or fill of gaps, with its log-probability or score; what was sampled is highlighted."""
    for number, sample in enumerate(samples, start=1):
        value, text = f"log p {sample.log_prob:z8.2f}", None
        if isinstance(sample, Fill):
            value, text = f"score {sample.score:z8.2f}", marked_slots(page, template, sample)
        text = text or marked_tokens(page, lm, sample)
        page.print(Text.assemble((f"{number:>3}  {value}  ", "dim"), text), soft_wrap=True)
    page.print()


def marked_tokens(page: Page, lm: Tokenizing, sample: Sample) -> Text:
    """Return the text of a sample with sampled tokens highlighted; unknown tokens are shown as □."""
    known = iter(lm.pieces([token for token in sample.query.tokens if token is not None]))
    texts = [BLANK if token is None else next(known) for token in sample.query.tokens]
    return marked(texts, dict.fromkeys(sample.query.asked_positions, ("bold magenta", "")), page.plain)


def marked_slots(page: Page, template: str, sample: Sample) -> Text | None:
    """Return the text of a sample with the text of its slots highlighted, to the character.

    Returns:
        `None` if the text of the template and of the slots together is not that of the sample: white space before a
        blank belongs to the blank.
    """
    parts, fills = parse(template), iter(sample.fills)
    texts = [part.text if isinstance(part, Given) else next(fills) for part in parts]
    if "".join(texts) != sample.text:
        return None
    result = Text()
    for part, text in zip(parts, texts, strict=True):
        if isinstance(part, Given):
            result.append(printable(text))
        elif part.unknown is not None:
            result.append(BLANK * part.unknown)
        else:
            result.append(f"⟦{printable(text)}⟧" if page.plain else printable(text), "bold magenta")
    return result


def print_ranking(page: Page, template: str, ranking: Ranking) -> None:
    """Print the alternatives with bars, and how they were compared."""
    page.note(printable(template), "bold")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    for justify in ("right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    for ranked in ranking.alternatives:
        choice = " + ".join(printable(text).strip() or "(nothing)" for text in ranked.choice)
        bar = Text("█" * round(20 * ranked.probability) or "▏", "green")
        table.add_row(Text(choice), f"{ranked.probability:.1%}", bar, Text(f"log p {ranked.log_prob:z.2f}", "dim"))
    page.table(table)
    how = {
        "whole text": "the probability of the whole text, read left to right",
        "asked | given": "the probability of the alternative, given the text before and after it",
    }
    page.note(f"Compared by {how.get(ranking.compared, ranking.compared)}.\n")


# ---- the input of the model -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The asked token that a slot predicts: position, id (`None` for a blank) and text."""

    position: int
    id: int | None
    text: str


@dataclass(frozen=True)
class ShownSlot:
    """One slot of the model's input.

    Args:
        text: Text of the token; "" for a part of a character, `BLANK` for a blank.
        id: Id of the token; `None` for a blank.
        position: Position id. A copy has that of its original.
        role: "copy", "BOS", or for the text itself "given", "asked" or "unknown".
        predicts: The asked token predicted at this slot, if any.
    """

    text: str
    id: int | None
    position: int
    role: str
    predicts: Target | None


@dataclass(frozen=True)
class Figure:
    """The layout of one query: copies, then BOS and the text up to the last prediction."""

    slots: tuple[ShownSlot, ...]
    copies: int  # number of copies
    mask: tuple[tuple[bool, ...], ...]  # mask[q][k]: whether slot q attends to slot k

    def as_dict(self) -> dict[str, Any]:
        """Return JSON content: a list per property with one entry per slot; the mask as strings of 0 and 1."""
        predicts = [s.predicts and vars(s.predicts) for s in self.slots]
        return {
            "copies": self.copies,
            "tokens": [s.text for s in self.slots],
            "ids": [s.id for s in self.slots],
            "positions": [s.position for s in self.slots],
            "roles": [s.role for s in self.slots],
            "predicts": predicts,
            "mask": ["".join("01"[seen] for seen in row) for row in self.mask],
        }


def figure(
    query: Query, tokenizer: PreTrainedTokenizerBase, *, bos: int, mask: int | None = None, future: bool = True
) -> Figure:
    """Lay out a query and label every slot.

    Args:
        query: The query, from `LanguageModel.query` or `query_of`.
        tokenizer: Tokenizer of the model.
        bos: Id of the token at position 0.
        mask: Id of MASK; needed only if the query has unknown tokens.
        future: Use copies of given tokens; otherwise read left to right.
    """
    import torch

    from acgpt.engine.layout import body_tokens, build, visible

    layout = build([query], bos=bos, mask=mask, future=future)
    if len(layout.ids) > MOST_LAID_OUT:
        raise QueryError(f"the layout has {len(layout.ids)} slots; up to {MOST_LAID_OUT} can be shown.")
    (copies,) = layout.copies
    body = body_tokens(query, mask).tolist()
    known = pieces([bos if token < 0 else token for token in body], tokenizer)
    texts = pieces([bos], tokenizer) + [BLANK if token < 0 else text for token, text in zip(body, known, strict=True)]
    roles = ["BOS", *(NAMES[role] for role in query.roles.tolist())]
    positions = layout.positions.tolist()
    predicts = {
        row: Target(positions[row] + 1, None if target < 0 else target, texts[positions[row] + 1])
        for row, target in zip(layout.rows.tolist(), layout.targets.tolist(), strict=True)
    }
    slots = tuple(
        ShownSlot(
            text=texts[position],
            id=None if token < 0 else token,
            position=position,
            role="copy" if slot < copies else roles[position],
            predicts=predicts.get(slot),
        )
        for slot, (token, position) in enumerate(zip(layout.ids.tolist(), positions, strict=True))
    )
    seen = visible(torch.tensor(layout.copies), len(slots))[0].tolist()
    return Figure(slots, copies, tuple(tuple(row) for row in seen))


def query_of(template: str, tokenizer: PreTrainedTokenizerBase) -> Query:
    """Encode a template as a query."""
    return encode(parse(template), tokenizer, template).query


# ---- in the terminal ------------------------------------------------------------------------------------------------


def labels(slot: ShownSlot) -> tuple[str, str]:
    """Return the labels of a slot and of its prediction."""
    name = "BOS" if slot.role == "BOS" else label(slot.text, slot.id)
    target = slot.predicts
    return name, "" if target is None else "→ " + label(target.text, target.id)


def shortened(text: str, width: int) -> str:
    """Truncate a text to `width` cells of the terminal."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def downwards(texts: Sequence[str], most: int, cell: int) -> list[tuple[str, ...]]:
    """Return vertical column headings, aligned at the bottom, as one tuple per line."""
    letters = [[c for c in shortened(text, most) if 0 < cell_len(c) <= cell] or ["?"] for text in texts]
    height = max(map(len, letters))
    return list(zip(*([" "] * (height - len(column)) + column for column in letters), strict=True))


def terminal(drawn: Figure, width: int = 100) -> Text:
    """Return the figure as text, at most `width` cells wide.

    A cell takes two characters, or one if the grid would not fit. If that is still too wide, columns in the middle are
    left out, and a line below the grid says so.
    """
    slots = drawn.slots
    heads = ("token", "pos", "role", "predicts")
    fields = [(labels(s)[0], str(s.position), s.role, labels(s)[1]) for s in slots]
    sizes = [min(14, max(map(cell_len, column))) for column in zip(heads, *fields, strict=True)]
    room = max(12, width - sum(sizes) - 2 * len(sizes) - 2)
    cell = 2 if 2 * len(slots) <= room else 1
    columns: list[int | None] = list(range(len(slots)))
    if len(slots) > room:
        columns[room // 2 : len(slots) - (room - room // 2 - 1)] = [None]  # stands for all that are left out

    def line(fields: Sequence[str], style: str, cells: Sequence[tuple[str, str]], bar: str) -> Text:
        text = Text()
        for name, field, size in zip(heads, fields, sizes, strict=True):
            field = field.rjust(size) if name == "pos" else set_cell_size(shortened(field, size), size)
            text.append(field + "  ", f"bold {STYLES['asked']}" if field.startswith("→") else style)
        for k, (mark, mark_style) in zip(columns, cells, strict=True):
            if k is not None and k == drawn.copies > 0:
                text.append(bar.ljust(cell), "dim")
            text.append(set_cell_size(mark, cell), mark_style)
        text.rstrip()
        return text.append("\n")

    shown = [None if k is None else slots[k] for k in columns]
    styles = ["dim" if s is None else STYLES[s.role] for s in shown]
    above = [
        *downwards(["…" if s is None else labels(s)[0].strip("␣") or "␣" for s in shown], 8, cell),
        *downwards(["…" if s is None else str(s.position) for s in shown], 6, cell),
    ]
    result = Text(no_wrap=True, overflow="ignore")
    for marks in above:
        last = marks is above[-1]
        result.append_text(line(heads if last else [""] * 4, "dim", list(zip(marks, styles, strict=True)), " "))
    for q, slot in enumerate(slots):
        if q == drawn.copies > 0:
            result.append("─" * (sum(sizes) + 2 * len(sizes) + cell * (len(columns) + 1)) + "\n", "dim")
        cells = [
            ("…", "dim") if k is None else ("■", style) if drawn.mask[q][k] else ("·", "dim")
            for k, style in zip(columns, styles, strict=True)
        ]
        result.append_text(line(fields[q], STYLES[slot.role], cells, "│"))
    result.append("■ this row reads this column   · it does not   → what is predicted there", "dim")
    if None in columns:
        left_out = len(slots) - len(columns) + 1
        result.append(
            f"\n{left_out} of {len(slots)} columns are left out (…): widen the terminal, draw a picture with -o, or "
            "use --json."
        )
    return result


# ---- as a picture ---------------------------------------------------------------------------------------------------


def picture(drawn: Figure, path: str | Path, title: str = "") -> None:
    """Draw the figure to a file with matplotlib. The suffix is the format: .png, .svg, .pdf.

    Raises:
        InputError: matplotlib is missing, the format is unknown, the file cannot be written, or there are too many
            slots to draw.
    """
    check_format(path)
    from matplotlib import font_manager
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Rectangle

    count, copies = len(drawn.slots), drawn.copies
    if count > MOST_DRAWN:
        raise InputError(
            f"a picture shows at most {MOST_DRAWN} slots, and this question has {count}: acgpt show --json lists them."
        )

    side = 0.3 if count <= 60 else 18 / count  # inches a cell
    small = min(9.0, 30 * side)  # points, the size of letters beside the cells
    gap = 0.35 if copies else 0.0  # cells, between copies and text
    where = [slot + (gap if slot >= copies else 0) for slot in range(count)]
    end = count + gap
    canvas = Canvas(figsize=(end * side, end * side))
    renderer: Any = FigureCanvasAgg(canvas).get_renderer()  # type: ignore[no-untyped-call]
    axes = canvas.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, end), ylim=(end, 0))
    axes.set_axis_off()
    families = {font.name for font in font_manager.fontManager.ttflist}

    def write(x: float, y: float, text: str, colour: str = "#777777", points: float = 9.0, **style: Any) -> Any:
        style = {"va": "center", "ha": "center", "family": [f for f in FONTS if f in families], **style}
        return axes.text(x, y, text, color=colour, fontsize=points, parse_math=False, **style)

    def reach(texts: Sequence[Any]) -> tuple[float, float]:
        """Return the left and the top edge of some texts, in cells."""
        boxes = [text.get_window_extent(renderer).transformed(axes.transData.inverted()) for text in texts]
        return min(min(box.x0, box.x1) for box in boxes), min(min(box.y0, box.y1) for box in boxes)

    for q, row in enumerate(drawn.mask):
        for k, seen in enumerate(row):
            colour = COLOURS[drawn.slots[k].role]
            pale = tuple(1 - 0.75 * (1 - channel) for channel in to_rgb(colour)) if seen else "#f1f1f1"
            axes.add_patch(Rectangle((where[k], where[q]), 1, 1, facecolor=pale, edgecolor="white", linewidth=3 * side))
    beside, above = [], []
    for at, slot in zip(where, drawn.slots, strict=True):
        name, target = (shortened(text, 18) for text in labels(slot))
        colour, middle = COLOURS[slot.role], at + 0.5
        write(-0.25, middle, str(slot.position), points=0.85 * small, ha="right")
        write(middle, -0.25, str(slot.position), points=0.85 * small, va="bottom")
        beside.append(write(-1.5, middle, name, colour, small, ha="right"))
        above.append(write(middle, -1.15, name, colour, small, va="bottom", rotation=90))
        if target:
            write(end + 0.35, middle, target, COLOURS["asked"], small, ha="left", weight="bold")
            frame = (at + 0.07, at + 0.07)  # around the slot where the prediction comes out
            axes.add_patch(Rectangle(frame, 0.86, 0.86, fill=False, edgecolor=COLOURS["asked"], linewidth=6 * side))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # no installed font has the script: boxes are drawn
        left, top = reach(beside)[0] - 2.6, reach(above)[1]
    for at, slot in zip(where, drawn.slots, strict=True):
        write(left, at + 0.5, slot.role, points=0.85 * small, ha="left")
    write(-0.25, -0.25, "position", points=0.85 * small, ha="right", va="bottom")
    unit = 0.3 / side  # distances of texts do not depend on the size of the cells
    for name, first, last, role in (("copies", 0, copies, "copy"), ("BOS and text", copies, count, "given")):
        if first < last:
            spot = (where[first] + 0.05, where[last - 1] + 0.95)
            axes.plot(spot, [end + 0.45 * unit] * 2, color=COLOURS[role], linewidth=1.5, clip_on=False)
            write(sum(spot) / 2, end + unit, name, COLOURS[role], weight="bold")
    caption = "A row is a slot of the model's input: it reads the coloured columns,\nand → is what is predicted there."
    write(left, end + 2 * unit, caption, points=8, ha="left", va="top", linespacing=1.4)
    if title:
        lines = fill(label(title).replace("␣", " "), max(40, int((end - left) * side * 72 / 6.5)))
        write(left, top - 0.8 * unit, lines, "#111111", 10.5, ha="left", va="bottom", linespacing=1.3)
    save_picture(canvas, path, dpi=200, bbox_inches="tight", pad_inches=0.2)
