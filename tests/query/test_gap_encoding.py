"""Gaps at any character: what is kept, what is generated again, and that the two make up the text."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence

import pytest
from fuzz import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from acgpt.data.tokenizer import named
from acgpt.errors import QueryError
from acgpt.query.constraint import DEAD, Constraint, TokenTable
from acgpt.query.gaps import Gapped, Region, encode_gaps, has_gaps
from acgpt.query.template import Gap, Given, Part, Slot, parse
from acgpt.query.text import encode_text
from acgpt.query.vocabulary import ByteVocabulary

TEXTS = [
    "The capital of France is Paris. They're sure, aren't they? I've heard it's so; WE'LL see.",
    "def f(x, y=10):\n    if x:\n        return x + y  # a comment\n\n\n    return [x, y][0]\n",
    "自然言語処理は、人間が日常的に使っている。 naïve café, Москва 👩‍👩‍👧 family 🎉🎉!!!",
    "3.14159265358979, 1234567890 and 2024-01-31; a  b   c    d\t\te \n f\n\n  g   \n",
]
KINDS = ["gpt2", "default", "sentencepiece"]


@pytest.fixture(scope="session", params=KINDS)
def any_kind(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """GPT-2's tokenizer, the default one of acgpt, and a small SentencePiece one."""
    return request.getfixturevalue("llama_legacy") if request.param == "sentencepiece" else named(request.param)


@functools.cache
def table(tokenizer: PreTrainedTokenizerBase) -> TokenTable:
    return TokenTable(ByteVocabulary.of(tokenizer).tokens)


def template_of(text: str, rng: random.Random, count: int) -> tuple[list[Part], list[str]]:
    """Return the text with `count` random spans cut out, and these."""
    offsets = sorted(rng.randrange(len(text) + 1) for _ in range(2 * count))
    parts: list[Part] = []
    fills, last = [], 0
    for first, end in zip(offsets[::2], offsets[1::2], strict=True):
        parts += [Given(text[last:first])] if last < first else []
        parts.append(Slot((), None, 0, gap=Gap()))
        fills.append(text[first:end])
        last = end
    parts += [Given(text[last:])] if last < len(text) else []
    return parts, fills


def region_texts(gapped: Gapped, fills: Sequence[str]) -> list[bytes]:
    """Return the bytes of each region, with these fills in its gaps."""
    return [
        b"".join(
            a + b for a, b in zip(region.literals, [*(fills[slot].encode() for slot in region.slots), b""], strict=True)
        )
        for region in gapped.regions
    ]


def pieces(gapped: Gapped, tokenizer: PreTrainedTokenizerBase, fills: Sequence[str]) -> list[tuple[bytes, int | None]]:
    """Return the bytes of kept tokens and of regions, from left to right, with the number of the region."""
    vocabulary, texts = ByteVocabulary.of(tokenizer), region_texts(gapped, fills)
    result: list[tuple[bytes, int | None]] = []
    for index in range(len(gapped.tokens) + 1):
        result += [(texts[n], n) for n, region in enumerate(gapped.regions) if region.at == index]
        if index < len(gapped.tokens):
            token = gapped.tokens[index]
            assert token is not None and gapped.given[index] and not gapped.asked[index]
            result.append((vocabulary.decode([token]), None))
    return result


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_the_whole_text_are_kept_ones_and_ones_that_the_constraints_accept(
    text: str, count: int, any_kind: PreTrainedTokenizerBase
) -> None:
    vocabulary = ByteVocabulary.of(any_kind)
    whole, rng = encode_text(text, any_kind), random.Random(f"{count} {text}")
    offsets = {len(vocabulary.decode(whole[:i])): i for i in range(len(whole) + 1)}
    for _ in range(examples(2)):
        parts, fills = template_of(text, rng, count)
        gapped = encode_gaps(parts, any_kind)
        tokens, at = iter(gapped.tokens), 0
        for data, number in pieces(gapped, any_kind, fills):
            assert at in offsets and at + len(data) in offsets
            ids = whole[offsets[at] : offsets[at + len(data)]]
            if number is None:
                assert ids == [next(tokens)]
            else:
                region = gapped.regions[number]
                constraint = Constraint(table(any_kind), region.literals)
                state = constraint.start
                for left, token in zip(range(len(ids), 0, -1), ids, strict=True):
                    assert constraint.allowed(state, left)[token]
                    state = constraint.advance(state, token)
                assert state != DEAD and constraint.accepts(state)
                found = region.fills(vocabulary.decode(ids))
                assert len(region.slots) > 1 or found == [fills[slot] for slot in region.slots]
            at += len(data)
        assert at == max(offsets) and [slot for region in gapped.regions for slot in region.slots] == [*range(count)]


def test_gaps_share_a_region_only_if_no_token_between_them_is_kept(any_kind: PreTrainedTokenizerBase) -> None:
    for template, between in (("The m{{_}}u{{_}}ing.", b"u"), ("The{{_}}{{_}} end", b"")):
        (region,) = encode_gaps(parse(template), any_kind).regions
        assert region.slots == (0, 1) and region.literals[1] == between
    far = encode_gaps(parse("The m{{_}} sat on the mat and then the dog sat on it and pur{{_}}ing."), any_kind)
    assert [region.slots for region in far.regions] == [(0,), (1,)]
    assert far.regions[0].at < far.regions[1].at


def test_what_gpt2_keeps_next_to_a_gap() -> None:
    gpt2 = named("gpt2")
    gapped = encode_gaps(parse("The cat sat on the m{{_}}, pur{{_}}ing."), gpt2)
    assert gapped.regions == (Region(5, (0, 1), (Gap(), Gap()), (b" m", b", pur", b"ing")),)
    assert gpt2.decode([token for token in gapped.tokens if token is not None]) == "The cat sat on the."
    gapped = encode_gaps(parse("The cat {{_}} sat."), gpt2)
    assert gapped.regions == (Region(2, (0,), (Gap(),), (b" ", b"")),)
    assert gapped.tokens == tuple(encode_text("The cat sat.", gpt2))


def test_regions_add_up_what_their_gaps_ask_for() -> None:
    gpt2 = named("gpt2")
    (region,) = encode_gaps(parse("a{{_2-3}}b{{_1-4}}c"), gpt2).regions
    assert (region.least, region.most) == (3, 7)
    (region,) = encode_gaps(parse("a{{_2-3}}b{{_}}c"), gpt2).regions
    assert (region.least, region.most) == (2, None)


# ---- other slots next to gaps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "The {{cat}}{{_}} sat on the mat.",
        "The {{_}}{{cat}} sat on the mat.",
        "The cat{{_}} {{sat}} on{{_}} the mat.",
        "The {{c}}a{{_}}{{t}}s{{_}} sat on the mat.",
        "The {{cat }}{{_}}{{ sat}} on the mat.",
        "The c{{_}}a{{t}} sat on the mat.",
        "The {{_2}}{{_}} sat on the mat.",
        "The cat {{_}}{{_2}} on the mat.",
        "The cat {{_}} on {{_2}} the {{mat}}{{_}}.",
        "The {{?2}}{{_}} sat on the mat.",
        "The cat {{_}}{{?3}} on the mat.",
        "{{?1}}{{_}}{{_1}}",
        "{{_}}{{cat}}{{_}}",
        "{{_1}}{{_}}{{_1}} dog",
    ],
)
def test_slots_next_to_gaps_keep_their_tokens_and_roles(template: str, any_kind: PreTrainedTokenizerBase) -> None:
    vocabulary, parts = ByteVocabulary.of(any_kind), parse(template)
    slots = [part for part in parts if isinstance(part, Slot)]
    gapped = encode_gaps(parts, any_kind)
    lengths = [2 + number for number in range(len(gapped.regions))]
    encoded = gapped.encoded(lengths)
    query = encoded.query
    assert len(query) == len(gapped.tokens) + sum(lengths)
    for slot, (first, last) in zip(slots, encoded.slots, strict=True):
        roles = set(zip(query.given[first - 1 : last], query.asked[first - 1 : last], strict=True))
        tokens = query.tokens[first - 1 : last]
        if slot.gap is not None:
            assert roles == {(False, True)} and set(tokens) == {None}
        elif slot.unknown is not None:
            assert len(tokens) == slot.unknown and roles == {(False, False)} and set(tokens) == {None}
        elif slot.blank is not None:
            assert len(tokens) == slot.blank and roles == {(False, True)} and set(tokens) == {None}
        else:
            written = vocabulary.decode([t for t in tokens if t is not None])
            assert roles == {(False, True)} and slot.alternatives[0].strip().encode() in written
    asked = sum(query.asked)
    unknown = sum(slot.unknown or 0 for slot in slots)
    assert sum(query.given) + asked + unknown == len(query)
    # All given text is in the given and asked tokens and in the literals, except spaces that belong to a blank.
    texts = region_texts(gapped, [""] * len(slots))
    joined = b""
    for index in range(len(gapped.tokens) + 1):
        joined += b"".join(texts[n] for n, region in enumerate(gapped.regions) if region.at == index)
        if index < len(gapped.tokens) and (token := gapped.tokens[index]) is not None:
            joined += vocabulary.decode([token])
    expected = "".join(part.text if isinstance(part, Given) else "".join(part.alternatives) for part in parts)
    assert re.sub(rb"\s", b"", joined) == re.sub(r"\s", "", expected).encode()


def test_an_encoding_without_asked_tokens_is_refused() -> None:
    gapped = encode_gaps(parse("The cat {{_}} sat."), named("gpt2"))
    with pytest.raises(QueryError, match="0 tokens"):
        gapped.encoded([0])


def test_only_gaps_are_gaps_and_only_one_at_the_very_end_is_open_ended() -> None:
    assert has_gaps(parse("a{{_}}")) and has_gaps(parse("{{_1-2}}{{b}}"))
    assert not has_gaps(parse("{{_4}} {{?2}} {{a|b}} c"))
    gpt2 = named("gpt2")
    assert encode_gaps(parse("The cat {{_}}"), gpt2).open_ended
    assert encode_gaps(parse("{{_}}"), gpt2).open_ended
    for template in ("The cat {{_}}.", "The cat {{_}}{{_2}}", "{{_}} cat", "{{_}}{{?1}}"):
        assert not encode_gaps(parse(template), gpt2).open_ended


# ---- fills ----------------------------------------------------------------------------------------------------------

short = st.text("abé ", max_size=3)


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(st.tuples(short, short), min_size=1, max_size=3), short)
def test_the_fills_of_a_region_are_those_that_were_put_in(pairs: list[tuple[str, str]], last: str) -> None:
    literals, fills = [*(literal for literal, _ in pairs), last], [fill for _, fill in pairs]
    region = Region(0, tuple(range(len(fills))), (Gap(),) * len(fills), tuple(text.encode() for text in literals))
    text = "".join(a + b for a, b in zip(literals, [*fills, ""], strict=True))
    found = region.fills(text.encode())
    assert "".join(a + b for a, b in zip(literals, [*found, ""], strict=True)) == text
    if len(fills) == 1:
        assert found == fills
    # A literal between two gaps is found where it occurs first.
    shortest = re.fullmatch("(?s:.*?)".join(map(re.escape, literals)).replace("(?s:.*?)", "((?s:.*?))"), text)
    assert shortest is not None and found == list(shortest.groups())


def test_each_gap_of_a_region_matches_its_pattern() -> None:
    pytest.importorskip("outlines_core")
    region = Region(0, (0, 1), (Gap(pattern="[ab]+"), Gap(pattern="[0-9]+")), (b"x", b"b", b"y"))
    assert region.fills(b"xabb12y") == ["ab", "12"]
    assert region.fills(b"xbb1y") == ["b", "1"]
    region = Region(0, (0, 1), (Gap(pattern="a*"), Gap(pattern="[ab]{2}")), (b"", b"", b""))
    assert region.fills(b"aaaab") == ["aaa", "ab"]
