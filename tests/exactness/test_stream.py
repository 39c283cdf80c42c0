"""Samples are handed over as they are ready, and are the same as when all are waited for."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from generators import lines_of, model_of, set_of
from tolerance import same_draws
from toys import engine_of, query, toy

from acgpt.engine.decode import Rows
from acgpt.engine.layout import download
from acgpt.errors import ModelError
from acgpt.evaluation import generator as module
from acgpt.evaluation.generator import Generator
from acgpt.methods import METHODS, method_of
from acgpt.query.sampling import Sampling

RAGGED = [query(roles) for roles in ("gag", "aaaa", "ga", "aaaag", "gaaaa", "aaag")]


@pytest.mark.parametrize("name", list(METHODS))
def test_every_sample_is_handed_over_once_and_is_the_one_that_is_waited_for(name):
    method, model = method_of(name), toy(name)
    questions = [question for question in RAGGED if method.can_sample(question, future=True)]
    with torch.inference_mode():
        parts = list(method.stream(engine_of(model, name), questions, 3, Sampling(seed=4)))
        waited = method.sample(engine_of(model, name), questions, 3, Sampling(seed=4))
    answers = [answer for part in parts for answer in part]
    assert sorted(answer[:2] for answer in answers) == [(q, s) for q in range(len(questions)) for s in range(3)]
    assert all(same_draws(drawn, waited[number][sample]) for number, sample, drawn in answers)
    assert len(questions) > 1 and [len(of_query) for of_query in waited] == [3] * len(questions)


def test_rows_that_are_done_are_handed_over_while_others_are_drawn():
    seen, handed = [], []
    sampler = engine_of(toy("ac-gpt"), "ac-gpt", notice=seen.append)
    questions = [query("a" * asked + "g" * (6 - asked)) for asked in (1, 6, 3, 2, 1, 6, 2, 3)]
    with torch.inference_mode():
        for part in sampler.stream(questions, 1, Sampling(seed=0), True):
            handed.append((sum(seen), sorted(number for number, _, _ in part)))
    # Eight rows draw at first, then six, four, and two: a part comes when the steps after it have been given out.
    assert handed == [(8 + 6 + 4, [0, 3, 4, 6]), (24, [2, 7]), (24, [1, 5])]


def test_a_sample_of_a_single_token_takes_no_step_and_comes_all_the_same():
    model = toy("gpt")
    with torch.inference_mode():
        (part,) = engine_of(model, "gpt").stream([query("ga"), query("a")], 2, Sampling(), False)
        assert list(engine_of(model, "gpt").stream([], 2, Sampling(), False)) == []
    assert sorted(answer[:2] for answer in part) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_what_is_no_number_is_never_handed_over():
    model = toy("gpt")
    sampler = engine_of(model, "gpt")
    model.get_output_embeddings().weight.data.fill_(float("nan"))
    with torch.inference_mode(), pytest.raises(ModelError, match="NaN"):
        list(sampler.stream(RAGGED, 1, Sampling(temperature=0), False))


def test_what_is_downloaded_is_what_was_there():
    tensor = torch.arange(6.0)
    wait = download(tensor[2:4])
    tensor.zero_()
    assert wait().tolist() == [2.0, 3.0]


def test_lines_are_made_of_what_is_ready_and_written_in_their_order(tmp_path, monkeypatch):
    made, drawn, make = [], [], module.lines_of

    def noted(numbers, *rest):
        made.append((drawn[-1], [number[:2] for number in numbers]))
        return make(numbers, *rest)

    monkeypatch.setattr(module, "lines_of", noted)
    generator = Generator(model_of("ac-gpt"), set_of(), samples=2)
    record = generator.write("infilling", tmp_path, progress=lambda done, total, tokens: drawn.append(done))
    assert record is not None and drawn[-1] == record["tokens"]
    assert made[0][0] < record["tokens"] == made[-1][0]  # the first lines are made before all has been drawn
    keys = [(item, sample) for item in range(6) for sample in range(2)]
    assert sorted(key for _, part in made for key in part) == keys
    assert [(line["item"], line["sample"]) for line in lines_of(tmp_path / "infilling.jsonl")] == keys


def test_what_one_call_was_told_never_to_draw_the_next_may_draw():
    model = toy("gpt")
    sampler, fresh, question = engine_of(model, "gpt"), engine_of(model, "gpt"), [query("aaaa")]
    with torch.inference_mode():
        (without,) = sampler.sample(question, 20, Sampling(seed=1), False, forbidden_token=2)
        again, want = (each.sample(question, 20, Sampling(seed=1), False)[0] for each in (sampler, fresh))
    assert not any(2 in tokens for tokens, _ in without) and any(2 in tokens for tokens, _ in want)
    assert all(same_draws(one, other) for one, other in zip(again, want, strict=True))


def test_a_sampler_can_be_asked_something_else_between_two_parts():
    model, questions = toy("sigma-gpt-temporal"), [query("a" * n + "g" * (6 - n)) for n in (6, 1, 3, 2, 6, 1)]
    method = method_of("sigma-gpt-temporal")
    sampler = engine_of(model, "sigma-gpt-temporal")
    sampler.most_rows = 4
    with torch.inference_mode():
        want = method.sample(engine_of(model, "sigma-gpt-temporal"), questions, 1, Sampling(seed=1))
        parts = []
        for part in method.stream(sampler, questions, 1, Sampling(seed=1)):
            parts += part
            list(
                sampler.stream(
                    [query("aaa")], 1, Sampling(seed=2), False, orders=[np.array([3, 1, 2])], forbidden_token=1
                )
            )
    assert len(parts) == 6 and all(same_draws(drawn, want[number][0]) for number, _, drawn in parts)


def test_as_many_lists_of_numbers_as_queries():
    sampler = engine_of(toy("gpt"), "gpt")
    with torch.inference_mode(), pytest.raises(ValueError, match="shorter"):
        list(sampler.stream([query("aa"), query("a")], [[0]], Sampling(), False))


@pytest.mark.parametrize("order", list(permutations((1, 2, 3))), ids=str)
def test_a_cache_is_filled_whatever_the_order_of_keys_in_memory(order):
    back = np.argsort((0, *order)).tolist()
    state = torch.randn(1, 2, 5, 8).bfloat16().permute(0, *order).contiguous().permute(back)  # (1, heads, N, D)
    rows = Rows([(state, state)], 2, 4)
    rows.fill([(state, 2 * state)], torch.tensor([4, 0, 3]), torch.tensor([1, 2, 5]))
    (keys, values), want = rows.buffers[0], state[0].transpose(0, 1)[[4, 0, 3]]
    assert torch.equal(keys.flatten(0, 1)[[1, 2, 5]], want) and torch.equal(values.flatten(0, 1)[[1, 2, 5]], 2 * want)
    assert keys.flatten(0, 1)[[0, 3, 4, 6, 7]].count_nonzero() == 0
