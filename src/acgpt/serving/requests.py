"""Types of fields that requests of several protocols have."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

LARGEST = 2**31 - 1  # of whole numbers
MOST_TOP = 20  # of most probable tokens with each log-probability
FEW_STOPS = 4  # strings, as OpenAI's servers take
MOST_STOPS, STOP_CHARACTERS = 64, 4096  # strings of a request, and characters of all of them: each token is compared


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
