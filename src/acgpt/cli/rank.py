"""`acgpt rank`: rank the alternatives in the slots of templates."""

from __future__ import annotations

from acgpt.cli.templates import answers, json_fields, load, note_adapters, questions, settings
from acgpt.cli.ui import DocumentOption, FileOption, JsonOption, TemplateArgument, emit, with_options
from acgpt.models.ask import RankAsk
from acgpt.models.options import RankOptions
from acgpt.query.template import fillings


@with_options(RankOptions)
def rank(
    template: TemplateArgument = None,
    file: FileOption = None,
    document: DocumentOption = None,
    *,
    options: RankOptions,
    as_json: JsonOption = False,
) -> None:
    r"""Rank the alternatives in the {{slots}}.

    acgpt rank 'The {{cat|dog|carburettor}} purred.'
    acgpt rank 'It is {{not |}}raining, so take {{an umbrella|sunglasses}}.'
    acgpt rank --document letter.txt

    With several slots all combinations are compared. An alternative may be empty.
    Alternatives are compared by the probability of the whole text, read left to
    right; or by p(alternative | rest) if the model reads the future and the
    alternatives have the same number of tokens. The output says which.

    Keys of --json:
      template, compared ("whole text" or "asked | given"), future (true if it was
      used), adapter (used, if any),
      alternatives, best first: text, choice (per slot), probability, log_prob
                                (of what was compared, in nats)
    """
    groups = questions(template, file, document, fillings)
    lm, chosen = load(options), settings(RankAsk, options)
    from acgpt.display.show import Page, print_ranking

    page = Page()
    for text, ranking in answers(groups, lambda texts: [lm.rank(item, **chosen) for item in texts]):
        if as_json:
            emit({"template": text, **json_fields(lm, ranking, "compared", "future", "adapter", "alternatives")})
        else:
            print_ranking(page, text, ranking)
            note_adapters(page, lm, {"": ranking})
