"""Limits of what a request asks for: questions, texts and tokens. Those of its body are checked in `middleware`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from acgpt.errors import QueryError
from acgpt.models.ask import MAX_TOKENS, DrawingOptions, LengthsAsk
from acgpt.models.searches import parse_gaps
from acgpt.query.lengths import LONGEST
from acgpt.query.query import Query
from acgpt.query.template import Given, Part, parse
from acgpt.query.text import encode_text
from acgpt.serving.errors import InvalidField, LimitExceeded
from acgpt.serving.service import Service


class Budget:
    """Counts the tokens of a request, up to the limit of the server.

    Args:
        service: Has the limits, and the model that tokenizes.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.tokens = service, 0

    def spend(self, tokens: int, param: str | None = None) -> None:
        """Count tokens.

        Args:
            tokens: Number of tokens.
            param: The field that asks for them, for errors. Default: that of the question.

        Raises:
            LimitExceeded: The request has too many of them; an `InvalidField` if it is known of which field.
        """
        self.tokens += tokens
        if self.tokens > (most := self.service.limits.max_tokens_per_request):
            error = LimitExceeded(
                f"the request has {self.tokens} tokens, those that it asks for included; at most {most} are allowed "
                "(max_tokens_per_request)."
            )
            raise error if param is None else InvalidField(param, error)

    def spend_on_gaps(
        self, parts: Sequence[Part], ask: DrawingOptions | LengthsAsk, n: int = 1, param: str | None = None
    ) -> None:
        """Count the tokens of a template with gaps: those of its text, and the most that it can ask for.

        Args:
            parts: The parsed template.
            ask: Has the maximum number of tokens of a gap.
            n: Number of candidates.
            param: The field that asks for so many tokens, for errors. Default: that of the question.
        """
        lm, asked, texts = self.service.lm, 0, []
        longest = ask.max_tokens or (LONGEST if self.service.scheduler.executor.heads else MAX_TOKENS)
        for part in parts:
            if isinstance(part, Given):
                texts.append(part.text)
            elif part.gap is not None:
                most = max(longest, part.gap.least) if part.gap.most is None else part.gap.most
                asked += min(most, lm.positions)
            else:
                texts += part.alternatives[:1]
                asked += part.tokens or 0
        self.spend(len(encode_text("".join(texts), lm.tokenizer)))
        self.spend(n * asked, param)


def parsed(service: Service, question: str | Query) -> list[Part]:
    """Parse a template, and check that its text is not so long that it need not be tokenized."""
    if isinstance(question, Query):
        return []
    slots = question.count("{{") - question.count("\\{{")
    if slots > service.lm.positions:
        raise QueryError(f"the template has {slots} slots; the model has {service.lm.positions} positions.")
    parts = parse(question)
    texts = ([part.text] if isinstance(part, Given) else part.alternatives for part in parts)
    service.check_characters(sum(max(map(len, own), default=0) for own in texts))  # with the longest alternatives
    return parts


def gaps_of(service: Service, template: str) -> list[Part]:
    """Parse a template that must have gaps, as `parsed`."""
    parsed(service, template)
    return parse_gaps(template)


def check_questions(service: Service, field: str, entries: Sequence[Any]) -> None:
    """Check that a list does not have too many questions."""
    if len(entries) > (most := service.limits.max_questions):
        error = LimitExceeded(f"{field} has {len(entries)} entries; at most {most} are allowed (max_questions).")
        raise InvalidField(field, error)


def check_numbers(service: Service, numbers: Mapping[str, int | None]) -> None:
    """Check the numbers of samples, fills and candidates of a request, by field."""
    for name, number in numbers.items():
        if (number or 0) > (most := service.limits.max_n):
            raise InvalidField(name, LimitExceeded(f"{name} is {number}; at most {most} is allowed (max_n)."))
