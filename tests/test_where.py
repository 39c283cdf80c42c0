"""Where in a gap the future is worth something, against a count by hand."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LENGTH = 40


@pytest.fixture
def where(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("where")


def write_records(path: Path, asked: np.ndarray, gain: np.ndarray, modes=("infilling", "infilling-no-future"), **set):
    """As `acgpt evaluate --records` writes them: each asked token gains so much."""
    text, place = np.nonzero(asked)
    columns = {}
    for mode in modes:
        columns |= {f"{mode}.text": text.astype(np.int32), f"{mode}.position": (place + 1).astype(np.int32)}
        columns[f"{mode}.log_prob"] = gain[text, place] * (not mode.endswith("no-future")) - 7.0
    about = {"method": "ac-gpt", "set": {"hash": "abc", "texts": len(asked), "length": asked.shape[1], **set}}
    save_file(columns, path, metadata={"acgpt_records": json.dumps(about)})


def run(where: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["where.py", *map(str, arguments)])
    where.main()


def test_gains_are_averaged_by_the_distance_to_the_next_given_token(where, tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    asked = rng.random((20, LENGTH)) < 0.8
    asked[0], asked[1, -5:], asked[2, -1] = True, True, False  # a text with nothing given; one that ends in a gap
    gain = rng.normal(size=asked.shape)
    write_records(tmp_path / "a.safetensors", asked, gain)
    run(where, monkeypatch, tmp_path / "a.safetensors")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["gains"]["ac-gpt"]
    expected: dict[int, list[float]] = {}
    for row, gained in zip(asked, gain, strict=True):
        for place in np.flatnonzero(row):
            given = [other for other in range(place, LENGTH) if not row[other]]
            if given:
                expected.setdefault(given[0] - place, []).append(gained[place])
    bins = {"1": [1], "2": [2], "3–4": [3, 4], "5–8": range(5, 9), "9–16": range(9, 17)}
    for label, distances in bins.items():
        values = [value for distance in distances for value in expected.get(distance, [])]
        assert (label in found) == bool(values)
        if values:
            assert found[label]["gain"] == pytest.approx(np.mean(values))
            assert found[label]["tokens"] == len(values)
    low, high = found["1"]["interval"]
    assert low < found["1"]["gain"] < high
    assert sum(row["tokens"] for row in found.values()) == sum(map(len, expected.values())) < asked.sum()


def test_what_cannot_be_compared_is_refused(where, tmp_path, monkeypatch, capsys):
    asked = np.ones((2, LENGTH), dtype=bool)
    asked[:, 9] = False
    write_records(tmp_path / "a.safetensors", asked, asked * 1.0)
    write_records(tmp_path / "b.safetensors", asked, asked * 1.0, hash="other")
    write_records(tmp_path / "past.safetensors", asked, asked * 1.0, modes=("infilling-no-future",))
    save_file({"x": np.zeros(2)}, tmp_path / "else.safetensors")
    (tmp_path / "text.safetensors").write_text("no")
    for names, message in (
        (["a", "b"], "several evaluation sets"),
        (["past"], "does not answer both infilling and infilling-no-future"),
        (["else"], "has no records"),
        (["text"], "cannot read"),
        (["nothing"], "cannot read"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(where, monkeypatch, *(tmp_path / f"{name}.safetensors" for name in names))
        assert ended.value.code == 2 and message in capsys.readouterr().err
