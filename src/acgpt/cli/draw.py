"""`acgpt draw`: figures of conditioning sets, drawn by the code that is used in training."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from acgpt.cli.ui import ObjectOption, emit, option, with_options
from acgpt.common.options import Options, declared
from acgpt.common.options import option as declare
from acgpt.data.options import PreparationOptions

app = typer.Typer(no_args_is_help=True, help="Draw conditioning sets.")

PICTURE = "Write a picture: .png, .svg or .pdf."


@dataclass(frozen=True)
class SetOptions(Options):
    """Which sets are drawn."""

    own: tuple[str, ...] = declare(
        "Distribution to draw from, as in a recipe. May be repeated. Default: those of the paper.",
        (),
        metavar="MAPPING",
        flags=("--conditioning", "-c"),
        form="list",
    )
    length: int = declare("Tokens per text. Default: 48.", 48, metavar="T", minimum=1, maximum=256)
    rows: int = declare("Sets per distribution. Default: 8.", 8, metavar="N", minimum=1, maximum=64)
    seed: int = declared(PreparationOptions, "seed", help="Seed. Default: 0.")


@app.command()
@with_options(SetOptions)
def conditioning(
    output: Annotated[Path | None, option("--output", "-o", metavar="PATH", help=PICTURE)] = None,
    *,
    options: SetOptions,
    as_json: ObjectOption = False,
) -> None:
    r"""Draw samples of the distributions of conditioning sets used in training.

    acgpt draw conditioning
    acgpt draw conditioning -o sets.png --length 64 --seed 1
    acgpt draw conditioning -c '{r_max: 0.4, b_max: 2, empty: 0.1}' -o mine.svg

    Each row is a set, each square a token: given, asked or unknown. Below the
    rows is how often each position is given. Without -o, draws on the terminal.

    Keys of --json:
      length, seed, draws (number of samples for the shares),
      distributions: title, notation (as in a recipe),
                     conditioning (all parameters, as in acgpt.json),
                     sets (a letter per token: g given, a asked, u unknown),
                     given, unknown (the share of each position)
    """
    from acgpt.display.conditioning import DRAWS, REGIMES, Panel, draw_conditioning, terminal

    length, seed = options.length, options.seed
    distributions = [("Your own", notation, "") for notation in options.own]
    distributions = distributions or [(title, notation, remark) for title, (notation, remark) in REGIMES.items()]
    panels = [Panel(*item, length=length, rows=options.rows, seed=seed, draws=DRAWS) for item in distributions]
    if output is not None:
        draw_conditioning(output, panels)
        print(f"wrote {output}", file=sys.stderr)
    if as_json:
        emit({"length": length, "seed": seed, "draws": DRAWS, "distributions": [item.as_dict() for item in panels]})
    elif output is None:
        print(terminal(panels))
