"""`acgpt infill`: draw what could stand in the slots."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

import typer

from acgpt.cli.templates import answered_by, answers, load, note_adapters, questions, score_fields
from acgpt.cli.ui import FileOption, JsonOption, TemplateArgument, emit, with_options
from acgpt.models.options import SampleOptions
from acgpt.query.template import parse

if TYPE_CHECKING:
    from acgpt.models.language_model import Sample


@with_options(SampleOptions)
def infill(
    template: TemplateArgument = None,
    file: FileOption = None,
    *,
    options: SampleOptions,
    as_json: JsonOption = False,
) -> None:
    r"""Draw what could stand in the {{slots}}.

    {{_3}} is a blank of three tokens; {{some text}} is one of as many tokens as
    that text has.

    acgpt infill 'The cat {{_3}} on the {{_1}}.' -n 5 --seed 1
    acgpt infill 'My favourite place in Paris is{{_12}}' --temperature 0.7
    echo 'Once upon a {{_8}}' | acgpt infill - --json

    The seed is always printed: one for the whole run. Under the same seed a
    template has the same samples, to rounding, whatever stands in the lines
    around it.

    Keys of --json:
      template, seed, future (was it used?), adapter (that drew, if there is any),
      samples: text, fills (one a slot), log_prob (in nats, at temperature 1),
               perplexity, tokens: text, id, position (from 1), log_prob
    """
    if not 0 < options.top_p <= 1:
        raise typer.BadParameter(f"--top-p must be above 0 and at most 1, not {options.top_p:g}.")
    if not math.isfinite(options.temperature):
        raise typer.BadParameter(f"--temperature must be a finite number, not {options.temperature:g}.")
    groups = questions(template, file, parse)
    used = secrets.randbits(32) if options.seed is None else options.seed
    lm = load(options)
    from acgpt.display.show import Page, print_samples

    def ask(texts: list[str]) -> list[list[Sample]]:
        how = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "future")}
        return lm.sample(texts, options.n, seed=used, **how)

    page = Page()
    for number, (text, samples) in enumerate(answers(groups, ask)):
        if number == 0 and not as_json:
            page.note(f"seed {used}\n")
        if as_json:
            drawn = [{"text": sample.text, "fills": sample.fills, **score_fields(sample)} for sample in samples]
            about = {"template": text, "seed": used, "future": samples[0].future, **answered_by(lm, samples[0])}
            emit({**about, "samples": drawn})
        else:
            print_samples(page, lm, samples)
            note_adapters(page, lm, {"": samples[0]})
