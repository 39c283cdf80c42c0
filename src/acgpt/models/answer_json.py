"""Answers as JSON objects, for `acgpt serve` and its client: every field of the dataclasses in `models.answers`.

JSON has no infinity, so that a log-probability of minus infinity, and a perplexity or score that is not finite, are
null. Reading an answer turns null into minus infinity again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from acgpt.common.files import finite
from acgpt.models.answers import Fill, Lengths, Piece, Ranked, Ranking, Sample, Score, TokenScore
from acgpt.query.query import Query

Object = Mapping[str, Any]


def to_json(answer: Score | Lengths | Ranking | Piece | Query) -> dict[str, Any]:
    """Return an answer as an object for JSON. A score has its sums, `log_prob` and `perplexity`, too."""
    if isinstance(answer, Score):
        more = {"log_prob": answer.log_prob, "perplexity": answer.perplexity}
    elif isinstance(answer, Piece):
        fill = None if answer.fill is None else to_json(answer.fill)
        return {"text": answer.text, "slot": answer.slot, "fill": fill}
    else:
        more = {}
    fields: dict[str, Any] = finite({**asdict(answer), **more})
    return fields


def score_of(fields: Object) -> Score:
    """Read a score."""
    return Score(**_scored(fields))


def sample_of(fields: Object) -> Sample:
    """Read a sample, or a fill if it has the fields of one."""
    if "lengths" in fields:
        return fill_of(fields)
    return Sample(**_scored(fields), **_sampled(fields))


def fill_of(fields: Object) -> Fill:
    """Read a fill."""
    return Fill(
        **_scored(fields),
        **_sampled(fields),
        lengths=tuple(fields["lengths"]),
        length_log_prob=fields["length_log_prob"],
        score=_number(fields["score"]),
    )


def lengths_of(fields: Object) -> Lengths:
    """Read the probabilities of lengths."""
    return Lengths({int(length): _number(log_prob) for length, log_prob in fields["log_probs"].items()})


def ranking_of(fields: Object) -> Ranking:
    """Read a ranking."""
    ranked = (
        Ranked(entry["text"], tuple(entry["choice"]), entry["probability"], _number(entry["log_prob"]))
        for entry in fields["alternatives"]
    )
    return Ranking(tuple(ranked), fields["compared"], fields["future"], fields["adapter"])


def piece_of(fields: Object) -> Piece:
    """Read a piece of a stream."""
    return Piece(fields["text"], fields["slot"], None if fields["fill"] is None else fill_of(fields["fill"]))


def query_of(fields: Object) -> Query:
    """Read a query."""
    return Query(fields["tokens"], fields["given"], fields["asked"], fields["start"])


def _number(value: float | None) -> float:
    """Return a number that was written as null if it was not finite."""
    return -math.inf if value is None else value


def _scored(fields: Object) -> dict[str, Any]:
    """Return the arguments of `Score`."""
    tokens = tuple(
        TokenScore(token["text"], token["id"], token["position"], _number(token["log_prob"]))
        for token in fields["tokens"]
    )
    return {"tokens": tokens, "future": fields["future"], "adapter": fields["adapter"], "bound": fields["bound"]}


def _sampled(fields: Object) -> dict[str, Any]:
    """Return the arguments of `Sample` that `Score` does not have."""
    query = query_of(fields["query"])
    return {"text": fields["text"], "fills": tuple(fields["fills"]), "seed": fields["seed"], "query": query}
