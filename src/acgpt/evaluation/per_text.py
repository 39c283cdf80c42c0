"""Files of sums per document, beside the results of an evaluation. Intervals of differences are computed from them.

    RUN/results.json    RUN/results.per-text.json      the evaluation at the end of training
    RUN/test.json       RUN/test.per-text.json         `acgpt evaluate … -o RUN/test.json`

    {"kind": "per-text", "format_version": 1, "set": {"hash": of the dataset}, "unit": "documents",
     "nats": {"unconditional": [14418.062, …], …}, "tokens": {"unconditional": [4711, …], …}}

A list has one number per unit, in the order of the evaluation dataset: a document of the corpus, or a text of the
dataset where it has few documents, or does not know them, and in files without `unit`. Results without such a file can
still be read; their differences have no intervals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from acgpt.common.files import read_json_object, sync, write_atomically
from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import TEXTS, PerText, TextSums

KIND, FORMAT = "per-text", 1
ENDING = f".{KIND}.json"
DIGITS = 3  # decimals of a text's nats; a text of 1,000 tokens has thousands of nats


def as_dict(per_text: PerText) -> dict[str, Any]:
    """Return the content of the file; infinite numbers become `None`."""

    def rounded(nats: np.ndarray) -> list[float | None]:
        return [round(x, DIGITS) if math.isfinite(x) else None for x in nats.tolist()]

    return {
        "kind": KIND,
        "format_version": FORMAT,
        "set": {"hash": per_text.set_hash},
        "unit": per_text.unit,
        "nats": {mode: rounded(sums.nats) for mode, sums in per_text.modes.items()},
        "tokens": {mode: sums.tokens.astype(int).tolist() for mode, sums in per_text.modes.items()},
    }


def from_dict(content: Mapping[str, Any]) -> PerText:
    """Convert the content of a file back.

    Raises:
        ValueError: The content is of another kind. Damaged content raises other errors, too.
    """
    if (content.get("kind"), content.get("format_version")) != (KIND, FORMAT):
        raise ValueError(f"it is not a file of kind {KIND}, version {FORMAT}")
    modes = {
        mode: TextSums(
            np.array([math.inf if x is None else float(x) for x in nats]),
            np.array(content["tokens"][mode], dtype=np.float64),
        )
        for mode, nats in content["nats"].items()
    }
    return PerText(str(content["set"]["hash"]), modes, content.get("unit", TEXTS))


def per_text_path(results: Path) -> Path:
    """Return the path of the per-text file that belongs to results.

    >>> per_text_path(Path("runs/ac/test-r0.6.json")).name, per_text_path(Path("test-0.6")).name
    ('test-r0.6.per-text.json', 'test-0.6.per-text.json')
    """
    return results.with_name(results.name.removesuffix(".json") + ENDING)


def write_per_text(results: Path, per_text: PerText) -> None:
    """Write the per-text file that belongs to results, atomically. It is compact because results may be committed."""
    path = per_text_path(results)
    write_atomically(path, json.dumps(as_dict(per_text), separators=(",", ":"), allow_nan=False) + "\n")
    sync(path.parent)


def read_per_text(results: Path, evaluation: Mapping[str, Any]) -> PerText | None:
    """Read the per-text file that belongs to results, and check that it is of the same evaluation.

    Args:
        results: Path of the results.
        evaluation: The evaluation in the results, `Evaluation.as_dict`.

    Returns:
        The sums; `None` if there is no such file.

    Raises:
        InputError: The file cannot be read, or is of another evaluation.
    """
    path = per_text_path(results)
    if not path.exists():
        return None
    try:
        per_text = from_dict(read_json_object(path))
        check_same(per_text, evaluation)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} does not belong to {results.name} ({error}): evaluate again.") from error
    return per_text


def check_same(per_text: PerText, evaluation: Mapping[str, Any]) -> None:
    """Compare the sums with the results.

    Raises:
        ValueError: They are of another evaluation.
    """
    dataset, resampled = evaluation["set"], evaluation.get("bootstrap") or {}
    if per_text.set_hash != dataset["hash"]:
        raise ValueError(f"it is of the evaluation dataset {per_text.set_hash[:8]}, not {dataset['hash'][:8]}")
    unit, units = resampled.get("unit", TEXTS), resampled.get("units", dataset["texts"])
    answers = {mode: answer for mode, answer in evaluation["modes"].items() if answer is not None}
    same = per_text.unit == unit and set(answers) == set(per_text.modes)
    for mode, sums in per_text.modes.items() if same else ():
        perplexity, tokens = answers[mode]["perplexity"], sums.tokens.sum()
        mean_nll = sums.nats.sum() / tokens
        # The rounding error of each sum is at most half a unit of the last digit.
        tolerance = units * 0.5 * 10**-DIGITS / tokens + 1e-9
        near = math.isinf(mean_nll) if perplexity is None else abs(mean_nll - math.log(perplexity)) <= tolerance
        same = same and near and tokens == answers[mode]["tokens"] and {len(array) for array in sums} == {units}
    if not same:
        raise ValueError("its numbers do not match")
