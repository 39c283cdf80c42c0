"""The tasks of the infilling benchmark: where gaps begin and end, and that a seed fixes them."""

from __future__ import annotations

import ast
import gzip
import importlib
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import programs
import pytest

FOLDER = Path(__file__).parent
WORDS = ["the", "river", "Thames", "flows", "past", "well-known", "towns", "and", "1,000", "islands,", "it", "doesn't"]


@pytest.fixture
def infilling(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("infilling_tasks")


@pytest.fixture
def texts():
    """Articles with headings, paragraphs, and sentences that are all different."""
    rng = random.Random(0)

    def sentence():
        return f"In {rng.randrange(10**9)} {' '.join(rng.choices(WORDS, k=rng.randrange(4, 15)))} Dr. A. B. Smith said."

    def article(number):
        paragraphs = (f"A heading\n{' '.join(sentence() for _ in range(8))}" for _ in range(12))
        return f"Article {number}\n\n" + "\n".join(paragraphs)

    return [article(number) for number in range(8)]


# ---- prose ----------------------------------------------------------------------------------------------------------


def test_sentences_end_at_full_stops_but_not_after_abbreviations_and_initials(infilling):
    parts = [
        "Mr. J. Doe met H. americanus in the U.S. Navy.",
        'He said "It grew by 3.5."',
        "Was it No. 4?",
        "(It cost 2.5.)",
        "They left with a friend, e.g. Bob.",
    ]
    text = "A heading\n" + " ".join(parts[:3]) + "\n" + " ".join(parts[3:]) + "\nno full stop"
    assert [text[slice(*span)] for span in infilling.sentences(text)] == parts


def test_prose_gaps_are_pieces_of_the_texts_that_do_not_overlap(infilling, texts):
    tasks = infilling.prose_gaps(texts, 30, seed=1)
    assert Counter(task.kind for task in tasks) == {"word": 10, "phrase": 10, "sentence": 10}
    assert len({task.name for task in tasks}) == 30
    spans = []
    for task in tasks:
        _, number, start = task.name.split("/")
        whole = task.prefix + task.fill + task.suffix
        first = int(start) - len(task.prefix)
        assert texts[int(number)][first : first + len(whole)] == whole
        spans.append((int(number), first, first + len(whole)))
    spans.sort()
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))


def test_prose_gaps_have_the_promised_borders(infilling, texts):
    for task in infilling.prose_gaps(texts, 30, seed=1):
        number, start = map(int, task.name.split("/")[1:])
        before, after = texts[number][: start - len(task.prefix)], texts[number][start + len(task.fill + task.suffix) :]
        assert 400 <= len(task.prefix) <= 800
        assert 400 <= len(task.suffix) <= 800
        for inside, outside in ((task.prefix[0], before[-1:]), (task.suffix[-1], after[:1])):
            assert not inside.isspace()
            assert outside == "" or outside.isspace()
        assert task.fill == task.fill.strip()
        words = task.fill.split()
        if task.kind == "word":
            assert len(words) == 1
            assert task.fill[0].isalnum() and task.fill[-1].isalnum()
        elif task.kind == "phrase":
            assert 2 <= len(words) <= 6
            assert task.fill[-1].isalnum()
        else:
            assert words[0] == "In"
            assert task.fill.endswith("Smith said.")
            assert task.fill.count("said.") == 1


def test_a_seed_fixes_the_prose_gaps(infilling, texts):
    assert infilling.prose_gaps(texts, 12, seed=1) == infilling.prose_gaps(texts, 12, seed=1)
    assert infilling.prose_gaps(texts, 12, seed=1) != infilling.prose_gaps(texts, 12, seed=2)


def test_passages_with_placeholders_are_skipped(infilling, texts):
    marked = [text.replace("flows", "<unk>") if number % 2 else text for number, text in enumerate(texts)]
    for task in infilling.prose_gaps(marked, 12, seed=1):
        assert "<unk>" not in task.prefix + task.fill + task.suffix


def test_too_few_texts_are_an_error(infilling, texts):
    with pytest.raises(ValueError, match="room for only"):
        infilling.prose_gaps(texts[:1], 100, seed=1)


# ---- code -----------------------------------------------------------------------------------------------------------

SOURCE = '''import math

LIMIT = 3


class Shape:
    @property
    def area(self):
        """Return the area."""
        # a comment
        side = self.side
        text = """first
        second"""

        def inner(x):
            return x * side

        return inner(side) + len(text)

    def short(self):
        return 1


def total(
    values,
):
    result = 0
    for value in values:
        result += value
    return result
'''
GAPS = {
    "area": {"side = self.side", "def inner(x):", "return x * side", "return inner(side) + len(text)"},
    "total": {"result = 0", "for value in values:", "result += value", "return result"},
}


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "package"
    (folder / "tests").mkdir(parents=True)
    (folder / "shapes.py").write_text(SOURCE)
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "test_shapes.py").write_text(SOURCE)
    (folder / "tests" / "shapes.py").write_text(SOURCE)
    return folder


def test_code_gaps_are_lines_of_bodies_of_functions(infilling, package):
    seen = {name: set() for name in GAPS}
    for seed in range(60):
        tasks = infilling.code_gaps([package], 2, seed)
        assert {task.kind for task in tasks} == {"line"}
        for task in tasks:
            file, _, line = task.name.partition(":")
            assert file == "package/shapes.py"
            assert SOURCE.split("\n")[int(line) - 1] + "\n" == task.fill
            whole = task.prefix + task.fill + task.suffix
            assert whole in SOURCE
            name = "area" if whole.endswith("len(text)\n") else "total"
            seen[name].add(task.fill.strip())
    assert seen == GAPS


def test_the_prefix_begins_at_most_15_lines_before_the_function(infilling, tmp_path):
    (tmp_path / "long.py").write_text("x = 1\n" * 40 + "def f():\n" + "    y = 2\n" * 6)
    [task] = infilling.code_gaps([tmp_path / "long.py"], 1, seed=0)
    assert task.prefix.startswith("x = 1\n" * 15 + "def f():\n")
    assert len(ast.parse(task.prefix + task.fill + task.suffix).body) == 16


def test_paths_take_turns_and_a_seed_fixes_the_lines(infilling, package, tmp_path):
    large = tmp_path / "large.py"
    large.write_text(
        "\n".join(f"def f{i}(x):\n    a = {i}\n    b = x\n    c = a + b\n    return c\n" for i in range(50))
    )
    tasks = infilling.code_gaps([large, package], 10, seed=3)
    assert Counter(task.name.split(":")[0] for task in tasks) == {"large.py": 8, "package/shapes.py": 2}
    assert tasks == infilling.code_gaps([large, package], 10, seed=3)
    assert tasks != infilling.code_gaps([large, package], 10, seed=4)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_the_command_writes_tasks_of_all_kinds(infilling, texts, package, tmp_path):
    prose, humaneval, output = (tmp_path / name for name in ("prose.jsonl", "humaneval.jsonl.gz", "tasks.jsonl"))
    prose.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    row = {
        "task_id": "HumanEval/0/L0",
        "prompt": "def one():\n",
        "canonical_solution": "    x = 1\n",
        "suffix": "    return x",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "one",
    }
    humaneval.write_bytes(gzip.compress(json.dumps(row).encode() + b"\n"))
    arguments = ["--prose", prose, "--code", package, "--humaneval", humaneval, "--count", 4, "-o", output]
    run = programs.program("infilling_tasks.py", *arguments, folder=FOLDER)
    assert run.returncode == 0, run.stderr
    tasks = infilling.read_tasks(output)
    kinds = ["word", "phrase", "line", "line", "humaneval"]
    assert [task.kind for task in tasks] == kinds
    assert "line: 2 gaps" in run.stdout
    exec(tasks[-1].program(tasks[-1].fill), {})
    with pytest.raises(AssertionError):
        exec(tasks[-1].program("    x = 2\n"), {})
    assert (
        "lower the count"
        in programs.program("infilling_tasks.py", "--code", package, "-o", output, folder=FOLDER).stderr
    )
