"""σ-GPT: exact in any order, with target positions; with nothing given it is a causal model."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from models import finished
from toys import (
    BOS,
    all_fillings,
    answer,
    batch_of,
    counted,
    engine_of,
    every_query,
    learner_of,
    p_value,
    query,
    toy,
)
from transformers import AutoModelForCausalLM

from acgpt.engine.decode import randomness
from acgpt.engine.layout import Budget
from acgpt.errors import InputError, ModelError, QueryError
from acgpt.methods import method_of
from acgpt.methods.sigma_gpt import SigmaGptRandom
from acgpt.methods.sigma_network import REACH, SigmaGPTForCausalLM
from acgpt.query.sampling import Sampling

TEMPORAL, RANDOM = "sigma-gpt-temporal", "sigma-gpt-random"
ROTATED = {"rtol": 0, "atol": 1e-6}  # the network's sines, and the softmax of "eager", are of float32
both_kinds = pytest.mark.parametrize("kind", ["rotary", "table"])


def logits_by_hand(model, ids, positions, aims, rotation=None):
    """(slots, V) from the network's parts taken one by one, each slot reading itself and those before it.

    `rotation` turns (heads, slots, D) states to (slots,) positions; that of the network itself by default.
    """
    network, slots = model.gpt_neox, len(ids)
    hidden = network.embed_in.weight[torch.tensor(ids)]
    if model.config.target_positions == "table":
        hidden = hidden + network.embed_target.weight[torch.tensor(aims)]
        aims = positions
    else:
        offsets = [min(max(aim - place, -REACH), REACH) for aim, place in zip(aims, positions, strict=True)]
        hidden = hidden + network.embed_offset.weight[[offset + REACH for offset in offsets]]
    rotation = rotation or (lambda x, at: turned(x, *network.rotary_emb(x, torch.tensor([at]))))
    for layer in network.layers:
        attention = layer.attention
        qkv = attention.query_key_value(layer.input_layernorm(hidden))
        q, k, v = qkv.view(slots, 4, 3 * attention.head_size).transpose(0, 1).chunk(3, dim=-1)
        logits = rotation(q, aims) @ rotation(k, positions).mT / math.sqrt(attention.head_size)
        future = torch.ones(slots, slots, dtype=torch.bool).triu(1)
        out = logits.masked_fill(future, -math.inf).softmax(-1) @ v
        hidden = hidden + attention.dense(out.transpose(0, 1).reshape(slots, -1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(network.final_layer_norm(hidden))


def by_hand(model, order, tokens, asked):
    """log p of the asked tokens as `order` (positions) reads them."""
    ids, positions = [BOS, *(tokens[p - 1] for p in order[:-1])], [0, *order[:-1]]
    scores = logits_by_hand(model, ids, positions, order).log_softmax(-1)
    results = {p: scores[slot, tokens[p - 1]].item() for slot, p in enumerate(order)}
    return [results[p] for p in sorted(order) if asked[p - 1]]


def turned(x, cos, sin):
    """RoPE, as in its paper: halves of a head are the two coordinates of a plane."""
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-other, one], dim=-1) * sin


def turned_pair_by_pair(x, positions):
    """The same in float64 and by the definition: each pair of coordinates by an angle of its own."""
    _, slots, width = x.shape
    out = torch.empty_like(x)
    for slot, pair in itertools.product(range(slots), range(width // 2)):
        angle = positions[slot] * 10000 ** (-2 * pair / width)
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=x.dtype)
        both = [pair, pair + width // 2]
        out[:, slot, both] = x[:, slot, both] @ turn.T
    return out


# ---- scoring --------------------------------------------------------------------------------------------------------


@both_kinds
@torch.inference_mode()
def test_temporal_reads_what_is_given_and_then_what_is_asked_both_from_left_to_right(kind):
    model = toy(TEMPORAL, target_positions=kind)
    for question in [*every_query(4, "gau"), query("agugau")]:
        order = [*question.given_positions, *question.asked_positions]
        want = by_hand(model, order, question.tokens, question.asked)
        assert answer(TEMPORAL, model, [question])[0] == pytest.approx(want, abs=1e-9)
        assert answer(RANDOM, model, [question])[0] == pytest.approx(want, abs=1e-9)  # from left to right by default


@torch.inference_mode()
def test_random_orders_shuffle_the_two_parts_and_depend_on_the_seed_and_the_query_alone():
    model, question = toy(RANDOM, length=8), query("gagaagag")
    orders = set()
    for seed in range(12):
        method = SigmaGptRandom("random", seed=seed)
        order = method.order(question, 0).tolist()
        orders.add(tuple(order))
        assert sorted(order[:4]) == list(question.given_positions) and sorted(order[4:]) == list(
            question.asked_positions
        )
        want = by_hand(model, order, question.tokens, question.asked)
        both = answer(method, model, [query("aga"), question])
        assert both[1] == pytest.approx(want, abs=1e-9)
        assert answer(method, model, [question])[0] == pytest.approx(both[1], abs=1e-12)
    assert len(orders) > 6


def test_several_orders_are_averaged_as_probabilities():
    model, question = toy(RANDOM), query("gaaga")
    each = [
        sum(by_hand(model, SigmaGptRandom("random").order(question, number).tolist(), question.tokens, question.asked))
        for number in range(4)
    ]
    got = answer(SigmaGptRandom(orders=4), model, [question])[0]
    assert sum(got) == pytest.approx(math.log(np.mean(np.exp(each))), abs=1e-9)
    assert len(set(np.round(each, 6))) > 1


@both_kinds
@torch.inference_mode()
def test_with_nothing_given_temporal_is_the_causal_model_that_anyone_would_run(kind):
    model, question = toy(TEMPORAL, target_positions=kind), query("aaaaaa")
    ids = torch.tensor([[BOS, *question.tokens]])
    scores = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    want = [scores[position, token].item() for position, token in enumerate(question.tokens)]
    assert answer(TEMPORAL, model, [question])[0] == pytest.approx(want, abs=1e-9)
    got = model.generate(ids[:, :3], attention_mask=torch.ones(1, 3), max_new_tokens=3, do_sample=False)[0].tolist()
    for end in (3, 4, 5):  # as `generate` of transformers runs it
        assert got[end] == int(model(torch.tensor([got[:end]]), use_cache=False).logits[0, -1].argmax())


def test_what_it_cannot_be_asked_and_who_cannot_learn_as_it_does_is_refused():
    with pytest.raises(QueryError, match="left to right"):
        answer(SigmaGptRandom("random"), toy(RANDOM), [query("gag")], future=False)
    with pytest.raises(InputError, match="cannot learn to predict them"):
        method_of("ac-gpt").with_loss("all")
    for name in (TEMPORAL, RANDOM):
        with pytest.raises(ModelError, match="GPTNeoXForCausalLM is not"):
            answer(name, toy("gpt"), [query("gag")])
        with pytest.raises(ModelError, match="own method"):
            method_of(name).sample(engine_of(toy("gpt"), name), [query("gag")], 1, Sampling())


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_samples_of_several_orders_come_as_often_as_their_mean_probability_says():
    model, question = toy(RANDOM, vocabulary=3, scale=0.7), query("agaga", [1, 2, 0, 1, 2])
    fillings = list(all_fillings(question, 3))
    probabilities = [math.exp(sum(scores)) for scores in answer(SigmaGptRandom(orders=3, seed=1), model, fillings)]

    def chance(method):
        with torch.inference_mode():
            (samples,) = method.sample(engine_of(model, RANDOM), [question], 4000, Sampling(seed=0))
        return p_value(counted(samples, 3), probabilities)

    assert chance(SigmaGptRandom(orders=3, seed=1)) > 1e-3
    assert chance(SigmaGptRandom("random", seed=1)) < 1e-5  # the first of the three alone


def test_an_order_has_other_numbers_than_the_tokens_drawn_in_it():
    question = query("aaaaaaaa")  # with nothing given, what is asked in an order is the question itself
    for seed in range(4):
        tokens = randomness(question, 0, seed).permutation(question.asked_positions)
        assert SigmaGptRandom("random", seed=seed).order(question, 0).tolist() != tokens.tolist()


def test_of_several_orders_a_sample_has_its_own_whatever_it_is_drawn_beside():
    chosen, model = SigmaGptRandom(orders=3, seed=4), toy(RANDOM, vocabulary=3, scale=0.3)
    question, other = query("agaga", [1, 2, 0, 1, 2]), query("aag")

    def draw(questions, n, first=0):
        with torch.inference_mode():
            result = chosen.sample(engine_of(model, RANDOM), questions, n, Sampling(seed=3, first=first))[-1]
        return [tokens.tolist() for tokens, _ in result], [scores.tolist() for _, scores in result]

    tokens, scores = draw([question], 40)
    assert draw([other, question], 40)[0] == tokens
    assert draw([question], 7, first=20)[0] == tokens[20:27]
    used = set()
    for drawn, got in zip(tokens, scores, strict=True):  # in one of the three orders, whose log-probabilities it has
        full = finished(question, drawn)
        each = [by_hand(model, chosen.order(question, k).tolist(), full.tokens, full.asked) for k in range(3)]
        used |= {k for k in range(3) if got == pytest.approx(each[k], abs=1e-9)}
        assert any(got == pytest.approx(one, abs=1e-9) for one in each)
    assert used == {0, 1, 2}


# ---- training -------------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize(("budget", "learnt"), [(None, "a"), (Budget(0, 64), "a"), (None, "ga")])
@pytest.mark.parametrize("name", [TEMPORAL, RANDOM])
def test_the_loss_is_that_of_its_definition(name, budget, learnt, kind):
    """With `loss="all"`, given tokens are learnt from too."""
    words = ["gaggaa", "aaaaaa", "agauga", "ggggga"]
    method = method_of(name).with_loss("all") if learnt == "ga" else method_of(name)
    tokens, slots, batch = batch_of(method, words, budget=budget)
    model = toy(name, target_positions=kind)
    orders = slots.target_positions.reshape(tokens.shape)
    expected = 0.0
    with torch.no_grad():
        for text, word, order in zip(tokens, words, orders, strict=True):
            kinds = [word[position - 1] for position in order]
            assert kinds == sorted(kinds, key="gau".index)  # given first, then asked, then what nobody needs
            expected -= sum(by_hand(model, order.tolist(), text.tolist(), [role in learnt for role in word]))
    assert learner_of(model, name)(batch).item() == pytest.approx(expected, rel=1e-10)
    assert batch.asked == sum(word.count(role) for word in words for role in learnt)
    if learnt == "ga":
        room = method.room(6, np.array([3, 2]), np.array([3, 3]))
        assert [each.tolist() for each in room] == [[0, 0], [6, 5]]
        assert not method_of(name).learns_given  # the method that all share is as it was


def test_random_orders_are_new_for_every_text_and_uniform_within_the_parts():
    words = ["gagaga"] * 600
    _, slots, _ = batch_of(method_of(RANDOM), words)
    orders = slots.target_positions.reshape(-1, 6)
    for part, members in ((orders[:, :3], (1, 3, 5)), (orders[:, 3:], (2, 4, 6))):
        kinds = list(itertools.permutations(members))
        counts = [sum(tuple(row) == kind for row in part.tolist()) for kind in kinds]
        assert sum(counts) == 600
        assert p_value(counts, [1 / 6] * 6) > 1e-3
    _, again, _ = batch_of(method_of(RANDOM), words)
    assert np.array_equal(slots.target_positions, again.target_positions)


# ---- the network ----------------------------------------------------------------------------------------------------


def test_a_query_is_rotated_to_its_target_and_a_key_to_its_token_pair_by_pair():
    model = toy(TEMPORAL, length=40, scale=1)
    ids, positions, aims = [0, 1, 2, 3, 1, 0], [0, 2, 17, 40, 1, 3], [2, 17, 40, 1, 3, 39]
    with torch.no_grad():
        want = logits_by_hand(model, ids, positions, aims, turned_pair_by_pair)
        told = {"position_ids": torch.tensor([positions]), "target_positions": torch.tensor([aims])}
        for implementation in ("acgpt", "sdpa", "eager"):
            model.set_attn_implementation(implementation)
            mask = torch.full((6, 6), -math.inf, dtype=torch.float64).triu(1)[None, None]
            got = model(input_ids=torch.tensor([ids]), attention_mask=mask, **told).logits[0]
            torch.testing.assert_close(got, want, **ROTATED)
        others = logits_by_hand(model, ids, positions, positions, turned_pair_by_pair)
    assert (others - want).abs().max() > 1e-2  # rotated to its token, a query would have found something else


@both_kinds
@pytest.mark.parametrize("roles", ["gagag", "aaaaa", "ggaga"])
@torch.inference_mode()
def test_only_a_table_knows_where_in_the_text_it_is(roles, kind):
    model, question = toy(TEMPORAL, length=30, scale=1, target_positions=kind), query(roles)
    order = [*question.given_positions, *question.asked_positions]
    ids = torch.tensor([[BOS, *(question.tokens[place - 1] for place in order[:-1])]])
    positions, aims = torch.tensor([[0, *order[:-1]]]), torch.tensor([order])
    mask = torch.full((5, 5), -math.inf, dtype=torch.float64).triu(1)[None, None]
    here, shifted = (
        model(input_ids=ids, attention_mask=mask, position_ids=positions + by, target_positions=aims + by).logits
        for by in (0, 20)
    )
    difference = (here - shifted).abs().max()
    assert difference < ROTATED["atol"] if kind == "rotary" else difference > 1e-2


@both_kinds
def test_the_network_is_a_plain_folder_that_transformers_opens(tmp_path, kind):
    model = toy(TEMPORAL, dtype=torch.float32, target_positions=kind)
    model.save_pretrained(tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json", ".safetensors"]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened) is type(model) and opened.config.target_positions == kind
    tables = [module for module in opened.modules() if isinstance(module, torch.nn.Embedding)]
    assert [table.num_embeddings for table in tables] == [4, 7 if kind == "table" else 2 * REACH + 1]
    ids = torch.tensor([[0, 1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(opened(ids).logits, model(ids).logits)
    assert opened.lm_head.weight is opened.gpt_neox.embed_in.weight


def test_other_ways_to_tell_targets_are_refused():
    config = toy(TEMPORAL).config
    config.target_positions = "tables"
    with pytest.raises(ValueError, match="rotary or table, not 'tables'"):
        SigmaGPTForCausalLM(config)
