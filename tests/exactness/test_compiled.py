"""Compiled networks: MLM and diffusion say through torch.compile what they say without, to rounding.

The graphs that it traces are run as they are here, which needs no compiler; tests/exactness/test_gpu.py compiles them.
"""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from models import tiny_tokenizer
from runs import write_corpus
from toys import answer, engine_of, query, toy
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.data.corpus import Corpus
from acgpt.engine.modules import compile_blocks, is_compiled
from acgpt.errors import InputError, ModelError
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.evaluation.generator import Generator
from acgpt.methods import METHODS, method_of
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import Metadata, tokenizer_hash
from acgpt.query.sampling import Sampling

PASSES = [name for name, method in METHODS.items() if method.compiles]
QUESTIONS = [query(roles) for roles in ("ggaaaa", "gaaaaaaaaa", "gggaaaaag", "aaag")]


@pytest.fixture
def graphs(monkeypatch):
    """What is traced, and run as it is."""
    traced = []

    def keep(graph, inputs):
        traced.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    yield traced
    torch._dynamo.reset()


def model_of(name, length=24):
    tokenizer = tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")
    network = toy(name, vocabulary=len(tokenizer), length=length, dtype=torch.float32)
    mask = len(tokenizer) if method_of(name).needs_mask else None
    return LanguageModel(network, tokenizer, metadata=Metadata(method=name), bos=0, mask=mask)


def check_same(name, model, compiled):
    method, sampling = method_of(name), Sampling(temperature=0.8, top_p=0.95, seed=1)
    sampler = engine_of(model, name)
    with torch.inference_mode():
        scores, drawn = answer(name, model, QUESTIONS), method.sample(sampler, QUESTIONS, 2, sampling)
        compiled(model)
        again, redrawn = answer(name, model, QUESTIONS), method.sample(sampler, QUESTIONS, 2, sampling)
    for got, want in zip(again, scores, strict=True):
        assert got == pytest.approx(want, abs=1e-9)
    for ours, theirs in zip(redrawn, drawn, strict=True):
        for (tokens, log_probs), (wanted, expected) in zip(ours, theirs, strict=True):
            assert (tokens == wanted).all() and log_probs == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", PASSES)
def test_a_traced_network_says_what_it_said_and_is_traced_no_more_than_three_times(name, graphs):
    check_same(name, toy(name, vocabulary=9, length=12), compile_blocks)
    assert 1 <= len(graphs) <= 3  # for all blocks: one shape, any shape, and a batch of one


def test_a_compiled_network_whose_attention_was_changed_is_refused(graphs):
    model = toy("mlm", length=12)
    compile_blocks(model)
    assert is_compiled(model)
    answer("mlm", model, QUESTIONS[:1])
    model.set_attn_implementation("eager")
    with pytest.raises(ModelError, match="implementation is now 'eager'"):
        answer("mlm", model, QUESTIONS[:1])


def test_only_methods_of_many_passes_are_compiled():
    assert PASSES == ["mlm", "diffusion"]
    for name in set(METHODS) - set(PASSES):
        lm = model_of(name)
        with pytest.raises(InputError, match=f"method {name} needs too few forward passes.*mlm and diffusion"):
            lm.compile()
        assert not is_compiled(lm.model)


@pytest.mark.parametrize("name", PASSES)
def test_generations_of_a_compiled_network_say_so_and_are_not_mixed_with_others(name, graphs, tmp_path):
    tokens = np.random.default_rng(0).integers(3, 300, 3 * 24)
    asked = EvaluationDataset.build(tokens, tokenizer_hash=tokenizer_hash(tiny_tokenizer()), length=24)
    plain = Generator(model_of(name), asked, prompt=5).write("infilling", tmp_path / "plain")
    compiled = Generator(model_of(name), asked, prompt=5, compiled=True)
    record = compiled.write("infilling", tmp_path / "compiled")
    assert graphs and record["config"]["compiled"] and "compiled" not in plain["config"]
    with pytest.raises(InputError, match="was sampled with compiled None, and not True"):
        compiled.write("infilling", tmp_path / "plain")


@pytest.mark.parametrize(("name", "said"), [("ac-gpt", "kernel"), ("mlm", None)])
def test_generations_whose_steps_go_through_the_kernel_say_so(name, said, monkeypatch):
    tokens = np.random.default_rng(0).integers(3, 300, 3 * 24)
    asked = EvaluationDataset.build(tokens, tokenizer_hash=tokenizer_hash(tiny_tokenizer()), length=24)
    assert "decoding" not in Generator(model_of(name), asked).config("infilling", True)
    monkeypatch.setattr("acgpt.engine.passes.can_decode_ragged", lambda model: True)
    assert Generator(model_of(name), asked).config("infilling", True).get("decoding") == said


# ---- the commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", splits=("test",))
    tokenizer = Corpus.open(corpus).tokenizer()
    for name in ("mlm", "gpt"):
        network = toy(name, vocabulary=len(tokenizer), length=24, dtype=torch.float32)
        mask = len(tokenizer) if name == "mlm" else None
        said = Metadata(method=name, bos_token_id=0, mask_token_id=mask)
        LanguageModel(network, tokenizer, metadata=said).save_pretrained(tmp_path / name)
    return tmp_path


def command(place, verb, model, *arguments):
    how = ["--device", "cpu", "--length", "20", "--limit", "2", "--modes", "unconditional", "--compile", *arguments]
    return CliRunner().invoke(app, [verb, str(place / model), str(place / "corpus"), *map(str, how)])


def test_the_commands_compile_what_they_ask(place, graphs):
    evaluated = command(place, "evaluate", "mlm", "--json")
    assert evaluated.exit_code == 0, evaluated.output
    assert json.loads(evaluated.stdout)["compiled"] and graphs
    drawn = command(place, "generate", "mlm", "-o", place / "drawn", "--prompt", "15")
    assert drawn.exit_code == 0, drawn.output
    assert json.loads((place / "drawn" / "unconditional.json").read_text())["config"]["compiled"]


@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_the_commands_refuse_to_compile_what_needs_few_passes(place, verb):
    result = command(place, verb, "gpt", *(["-o", place / "drawn", "--prompt", "15"] if verb == "generate" else []))
    assert result.exit_code == 2 and "needs too few forward passes" in result.output
    assert not (place / "drawn").exists()


def test_a_compiler_that_fails_is_an_error_that_says_what_to_do(place, graphs, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no compiler\nmore of it")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    result = command(place, "evaluate", "mlm")
    said = " ".join(result.output.split())
    assert result.exit_code == 2 and "torch.compile fails here (no compiler): omit --compile." in said


def test_a_network_without_blocks_is_not_compiled(monkeypatch):
    model = toy("mlm", length=12)
    monkeypatch.setattr(model, "_no_split_modules", None)
    with pytest.raises(ModelError, match="does not say which blocks it consists of"):
        compile_blocks(model)
