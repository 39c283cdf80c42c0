"""benchmarks/unknown_tokens.py: nested sets, answers against the definition, and the sum over an unknown token."""

from __future__ import annotations

import importlib
import json
import math

import numpy as np
import programs
import pytest
import torch
from models import expected_log_probs, toy_tokenizer
from transformers import AutoModelForCausalLM

import acgpt
from acgpt import Query
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN

peft = pytest.importorskip("peft")

MASK, SHARES = 2, (0.0, 0.4, 0.8)


@pytest.fixture
def program(monkeypatch):
    """Import a benchmark program."""
    monkeypatch.syspath_prepend(programs.BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def unknown(program):
    return program("unknown_tokens")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from length_adapters import write_adapters

    return write_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    rng = np.random.default_rng(0)
    rows = ["".join(rng.choice(list("ghijk."), 150)) for _ in range(6)]
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    return path


def make(unknown, count=3, length=20):
    rng = np.random.default_rng(1)
    return [unknown.make_text(rng.integers(70, 90, length).tolist(), SHARES, 0, i) for i in range(count)]


def test_unknown_sets_are_nested_and_the_measured_tokens_are_always_asked(unknown):
    for text in make(unknown, count=20, length=50):
        free = (text.roles[0.0] != GIVEN).sum()
        hidden = [text.roles[share] == UNKNOWN for share in SHARES]
        assert [int(h.sum()) for h in hidden] == [math.floor(share * free + 1e-9) for share in SHARES]
        assert (hidden[0] <= hidden[1]).all() and (hidden[1] <= hidden[2]).all()
        for share in SHARES:
            assert ((text.roles[share] == GIVEN) == (text.roles[0.0] == GIVEN)).all()
            assert (text.roles[share][text.measured] == ASKED).all()
        assert len(text.measured) == free - hidden[2].sum() and (text.roles[0.0] == GIVEN).mean() <= 0.6
        assert text.pair is None or (text.roles[0.0][text.pair : text.pair + 2] == ASKED).all()


def reference(folders):
    base = AutoModelForCausalLM.from_pretrained(folders.base, dtype=torch.float64)
    return peft.PeftModel.from_pretrained(base, folders.plain).merge_and_unload()


def test_scores_are_those_of_the_definition(unknown, folders):
    lm, network, texts = acgpt.load(folders.base, folders.plain, "cpu", "float64"), reference(folders), make(unknown)
    for share in SHARES:
        for way in unknown.WAYS:
            sums = unknown.score(lm, texts, share, way)
            for number, text in enumerate(texts):
                roles, ids = text.roles[share], text.ids
                kept = [i for i in range(len(ids)) if way == "MASK" or roles[i] != UNKNOWN]
                query = Query(
                    [int(ids[i]) for i in kept], [roles[i] == GIVEN for i in kept], [roles[i] == ASKED for i in kept]
                )
                answers = dict(
                    zip(query.asked_positions, expected_log_probs(network, query, mask=MASK).tolist(), strict=True)
                )
                wanted = -sum(answers[kept.index(i) + 1] for i in text.measured.tolist())
                assert sums.nats[number] == pytest.approx(wanted, rel=1e-5), (share, way)
                assert sums.tokens[number] == len(text.measured)


def test_the_sum_over_values_is_near_the_enumerated_one(unknown, folders):
    """Over all values of the unknown token, which a tiny vocabulary allows."""
    lm, network = acgpt.load(folders.base, folders.plain, "cpu", "float64"), reference(folders)
    texts = [text for text in make(unknown, 4, 12) if text.pair is not None]
    result = unknown.marginal(lm, texts, 1000, 0)  # a standard error of at most 0.05
    for number, text in enumerate(texts):
        at, ids = text.pair, text.ids.tolist()
        given = [i < at or bool(text.roles[0.0][i] == GIVEN) for i in range(len(ids))]
        two = [i in (at, at + 1) for i in range(len(ids))]
        total, known = 0.0, None
        for value in range(len(toy_tokenizer())):
            query = Query([*ids[:at], value, *ids[at + 1 :]], given, two)
            first, second = expected_log_probs(network, query, mask=MASK).tolist()
            total += math.exp(first + second)
            known = second if value == ids[at] else known
        assert result["known"][number] == pytest.approx(-known, rel=1e-5)
        assert result["summed"][number] == pytest.approx(-math.log(total), abs=0.15)
        masked = Query(ids, given, [i == at + 1 for i in range(len(ids))])
        assert result["MASK"][number] == pytest.approx(-float(expected_log_probs(network, masked, mask=MASK)), rel=1e-5)
        parts = [(ids, given, masked.asked)]
        shorter = Query(*([*values[:at], *values[at + 1 :]] for values in parts[0]))
        assert result["left out"][number] == pytest.approx(
            -float(expected_log_probs(network, shorter, mask=MASK)), rel=1e-5
        )


def test_two_adapters_are_measured_on_the_same_texts(program, folders, texts):
    arguments = ["--model", folders.base, "--adapter", f"old={folders.plain}", f"new={folders.lengths}"]
    arguments += ["--device", "cpu", "--tokens", 40, "--limit", 9, "--samples", 4, "--shares", 0.5, 0]
    done = programs.program("unknown_tokens.py", texts, *arguments)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["texts"] == 9 and list(record["shares"]) == ["0", "0.5"] and record["seed"] == 0
    none, half = record["shares"].values()
    assert none["old"]["MASK"] == none["old"]["left out"] and "below_left_out" not in none["old"]
    for entry in (none, half):
        change = entry["new"]["below_first"]
        assert change["mean"] == pytest.approx(100 * (1 - entry["new"]["MASK"] / entry["old"]["MASK"]))
        assert change["interval"][0] <= change["mean"] <= change["interval"][1]
    marginals = record["marginals"]["new"]
    assert marginals["MASK - summed"]["mean"] == pytest.approx(marginals["MASK"]["mean"] - marginals["summed"]["mean"])
    page = program("render").TABLES["unknown_tokens"](record)
    assert "| 50% | old |" in page and "sum over its values" in page


def test_bad_input_is_one_line_and_exit_code_2(folders, texts, tmp_path):
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    own = ["--model", folders.base, "--device", "cpu"]
    adapted = [*own, "--adapter", folders.plain]
    for arguments, reason in [
        ([tmp_path / "absent.jsonl", *adapted], "absent.jsonl"),
        ([tmp_path / "bad.jsonl", *adapted], "line 1"),
        ([tmp_path, *adapted], "corpus.json"),
        ([texts, "--limit", 0], "--limit 0"),
        ([texts, "--tokens", 3], "--tokens 3"),
        ([texts, "--shares", 0.2, 1], "--shares"),
        ([texts, "--samples", -1], "--samples -1"),
        ([texts, *own], "no MASK token"),
        ([texts, *adapted, "--tokens", 600], "reads 511 tokens"),
        ([texts, *adapted, "--tokens", 400], "no text of 400 tokens"),
    ]:
        done = programs.program("unknown_tokens.py", *arguments)
        assert done.returncode == 2 and reason in done.stderr, (arguments, done.stderr)
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1, (arguments, done.stderr)
