"""Passages of training texts and the gaps in them: how many tokens, and where."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fuzz import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import toy_tokenizer

from acgpt.data.tokenizer import load
from acgpt.query import passages
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN, Conditioning, Gaps, generator
from acgpt.query.gaps import encode_gaps
from acgpt.query.passages import (
    DOCUMENT_END,
    LINE_END,
    SENTENCE_END,
    SHORTEST,
    SPACE_END,
    SPACED,
    WORD,
    Starts,
    draw_gap,
    draw_passages,
    healed,
    token_kinds,
)
from acgpt.query.template import escape, parse

KINDS = np.array([0, 0, 0, WORD, WORD, WORD, LINE_END, SENTENCE_END, WORD | SENTENCE_END, DOCUMENT_END], dtype=np.uint8)


def random_kinds(seed, length):
    return KINDS[np.random.default_rng(seed).integers(len(KINDS), size=length)]


@given(seed=st.integers(0, 10**6), length=st.integers(1, 120), count=st.integers(1, 12), share=st.floats(0, 1))
@settings(max_examples=examples(60), deadline=None)
def test_passages_are_the_text_and_gaps_have_as_many_tokens_as_were_asked_for(seed, length, count, share):
    asked = int(share * (length - 1))
    passages = draw_passages(random_kinds(seed, length), count, asked, np.random.default_rng(seed))
    assert [passages[0].start, *(p.end for p in passages)] == [*(p.start for p in passages), length]
    assert 1 <= len(passages) <= count and all(p.end - p.start >= min(SHORTEST, length) for p in passages)
    assert sum(size for passage in passages for _, size in passage.gaps) == asked
    for passage in passages:
        ends = [passage.start - 1]
        for first, size in passage.gaps:
            assert ends[-1] < first or (first == passage.start and len(ends) == 1)  # a token between two gaps
            assert first + size <= passage.end
            ends.append(first + size)


def test_the_same_generator_gives_the_same_passages():
    kinds = random_kinds(1, 200)
    assert draw_passages(kinds, 6, 70, generator(1, 2, 3)) == draw_passages(kinds, 6, 70, generator(1, 2, 3))
    assert draw_passages(kinds, 6, 70, generator(1, 2, 3)) != draw_passages(kinds, 6, 70, generator(1, 2, 4))


def surprise(pairs):
    """Return the mean of -log p(second | first) in nats, each pair predicted from the counts of all others."""
    both, firsts = Counter(pairs), Counter(first for first, _ in pairs)
    classes = len({second for _, second in pairs})
    return np.mean([
        -np.log((both[pair] - 1 + 0.5) / (firsts[pair[0]] - 1 + 0.5 * classes)) for pair in pairs
    ])  # fmt: skip


@pytest.mark.parametrize("passages", [1, 6])
def test_what_is_missing_of_a_text_does_not_tell_how_long_a_gap_is(passages):
    """A text has a fixed number of tokens. If all of it were shown, those that are missing would be in the gap."""
    conditioning, pairs = Conditioning((Gaps(r_min=0.5, r_max=0.95, lengths=1.0, passages=passages),)), []
    for item in range(400):
        draw = conditioning.draw(random_kinds(item, 256), generator(0, 0, item))
        for passage, question in zip(draw.passages, draw.questions, strict=True):
            if question is not None:
                lengths = [size for _, size in passage.gaps]
                shown = passage.end - passage.start - sum(lengths[question:])  # with gaps of known length
                pairs.append((256 - shown, min(lengths[question], 8)))
    missing, lengths = zip(*pairs, strict=True)
    shuffled = list(zip(np.random.default_rng(0).permutation(missing).tolist(), lengths, strict=True))
    assert surprise(pairs) > surprise(shuffled) - 0.1  # nats


@pytest.mark.parametrize("passages", [1, 6])
def test_many_questions_have_one_gap_in_a_long_text(passages):
    conditioning, alone = Conditioning((Gaps(r_min=0.6, r_max=0.97, lengths=1.0, passages=passages),)), []
    for item in range(60):
        draw = conditioning.draw(random_kinds(item, 400), generator(0, 0, item))
        (_,), (size,) = conditioning.sizes(400, generator(0, 0, item).random((1, 2)))
        questions = zip(draw.passages, draw.questions, strict=True)
        asked = [passage for passage, question in questions if question is not None]
        alone += [len(passage.gaps) == 1 for passage in asked]
        shown = sum(passage.end - passage.start - sum(n for _, n in passage.gaps) for passage in asked)
        assert shown <= size  # a batch has no room for more copies
    assert np.mean(alone) > 0.25


def test_passages_begin_with_documents_if_there_are_some():
    kinds = np.zeros(100, dtype=np.uint8)
    kinds[[29, 59]], kinds[[15, 45, 75]] = DOCUMENT_END, SENTENCE_END
    passages = draw_passages(kinds, 3, 5, np.random.default_rng(0))
    assert [passage.start for passage in passages] == [0, 30, 60]


def test_gaps_lie_at_both_ends_inside_and_can_be_empty():
    places = {"start": 0, "end": 0, "inside": 0, "empty": 0}
    for seed in range(200):
        kinds = random_kinds(seed, 60)
        for passage in draw_passages(kinds, 4, 15, np.random.default_rng(seed)):
            for first, size in passage.gaps:
                places["empty"] += not size
                places["start"] += first == passage.start
                places["end"] += first + size == passage.end
                places["inside"] += passage.start < first and first + size < passage.end
    assert all(count >= 5 for count in places.values()), places


def test_a_gap_of_words_begins_and_ends_between_words():
    rng, kinds = np.random.default_rng(0), np.tile(np.array([WORD, 0, 0], dtype=np.uint8), 40)
    starts = Starts.of(kinds)
    borders = set(np.flatnonzero(starts.words)) | {120}
    places = starts.inside(0, 120)
    drawn = [draw_gap(places, 0, 120, rng, at_an_end=True) for _ in range(400)]
    exact = [all(edge in borders for edge in gap) for gap in drawn]
    assert sum(exact) > 250  # the others are random gaps, and gaps that were moved to an end


def test_token_kinds_are_those_of_the_tokens_text():
    tokenizer = toy_tokenizer()
    kinds = token_kinds(tokenizer)
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in ("Ġx", "Ġ", "x", "Ċ", ".", "<eos>", "<mask>")}
    assert {text: int(kinds[i]) for text, i in ids.items()} == {
        "Ġx": WORD | SPACED, "Ġ": WORD | SPACE_END, "x": 0, "Ċ": WORD | LINE_END | SPACE_END, ".": SENTENCE_END,
        "<eos>": DOCUMENT_END, "<mask>": 0,
    }  # fmt: skip


def test_gaps_take_in_the_tokens_that_healing_would():
    """Words, phrases and lines of code, left out as users do: the tokens that `query.gaps` generates again."""
    tokenizer, rng, counts = load("default", mask_token=False), np.random.default_rng(0), Counter()
    kinds = token_kinds(tokenizer)
    text = Path(passages.__file__).read_text(encoding="utf-8")
    for found in re.finditer(r"(?<![A-Za-z])[A-Za-z]+( [a-z]+)?(?![A-Za-z])|(?<=\n)[^\n]+\n", text):
        if rng.random() > 0.25 or not 300 < found.start() < len(text) - 600:
            continue
        part, start = text[found.start() - 300 : found.end() + 300], 300
        encoded = tokenizer(part, return_offsets_mapping=True, add_special_tokens=False)
        template = escape(part[:start], before_slot=True) + "{{_}}" + escape(part[start + len(found.group()) :])
        gapped = encode_gaps(parse(template), tokenizer)
        generated = gapped.regions[0].at, len(encoded["input_ids"]) - len(gapped.tokens)
        content = start + len(found.group()) - len(found.group().lstrip()), start + len(found.group().rstrip())
        inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < content[1] and b > content[0]]
        size = len(encoded["input_ids"])
        first, after = healed(kinds[encoded["input_ids"]], inside[0], inside[-1] + 1, 0, size, Never())
        counts[generated == (first, after - first)] += 1
    assert counts[True] > 60 and counts[True] > 8 * counts[False], counts


class Never:
    """A source of randomness for which nothing rare happens."""

    def random(self, size):
        return np.ones(size)


# ---- as a part of a conditioning distribution ------------------------------------------------------------------------


def test_the_part_survives_being_written_and_read():
    content = {"parts": [{"kind": "gaps", "weight": 2, "passages": 5, "lengths": 0.4}, {"kind": "empty"}]}
    conditioning = Conditioning.from_dict(content)
    assert Conditioning.from_dict(conditioning.as_dict()) == conditioning
    assert conditioning.asks_lengths and conditioning.passages == (5, 1)
    assert not Conditioning.from_dict({"parts": [{"kind": "gaps"}]}).asks_lengths


@pytest.mark.parametrize("seed", range(examples(10)))
def test_given_tokens_are_as_many_as_foreseen_and_gaps_hold_the_rest(seed):
    conditioning = Conditioning((Gaps(r_min=0.4, r_max=0.9, passages=4, unknown=0.3),))
    kinds = random_kinds(seed, 64)
    draw = conditioning.draw(kinds, generator(7, 0, seed))
    (_,), (size,) = conditioning.sizes(64, generator(7, 0, seed).random((1, 2)))
    assert (draw.roles == GIVEN).sum() == size
    inside = np.zeros(64, dtype=bool)
    for passage in draw.passages:
        for first, count in passage.gaps:
            inside[first : first + count] = True
    assert (inside == np.isin(draw.roles, [ASKED, UNKNOWN])).all()
    assert len(draw.questions) == len(draw.passages)
    for passage, question in zip(draw.passages, draw.questions, strict=True):
        assert question is None or 0 <= question < len(passage.gaps)
