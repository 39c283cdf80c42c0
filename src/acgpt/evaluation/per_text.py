"""What an evaluation keeps of each text: a small file beside its results, from which differences get their intervals.

    RUN/results.json    RUN/results.per-text.json      the evaluation at the end of training
    RUN/test.json       RUN/test.per-text.json         `acgpt evaluate … -o RUN/test.json`

    {"kind": "per-text", "format_version": 1, "set": {"hash": of the evaluation set, "texts": 276},
     "nats": {"unconditional": [3012.418, …], …}, "tokens": {"unconditional": [1023, …], …}}

A list has a number for each text of the set, in its order. Results without such a file are read as before; their
differences have no intervals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from acgpt.common.files import read_object, sync, write_whole
from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import PerText, TextSums

KIND, FORMAT = "per-text", 1
ENDING = f".{KIND}.json"
DIGITS = 3  # of a text's nats, after the point: a text of 1,000 tokens has thousands of them


def as_dict(kept: PerText) -> dict[str, Any]:
    """The content of the file; what is infinite is `None`."""

    def rounded(nats: np.ndarray) -> list[float | None]:
        return [round(x, DIGITS) if math.isfinite(x) else None for x in nats.tolist()]

    texts = len(next(iter(kept.modes.values())).nats) if kept.modes else 0
    return {
        "kind": KIND,
        "format_version": FORMAT,
        "set": {"hash": kept.set_hash, "texts": texts},
        "nats": {mode: rounded(sums.nats) for mode, sums in kept.modes.items()},
        "tokens": {mode: sums.tokens.astype(int).tolist() for mode, sums in kept.modes.items()},
    }


def from_dict(content: Mapping[str, Any]) -> PerText:
    """Read what `as_dict` has made.

    Raises:
        ValueError: It is something else.
    """
    if (content.get("kind"), content.get("format_version")) != (KIND, FORMAT):
        raise ValueError(f"it is no file of kind {KIND}, version {FORMAT}")
    try:
        modes = {
            mode: TextSums(
                np.array([math.inf if x is None else float(x) for x in nats]),
                np.array(content["tokens"][mode], dtype=np.float64),
            )
            for mode, nats in content["nats"].items()
        }
        found = PerText(str(content["set"]["hash"]), modes)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged: {error!r}") from error
    if len({array.shape for sums in modes.values() for array in sums}) > 1:
        raise ValueError("its lists are not of as many texts")
    return found


def path_beside(results: Path) -> Path:
    """The file that belongs to results.

    >>> path_beside(Path("runs/ac/test-r0.6.json")).name, path_beside(Path("test-0.6")).name
    ('test-r0.6.per-text.json', 'test-0.6.per-text.json')
    """
    return results.with_name(results.name.removesuffix(".json") + ENDING)


def write_per_text(results: Path, kept: PerText) -> None:
    """Write the file that belongs to results, whole or not at all. It is compact, for results may be committed."""
    path = path_beside(results)
    write_whole(path, json.dumps(as_dict(kept), separators=(",", ":"), allow_nan=False) + "\n")
    sync(path.parent)


def read_per_text(results: Path, evaluation: Mapping[str, Any]) -> PerText | None:
    """Read the file that belongs to results, and check that it is of this evaluation.

    Args:
        results: Path of the results.
        evaluation: What they say of the evaluation, `Evaluation.as_dict`.

    Returns:
        `None` if there is no such file.

    Raises:
        InputError: It cannot be read, or is of another evaluation.
    """
    path = path_beside(results)
    if not path.exists():
        return None
    try:
        kept = from_dict(read_object(path))
        check_same(kept, evaluation)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not belong to {results.name} ({error}): evaluate again.") from error
    return kept


def check_same(kept: PerText, evaluation: Mapping[str, Any]) -> None:
    """Compare the sums over texts with the results.

    Raises:
        ValueError: They are of another evaluation.
    """
    about = evaluation["set"]
    if kept.set_hash != about["hash"]:
        raise ValueError(f"it is of the evaluation set {kept.set_hash[:8]}, not {about['hash'][:8]}")
    answers = {mode: answer for mode, answer in evaluation["modes"].items() if answer is not None}
    if set(answers) != set(kept.modes):
        raise ValueError("it is of other modes")
    for mode, sums in kept.modes.items():
        stated, tokens = answers[mode]["perplexity"], sums.tokens.sum()
        found = sums.nats.sum() / tokens
        # Each text is rounded by half a digit at most.
        tolerance = len(sums.nats) * 0.5 * 10**-DIGITS / tokens + 1e-9
        same = math.isinf(found) if stated is None else abs(found - math.log(stated)) <= tolerance
        if tokens != answers[mode]["tokens"] or len(sums.nats) != about["texts"] or not same:
            raise ValueError(f"its numbers are not those of the mode {mode}")
