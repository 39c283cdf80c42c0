"""`acgpt show`: draw what the model is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acgpt.cli.ui import JsonOption, emit, hush, option, takes
from acgpt.models.options import ModelOptions
from acgpt.query.template import parse

if TYPE_CHECKING:
    from acgpt.display.show import Reader


@takes(ModelOptions)
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
    hush()
    from acgpt.display import show as drawing

    reader, about, future = choose_reader(options, template, future)
    future = True if future is None else future
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


def choose_reader(
    options: ModelOptions, template: str, future: bool | None
) -> tuple[Reader, dict[str, str | None], bool | None]:
    """What drawing takes of the model; the adapter that would be asked, if there are any; and with copies or not."""
    from transformers import AutoConfig

    from acgpt.display import show as drawing
    from acgpt.models.adapters import BARE, Adapter, statements
    from acgpt.models.loading import from_pretrained, metadata_of, read_metadata, resolve_all, routed
    from acgpt.models.router import route

    model, adapters = options.model, options.adapter
    source, folders = resolve_all(model, adapters)
    one = next(iter(folders.values())) if isinstance(adapters, Mapping) else adapters
    reader = drawing.load_reader(model, one)  # they have tokenizer and BOS in common
    if not routed(folders):
        return reader, {"adapter": next(iter(folders))} if adapters else {}, future
    config = None if source.endswith(".gguf") else from_pretrained(AutoConfig, source)
    metadata = {name: read_metadata(folder) for name, folder in folders.items()}
    said = statements(metadata, tuple(folders), metadata_of(source, None, config))
    query = drawing.query_of(template, reader.tokenizer)
    way = route(query, {name: Adapter.of(name, said[name]) for name in folders}, said[BARE], future)
    spoken = said[way.adapter or BARE]
    reads = spoken is not None and spoken.reads_copies
    return replace(reader, reads_future=reads), {"adapter": way.adapter}, way.future
