"""`acgpt generate`: draw what an evaluation set asks, in the five modes of the paper, a file a mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from acgpt.cli.evaluate import CorpusArgument, ModelArgument, check_corpus, r_max_in_words
from acgpt.cli.ui import (
    Bars,
    ObjectOption,
    QuietOption,
    emit,
    model_title,
    note_for,
    option,
    silence_libraries,
    stoppable,
    with_options,
)
from acgpt.evaluation.options import GenerationOptions

OUTPUT = "The folder of the files, MODE.jsonl and MODE.json; it has to be named."


@with_options(GenerationOptions)
def generate(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    output: Annotated[Path | None, option("--output", "-o", metavar="FOLDER", help=OUTPUT)] = None,
    *,
    options: GenerationOptions,
    quiet: QuietOption = False,
    as_json: ObjectOption = False,
) -> None:
    r"""Draw what the five modes of the paper ask, by the model's own procedure.

    unconditional          all but the first 20 tokens of a text
    infilling              the middle of a text, from both its ends
    training               all but blocks of it, as in training
    infilling-no-future    the middle, from left to right
    training-no-future     all but the blocks, from left to right: a block is
                           read when it is reached

    acgpt generate runs/ac/model data/mine --split validation -o samples/ac
    acgpt generate runs/ac/model data/mine --modes infilling -n 5 -o samples/5

    What is given is that of acgpt evaluate: the same set for every model. Each
    mode gets MODE.jsonl, a line a sample, and MODE.json, which says how it was
    made. Stop it at any moment: the same command goes on, and what is done is
    left as it is. A mode that the method cannot answer is --.
    docs/how-to/generate.md explains the files.

    Keys of --json:
      model, adapter, corpus, method, options, set, trained_r_max (the model's
      own, null if it does not say), sampling, samples (of each text), folder,
      modes: for each, null or file, texts, tokens (drawn), calls (of the
             model), seconds, tokens_per_second, outside (the share of the time
             that was not the model's)
    """
    check_corpus(corpus, options)
    if output is None:
        raise typer.BadParameter("name a folder for the files: --output FOLDER.")
    bars = Bars(quiet)
    with stoppable(lambda: resume_hint(output)):
        silence_libraries(quiet)
        from acgpt.evaluation.generate import complete_modes, generate

        there = complete_modes(output)
        result = generate(model, corpus, output, note=note_for(options), progress=bars, **vars(options))
    if as_json:
        emit(result)
    else:
        print_generations(result, [mode for mode in result["modes"] if mode in there])


def resume_hint(folder: Path) -> str:
    """How a command that was stopped is taken up again."""
    if any(folder.glob("*.jsonl*")):
        return f"The same command goes on with what is in {folder}."
    return "Nothing had been drawn yet: the same command begins anew."


def print_generations(result: Mapping[str, Any], there: Sequence[str]) -> None:
    """The table for people; these modes were there before."""
    from acgpt.display.show import NO_ANSWER, Page, printable
    from acgpt.display.table import terminal_table

    page, about = Page(), result["set"]
    page.note(printable(model_title(result["model"], result["adapter"])), "bold")
    page.note(
        f"method {result['method']}; {about['texts']} texts of {about['length']} tokens, {result['samples']} of each, "
        f"{r_max_in_words(result)}, set {about['hash'][:12]}\n"
    )
    table = terminal_table(("mode", "tokens", "calls", "seconds", "tokens/s", "outside the model"), fold=False)
    for mode, one in result["modes"].items():
        cells = [NO_ANSWER] * 5
        if one is not None:
            cells = [f"{one['tokens']:,}", f"{one['calls']:,}", f"{one['seconds']:.1f}"]
            cells += [f"{one['tokens_per_second']:,.0f}", f"{one['outside']:.0%}"]
        table.add_row(mode, *cells)
    page.table(table)
    if None in result["modes"].values():
        page.note(f"\n{NO_ANSWER}: cannot be answered by a model of method {result['method']}.")
    if there:
        page.note(f"\nwere there already, and are as they were: {', '.join(there)}.")
    page.note(printable(f"\nwrote {result['folder']}"))
