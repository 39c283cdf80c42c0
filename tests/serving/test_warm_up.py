"""The questions that a server asks itself before it accepts others: all kinds, and none that a model cannot answer."""

from __future__ import annotations

import warnings

import pytest
from models import tiny_model, tiny_tokenizer
from servers import tiny_lm

from acgpt import LanguageModel, Metadata
from acgpt.errors import ModelError
from acgpt.models.ask import ScoreAsk
from acgpt.models.executor import Executor
from acgpt.serving.warm_up import ROUNDS, SAMPLINGS, questions, warm_up


def test_every_kind_of_question_is_answered(started):
    lm = tiny_lm()
    scheduler = started(lm)
    assert warm_up(lm, scheduler) == ROUNDS * len(questions(lm))
    assert lm._executor.engine.meter.calls > ROUNDS * len(SAMPLINGS) and scheduler.active_rows == 0
    assert scheduler.counts.jobs == scheduler.counts.drawn == 0  # clients have asked nothing yet


@pytest.mark.parametrize("method", ["gpt", "fim", "mlm"])
def test_other_methods_are_asked_what_they_can_answer_without_warnings(method, started):
    network = tiny_model("llama", vocabulary=340, scale=0.15, positions=96).eval()
    tokenizer = tiny_tokenizer(bos_token="<bos>", eos_token="<eos>", mask_token="<mask>")
    lm = LanguageModel(network, tokenizer, metadata=Metadata(method=method, mask_token_id=tokenizer.mask_token_id))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warm_up(lm, started(lm)) >= ROUNDS


@pytest.mark.parametrize("error", [RuntimeError("no memory"), ModelError("the logits are not numbers")], ids=repr)
def test_a_pass_that_fails_is_logged_and_does_not_keep_the_server_from_starting(error, started, monkeypatch, caplog):
    lm = tiny_lm()
    scheduler = started(lm)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "answers", fail)
        assert 0 < warm_up(lm, scheduler) < ROUNDS * len(questions(lm))
    assert type(error).__name__ in caplog.text
    assert scheduler.submit(lm.searches.of(ScoreAsk("The {{cat}} sat."))).future.result(60)
