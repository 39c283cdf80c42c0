"""`acgpt show`: draw what the model is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from acgpt.cli.ui import JsonOption, emit, option, silence_libraries, with_options
from acgpt.models.options import ModelOptions
from acgpt.query.template import parse


@with_options(ModelOptions)
def show(
    template: Annotated[str, typer.Argument(metavar="TEMPLATE", help="A text with {{slots}}, in quotes.")],
    output: Annotated[
        Path | None, option("--output", "-o", metavar="PATH", help="Draw a picture: .png, .svg or .pdf.")
    ] = None,
    *,
    options: ModelOptions,
    future: Annotated[
        bool | None,
        option(
            "--future/--no-future",
            help="With copies of what is given, or left to right? Default: with copies; with several adapters, as the "
            "one that would answer is asked.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    r"""Draw what the model is told: every slot of its input, and which others it reads.

    Given tokens are copied to the front, each with the position of its original,
    where all of the text can read them. Blanks are drawn as □. Only the
    tokenizer is loaded, not the model.

    acgpt show 'The capital of {{Italy}} is Rome.'
    acgpt show 'The cat {{_3}} on the {{_1}}.' -o layout.png
    acgpt show 'The capital of {{Italy}} is Rome.' --no-future

    Keys of --json:
      template, future, adapter (that would be asked, if there are any),
      copies (how many; they are the first slots),
      and lists with one entry a slot: tokens, ids (null for a blank), positions,
      roles (copy, BOS, given, asked, unknown),
      predicts (null, or position, id, text), mask (0 and 1: which slots it reads)
    """
    parse(template)
    silence_libraries()
    from acgpt.display import show as drawing
    from acgpt.display.reader import choose_reader

    reader, about, future = choose_reader(template, options.model, options.adapter, future)
    query = drawing.query_of(template, reader.tokenizer)
    drawn = drawing.figure(query, reader.tokenizer, bos=reader.bos, mask=reader.mask, future=future)
    if output is not None:
        drawing.picture(drawn, output, template)
        print(f"wrote {output}", file=sys.stderr)
    if as_json:
        emit({"template": template, "future": future, **about, **drawn.as_dict()})
    elif output is None:
        page = drawing.Page()
        page.note(drawing.printable(template) + "\n", "bold")
        page.print(drawing.terminal(drawn, page.width), soft_wrap=True)
        if future and query.needs_future and not reader.reads_future:
            page.note(
                "This model has not been trained on copies: unless told --future it is run with --no-future.", "yellow"
            )
