"""Training on passages and on lengths of gaps: what a batch teaches, against the definition; and whole runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import by_definition, by_hand, masked_hidden, masked_logits, tiny_model
from packing import shapes_of, tensors_of
from test_batches import BOS, MASK, VOCABULARY, Texts, batches_of, learner_of, loss_and_gradients

from acgpt.engine.architecture import check_model
from acgpt.engine.layout import Budget
from acgpt.engine.length_head import LengthHead
from acgpt.query.conditioning import ASKED, GIVEN, Blocks, Conditioning, Draw, Gaps
from acgpt.query.passages import Passage
from acgpt.query.query import Query
from acgpt.training.batches import Batch, lay_out_passages
from acgpt.training.learner import Learner

WIDTH = 32


def head_of(distance=4):
    head = LengthHead(WIDTH, distance).double()
    for weight in head.parameters():
        weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    return head


def texts_and_draws(seed, lengths=0.5, weight=3.0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, VOCABULARY, size=(3, 24))
    parts = Conditioning(
        (Gaps(r_min=0.3, r_max=0.8, passages=2, lengths=lengths, length_weight=weight), Blocks()), (3, 1)
    )
    kinds = rng.choice([0, 1, 4], size=tokens.shape).astype(np.uint8)
    return tokens, [parts.draw(row, rng) for row in kinds]


def by_the_definition(tokens, draws, head):
    """Return the loss of texts, passage by passage, written out by hand."""
    model = tiny_model("gpt_neox", vocabulary=VOCABULARY, positions=64).double()
    model.set_attn_implementation("sdpa")
    total = 0.0
    for text, draw in zip(tokens, draws, strict=True):
        passages = draw.passages or [Passage(0, len(text), ())]
        for passage, question in zip(passages, draw.questions or [None], strict=True):
            ids, roles = text[passage.start : passage.end].tolist(), draw.roles[passage.start : passage.end].tolist()
            if question is None:
                if ASKED in roles:
                    query = Query(ids, [r == GIVEN for r in roles], [r == ASKED for r in roles])
                    *inputs, predictions = by_definition(query, bos=BOS, mask=MASK)
                    scores = masked_logits(model, *inputs).log_softmax(-1)
                    total -= sum(scores[slot, token].item() for slot, token in predictions)
                continue
            inside = {i for first, size in passage.gaps for i in range(first, first + size)}
            outside = [i for i in range(passage.start, passage.end) if i not in inside]
            gaps = [sum(i < first for i in outside) for first, _ in passage.gaps]
            known = [size for _, size in passage.gaps[:question]]
            *inputs, predicts = by_hand(
                [int(text[i]) for i in outside], [GIVEN] * len(outside), gaps, known, head.distance, bos=BOS, mask=MASK
            )
            scores = head(masked_hidden(model, *inputs)[predicts][None])[0].log_softmax(-1)
            total -= draw.length_weight * scores[passage.gaps[question][1]].item()
    return total


def batch_of(tokens, draws, budget=None, distance=4):
    layout = lay_out_passages(tokens, draws, bos=BOS, mask=MASK, distance=distance, positions=64, lengths=True)
    return Batch.of(layout, longest=24, bos=BOS, budget=budget)


@pytest.mark.parametrize("seed", range(6))
def test_the_loss_is_that_of_all_passages_and_weighted_lengths(seed):
    (tokens, draws), head = texts_and_draws(seed), head_of()
    batch = batch_of(tokens, draws)
    loss = learner_of(length_head=head)(batch).item()
    assert loss == pytest.approx(by_the_definition(tokens, draws, head), rel=1e-9)
    questions = [question for draw in draws for question in draw.questions if question is not None]
    assert batch.weight == batch.asked + 3.0 * len(questions)  # by which the step divides


@pytest.mark.parametrize("seed", range(4))
def test_padding_teaches_nothing(seed):
    (tokens, draws), learner = texts_and_draws(seed), learner_of(length_head=head_of())
    loss, gradients = loss_and_gradients(learner, batch_of(tokens, draws))
    budget = Budget(128, 128, 3, texts=3 * 24, sequences=8, lengths=7)
    padded = batch_of(tokens, draws, budget)
    other_loss, other_gradients = loss_and_gradients(learner, padded)
    assert other_loss == pytest.approx(loss, rel=1e-10)
    for name in gradients:
        torch.testing.assert_close(other_gradients[name], gradients[name], rtol=1e-9, atol=1e-10)


def test_a_length_is_no_input():
    """Two texts that differ only in the length of the gap that is asked, and in what is in it."""
    tokens, layouts = np.arange(2, 14), []
    for size in (1, 4):
        text = np.concatenate([tokens[:5], np.full(size, 40 + size), tokens[5:]])
        roles = np.array([GIVEN] * 5 + [ASKED] * size + [GIVEN] * 7, dtype=np.int8)
        draw = Draw(roles, [Passage(0, len(text), ((5, size),))], [0], 1.0)
        options = {"bos": BOS, "mask": MASK, "distance": 4, "positions": 64, "lengths": True}
        layouts.append(lay_out_passages(text[None], [draw], **options))
    for name in ("ids", "positions", "length_rows"):
        assert torch.equal(getattr(layouts[0], name), getattr(layouts[1], name))
    assert [layout.length_targets.tolist() for layout in layouts] == [[1], [4]]
    assert layouts[0].copies == layouts[1].copies and layouts[0].texts == layouts[1].texts


def test_batches_of_a_run_have_one_shape_and_are_a_function_of_the_seed():
    mixture = Conditioning(
        (Gaps(r_min=0.4, r_max=0.9, passages=3, lengths=0.5), Gaps(passages=1), Blocks(r_max=0.5)), (2, 1, 1)
    )
    options = {"conditioning": mixture, "length": 32, "count": 12, "kinds": np.ones(1000, dtype=np.uint8)}
    fixed = batches_of(Texts(24, 32), 4, fixed=True, **options)
    batches = [fixed[i] for i in range(12)]
    assert len({shapes_of(batch) for batch in batches}) == 1
    again = batches_of(Texts(24, 32), 4, fixed=True, **options)
    for number, batch in enumerate(batches):
        other = tensors_of(again[number])
        assert all(torch.equal(tensor, other[name]) for name, tensor in tensors_of(batch).items())
    assert any(len(batch.length_rows) and (batch.length_targets >= 0).any() for batch in batches)


def test_networks_of_other_architectures_learn_lengths():
    tokens, draws = texts_and_draws(0, lengths=1.0)
    for architecture in ("gpt2", "qwen3"):
        model = tiny_model(architecture, vocabulary=VOCABULARY, positions=64).double().train()
        check_model(model)
        learner = Learner(model, backend="dense", compiled=False, length_head=head_of())
        _, gradients = loss_and_gradients(learner, batch_of(tokens, draws))
        assert gradients["length_head.weight"].abs().sum() > 0
        assert all(gradient.isfinite().all() for gradient in gradients.values())
