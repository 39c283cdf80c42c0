"""Lengths of gaps: the question against its definition, the joint distribution against enumeration, and files."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
import safetensors.torch
import torch
from fuzz import examples
from models import by_hand, masked_hidden, tiny_model, toy_tokenizer
from transformers import AutoModelForCausalLM

import acgpt
from acgpt import LanguageModel, Metadata, ModelError, Query, QueryError
from acgpt.engine.engine import Engine
from acgpt.engine.length_head import FILE, LengthHead
from acgpt.models.ask import FillAsk
from acgpt.models.fill_by_lengths import MASS
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN
from acgpt.query.gaps import encode_gaps
from acgpt.query.lengths import CLASSES, LONGEST, MORE, length_question, normalised
from acgpt.query.template import parse
from acgpt.query.vocabulary import ByteVocabulary

POSITIONS, WIDTH, BOS, MASK = 48, 16, 0, 2
LENGTHS = {"file": FILE, "distance": 5}


def random_head(seed=0, distance=5):
    """Return a head with large random weights, so that every hidden state matters."""
    head, generator = LengthHead(WIDTH, distance).double(), torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        weight.data.normal_(0, 0.3, generator=generator)
    return head


def network():
    return tiny_model(vocabulary=len(toy_tokenizer()), width=WIDTH, layers=1, positions=POSITIONS, scale=0.25).double()


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(
        network(), toy_tokenizer(), metadata=Metadata(mask_token_id=MASK, lengths=LENGTHS), length_head=random_head()
    )


# ---- the question ---------------------------------------------------------------------------------------------------


def random_question(seed):
    rng = random.Random(seed)
    tokens = np.array([rng.randrange(3, 200) for _ in range(rng.randrange(1, 9))])
    roles = np.array([rng.choices([GIVEN, ASKED, UNKNOWN], [6, 1, 1])[0] for _ in tokens], dtype=np.int8)
    gaps = sorted(rng.sample(range(len(tokens) + 1), min(len(tokens) + 1, rng.randrange(1, 4))))
    lengths = [rng.randrange(4) for _ in range(rng.randrange(len(gaps)))]
    return tokens, roles, gaps, lengths


@pytest.mark.parametrize("seed", range(examples(20)))
def test_the_answer_is_that_of_the_definition_alone_or_in_a_batch(seed):
    model, reference, head = network(), network(), random_head()
    reference.set_attn_implementation("sdpa")
    acgpt.engine.architecture.check_model(model)
    engine = Engine(model, bos=BOS, mask=MASK)
    asked = [random_question(1000 * seed + i) for i in range(3)]
    questions = [length_question(*question, distance=5, positions=POSITIONS) for question in asked]
    with torch.no_grad():
        together = engine.length_log_probs(questions, head)
        for question, built, answer in zip(asked, questions, together, strict=True):
            ids, positions, sees, predicts = by_hand(*question, 5, bos=BOS, mask=MASK)
            hidden = masked_hidden(reference, ids, positions, sees)[predicts]
            expected = head(hidden[None])[0].log_softmax(-1).numpy()
            np.testing.assert_allclose(answer, expected, atol=1e-9)
            np.testing.assert_allclose(engine.length_log_probs([built], head)[0], expected, atol=1e-9)


def test_no_pass_over_several_questions_has_more_tokens_than_the_budget():
    model, head, budget, sizes = network(), random_head(), 60, []
    acgpt.engine.architecture.check_model(model)
    questions = [length_question(*random_question(seed), distance=5, positions=POSITIONS) for seed in range(12)]
    model.get_input_embeddings().register_forward_hook(lambda module, ids, states: sizes.append(states[..., 0].numel()))
    with torch.no_grad():
        answers = [
            Engine(model, bos=BOS, budget=most, mask=MASK).length_log_probs(questions, head) for most in (budget, 10**6)
        ]
    *limited, whole = sizes
    assert 2 < len(limited) < len(questions) and max(limited) <= budget < whole
    np.testing.assert_allclose(*answers, atol=1e-9)


def test_no_input_depends_on_the_length_that_is_asked():
    tokens, roles = np.arange(10, 20), np.full(10, GIVEN, dtype=np.int8)
    short, long = (
        length_question(tokens, roles, [2, 5], [3], distance=7, positions=100, length=length) for length in (0, 200)
    )
    assert (short.tokens[short.at - 1], long.tokens[long.at - 1]) == (0, 200)  # the target, which no slot reads
    for name in ("tokens", "roles", "places"):
        one, other = (np.delete(getattr(question, name), question.at - 1) for question in (short, long))
        assert (one == other).all()
    assert short.at == long.at == 6


def test_tokens_beyond_the_last_position_are_left_out():
    question = length_question(np.arange(10, 20), np.full(10, GIVEN), [2], [], distance=7, positions=15)
    assert question.tokens.tolist() == [10, 11, 0, 12, 13, 14, 15, 16]
    assert question.places.tolist() == [1, 2, 0, 10, 11, 12, 13, 14]


def test_probabilities_are_normalised_over_what_is_allowed_and_long_lengths_share_theirs():
    log_probs = np.log(np.random.default_rng(0).dirichlet(np.ones(CLASSES)))
    assert math.fsum(map(math.exp, normalised(log_probs, range(LONGEST + 1)).values())) == pytest.approx(1)
    some = normalised(log_probs, [3, 5, 300, 301])
    assert math.fsum(map(math.exp, some.values())) == pytest.approx(1)
    assert some[300] == some[301] == pytest.approx(some[3] + log_probs[MORE] - log_probs[3] - math.log(2))


# ---- fills ----------------------------------------------------------------------------------------------------------

FREE = "x.{{_0-2}}.y"
ONE = "x.{{_0-1}}.y"  # any text of one token, or none
SOME = "x.{{_0-1:[!-N]?}}.y"  # those of a pattern
HEALED = "x {{_1-4:[ab]|ab}}y"  # given text next to the gap is generated again


def completions(vocabulary, text, most):
    """Return all sequences of at most this many tokens that spell a text."""
    if not text:
        return [()]
    if not most:
        return []
    return [
        (token, *rest)
        for token, spelled in enumerate(vocabulary)
        if spelled and text.startswith(spelled)
        for rest in completions(vocabulary, text[len(spelled) :], most - 1)
    ]


def enumerated(lm, template, texts):
    """Return p(length) · p(tokens | length) of all token sequences that spell these texts, normalised."""
    gapped, vocabulary = encode_gaps(parse(template), lm.tokenizer), ByteVocabulary.of(lm.tokenizer).tokens
    (region,), lengths = gapped.regions, lm.lengths(template)
    before, after = region.literals
    found = {
        tokens: lengths.log_prob(len(tokens))
        for text in texts
        for tokens in completions(vocabulary, before + text + after, max(lengths.log_probs))
        if len(tokens) in lengths.log_probs
    }
    for tokens in filter(None, found):
        query, remaining = gapped.encoded([len(tokens)]).query, iter(tokens)
        complete = [next(remaining) if asked else id for id, asked in zip(query.tokens, query.asked, strict=True)]
        found[tokens] += lm.log_prob(Query(complete, query.given, query.asked)).log_prob
    total = math.fsum(map(math.exp, found.values()))
    return {tokens: math.exp(value) / total for tokens, value in found.items()}


def frequencies(samples):
    drawn = Counter(tuple(token.id for token in sample.tokens) for sample in samples)
    return {tokens: count / len(samples) for tokens, count in drawn.items()}


def close(shares, expected, count):
    """Whether frequencies are within 4 standard errors of probabilities."""
    assert set(shares) <= set(expected)
    return all(
        abs(shares.get(tokens, 0) - p) < 4 * math.sqrt(p * (1 - p) / count) + 1 / count
        for tokens, p in expected.items()
    )


def test_fills_are_drawn_from_the_joint_distribution_of_length_and_text(lm):
    """Of all texts of one token that are valid UTF-8, and the empty one."""
    known = [token for token in ByteVocabulary.of(lm.tokenizer).tokens if token]
    texts = [b"", *(token for token in known if token.decode(errors="replace").encode() == token)]
    expected, count = enumerated(lm, ONE, texts), 1500
    assert len(expected) > 100
    assert close(frequencies(lm.sample(ONE, count, seed=5)), expected, count)


def test_fills_of_a_pattern_are_drawn_from_the_joint_distribution_too(lm):
    expected, count = enumerated(lm, SOME, [b"", *(bytes([byte]) for byte in range(ord("!"), ord("N") + 1))]), 500
    assert len(expected) > 40
    assert close(frequencies(lm.sample(SOME, count, seed=7)), expected, count)


def test_if_few_candidates_are_accepted_they_are_resampled_with_their_weights(lm):
    expected, count = enumerated(lm, HEALED, [b"a", b"b", b"ab"]), 300
    assert len(expected) > 5
    shares = frequencies(lm.sample(HEALED, count, seed=7, candidates=1))
    assert sum(abs(shares.get(tokens, 0) - p) for tokens, p in expected.items()) / 2 < 0.12  # of 2,400 candidates


def test_lengths_that_a_template_allows_sum_to_one(lm):
    for template, allowed in ((FREE, {0, 1, 2}), (ONE, {0, 1})):
        lengths = lm.lengths(template)
        assert set(lengths.log_probs) == allowed
        assert math.fsum(map(math.exp, lengths.log_probs.values())) == pytest.approx(1)
    assert math.fsum(map(math.exp, lm.lengths("x.{{_}}.y", max_tokens=7).log_probs.values())) == pytest.approx(1)


def test_a_list_of_templates_is_asked_together_and_answered_as_one_by_one(lm):
    templates = ["x.{{_}}.y", FREE, "x.ab.x.{{_0-3}}.y.{{_}}.x", ONE]
    calls = lm._executor.engine.meter.calls
    together = lm.lengths(templates, max_tokens=5)
    assert lm._executor.engine.meter.calls == calls + 1
    for template, answer in zip(templates, together, strict=True):
        assert answer.log_probs == pytest.approx(lm.lengths(template, max_tokens=5).log_probs, abs=1e-9)
    assert lm.lengths([FREE])[0].log_probs == pytest.approx(lm.lengths(FREE).log_probs, abs=1e-9)
    assert lm.lengths([]) == []


def test_lengths_that_are_known_are_those_of_every_template_of_a_list(lm):
    templates = ["x.{{_0-2}}.y.{{_0-4}}.b", "x.ab.{{_0-3}}.y.{{_0-2}}.b"]
    for template, answer in zip(templates, lm.lengths(templates, [1]), strict=True):
        assert answer.log_probs == pytest.approx(lm.lengths(template, [1]).log_probs, abs=1e-9)
    with pytest.raises(QueryError, match="cannot have 3"):
        lm.lengths(templates, [3])


def test_a_fill_has_the_probability_of_its_lengths_one_after_the_other(lm):
    template = "x.{{_0-2}}.y.{{_}}.x{{_1-3}}.b"
    for fill in [*lm.fill(template, 3, max_tokens=4, seed=0), *lm.sample(template, 3, max_tokens=4, seed=0)]:
        log_probs = [lm.lengths(template, fill.lengths[:i], max_tokens=4).log_prob(fill.lengths[i]) for i in range(3)]
        assert fill.length_log_prob == pytest.approx(math.fsum(log_probs), abs=1e-9)


def test_fills_have_the_likeliest_lengths_up_to_a_probability(lm):
    lengths = lm.lengths("x.{{_1-9}}.y")
    likely, mass = [], 0.0
    for length in lengths.most_probable(9):
        if mass < MASS:
            likely.append(length)
            mass += math.exp(lengths.log_prob(length))
    assert 2 < len(likely) < 9
    fills = lm.fill("x.{{_1-9}}.y", len(likely), patience=9)
    assert {fill.lengths[0] for fill in fills} == set(likely)


def test_no_more_lengths_are_tried_when_the_time_is_over(lm, monkeypatch):
    monkeypatch.setattr("acgpt.models.fill_by_lengths.MASS", 2.0)  # all lengths
    likely = sorted(lm.lengths("x.{{_1-30}}.y").most_probable(16))
    assert {fill.lengths[0] for fill in lm.fill("x.{{_1-30}}.y", 16, patience=16)} == set(likely)
    (fills,) = lm._executor.run([lm.searches.of(FillAsk("x.{{_1-30}}.y", 16, patience=16, seconds=1e-9))])
    assert {fill.lengths[0] for fill in fills} == set(likely[:4])


def test_no_more_lengths_are_tried_when_longer_ones_are_no_better(lm, monkeypatch):
    monkeypatch.setattr("acgpt.models.fill_by_lengths.MASS", 2.0)
    (all_tried,), tried = lm.fill("x.{{_1-30}}.y", 1, patience=16), set[int]()
    for fill in lm.fill("x.{{_1-30}}.y", 8, seed=0, patience=1):
        tried |= set(fill.lengths)
    likely = sorted(lm.lengths("x.{{_1-30}}.y").most_probable(16))
    assert tried <= set(likely[:4]) and all_tried.lengths[0] < likely[3]


def test_fills_are_ordered_by_the_mean_of_both_log_probabilities(lm):
    fills = lm.fill(FREE, 3)
    shown = [fill for fill in fills if fill.text != "x..y"]
    assert [fill.score for fill in shown] == sorted((fill.score for fill in shown), reverse=True)
    for fill in shown:
        first = fill.query.asked_positions[0] - 1
        read = Query(fill.query.tokens, [i < first for i in range(len(fill.query.tokens))])
        causal = lm.log_prob(read, future=False).log_prob
        assert fill.score == pytest.approx((fill.length_log_prob + fill.log_prob + causal) / 2)


def test_a_sample_is_scored_by_the_distribution_that_it_is_drawn_from(lm):
    for sample in lm.sample(FREE, 3, seed=0):
        assert sample.score == pytest.approx(sample.length_log_prob + sample.log_prob)


def test_several_gaps_are_filled_with_the_likeliest_lengths_of_all(lm, monkeypatch):
    monkeypatch.setattr("acgpt.models.fill_by_lengths.MASS", 2.0)  # all lengths
    template, choices = "x.{{_1-2}}.y.{{_1-2}}.b", list(product((1, 2), repeat=2))
    alone = [lm.fill(f"x.{{{{_{a}-{a}}}}}.y.{{{{_{b}-{b}}}}}.b", 1)[0] for a, b in choices]
    scores = [fill.score + log_prob_of(lm, template, fill.lengths) / 2 for fill in alone]
    (best,) = lm.fill(template, 1)
    assert best.score == pytest.approx(max(scores)) and best.text == alone[int(np.argmax(scores))].text
    assert len({fill.lengths for fill in lm.fill(template, 4)}) == 4


def test_lengths_of_several_gaps_are_found_by_a_beam_search(lm, monkeypatch):
    monkeypatch.setattr("acgpt.models.fill_by_lengths.MASS", 2.0)
    monkeypatch.setattr("acgpt.models.fill_by_lengths.TRIED", 4)
    template = "x.{{_1-5}}.y.{{_1-5}}.b"
    firsts = lm.lengths(template).most_probable(4)
    log_probs = {pair: log_prob_of(lm, template, pair) for pair in product(firsts, range(1, 6))}
    fills = lm.fill(template, 4, patience=4)
    assert {fill.lengths for fill in fills} == set(sorted(log_probs, key=log_probs.get)[-4:])


def log_prob_of(lm, template, lengths):
    """Log-probability of the lengths of all gaps, one after the other."""
    return math.fsum(lm.lengths(template, lengths[:i]).log_prob(length) for i, length in enumerate(lengths))


def test_streaming_takes_the_length_of_the_best_fill(lm):
    template = "x.{{_1-9}}.y"
    *_, last = lm.stream(template)
    (best,) = lm.fill(template, 1)
    assert last.fill.text == best.text and last.fill.score == pytest.approx(best.score)
    assert lm.sample(template, 2, temperature=0)[1].text == best.text
    assert last.fill.length_log_prob == pytest.approx(lm.lengths(template).log_prob(last.fill.lengths[0]))
    drawn = {[*lm.stream(template, temperature=1, seed=seed)][-1].fill.lengths for seed in range(12)}
    assert len(drawn) > 2


def test_greedy_fills_of_several_gaps_are_not_empty_though_nothing_is_likeliest():
    head = random_head()
    head.bias.data[0] = 50.0
    model = LanguageModel(network(), toy_tokenizer(), metadata=Metadata(lengths=LENGTHS), length_head=head)
    assert model.lengths(FREE).most_probable() == [0]
    assert all(model.fill("x.{{_0-2}}.y.{{_0-2}}.b", 1)[0].fills)
    assert [*model.stream(FREE)][-1].fill.fills[0]


def test_greedy_samples_are_drawn_once(lm):
    drawn = []
    samples = lm.sample("x.{{_2-2}}.y", 3, temperature=0, notice=drawn.append)
    assert len({sample.text for sample in samples}) == 1 and len(samples) == 3 and sum(drawn) == 2


def test_a_gap_that_ends_the_text_is_drawn_as_by_a_model_without_lengths(lm):
    """The end of the text is one of the tokens, so its probability counts among those of the fill."""
    plain = LanguageModel(network(), toy_tokenizer(), metadata=Metadata(mask_token_id=MASK))
    template = "x.y.{{_0-3}}"
    for options in ({"temperature": 0.7}, {"top_p": 0.8}):  # without, fills that leave half a character are refused
        with_head, without = (
            Counter(sample.lengths[-1] for sample in model.sample(template, 250, seed=2, **options))
            for model in (lm, plain)
        )
        share = [abs(with_head[n] - without[n]) / 250 for n in range(4)]
        assert max(share) < 0.13 and with_head[3] > 0, (options, with_head, without)


def with_their_ends(lm, template, choices):
    """Return p(fill, end) of all fills with one or two of these tokens in a gap that ends the text, normalised.

    A fill of two tokens is as long as the gap may be, and needs no token that ends the text.
    """
    known = list(encode_gaps(parse(template), lm.tokenizer).tokens)
    drawn = [((token,), (token, end)) for token in choices for end in (BOS, lm.tokenizer.eos_token_id)]
    drawn += [(pair, pair) for pair in product(choices, repeat=2)]
    queries = [Query([*known, *ids], [True] * len(known) + [False] * 2) for _, ids in drawn]
    found = Counter()
    for (fill, _), score in zip(drawn, lm.log_prob(queries), strict=True):
        found[fill] += math.exp(score.log_prob)
    return {fill: p / found.total() for fill, p in found.items()}


def test_draws_of_a_gap_that_ends_the_text_have_the_probability_of_the_fill_and_its_end(lm):
    template, count = "x.y.{{_1-2:[ab]*}}", 200
    expected = with_their_ends(lm, template, lm.tokenizer.convert_tokens_to_ids(["a", "b", "ab"]))
    samples = lm.sample(template, count, seed=3)
    assert {len(sample.tokens) for sample in samples} == {1, 2}
    assert all(sample.lengths == (len(sample.tokens),) for sample in samples)  # also of those that ended by themselves
    shares = frequencies(samples)
    assert set(shares) <= set(expected)
    assert sum(abs(shares.get(fill, 0) - p) for fill, p in expected.items()) / 2 < 0.17  # 0.5 without the end


def test_other_temperatures_draw_lengths_and_tokens_one_after_the_other(lm):
    template, count = "x.{{_0-2}}.y", 1500
    for options in ({"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 1}):
        temperature = options.get("temperature", 1)
        log_probs = {n: value / temperature for n, value in lm.lengths(template).log_probs.items()}
        total = math.log(math.fsum(map(math.exp, log_probs.values())))
        drawn = Counter(s.lengths[0] for s in lm.sample(template, count, seed=4, **options))
        for n, value in log_probs.items():
            p = math.exp(value - total)
            assert abs(drawn[n] / count - p) < 4 * math.sqrt(p * (1 - p) / count)


def test_two_gaps_are_drawn_from_the_joint_distribution(lm):
    """Lengths of both, each given the one before; texts of a pattern, so that few are refused."""
    template, count = "x.{{_1-2:[!-~]+}}.y.{{_1-2:[!-~]+}}.b", 200
    samples = lm.sample(template, count, seed=8, candidates=10**4)
    assert all(sample.length_log_prob is not None for sample in samples)
    pairs = Counter(sample.lengths for sample in samples)
    assert set(pairs) == {(1, 1), (1, 2), (2, 1), (2, 2)}
    weights = Counter()
    for first in (1, 2):
        for second in (1, 2):
            lengths = [lm.lengths(template).log_prob(first), lm.lengths(template, [first]).log_prob(second)]
            weights[first, second] = math.exp(math.fsum(lengths)) * accepted(lm, template, (first, second))
    total = sum(weights.values())
    for key, weight in weights.items():
        assert abs(pairs[key] / count - weight / total) < 0.12


def accepted(lm, template, lengths, count=250):
    """Estimate the probability that texts of these lengths fit the gaps: how often free draws do."""
    query = encode_gaps(parse(template), lm.tokenizer).encoded(lengths).query
    drawn = lm.sample(query, count, seed=11)
    fits = [all("!" <= c <= "~" for token in sample.tokens for c in token.text) for sample in drawn]
    return sum(fits) / count


def test_unknown_tokens_and_blanks_beside_a_gap_are_part_of_the_question(lm):
    for template in ("x.{{?2}}.{{_0-2}}.y", "x.{{_0-2}}.{{_2}}.y", "x. {{ab}}.{{_0-2}}.y"):
        lengths = lm.lengths(template)
        assert set(lengths.log_probs) == {0, 1, 2}
        fill = lm.fill(template, 1)[0]
        assert fill.length_log_prob == pytest.approx(lengths.log_prob(next(n for n in fill.lengths)))


def test_heads_of_adapters_that_are_not_there_or_do_not_fit_are_refused():
    with pytest.raises(acgpt.InputError, match="length_head has 'infil'"):
        LanguageModel(network(), toy_tokenizer(), length_head={"infil": random_head()})
    with pytest.raises(ModelError, match="a width of 8, the model one of 16"):
        LanguageModel(network(), toy_tokenizer(), length_head=LengthHead(8))


def test_a_gap_that_ends_the_text_has_no_length(lm):
    with pytest.raises(QueryError, match="ends the text"):
        lm.lengths("x.y.{{_}}")


def test_a_default_bound_is_the_longest_length_that_can_be_told():
    wide = tiny_model(vocabulary=len(toy_tokenizer()), width=WIDTH, layers=1, positions=400).double()
    model = LanguageModel(wide, toy_tokenizer(), metadata=Metadata(lengths=LENGTHS), length_head=random_head())
    assert max(model.lengths("x {{_}}y").log_probs) == LONGEST
    assert max(model.lengths("x {{_}}y", max_tokens=300).log_probs) == 300


def test_samples_do_not_depend_on_their_number(lm):
    few, many = lm.sample("x.{{_}}.y", 2, seed=9, max_tokens=4), lm.sample("x.{{_}}.y", 6, seed=9, max_tokens=4)
    assert [sample.text for sample in few] == [sample.text for sample in many[:2]]


def test_a_gap_that_ends_the_text_still_ends_by_itself(lm):
    for fill in lm.fill("x.{{_1-2}}.y{{_}}", 2, max_tokens=3, seed=0):
        assert len(fill.lengths) == 2 and fill.length_log_prob is not None


def test_models_that_predict_no_lengths_say_so_and_search():
    plain = LanguageModel(network(), toy_tokenizer(), metadata=Metadata())
    with pytest.raises(QueryError, match="does not predict lengths"):
        plain.lengths(FREE)
    assert plain.fill(FREE, 1)[0].length_log_prob is None


def test_without_the_future_lengths_are_searched(lm):
    assert lm.fill(FREE, 1, future=False)[0].length_log_prob is None
    with pytest.raises(QueryError, match="does not predict lengths"):
        lm.lengths(FREE, future=False)


@pytest.mark.parametrize(("known", "message"), [((1, 1), "has 2 lengths"), ((9,), "cannot have 9")])
def test_known_lengths_must_fit_the_template(lm, known, message):
    template = FREE if len(known) > 1 else f"{FREE} {FREE}"
    with pytest.raises(QueryError, match=message):
        lm.lengths(template, known)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_saved_model_answers_as_before(lm, tmp_path):
    lm.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "acgpt.json").read_text())["lengths"] == LENGTHS
    loaded = acgpt.load(tmp_path, dtype="float64")
    before, after = lm.lengths(FREE).log_probs, loaded.lengths(FREE).log_probs
    assert after == pytest.approx(before, abs=1e-5)  # the head is written in fp32


def test_metadata_of_other_models_are_as_before(tmp_path):
    Metadata().write(tmp_path)
    assert "lengths" not in json.loads((tmp_path / "acgpt.json").read_text())


def test_a_model_that_transformers_saved_again_is_loaded_without_its_head(lm, tmp_path):
    lm.save_pretrained(tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "other")
    lm.tokenizer.save_pretrained(tmp_path / "other")
    with pytest.warns(UserWarning, match="does not predict lengths"):
        loaded = acgpt.load(tmp_path / "other")
    assert loaded.fill(FREE, 1)[0].length_log_prob is None


@pytest.mark.parametrize("damage", ["missing", "cut", "shape", "nan", "large", "path", "distance"])
def test_a_damaged_head_is_refused(lm, tmp_path, damage):
    lm.save_pretrained(tmp_path)
    path, metadata = tmp_path / FILE, json.loads((tmp_path / "acgpt.json").read_text())
    weights = safetensors.torch.load_file(path)
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "shape":
        safetensors.torch.save_file({**weights, "bias": torch.zeros(3)}, path)
    elif damage == "large":
        safetensors.torch.save_file({**weights, "bias": weights["bias"].double() + 1e300}, path)
    elif damage == "nan":
        safetensors.torch.save_file({**weights, "bias": weights["bias"] * math.nan}, path)
    else:
        entry = {"path": {"file": "../x.safetensors"}, "distance": {"distance": 0}}[damage]
        (tmp_path / "acgpt.json").write_text(json.dumps({**metadata, "lengths": LENGTHS | entry}))
    with pytest.raises(ModelError, match=r"length_head|lengths\.(file|distance)"):
        acgpt.load(tmp_path)
