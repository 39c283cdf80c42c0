"""Answers as JSON objects, for `acgpt serve` and its client: every field of the dataclasses in `models.ask`.

JSON has no infinity, so that a log-probability of minus infinity, and a perplexity or score that is not finite, are
null. Reading an answer turns null into minus infinity again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from acgpt.common.files import finite
from acgpt.models.ask import Fill, Lengths, Piece, Ranking, Sample, Score
from acgpt.query.query import Query


def to_json(answer: Score | Lengths | Ranking | Piece | Query) -> dict[str, Any]:
    """Return an answer as an object for JSON. A score has its sums, `log_prob` and `perplexity`, too."""
    if isinstance(answer, Score):
        more = {"log_prob": answer.log_prob, "perplexity": answer.perplexity}
    elif isinstance(answer, Piece):
        fill = None if answer.fill is None else to_json(answer.fill)
        return {"text": answer.text, "slot": answer.slot, "fill": fill}
    else:
        more = {}
    content: dict[str, Any] = finite({**asdict(answer), **more})
    return content


def read(kind: Any, value: Any) -> Any:
    """Read an answer from JSON.

    Args:
        kind: Type of the answer: a dataclass of `models.ask`, a query, or a list of these; or that of a field.
        value: What JSON has for it.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        kind = Fill if kind is Sample and "lengths" in value else kind
        return kind(**{name: read(hint, value[name]) for name, hint in field_types(kind).items()})
    if origin in (list, tuple):
        return origin(read(inner[0], entry) for entry in value)
    if origin is Mapping:
        return {inner[0](key): read(inner[1], entry) for key, entry in value.items()}
    if NoneType in inner:
        return None if value is None else read(inner[0], value)
    return -math.inf if kind is float and value is None else value  # JSON has no infinity


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}
