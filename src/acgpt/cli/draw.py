"""`acgpt draw`: the figures of the paper that show a procedure, from the code that runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from acgpt.cli.ui import emit, option

app = typer.Typer(no_args_is_help=True, help="Draw what training and evaluation give and ask.")

PICTURE = "The picture to write: .png, .svg or .pdf."
SeedOption = Annotated[int, option("--seed", "-s", metavar="N", min=0, max=2**32 - 1, help="Default: 0.")]


@app.command()
def conditioning(
    output: Annotated[Path | None, option("--output", "-o", metavar="PATH", help=PICTURE)] = None,
    own: Annotated[
        list[str] | None,
        option(
            "--conditioning",
            "-c",
            metavar="MAPPING",
            help="A distribution to draw instead of the regimes, as recipes write it. May be repeated.",
        ),
    ] = None,
    length: Annotated[int, option(metavar="T", min=1, max=256, help="Tokens of a text. Default: 48.")] = 48,
    rows: Annotated[int, option(metavar="N", min=1, max=64, help="Sets to show of each distribution. Default: 8.")] = 8,
    seed: SeedOption = 0,
    as_json: Annotated[bool, option("--json", help="For programs: one JSON object with the keys named above.")] = False,
) -> None:
    r"""Draw conditioning sets from the distributions that models are trained on.

    Each row is a set, each square a token: given, asked or unknown. Below the
    rows stands how often each position is given. Without -o, in characters.

    acgpt draw conditioning
    acgpt draw conditioning -o sets.png --length 64 --seed 1
    acgpt draw conditioning -c '{r_max: 0.4, b_max: 2, empty: 0.1}' -o mine.svg

    Keys of --json:
      length, seed, draws (from which shares are estimated),
      distributions: title, notation (as recipes write it),
                     conditioning (all its parameters, as in acgpt.json),
                     sets (a letter a token: g given, a asked, u unknown),
                     given, unknown (the share of each position)
    """
    from acgpt.display.conditioning import DRAWS, REGIMES, draw_conditioning, panel, terminal

    wanted = [("Your own", notation, "") for notation in own or ()]
    wanted = wanted or [(title, notation, remark) for title, (notation, remark) in REGIMES.items()]
    panels = [panel(*words, length=length, rows=rows, seed=seed, draws=DRAWS) for words in wanted]
    if output is not None:
        draw_conditioning(output, panels)
        print(f"wrote {output}", file=sys.stderr)
    if as_json:
        emit({"length": length, "seed": seed, "draws": DRAWS, "distributions": [each.as_dict() for each in panels]})
    elif output is None:
        print(terminal(panels))


@app.command()
def modes(
    output: Annotated[Path, option("--output", "-o", metavar="PATH", help=PICTURE)],
    text: Annotated[
        str | None, option("--text", metavar="TEXT", help="A sentence of 3 to 14 words. Default: that of the paper.")
    ] = None,
    seed: SeedOption = 0,
) -> None:
    r"""Draw the five evaluation modes on a sentence: what each asks, and what it is predicted from.

    acgpt draw modes -o modes.png
    acgpt draw modes -o modes.svg --text 'Ask for anything, given all.' --seed 3
    """
    from acgpt.display.modes import TEXT, draw_modes

    draw_modes(output, TEXT if text is None else text, seed=seed)
    print(f"wrote {output}", file=sys.stderr)
