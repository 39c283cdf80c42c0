"""The programs under benchmarks/: each runs at a tiny size and prints a record that render.py can show."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import tiny_model, tiny_tokenizer
from programs import BENCHMARKS, load_program, program
from servers import serving, tiny_lm
from transformers import AutoModelForCausalLM

import acgpt
from acgpt import LanguageModel, Metadata
from acgpt.data.corpus import Corpus
from acgpt.data.prepare import prepare

peft = pytest.importorskip("peft")

WORDS = ["the", "cat", "dog", "bird", "sat", "on", "mat", "log", "and", "saw", "France", "Italy", "capital", "of"]


def tokenizer():
    return tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")


@pytest.fixture
def loaded(monkeypatch):
    """Import a program."""
    return lambda name: load_program(monkeypatch, BENCHMARKS / name)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The folders of a tiny model and of an adapter for it that says it reads copies."""
    folder = tmp_path_factory.mktemp("adapted")
    network = tiny_model(vocabulary=324, scale=0.15, positions=1024)
    LanguageModel(network, tokenizer()).save_pretrained(folder / "base")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    network = AutoModelForCausalLM.from_pretrained(folder / "base")
    peft.get_peft_model(network, config).save_pretrained(folder / "adapter")
    Metadata(method="ac-gpt").write(folder / "adapter")
    return folder / "base", folder / "adapter"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write two splits of random words, in which a text of 200 tokens occurs only once."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for split, documents in (("validation", 12), ("code", 6)):
        texts = [" ".join(rng.choice(WORDS, 900)) for _ in range(documents)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{split}.jsonl").write_text(lines, "utf-8")
    tokenizer().save_pretrained(folder / "tokenizer")
    sources = [f"{split}={folder / split}.jsonl" for split in ("validation", "code")]
    prepare(sources, folder / "made", tokenizer=str(folder / "tokenizer"), workers=1)
    return folder / "made"


@pytest.fixture
def tasks(tmp_path):
    """A file of tasks of two kinds, one of which has tests."""
    test = "def check(candidate):\n    assert candidate() == 'cat'"
    shared = {"prefix": "def f():\n    return ", "suffix": "\n", "test": test, "entry_point": "f"}
    all_tasks = [
        {"name": "0", "kind": "word", "prefix": "The dog saw the ", "fill": "cat", "suffix": " on the mat."},
        {"name": "1", "kind": "humaneval", **shared, "fill": "'cat'"},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in all_tasks))
    return tmp_path / "tasks.jsonl"


# ---- records --------------------------------------------------------------------------------------------------------


def record_of(name, *arguments, **constants):
    """Run a program and return its record, after checking that its last line has the form of results.jsonl."""
    done = program(name, *arguments, **constants)
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    record = json.loads(line)
    assert record["benchmark"] == name.removesuffix(".py")
    assert record["command"].startswith(f"python benchmarks/{name}")
    check_record(record)
    labels = {row.split(" | ")[0].lstrip("| ") for row in table}
    assert {row["row"] for row in record["rows"]} <= labels
    return record


def check_record(record):
    needed = {"benchmark", "case", "command", "hardware", "versions", "date", "rows"}
    assert needed <= set(record) <= needed | {"notes"}, record["case"]
    assert {"acgpt", "torch", "transformers"} <= set(record["versions"])
    for row in record["rows"]:
        intervals = {key.removesuffix("_interval") for key in row if key.endswith("_interval")}
        assert "row" in row and intervals <= set(row)
        assert all(isinstance(row[f"{key}_interval"], list) and len(row[f"{key}_interval"]) == 2 for key in intervals)
        plain = [value for key, value in row.items() if key.removesuffix("_interval") not in intervals]
        assert all(value is None or isinstance(value, str | int | float) for value in plain)


def test_every_record_has_the_form_that_programs_print():
    for line in (BENCHMARKS / "results.jsonl").read_text(encoding="utf-8").splitlines():
        check_record(json.loads(line))


TINY = ["--device", "cpu", "--size", "tiny", "--tokens", 16]
SPEED = {
    "training.py": [*TINY, "--texts", 2, "--steps", 1, "--rounds", 1],
    "sampling.py": [*TINY, "--batch", 2, "--repeats", 1],
    "sampling.py --generate": [*TINY, "--batch", 2, "--repeats", 1, "--generate", "--methods", "gpt", "ac-gpt"],
    "scoring.py": [*TINY, "--texts", 2],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SPEED)
def test_programs_of_speed_print_records(case):
    rows = {row["row"]: row for row in record_of(case.split()[0], *SPEED[case])["rows"]}
    base, key = {
        "training.py": ("GPT", "relative_time"),
        "sampling.py": ("generate", "ratio"),
        "sampling.py --generate": ("gpt, unconditional", "ratio"),
        "scoring.py": ("one pass, dense", "relative_time"),
    }[case]
    assert rows[base][key] == 1 and len(rows) > 1


@pytest.mark.slow
def test_the_steps_of_adapters_are_timed(adapted):
    tuning = ["--base", adapted[0], "--lora", 4, "--recipe", "default-adapter"]
    record = record_of("training.py", *SPEED["training.py"], *tuning)
    assert [row["row"] for row in record["rows"]] == ["GPT", "AC-GPT", "AC-GPT, adapter apart"]


def test_startup_prints_a_record():
    commands = {"--help": ["--help"], "a template error": ["score", "The {{cat"]}
    record = record_of("startup.py", "--rounds", 1, FLOOR="pass", PARTS={"imports": "pass"}, COMMANDS=commands)
    assert [row["row"] for row in record["rows"]] == ["floor", "imports", *commands]


@pytest.mark.slow
def test_cpu_decoding_prints_a_record(tmp_path):
    (tmp_path / "text").write_text(f"{' '.join(WORDS)}\n" * 2)
    size = {"BEFORE": 6, "BLANK": 3, "AFTER": 2, "THREADS": (1,)}
    record = record_of("cpu.py", tmp_path / "text", "--rounds", 1, **size)
    assert len(record["rows"]) == 4 and record["notes"]["accuracy"]["past only"]["tokens"] == 3


def test_processes_beside_each_other_are_timed():
    works = {"3 fills": "import time\nwork = lambda: time.sleep(0.01)", "10 training steps": "work = lambda: None"}

    @contextlib.contextmanager
    def server(device):
        async def ask(kind, body):
            await asyncio.sleep(0.01)

        yield ask

    arguments = ["--beside", "--rounds", 2, "--spin", 1, 2]
    rows = record_of("cpu.py", *arguments, WORKS=works, REQUESTS=16, server=server)["rows"]
    assert [row["relative_time"] for row in rows if "alone" in row["row"]] == [1] * 5 and len(rows) == 11
    assert rows[0]["row"] == "3 fills, alone, spin 1" and rows[0]["seconds"] >= 0.01
    assert [row["requests"] for row in rows if "server under" in row["row"]] == [16, 16]


@pytest.mark.parametrize("http", [True, False], ids=["http", "in-process"])
def test_serving_prints_a_record(http):
    lm = tiny_lm(positions=512)
    arguments = ["--clients", 1, 2, "--requests", 8, "--shares", 0.8, "--device", "cpu"]
    if http:
        with serving(lm) as (url, _):
            record = record_of("serving.py", *arguments, "--url", url, WARM_UP=2)
    else:
        loading = SimpleNamespace(load=lambda device: lm)
        record = record_of("serving.py", *arguments, "--in-process", "--seconds", 60, WARM_UP=2, acgpt=loading)
    assert [(row["row"], row["failed"]) for row in record["rows"]] == [
        ("1 client", 0), ("2 clients", 0), ("open, 80% of the highest rate", 0),
    ]  # fmt: skip


def test_gaps_prints_a_record(adapted, tasks):
    record = record_of(
        "gaps.py", tasks, "--model", adapted[0], "--adapter", adapted[1], "--device", "cpu", MAX_TOKENS=3
    )
    rows = {row["row"]: row for row in record["rows"]}
    assert rows["all; future, unknown"]["tasks"] == 2 and rows["all; future, unknown"]["relative_calls"] > 1
    assert "pass_rate" in rows["humaneval; past, line"] and "pass_rate" not in rows["all; past, line"]


def test_out_of_domain_prints_a_record(adapted, corpus):
    record = record_of(
        "out_of_domain.py", corpus, "--model", adapted[0], "--adapter", adapted[1], "--device", "cpu", GAPS=4
    )
    rows = {row["row"]: row for row in record["rows"]}
    assert rows["greedy, all"]["gaps"] == 8 and "wins_over_own_past_interval" in rows["greedy, all"]
    assert len(rows) == 6


@pytest.mark.slow
def test_a_program_without_its_hardware_says_so_and_hides_no_library():
    # In a process of its own: there the folder comes first in the search for modules.
    command = [sys.executable, BENCHMARKS / "attention_kernels.py", "decoding"]
    done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 2 and "needs Triton and a CUDA device" in done.stderr


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_batches_and_steps_of_the_kernels_are_those_of_training_and_decoding(loaded):
    kernels = loaded("attention_kernels.py")
    batch = kernels.Batch(2, "cpu", length=40)
    q, k, v = batch.qkv
    assert q.shape == k.shape == v.shape == (1, 12, batch.segments.keys.numel(), 64) and q.shape[2] % 128 == 0
    step = kernels.Step([70, 9], 2, 3, "cpu")
    outputs = step.masked()
    assert len(outputs) == kernels.LAYERS and outputs[0].shape == (2, 2, 12, 64)
    assert step.slots.tolist() == [[68, 69], [7, 8]]


def test_gaps_lie_in_one_document_and_their_texts_do_not_overlap(loaded, adapted, corpus):
    held_out = loaded("out_of_domain.py").held_out
    lm = acgpt.load(adapted[0])
    count = 12
    queries = held_out(corpus, "validation", lm, count, seed=0)
    tokens = Corpus.open(corpus).tokens("validation")[:].tolist()
    covered = np.zeros(len(tokens), int)
    for query in queries:
        ((first, last),) = query.blanks
        assert 4 <= last - first + 1 <= 12 and 100 <= first - 1 <= 200 and 100 <= len(query) - last <= 200
        places = [i for i in range(len(tokens)) if tokens[i : i + len(query)] == list(query.tokens)]
        assert len(places) == 1
        covered[places[0] : places[0] + len(query)] += 1
        assert lm.tokenizer.eos_token_id not in query.tokens
    assert covered.max() == 1
    assert held_out(corpus, "validation", lm, count, seed=0) == queries
    assert held_out(corpus, "validation", lm, count, seed=1) != queries
    with pytest.raises(SystemExit, match=r"has only .* gaps"):
        held_out(corpus, "validation", lm, 10_000, seed=0)


def test_ties_count_half_and_intervals_hold_the_rate(loaded):
    wins = loaded("out_of_domain.py").wins(np.array([1.0] * 60 + [0.0] * 20 + [-2.0] * 20))
    row = loaded("common.py").mean_with_interval("wins", wins)
    assert row["wins"] == pytest.approx(70)
    # The standard error of a mean of 100 is that of the sample over 10.
    error = np.std(wins) / 10
    assert row["wins_interval"] == pytest.approx([70 - 1.96 * error, 70 + 1.96 * error], abs=1.5)


def test_the_judge_is_the_model_without_its_adapter(loaded, adapted, corpus):
    program = loaded("out_of_domain.py")
    base, adapter = adapted
    lm = acgpt.load(base, adapter, dtype="float64")
    texts = program.held_out(corpus, "code", lm, 3)
    result = program.contest(lm, texts, temperature=0.8)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    for text, judged in zip(texts, result["true"]["log_prob"], strict=True):
        ids = torch.tensor([[lm.bos, *text.tokens]])
        with torch.no_grad():
            scores = plain(ids).logits[0, :-1].log_softmax(-1)
        assert judged == pytest.approx(float(scores.gather(1, ids[0, 1:, None]).sum()), rel=1e-6)
    assert result["true"]["true"].tolist() == [1.0] * 3
    assert set(result) == {"true", *(f"{m}, {w}" for m in ("unadapted", "adapted") for w in ("past", "future"))}


def test_bad_input_is_one_line_and_exit_code_2(tasks, tmp_path):
    for arguments, reason in [
        ([tmp_path / "absent.jsonl"], "absent.jsonl"),
        ([tasks, "--model", tmp_path / "absent"], "absent"),
    ]:
        done = program("gaps.py", *arguments)
        assert done.returncode == 2 and reason in done.stderr, (arguments, done.stderr)
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1, (arguments, done.stderr)
