"""`acgpt evaluate`: perplexity in the five modes of the paper."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acgpt.cli.ui import (
    Bars,
    ObjectOption,
    emit,
    model_title,
    note_for,
    option,
    silence_libraries,
    stoppable,
    with_options,
)
from acgpt.common.files import check_writable
from acgpt.evaluation.options import AskingOptions, EvaluationOptions

if TYPE_CHECKING:
    from acgpt.display.show import Page

HELP = {
    "model": "Folder, Hugging Face hub id or .gguf file; 'default' is the embedded model with its adapter.",
    "corpus": "Corpus folder (see acgpt prepare); optional with --dataset.",
    "figure": "Draw the gain from the future by distance: .png, .svg or .pdf.",
}
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=HELP["model"])]
CorpusArgument = Annotated[Path | None, typer.Argument(metavar="CORPUS", show_default=False, help=HELP["corpus"])]
FigureOption = Annotated[Path | None, option("--figure", metavar="PATH", help=HELP["figure"])]


@with_options(EvaluationOptions)
def evaluate(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    *,
    options: EvaluationOptions,
    figure: FigureOption = None,
    as_json: ObjectOption = False,
) -> None:
    r"""Measure the perplexity of a model in the five modes of the paper.

    acgpt evaluate runs/ac-gpt/model corpora/wikitext --r-max 0.6 -o results.json
    acgpt evaluate runs/ac-gpt/model corpora/wikitext --conditioning model
    acgpt evaluate default corpora/smollm2 --limit 20 --modes unconditional
    acgpt evaluate runs/ac-gpt/model corpora/wikitext --figure distances.png

    Modes:
      unconditional          nothing is given, everything is asked
      infilling              both ends of a text are given, the middle is asked
      training               blocks are given, as in training
      infilling-no-future    asks the same as infilling, from the past only
      training-no-future     asks the same as training, from the past only

    The evaluation dataset is created once and saved with the corpus, so that all
    models answer the same questions. Results are comparable if its hash is the
    same. A mode that a method cannot answer is shown as -- (JSON: null).
    Intervals resample documents (below 30 of them, the texts). The gain from the
    future is also shown by the distance of an asked token to the next given one,
    and by the length of its run of tokens that are not given.
    With -o, the same command resumes a stopped evaluation, and sums per document
    are written to FILE.per-text.json, for the intervals of acgpt report.

    Keys of --json:
      model, adapter, corpus, method, options (of the method), bound (true if
      perplexities are upper bounds), metadata (acgpt.json of the model),
      trained_r_max (null if unknown), trained_r_maxes (of a mixture's parts),
      modes: by mode, null or perplexity, interval (95 %), mean_nll (nats),
             tokens (asked), texts
      gains: for infilling and training, null or percent, interval: reduction of
             the perplexity by the future
      by_distance: for infilling and training, null or distance, run: by bin
             (1, 2, 3–4, …, 33+, none) tokens, nats, nats_without, gain, interval
      set: hash, path, texts, length, documents (null: not known), r_max, seed,
           conditioning, tokenizer_hash, corpus_hash, split
      bootstrap: resamples, level, seed, unit (documents or texts), units
      bos_token_id, mask_token_id, device,
      dtype, batch_tokens, compiled, resumed (true if it was resumed),
      seconds, versions (of acgpt, torch, …), date, command
    """
    check_corpus(corpus, options)
    if figure is not None:
        from acgpt.display.pictures import check_format

        check_format(figure)
        check_writable(figure)
        from acgpt.query.modes import WITHOUT_FUTURE

        if options.modes and not any(set(pair) <= set(options.modes) for pair in WITHOUT_FUTURE.items()):
            raise typer.BadParameter("--figure shows gains: they need a mode and its -no-future among --modes.")
    bars = Bars()
    with stoppable(lambda: resume_hint(options.output)):
        silence_libraries()
        from acgpt.evaluation.evaluate import evaluate

        result = evaluate(model, corpus, note=note_for(options), progress=lambda: bars("tokens"), **vars(options))
    if as_json:
        emit(result)
    else:
        print_evaluation(result)
    if figure is not None:
        from acgpt.display.distances import draw_distances

        draw_distances(figure, result["by_distance"])
        print(f"wrote {figure}", file=sys.stderr)


def resume_hint(output: str | Path | None) -> str:
    """Return how to resume a stopped evaluation."""
    if output is None:
        return "Nothing was saved: with -o FILE an evaluation can be resumed."
    from acgpt.evaluation.perplexity import partial_path

    if partial_path(Path(output)).is_file():
        return f"The same command resumes from {partial_path(Path(output))}."
    return "Nothing was computed yet: the same command starts over."


def check_corpus(corpus: Path | None, options: AskingOptions) -> None:
    """Refuse a command without a corpus and an evaluation dataset."""
    if corpus is None and options.dataset is None:
        raise typer.BadParameter("name a CORPUS (see acgpt prepare), or an evaluation dataset with --dataset PATH.")


def describe_r_max(result: Mapping[str, Any]) -> str:
    """Describe the r_max and the placement of the evaluation dataset, compared with those of training."""
    asked, trained = result["set"]["r_max"], result["trained_r_max"]
    mixture = result["trained_r_maxes"] or []
    if trained is None:
        suffix = ""
    elif len(mixture) > 1:
        first = ", the first part of the training mixture" if asked == mixture[0] else ""
        suffix = first or f" (trained with a mixture of r_max {min(mixture):g} to {max(mixture):g})"
    else:
        suffix = " as in training" if trained == asked else f" (trained with {trained:g})"
    placement = placement_of(result["set"].get("conditioning"))
    own = placement_of((result.get("metadata") or {}).get("conditioning"))
    suffix += ", placement stretches" if placement == "stretches" else ""
    suffix += f" (trained with {own})" if own is not None and own != placement else ""
    return f"r_max {asked}{suffix}"


def placement_of(conditioning: Any) -> str | None:
    """Return how a distribution, as in `acgpt.json`, places blocks; `None` if it has none, or is not valid."""
    from acgpt.errors import InputError
    from acgpt.query.conditioning import Blocks, Conditioning

    try:
        parts = Conditioning.from_dict(conditioning).parts
    except InputError:
        return None
    return next((part.placement for part in parts if isinstance(part, Blocks)), None)


def print_evaluation(result: Mapping[str, Any]) -> None:
    """Print a result as a table."""
    from acgpt.display.show import Page, printable
    from acgpt.evaluation.dataset import name_texts

    page, dataset = Page(), result["set"]
    page.note(printable(model_title(result["model"], result["adapter"])), "bold")
    page.note(
        f"method {result['method']}; {name_texts(dataset)}, {dataset['length']} tokens each, {describe_r_max(result)}, "
        f"set {dataset['hash'][:12]}; {result['dtype']} on {result['device']}, {result['seconds']:.1f} s\n"
    )
    print_perplexities(page, result)
    print_distances(page, result["by_distance"])


def print_perplexities(page: Page, result: Mapping[str, Any]) -> None:
    """Print the perplexities of `Evaluation.as_dict` by mode."""
    from acgpt.display.show import NO_ANSWER
    from acgpt.display.table import terminal_table

    table = terminal_table(("mode", "perplexity", "95 % interval", "asked", "gain from the future"), fold=False)
    for mode, answer in result["modes"].items():
        row, gained = [NO_ANSWER] * 3, NO_ANSWER if mode in result["gains"] else ""
        if answer is not None:
            span = "" if answer["interval"] is None else "{:,.2f}–{:,.2f}".format(*answer["interval"])
            perplexity = "∞" if answer["perplexity"] is None else f"{answer['perplexity']:,.2f}"
            perplexity = f"≤ {perplexity}" if result.get("bound") else perplexity
            row = [perplexity, span, f"{answer['tokens']:,}"]
        gain = result["gains"].get(mode)
        if gain is not None and gain["percent"] is not None:
            gained = f"{gain['percent']:z.1f} %"
            gained += "" if gain["interval"] is None else " ({:z.1f} to {:z.1f})".format(*gain["interval"])
        table.add_row(mode, *row, gained)
    page.table(table)
    if about := describe_intervals(result):
        page.note(about)
    if None in result["modes"].values():
        options = "".join(f", {name}={value}" for name, value in result.get("options", {}).items())
        page.note(f"\n{NO_ANSWER}: cannot be answered by a model of method {result['method']}{options}.")
    if result.get("bound"):
        page.note("\n≤: an upper bound, estimated from random samples. Do not compare it with exact perplexities.")


def describe_intervals(result: Mapping[str, Any]) -> str:
    """Say over what the intervals of a result are, or why there are none; "" if no mode was answered."""
    from acgpt.evaluation.bootstrap import DOCUMENTS, MIN_DOCUMENTS, MIN_UNITS

    units, documents = result["bootstrap"]["units"], result["set"]["documents"]
    if not any(result["modes"].values()):
        return ""
    if units < MIN_UNITS:
        return f"\nNo intervals: they need at least {MIN_UNITS} texts, not {units}."
    if result["bootstrap"]["unit"] == DOCUMENTS:
        return f"\nIntervals are over {units:,} documents."
    reason = (
        "the corpus does not tell its documents apart (several files or a .jsonl file would)"
        if documents is None
        else f"there are fewer than {MIN_DOCUMENTS} documents ({documents})"
    )
    return (
        f"\nIntervals are by windows: they resample the {units:,} texts, because {reason}. Texts of one document are "
        "alike, so the intervals are too narrow."
    )


def print_distances(page: Page, by_distance: Mapping[str, Any]) -> None:
    """Print `Evaluation.by_distance`, a table for distances and one for runs."""
    from acgpt.display.table import terminal_table
    from acgpt.evaluation.bootstrap import MIN_UNITS

    answered = {mode: gains for mode, gains in by_distance.items() if gains is not None}
    if not answered:
        return
    for name, title in (("distance", "tokens to the next given one"), ("run", "tokens in the run")):
        table = terminal_table(("mode", title, "asked", "nats, future", "no future", "gain"), fold=False)
        for mode, gains in answered.items():
            for number, (label, entry) in enumerate(gains[name].items()):
                numbers = ["∞" if entry[key] is None else f"{entry[key]:.3f}" for key in ("nats", "nats_without")]
                gained = "--" if entry["gain"] is None else f"{entry['gain']:z.3f}"
                gained += "" if entry["interval"] is None else " ({:z.3f} to {:z.3f})".format(*entry["interval"])
                table.add_row("" if number else mode, label, f"{entry['tokens']:,}", *numbers, gained)
        page.note("")
        page.table(table)
    note = "\nIn nats a token. none: no given token follows. A run ends at given tokens."
    bins = [entry for gains in answered.values() for entries in gains.values() for entry in entries.values()]
    few = f" No interval: fewer than {MIN_UNITS} documents or texts have such tokens."
    page.note(note + (few if any(entry["interval"] is None for entry in bins) else ""))
