"""`acgpt score`: compute the probability of the text in the slots of templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from acgpt.cli.templates import SCORE, answers, check_scored, json_fields, load, note_adapters, questions, settings
from acgpt.cli.ui import DocumentOption, FileOption, JsonOption, TemplateArgument, emit, with_options
from acgpt.errors import QueryError
from acgpt.models.ask import Score, ScoreAsk
from acgpt.models.options import ScoreOptions

if TYPE_CHECKING:
    from acgpt.client import Client
    from acgpt.models.language_model import LanguageModel

COLUMNS = {"past only": False, "with future": True}  # of the table: whether the future is read
JSON_COLUMNS = {name.replace(" ", "_"): future for name, future in COLUMNS.items()}


@with_options(ScoreOptions)
def score(
    template: TemplateArgument = None,
    file: FileOption = None,
    document: DocumentOption = None,
    *,
    options: ScoreOptions,
    as_json: JsonOption = False,
) -> None:
    r"""Compute the probability of the text in the {{slots}}, exactly, in one pass.

    acgpt score 'The capital of France is {{Paris}}, on the Seine.'
    acgpt score 'She {{put on her coat}} because it was cold.' --no-future
    acgpt score --file templates.txt --json > scores.jsonl
    acgpt score --document essay.txt

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
    groups, future = questions(template, file, document, check_scored), options.future
    lm, chosen = load(options), settings(ScoreAsk, options)
    from acgpt.display.show import NO_ANSWER, Page, print_score, printable

    if as_json:
        ways = {"": future} | (JSON_COLUMNS if future is None else {})
        for text, (_, results) in answers(groups, lambda texts: score_ways(lm, texts, ways, chosen)):
            fields: dict[str, Any] = dict.fromkeys(results)
            scores = {name: item for name, item in results.items() if isinstance(item, Score)}
            fields |= {name: json_fields(lm, score, "adapter", *SCORE) for name, score in scores.items()}
            emit({"template": text, "future": results[""].future, **fields.pop(""), **fields})
        return

    page, ways = Page(), {name: reads for name, reads in COLUMNS.items() if future in (None, reads)}
    for text, (no_future, results) in answers(groups, lambda texts: score_ways(lm, texts, ways, chosen)):
        if no_future:  # both columns are the same
            results = {"past only": next(item for item in results.values() if isinstance(item, Score))}
        scores = {name: item for name, item in results.items() if isinstance(item, Score)}
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


def score_ways(
    lm: LanguageModel | Client, texts: list[str], ways: Mapping[str, bool | None], chosen: Mapping[str, Any]
) -> list[tuple[bool, dict[str, Any]]]:
    """Score templates in several ways.

    A score that an earlier way has found is not asked again, nor one with the future if there is none to read.

    Args:
        lm: The model.
        texts: The templates.
        ways: The option `future` by name. The way "" must have an answer.
        chosen: The other settings.

    Returns:
        For each template, whether there is no future to read, if several ways are asked; and by name a `Score`, the
        `QueryError` if the model cannot answer a single template, or `None` if it was not asked.

    Raises:
        QueryError: There is no answer.
    """
    no_future = [False] * len(texts)
    results: list[dict[str, Any]] = [{} for _ in texts]
    for number, (name, future) in enumerate(ways.items()):
        if number == 1:  # not before the first way has refused what cannot be scored
            no_future = [not lm.query(text).needs_future for text in texts]
        missing = []
        for i, result in enumerate(results):
            known = [score for score in result.values() if isinstance(score, Score)]
            absent = future and no_future[i] and known
            result[name] = None if absent else next((score for score in known if score.future == future), None)
            if not absent and result[name] is None:
                missing.append(i)
        try:
            scores = lm.log_prob([texts[i] for i in missing], **{**chosen, "future": future})
            for i, score in zip(missing, scores, strict=True):
                results[i][name] = score
        except QueryError as error:
            if len(texts) > 1 or not name:  # `answers` then asks them one by one
                raise
            results[0][name] = error
    if results and not any(isinstance(item, Score) for item in results[0].values()):
        raise results[0].popitem()[1]
    return list(zip(no_future, results, strict=True))
