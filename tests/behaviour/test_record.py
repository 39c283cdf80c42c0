"""The comparison with the record: what it lets pass, and what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import record


@pytest.mark.parametrize(
    ("recorded", "now", "tolerance"),
    [
        ({"a": [1, "x"], "b": None}, {"b": None, "a": (1, "x")}, None),
        ({"loss": 2.0}, {"loss": 2.0000001}, 1e-6),
        ([math.nan, -math.inf], [math.nan, -math.inf], 1e-6),
    ],
)
def test_equal_values_pass(
    recorded: object, now: object, tolerance: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    (tmp_path / "it.json").write_text(json.dumps(recorded))
    record.check("it", now, tolerance)


@pytest.mark.parametrize(
    ("recorded", "now", "tolerance", "message"),
    [
        ({"a": {"b": 1}}, {"a": {}}, None, "a › b: is gone, was 1"),
        ({}, {"a": 1}, None, "a: is new, 1"),
        ({"a": 1}, {"a": True}, None, "a: was 1, is true"),
        ({"a": 0}, {"a": None}, None, "a: was 0, is null"),
        ({"a": [1, 2]}, {"a": [1]}, None, "a: was [1, 2], is [1]"),
        ({"a": [7, 8]}, {"a": [7, 9]}, 1e-1, "a[1]: was 8, is 9"),  # whole numbers are exact
        ({"loss": 2.0}, {"loss": 2.00001}, 1e-6, "loss: was 2.0, is 2.00001"),
        ({"loss": 2.0}, {"loss": math.nan}, 1e-6, "loss: was 2.0, is NaN"),
        ({"loss": math.inf}, {"loss": 1.0}, 1e-6, "loss: was Infinity, is 1.0"),
        ({"m": "one\ntwo"}, {"m": "one\n2"}, None, "m:\n- two\n+ 2"),
        ({"m": "one\n"}, {"m": "one"}, None, "the ends of lines"),
        (None, {}, None, "there is no such record"),
    ],
)
def test_differences_are_shown(
    recorded: object,
    now: object,
    tolerance: float | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    monkeypatch.delenv("ACGPT_RECORD", raising=False)
    if recorded is not None:
        (tmp_path / "it.json").write_text(json.dumps(recorded))
    with pytest.raises(pytest.fail.Exception) as failure:
        record.check("it", now, tolerance)
    assert message in str(failure.value)


def test_a_record_is_written_again_only_where_it_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    monkeypatch.setenv("ACGPT_RECORD", "1")
    record.check("it", {"loss": 2.0, "text": "ä"}, 1e-6)
    first = (tmp_path / "it.json").read_text()
    assert json.loads(first) == {"loss": 2.0, "text": "ä"}
    record.check("it", {"loss": 2.0000001, "text": "ä"}, 1e-6)
    assert (tmp_path / "it.json").read_text() == first
    record.check("it", {"loss": 3.0, "text": "ä"}, 1e-6)
    monkeypatch.delenv("ACGPT_RECORD")
    record.check("it", {"loss": 3.0, "text": "ä"})


def test_a_record_is_json_whose_short_values_take_one_line() -> None:
    value = {"short": [1, {"a": None}], "long": ["ä" * 100, {"b": "c" * 100, "d": []}], "none": {}}
    text = record.laid_out(value)
    assert json.loads(text) == value
    assert text.splitlines()[1] == ' "short": [1, {"a": null}],' and max(map(len, text.splitlines())) <= record.WIDTH
