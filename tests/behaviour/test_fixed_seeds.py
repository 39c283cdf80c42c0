"""Losses, perplexities, scores, samples and fills of fixed seeds, compared with the record.

Tiny networks with random weights are in float64, so that a token of a sample differs by rounding with a probability
of about 1e-12 (see `tolerance`). Training is in float32: after a few steps its losses differ by far less than the
tolerance, which is twenty times what another order of sums changes (`rounding`). The embedded model's log-probabilities
have a wide tolerance, and only tokens and ranks that are far from the second best are recorded. What it fills in takes
seconds, and is in the README, whose examples are run by a test.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from generators import model_of
from record import check
from runs import SMALL, read_rows, write_corpus
from servers import tiny_lm

import acgpt
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.evaluation.perplexity import evaluate
from acgpt.methods import method_of
from acgpt.models.ask import Fill, Lengths, Ranking, Sample, Score
from acgpt.models.metadata import tokenizer_hash
from acgpt.training.recipe import make
from acgpt.training.train import train

TRAINED, EXACT, EMBEDDED = 3e-5, 1e-6, 0.05  # tolerances in nats; of a perplexity, relative ones
METHODS = ["ac-gpt", "gpt", "sigma-gpt-temporal", "sigma-gpt-random", "mlm", "diffusion", "fim"]


def plain(answer: Any) -> Any:
    """Return an answer of a `LanguageModel` as short lists and objects for JSON."""
    if isinstance(answer, list):
        return [plain(each) for each in answer]
    if isinstance(answer, Lengths):
        return {str(length): round(value, 7) for length, value in answer.log_probs.items()}
    if isinstance(answer, Ranking):
        about = {"compared": answer.compared, "future": answer.future, "adapter": answer.adapter}
        return about | {"alternatives": [[each.text, *each.choice, round(each.log_prob, 7)] for each in answer]}
    assert isinstance(answer, Score)
    tokens = [f"{token.position} {token.id} {token.text}" for token in answer.tokens]
    result = {"tokens": tokens, "log_probs": [round(token.log_prob, 7) for token in answer.tokens]}
    result |= {"future": answer.future, "adapter": answer.adapter, "bound": answer.bound}
    if isinstance(answer, Sample):
        result |= {"text": answer.text, "fills": list(answer.fills), "seed": answer.seed}
    if isinstance(answer, Fill):
        known = None if answer.length_log_prob is None else round(answer.length_log_prob, 7)
        result |= {"lengths": list(answer.lengths), "length_log_prob": known, "score": round(answer.score, 7)}
    return result


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.usefixtures("without_curves")
@pytest.mark.parametrize("method", METHODS)
def test_losses_of_a_tiny_recipe_are_those_of_the_record(method, corpus, tmp_path):
    keys: dict[str, Any] = {"steps": 6, "log_every": 1, "save_every": 6, "eval_every": 3, "dropout": 0.1, "seed": 7}
    run = {"corpus": str(corpus), "output": str(tmp_path / "run"), "method": method}
    results = train(make(SMALL | keys | run, "a test"), quiet=True)
    rows = [{name: float(value) for name, value in row.items() if value} for row in read_rows(tmp_path / "run")]
    modes = results["evaluation"]["modes"]
    content = {
        "log": [{name: round(value, 6) for name, value in row.items()} for row in rows],
        "mean_nll": {mode: each and round(each["mean_nll"], 6) for mode, each in modes.items()},
        "evaluated tokens": {mode: each and each["tokens"] for mode, each in modes.items()},
        "parameters": results["parameters"],
        "texts": results["texts"],
        "tokens": results["tokens"],
    }
    check(f"training-{method}", content, TRAINED)


# ---- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_perplexities_in_all_modes_are_those_of_the_record(method):
    lm = model_of(method, dtype=torch.float64)
    ids = lm.tokenizer("The cat sat on the mat. The capital of France is Paris. The dog saw a bird. " * 4)["input_ids"]
    asked = EvaluationDataset.build(ids, tokenizer_hash=tokenizer_hash(lm.tokenizer), length=24, seed=3, r_max=0.5)
    chosen = method_of(method)
    result = evaluate(chosen, lm.engine(chosen.mask(lm.mask)), asked, seed=5).as_dict()
    modes = {
        mode: each and {key: each[key] for key in ("mean_nll", "perplexity", "interval", "tokens", "texts")}
        for mode, each in result["modes"].items()
    }
    check(f"evaluation-{method}", {"set": asked.hash, "bound": result["bound"], "modes": modes}, EXACT)


# ---- questions ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return tiny_lm()


@pytest.fixture(scope="module")
def measuring():
    """A model that predicts lengths."""
    return tiny_lm(lengths=True)


def test_scores_are_those_of_the_record(tiny):
    past, future, both = "The cat {{sat on}}", "{{The cat}} sat on the mat.", "The cat {{sat}} on the {{mat}}."
    unknown = "The {{?2}} {{sat}} on the mat."
    questions = [past, future, both, unknown]
    query = acgpt.Query(tokens=[5, None, 9, 12], given=[True, False, True, False], asked=[False, False, False, True])
    content = {
        "read": plain(tiny.log_prob(questions)),
        "left to right": plain(tiny.log_prob(questions, future=False)),
        "alone": plain(tiny.log_prob(both)),
        "ids": plain(tiny.log_prob(query)),
        "rank, asked": plain(tiny.rank("The {{cat|dog|bird}} sat.")),
        "rank, whole": plain(tiny.rank("The {{cat|dog and a cat|bird}} sat.", future=False)),
        "rank, two slots": plain(tiny.rank("The {{cat|dog}} saw the {{mat|log}}.")),
    }
    check("scores", content, EXACT)


@pytest.mark.parametrize("name", ["sigma-gpt-temporal", "sigma-gpt-random", "mlm", "diffusion", "fim"])
def test_scores_and_samples_of_other_methods_are_those_of_the_record(name):
    lm = model_of(name, dtype=torch.float64)
    question, blank = "The {{cat}} sat.", "The {{_2}} sat."
    content = {"score": plain(lm.log_prob(question)), "samples": plain(lm.sample(blank, n=3, seed=4, top_p=0.95))}
    check(f"answers-{name}", content, EXACT)


def test_samples_are_those_of_the_record(tiny):
    scattered = "The {{_1}} sat {{_2}} the {{_3}}."
    content = {
        "left to right": plain(tiny.sample("The cat {{_6}}", n=3, seed=1)),
        "scattered": plain(tiny.sample(scattered, n=3, seed=2, temperature=0.8, top_p=0.9)),
        "scattered, past only": plain(tiny.sample(scattered, n=2, seed=2, future=False, top_k=5)),
        "greedy": plain(tiny.sample([scattered, "{{_3}} the mat."], temperature=0, seed=0)),
        "unknown between": plain(tiny.sample("A {{?2}} cat {{_2}} mat", seed=3)),
        "gap of any length": plain(tiny.sample("The {{_}} sat.", n=2, seed=4, candidates=8, max_tokens=4)),
    }
    check("samples", content, EXACT)


FILLS: dict[str, dict[str, Any]] = {
    "The {{_3-3}} sat.": {"n": 2, "best_of": 4},
    "The {{_}} sat on the mat.": {"n": 3, "best_of": 8, "max_tokens": 4},
    "The {{_2-3}} sat.": {"n": 1, "best_of": 4},
    "The {{_:[a-c]+}} sat.": {"n": 3, "best_of": 8, "max_tokens": 4},
    "The cat{{_}}": {"n": 1, "best_of": 4, "max_tokens": 5, "temperature": 0.7},
    "The {{_}} saw the {{_}}.": {"n": 2, "best_of": 6, "max_tokens": 3},
    "A ca{{_}}g sat.": {"n": 1, "best_of": 6, "max_tokens": 3, "stop": ["."]},
}


@pytest.mark.parametrize("name", ["tiny", "measuring"])
def test_fills_are_those_of_the_record(name, request):
    lm = request.getfixturevalue(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fills = {template: plain(lm.fill(template, seed=6, **options)) for template, options in FILLS.items()}
        pieces = [
            [piece.slot, piece.text]
            for piece in lm.stream("The {{_}} sat.", seed=6, temperature=1.0, max_tokens=4)
            if piece.fill is None
        ]
    check(f"fills-{name}", {"fills": fills, "stream": pieces}, EXACT)


def test_lengths_are_those_of_the_record(measuring):
    content = {
        "one gap": plain(measuring.lengths("The {{_}} sat.", max_tokens=6)),
        "second of two gaps": plain(measuring.lengths("The {{_}} saw the {{_}}.", [2], max_tokens=6)),
        "bounded": plain(measuring.lengths("The {{_2-4}} sat.")),
        "drawn": plain(measuring.sample("The {{_}} sat.", n=3, seed=8, max_tokens=4)),
    }
    check("lengths", content, EXACT)


# ---- the embedded model ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::UserWarning")  # an adapter that was made for other weights would warn
def test_answers_of_the_embedded_model_are_those_of_the_record():
    lm = acgpt.load(device="cpu")
    (sample,) = lm.sample("The capital of France is{{_1}}", seed=0, temperature=0)
    ranking = lm.rank("The {{cat|dog|carburettor}} purred.")
    content = {
        "score": plain(lm.log_prob("The capital of {{Italy}} is Rome.")),
        "past only": plain(lm.log_prob("The capital of France is {{Paris}}.", future=False)),
        "rank": [each.text for each in ranking],
        "rank, first": round(ranking[0].probability, 3),
        "lengths": plain(lm.lengths("The capital of {{_}} is Paris.", max_tokens=4)),
        "greedy": sample.fills[0],
    }
    check("embedded", content, EMBEDDED)
