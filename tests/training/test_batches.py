"""Training batches: packed as the layout is, balanced, and a function of the seed alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fuzz import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import by_definition, masked_logits, tiny_model
from packing import pack, shapes_of, tensors_of
from torch.utils.data import DataLoader

from acgpt.engine.architecture import check_model
from acgpt.engine.attention import Segments
from acgpt.engine.layout import ALIGN, Budget, build
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN, Blocks, Conditioning, Empty, first_draws
from acgpt.query.query import Query
from acgpt.training.batches import Batch, Batches
from acgpt.training.learner import Learner

BOS, MASK, VOCABULARY = 0, 1, 50


class Texts:
    """Texts in which each token id encodes the index of its text and its position."""

    def __init__(self, count, length):
        self.tokens = np.arange(count * length).reshape(count, length)

    def chunks(self, length):
        return len(self.tokens)

    def chunk(self, number, length):
        return self.tokens[number]


def random_batch(seed, texts=3, length=7, unknown=0.2):
    rng = np.random.default_rng(seed)
    roles = rng.choice([ASKED, GIVEN, UNKNOWN], size=(texts, length), p=[0.6 - unknown, 0.4, unknown]).astype(np.int8)
    roles[np.arange(texts), rng.integers(length, size=texts)] = ASKED
    return rng.integers(2, VOCABULARY, size=(texts, length)), roles


def queries_of(tokens, roles):
    rows = zip(tokens.tolist(), roles.tolist(), strict=True)
    return [Query(row, [r == GIVEN for r in kinds], [r == ASKED for r in kinds]) for row, kinds in rows]


def learner_of(**options):
    model = tiny_model("gpt_neox", vocabulary=VOCABULARY, positions=64).double().train()
    check_model(model)
    return Learner(model, backend="dense", compiled=False, **options)


def loss_and_gradients(learner, batch):
    learner.zero_grad()
    loss = learner(batch)
    loss.backward()
    return loss.item(), {name: weight.grad.clone() for name, weight in learner.named_parameters()}


def batches_of(texts, size, *, conditioning=None, **options):
    options = {
        "count": 100,
        "length": texts.tokens.shape[1],
        "seed": 0,
        "bos": BOS,
        "mask": MASK,
        "fixed": False,
    } | options
    return Batches(texts, size=size, conditioning=conditioning or Conditioning((Blocks(),)), **options)


# ---- a batch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_is_that_of_the_papers_definition(seed):
    tokens, roles = random_batch(seed)
    if seed == 3:
        roles[:] = ASKED  # as for a causal twin
    learner = learner_of()
    reference = tiny_model("gpt_neox", vocabulary=VOCABULARY, positions=64).double()
    reference.set_attn_implementation("sdpa")
    expected = 0.0
    for query in queries_of(tokens, roles):
        ids, positions, sees, predictions = by_definition(query, bos=BOS, mask=MASK)
        scores = masked_logits(reference, ids, positions, sees).log_softmax(-1)
        expected -= sum(scores[slot, token].item() for slot, token in predictions)
    assert learner(pack(tokens, roles, bos=BOS, mask=MASK)).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [None, Budget(30, 40), Budget(256, 128), Budget(0, 0)], ids=str)
def test_a_packed_batch_teaches_what_its_layout_teaches_and_dummies_teach_nothing(seed, budget):
    tokens, roles = random_batch(seed)
    learner = learner_of()
    layout = build(queries_of(tokens, roles), bos=BOS, mask=MASK, future=True)
    copies, texts = (torch.nn.functional.pad(torch.tensor(x).cumsum(0), (1, 0)) for x in (layout.copies, layout.texts))
    segments = Segments(None, None, copies, texts, None, None, None)
    by_layout = Batch(layout.ids, layout.positions, layout.rows, layout.targets, segments)
    loss, gradients = loss_and_gradients(learner, by_layout)
    packed = pack(tokens, roles, bos=BOS, mask=MASK, budget=budget)
    other_loss, other_gradients = loss_and_gradients(learner, packed)
    assert other_loss == pytest.approx(loss, rel=1e-12)
    for name in gradients:
        torch.testing.assert_close(other_gradients[name], gradients[name], rtol=1e-9, atol=1e-12)


@given(
    seed=st.integers(0, 10**6),
    texts=st.integers(1, 5),
    length=st.integers(1, 9),
    room=st.none() | st.tuples(st.integers(0, 60), st.integers(0, 60)),
)
@settings(max_examples=examples(24), deadline=None)
def test_segments_say_where_each_query_lies(seed, texts, length, room):
    tokens, roles = random_batch(seed, texts, length)
    batch = pack(tokens, roles, bos=BOS, mask=MASK, budget=None if room is None else Budget(*room))
    starts = {name: getattr(batch.segments, f"{name}_starts").tolist() for name in ("copy", "text", "key")}
    total, copies = len(batch.ids), batch.segments.copies
    assert (starts["copy"][-1], starts["text"][-1], starts["key"][-1]) == (copies, total - copies, total)
    expected = []
    for query in range(len(starts["copy"]) - 1):
        expected += range(*starts["copy"][query : query + 2])
        expected += range(copies + starts["text"][query], copies + starts["text"][query + 1])
    assert batch.segments.keys.tolist() == expected
    assert batch.segments.homes[batch.segments.keys].tolist() == list(range(total))
    for name in ("copy", "text"):  # no query is longer than what flash attention is told
        assert max(np.diff(starts[name])) <= length
    assert min(np.diff(starts["text"])) >= 1  # copies that no text reads would get no gradient from it


@pytest.mark.parametrize(("texts", "length", "size"), [(40, 12, 4), (64, 200, 64), (10, 127, 1)])
def test_every_batch_of_a_run_has_one_shape_over_all_its_epochs(texts, length, size):
    """Holds also if an epoch is a single step, so that epochs cannot be balanced."""
    conditioning = Conditioning.from_dict({"r_max": 0.9, "unknown": 0.2})
    batches = batches_of(Texts(texts, length), size, conditioning=conditioning, count=60, seed=3, fixed=True)
    assert batches.budget is not None
    shapes = set()
    for number in range(60):
        batch = batches[number]
        assert (batch.segments.copies, len(batch.rows)) == (batches.budget.copies, batches.budget.asked)
        shapes.add(shapes_of(batch))
    assert len(shapes) == 1


def test_a_batch_counts_its_asked_tokens_slots_and_pairs_without_dummies():
    tokens, roles = random_batch(3)
    for budget in (None, Budget(200, 200)):
        batch = pack(tokens, roles, bos=BOS, mask=MASK, budget=budget)
        slots = pairs = 0
        for query in queries_of(tokens, roles):
            _, _, sees, _ = by_definition(query, bos=BOS, mask=MASK)
            sees = [row[:-1] for row in sees[:-1]]  # the last token of the text predicts nothing and is not run
            slots += len(sees)
            pairs += sum(map(sum, sees))
        assert (batch.asked, batch.slots, batch.pairs) == ((roles == ASKED).sum(), slots, pairs)


def test_a_target_is_never_shown_before_it_is_asked():
    """Unknown tokens never occur among the ids; asked ones occur once, in their text, and never as a copy."""
    rng = np.random.default_rng(0)
    tokens = rng.permutation(np.arange(2, 44)).reshape(6, 7)  # all different
    _, roles = random_batch(1, texts=6)
    batch = pack(tokens, roles, bos=BOS, mask=MASK)
    copies, text = batch.ids[: batch.segments.copies].tolist(), batch.ids[batch.segments.copies :].tolist()
    assert sorted(copies) == sorted(tokens[roles == GIVEN])
    assert not set(tokens[roles == UNKNOWN]) & set(copies + text)
    assert all(text.count(token) == 1 for token in tokens[:, :-1][roles[:, :-1] == ASKED])


# ---- the batches of a run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conditioning", [Conditioning(), Conditioning((Empty(),))], ids=["ac", "gpt"])
@pytest.mark.parametrize(("texts", "size", "parts"), [(24, 4, 1), (24, 2, 3), (29, 2, 3), (24, 1, 6)])
def test_every_text_comes_once_an_epoch_in_an_order_of_its_own(texts, size, parts, conditioning):
    batches = batches_of(Texts(texts, 5), size, parts=parts, conditioning=conditioning)
    steps = texts // (size * parts)
    rounds = []
    for epoch in range(3):
        numbers = range(epoch * steps * parts, (epoch + 1) * steps * parts)
        drawn = [batches.items_of(number) for number in numbers]
        assert {at for at, _ in drawn} == {epoch}
        read = np.concatenate([items for _, items in drawn]).tolist()
        assert len(read) == len(set(read)) == steps * parts * size
        assert set(read) <= set(range(texts))
        rounds.append(read)
    assert rounds[0] != rounds[1] != rounds[2]


def test_a_batch_holds_the_texts_and_the_sets_that_it_says():
    texts, conditioning = Texts(12, 6), Conditioning((Blocks(r_max=0.8),))
    batches = batches_of(texts, 3, conditioning=conditioning, seed=5)
    for number in (0, 3, 7):
        epoch, items = batches.items_of(number)
        roles = np.stack([batches.roles(epoch, item) for item in items])
        expected = pack(texts.tokens[items], roles, bos=BOS, mask=MASK)
        batch = batches[number]
        tensors, others = tensors_of(batch), tensors_of(expected)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
        for name in ("asked", "slots", "pairs"):
            assert getattr(batch, name) == getattr(expected, name)
        assert batch.segments.copies == expected.segments.copies


def test_sets_differ_from_epoch_to_epoch_and_from_seed_to_seed():
    batches = batches_of(Texts(12, 200), 3)
    other = batches_of(Texts(12, 200), 3, seed=1)
    one = batches.roles(0, 4).tolist()
    assert one == batches.roles(0, 4).tolist()
    assert one != batches.roles(1, 4).tolist()
    assert one != other.roles(0, 4).tolist()
    assert batches.items_of(0)[1].tolist() != other.items_of(0)[1].tolist()


@pytest.mark.parametrize(
    "conditioning", [Conditioning((Blocks(),)), Conditioning((Blocks(unknown=0.1), Empty(unknown=0.3)), (0.8, 0.2))]
)
@pytest.mark.parametrize(("size", "parts"), [(16, 1), (8, 2), (4, 4)])
def test_batches_are_balanced_and_lie_within_a_budget_that_wastes_little(conditioning, size, parts):
    length, count = 200, 2 * 40 * parts  # two epochs
    batches = batches_of(Texts(640, length), size, parts=parts, conditioning=conditioning, fixed=True, count=count)
    drawn = np.random.default_rng(0)
    totals, unbalanced = [], []
    for batch in map(batches.__getitem__, range(count)):
        assert batch.segments.copies == batches.budget.copies
        assert len(batch.rows) == batches.budget.asked
        totals.append(batch.slots - size * length)
        unbalanced.append(sum((batches.roles(0, item) == GIVEN).sum() for item in drawn.integers(640, size=size)))
    assert np.std(totals) < np.std(unbalanced) / 4
    waste = batches.budget.copies - np.mean(totals)
    assert waste < max(ALIGN, 0.1 * np.mean(totals)) + ALIGN


def test_batches_of_sets_whose_sizes_are_only_bounded_have_one_shape(monkeypatch):
    conditioning, count = Conditioning((Blocks(placement="stretches"),)), 20
    monkeypatch.setattr("acgpt.training.batches.SAMPLED", 128)
    batches = batches_of(Texts(640, 200), 64, conditioning=conditioning, fixed=True, count=count)
    drawn = [batches[number] for number in range(count)]
    assert len({shapes_of(batch) for batch in drawn}) == 1
    asked = np.mean([batch.asked for batch in drawn])
    foreseen = batches.conditioning.asked(200, first_draws(0, 0, 640)).mean() * 64
    assert foreseen * 1.02 < asked < batches.budget.asked < 1.15 * asked


def test_the_budget_holds_every_batch_of_the_run_or_has_room_to_spare(monkeypatch):
    options = {"conditioning": Conditioning((Blocks(),)), "fixed": True}
    short, long = (batches_of(Texts(64, 500), 16, count=count, **options) for count in (4, 400))
    largest = [
        max(batches.sizes(e)[batches.order(e)].sum(1).max() for e in range(n))
        for batches, n in ((short, 1), (long, 100))
    ]
    assert [short.budget.copies, long.budget.copies] == [math.ceil(most / ALIGN) * ALIGN for most in largest]
    assert largest[0] < largest[1]
    monkeypatch.setattr("acgpt.training.batches.FORESEEN", 64)  # one epoch is looked at
    monkeypatch.setattr("acgpt.training.batches.SLACK", 1.5)
    unforeseen = batches_of(Texts(64, 500), 16, count=400, **options)
    assert unforeseen.budget.copies == math.ceil(1.5 * largest[0] / ALIGN) * ALIGN


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_step_has_the_same_texts_however_it_is_divided(parts):
    whole, divided = (batches_of(Texts(50, 9), 8 // p, parts=p, seed=3) for p in (1, parts))
    for step in range(15):  # more than two epochs
        epoch, items = whole.items_of(step)
        drawn = [divided.items_of(step * parts + part) for part in range(parts)]
        assert {at for at, _ in drawn} == {epoch}
        assert sorted(items) == sorted(np.concatenate([part for _, part in drawn]))


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_do_not_depend_on_the_number_of_workers_nor_on_where_they_begin(workers):
    batches = batches_of(Texts(20, 9), 4, count=14)
    expected = [batches_of(Texts(20, 9), 4)[number].ids.tolist() for number in range(14)]
    loader = DataLoader(batches, batch_size=None, num_workers=workers, multiprocessing_context="fork")
    assert [batch.ids.tolist() for batch in loader] == expected
    assert [batches[number].ids.tolist() for number in (9, 2, 13)] == [expected[number] for number in (9, 2, 13)]
