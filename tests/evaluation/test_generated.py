"""Files of generations: what is read of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from generations import write_generations

from acgpt.errors import InputError
from acgpt.evaluation.generations import Generations, find_generations


def test_a_record_that_lacks_something_is_named(corpus: Path, tmp_path: Path):
    path = write_generations(tmp_path, corpus, texts=1)
    record = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({key: record[key] for key in record if key not in ("set", "mode")}))
    with pytest.raises(InputError, match=r"training.json lacks mode, set\."):
        Generations.open(path)


@pytest.mark.parametrize("content", ["[" * 200_000, "{", '{"kind": "generations", "x": "\\ud800"}', "[1]", "\x00"])
def test_a_file_beside_it_that_cannot_be_read_is_somebody_elses(corpus: Path, tmp_path: Path, content: str):
    path = write_generations(tmp_path, corpus)
    (tmp_path / "stray.jsonl").write_text("{}\n")
    (tmp_path / "stray.json").write_text(content)
    assert [each.path for each in find_generations([tmp_path])] == [path]
    with pytest.raises(InputError, match=r"stray.jsonl has no record of generations"):
        Generations.open(tmp_path / "stray.jsonl")


def test_lines_that_are_missing_or_changed_are_missed(corpus: Path, tmp_path: Path):
    path = write_generations(tmp_path, corpus, texts=3)
    whole = path.read_text()
    assert len(Generations.open(path).samples) == 3
    two_lines = "".join(whole.splitlines(keepends=True)[:2])
    for changed in (two_lines, whole[:-40], whole.replace('"item": 2', '"item": 1'), whole[:-40] + "é"):
        path.write_bytes(changed.encode()[: -1 if changed.endswith("é") else None])  # cut within it
        with pytest.raises(InputError, match=r"training.jsonl does not match training.json.*Delete it"):
            _ = Generations.open(path).samples


def test_a_damaged_record_of_a_mode_is_not_passed_over(corpus: Path, tmp_path: Path):
    write_generations(tmp_path, corpus)
    path = write_generations(tmp_path, corpus, "infilling")
    beside = path.with_suffix(".json")
    beside.write_text(beside.read_text()[:70])
    with pytest.raises(InputError, match=r"infilling.json cannot be read.*Delete it"):
        list(find_generations([tmp_path]))


def test_modes_come_in_their_order_and_other_files_after_them(corpus: Path, tmp_path: Path):
    for mode in ("infilling", "training", "unconditional"):
        write_generations(tmp_path, corpus, mode)
    for end in (".json", ".jsonl"):
        (tmp_path / f"earlier{end}").write_bytes((tmp_path / f"training{end}").read_bytes())
    results = [each.name for each in find_generations([tmp_path])]
    assert results == ["unconditional", "infilling", "training", "earlier"]


def test_each_of_several_is_found_once(corpus: Path, tmp_path: Path):
    path = write_generations(tmp_path, corpus)
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert [each.path for each in find_generations([path, tmp_path, path])] == [path]
