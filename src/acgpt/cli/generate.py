"""`acgpt generate`: sample the asked tokens of an evaluation dataset, one file per mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from acgpt.cli.evaluate import CorpusArgument, ModelArgument, check_corpus, describe_r_max
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

OUTPUT = "Output folder (required): MODE.jsonl and MODE.json per mode."


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
    r"""Sample from a model in the five modes of the paper.

    acgpt generate runs/ac/model data/mine --split validation -o samples/ac
    acgpt generate runs/ac/model data/mine --modes infilling -n 5 -o samples/5

    Modes, and the tokens that are sampled:
      unconditional          all but the first 20 tokens of a text
      infilling              the middle of a text, given both ends
      training               all but blocks of a text, as in training
      infilling-no-future    the middle, left to right
      training-no-future     all but the blocks, left to right; a block is read
                             when it is reached

    The evaluation dataset is that of acgpt evaluate, the same for every model.
    MODE.jsonl has a line per sample, MODE.json the settings. The command can be
    stopped at any time; the same command resumes it. A mode that the method
    cannot answer is shown as --. See docs/how-to/generate.md for the files.

    Keys of --json:
      model, adapter, corpus, method, options, set, trained_r_max (null if
      unknown), trained_r_maxes (of a mixture's parts), sampling,
      samples (per text), folder,
      modes: by mode, null or file, texts, tokens (sampled), calls (of the
             model), seconds, tokens_per_second, outside (share of the time
             spent outside of the model)
    """
    check_corpus(corpus, options)
    if output is None:
        raise typer.BadParameter("choose an output folder: --output FOLDER.")
    bars = Bars(quiet)
    with stoppable(lambda: resume_hint(output)):
        silence_libraries(quiet)
        from acgpt.evaluation.generate import complete_modes, generate

        existing = complete_modes(output)
        result = generate(model, corpus, output, note=note_for(options), progress=bars, **vars(options))
    if as_json:
        emit(result)
    else:
        print_generations(result, [mode for mode in result["modes"] if mode in existing])


def resume_hint(folder: Path) -> str:
    """Return how to resume a stopped command."""
    if any(folder.glob("*.jsonl*")):
        return f"The same command resumes from {folder}."
    return "Nothing was sampled yet: the same command starts over."


def print_generations(result: Mapping[str, Any], existing: Sequence[str]) -> None:
    """Print a result as a table.

    Args:
        result: Result of `acgpt.generate`.
        existing: Modes that were complete before the call.
    """
    from acgpt.display.show import NO_ANSWER, Page, printable
    from acgpt.display.table import terminal_table
    from acgpt.evaluation.dataset import name_texts

    page, dataset = Page(), result["set"]
    page.note(printable(model_title(result["model"], result["adapter"])), "bold")
    page.note(
        f"method {result['method']}; {name_texts(dataset)}, {dataset['length']} tokens each, "
        f"{result['samples']} of each, {describe_r_max(result)}, set {dataset['hash'][:12]}\n"
    )
    table = terminal_table(("mode", "tokens", "calls", "seconds", "tokens/s", "outside the model"), fold=False)
    for mode, generation in result["modes"].items():
        cells = [NO_ANSWER] * 5
        if generation is not None:
            cells = [f"{generation['tokens']:,}", f"{generation['calls']:,}", f"{generation['seconds']:.1f}"]
            cells += [f"{generation['tokens_per_second']:,.0f}", f"{generation['outside']:.0%}"]
        table.add_row(mode, *cells)
    page.table(table)
    if None in result["modes"].values():
        page.note(f"\n{NO_ANSWER}: cannot be answered by a model of method {result['method']}.")
    if existing:
        page.note(f"\nalready complete, not changed: {', '.join(existing)}.")
    page.note(printable(f"\nwrote {result['folder']}"))
