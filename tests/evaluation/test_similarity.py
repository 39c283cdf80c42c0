"""benchmarks/similarity.py: the sentence of a gap, the encoder against its definition, joined parts, paired numbers."""

from __future__ import annotations

import importlib
import io
import json
import zipfile

import numpy as np
import programs
import pytest
import torch
from models import toy_tokenizer
from transformers import MPNetConfig, MPNetModel

CONTEXT = "It rained. The cat ", " on the mat. She left."


@pytest.fixture
def program(monkeypatch):
    """Import a benchmark program."""
    monkeypatch.syspath_prepend(programs.BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def similarity(program):
    return program("similarity")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """The folder of a tiny encoder with random weights."""
    folder = tmp_path_factory.mktemp("encoder") / "tiny"
    tokenizer = toy_tokenizer()
    config = MPNetConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=400, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    MPNetModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(content | {"pad_token": "<eos>"}))
    return folder


@pytest.fixture
def tasks(program):
    task = program("infilling_tasks").Task
    rows = [task(f"word/{i}", "word", *CONTEXT[:1], fill, *CONTEXT[1:]) for i, fill in enumerate(["sat", "lay", "was"])]
    rows += [task(f"sentence/{i}", "sentence", "It rained. ", f"We met {i} men.", " She left.") for i in range(9)]
    return [*rows, task("code", "line", "def f(x):\n", "    return x\n", "")]


def write(program, folder, tasks, fills):
    program("infilling_tasks").write_tasks(folder / "tasks.jsonl", tasks)
    files = []
    for label, texts in fills.items():
        record = {"benchmark": "infilling", "names": [task.name for task in tasks], "fills": {"future, unknown": texts}}
        (folder / f"{label}.json").write_text(json.dumps(record))
        files.append(f"{label}={folder / label}.json")
    return [folder / "tasks.jsonl", "--fills", *files, "--device", "cpu"]


def wheels(folder, encoder, parts=3, leave_out=()):
    """Write an encoder as parts of a zip file in wheels, as all-mpnet-base-v2 is packed."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for path in encoder.iterdir():
            file.write(path, f"tiny/{path.name}")
    size = -(-len(archive.getvalue()) // parts)
    folder.mkdir()
    for number in set(range(1, parts + 1)) - set(leave_out):
        with zipfile.ZipFile(folder / f"part_{number:03d}-0.0.1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"part_{number:03d}/input/tiny.zip.{number:03d}", archive.getvalue()[(number - 1) * size :][:size]
            )
            wheel.writestr(f"part_{number:03d}/__init__.py", "")
    return folder


def test_the_sentence_of_the_gap_is_compared(similarity, tasks):
    assert similarity.frame(tasks[0]) == ("The cat ", " on the mat.")
    assert similarity.frame(tasks[3]) == ("", "")
    pairs, kinds = similarity.compared(tasks, {"a": {"future, unknown": ["ran"] * len(tasks)}})
    assert kinds == ["word"] * 3 + ["sentence"] * 9
    assert pairs["future, unknown", "a"][0] == ("The cat ran on the mat.", "The cat sat on the mat.")
    assert pairs["future, unknown", "a"][3] == ("ran", "We met 0 men.")
    assert pairs["", similarity.EMPTY][0] == ("The cat  on the mat.", "The cat sat on the mat.")
    assert pairs["", similarity.OTHER][2] == ("The cat sat on the mat.", "The cat was on the mat.")


def test_a_sentence_is_the_normalised_mean_of_its_tokens(similarity, encoder):
    """Alone, without padding."""
    embed = similarity.Encoder(encoder, "cpu", 2)
    texts = ["ab", "The cat sat on the mat.", "x", ""]
    vectors = embed(texts[:3])
    model = MPNetModel.from_pretrained(encoder).eval()
    for text, vector in zip(texts, vectors, strict=False):
        with torch.no_grad():
            mean = model(torch.tensor([toy_tokenizer()(text).input_ids])).last_hidden_state[0].mean(0)
        assert vector == pytest.approx((mean / mean.norm()).numpy(), abs=1e-5)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-6)


def test_files_of_fills_are_compared_task_by_task(program, similarity, tasks, encoder, tmp_path):
    true = [task.fill for task in tasks]
    fills = {"before": ["ran"] * len(tasks), "after": [t if i % 2 else "ran" for i, t in enumerate(true)]}
    arguments = write(program, tmp_path, tasks, fills)
    done = programs.program("similarity.py", *arguments, "--encoder", encoder)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["left_out"] == 1
    assert {kind: group["tasks"] for kind, group in record["kinds"].items()} == {"word": 3, "sentence": 9, "all": 12}
    embed = similarity.Encoder(encoder, "cpu", 64)
    entries = {(e["condition"], e["label"]): e for e in record["kinds"]["sentence"]["entries"]}
    mean = {}
    for label in fills:
        pairs = [(fills[label][i], true[i]) for i in range(3, 12)]
        mean[label] = np.mean([embed([a])[0] @ embed([b])[0] for a, b in pairs])
        assert entries["future, unknown", label]["similarity"]["mean"] == pytest.approx(mean[label], abs=1e-5)
    difference = entries["future, unknown", "after"]["difference"]
    assert difference["mean"] == pytest.approx(mean["after"] - mean["before"], abs=1e-5)
    assert difference["interval"][0] <= difference["mean"] <= difference["interval"][1]
    assert "| 9 sentence | future, unknown | after |" in program("render").TABLES["similarity"](record)


def test_parts_in_wheels_are_joined(program, tasks, encoder, tmp_path):
    arguments = write(program, tmp_path, tasks, {"a": ["ran"] * len(tasks)})
    whole = programs.program("similarity.py", *arguments, "--encoder", encoder)
    parts = ["--encoder-parts", wheels(tmp_path / "wheels", encoder)]
    for more in (parts, [*parts, "--encoder", tmp_path / "kept"], ["--encoder", tmp_path / "kept"]):
        done = programs.program("similarity.py", *arguments, *more)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["kinds"] == json.loads(whole.stdout.splitlines()[-1])["kinds"]


def test_bad_input_is_one_line_and_exit_code_2(program, tasks, encoder, tmp_path):
    arguments = write(program, tmp_path, tasks, {"a": ["ran"] * len(tasks)})
    (tmp_path / "text.json").write_text("[]")
    (tmp_path / "code").mkdir()
    code = write(program, tmp_path / "code", tasks[-1:], {"a": ["x"]})
    damaged = wheels(tmp_path / "damaged", encoder, parts=1)
    with zipfile.ZipFile(next(damaged.iterdir()), "w") as wheel:
        wheel.writestr("x/tiny.zip.001", b"no zip file")
    for options, reason in [
        (arguments, "no encoder"),
        ([*arguments, "--encoder", tmp_path / "absent"], "no config.json"),
        ([*arguments, "--encoder-parts", tmp_path / "absent"], "has the parts []"),
        ([*arguments, "--encoder-parts", wheels(tmp_path / "two", encoder, leave_out=[2])], "has the parts [1, 3]"),
        ([*arguments, "--encoder-parts", damaged], "are no zip file"),
        ([*arguments, "--encoder", encoder, "--limit", 2], "fills of other tasks"),
        ([*arguments, "--encoder", encoder, "--fills", tmp_path / "text.json"], "has no fills"),
        ([*arguments, "--encoder", encoder, "--fills", tmp_path / "absent.json"], "absent.json"),
        ([*code, "--encoder", encoder], "no task has a gap"),
    ]:
        done = programs.program("similarity.py", *options)
        assert done.returncode == 2 and reason in done.stderr, (options, done.stderr)
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1, (options, done.stderr)
