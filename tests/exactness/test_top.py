"""The most probable tokens, and texts that begin without BOS, against the layout written out by hand."""

from __future__ import annotations

import pytest
import torch
from models import by_definition, finished, masked_logits, random_query, tiny_model, toy_tokenizer, twins
from tolerance import EXACT, exactly

from acgpt import LanguageModel, Metadata, Query, QueryError
from acgpt.engine.decoding import Decoding
from acgpt.engine.engine import Engine
from acgpt.models.executor import Top
from acgpt.models.scheduler import Scheduler
from acgpt.query.sampling import Sampling

START = 7


def expected(model, query, future):
    """(asked, V) log-probabilities by definition."""
    ids, positions, sees, predictions = by_definition(
        query, future=future, bos=0 if query.start is None else query.start
    )
    scores = masked_logits(model, ids, positions, sees).log_softmax(-1)
    return torch.stack([scores[slot] for slot, _ in predictions]), [token for _, token in predictions]


def begun(query):
    return Query(query.tokens, query.given, query.asked, START)


@pytest.mark.parametrize("future", [True, False])
def test_the_most_probable_tokens_are_those_of_the_whole_distribution(future):
    reference, ours = twins()
    queries = [random_query(seed, 3 + 4 * seed) for seed in range(5)]
    queries += [begun(query) for query in queries]  # in one batch
    with torch.inference_mode():
        engine = Engine(ours, bos=0, mask=1, backend="dense")
        found = engine.top_log_probs(queries, 3, future=future)
        scores = engine.log_probs(queries, future=future)
    for query, tops, own in zip(queries, found, scores, strict=True):
        table, targets = expected(reference, query, future)
        best = table.topk(3)
        assert [list(top.ids) for top in tops] == best.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([top.log_probs for top in tops], dtype=torch.float64), best.values, **EXACT
        )
        assert [top.log_prob for top in tops] == exactly([row[t].item() for row, t in zip(table, targets, strict=True)])
        assert own == exactly([top.log_prob for top in tops])
        for top, target in zip(tops, targets, strict=True):
            if target in top.ids:  # the same number, so that a client can tell a greedy token by it
                assert top.log_prob == top.log_probs[top.ids.index(target)]


@pytest.mark.parametrize("ask", ["log_probs", "top_log_probs"])
def test_no_pass_over_several_texts_has_more_tokens_than_the_budget(ask):
    _, ours = twins()
    queries, budget, sizes = [random_query(seed, 3 + seed) for seed in range(12)], 60, []
    more = {"k": 2} if ask == "top_log_probs" else {}
    embedding = ours.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, ids, states: sizes.append(states[..., 0].numel()))
    try:
        with torch.inference_mode():
            for most in (budget, 10**6):
                getattr(Engine(ours, bos=0, mask=1, backend="dense", budget=most), ask)(queries, future=True, **more)
    finally:
        hook.remove()
    *limited, whole = sizes
    assert 2 < len(limited) < len(queries) and max(limited) <= budget < whole


@pytest.mark.parametrize("future", [True, False])
def test_a_text_without_bos_is_drawn_from_its_own_start(future):
    reference, ours = twins()
    queries = [begun(random_query(seed, 9)) for seed in range(3)] + [random_query(9, 9)]
    decoding = Decoding(Engine(ours, bos=0, mask=1, backend="dense"), Sampling(temperature=0), future=future)
    rows = decoding.prefill(queries)
    while not all(row.done for row in rows):
        decoding.step()
    for query, row in zip(queries, rows, strict=True):
        done = finished(query, [token for _, token, _ in row.drawn])
        done = Query(done.tokens, done.given, done.asked, query.start)
        table, targets = expected(reference, done, future)
        assert table.argmax(-1).tolist() == targets
        assert [log_prob for *_, log_prob in row.drawn] == exactly(table.max(-1).values.tolist())


def test_the_scheduler_answers_as_the_executor_does():
    lm = LanguageModel(tiny_model(vocabulary=300).double(), toy_tokenizer(), metadata=Metadata())

    def search(k):
        queries = [random_query(seed, 8, vocabulary=250) for seed in range(3)]
        routes = lm._executor.router.routes(queries, None, None)
        return (yield Top(queries, routes, k))

    scheduler = Scheduler(lm._executor)
    jobs = [scheduler.submit(search(k)) for k in (1, 4, 1, 4)]
    found = [job.future.result(60) for job in jobs]
    assert scheduler.close(drain=False, timeout=60)
    for k, answer, alone in zip((1, 4, 1, 4), found, lm._executor.run([search(k) for k in (1, 4, 1, 4)]), strict=True):
        assert [[top.ids for top in tops] for tops in answer] == [[top.ids for top in tops] for tops in alone]
        assert all(len(top.ids) == k for tops in answer for top in tops)
        for mine, other in zip(answer, alone, strict=True):
            assert [top.log_prob for top in mine] == exactly([top.log_prob for top in other])


def test_only_methods_that_can_read_it_get_a_text_without_bos():
    tokenizer = toy_tokenizer()
    query = Query([30, 40, 50], [True, False, False], start=START)
    fim = LanguageModel(
        tiny_model(vocabulary=300).double(), tokenizer, metadata=Metadata(method="fim", mask_token_id=2)
    )
    with pytest.raises(QueryError, match="fim reads BOS first"):
        fim.log_prob(query, future=False)
    lm = LanguageModel(tiny_model(vocabulary=300).double(), tokenizer, metadata=Metadata())
    (sample,) = lm.sample(query, seed=1)
    assert sample.query.start == START
    assert lm.log_prob(sample.query).log_prob == exactly(sample.log_prob)
    assert lm.log_prob(sample.query).log_prob != lm.log_prob(Query(sample.query.tokens, query.given)).log_prob
    with pytest.raises(QueryError, match="position 0 has the id 300"):
        lm.sample(Query([30, None], [True, False], start=300))
