"""benchmarks/modes.py: perplexities of two adapters and their paired differences."""

from __future__ import annotations

import importlib
import json

import numpy as np
import programs
import pytest

from acgpt.evaluation.bootstrap import PerText, TextSums
from acgpt.evaluation.per_text import write_per_text

TOKENS = np.full(40, 10.0)


def write(path, nats, hash_="a" * 64):
    """Write the results of an evaluation with one mode, and its sums per text."""
    perplexity = float(np.exp(nats.sum() / TOKENS.sum()))
    dataset = {"hash": hash_, "texts": len(nats), "length": 10, "r_max": 0.6, "split": "test"}
    mode = {"perplexity": perplexity, "tokens": int(TOKENS.sum()), "texts": len(nats)}
    versions = {"torch": "2", "transformers": "5", "python": "3"}
    record = {"set": dataset, "modes": {"training": mode}, "gains": {}, "versions": versions, "date": "2026-11-18T00"}
    path.write_text(json.dumps(record))
    write_per_text(path, PerText(hash_, {"training": TextSums(nats, TOKENS)}))
    return path


@pytest.fixture
def nats():
    return np.random.default_rng(0).uniform(5, 60, 40).round(3)


def test_a_difference_that_is_the_same_in_every_text_has_an_interval_of_no_width(nats, tmp_path, monkeypatch):
    before, after = write(tmp_path / "before.json", nats), write(tmp_path / "after.json", nats - 1)
    done = programs.program("modes.py", "--before", f"test={before}", "--after", f"test={after}")
    record = json.loads(done.stdout.splitlines()[-1])
    below = record["texts"]["test"]["modes"]["training"]["below"]
    expected = 100 * (1 - np.exp(-0.1))  # one nat less for ten tokens
    assert [below["percent"], *below["interval"]] == pytest.approx([expected] * 3)
    monkeypatch.syspath_prepend(programs.BENCHMARKS)
    page = importlib.import_module("render").TABLES["modes"](record)
    assert "| test | training |" in page and "+9.5 % [+9.5, +9.5]" in page


@pytest.mark.parametrize("fault", ["texts", "sums", "hash"])
def test_what_cannot_be_paired_is_an_error_of_one_line(fault, nats, tmp_path):
    before, after = write(tmp_path / "before.json", nats), write(tmp_path / "after.json", nats)
    label = "other" if fault == "texts" else "test"
    if fault == "sums":
        (tmp_path / "after.per-text.json").unlink()
    if fault == "hash":
        write(after, nats, "b" * 64)
    done = programs.program("modes.py", "--before", f"test={before}", "--after", f"{label}={after}")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
