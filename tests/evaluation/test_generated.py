"""Files of generations: what is read of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from generations import write_generations
from generators import model_of, set_of
from test_mauve import acgpt

from acgpt.errors import InputError
from acgpt.evaluation import text_metrics as companions
from acgpt.evaluation.generations import Generations, find_generations
from acgpt.evaluation.generator import Generator
from acgpt.methods import METHODS
from acgpt.query.modes import MODES


@pytest.mark.parametrize("method", list(METHODS))
def test_what_every_method_draws_is_read_as_it_was_written(method: str, tmp_path: Path):
    lm, asked = model_of(method), set_of()
    generator = Generator(lm, asked, samples=2, prompt=5)
    if not generator.answers("unconditional"):
        generator = Generator(lm, asked, samples=2, prompt=0)
    for mode in MODES:
        if generator.write(mode, tmp_path) is None:
            continue
        result = Generations.open(tmp_path / f"{mode}.jsonl")
        queries = generator.queries(mode)
        assert len(result.samples) == 2 * len(queries) and result.record["method"] == method
        for each in result.samples:
            query = queries[each.item]
            assert [role == "a" for role in each.roles] == list(query.asked)
            assert [each.tokens[p - 1] for p in query.given_positions] == [
                query.tokens[p - 1] for p in query.given_positions
            ]
            assert sum(map(len, each.runs)) == len(each.log_probs or ()) == len(query.asked_positions)
        assert companions.own_perplexity(result.samples) > 1
    assert {each.path.suffix for each in find_generations([tmp_path])} == {".jsonl"}


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


def test_a_folder_of_which_nothing_could_be_drawn_is_passed_over(corpus: Path, tmp_path: Path):
    path = write_generations(tmp_path / "ac", corpus)
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "index.json").write_text('{"kind": "index", "modes": {"training": null}}')
    result = acgpt(tmp_path / "ac", tmp_path / "gpt", corpus, "--no-mauve")
    assert "gpt contains an index, but no generations" in result.stderr
    assert len(list(path.parent.glob("*.mauve.json"))) == 1
    assert "there are no generations in" in acgpt(tmp_path / "gpt", corpus, "--no-mauve", code=2).stderr


def test_each_of_several_is_found_once(corpus: Path, tmp_path: Path):
    path = write_generations(tmp_path, corpus)
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert [each.path for each in find_generations([path, tmp_path, path])] == [path]
