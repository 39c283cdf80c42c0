"""benchmarks/lengths.py: its numbers against hand computations, and its answers against `lm.lengths`."""

from __future__ import annotations

import importlib
import json
import math
import random

import numpy as np
import programs
import pytest
from models import toy_tokenizer

import acgpt

pytest.importorskip("peft")

KINDS = {"word": (1, 4), "phrase": (4, 9)}  # letters of a gap


@pytest.fixture
def program(monkeypatch):
    """Import a benchmark program."""
    monkeypatch.syspath_prepend(programs.BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def lengths(program):
    return program("lengths")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from length_adapters import write_adapters

    return write_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A file of gaps between dots, which have as many tokens as their text by itself; the last one ends its text."""
    rng = random.Random(0)
    rows = []
    for number in range(24):
        kind = list(KINDS)[number % 2]
        before, after = ("".join(rng.choices("xyc.", k=rng.randrange(2, 12))) for _ in range(2))
        fill = "".join(rng.choices("ghij", k=rng.randrange(*KINDS[kind])))
        rows.append({"name": str(number), "kind": kind, "prefix": f"{before}.", "fill": fill, "suffix": f".{after}"})
    rows.append({"name": "end", "kind": "word", "prefix": "x.", "fill": "gh", "suffix": ""})
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def predictions(lengths, rows):
    """Make predictions from (most probable length, true length, confidence)."""
    return [lengths.Prediction(top, true, math.log(0.1), 1, confidence) for top, true, confidence in rows]


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_calibration_bins_hold_what_was_put_into_them(lengths):
    rows = [(1, 1, 0.05), (1, 2, 0.05), (3, 3, 0.95), (3, 3, 0.85), (3, 4, 0.9), (5, 5, 1.0)]
    result = lengths.calibration(predictions(lengths, rows))
    filled = {number: entry for number, entry in enumerate(result["bins"]) if entry["tasks"]}
    assert len(result["bins"]) == 10 and {number: entry["tasks"] for number, entry in filled.items()} == {
        0: 2,
        8: 1,
        9: 3,
    }
    assert (filled[0]["confidence"], filled[0]["right"]) == pytest.approx((0.05, 0.5))
    assert (filled[9]["confidence"], filled[9]["right"]) == pytest.approx((0.95, 2 / 3))
    # 2/6 · |0.5 - 0.05| + 1/6 · |1 - 0.85| + 3/6 · |2/3 - 0.95|
    assert result["ece"] == pytest.approx(100 * (2 * 0.45 + 0.15 + 3 * (0.95 - 2 / 3)) / 6)
    assert "confidence" not in result["bins"][5]


def test_the_baseline_leaves_out_the_task_that_it_predicts(lengths):
    """Of the lengths 2, 2, 0 the others of the last one are 2, 2: plus one for 0, 1 and 2, that makes 1, 1, 3 of 5."""
    first, second, last = lengths.left_one_out([2, 2, 0])
    assert math.exp(last.log_prob) == pytest.approx(1 / 5)
    assert (last.top, last.rank, last.confidence) == (2, 2, pytest.approx(3 / 5))
    assert first == second
    assert math.exp(first.log_prob) == pytest.approx(2 / 5)  # of 2 and 0: 2, 1, 2 of 5
    assert (first.top, first.rank) == (0, 2)  # of equally probable lengths the shorter one is first
    assert math.exp(lengths.left_one_out([3])[0].log_prob) == pytest.approx(1 / 4)


def test_a_prediction_knows_the_rank_of_the_true_length(lengths):
    log_probs = {length: math.log(p) for length, p in {1: 0.2, 2: 0.5, 4: 0.3}.items()}
    prediction = lengths.Prediction.of(log_probs, 1)
    assert (prediction.top, prediction.rank, prediction.confidence) == (2, 3, pytest.approx(0.5))
    assert prediction.log_prob == math.log(0.2)


def test_differences_are_paired(lengths):
    """A predictor that is always one token worse than another has a difference without spread."""
    rng = np.random.default_rng(0)
    true, off = rng.integers(5, 50, 40), rng.integers(0, 5, 40)
    ours = [lengths.Prediction(int(t + d), int(t), -float(d), 1, 0.5) for t, d in zip(true, off, strict=True)]
    theirs = [lengths.Prediction(int(t + d + 1), int(t), -float(d) - 1, 1, 0.5) for t, d in zip(true, off, strict=True)]
    result = lengths.by_kind({"a": ours, "b": theirs}, true.tolist(), ["word"] * 40)["word"]
    difference = result["differences"]["b - a"]
    for measure in ("nats", "error"):
        assert difference[measure]["mean"] == pytest.approx(1)
        assert difference[measure]["interval"] == pytest.approx([1, 1])
    low, high = result["predictors"]["a"]["error"]["interval"]
    assert low < off.mean() < high and high - low > 0.3


def test_kinds_are_measured_apart_and_together(lengths):
    true, kinds = [1, 1, 5, 9], ["word", "word", "phrase", "phrase"]
    own = [lengths.Prediction(top, t, -1.0, 1, 0.5) for top, t in zip([1, 2, 5, 5], true, strict=True)]
    result = lengths.by_kind({"a": own}, true, kinds)
    assert {kind: entry["tasks"] for kind, entry in result.items()} == {"word": 2, "phrase": 2, "all": 4}
    assert [result[kind]["predictors"]["a"]["error"]["mean"] for kind in result] == [0.5, 2.0, 1.25]
    assert result["word"]["predictors"]["lengths of the kind"]["nats"]["mean"] == pytest.approx(math.log(3 / 2))
    pooled = result["all"]["predictors"]["lengths of the kind"]["nats"]["mean"]
    assert pooled == pytest.approx(
        np.mean([result[kind]["predictors"]["lengths of the kind"]["nats"]["mean"] for kind in ("word", "phrase")])
    )
    assert "lengths of all tasks" not in lengths.by_kind({"a": own[:2]}, true[:2], kinds[:2])["word"]["predictors"]


# ---- the program ----------------------------------------------------------------------------------------------------


def test_two_adapters_are_measured_on_the_same_tasks(program, folders, tasks, tmp_path):
    picture = tmp_path / "picture.png"
    arguments = ["--model", folders.base, "--adapter", f"old={folders.plain}", f"new={folders.lengths}"]
    arguments += ["--device", "cpu", "--fill", "--max-tokens", 3, "--batch", 5, "--plot", picture]
    done = programs.program("lengths.py", tasks, *arguments)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["predict_no_lengths"] == ["old"] and record["left_out"] == {"the gap ends the text": 1}
    assert {kind: entry["tasks"] for kind, entry in record["kinds"].items()} == {"word": 12, "phrase": 12, "all": 24}
    everything = record["kinds"]["all"]
    assert set(everything["differences"]) == {"new - lengths of the kind", "new, filled - old, filled"}
    rows = [json.loads(line) for line in tasks.read_text().splitlines()][:-1]
    lm = acgpt.load(folders.base, folders.lengths, "cpu")
    nats, right = [], []
    for row in rows:
        answer = lm.lengths(f"{row['prefix']}{{{{_}}}}{row['suffix']}")
        true = len(toy_tokenizer()(row["fill"], add_special_tokens=False).input_ids)
        nats.append(-answer.log_prob(true))
        right.append(answer.most_probable()[0] == true)
    assert everything["predictors"]["new"]["nats"]["mean"] == pytest.approx(np.mean(nats), rel=1e-4)
    assert everything["predictors"]["new"]["top_1"]["mean"] == pytest.approx(100 * np.mean(right))
    assert everything["mean_length"] == pytest.approx(np.mean([len(row["fill"]) for row in rows]))
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = program("render").TABLES["lengths"](record)
    assert "new - lengths of the kind" in page and "old, filled" in page


def test_bad_input_is_one_line_and_exit_code_2(folders, tasks, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"name": "x"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    own = ["--model", folders.base, "--device", "cpu"]
    for arguments, reason in [
        ([tmp_path / "absent.jsonl"], "absent.jsonl"),
        ([tmp_path / "bad.jsonl"], "line 1"),
        ([tmp_path / "empty.jsonl"], "has no tasks"),
        ([tasks, "--limit", 0], "--limit 0"),
        ([tasks, "--batch", 0], "--batch 0"),
        ([tasks, "--plot", tmp_path / "absent" / "x.png"], "is not a folder"),
        ([tasks, "--model", tmp_path / "absent"], "absent"),
        ([tasks, *own, "--adapter", f"a={folders.plain}", f"a={folders.lengths}"], "two values with the label 'a'"),
        ([tasks, *own, "--adapter", folders.plain], "no lengths are predicted"),
    ]:
        done = programs.program("lengths.py", *arguments)
        assert done.returncode == 2 and reason in done.stderr, (arguments, done.stderr)
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1, (arguments, done.stderr)
