"""`acgpt rank`: which alternative in the slots fits best?"""

from __future__ import annotations

from dataclasses import asdict

from acgpt.cli.templates import answered_by, answers, load, note_adapters, questions
from acgpt.cli.ui import FileOption, JsonOption, TemplateArgument, emit, with_options
from acgpt.models.options import QuestionOptions
from acgpt.query.template import fillings


@with_options(QuestionOptions)
def rank(
    template: TemplateArgument = None,
    file: FileOption = None,
    *,
    options: QuestionOptions,
    as_json: JsonOption = False,
) -> None:
    r"""Which alternative in the {{slots}} fits best?

    Several slots: all combinations are compared. An alternative may be empty.

    acgpt rank 'The {{cat|dog|carburettor}} purred.'
    acgpt rank 'It is {{not |}}raining, so take {{an umbrella|sunglasses}}.'

    The answer says how they were compared: by the probability of the whole text,
    read left to right; or, if the model reads the future and the alternatives
    have equally many tokens, by p(alternative | all the rest).

    Keys of --json:
      template, compared ("whole text" or "asked | given"), future (was it used?),
      adapter (that answered, if there are any),
      alternatives, the best first: text, choice (one a slot), probability,
                                    log_prob (of what was compared, in nats)
    """
    groups = questions(template, file, fillings)
    lm = load(options)
    from acgpt.display.show import Page, print_ranking

    page = Page()
    for text, ranking in answers(groups, lambda texts: [lm.rank(each, future=options.future) for each in texts]):
        if as_json:
            ranked = [asdict(alternative) for alternative in ranking.alternatives]
            about = {"template": text, "compared": ranking.compared, "future": ranking.future}
            emit({**about, **answered_by(lm, ranking), "alternatives": ranked})
        else:
            print_ranking(page, text, ranking)
            note_adapters(page, lm, {"": ranking})
