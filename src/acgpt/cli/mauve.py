"""`acgpt mauve`: how near generated texts are to real ones, and what else can be measured of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from acgpt.cli.ui import Bars, emit, option, silence_libraries, with_options
from acgpt.evaluation.options import ScoringOptions, check_together

HELP = {
    "generated": "A NAME.jsonl that acgpt generate has written, with its NAME.json; or a folder of them; or several.",
    "reference": "What they are compared with: a folder that acgpt prepare made, or a .jsonl or .txt of texts.",
    "json": "For programs: one JSON object in a line for each of GENERATED, with the keys named above.",
}


@with_options(ScoringOptions)
def mauve(
    generated: Annotated[list[Path], typer.Argument(metavar="GENERATED", show_default=False, help=HELP["generated"])],
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", show_default=False, help=HELP["reference"])],
    options: ScoringOptions,
    as_json: Annotated[bool, option("--json", help=HELP["json"])] = False,
) -> None:
    r"""How near generated texts are to real ones: MAUVE, and what else is measured.

    acgpt mauve samples/ac/training.jsonl data/wikitext-103 --split test
    acgpt mauve samples/ac data/wikitext-103 --features default     (offline)
    acgpt mauve samples/ac data/wikitext-103 --asked-only
    acgpt mauve samples/ac data/wikitext-103 --no-mauve --judge runs/ac/model

    The result is NAME.KEY.mauve.json beside each NAME.jsonl, where KEY stands for
    features, reference and judge, so that none replaces another; acgpt report
    reads it. MAUVE takes the package mauve-text, the extra "mauve".
    docs/how-to/score-generations.md says what is measured.

    Keys of --json:
      kind, name, generated, hash (of the file), record (what generated it),
      scored ("whole text" or "asked part"), texts (the first sample of each),
      limit (null or how many of its first texts were scored), empty (texts left
      out),
      mauve: null or mean, std, scores, smoothed, seeds, clusters, settings,
             mauve_text (its version)
      original: null or likewise, of the original texts, where the corpus is that
                of the prompts: what could be reached
      features: null or model, hash, dimensions, length, products (fp32 or tf32:
                the precision of those that were used, of a CPU or a GPU)
      reference: hash, texts (with --no-mauve 0, where the corpus leaves none),
                 and corpus, corpus_hash, split, rule, length, skip,
                 overlaps_prompts, or file
      companions: generated and, where the corpus is that of the prompts,
                  original: distinct_1, distinct_2, distinct_3, repetition, loops
      perplexity (of what was drawn, under the model itself; null if that says
                  only a bound),
      judge: null or model, hash (of its weights, its tokenizer and how it is
             asked), measures, bound, perplexity, log_prob, tokens, cut (tokens
             that it had no positions for), and of the original text, where it is
             known: original
      notes, versions, hardware, seconds, date, command
    """
    check_together(options, reference, unused=["as_json"] if as_json else [])
    bars = Bars()
    silence_libraries()
    from acgpt.evaluation.score_samples import score_samples

    score_samples(
        generated,
        reference,
        progress=bars,
        note=lambda text: print(text, file=sys.stderr),
        done=lambda path, result: emit(result) if as_json else print_result(result, path),
        **vars(options),
    )


def print_result(result: Mapping[str, Any], path: Path) -> None:
    """Print the table for people."""
    from acgpt.display.show import NO_ANSWER, Page, printable
    from acgpt.display.table import terminal_table

    page, record, found = Page(), result["record"], result["mauve"]
    page.note(printable(result["generated"]), "bold")
    page.note(
        printable(f"method {record['method']}, mode {record['mode']}; {result['texts']} texts, {result['scored']}")
    )
    if found is not None:
        spread = "" if found["std"] is None else f" ± {found['std']:.3f}"
        page.print(f"MAUVE {found['mean']:.3f}{spread}", style="bold")
        if result["original"] is not None:
            page.note(f"the original texts have {result['original']['mean']:.3f}")
        page.note(
            printable(
                f"over {len(found['seeds'])} seeds of k-means, {found['clusters']} clusters; against "
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
    table.add_row("perplexity, its own", own_perplexity, NO_ANSWER)
    if judge is not None:
        sign = "≤ " if judge["bound"] else ""
        sides = judge, judge["original"]
        shown = [NO_ANSWER if side is None else f"{sign}{side['perplexity']:,.2f}" for side in sides]
        table.add_row(f"perplexity, judge's ({judge['measures']})", *shown)
    page.table(table)
    for note in result["notes"]:
        page.note(printable(f"note: {note}"))
    page.note(printable(f"{path}\n"))
