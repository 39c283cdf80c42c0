"""`acgpt infill`: draw what could stand in the slots."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING, Annotated

import typer

from acgpt.cli.templates import AdapterOption, answered_by, answers, load, note_adapters, questions, score_fields
from acgpt.cli.ui import (
    DeviceOption,
    Dtype,
    DtypeOption,
    FileOption,
    FutureOption,
    JsonOption,
    ModelOption,
    TemplateArgument,
    emit,
    option,
)
from acgpt.query.template import parse

if TYPE_CHECKING:
    from acgpt.models.language_model import Sample


def infill(
    template: TemplateArgument = None,
    file: FileOption = None,
    n: Annotated[int, option("-n", metavar="N", min=1, help="How many samples of each template. Default: 1.")] = 1,
    temperature: Annotated[
        float, option(metavar="X", min=0, help="1 is the model's own, the default; 0 is greedy.")
    ] = 1.0,
    top_p: Annotated[
        float,
        option(
            metavar="P",
            help="Draw from the likeliest tokens that together have probability P, above 0 and at most 1.",
        ),
    ] = 1.0,
    top_k: Annotated[int | None, option(metavar="K", min=1, help="Draw from the K likeliest tokens.")] = None,
    seed: Annotated[
        int | None,
        option("--seed", "-s", metavar="N", min=0, help="The same one repeats a run. Default: a fresh one."),
    ] = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    future: FutureOption = None,
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
    if not 0 < top_p <= 1:
        raise typer.BadParameter(f"--top-p must be above 0 and at most 1, not {top_p:g}.")
    if not math.isfinite(temperature):
        raise typer.BadParameter(f"--temperature must be a finite number, not {temperature:g}.")
    groups = questions(template, file, parse)
    used = secrets.randbits(32) if seed is None else seed
    lm = load(model, adapter, device, dtype)
    from acgpt.display.show import Page, print_samples

    def ask(texts: list[str]) -> list[list[Sample]]:
        return lm.sample(texts, n, temperature=temperature, top_p=top_p, top_k=top_k, seed=used, future=future)

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
