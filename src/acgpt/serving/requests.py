"""What requests of several protocols may contain: types of fields, and limits of questions, characters and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from acgpt.errors import QueryError
from acgpt.models.ask import MAX_TOKENS
from acgpt.models.searches import parse_gaps
from acgpt.query.lengths import LONGEST
from acgpt.query.query import Query
from acgpt.query.template import Given, Part, parse
from acgpt.query.text import encode_text
from acgpt.serving.errors import InvalidField, LimitExceeded
from acgpt.serving.service import Service

LARGEST = 2**31 - 1  # of whole numbers
MOST_TOP = 20  # of most probable tokens with each log-probability
FEW_STOPS = 4  # strings, as OpenAI's servers take
MOST_STOPS, STOP_CHARACTERS = 64, 4096  # strings of a request, and characters of all of them: each token is compared


# ---- types of fields ------------------------------------------------------------------------------------------------


class Strict(BaseModel):
    """A request in which unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Lenient(BaseModel):
    """A request in which unknown fields are ignored, and null stands for the default."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_null(cls, fields: Any) -> Any:
        """Leave out fields that are null."""
        return (
            {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else fields
        )


def is_token(value: Any) -> bool:
    """Return whether a value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def prompts_of(value: Any) -> list[str | tuple[int, ...]]:
    """Return the prompts of a request: a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(entry, str) for entry in value):
            return list(value)
        if all(map(is_token, value)):
            return [tuple(value)]
        if all(isinstance(entry, list) and entry and all(map(is_token, entry)) for entry in value):
            return [tuple(entry) for entry in value]
    raise PydanticCustomError("prompt", "it must be a text, a list of texts, token ids, or a list of token ids")


def stops_of(value: Any) -> tuple[str, ...]:
    """Return the stop strings of a request: one, or a list."""
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise PydanticCustomError("stop", "it must be a text that is not empty, or a list of such texts")
    return tuple(bounded_stops(strings))


def bounded_stops(value: Any) -> Any:
    """Refuse stop strings that are too many, or too long together."""
    strings = [value] if isinstance(value, str) else value or []
    if len(strings) > MOST_STOPS:
        raise PydanticCustomError("stop", f"at most {MOST_STOPS} strings are allowed, not {len(strings)}")
    if (characters := sum(map(len, strings))) > STOP_CHARACTERS:
        raise PydanticCustomError("stop", f"at most {STOP_CHARACTERS} characters are allowed, not {characters}")
    return value


def few_stops(value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse more stop strings than OpenAI's servers take."""
    if len(value) > FEW_STOPS:
        raise PydanticCustomError("stop", f"at most {FEW_STOPS} strings are allowed")
    return value


def neutral(value: Any) -> Any:
    """Refuse a value that has an effect, of a field that is not supported."""
    if value not in (None, 0, {}, False):
        raise PydanticCustomError("unsupported", "this field is not supported; leave it out")
    return value


TEXT: dict[str, Any] = {"type": "string"}
IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
Prompts = Annotated[
    Any,
    PlainValidator(prompts_of),
    WithJsonSchema({"anyOf": [TEXT, IDS, {"type": "array", "items": TEXT}, {"type": "array", "items": IDS}]}),
]
Stops = Annotated[
    Any, PlainValidator(stops_of), WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": TEXT}, {"type": "null"}]})
]
FewStops = Annotated[Stops, AfterValidator(few_stops)]
BoundedStops = AfterValidator(bounded_stops)  # for fields that say themselves which strings they take
Neutral = Annotated[Any, AfterValidator(neutral)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Tokens = Annotated[int, Field(ge=0, le=LARGEST)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(gt=0, le=1)]


# ---- limits ---------------------------------------------------------------------------------------------------------


class Budget:
    """Counts the tokens of a request, up to the limit of the server.

    Args:
        service: Has the limit, and the model that tokenizes.
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
            error = too_many(self.tokens, most)
            raise error if param is None else InvalidField(param, error)

    def spend_on_gaps(self, parts: Sequence[Part], max_tokens: int | None, n: int, param: str | None = None) -> None:
        """Count the tokens of a template with gaps: those of its text, and the most that it can ask for.

        Args:
            parts: The parsed template.
            max_tokens: Maximum number of tokens of a gap.
            n: Number of candidates.
            param: The field that asks for so many tokens, for errors. Default: that of the question.
        """
        lm, asked, texts = self.service.lm, 0, []
        longest = max_tokens or (LONGEST if self.service.scheduler.executor.heads else MAX_TOKENS)
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


def too_many(tokens: int, most: int) -> LimitExceeded:
    """Return the error for a request with too many tokens."""
    return LimitExceeded(
        f"the request has {tokens} tokens, those that it asks for included; at most {most} are allowed "
        "(max_tokens_per_request)."
    )
