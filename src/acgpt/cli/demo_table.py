"""A table of perplexities with and without the future.

    perplexity   prose, past only   with future   change   code, past only   with future   change
    unadapted            …               …           …            …               …           …
    adapted              …               …           …            …               …           …

`demo_texts.json` holds short passages of prose and code with one gap each. They were written for this purpose, so no
model was trained on them. The text after a gap has a clue to its content.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from acgpt.display.table import terminal_table
from acgpt.models.adapters import Choice
from acgpt.models.answers import Score
from acgpt.models.language_model import LanguageModel
from acgpt.models.searches import Question

if TYPE_CHECKING:
    from acgpt.display.show import Page

TEXTS = Path(__file__).with_name("demo_texts.json")
UNADAPTED, ADAPTED = "unadapted", "adapted"


@dataclass(frozen=True)
class Worth:
    """Perplexity per asked token of one kind of text, given the past only and given copies of all given tokens."""

    past: float
    future: float
    tokens: int  # number of asked tokens

    @property
    def change(self) -> float:
        """Relative change of the perplexity by the future: -0.2 is a fifth less."""
        return self.future / self.past - 1


def demo_texts() -> dict[str, list[str]]:
    """Return the templates by kind: "prose" and "code"."""
    texts: dict[str, list[str]] = json.loads(TEXTS.read_text(encoding="utf-8"))
    return texts


def worth(lm: LanguageModel, questions: Mapping[str, Sequence[Question]]) -> dict[str, dict[str, Worth]]:
    """Compute perplexities with and without the future, by model and by kind of text.

    Args:
        lm: A model. If it has an adapter, the model without it is measured too.
        questions: Templates or queries, by kind, whose asked tokens are scored.
    """
    models: dict[str, Choice] = {UNADAPTED: False, ADAPTED: only_adapter(lm)} if lm.adapters else {UNADAPTED: None}
    return {
        name: {kind: one_worth(lm, list(asked), adapter) for kind, asked in questions.items()}
        for name, adapter in models.items()
    }


def only_adapter(lm: LanguageModel) -> Choice:
    """Return the adapter of a model, to bypass the router; `None`, the router's choice, if there are several."""
    return next(iter(lm.adapters)) if len(lm.adapters) == 1 else None


def one_worth(lm: LanguageModel, questions: list[Question], adapter: Choice) -> Worth:
    """Compute perplexities of some questions; `adapter` as in `LanguageModel.log_prob`."""
    past, future = (lm.log_prob(questions, future=reads, adapter=adapter) for reads in (False, True))
    return Worth(perplexity(past), perplexity(future), sum(len(score.tokens) for score in past))


def perplexity(scores: Sequence[Score]) -> float:
    """Return the perplexity per asked token, over all texts."""
    tokens = [token.log_prob for score in scores for token in score.tokens]
    try:
        return math.exp(-math.fsum(tokens) / len(tokens))
    except OverflowError:
        return math.inf


def print_worth(page: Page, table: Mapping[str, Mapping[str, Worth]]) -> None:
    """Print the table, one row per model."""
    kinds_of = next(iter(table.values()))
    columns = [column for kind in kinds_of for column in (f"{kind}, past only", "with future", "change")]
    result = terminal_table(("perplexity", *columns))
    for name, kinds in table.items():
        cells = [(f"{w.past:.2f}", f"{w.future:.2f}", f"{w.change:+.0%}") for w in kinds.values()]
        result.add_row(name, *(cell for three in cells for cell in three))
    page.table(result)
    page.print()
