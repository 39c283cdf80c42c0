"""`acgpt score`: how likely is the text in the slots?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from acgpt.cli.templates import answered_by, answers, load, note_adapters, questions, score_fields
from acgpt.cli.ui import FileOption, JsonOption, TemplateArgument, emit, with_options
from acgpt.errors import QueryError
from acgpt.models.options import QuestionOptions
from acgpt.query.template import parse

if TYPE_CHECKING:
    from acgpt.models.language_model import Score


@with_options(QuestionOptions)
def score(
    template: TemplateArgument = None,
    file: FileOption = None,
    *,
    options: QuestionOptions,
    as_json: JsonOption = False,
) -> None:
    r"""How likely is the text in the {{slots}}? Exact, in one forward pass.

    Shows the surprise of each asked token in bits (0 is certain, 1 a coin toss),
    read from the past only, and with the future: the given text after it. A way
    in which the model cannot be asked is --.

    acgpt score 'The capital of France is {{Paris}}, on the Seine.'
    acgpt score 'She {{put on her coat}} because it was cold.' --no-future
    acgpt score --file templates.txt --json > scores.jsonl

    A token that reaches into a slot is asked as a whole: in 'is {{Paris}}' that
    is ' Paris', the space with it.

    Keys of --json:
      template, future (was it used?), adapter (that answered, if there are any),
      log_prob (of all asked tokens, in nats), perplexity (per asked token),
      bound (true, of a model that only bounds them),
      tokens: text, id, position (from 1), log_prob
    """
    groups, future = questions(template, file, parse), options.future
    lm = load(options)
    from acgpt.display.show import NO_ANSWER, Page, print_score, printable

    if as_json:
        for text, result in answers(groups, lambda texts: lm.log_prob(texts, future=future)):
            emit({"template": text, "future": result.future, **answered_by(lm, result), **score_fields(result)})
        return

    def ask(texts: list[str]) -> list[dict[str, Score | QueryError]]:
        columns: dict[str, Sequence[Score | QueryError]] = {}
        for name, way in {"past only": False, "with future": True}.items():
            try:
                if future in (None, way):
                    columns[name] = lm.log_prob(texts, future=way)
            except QueryError as error:
                if len(texts) > 1:  # `answers` asks each of them alone
                    raise
                columns[name], refusal = [error], error
        found = [dict(zip(columns, scores, strict=True)) for scores in zip(*columns.values(), strict=True)]
        if all(isinstance(each, QueryError) for each in found[0].values()):
            raise refusal
        return found

    page = Page()
    for text, ways in answers(groups, ask):
        nothing_ahead = future is None and not lm.query(text).needs_future
        if nothing_ahead:  # both ways are one question
            ways = {"past only": next(each for each in ways.values() if not isinstance(each, QueryError))}
        scores = {name: each for name, each in ways.items() if not isinstance(each, QueryError)}
        print_score(page, lm, text, {name: scores.get(name) for name in ways})
        note_adapters(page, lm, scores)
        if "with future" in scores and not lm.reads_future:
            page.note("This model has not been trained to read the future: expect “with future” to be bad.\n", "yellow")
        if any(each.bound for each in scores.values()):
            page.note("This model only bounds probabilities: the surprise is at most this, estimated by chance.\n")
        for each in ways.values():
            if isinstance(each, QueryError):
                page.note(printable(f"{NO_ANSWER}: {each}\n"))
        if nothing_ahead:
            page.note("Nothing given stands after what is asked: there is no future to read.\n")
