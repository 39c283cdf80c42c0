"""Scoring in many passes: one is queued while the next is laid out, and log-probabilities come from hidden states."""

from __future__ import annotations

import pytest
import torch
from models import ARCHITECTURES, random_query, tiny_model, twins
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from acgpt.engine import passes as engines
from acgpt.engine.architecture import check_model
from acgpt.engine.engine import Engine
from acgpt.engine.passes import one_ahead
from acgpt.engine.score import fast_head, has_plain_head
from acgpt.errors import ModelError, QueryError
from acgpt.query.query import Query

LENGTHS = (20, 3, 17, 1, 20, 9)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def queries():
    return [random_query(seed, length) for seed, length in enumerate(LENGTHS)]


def recorded(monkeypatch):
    """Record when a layout is built and when the result of a pass is asked for."""
    events, build, download = [], engines.build, engines.download

    def building(*args, **kwargs):
        events.append("build")
        return build(*args, **kwargs)

    def downloading(tensor):
        wait = download(tensor)
        return lambda: (events.append("wait"), wait())[1]

    monkeypatch.setattr(engines, "build", building)
    monkeypatch.setattr(engines, "download", downloading)
    return events


def test_functions_are_called_one_behind_and_in_order():
    events = []

    def made():
        for number in range(4):
            events.append(f"make {number}")
            yield lambda number=number: (events.append(f"call {number}"), number)[1]

    assert list(one_ahead(made())) == [0, 1, 2, 3]
    assert events == [
        "make 0", "make 1", "call 0", "make 2", "call 1", "make 3", "call 2", "call 3",
    ]  # fmt: skip
    assert list(one_ahead(iter(()))) == []


@pytest.mark.parametrize("future", [True, False])
def test_queries_in_many_passes_have_the_scores_that_each_has_alone(future, monkeypatch):
    model, _ = twins()
    check_model(model)
    alone = [Engine(model, bos=0, mask=1).log_probs([query], future=future)[0] for query in queries()]
    top = [Engine(model, bos=0, mask=1).top_log_probs([query], 3, future=future)[0] for query in queries()]
    events = recorded(monkeypatch)
    engine = Engine(model, bos=0, mask=1, budget=1)
    with torch.inference_mode():
        found = engine.log_probs(queries(), future=future)
        assert events == ["build", *["build", "wait"] * 5, "wait"]
        best = engine.top_log_probs(queries(), 3, future=future)
    for scores, want, tops, wanted in zip(found, alone, best, top, strict=True):
        assert scores == pytest.approx(want, abs=1e-12)
        assert [entry.log_prob for entry in tops] == pytest.approx(want, abs=1e-12)
        assert [entry.ids for entry in tops] == [entry.ids for entry in wanted]


def test_an_error_of_any_pass_is_raised_and_leaves_the_engine_usable():
    model, _ = twins()
    check_model(model)
    engine = Engine(model, bos=0, budget=1)
    want = engine.log_probs(queries(), future=True)
    unknown = Query([3, 4], [False, False], [False, True])  # there is no MASK
    for number in (0, 3, 6):
        questions = queries()
        questions.insert(number, unknown)
        with pytest.raises(QueryError, match="MASK"):
            engine.log_probs(questions, future=True)
        assert engine.log_probs(queries(), future=True) == want
    weight, row = model.get_input_embeddings().weight, 7
    kept = weight[row].clone()
    weight[row] = torch.nan
    for number in (0, 6):  # the longest comes first: the first pass, and the last
        questions = [Query([3] * 3, [True, True, False]) for _ in range(6)]
        questions.insert(number, Query([row] * (9 if number == 0 else 2), [True] * (8 if number == 0 else 1) + [False]))
        with pytest.raises(ModelError, match="NaN"):
            engine.log_probs(questions, future=False)
        with pytest.raises(ModelError, match="NaN"):
            engine.top_log_probs(questions, 2, future=False)
    weight[row] = kept
    assert engine.log_probs(queries(), future=True) == want


@pytest.mark.parametrize("forbidden", [None, 5])
def test_log_probs_from_hidden_states_are_those_from_logits(forbidden, monkeypatch):
    model, _ = twins()
    check_model(model)
    engine, calls = Engine(model, bos=0, mask=1, budget=40), []
    want = engine.log_probs(queries(), future=True, forbidden_token=forbidden)

    def by_definition(hidden, weight, targets, forbidden):
        calls.append(len(hidden))
        logits = hidden @ weight.T
        if forbidden is not None:
            logits[:, forbidden] = -torch.inf
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    monkeypatch.setattr(engines, "fast_head", lambda model, predictions: model.get_output_embeddings().weight)
    monkeypatch.setattr(engines, "linear_log_probs", by_definition)
    with torch.inference_mode():
        found = engine.log_probs(queries(), future=True, forbidden_token=forbidden)
    assert len(calls) > 1 and sum(calls) == sum(map(len, want))
    for scores, wanted in zip(found, want, strict=True):
        assert scores == pytest.approx(wanted, abs=1e-12)


def test_a_cpu_and_a_few_predictions_go_through_logits():
    assert fast_head(tiny_model(), 10**6) is None
    assert fast_head(tiny_model().bfloat16(), 10**6) is None


def test_only_an_engine_without_a_backend_chooses_it_by_the_call(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(engines, "can_fuse", lambda model: True)
    most = engines.MANY_SLOTS
    assert Engine(model, bos=0).scoring_backend(most) == "dense"
    assert Engine(model, bos=0).scoring_backend(most + 1) == "fused"
    assert Engine(model, bos=0, backend="dense").scoring_backend(most + 1) == "dense"
    monkeypatch.setattr(engines, "can_fuse", lambda model: False)
    assert Engine(model, bos=0).scoring_backend(most + 1) == "dense"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_heads_of_common_architectures_are_plain(architecture, dtype):
    model = tiny_model(architecture).to(dtype)
    assert has_plain_head(model) and has_plain_head(model)
    head = model.get_output_embeddings()
    assert not head._forward_hooks and not model.base_model._forward_hooks


SMALL = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**SMALL, logit_scale=0.5),
        GraniteConfig(**SMALL, logits_scaling=4.0),
        Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=30.0),  # far above the logits of random weights
    ],
    ids=lambda config: config.model_type,
)
def test_heads_that_scale_or_cap_logits_are_not_plain(config):
    assert not has_plain_head(AutoModelForCausalLM.from_config(config).eval())


def test_a_head_that_is_replaced_or_hooked_is_not_plain():
    model = tiny_model()
    assert has_plain_head(model)
    handle = model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: 2 * output)
    assert not has_plain_head(model)
    handle.remove()
    assert has_plain_head(model)
    model.set_output_embeddings(nn.Linear(32, 50, bias=True))
    assert not has_plain_head(model)
