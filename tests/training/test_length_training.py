"""Runs that teach lengths of gaps, from scratch and through an adapter: what they write, resume and learn."""

from __future__ import annotations

import json
import math

import pytest
import torch
from models import tiny_model
from runs import recipe_of, write_base
from safetensors.torch import load_file
from test_gap_batches import head_of

import acgpt
from acgpt.engine.architecture import check_model
from acgpt.engine.length_head import FILE
from acgpt.training.learner import Learner
from acgpt.training.train import train

pytestmark = pytest.mark.usefixtures("without_curves")

GAPS = {
    "parts": [
        {"kind": "blocks", "weight": 1, "r_max": 0.6},
        {"kind": "gaps", "weight": 2, "r_min": 0.4, "r_max": 0.9, "passages": 3, "lengths": 0.5},
        {"kind": "gaps", "weight": 1, "r_min": 0.4, "r_max": 0.9, "lengths": 1.0},
    ]
}
TEMPLATE = "The cat {{_}} the mat."


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(recipe_of(corpus, folder, conditioning=GAPS), quiet=True)
    return folder


def test_a_run_writes_a_head_that_its_model_names(run):
    metadata = json.loads((run / "model" / "acgpt.json").read_text())
    assert metadata["lengths"] == {"file": FILE, "distance": 16}
    weights = load_file(run / "model" / FILE)
    assert weights["weight"].abs().max() > 0 and weights["weight"].dtype == torch.float32
    lm = acgpt.load(run / "model")
    assert math.fsum(map(math.exp, lm.lengths(TEMPLATE).log_probs.values())) == pytest.approx(1)
    assert lm.fill(TEMPLATE, 1, max_tokens=4)[0].length_log_prob is not None


def test_a_resumed_run_ends_with_the_same_head(run, corpus, tmp_path, monkeypatch):
    again = tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr("acgpt.training.loop.Loop.should_stop", lambda self: self.step == 7)
        assert train(recipe_of(corpus, again, conditioning=GAPS), quiet=True) is None
    train(recipe_of(corpus, again, conditioning=GAPS), resume=True, quiet=True)
    for name in (FILE, "model.safetensors"):
        one, other = load_file(run / "model" / name), load_file(again / "model" / name)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_an_adapter_carries_its_head_and_a_merged_model_keeps_it(corpus, tmp_path):
    base, output = write_base(tmp_path / "base", corpus), tmp_path / "run"
    train(recipe_of(corpus, output, base=base, conditioning=GAPS), quiet=True)
    assert (output / "adapter" / FILE).is_file()
    lm = acgpt.load(base, adapter=output / "adapter")
    lengths = lm.lengths(TEMPLATE).log_probs
    assert lm.fill(TEMPLATE, 1, max_tokens=4)[0].adapter is not None
    acgpt.merge(base, output / "adapter", tmp_path / "merged")
    assert acgpt.load(tmp_path / "merged").lengths(TEMPLATE).log_probs == pytest.approx(lengths, abs=1e-3)


def test_a_run_may_ask_for_lengths_alone(corpus, tmp_path):
    parts = {"parts": [{"kind": "gaps", "r_min": 0.4, "r_max": 0.9, "lengths": 1.0}]}
    results = train(recipe_of(corpus, tmp_path / "run", conditioning=parts, steps=4, warmup=1), quiet=True)
    assert math.isfinite(results["loss"])


def test_evaluating_keeps_no_hidden_states():
    model = tiny_model("gpt_neox", vocabulary=50, positions=64).double()
    check_model(model)
    learner = Learner(model, backend="dense", compiled=False, length_head=head_of())
    with torch.no_grad():
        for _ in range(3):
            model(input_ids=torch.tensor([[1, 2, 3]]))
    assert not learner.hidden
