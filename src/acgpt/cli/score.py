"""`acgpt score`: compute the probability of the text in the slots of templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from acgpt.cli.templates import (
    answered_by,
    answers,
    check_scored,
    load,
    note_adapters,
    questions,
    score_fields,
    settings,
)
from acgpt.cli.ui import FileOption, JsonOption, TemplateArgument, emit, with_options
from acgpt.errors import QueryError
from acgpt.models.ask import ScoreAsk
from acgpt.models.options import ScoreOptions

if TYPE_CHECKING:
    from acgpt.client import Client
    from acgpt.models.ask import Score
    from acgpt.models.language_model import LanguageModel

COLUMNS = {"past only": False, "with future": True}  # of the table: whether the future is read


@with_options(ScoreOptions)
def score(
    template: TemplateArgument = None,
    file: FileOption = None,
    *,
    options: ScoreOptions,
    as_json: JsonOption = False,
) -> None:
    r"""Compute the probability of the text in the {{slots}}, exactly, in one pass.

    acgpt score 'The capital of France is {{Paris}}, on the Seine.'
    acgpt score 'She {{put on her coat}} because it was cold.' --no-future
    acgpt score --file templates.txt --json > scores.jsonl

    Shows the surprise of each asked token in bits (0: certain, 1: a coin toss),
    given the past only, and given the future too: the text after it. -- means
    that the model cannot answer. A token that overlaps a slot is asked as a
    whole: in 'is {{Paris}}' that is ' Paris', with the space.

    Keys of --json:
      template, future (true if it was used), adapter (used, if any),
      log_prob (of all asked tokens, in nats), perplexity (per asked token),
      bound (true if the model computes bounds only),
      tokens: text, id, position (from 1), log_prob
      past_only, with_future (without --future and --no-future): the same score
      from the past only, and with the future: adapter, log_prob, perplexity,
      bound, tokens; null if the model cannot answer, or if there is no future
    """
    groups, future = questions(template, file, check_scored), options.future
    lm, chosen = load(options), settings(ScoreAsk, options)
    from acgpt.display.show import NO_ANSWER, Page, print_score, printable

    if as_json:
        if future is None:
            for text, (score, both) in answers(groups, lambda texts: ask_both_ways(lm, texts, chosen)):
                columns = {key: one and json_fields(lm, one) for key, one in both.items()}
                emit({"template": text, "future": score.future, **json_fields(lm, score), **columns})
        else:
            for text, score in answers(groups, lambda texts: lm.log_prob(texts, **chosen)):
                emit({"template": text, "future": score.future, **json_fields(lm, score)})
        return

    def ask(texts: list[str]) -> list[dict[str, Score | QueryError]]:
        columns: dict[str, Sequence[Score | QueryError]] = {}
        for name, with_future in COLUMNS.items():
            try:
                if future in (None, with_future):
                    columns[name] = lm.log_prob(texts, **chosen | {"future": with_future})
            except QueryError as error:
                if len(texts) > 1:  # `answers` then asks them one by one
                    raise
                columns[name], refusal = [error], error
        results = [dict(zip(columns, scores, strict=True)) for scores in zip(*columns.values(), strict=True)]
        if all(isinstance(result, QueryError) for result in results[0].values()):
            raise refusal
        return results

    page = Page()
    for text, results in answers(groups, ask):
        no_future = future is None and not lm.query(text).needs_future
        if no_future:  # both columns are the same
            results = {"past only": next(item for item in results.values() if not isinstance(item, QueryError))}
        scores = {name: item for name, item in results.items() if not isinstance(item, QueryError)}
        print_score(page, lm, text, {name: scores.get(name) for name in results})
        note_adapters(page, lm, scores)
        if "with future" in scores and not lm.reads_future:
            page.note(
                "This model has not been trained to read the future: expect “with future” to be poor.\n", "yellow"
            )
        if any(score.bound for score in scores.values()):
            page.note("This model computes bounds only: the surprise is at most this, estimated from random samples.\n")
        for item in results.values():
            if isinstance(item, QueryError):
                page.note(printable(f"{NO_ANSWER}: {item}\n"))
        if no_future:
            page.note("No given token comes after the asked ones: there is no future to read.\n")


def json_fields(lm: LanguageModel | Client, score: Score) -> dict[str, Any]:
    """Return the JSON fields of a score, with the adapter that was used."""
    return {**answered_by(lm, score), **score_fields(score)}


def ask_both_ways(
    lm: LanguageModel | Client, texts: list[str], chosen: dict[str, Any]
) -> list[tuple[Score, dict[str, Score | None]]]:
    """Score templates as the model prefers, and again from the past only and with the future, by JSON key.

    A template is scored again only in the way that its first score has not used. A score is `None` if the model cannot
    answer, or if there is no future to read.
    """
    preferred = lm.log_prob(texts, **chosen)
    columns: dict[str, list[Score | None]] = {}
    for name, with_future in COLUMNS.items():
        column: list[Score | None] = [score if score.future == with_future else None for score in preferred]
        no_future = [with_future and not lm.query(text).needs_future for text in texts]
        missing = [i for i, score in enumerate(column) if score is None and not no_future[i]]
        try:
            scores = lm.log_prob([texts[i] for i in missing], **chosen | {"future": with_future})
            for i, score in zip(missing, scores, strict=True):
                column[i] = score
        except QueryError:
            if len(texts) > 1:  # `answers` then asks them one by one
                raise
        columns[name.replace(" ", "_")] = [
            None if absent else score for absent, score in zip(no_future, column, strict=True)
        ]
    return [(score, {key: column[i] for key, column in columns.items()}) for i, score in enumerate(preferred)]
