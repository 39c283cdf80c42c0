"""Decoding step by step: whoever joins when and leaves when, each row draws what it would draw alone."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from copy import copy

import numpy as np
import pytest
import torch
from models import random_query, tiny_model
from tolerance import same_draws

from acgpt.engine.architecture import check_model
from acgpt.engine.decode import Decoder, draw_among, draw_each
from acgpt.engine.decoding import Decoding
from acgpt.engine.engine import Engine
from acgpt.errors import ModelError, QueryError
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

SAMPLING = Sampling(temperature=0.9, top_p=0.95, seed=5)


@pytest.fixture(scope="module", params=["llama", "gpt_neox"])
def engine(request):
    model = tiny_model(request.param).double()
    check_model(model)
    return Engine(model, bos=0, mask=1, backend="dense", budget=1000)


def alone(engine, query, sample=0, *, future=True, seed=5):
    with torch.inference_mode():
        (drawn,) = engine.sample([query], sample + 1, Sampling(temperature=0.9, top_p=0.95, seed=seed), future)
    return drawn[sample]


def check_same(engine, row, **how):
    positions, tokens, log_probs = map(np.array, zip(*row.drawn, strict=True))
    assert row.done and positions.tolist() == list(row.query.asked_positions)
    assert same_draws((tokens, log_probs), alone(engine, row.query, row.sample, **how))


def run_to_the_end(decoding):
    while any(not row.done for row in decoding.rows):
        decoding.step()


def test_rows_with_options_of_their_own_draw_what_each_draws_alone():
    logits, uniform = torch.randn(7, 9, dtype=torch.double), torch.rand(7, dtype=torch.double)
    kinds = [Sampling(temperature=0.7, top_k=4), Sampling(temperature=1.3), Sampling(temperature=0.0)]
    samplings = [kinds[i] for i in (0, 1, 2, 0, 2, 1, 0)]
    for allowed in (None, torch.rand(7, 9) < 0.8):
        together = draw_each(logits, uniform, samplings, allowed)
        for row, sampling in enumerate(samplings):
            here = slice(row, row + 1)
            alone = draw_among(logits[here], uniform[here], sampling, None if allowed is None else allowed[here])
            for ours, theirs in zip(together, alone, strict=True):
                assert (ours is None and theirs is None) or torch.equal(ours[here], theirs)


@pytest.mark.parametrize("future", [True, False])
def test_rows_that_join_together_draw_what_each_draws_alone(engine, future):
    decoding = Decoding(engine, SAMPLING, future=future)
    queries = [random_query(number, 5 + 3 * number) for number in range(6)]
    rows = decoding.prefill(queries, samples=[0, 1, 0, 2, 0, 0])
    assert [row.query for row in rows] == queries
    run_to_the_end(decoding)
    for row in rows:
        check_same(engine, row, future=future)


@pytest.mark.parametrize("seed", range(4))
def test_rows_may_join_and_leave_at_any_time(engine, seed):
    """At random: some join, some are released before they are done, and texts outgrow the room of those before."""
    rng, decoding, finished = random.Random(seed), Decoding(engine, SAMPLING), []
    for turn in range(60):
        if turn < 30 and rng.random() < 0.4:
            size = 4 + turn * 2
            queries = [random_query(rng.randrange(10**6), rng.randrange(3, size)) for _ in range(rng.randrange(1, 4))]
            decoding.prefill(queries, samples=[rng.randrange(3) for _ in queries])
        decoding.step()
        done = [row for row in decoding.rows if row.done]
        finished += done
        given_up = [row for row in decoding.rows if not row.done and rng.random() < 0.02]
        decoding.release(done + given_up)
    run_to_the_end(decoding)
    finished += decoding.rows
    assert len(finished) > 5 and len({len(row.query) for row in finished}) > 3
    for row in finished:
        check_same(engine, row)


def test_a_gpu_takes_steps_of_few_shapes_in_one_decoder(engine, monkeypatch):
    """Its choices, on a CPU: numbers of rows are rounded up, and the decoder has room for the rows that follow."""
    gpu, shapes = copy(engine), []
    gpu.cuda, gpu.ragged, gpu.on_device, gpu.forward = True, False, nullcontext, lambda *_: None
    play = Decoder.play
    monkeypatch.setattr(Decoder, "play", lambda self, *args: shapes.append((id(self), args[1])) or play(self, *args))
    decoding, finished = Decoding(gpu, SAMPLING), []
    for number in range(7):
        decoding.prefill([random_query(seed, 10 + 2 * number) for seed in range(10 * number, 10 * number + number + 1)])
        decoding.step()
        done = [row for row in decoding.rows if row.done]
        finished += done
        decoding.release(done)
    run_to_the_end(decoding)
    assert len({decoder for decoder, _ in shapes}) == 1 and {rows for _, rows in shapes} <= {1, 4, 16, 64}
    for row in finished + decoding.rows:
        check_same(engine, row)


def test_a_step_says_who_has_drawn_and_reads_long_runs_of_given_tokens_without_a_draw(engine, monkeypatch):
    monkeypatch.setattr("acgpt.engine.decoding.choose_width", lambda *_: 2)
    decoding = Decoding(engine, SAMPLING)
    waits = Query([None, *range(2, 12), None], [False, *[True] * 10, False])  # ten given ones between two blanks
    draws = Query([None] * 6, [False] * 6)
    first, second = decoding.prefill([waits, draws])
    drawn = [decoding.step() for _ in range(6)]
    assert [second in who for who in drawn] == [True] * 5 + [False]
    assert [first in who for who in drawn] == [False] * 5 + [True]
    check_same(engine, first)
    check_same(engine, second)


def test_each_row_may_have_its_own_seed(engine):
    decoding, query = Decoding(engine, SAMPLING), random_query(3, 20)
    rows = [decoding.prefill([query], seed=seed)[0] for seed in (5, 6)]
    run_to_the_end(decoding)
    for row, seed in zip(rows, (5, 6), strict=True):
        check_same(engine, row, seed=seed)
    assert rows[0].drawn != rows[1].drawn


def test_a_query_that_is_refused_leaves_the_others_as_they_were(engine):
    decoding = Decoding(engine.with_mask(None), SAMPLING)
    (row,) = decoding.prefill([random_query(2, 12, unknown=0)])
    with pytest.raises(QueryError, match="MASK"):
        decoding.prefill([Query([None, None, 3], [False, False, True], [True, False, False])])
    assert decoding.rows == [row]
    run_to_the_end(decoding)
    check_same(engine, row)
    assert decoding.step() == [] and decoding.prefill([]) == []


def test_a_row_without_numbers_does_not_join_and_leaves_the_others_as_they_were(engine, monkeypatch):
    decoding = Decoding(engine, SAMPLING)
    rows = decoding.prefill([random_query(seed, 12) for seed in range(3)])
    with monkeypatch.context() as patched:
        patched.setattr(decoding, "read", lambda places, positions: [(p, 0, math.nan) for p in positions])
        with pytest.raises(ModelError, match="NaN"):
            decoding.prefill([random_query(7, 12)])
    assert sorted(map(id, decoding.rows)) == sorted(map(id, rows))
    run_to_the_end(decoding)
    for row in rows:
        check_same(engine, row)


def test_a_row_that_fails_leaves_the_others_as_they_were(engine, monkeypatch):
    decoding = Decoding(engine, SAMPLING)
    rows = decoding.prefill([random_query(seed, 12) for seed in range(3)])
    read = decoding.read

    def broken(places, positions):
        tokens = read(places, positions)
        return [(*token[:2], math.nan) if decoding.rows[place] is rows[1] else token
                for place, token in zip(places, tokens, strict=True)]  # fmt: skip

    monkeypatch.setattr(decoding, "read", broken)
    with pytest.raises(ModelError, match="NaN"):
        while True:
            decoding.step()
    assert rows[1].failed and rows[1].done
    decoding.release([rows[1]])
    run_to_the_end(decoding)
    for row in (rows[0], rows[2]):
        check_same(engine, row)


def test_no_memory_for_more_rows_leaves_the_others_as_they_were(engine, monkeypatch):
    decoding = Decoding(engine, SAMPLING)
    rows = decoding.prefill([random_query(seed, 12) for seed in range(2)])

    def full(*_, **__):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr("acgpt.engine.decoding.Decoder", full)
        with pytest.raises(torch.OutOfMemoryError):
            decoding.prefill([random_query(seed, 40) for seed in range(5)])
    run_to_the_end(decoding)
    for row in rows:
        check_same(engine, row)
