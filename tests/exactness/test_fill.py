"""Filling gaps, against enumeration: what is drawn, with which probability, and in which order it is returned."""

from __future__ import annotations

import copy
import functools
import gc
import math
import random
import re
import sys
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest
import torch
from fuzz import examples
from generators import model_of
from models import by_definition, masked_logits, random_query, tiny_model, toy_tokenizer, truncated
from tolerance import exactly

from acgpt import FutureIgnored, InputError, LanguageModel, Metadata, Query, QueryError, TemplateError
from acgpt.engine.architecture import check_model
from acgpt.engine.decoding import Decoding
from acgpt.engine.engine import Engine
from acgpt.models.ask import FillAsk
from acgpt.models.executor import Rows
from acgpt.models.fill_by_search import BONUS, FillBySearch
from acgpt.models.region import constraint_of
from acgpt.query.sampling import Sampling, SamplingOptions
from acgpt.query.template import Slot, parse
from acgpt.query.vocabulary import ByteVocabulary

POSITIONS = 48


@functools.cache
def network(number):
    """One of two equal networks: for acgpt, and for the oracle."""
    assert number in (0, 1)
    return tiny_model(vocabulary=len(toy_tokenizer()), width=16, layers=1, positions=POSITIONS, scale=0.25).double()


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(network(0), toy_tokenizer(), metadata=Metadata(mask_token_id=2))


def joined(template, fills):
    """Return a template's text with these fills."""
    remaining = iter(fills)
    return "".join(next(remaining) if isinstance(part, Slot) else part.text for part in parse(template))


def given_text(template):
    """Return a regular expression for the texts that a template allows."""
    patterns = [
        f"(?:{part.gap.pattern or '.*'})" if isinstance(part, Slot) else re.escape(part.text)
        for part in parse(template)
    ]
    return re.compile("".join(patterns), re.DOTALL)


# ---- the given text -------------------------------------------------------------------------------------------------

PATTERNS = ["", "", "", "0-3", "1-4", "2-2", ":[a-c]*", ":x?y+", "1-6:[a-z ]+"]


def random_template(rng):
    """Return a template with one to three gaps at any characters of a random text."""
    parts = []
    for _ in range(rng.randrange(1, 4)):
        text = "".join(rng.choice(["a", "b", "x", "y", " ", " x", "ab", "é", "🎉", ".", "\n"]) for _ in range(5))
        parts += [text[: rng.randrange(len(text) + 1)], "{{_" + rng.choice(PATTERNS) + "}}"]
    return "".join(parts) + rng.choice(["", "", "y", " x.", "ab", "é a"])


@pytest.mark.parametrize("seed", range(examples(12)))
def test_every_fill_and_sample_contains_the_given_text_to_the_letter(lm, seed):
    rng = random.Random(seed)
    template = random_template(rng)
    try:
        fills = lm.fill(template, 3, seed=seed, max_tokens=8, best_of=8)
    except TemplateError as error:
        assert re.search("allow more|no text fits", str(error)), error
        return
    samples = lm.sample(template, 3, seed=seed, max_tokens=8, candidates=12)
    assert len(samples) == 3 and fills
    for result in [*fills, *samples]:
        assert result.text == joined(template, result.fills)
        assert given_text(template).fullmatch(result.text)
        assert result.text.encode() == ByteVocabulary.of(lm.tokenizer).decode(result.query.tokens)
        if result.tokens:
            assert result.log_prob == exactly(lm.log_prob(result.query).log_prob)


def test_white_space_alone_comes_last(lm):
    scores = []
    for letter in "abcdxyz":
        fills = lm.fill(f"The.{{{{_:[ {letter}]}}}}.end", 4, seed=0)
        assert [not fill.fills[0].strip() for fill in fills] == sorted(not fill.fills[0].strip() for fill in fills)
        scores += [(fills[0].score, fill.score) for fill in fills if not fill.fills[0].strip()]
    assert any(best < blank for best, blank in scores)  # not because it is less probable


@pytest.mark.parametrize("seed", range(examples(12)))
def test_blanks_and_unknown_tokens_next_to_gaps_are_part_of_the_text(lm, seed):
    """A space before a blank belongs to its first token, so spaces are not compared."""
    rng, slots = random.Random(seed), ["{{_}}", "{{_1-3}}", "{{_2}}", "{{?2}}"]
    parts = [rng.choice(["", " ", "a", " x", "ab ", "y.", "é"]) + rng.choice(slots) for _ in range(rng.randrange(1, 5))]
    template = "".join(parts) + rng.choice(["{{_}}", " {{_}} ", "{{_1-2}}a", " x{{_}}y."])
    options = {"seed": seed, "max_tokens": 5}
    *pieces, last = lm.stream(template, temperature=1, **options)
    streamed = ["".join(piece.text for piece in pieces if piece.slot == slot) for slot in range(len(last.fill.fills))]
    assert tuple(streamed) == last.fill.fills
    for result in [last.fill, *lm.fill(template, 2, **options), *lm.sample(template, 2, candidates=8, **options)]:
        if "\ufffd" not in result.text:  # a blank may draw half a character
            assert result.text.replace(" ", "") == joined(template, result.fills).replace(" ", "")
        if result.tokens:
            assert result.log_prob == exactly(lm.log_prob(result.query).log_prob)


@pytest.mark.parametrize("seed", range(examples(6)))
def test_there_are_no_dead_ends_at_temperature_1(lm, seed):
    """Bytes at random are rarely characters, and rarely end in the literal of the gap."""
    for template in ("a{{_}}", "{{_}}", "{{_4-4}}🎉", "🎉{{_}}é x", "{{_:[é-ü]{2}}}", "a{{_2-5:.*🎉}}"):
        for sample in lm.sample(template, 4, seed=seed, max_tokens=9, candidates=24):
            assert given_text(template).fullmatch(sample.text)


@pytest.mark.parametrize("seed", [-1, 0, 2**70])
def test_any_whole_number_is_a_seed_and_repeats_the_samples(lm, seed):
    samples = lm.sample("a {{_}} b", 3, seed=seed, max_tokens=6)
    assert [s.text for s in samples] == [s.text for s in lm.sample("a {{_}} b", 3, seed=seed, max_tokens=6)]
    assert {s.seed for s in samples} == {seed}


def test_infill_is_fill_of_a_template_with_one_gap(lm):
    prefix, suffix = "a {{x}} \\", "\\{{ y|"
    (one,) = lm.infill(prefix, suffix, seed=0, max_tokens=12)
    assert one.text == prefix + one.fills[0] + suffix
    (other,) = lm.fill("a \\{{x}} \\\\{{_}}\\\\\\{{ y|", 1, seed=0, max_tokens=12)
    assert one == other


# ---- probabilities, by enumeration ----------------------------------------------------------------------------------

TEMPLATE, BEFORE, AFTER = "a x{{_0-3}}y b", " x", "y"  # the region is " x…y", in at most 3 tokens


def candidates_of(literals, lengths, tokens):
    """Return all sequences of tokens whose bytes are a text that begins and ends with two literals."""
    first, last = (literal.encode() for literal in literals)
    found = {length: [] for length in lengths}

    def extend(ids, data):
        for length in lengths:
            if len(ids) == length and len(data) >= len(first + last) and data.startswith(first) and data.endswith(last):
                try:
                    data.decode()
                except UnicodeDecodeError:
                    continue
                found[length].append(ids)
        if len(ids) < max(lengths):
            for i, token in enumerate(tokens):
                new = data + (token or b"")
                # Only tokens that agree with the beginning; the last one must agree with the end.
                agrees = new[: len(first)] == first[: len(new)]
                if token and agrees and (len(ids) + 1 < max(lengths) or new.endswith(last)):
                    extend((*ids, i), new)

    extend((), b"")
    return found


def query_of(before, ids, after, length):
    """Return the query that asks for `length` tokens between given ones, the first of which are known."""
    tokens = [*before, *ids, *[None] * (length - len(ids)), *after]
    given = [True] * len(before) + [False] * length + [True] * len(after)
    return Query(tokens, given)


@functools.cache
def next_distribution(before, ids, after, length):
    """Return p(next token | given tokens and asked tokens before it), from a model without acgpt."""
    query = query_of(before, ids, after, length)
    filled = Query([0 if token is None else token for token in query.tokens], query.given)
    slots, positions, sees, predictions = by_definition(filled, mask=2)
    return masked_logits(network(1), slots, positions, sees)[predictions[len(ids)][0]].softmax(-1).numpy()


def followers_of(candidates):
    """Return the next tokens of every beginning of these candidates."""
    followers = {}
    for ids in candidates:
        for number, token in enumerate(ids):
            followers.setdefault(ids[:number], set()).add(token)
    return followers


def drawn_with(before, ids, after, followers, sampling):
    """Return log q of a candidate: each token is drawn among those that begin another candidate of its length."""
    total = 0.0
    for number, token in enumerate(ids):
        p = next_distribution(before, ids[:number], after, len(ids))
        mask = np.zeros(len(p))
        mask[list(followers[ids[:number]])] = 1
        total += math.log(truncated(p * mask / (p * mask).sum(), sampling)[token])
    return total


def causal(before, ids, after):
    """Return log p(ids and after | before), read from left to right, from a model without acgpt."""
    text = [0, *before, *ids, *after]
    with torch.no_grad():
        log_probs = network(1)(torch.tensor([text])).logits[0].log_softmax(-1)
    return sum(log_probs[i - 1, text[i]].item() for i in range(len(before) + 1, len(text)))


@pytest.fixture(scope="module")
def enumerated():
    """The kept tokens around the region of TEMPLATE, and its candidates by length."""
    tokenizer = toy_tokenizer()
    vocabulary = ByteVocabulary.of(tokenizer)
    before, after = tuple(tokenizer("a")["input_ids"]), tuple(tokenizer(" b")["input_ids"])
    return before, after, candidates_of((BEFORE, AFTER), [1, 2, 3], vocabulary.tokens)


SETTINGS = fields(SamplingOptions)


def filler_of(lm, template=TEMPLATE, sampling=None):
    options = {"seed": 0} if sampling is None else {item.name: getattr(sampling, item.name) for item in SETTINGS}
    return lm.searches.filler(parse(template), FillAsk(template, n=1, **options))


def test_the_search_considers_all_lengths_that_have_a_candidate(lm, enumerated):
    before, after, found = enumerated
    filler = filler_of(lm)
    (region,) = filler.gapped.regions
    assert region.literals == (BEFORE.encode(), AFTER.encode()) and region.at == len(before)
    assert filler.gapped.tokens == before + after
    assert filler.lengths == [[length for length, ids in found.items() if ids]]
    # " x", " xa" with "y", "ay", "xy"; and " " with "xy"
    assert not found[1] and len(found[2]) == 7


@pytest.mark.parametrize(
    "sampling",
    [Sampling(seed=3), Sampling(temperature=0.7, top_p=0.9, seed=3), Sampling(temperature=1.5, top_k=3, seed=3)],
)
def test_candidates_are_drawn_with_the_renormalised_probabilities_of_the_allowed_tokens(lm, enumerated, sampling):
    before, after, found = enumerated
    filler = filler_of(lm, sampling=sampling)
    jobs = [((length,), sample) for length in (2, 3) for sample in range(40)]
    (drawn,) = lm._executor.run([filler.draw(filler.gapped, filler.constraints, jobs, greedy=False)])
    assert len({tuple(candidate.ids) for candidate in drawn}) > 5
    followers = {length: followers_of(found[length]) for length in (2, 3)}
    for candidate in drawn:
        ids = tuple(candidate.ids)
        assert ids in found[len(ids)]
        assert candidate.drawn_with == exactly(drawn_with(before, ids, after, followers[len(ids)], sampling))
        expected = [math.log(next_distribution(before, ids[:i], after, len(ids))[t]) for i, t in enumerate(ids)]
        assert candidate.log_probs == exactly(expected)


def test_the_probabilities_of_all_candidates_of_a_length_sum_to_1(enumerated):
    before, after, found = enumerated
    for length in (2, 3):
        followers = followers_of(found[length])
        q = [drawn_with(before, ids, after, followers, Sampling()) for ids in found[length]]
        assert math.fsum(map(math.exp, q)) == exactly(1.0)


@pytest.fixture(scope="module")
def exact_target(enumerated):
    """Return the candidates, log q (lengths in turn, tokens masked), and p(fill | context, lengths allowed)."""
    before, after, found = enumerated
    ids = [(length, candidate) for length in (2, 3) for candidate in found[length]]
    followers = {length: followers_of(found[length]) for length in (2, 3)}
    log_q = np.array([drawn_with(before, c, after, followers[length], Sampling()) - math.log(2) for length, c in ids])
    log_p = np.array([causal(before, candidate, after) for _, candidate in ids])
    target = np.exp(log_p - log_p.max())
    return [candidate for _, candidate in ids], log_q, log_p, target / target.sum()


def test_weighted_candidates_have_the_probability_of_the_fill_given_its_context(lm, exact_target):
    """The weights p(text) / q of `sample`, summed over all candidates instead of drawn ones, are exact."""
    candidates, log_q, _, target = exact_target
    filler = filler_of(lm)
    jobs = [((length,), sample) for length in (2, 3) for sample in range(60)]
    (drawn,) = lm._executor.run([filler.draw(filler.gapped, filler.constraints, jobs, greedy=False)])
    lm._executor.run([filler.score(filler.gapped, drawn)])
    number = {ids: i for i, ids in enumerate(candidates)}
    seen = {number[tuple(candidate.ids)]: candidate.log_text - candidate.drawn_with for candidate in drawn}
    for one, weight in seen.items():  # weights of `sample`, up to a constant
        first = min(seen)
        expected = math.log(target[one] / target[first]) - (log_q[one] - log_q[first])
        assert weight - seen[first] == exactly(expected)


def test_a_fill_is_read_from_the_first_token_that_was_drawn_on(lm):
    """Also from a blank before the gap: fills differ in its tokens, too."""
    filler = filler_of(lm, "ab.{{_2}}.x{{_}}y.")
    (drawn,) = lm._executor.run([filler.draw(filler.gapped, filler.constraints, [((2,), 0), ((2,), 1)], greedy=False)])
    lm._executor.run([filler.score(filler.gapped, drawn)])
    for candidate in drawn:
        start = candidate.query.asked_positions[0] - 1
        known = Query(candidate.tokens, [i < start for i in range(len(candidate.tokens))])
        assert start < filler.gapped.regions[0].at - 1
        assert candidate.log_text == exactly(lm.log_prob(known, future=False).log_prob)


def test_samples_have_the_probability_of_the_fill_given_its_context(lm, exact_target):
    """Monte Carlo: events deviate by at most 4 standard errors of importance resampling."""
    candidates, log_q, _, target = exact_target
    drawn, n = examples(3000), examples(3000)
    samples = lm.sample(TEMPLATE, n, seed=1, candidates=drawn)
    counts = Counter(tuple(t.id for t in sample.tokens) for sample in samples)
    assert counts.keys() <= set(candidates)
    effective = drawn / (target**2 / np.exp(log_q)).sum()  # effective sample size of the weighted candidates
    assert effective > 100
    likeliest = np.argsort(-target)[:5]
    short = np.array([len(ids) == 2 for ids in candidates])
    events = [short, *(np.arange(len(candidates)) == i for i in likeliest), np.arange(len(candidates)) % 2 == 0]
    for event in events:
        p = target[event].sum()
        frequency = sum(counts[candidates[i]] for i in np.flatnonzero(event)) / n
        assert abs(frequency - p) < 4 * math.sqrt(p * (1 - p) * (1 / n + 1 / effective)) + 1e-3


def test_lengths_with_more_candidates_are_not_drawn_more_often(lm):
    """One text of each of two lengths is possible, and one length has two of three candidates."""
    template, count, temperature = "x.{{_1-2:a|aa}}.y", 100, 12.0  # at which both are drawn
    filler = filler_of(lm, template)
    jobs = [((length,), 0) for length in filler.lengths[0]]
    (drawn,) = lm._executor.run([filler.draw(filler.gapped, filler.constraints, jobs, greedy=False)])
    lm._executor.run([filler.score(filler.gapped, drawn)])
    assert len(drawn) == 2 and all(candidate.drawn_with == exactly(0) for candidate in drawn)
    short, long = (math.exp(candidate.log_text / temperature) for candidate in drawn)
    options = {"candidates": 3, "temperature": temperature}
    texts = [sample.fills[0] for seed in range(count) for sample in lm.sample(template, 3, seed=seed, **options)]
    p = short / (short + long)
    assert abs(texts.count("a") / len(texts) - p) < 4 * math.sqrt(p * (1 - p) / len(texts))


def test_masked_drawing_alone_is_not_the_conditional_distribution(enumerated, exact_target):
    """The total-variation distance from p(fill | bytes), which the weights make up for."""
    before, after, found = enumerated
    _, log_q, _, target = exact_target
    whole = 0.5 * np.abs(np.exp(log_q) - target).sum()
    at_length = []
    for length in (2, 3):  # p(fill | length, context, bytes) of the model of arbitrary conditionals itself
        ids, followers = found[length], followers_of(found[length])
        log_p = np.array(
            [sum(math.log(next_distribution(before, c[:i], after, length)[t]) for i, t in enumerate(c)) for c in ids]
        )
        p = np.exp(log_p) / np.exp(log_p).sum()
        q = np.exp([drawn_with(before, c, after, followers, Sampling()) for c in ids])
        at_length.append(0.5 * np.abs(p - q).sum())
    print(f"total variation: lengths in turn {whole:.3f}; at a length of 2 {at_length[0]:.3f}, of 3 {at_length[1]:.3f}")
    assert 0.02 < whole < 1
    assert 0.01 < max(at_length) < 0.95


# ---- the best fills -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [TEMPLATE, "a{{_1-6}} x", "{{_}}b", "ab {{_0-5}} ab", "a{{_:[ab]+}}."])
def test_fills_are_distinct_and_in_the_order_of_their_scores(lm, template):
    fills = lm.fill(template, 6, seed=2, max_tokens=8)
    assert len({fill.fills for fill in fills}) == len(fills) > 1
    filled = [fill for fill in fills if any(fill.fills)]
    assert fills[: len(filled)] == filled  # those without text come last
    assert [fill.score for fill in filled] == sorted((fill.score for fill in filled), reverse=True)
    for fill in fills:
        query, (length,) = fill.query, fill.lengths
        start = query.asked_positions[0] - 1 if length else None
        if start is not None:
            given = [position < start for position in range(len(query))]
            score = lm.log_prob(Query(query.tokens, given), future=False).log_prob
            assert fill.score == exactly(score + BONUS * length)


def test_the_best_of_the_likeliest_fills_of_all_lengths_is_found(lm, enumerated):
    before, after, found = enumerated
    expected = {}
    for length in (2, 3):
        ids = ()
        for number in range(length):
            p = next_distribution(before, ids, after, length)
            ids += (max({c[number] for c in found[length] if c[:number] == ids}, key=lambda token: p[token]),)
        expected[ids] = causal(before, ids, after) + BONUS * length
    fills = lm.fill(TEMPLATE, 2, seed=0)
    scores = {tuple(token.id for token in fill.tokens): fill.score for fill in fills}
    assert scores == exactly(expected)


def test_with_enough_candidates_the_best_fill_of_all_is_found(lm, enumerated):
    before, after, found = enumerated
    text = ByteVocabulary.of(lm.tokenizer).decode
    scored = {c: causal(before, c, after) + BONUS * len(c) for ids in found.values() for c in ids}
    best = max((c for c in scored if text(c) != b" xy"), key=scored.__getitem__)
    (fill,) = lm.fill(TEMPLATE, 1, best_of=examples(1000), seed=0)
    assert tuple(token.id for token in fill.tokens) == best and fill.score == exactly(scored[best])


def test_the_search_goes_beyond_short_lengths_if_the_range_asks_for_them(lm):
    for fill in lm.fill("a {{_7-9}} b", 3, seed=0):
        assert 7 <= fill.lengths[0] <= 9 and len(fill.tokens) == fill.lengths[0]


@pytest.mark.parametrize("seed", range(examples(4)))
def test_each_of_several_gaps_is_in_its_range(lm, seed):
    template = "a. {{_2-3}} b. ab x. {{_1-5}} ab. x ab {{_4-4}} y"
    for fill in [*lm.fill(template, 3, seed=seed), *lm.sample(template, 2, seed=seed)]:
        one, two, three = fill.lengths
        assert 2 <= one <= 3 and 1 <= two <= 5 and three == 4
        assert len(fill.tokens) == one + two + three


@pytest.mark.parametrize("template", ["a x{{_3-5}}y b", "{{_3-4}} b. ab x. {{_2-4}} y"])
def test_a_stop_string_cuts_the_text_but_not_the_log_probability(lm, template):
    whole = lm.fill(template, 1, seed=0)[0]
    fill = next(fill for fill in whole.fills if len(fill) > 1)
    (cut,) = lm.fill(template, 1, seed=0, stop=[fill[-1], fill[1]])
    assert cut.fills == tuple(re.split("[" + re.escape(fill[1] + fill[-1]) + "]", each)[0] for each in whole.fills)
    assert cut.fills != whole.fills
    assert cut.text == joined(template, cut.fills)
    assert cut.tokens == whole.tokens and cut.log_prob == whole.log_prob
    assert cut.log_prob == exactly(lm.log_prob(cut.query).log_prob)


def test_a_stop_string_is_encoded_once(lm):
    class Counted(str):
        encoded = 0

        def encode(self, *arguments):
            self.encoded += 1
            return super().encode(*arguments)

    stop = Counted("never")
    lm.fill("ab {{_}}", 3, seed=0, best_of=3, max_tokens=12, stop=[stop])
    assert stop.encoded == 1


def test_fills_of_a_list_are_those_of_each_template_alone(lm):
    """Searches that are run together end after different numbers of waves; some draw at random while others do not."""
    templates = ["a {{_1-2}} b", "a x{{_1-9}}y b", "x{{_:[ab]}}y", "ab {{_}}", "{{_1-3}} b. {{_1-2}} y"]
    for options in ({}, {"best_of": 12}):
        together = lm.fill(templates, 5, seed=3, max_tokens=9, **options)
        for template, fills in zip(templates, together, strict=True):
            alone = lm.fill(template, 5, seed=3, max_tokens=9, **options)
            assert [fill.fills for fill in fills] == [fill.fills for fill in alone]
            assert [fill.score for fill in fills] == exactly([fill.score for fill in alone])


@pytest.mark.parametrize("seed", range(examples(4)))
def test_a_stop_string_ends_the_gap_at_the_end_of_a_text(lm, seed):
    (free,) = lm.sample("ab {{_}}", 1, seed=seed, max_tokens=12)
    stop = next((c for c in free.fills[0][1:] if c.isprintable()), "q")
    (cut,) = lm.sample("ab {{_}}", 1, seed=seed, max_tokens=12, stop=[stop, "never"])
    assert cut.fills == (free.fills[0].partition(stop)[0],)
    assert cut.text == "ab " + cut.fills[0] and len(cut.tokens) <= len(free.tokens)
    assert cut.log_prob == exactly(lm.log_prob(cut.query).log_prob)


@pytest.mark.parametrize("seed", range(examples(6)))
def test_a_stop_string_in_one_of_two_gaps_that_share_tokens_cuts_only_this_one(lm, seed):
    (free,) = lm.sample("a{{_}}b{{_}}", 1, seed=seed, max_tokens=12)
    stop = next((fill[0] for fill in free.fills if fill), "q")
    (cut,) = lm.sample("a{{_}}b{{_}}", 1, seed=seed, max_tokens=12, stop=stop)
    assert cut.fills == tuple(fill.partition(stop)[0] for fill in free.fills)


def test_each_of_two_gaps_that_share_tokens_matches_its_pattern(lm):
    for sample in lm.sample("x{{_2-4:[ab]+}}b{{_:[0-9]+}}y", 8, seed=0, max_tokens=9):
        assert re.fullmatch("[ab]+", sample.fills[0]) and re.fullmatch("[0-9]+", sample.fills[1])


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "ab {{_}}",
        "a{{_}}é. x ab. {{_2-4}} b",
        "a{{_2-3}}b{{_}}x y",
        "{{_}}",
        "a {{_2}} b {{_}}",
        "x{{_:[ab]+}}y",
    ],
)
def test_the_pieces_of_a_stream_are_those_of_its_fill(lm, template, temperature):
    *pieces, last = lm.stream(template, max_tokens=8, temperature=temperature, seed=1)
    assert last.text == "" and last.fill is not None
    assert all(piece.text and piece.fill is None for piece in pieces)
    fills = ["".join(piece.text for piece in pieces if piece.slot == slot) for slot in range(len(last.fill.fills))]
    assert tuple(fills) == last.fill.fills
    assert last.fill.log_prob == exactly(lm.log_prob(last.fill.query).log_prob)
    again = list(lm.stream(template, max_tokens=8, temperature=temperature, seed=1))
    assert [(piece.text, piece.slot) for piece in again] == [(piece.text, piece.slot) for piece in [*pieces, last]]


def test_a_greedy_stream_is_the_likeliest_fill_of_its_length(lm):
    for template in ("a x{{_}}y b", "ab {{_}} ab", "{{_}}. x"):
        *_, last = lm.stream(template, max_tokens=8)
        length = last.fill.lengths[0]
        (fill,) = lm.fill(template.replace("_", f"_{length}-{length}"), 1, seed=0)
        assert fill.fills == last.fill.fills and fill.score == exactly(last.fill.score)


@pytest.mark.parametrize("seed", range(examples(4)))
def test_a_stream_does_not_show_what_a_stop_string_cuts_off(lm, seed):
    *_, free = lm.stream("a x{{_4-6}}y b", temperature=1, seed=seed)
    stop = free.fill.fills[0][1:4] or free.fill.fills[0]
    *pieces, last = lm.stream("a x{{_4-6}}y b", temperature=1, seed=seed, stop=stop)
    assert "".join(piece.text for piece in pieces) == last.fill.fills[0] == free.fill.fills[0].partition(stop)[0]


def test_a_stream_that_ends_by_itself_shows_what_could_have_begun_a_stop_string(lm):
    ends = []
    for seed in range(8):
        *pieces, last = lm.stream("ab {{_1-8:[ab]*}}", temperature=1, seed=seed, stop="never drawn")
        assert "".join(piece.text for piece in pieces) == last.fill.fills[0] != ""
        ends.append(len(last.fill.tokens) < 8)
    assert any(ends)


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 0.0}], ids=str)
def test_one_possible_token_makes_all_fills_of_a_length_the_same_one(lm, option):
    template, options = "a x{{_3-3}}y b", {"temperature": 1.0, "seed": 4, **option}
    (greedy,) = lm.fill(template, 1)
    *_, last = lm.stream(template, **options)
    fills = lm.fill(template, 3, best_of=3, distinct=False, **options)
    assert {fill.text for fill in (last.fill, *fills, *lm.sample(template, 3, **options))} == {greedy.text}
    assert len(fills) == 3 and len(lm.fill(template, 3, best_of=3, **options)) == 1


@pytest.mark.parametrize("future", [True, False])
def test_every_kind_of_fill_reads_the_future_if_it_is_asked_to(lm, future):
    template, options = "a x{{_2-3}}y b", {"future": future, "seed": 1}
    *_, last = lm.stream(template, **options)
    fills = [last.fill, *lm.fill(template, 2, **options), *lm.sample(template, 2, **options)]
    assert {fill.future for fill in fills} == {future}
    for fill in fills:
        assert fill.log_prob == exactly(lm.log_prob(fill.query, future=future).log_prob)


# ---- what cannot be asked, and what is odd --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"stop": ""}, "stop"), ({"stop": ["a", ""]}, "stop"), ({"n": 0}, "n must be"), ({"best_of": 0}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"), ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_options_without_a_meaning_are_refused_by_name(lm, options, problem):
    with pytest.raises(InputError, match=problem):
        lm.fill("a {{_}} b", **options)


@pytest.mark.parametrize(
    ("template", "error", "problem"),
    [
        ("", TemplateError, "no gap"),
        ("a {{_4}}", TemplateError, "no gap"),
        ("a {{?2}}", TemplateError, "no gap"),
        ("a {{_100-200}} b", QueryError, "positions|tokens"),
        ("a" + " a" * POSITIONS + "{{_}}", QueryError, "positions"),
        ("{{_}}" + " a" * POSITIONS, QueryError, "positions"),
        ("a x{{_0-1}}y b", TemplateError, "at least 2 tokens"),
        ("a {{_3-3:b}} b", TemplateError, "no text fits"),
        ("a {{_999999-999999}} b", QueryError, "positions"),
        (r"a {{_1-2:[0-9]{9}}} b", TemplateError, "at least 9 tokens|at least 10 tokens"),
        ("a {{_:(}} b", TemplateError, "pattern"),
        ("a {{_:b)(c}} b", TemplateError, "pattern"),
        (r"a{{_1-2:[0-9]{9}}}", TemplateError, "at least"),
    ],
)  # fmt: skip
def test_gaps_that_cannot_be_filled_are_clear_errors(lm, template, error, problem):
    for ask in (lm.fill, lm.sample) if "{{_" in template and "{{_4" not in template else (lm.fill,):
        with pytest.raises(error, match=problem):
            ask(template)


def test_something_that_is_not_a_template_is_refused(lm):
    for wrong in (5, ["a {{_}}", 5], b"a {{_}}", None):
        with pytest.raises(QueryError, match="must be a string, not"):
            lm.fill(wrong)


def test_a_gap_alone_is_a_text(lm):
    for fill in [*lm.fill("{{_}}", 2, max_tokens=5, seed=0), *lm.sample("{{_}}", 2, max_tokens=5, seed=0)]:
        assert fill.text == fill.fills[0] and len(fill.tokens) <= 5


def test_a_gap_of_no_tokens_leaves_the_text(lm):
    for template in ("{{_0-0}} x", "{{_0-0}}"):
        (fill,) = lm.fill(template, 3, seed=0)
        assert fill.text == template.replace("{{_0-0}}", "") and fill.fills == ("",) and fill.lengths == (0,)


@pytest.mark.parametrize("ask", ["fill", "sample"])
def test_many_gaps_share_the_positions(lm, ask):
    template = "{{_}} a. " * 6
    for fill in getattr(lm, ask)(template, 1, seed=0):
        assert len(fill.query) < POSITIONS and fill.text == joined(template, fill.fills) and len(fill.fills) == 6
    with pytest.raises(QueryError, match="positions"):
        getattr(lm, ask)("{{_}} a. " * 50, 1, seed=0)


def test_text_before_and_after_two_gaps_may_fill_most_of_the_positions(lm):
    template = "a" + " a" * (POSITIONS - 8) + "{{_}} b. ab{{_}}"
    for fill in [*lm.fill(template, 2, seed=0), *lm.sample(template, 2, seed=0)]:
        assert fill.text == joined(template, fill.fills) and len(fill.query) < POSITIONS


def test_fifty_gaps_in_one_text():
    long = tiny_model(vocabulary=len(toy_tokenizer()), width=16, layers=1, positions=400).double()
    lm = LanguageModel(long, toy_tokenizer(), metadata=Metadata(mask_token_id=2))
    template = "{{_0-1}} a." * 50
    (fill,) = lm.fill(template, 1, seed=0)
    assert len(fill.fills) == 50 and fill.text == joined(template, fill.fills)


def test_text_has_what_blanks_next_to_gaps_draw_even_if_it_is_no_text():
    """A blank may draw special tokens and, from a model with more tokens than the tokenizer, ids without a token."""
    more = tiny_model(vocabulary=len(toy_tokenizer()) + 500, width=16, layers=1, scale=0.1).double()
    lm, template, seen = LanguageModel(more, toy_tokenizer(), metadata=Metadata()), "ab.{{_3}}{{_1-2}} x.{{_2}}", set()
    for result in [*lm.fill(template, 4, seed=0), *lm.sample(template, 20, seed=0)]:
        if all(text.isascii() for text in result.fills):
            assert result.text == joined(template, result.fills)
        seen.update(token.id for token in result.tokens if token.id < 3 or token.id >= len(toy_tokenizer()))
    assert seen


@pytest.mark.parametrize("method", ["mlm", "diffusion", "sigma-gpt-random"])
def test_methods_that_cannot_draw_under_constraints_say_so(method):
    lm = model_of(method)
    with pytest.raises(QueryError, match=f"method {method} cannot fill gaps"):
        lm.fill("The cat {{_}} on")


@pytest.mark.parametrize(
    "ask",
    [
        lambda lm: lm.fill("a {{_1-2}} b", 1),
        lambda lm: lm.fill(["a {{_1-2}} b", "x {{_1-2}} y {{_1-1}} b"], 1),
        lambda lm: lm.infill("a ", " b", max_tokens=2),
        lambda lm: lm.sample("a {{_1-2}} b", candidates=2),
        lambda lm: list(lm.stream("a {{_1-2}} b")),
        lambda lm: lm.sample("a {{_2}} b"),
        lambda lm: lm.log_prob("a {{x}} b"),
    ],
)
def test_the_warning_of_an_ignored_future_points_at_the_line_of_the_caller(ask):
    plain = LanguageModel(network(0), toy_tokenizer())
    with pytest.warns(FutureIgnored) as caught:
        ask(plain)
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, ask.__code__.co_firstlineno)


# ---- unknown tokens -------------------------------------------------------------------------------------------------


def test_unknown_tokens_are_those_of_a_query_built_by_hand(lm):
    ids = toy_tokenizer()
    before, asked, after = (ids(text)["input_ids"] for text in ("x", " ab", "."))
    query = Query(
        [*before, None, None, None, *asked, *after],
        [True] * len(before) + [False] * (3 + len(asked)) + [True] * len(after),
        [False] * (len(before) + 3) + [True] * len(asked) + [False] * len(after),
    )
    assert lm.query("x{{?3}}{{ ab}}.") == query
    assert lm.log_prob("x{{?3}}{{ ab}}.").log_prob == exactly(lm.log_prob(query).log_prob)
    (sample,) = lm.sample("x{{?3}} {{_2}}.", 1, seed=0)
    assert [given for given in sample.query.given] == [True, False, False, False, False, False, True]
    fill = lm.fill("x{{?3}} {{_1-2}}.", 1, seed=0)[0]
    assert fill.log_prob == exactly(lm.log_prob(fill.query).log_prob)
    assert fill.query.tokens[1:4] == (None,) * 3


def test_a_gap_of_no_tokens_may_be_next_to_unknown_tokens(lm):
    for fill in [
        *lm.fill("{{?2}}{{_0-0}} x", 1),
        *lm.sample("{{?2}}{{_0-0}} x", 1),
        [*lm.stream("{{?2}}{{_0-0}} x")][-1].fill,
    ]:
        assert fill.fills == ("", "") and fill.text == " x" and fill.lengths == (0,)


@pytest.mark.parametrize("ask", ["log_prob", "sample", "fill"])
def test_unknown_tokens_need_a_mask(ask):
    plain = LanguageModel(network(0), toy_tokenizer(), metadata=Metadata())
    with pytest.raises(QueryError, match="MASK"):
        getattr(plain, ask)("x{{?3}} " + {"log_prob": "{{ab}}", "sample": "{{_2}}", "fill": "{{_1-2}}"}[ask] + ".")


# ---- guides ---------------------------------------------------------------------------------------------------------


class Multiples:
    """Allows tokens of which the sum with those before is a multiple of a number, or not."""

    def __init__(self, number, vocabulary=50):
        self.number, self.total, self.ids = number, 0, np.arange(vocabulary)

    def allowed(self):
        return (self.ids + self.total) % self.number == 0

    def advance(self, token):
        self.total += token


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.9, top_p=0.95, seed=5), Sampling(temperature=0)])
def test_rows_with_and_without_guides_draw_in_one_batch_what_they_draw_alone(sampling):
    model = tiny_model().double()
    check_model(model)
    engine = Engine(model, bos=0, mask=1, backend="dense", budget=1000)
    queries = [random_query(number, 6 + 3 * number) for number in range(6)]
    numbers = [None, 3, None, 2, 7, None]

    def drawn(members, late=()):
        decoding = Decoding(engine, sampling)
        rows = []
        for group in (members, late):
            guides = [None if numbers[i] is None else Multiples(numbers[i]) for i in group]
            rows += decoding.prefill([queries[i] for i in group], [i for i in group], guides=guides)
        while any(not row.done for row in decoding.rows):
            decoding.step()
        return rows

    for row, number in zip(drawn([0, 1, 2], [3, 4, 5]), range(6), strict=True):
        (alone,) = drawn([number])
        assert [token[:2] for token in row.drawn] == [token[:2] for token in alone.drawn]
        assert [token[2] for token in row.drawn] == exactly([token[2] for token in alone.drawn])
        assert row.drawn_with == exactly(alone.drawn_with)
        if numbers[number] is not None:
            totals = np.cumsum([token for _, token, _ in row.drawn])
            assert (totals % numbers[number] == 0).all() and len(row.drawn_with) == len(row.drawn)
        else:
            assert row.drawn_with == []


def test_without_guides_constrained_and_unconstrained_decoding_agree():
    """A guide that allows everything changes nothing."""
    model = tiny_model().double()
    check_model(model)
    engine, query = Engine(model, bos=0, mask=1, backend="dense", budget=1000), Query([None] * 6, [False] * 6)
    rows = []
    for guide in (None, Multiples(1)):
        decoding = Decoding(engine, Sampling(temperature=0.8, seed=1))
        rows += decoding.prefill([query], guides=[guide])
        while not rows[-1].done:
            decoding.step()
    assert [token[:2] for token in rows[0].drawn] == [token[:2] for token in rows[1].drawn]


def test_a_fill_that_a_stop_string_empties_comes_after_those_with_text(lm):
    fills = lm.fill("a {{_1-4}} b", 30, seed=0, best_of=30, stop="a")
    texts = [fill.fills[0] for fill in fills]
    assert any(texts) and "" in texts
    assert texts.index("") == len(texts) - 1


def test_samples_of_few_candidates_have_all_lengths(lm):
    drawn = (lm.sample("a {{_0-20}} b", 1, seed=seed, candidates=2)[0].lengths[0] for seed in range(60))
    assert any(length > 3 for length in drawn)


def test_more_candidates_are_new_ones(lm):
    fills = lm.fill("a {{_4-4}} b", 40, seed=0, best_of=20, distinct=False)
    assert len(fills) == 40
    requests, searches = [], lm.searches

    def watched(search):
        answer = None
        while True:
            try:
                requests.append(search.send(answer))
            except StopIteration as end:
                return end.value
            answer = yield requests[-1]

    searches.executor.run([watched(searches.fill(FillAsk("a {{_1-1}} b", 12, seed=0)))])
    drawn = [request for request in requests if isinstance(request, Rows) and request.sampling.temperature]
    samples = [(query, sample) for request in drawn for query, _, sample, _ in request.rows]
    assert len(drawn) > 1 and len(set(samples)) == len(samples)
    assert len({tuple(token.id for token in fill.tokens) for fill in fills}) > 30


def test_a_tokenizer_is_freed_with_its_constraints():
    tokenizer = copy.deepcopy(toy_tokenizer())
    LanguageModel(network(0), tokenizer, metadata=Metadata(mask_token_id=2)).fill("a {{_}} b", 1, max_tokens=3)
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None


def test_what_all_constraints_share_is_made_once_however_many_there_are(monkeypatch):
    vocabulary = ByteVocabulary.of(copy.deepcopy(toy_tokenizer()))
    table = constraint_of(vocabulary, (b"a", b"b")).table
    monkeypatch.setattr("acgpt.models.region.MOST_BYTES", 10 * constraint_of(vocabulary, (b"0", b"")).nbytes)
    for number in range(60):
        literals = constraint_of(vocabulary, (str(number).encode(), b""))
        assert literals.table is table and literals.lengths(3)  # it grows as it is used
    assert 1 < len(vocabulary.cache) < 10


def test_threads_make_constraints_at_the_same_time(monkeypatch):
    vocabulary = ByteVocabulary.of(copy.deepcopy(toy_tokenizer()))
    monkeypatch.setattr("acgpt.models.region.MOST_BYTES", 20 * constraint_of(vocabulary, (b"0", b"")).nbytes)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda n: constraint_of(vocabulary, (str(n % 50).encode(), b"")), range(300)))
    finally:
        sys.setswitchinterval(interval)
    assert len(made) == 300 and 1 < len(vocabulary.cache) <= 20
    newest = next(reversed(vocabulary.cache))
    assert constraint_of(vocabulary, *newest) is constraint_of(vocabulary, *newest)


def test_constraints_know_tokens_that_were_added_later():
    tokenizer = copy.deepcopy(toy_tokenizer())
    before = constraint_of(ByteVocabulary.of(tokenizer), (b"a", b"b")).table.size
    tokenizer.add_tokens(["zz"])
    assert constraint_of(ByteVocabulary.of(tokenizer), (b"a", b"b")).table.size == before + 1


def test_too_many_gaps_next_to_each_other_are_refused(lm):
    with pytest.raises(TemplateError, match="gaps have too little text between them"):
        lm.fill("a" + "{{_}}" * 60 + "b", 1)


def test_no_more_candidates_are_drawn_once_there_are_no_new_ones(lm, monkeypatch):
    pytest.importorskip("outlines_core")
    passes, real = [], FillBySearch.score

    def score(self, gapped, candidates):
        passes.append(len(candidates))
        return (yield from real(self, gapped, candidates))

    monkeypatch.setattr(FillBySearch, "score", score)
    assert [fill.fills for fill in lm.fill("x {{_1-1:(?:a|b)}} y", 1)] and len(passes) == 1
    passes.clear()
    assert len(lm.fill("x {{_1-1:a}} y", 5)) == 1  # there is no other text
    assert passes == [1, 4]
