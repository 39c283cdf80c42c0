"""`acgpt infill`: fill the gaps of templates, or sample text for their slots."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

from acgpt.cli.templates import (
    SCORE,
    Line,
    answers,
    check_filled,
    json_fields,
    load,
    note_adapters,
    questions,
    settings,
)
from acgpt.cli.ui import Bars, DocumentOption, FileOption, JsonOption, TemplateArgument, emit, with_options
from acgpt.errors import InputError
from acgpt.models.ask import FillAsk, SampleAsk
from acgpt.models.options import InfillOptions
from acgpt.query.template import Slot, parse

if TYPE_CHECKING:
    from acgpt.models.ask import Sample

SAMPLE = ("text", "fills", *SCORE, "lengths", "score", "length_log_prob")  # fields of a sample for --json


@with_options(InfillOptions)
def infill(
    template: TemplateArgument = None,
    file: FileOption = None,
    document: DocumentOption = None,
    *,
    options: InfillOptions,
    as_json: JsonOption = False,
) -> None:
    r"""Fill the gaps of a template, or sample text for its {{slots}}.

    acgpt infill 'The capital of {{_}} is Paris.'
    acgpt infill 'She went to the {{_}} to borrow {{_}}.' -n 3 --max-tokens 8
    acgpt infill 'The war began in {{_:19[0-9]{2}}} and ended in 1945.'
    acgpt infill 'My favourite place in Paris is{{_12}}' --temperature 0.7
    echo 'Once upon a {{_8}}' | acgpt infill - --json
    acgpt infill --document letter.txt --max-tokens 8

    {{_}} is a gap: any text, at any character. {{_3-12}} has 3 to 12 tokens. The
    text of {{_:[0-9]+}} matches a regular expression (extra regex). The answer
    is the best fill, or the -n best ones. It is the likeliest text, and short
    where much would fit: a range such as {{_10-30}} asks for more. A gap that
    ends the template continues until the model ends the text, or up to
    --max-tokens.

    {{_3}} is a blank of three tokens. {{some text}} is a blank with as many
    tokens as the text. A template without gaps is sampled at random. {{?3}} are
    three unknown tokens, neither given nor asked.

    The seed is always printed. With the same seed a template has the same
    samples, up to rounding, regardless of other templates.

    Keys of --json:
      template, seed, future (true if it was used), adapter (used, if any),
      samples: text, fills (per slot), log_prob (in nats, at temperature 1),
               perplexity, tokens: text, id, position (from 1), log_prob
               and for gaps: lengths (tokens generated for each gap),
               score (what fills are ordered by, in nats), and
               length_log_prob if the model predicts lengths
    """
    local = options.server is None
    groups = questions(template, file, document, lambda text: check_filled(text, patterns=local))
    if document is not None:
        groups = map(note_literal_braces, groups)
    lm = load(options)
    from acgpt.display.show import Page, print_samples

    def ask(texts: list[str]) -> Sequence[Sequence[Sample]]:
        if any(map(has_gap, texts)):
            with progress(None) as notice:
                return [lm.fill(text, notice=notice, **settings(FillAsk, options)) for text in texts]
        with progress(options.n * sum(sum(lm.query(text).asked) for text in texts)) as notice:
            return lm.sample(texts, notice=notice, **settings(SampleAsk, options))

    page = Page()
    for number, (text, samples) in enumerate(answers(gaps_alone(groups), ask)):
        if number == 0 and not as_json:
            page.note(f"seed {options.seed}\n")
        if as_json:
            header = {"template": text, "seed": options.seed, **json_fields(lm, samples[0], "future", "adapter")}
            emit({**header, "samples": [json_fields(lm, sample, *SAMPLE) for sample in samples]})
        else:
            print_samples(page, lm, text, samples)
            note_adapters(page, lm, {"": samples[0]})


def has_gap(template: str) -> bool:
    """Return whether a template has a gap; `False` if it is malformed, which is reported when it is asked."""
    try:
        return any(isinstance(part, Slot) and part.gap is not None for part in parse(template))
    except InputError:
        return False


def note_literal_braces(lines: list[Line]) -> list[Line]:
    """Warn of slots with text beside gaps in a document, which may be braces of its own; return the lines."""
    for line in lines:
        slots = [part for part in parse(line.template) if isinstance(part, Slot)]
        texts = [slot for slot in slots if slot.alternatives]
        if texts and len(texts) < len(slots):
            number = line.template.count("\n", 0, texts[0].at) + 1
            warnings.warn(
                f"{line.source}: the text in double braces on line {number} is a slot, and other text is drawn for it. "
                f"Write \\{{{{ for braces of the text itself. Such slots here: {len(texts)}.",
                stacklevel=2,
            )
    return lines


def gaps_alone(groups: Iterable[list[Line]]) -> Iterator[list[Line]]:
    """Split groups so that each template with a gap is alone: filling is slow, so its answer is printed at once."""
    for group in groups:
        for gap, lines in groupby(group, lambda line: has_gap(line.template)):
            together = list(lines)
            yield from [[line] for line in together] if gap else [together]


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """Show the number of drawn tokens on stderr if it is a terminal.

    Args:
        total: Number of tokens that will be drawn; `None` if it is unknown.

    Yields:
        A function to call with the number of new tokens.
    """
    drawn = 0
    with Bars(quiet=not sys.stderr.isatty())("tokens") as update:

        def notice(new: int) -> None:
            nonlocal drawn
            drawn += new
            update(drawn, total, drawn)

        yield notice
