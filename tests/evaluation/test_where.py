"""Gain from the future by position in a gap, against sums by hand."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LENGTH = 40


@pytest.fixture
def where(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("where")


def write_records(path: Path, asked: np.ndarray, gain: np.ndarray, modes=("infilling", "infilling-no-future"), **set):
    """Write records as `acgpt evaluate --records` does, with a given gain for each asked token."""
    text, place = np.nonzero(asked)
    columns = {}
    for mode in modes:
        columns |= {f"{mode}.text": text.astype(np.int32), f"{mode}.position": (place + 1).astype(np.int32)}
        columns[f"{mode}.log_prob"] = np.where(mode.endswith("no-future"), 0, gain[text, place]) - 7.0
    described = {"hash": "abc", "texts": len(asked), "length": asked.shape[1], "conditioning": {"r_max": 0.6}, **set}
    about = {"method": "ac-gpt", "set": described, "device": "cpu", "dtype": "float32"}
    save_file(columns, path, metadata={"acgpt_records": json.dumps(about)})


@pytest.fixture
def run(where, monkeypatch, capsys):
    """Run the program and return its JSON output."""

    def run(*arguments: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["where.py", *map(str, arguments)])
        where.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)

    return run


def test_gains_are_averaged_by_the_distance_to_the_next_given_token(run, tmp_path):
    rng = np.random.default_rng(0)
    asked = rng.random((20, LENGTH)) < 0.8
    asked[0], asked[1, -5:], asked[2, -1] = True, True, False  # a text with nothing given; one that ends in a gap
    gain = rng.normal(size=asked.shape)
    write_records(tmp_path / "a.safetensors", asked, gain)
    result = run(tmp_path / "a.safetensors")["gains"]["ac-gpt"]
    expected: dict[int, list[float]] = {}
    for row, gained in zip(asked, gain, strict=True):
        for position in np.flatnonzero(row):
            given = [other for other in range(position, LENGTH) if not row[other]]
            if given:
                expected.setdefault(given[0] - position, []).append(gained[position])
    bins = {"1": [1], "2": [2], "3–4": [3, 4], "5–8": range(5, 9), "9–16": range(9, 17)}
    for label, distances in bins.items():
        values = [value for distance in distances for value in expected.get(distance, [])]
        assert (label in result) == bool(values)
        if values:
            assert result[label]["gain"] == pytest.approx(np.mean(values))
            assert result[label]["tokens"] == len(values)
    low, high = result["1"]["interval"]
    assert low < result["1"]["gain"] < high
    assert sum(row["tokens"] for row in result.values()) == sum(map(len, expected.values())) < asked.sum()


def test_each_file_has_a_column_and_a_long_gap_a_last_row(run, tmp_path):
    asked = np.ones((1, LENGTH), dtype=bool)
    asked[0, -1] = False
    for name, gain in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        modes = ("training", "training-no-future")
        write_records(tmp_path / name / "r.safetensors", asked, np.full(asked.shape, gain), modes)
    result = run("--mode", "training", tmp_path / "a" / "r.safetensors", tmp_path / "b" / "r.safetensors")
    for name, gain in (("a", 1.0), ("b", 2.0)):
        rows = result["gains"][f"ac-gpt ({tmp_path / name / 'r.safetensors'})"]
        assert list(rows) == ["1", "2", "3–4", "5–8", "9–16", "17–32", "33 or more"]
        assert all(row["gain"] == pytest.approx(gain) and row["interval"] is None for row in rows.values())  # one text
    assert {each["device"] for each in result["evaluated"].values()} == {"cpu"}


def test_an_infinite_gain_is_none(run, tmp_path):
    asked = np.ones((2, LENGTH), dtype=bool)
    asked[:, -1] = False
    gain = np.ones(asked.shape)
    gain[0, -2] = np.inf
    write_records(tmp_path / "a.safetensors", asked, gain)
    rows = run(tmp_path / "a.safetensors")["gains"]["ac-gpt"]
    assert rows["1"]["gain"] is None and rows["1"]["interval"] is None and rows["2"]["gain"] == 1


def test_what_cannot_be_compared_is_refused(run, tmp_path, capsys):
    asked = np.ones((2, LENGTH), dtype=bool)
    asked[:, 9] = False
    write_records(tmp_path / "a.safetensors", asked, asked * 1.0)
    write_records(tmp_path / "b.safetensors", asked, asked * 1.0, hash="other")
    write_records(tmp_path / "past.safetensors", asked, asked * 1.0, modes=("infilling-no-future",))
    hiding = {"conditioning": {"r_max": 0.6, "unknown": 0.1}}
    write_records(tmp_path / "unknown.safetensors", asked, asked * 1.0, ("training", "training-no-future"), **hiding)
    save_file({"x": np.zeros(2)}, tmp_path / "else.safetensors")
    (tmp_path / "text.safetensors").write_text("no")
    for names, message in (
        (["a", "b"], "different evaluation datasets"),
        (["past"], "does not answer both infilling and infilling-no-future"),
        (["else"], "has no records"),
        (["text"], "cannot read"),
        (["nothing"], "cannot read"),
        (["unknown"], "a dataset with unknown tokens"),
    ):
        mode = "training" if names == ["unknown"] else "infilling"
        with pytest.raises(SystemExit) as ended:
            run("--mode", mode, *(tmp_path / f"{name}.safetensors" for name in names))
        assert ended.value.code == 2 and message in capsys.readouterr().err
