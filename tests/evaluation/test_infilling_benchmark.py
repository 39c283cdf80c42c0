"""benchmarks/infilling.py: two adapters are filled with, graded and compared on the same tasks."""

from __future__ import annotations

import importlib
import json

import numpy as np
import programs
import pytest

pytest.importorskip("peft")


@pytest.fixture
def program(monkeypatch):
    """Import a benchmark program."""
    monkeypatch.syspath_prepend(programs.BENCHMARKS)
    return importlib.import_module


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from length_adapters import write_adapters

    return write_adapters(tmp_path_factory.mktemp("adapters"))


def write(program, path, kinds):
    task = program("infilling_tasks").Task
    tasks = [task(str(i), kind, f"x.{'xy' * i}.", "gh", ".y") for i, kind in enumerate(kinds)]
    program("infilling_tasks").write_tasks(path, tasks)
    return tasks


def test_adapters_that_predict_lengths_ask_for_them_and_others_search(program, folders, tmp_path):
    write(program, tmp_path / "tasks.jsonl", ["word", "word", "phrase"])
    own = [tmp_path / "tasks.jsonl", "--model", folders.base, "--device", "cpu", "--max-tokens", 3]
    own += ["--conditions", "future, known", "future, unknown", "--workers", 1]
    for label, adapter in (("old", folders.plain), ("new", folders.lengths)):
        done = programs.program("infilling.py", *own, "--adapter", adapter, "--fills", tmp_path / f"{label}.json")
        assert done.returncode == 0, done.stderr
    old, new = (json.loads((tmp_path / f"{label}.json").read_text()) for label in ("old", "new"))
    assert new["adapter"] == str(folders.lengths) and new["names"] == ["0", "1", "2"]
    cost = new["costs"]["future, unknown"]
    assert cost["asked_lengths"] == 3 and 3 <= cost["scored"] <= 9  # up to three lengths for each
    cost = old["costs"]["future, unknown"]
    assert cost["asked_lengths"] == 0 and cost["scored"] > 0
    done = programs.program(
        "infilling.py", *own, "--from-fills", tmp_path / "new.json", "--against", tmp_path / "old.json"
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["against"]["adapter"] == str(folders.plain)
    assert set(record["differences"]["all"]["future, unknown"]) == {"exact"}
    assert "difference in points" in program("render").TABLES["infilling"](record)


def test_differences_of_hits_are_paired(program, tmp_path):
    infilling = program("infilling")
    tasks = write(program, tmp_path / "tasks.jsonl", ["word"] * 20 + ["phrase"] * 20)
    exact = np.arange(40) % 2 == 0
    ours = {"a": ["gh" if hit or i % 4 == 1 else "x" for i, hit in enumerate(exact)]}
    theirs = {"a": ["gh" if hit else "x" for hit in exact], "b": ["gh"] * 40}
    graded = [infilling.grade(tasks, fills, 1) for fills in (ours, theirs)]
    result = infilling.differences(tasks, *graded)
    assert set(result) == {"word", "phrase", "all"} and set(result["all"]) == {"a"}
    difference = result["all"]["a"]["exact"]  # 10 of 40 tasks are hits of ours alone, and none of theirs alone
    assert difference["mean"] == 25
    error = 100 * np.sqrt(0.25 * 0.75 / 40)
    assert difference["interval"] == pytest.approx([25 - 1.96 * error, 25 + 1.96 * error], abs=3)
    shares = infilling.summary(tasks, [2] * 40, graded[0])
    assert shares["all"]["a"]["exact"]["percent"] == 75 and "pass" not in shares["all"]["a"]


def test_bad_input_is_one_line_and_exit_code_2(program, tmp_path):
    path = tmp_path / "tasks.jsonl"
    write(program, path, ["word"])
    (tmp_path / "text.json").write_text("[]")
    (tmp_path / "two.json").write_text(json.dumps({"benchmark": "infilling", "fills": {"a": ["x", "y"]}}))
    for arguments, reason in [
        ([tmp_path / "absent.jsonl"], "absent.jsonl"),
        ([path, "--limit", 0], "--limit 0"),
        ([path, "--from-fills", tmp_path / "text.json"], "has no fills"),
        ([path, "--from-fills", tmp_path / "two.json"], "fills of other tasks"),
        ([path, "--model", tmp_path / "absent"], "absent"),
    ]:
        done = programs.program("infilling.py", *arguments)
        assert done.returncode == 2 and reason in done.stderr, (arguments, done.stderr)
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1, (arguments, done.stderr)
