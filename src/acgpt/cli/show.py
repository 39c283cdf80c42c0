"""`acgpt show`: draw the input and the attention mask of a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from acgpt.cli.templates import check_filled, one_template
from acgpt.cli.ui import DocumentOption, JsonOption, emit, option, silence_libraries, with_options
from acgpt.display.pictures import check_format
from acgpt.models.options import ShowOptions


@with_options(ShowOptions)
def show(
    template: Annotated[
        str | None, typer.Argument(metavar="TEMPLATE", show_default=False, help="Text with {{slots}}, in quotes.")
    ] = None,
    document: DocumentOption = None,
    output: Annotated[
        Path | None, option("--output", "-o", metavar="PATH", help="Write a picture: .png, .svg or .pdf.")
    ] = None,
    *,
    options: ShowOptions,
    as_json: JsonOption = False,
) -> None:
    r"""Draw the input slots of a model and its attention mask for a template.

    acgpt show 'The capital of {{Italy}} is Rome.'
    acgpt show 'The cat {{_3}} on the {{_1}}.' -o layout.png
    acgpt show 'The capital of {{Italy}} is Rome.' --no-future

    Copies of given tokens come first, each with the position of its original, so
    that the whole text can attend to them. Blanks are shown as □. Only the
    tokenizer is loaded, not the model.

    Keys of --json:
      template, future, adapter (that would be used, if any),
      copies (number of copies, which are the first input slots),
      and per input slot, as lists: tokens, ids (null for a blank), positions,
      roles (copy, BOS, given, asked, unknown),
      predicts (null, or position, id, text), mask (0 and 1: what it reads)
    """
    text = one_template(template, document, lambda text: check_filled(text, patterns=False)).template
    if output is not None:
        check_format(output)
    silence_libraries()
    from acgpt.display import show as drawing
    from acgpt.display.reader import choose_reader

    reader, used, future = choose_reader(text, options.model, options.adapter, options.future)
    query = drawing.query_of(text, reader.tokenizer)
    layout = drawing.figure(query, reader.tokenizer, bos=reader.bos, mask=reader.mask, future=future)
    if output is not None:
        drawing.picture(layout, output, text)
        print(f"wrote {output}", file=sys.stderr)
    if as_json:
        emit({"template": text, "future": future, **used, **layout.as_dict()})
    elif output is None:
        page = drawing.Page()
        page.note(drawing.printable(text) + "\n", "bold")
        page.print(drawing.terminal(layout, page.width), soft_wrap=True)
        if future and query.needs_future and not reader.reads_future:
            page.note("This model was not trained on copies: by default it is run with --no-future.", "yellow")
