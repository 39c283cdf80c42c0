"""Journals: whatever is cut off or changed, the intact batches before it are read, and the rest is written again."""

from __future__ import annotations

import fcntl
import json
import resource
import tracemalloc

import numpy as np
import pytest
from disk import watched_disk

from acgpt.errors import InputError
from acgpt.evaluation.journal import HEAD, as_line, journal_config, open_journal
from acgpt.evaluation.perplexity import PartialEvaluation

CONFIG = {"mode": "training", "weights": "abc"}
BATCHES = [([{"item": 2}, {"item": 0}], {"seconds": 0.1, "calls": 3}), ([{"item": 1}], {"seconds": 0.25, "calls": 1})]
BATCHES += [([{"text": "\x85\u2028ä"}], {"seconds": 1e-7, "calls": 0})]


def add(journal, batches):
    for entries, costs in batches:
        journal.add([as_line(entry) for entry in entries], costs)


@pytest.fixture
def whole(tmp_path):
    """The bytes of a journal, and its size after each batch."""
    sizes = []
    with open_journal(tmp_path / "whole", CONFIG) as journal:
        sizes.append(journal.end)
        for batch in BATCHES:
            add(journal, [batch])
            sizes.append(journal.end)
        assert [json.loads(line).get("item") for line in journal.entries([1, 2, 0, 3])] == [0, 1, 2, None]
    content = (tmp_path / "whole").read_bytes()
    assert len(content) == sizes[-1] and content.startswith(HEAD)
    return content, sizes


def check(path, intact):
    """Check that so many batches are read, and that with the others the file is the whole one."""
    with open_journal(path, CONFIG) as journal:
        expected = [entry for entries, _ in BATCHES[:intact] for entry in entries]
        assert [json.loads(line) for line in journal.entries()] == expected
        assert journal.costs.get("calls", 0) == sum(costs["calls"] for _, costs in BATCHES[:intact])
        add(journal, BATCHES[intact:])
    assert path.read_bytes() == (path.parent / "whole").read_bytes()


def test_what_is_cut_off_anywhere_is_written_again(whole, tmp_path):
    content, sizes = whole
    for end in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:end])
        check(tmp_path / "cut", sum(size <= end for size in sizes[1:]))


def test_nothing_after_a_changed_byte_is_believed(whole, tmp_path):
    content, sizes = whole
    for place in range(sizes[0], len(content)):
        (tmp_path / "changed").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        check(tmp_path / "changed", sum(size <= place for size in sizes[1:]))


@pytest.mark.parametrize("damage", ["left out", "twice", "not closed", "nested", "no number"])
def test_nothing_after_a_damaged_batch_is_believed(whole, tmp_path, damage):
    content, sizes = whole
    head, first, second, third = (content[a:b] for a, b in zip([0, *sizes], sizes, strict=False))
    nested = b'{"sha256": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    no_number = first[: first.rindex(b"0.1")] + b"NaN}\n"
    left, intact = {
        "left out": (head + first + third, 1),
        "twice": (head + first + first + second + third, 1),
        "not closed": (content + b'{"item": 7}\n{"it', 3),
        "nested": (head + nested + first, 0),
        "no number": (head + no_number + second, 0),
    }[damage]
    (tmp_path / "damaged").write_bytes(left)
    check(tmp_path / "damaged", intact)


@pytest.mark.parametrize("content", [b"[" * 100_000 + b"]" * 100_000 + b"\n", b"{}\n", b"\xff\xfe\n", b"no line"])
def test_another_file_is_refused_in_few_words_or_replaced(tmp_path, content):
    path = tmp_path / "mine"
    path.write_bytes(content)
    for refused in (lambda: journal_config(path), lambda: open_journal(path, CONFIG).__enter__()):
        with pytest.raises(InputError, match="mine is not a partial file of acgpt") as caught:
            refused()
        assert len(str(caught.value)) < 300 and path.read_bytes() == content
    with open_journal(path, CONFIG, replace=True):
        assert journal_config(path) == CONFIG


def test_a_locked_journal_and_one_of_another_config_are_left_alone_unless_that_is_replaced(whole, tmp_path):
    path, other = tmp_path / "whole", CONFIG | {"weights": "another one"}
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as another process has it
        for config, replace in ((CONFIG, False), (other, True)):
            with pytest.raises(InputError, match="another process is writing"):
                open_journal(path, config, replace=replace).__enter__()
    with pytest.raises(InputError, match="weights abc, and not another "):
        open_journal(path, other).__enter__()
    assert path.read_bytes() == whole[0]
    with open_journal(path, other, replace=True) as journal:
        assert journal.offsets == [] and journal_config(path) == other


def test_a_batch_is_on_the_disk_once_it_was_added(tmp_path, monkeypatch):
    disk, path, size = watched_disk(monkeypatch), tmp_path / "journal", 0
    with open_journal(path, CONFIG) as journal:
        for batch in BATCHES:
            add(journal, [batch])
            assert size < journal.end == path.stat().st_size and disk.lost(path) == []
            size = journal.end


@pytest.fixture
def full_disk():
    """No file can become larger than 4 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_costs_an_evaluation_its_journal_alone(full_disk, tmp_path):
    path = tmp_path / "results.json.part"
    with PartialEvaluation(path, lambda: CONFIG) as evaluation:
        evaluation.pause = 0.0
        evaluation.add("ga", {0: np.zeros(10)})
        size = path.stat().st_size
        with pytest.warns(UserWarning, match="cannot be resumed"):
            evaluation.add("ga", {1: np.zeros(1000)})
        evaluation.add("ga", {2: np.zeros(10)})
    assert path.stat().st_size == size  # nothing of the batch that did not fit takes space
    with PartialEvaluation(path, lambda: CONFIG) as evaluation:
        assert list(evaluation.answers["ga"]) == [0]


def test_answers_of_another_config_are_kept_until_there_are_new_ones(tmp_path):
    path, other = tmp_path / "results.json.part", CONFIG | {"dtype": "float32"}
    for config, answered, kept in ((CONFIG, True, CONFIG), (other, False, CONFIG), (other, True, other)):
        with PartialEvaluation(path, lambda config=config: config) as evaluation:
            assert evaluation.answers == {}
            evaluation.pause = 0.0
            if answered:
                evaluation.add("ga", {0: np.zeros(10)})
        assert journal_config(path) == kept


def test_a_journal_of_any_size_is_read_with_little_memory(tmp_path):
    batches, entries, size = 40, 10, 10_000  # 4 MB
    with open_journal(tmp_path / "journal", CONFIG) as journal:
        for _ in range(batches):
            add(journal, [([{"text": "x" * size}] * entries, {"calls": 1})])
    tracemalloc.start()
    try:
        with open_journal(tmp_path / "journal", CONFIG) as journal:
            assert sum(len(line) > size for line in journal.entries()) == batches * entries
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert journal.costs == {"calls": batches} and peak < batches * entries * size / 4


def test_a_line_is_one_for_all_who_read_lines():
    text = "one\ntwo\rthree\x85four\u2028five\u2029six\x0bseven ä"
    line = as_line({"text": text})
    assert line.decode().splitlines() == [line.decode().removesuffix("\n")]
    assert json.loads(line) == {"text": text}
    assert "ä" in line.decode()  # what ends no line stays readable
