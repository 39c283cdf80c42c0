"""Existing files in the folder of generations: damaged ones, foreign ones, those of another configuration."""

from __future__ import annotations

import json

import pytest
import torch
from generators import model_of, set_of, stop

from acgpt.common.files import write_atomically
from acgpt.errors import InputError
from acgpt.evaluation import generator as module
from acgpt.evaluation.generator import Generator
from acgpt.query.sampling import Sampling


def test_a_file_that_was_cut_off_is_refused_and_drawn_again_when_it_is_gone(tmp_path):
    generator = Generator(model_of("ac-gpt"), set_of(texts=3))
    generator.write("training", tmp_path)
    lines = tmp_path / "training.jsonl"
    whole = lines.read_bytes()
    for cut in (whole[:500], b"".join(whole.splitlines(keepends=True)[:2])):
        lines.write_bytes(cut)
        for mode in ("training", "infilling"):
            with pytest.raises(InputError, match=r"training\.jsonl does not match training\.json.*Delete it"):
                generator.write(mode, tmp_path)
        assert lines.read_bytes() == cut  # somebody may have wanted it so
    record = json.loads((tmp_path / "training.json").read_text())
    (tmp_path / "training.json").write_text(json.dumps({k: v for k, v in record.items() if k != "sha256"}))
    lines.write_bytes(whole)  # nobody knows that it is
    with pytest.raises(InputError, match=r"does not match training\.json"):
        generator.write("training", tmp_path)
    lines.unlink()
    generator.write("training", tmp_path)
    assert lines.read_bytes() == whole


def test_samples_that_have_no_record_may_be_somebodys_and_are_left_alone(tmp_path):
    generator, notes = Generator(model_of("ac-gpt"), set_of(texts=2)), tmp_path / "infilling.jsonl"
    notes.write_text("my notes\n")
    for mode in ("infilling", "training"):
        with pytest.raises(InputError, match=r"infilling\.jsonl has no infilling\.json beside it.*Move or delete it"):
            generator.write(mode, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["infilling.jsonl"] and notes.read_text() == "my notes\n"
    (tmp_path / "infilling.jsonl.part").write_bytes(b'{"journal": {"mo')  # of a run that had drawn nothing
    with pytest.raises(InputError, match=r"infilling\.jsonl has no infilling\.json beside it"):
        generator.write("infilling", tmp_path)
    assert notes.read_text() == "my notes\n"


def test_a_run_that_was_killed_before_its_record_was_written_goes_on(tmp_path, monkeypatch):
    generator, written = Generator(model_of("ac-gpt"), set_of(texts=2)), []

    def write(path, content):
        written.append(path.name)
        write_atomically(path, content)

    def cut_off(path, content):
        written.append(path.name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "write_atomically", write)
        patch.setattr(module, "write_json", cut_off)
        generator.write("training", tmp_path)
    whole = (tmp_path / "training.jsonl").read_bytes()
    assert written == ["training.jsonl", "training.json"]
    monkeypatch.setattr(module, "line_of", stop)  # all has been drawn
    generator.write("training", tmp_path)
    assert (tmp_path / "training.jsonl").read_bytes() == whole
    assert {path.name for path in tmp_path.iterdir()} == {"training.jsonl", "training.json"}


@pytest.mark.parametrize("name", ["training.jsonl", "training.json", "training.jsonl.part", "infilling.json"])
def test_a_folder_in_the_place_of_a_file_is_seen_before_anything_is_drawn(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(module, "line_of", stop)
    with pytest.raises(InputError, match=rf"{name} is a folder"):
        Generator(model_of("ac-gpt"), set_of(texts=1)).write("training", tmp_path)


@pytest.mark.parametrize("begun", ["whole", "part", "another mode"])
def test_another_configuration_in_the_folder_is_refused_with_what_differs(tmp_path, begun, monkeypatch):
    lm, asked = model_of("ac-gpt"), set_of(texts=2)
    if begun == "part":
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, "line_of", stop)
            Generator(lm, asked).write("training", tmp_path)
    else:
        Generator(lm, asked).write("training", tmp_path)
    mode = "infilling" if begun == "another mode" else "training"
    content = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for arguments, words in (
        ({"samples": 2}, "samples 1, and not 2"),
        ({"sampling": Sampling(temperature=0.8, top_p=0.9)}, "top_p 0.95, and not 0.9"),
        ({"sampling": Sampling(temperature=0.8, top_p=0.95, seed=1)}, "seed 0, and not 1"),
        ({"prompt": 3}, "prompt 20, and not 3"),
        ({"budget": 64}, "batch_tokens 8192, and not 64"),
    ):
        with pytest.raises(InputError, match=words):
            Generator(lm, asked, **arguments).write(mode, tmp_path)
    other = Generator(lm, asked)
    other.engine.most_rows = 8
    with pytest.raises(InputError, match="samples_at_once 32, and not 8"):
        other.write(mode, tmp_path)
    with pytest.raises(InputError, match=r"set [0-9a-f]{8}, and not [0-9a-f]{8} \(other texts"):
        Generator(lm, set_of(texts=1)).write(mode, tmp_path)
    with torch.no_grad():
        lm.model.get_input_embeddings().weight += 1
    with pytest.raises(InputError, match=r"weights [0-9a-f]{8}, and not [0-9a-f]{8}\."):
        Generator(lm, asked).write(mode, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == content
