"""`acgpt evaluate`: perplexity in the five modes of the paper, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acgpt.cli.ui import Bars, ObjectOption, emit, model_title, note_for, silence_libraries, stoppable, with_options
from acgpt.evaluation.options import AskingOptions, EvaluationOptions

if TYPE_CHECKING:
    from acgpt.display.show import Page

HELP = {
    "model": "A folder, a Hugging Face hub id or a .gguf file; 'default' is the embedded SmolLM2-135M-Instruct, "
    "with its adapter.",
    "corpus": "A folder that acgpt prepare made; may be left out with --dataset.",
}
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=HELP["model"])]
CorpusArgument = Annotated[Path | None, typer.Argument(metavar="CORPUS", show_default=False, help=HELP["corpus"])]


@with_options(EvaluationOptions)
def evaluate(
    model: ModelArgument, corpus: CorpusArgument = None, *, options: EvaluationOptions, as_json: ObjectOption = False
) -> None:
    r"""Perplexity of a model in the five modes of the paper.

    unconditional          nothing is given, everything is asked
    infilling              both ends of a text are given, the middle is asked
    training               blocks are given, as in training
    infilling-no-future    what infilling asks, from the past alone
    training-no-future     what training asks, from the past alone

    acgpt evaluate runs/ac-gpt/model corpora/wikitext --r-max 0.6 -o results.json
    acgpt evaluate runs/ac-gpt/model corpora/wikitext --conditioning model
    acgpt evaluate default corpora/smollm2 --limit 20 --modes unconditional

    What is asked given what is drawn once and kept beside the corpus, so that
    every model answers the same; results are comparable if the set's hash is the
    same. A mode that a method cannot answer is --, in JSON null. With -o, an
    evaluation that was stopped goes on when the same command is given again, and
    FILE.per-text.json keeps the sums of each text, from which acgpt report takes
    the intervals of differences between models.

    Keys of --json:
      model, adapter, corpus, method, options (of the method), bound (are the
      perplexities upper bounds?), metadata (the model's acgpt.json),
      trained_r_max (the model's own, null if it does not say),
      modes: for each, null or perplexity, interval (95 %, over texts), mean_nll
             (nats), tokens (asked), texts
      gains: for infilling and training, null or percent, interval: by how much
             the future lowers the perplexity
      set: hash, path, texts, length, r_max, seed, conditioning, tokenizer_hash,
           corpus_hash, split
      bootstrap (resamples, level, seed), bos_token_id, mask_token_id, device,
      dtype, batch_tokens, compiled, resumed (true, if it had been stopped),
      seconds, versions (of acgpt, torch, …), date, command
    """
    check_corpus(corpus, options)
    bars = Bars()
    with stoppable(lambda: resume_hint(options.output)):
        silence_libraries()
        from acgpt.evaluation.evaluate import evaluate

        result = evaluate(model, corpus, note=note_for(options), progress=lambda: bars("questions"), **vars(options))
    if as_json:
        emit(result)
    else:
        print_evaluation(result)


def resume_hint(output: str | Path | None) -> str:
    """How an evaluation that was stopped is taken up again."""
    if output is None:
        return "Nothing is kept: with -o FILE an evaluation goes on where it was stopped."
    from acgpt.evaluation.evaluate import part_of

    if part_of(Path(output)).is_file():
        return f"The same command goes on with what is in {part_of(Path(output))}."
    return "Nothing had been answered yet: the same command begins anew."


def check_corpus(corpus: Path | None, options: AskingOptions) -> None:
    """Refuse a command that names neither a corpus nor an evaluation set."""
    if corpus is None and options.dataset is None:
        raise typer.BadParameter("name a CORPUS (see acgpt prepare), or an evaluation dataset with --dataset PATH.")


def r_max_in_words(result: Mapping[str, Any]) -> str:
    """The r_max of the evaluation set, and how it compares with the model's own."""
    asked, own = result["set"]["r_max"], result["trained_r_max"]
    beside = "" if own is None else " as in training" if own == asked else f" (trained with {own:g})"
    return f"r_max {asked}{beside}"


def print_evaluation(result: Mapping[str, Any]) -> None:
    """The table for people."""
    from acgpt.display.show import Page, printable

    page, about = Page(), result["set"]
    page.note(printable(model_title(result["model"], result["adapter"])), "bold")
    page.note(
        f"method {result['method']}; {about['texts']} texts of {about['length']} tokens, {r_max_in_words(result)}, "
        f"set {about['hash'][:12]}; {result['dtype']} on {result['device']}, {result['seconds']:.1f} s\n"
    )
    print_perplexities(page, result)


def print_perplexities(page: Page, result: Mapping[str, Any]) -> None:
    """The perplexities of `Evaluation.as_dict`, mode by mode."""
    from acgpt.display.show import NO_ANSWER
    from acgpt.display.table import terminal_table

    table = terminal_table(("mode", "perplexity", "95 % interval", "asked", "gain from the future"), fold=False)
    for mode, answer in result["modes"].items():
        row, gained = [NO_ANSWER] * 3, NO_ANSWER if mode in result["gains"] else ""
        if answer is not None:
            span = NO_ANSWER if answer["interval"] is None else "{:,.2f}–{:,.2f}".format(*answer["interval"])
            perplexity = "∞" if answer["perplexity"] is None else f"{answer['perplexity']:,.2f}"
            perplexity = f"≤ {perplexity}" if result.get("bound") else perplexity
            row = [perplexity, span, f"{answer['tokens']:,}"]
        gain = result["gains"].get(mode)
        if gain is not None and gain["percent"] is not None:
            gained = f"{gain['percent']:z.1f} %"
            gained += "" if gain["interval"] is None else " ({:z.1f} to {:z.1f})".format(*gain["interval"])
        table.add_row(mode, *row, gained)
    page.table(table)
    if None in result["modes"].values():
        how = "".join(f", {name}={value}" for name, value in result.get("options", {}).items())
        page.note(f"\n{NO_ANSWER}: cannot be answered by a model of method {result['method']}{how}.")
    if result.get("bound"):
        page.note("\n≤: a bound, estimated by chance; not to be compared with exact perplexities.")
