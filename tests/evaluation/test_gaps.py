"""Gain from the future: the programs that measure it on held-out text."""

from __future__ import annotations

import importlib
import json

import numpy as np
import programs
import pytest
import torch
from models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

import acgpt
from acgpt import LanguageModel, Metadata
from acgpt.data.corpus import Corpus
from acgpt.data.prepare import prepare

peft = pytest.importorskip("peft")

VOCABULARY = 324  # of the tiny tokenizer


def tokenizer():
    return tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")


@pytest.fixture
def program(monkeypatch):
    """Import a benchmark program."""
    monkeypatch.syspath_prepend(programs.BENCHMARKS)
    return importlib.import_module


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The folders of a tiny model and of an adapter for it that says it reads copies."""
    folder = tmp_path_factory.mktemp("adapted")
    network = tiny_model(vocabulary=VOCABULARY, scale=0.15, positions=1024)
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
    words = ["the", "cat", "dog", "bird", "sat", "on", "mat", "log", "and", "saw", "France", "Italy", "capital", "of"]
    for split, documents in (("validation", 12), ("code", 6)):
        texts = [" ".join(rng.choice(words, 900)) for _ in range(documents)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{split}.jsonl").write_text(lines, "utf-8")
    tokenizer().save_pretrained(folder / "tokenizer")
    sources = [f"{split}={folder / split}.jsonl" for split in ("validation", "code")]
    prepare(sources, folder / "made", tokenizer=str(folder / "tokenizer"), workers=1)
    return folder / "made"


# ---- gaps -----------------------------------------------------------------------------------------------------------


def test_gaps_lie_in_one_document_and_their_texts_do_not_overlap(program, adapted, corpus):
    gaps = program("gaps")
    lm = acgpt.load(adapted[0])
    count = 12
    queries = gaps.held_out(corpus, "validation", lm, count, seed=0)
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
    assert gaps.held_out(corpus, "validation", lm, count, seed=0) == queries
    assert gaps.held_out(corpus, "validation", lm, count, seed=1) != queries
    with pytest.raises(SystemExit, match=r"has only .* gaps: use --gaps"):
        gaps.held_out(corpus, "validation", lm, 10_000, seed=0)


def test_ties_count_half_and_intervals_hold_the_rate(program):
    gaps = program("gaps")
    result = gaps.summarize_comparison(np.array([1.0] * 60 + [0.0] * 20 + [-2.0] * 20), seed=0)
    assert (
        result["win_rate"] == pytest.approx(0.7) and result["ties"] == 20 and result["difference"] == pytest.approx(0.2)
    )
    # The standard error of a mean of 100 is that of the sample over 10.
    error = np.std([1.0] * 60 + [0.5] * 20 + [0.0] * 20) / 10
    assert result["win_rate_interval"] == pytest.approx([0.7 - 1.96 * error, 0.7 + 1.96 * error], abs=0.015)


def test_the_judge_is_the_model_without_its_adapter(program, adapted, corpus):
    gaps = program("gaps")
    base, adapter = adapted
    lm = acgpt.load(base, adapter, dtype="float64")
    texts = gaps.held_out(corpus, "code", lm, 3, seed=0)
    result = gaps.contest(lm, texts, 0, 0, temperature=0.8)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    for text, judged in zip(texts, result["true"]["log_prob"], strict=True):
        ids = torch.tensor([[lm.bos, *text.tokens]])
        with torch.no_grad():
            scores = plain(ids).logits[0, :-1].log_softmax(-1)
        assert judged == pytest.approx(float(scores.gather(1, ids[0, 1:, None]).sum()), rel=1e-6)
    assert result["true"]["right"] == [1.0] * 3
    assert set(result) == {"true", *(f"{m}, {w}" for m in ("unadapted", "adapted") for w in ("past", "future"))}


@pytest.mark.slow
def test_the_program_prints_a_table_and_a_line_that_can_be_rendered(program, adapted, corpus):
    base, adapter = adapted
    done = programs.program("gaps.py", corpus, "--model", base, "--adapter", adapter, "--gaps", 4, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    lines = program("render").TABLES[record["benchmark"]](record).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "| prose | code | all |" in lines[0]
    assert record["results"]["greedy"]["all"]["comparisons"]["adapted: future against past"]["gaps"] == 8
