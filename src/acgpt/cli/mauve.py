"""`acgpt mauve`: score generated texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from acgpt.cli.ui import Bars, emit, option, silence_libraries, with_options
from acgpt.evaluation.options import ScoringOptions, check_compatible

HELP = {
    "generated": "Generations: NAME.jsonl files of acgpt generate, or folders of them.",
    "reference": "Reference: a corpus folder, or a .jsonl or .txt file of texts.",
    "json": "Print one JSON object per generation and line (keys above).",
}


@with_options(ScoringOptions)
def mauve(
    generated: Annotated[list[Path], typer.Argument(metavar="GENERATED", show_default=False, help=HELP["generated"])],
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", show_default=False, help=HELP["reference"])],
    options: ScoringOptions,
    as_json: Annotated[bool, option("--json", help=HELP["json"])] = False,
) -> None:
    r"""Score generated texts: MAUVE, repetition, perplexity.

    acgpt mauve samples/ac/training.jsonl data/wikitext-103 --split test
    acgpt mauve samples/ac data/wikitext-103 --features default     (offline)
    acgpt mauve samples/ac data/wikitext-103 --asked-only
    acgpt mauve samples/ac data/wikitext-103 --no-mauve --judge runs/ac/model

    Writes NAME.KEY.mauve.json beside each NAME.jsonl, for acgpt report. KEY
    identifies features, reference and judge. MAUVE needs the package mauve-text
    (extra "mauve"). See docs/how-to/score-generations.md for the metrics.

    Keys of --json:
      kind, name, generated, hash (of the file), record (what generated it),
      scored ("whole text" or "asked part"), texts (the first sample of each),
      limit (null or the number of texts scored), empty (texts left out),
      mauve: null or mean, std, scores, smoothed, seeds, clusters, settings,
             mauve_text (its version)
      original: null or the same for the original texts, if the corpus is that of
                the prompts: an upper limit
      features: null or model, hash, dimensions, length, products (fp32 or tf32:
                the precision of matrix products)
      reference: hash, texts (0 if none are left, with --no-mauve),
                 and corpus, corpus_hash, split, rule, length, skip,
                 overlaps_prompts, or file
      companions: generated and, if the corpus is that of the prompts,
                  original: distinct_1, distinct_2, distinct_3, repetition, loops
      perplexity (of the sampled tokens under the model itself; null if it
                  computes bounds only),
      judge: null or model, hash (of weights, tokenizer and method), measures,
             bound, perplexity, log_prob, tokens, cut (tokens beyond its
             positions), original (the same for the original text, if known)
      notes, versions, hardware, seconds, date, command
    """
    check_compatible(options, reference)
    bars = Bars()
    silence_libraries()
    from acgpt.evaluation.score_samples import score_samples

    score_samples(
        generated,
        reference,
        progress=bars,
        done=lambda path, result: emit(result) if as_json else print_result(result, path),
        **vars(options),
    )


def print_result(result: Mapping[str, Any], path: Path) -> None:
    """Print a result as a table."""
    from acgpt.display.show import NO_ANSWER, Page, printable
    from acgpt.display.table import terminal_table

    page, record, scores = Page(), result["record"], result["mauve"]
    page.note(printable(result["generated"]), "bold")
    page.note(
        printable(f"method {record['method']}, mode {record['mode']}; {result['texts']} texts, {result['scored']}")
    )
    if scores is not None:
        spread = "" if scores["std"] is None else f" ± {scores['std']:.3f}"
        page.print(f"MAUVE {scores['mean']:.3f}{spread}", style="bold")
        if result["original"] is not None:
            page.note(f"original texts: {result['original']['mean']:.3f}")
        page.note(
            printable(
                f"over {len(scores['seeds'])} k-means seeds, {scores['clusters']} clusters; against "
                f"{result['reference']['texts']} texts; features of {result['features']['model']}"
            )
        )
    own, original, judge = result["companions"]["generated"], result["companions"]["original"], result["judge"]
    table = terminal_table(("", "generated", "original"))
    for key, title in {
        "distinct_1": "distinct-1", "distinct_2": "distinct-2", "distinct_3": "distinct-3",
        "repetition": "repeated 4-grams", "loops": "end in a loop",
    }.items():  # fmt: skip
        shown = [NO_ANSWER if side is None or side[key] is None else f"{side[key]:.1%}" for side in (own, original)]
        table.add_row(title, *shown)
    own_perplexity = NO_ANSWER if result["perplexity"] is None else f"{result['perplexity']:,.2f}"
    table.add_row("perplexity, own model", own_perplexity, NO_ANSWER)
    if judge is not None:
        sign = "≤ " if judge["bound"] else ""
        sides = judge, judge["original"]
        shown = [NO_ANSWER if side is None else f"{sign}{side['perplexity']:,.2f}" for side in sides]
        table.add_row(f"perplexity, judge ({judge['measures']})", *shown)
    page.table(table)
    for note in result["notes"]:
        page.note(printable(f"note: {note}"))
    page.note(printable(f"{path}\n"))
