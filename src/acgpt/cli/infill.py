"""`acgpt infill`: sample text for the slots of templates."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

import typer

from acgpt.cli.templates import answered_by, answers, check_template, load, note_adapters, questions, score_fields
from acgpt.cli.ui import FileOption, JsonOption, TemplateArgument, emit, with_options
from acgpt.models.options import SampleOptions

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
    r"""Sample text for the {{slots}}.

    acgpt infill 'The cat {{_3}} on the {{_1}}.' -n 5 --seed 1
    acgpt infill 'My favourite place in Paris is{{_12}}' --temperature 0.7
    echo 'Once upon a {{_8}}' | acgpt infill - --json

    {{_3}} is a blank of three tokens. {{some text}} is a blank with as many
    tokens as the text. The seed is always printed. With the same seed a template
    has the same samples, up to rounding, regardless of other templates.

    Keys of --json:
      template, seed, future (true if it was used), adapter (used, if any),
      samples: text, fills (per slot), log_prob (in nats, at temperature 1),
               perplexity, tokens: text, id, position (from 1), log_prob
    """
    if not 0 < options.top_p <= 1:
        raise typer.BadParameter(f"--top-p must be above 0 and at most 1, not {options.top_p:g}.")
    if not math.isfinite(options.temperature):
        raise typer.BadParameter(f"--temperature must be a finite number, not {options.temperature:g}.")
    groups = questions(template, file, check_template)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    lm = load(options)
    from acgpt.display.show import Page, print_samples

    def ask(texts: list[str]) -> list[list[Sample]]:
        settings = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "future")}
        return lm.sample(texts, options.n, seed=seed, **settings)

    page = Page()
    for number, (text, samples) in enumerate(answers(groups, ask)):
        if number == 0 and not as_json:
            page.note(f"seed {seed}\n")
        if as_json:
            entries = [{"text": sample.text, "fills": sample.fills, **score_fields(sample)} for sample in samples]
            header = {"template": text, "seed": seed, "future": samples[0].future, **answered_by(lm, samples[0])}
            emit({**header, "samples": entries})
        else:
            print_samples(page, lm, samples)
            note_adapters(page, lm, {"": samples[0]})
