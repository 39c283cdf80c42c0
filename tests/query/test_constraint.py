"""Constraints on the text of a gap, against the enumeration of all token sequences and Python's `re`."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from fuzz import examples

from acgpt.errors import InputError
from acgpt.query.constraint import DEAD, Constraint, TokenTable, compiled, pattern_matches

LONGEST = 4  # tokens of a text

# Tokens that are halves of characters: "é" is C3 A9, "à" C3 A0, "中" E4 B8 AD, "🎉" F0 9F 8E 89.
LETTERS: list[bytes | None] = [b"a", b"b", b"ab", b"ba", None]
ACCENTS: list[bytes | None] = [b"a", "é".encode(), b"\xc3", b"\xa9", b"\xa9a", b"a\xc3", b""]
MIXED: list[bytes | None] = [
    None,
    b"x",
    "🎉".encode()[:2],
    "🎉".encode()[2:],
    "🎉x".encode()[1:],
    b"\xf0",
    "é".encode(),
]
BROKEN: list[bytes | None] = [b"\xff", b"\xed\xa0", b"\x80", b"\xe0", b"\xa0", b"a", b"\xc0"]  # mostly not UTF-8
VOCABULARIES = {"letters": LETTERS, "accents": ACCENTS, "mixed": MIXED, "broken": BROKEN}

LITERALS: dict[str, list[str]] = {
    "letters": ["", "", "a", "b", "ab", "aa", "aba"],
    "accents": ["", "", "a", "é", "aé", "éa", "éé"],
    "mixed": ["", "", "x", "🎉", "é", "x🎉", "xé"],
    "broken": ["", "a", "aa", "\u0800", "a\u0820"],
}


def matches(data: bytes, expression: str) -> bool:
    """Return whether bytes are a text that matches a regular expression as a whole."""
    try:
        return re.fullmatch(expression, data.decode(), re.DOTALL) is not None
    except UnicodeDecodeError:
        return False


def sequences(tokens: Sequence[bytes | None], most: int = LONGEST) -> list[tuple[int, ...]]:
    """Return all sequences of tokens that have bytes."""
    ids = [number for number, token in enumerate(tokens) if token]
    return [choice for size in range(most + 1) for choice in product(ids, repeat=size)]


def check_by_enumeration(constraint: Constraint, tokens: Sequence[bytes | None], expression: str) -> int:
    """Compare a constraint with an expression on all sequences of up to `LONGEST` tokens; return how many match."""
    everything = sequences(tokens)
    good = {ids for ids in everything if matches(b"".join(tokens[i] or b"" for i in ids), expression)}
    states: dict[tuple[int, ...], int] = {(): constraint.start}
    for ids in everything[1:]:
        before = states[ids[:-1]]
        states[ids] = DEAD if before == DEAD else constraint.advance(before, ids[-1])
    assert {ids for ids, state in states.items() if state != DEAD and constraint.accepts(state)} == good

    assert constraint.lengths(LONGEST) == sorted({len(ids) for ids in good})
    next_tokens: dict[tuple[tuple[int, ...], int], set[int]] = {}  # by sequence and number of tokens that follow it
    for ids in good:
        for size in range(len(ids)):
            next_tokens.setdefault((ids[:size], len(ids) - size), set()).add(ids[size])
    for ids, state in states.items():
        for left in range(1, LONGEST - len(ids) + 1):
            expected = next_tokens.get((ids, left), set())
            if state == DEAD:
                assert not expected
            else:
                allowed = constraint.allowed(state, left)
                assert allowed.shape == (len(tokens),) and allowed.dtype == np.bool_
                assert set(np.flatnonzero(allowed).tolist()) == expected
                assert constraint.possible(left, state) == bool(expected)
    return len(good)


# ---- literals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(examples(6)))
@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_literals_accept_exactly_the_texts_that_have_them_in_order(name: str, count: int, seed: int) -> None:
    rng = random.Random(f"{name} {count} {seed}")
    literals = [rng.choice(LITERALS[name]) for _ in range(count)]
    constraint = Constraint(TokenTable(VOCABULARIES[name]), [literal.encode() for literal in literals])
    check_by_enumeration(constraint, VOCABULARIES[name], ".*".join(map(re.escape, literals)))


def test_answers_do_not_depend_on_the_order_of_the_questions() -> None:
    """A constraint keeps what it has computed."""
    table, literals = TokenTable(LETTERS), [b"a", b"ba"]
    questions = [(left, tokens) for left in range(1, 5) for tokens in product([0, 1, 2, 3], repeat=2)]

    def answers(order: list[tuple[int, tuple[int, ...]]]) -> dict[tuple[int, tuple[int, ...]], list[bool]]:
        constraint, result = Constraint(table, literals), {}
        for left, tokens in order:
            state = constraint.start
            for token in tokens:
                state = DEAD if state == DEAD else constraint.advance(state, token)
            result[left, tokens] = [] if state == DEAD else constraint.allowed(state, left).tolist()
        return result

    assert answers(questions) == answers(questions[::-1])


def test_long_literals_make_few_states() -> None:
    """The bytes of a long text between two gaps, as the given text of a program may be."""
    literals = [b"x" * 80, ("ab" * 64).encode(), ("y" * 40 + "é").encode()]
    constraint = Constraint(TokenTable([*(bytes([byte]) for byte in range(256)), b"x" * 8, b"ab" * 8]), literals)
    assert len(constraint.transitions) < 4 * sum(map(len, literals))
    assert constraint.possible(10 + 8 + 42) and not constraint.possible(10 + 8 + 41)


# ---- patterns -------------------------------------------------------------------------------------------------------

needs_outlines = pytest.mark.skipif(
    importlib.util.find_spec("outlines_core") is None, reason="patterns need the package outlines-core"
)


@needs_outlines
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("letters", "[a-z]+"),
        ("letters", "(ab)*a?"),
        ("letters", "a{2,3}"),
        ("letters", "a|bb|"),
        ("letters", "a(ba)?"),
        ("letters", "(?s:.*)ba"),
        ("letters", "[^a]b[ab]*"),
        ("accents", "a(é|a)*"),
        ("accents", "(?s:.*)é"),
        ("accents", "[à-ü]+"),
        ("mixed", "x?🎉+x"),
    ],
)
def test_patterns_accept_what_the_expression_matches_as_a_whole(name: str, pattern: str) -> None:
    tokens = VOCABULARIES[name]
    constraint = Constraint(TokenTable(tokens), [b"", b""], [pattern])
    assert check_by_enumeration(constraint, tokens, pattern)


@needs_outlines
@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"[0-9]+(\.[0-9]+)?", ["1", "1.5", "12.25", "1.", ".5", "", "1.5.2"]),
        (r"(?s:.)é?(?s:.)", ["aé", "aéa", "🎉中", "é", "\n\n", "aaa", "éééé", "a\U0010ffff"]),
        (r"(?s:.*)ab", ["ab", "abab", "aba\nab", "a", "abx", "\U0010ffffxab"]),
        (r"a|", ["", "a", "aa"]),
    ],
)
def test_patterns_are_read_byte_by_byte(pattern: str, texts: list[str]) -> None:
    constraint = Constraint(TokenTable([bytes([byte]) for byte in range(256)]), [b"", b""], [pattern])
    for text in texts:
        state, data = constraint.start, text.encode()
        for number, byte in enumerate(data):
            if matches(data, pattern):
                assert constraint.allowed(state, len(data) - number)[byte]
            state = DEAD if state == DEAD else constraint.advance(state, byte)
        assert (state != DEAD and constraint.accepts(state)) == matches(data, pattern), text
        assert pattern_matches(pattern, data) == matches(data, pattern)


@needs_outlines
@pytest.mark.parametrize("pattern", ["(", "[", "a(?=b)", r"(a)\1", "*", "a{3,2}", "a)(b", "a)|(?:b"])
def test_a_pattern_that_cannot_be_used_is_named(pattern: str) -> None:
    with pytest.raises(InputError, match=rf"{re.escape(repr(pattern))} cannot be used: .* no look-around and no ref"):
        Constraint(TokenTable(LETTERS), [b"", b""], [pattern])


def test_without_the_package_patterns_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    compiled.cache_clear()  # of other tests
    with pytest.raises(InputError, match=r"pip install 'acgpt\[regex\]'"):
        Constraint(TokenTable(LETTERS), [b"", b""], ["a"])


# ---- the vocabulary -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(examples(5)))
def test_a_table_moves_all_tokens_as_a_loop_over_their_bytes_does(seed: int) -> None:
    rng = random.Random(seed)
    tokens: list[bytes | None] = [
        None if rng.random() < 0.1 else bytes(rng.randrange(256) for _ in range(rng.randrange(7))) for _ in range(300)
    ]
    transitions = np.array(
        [[rng.randrange(5) if rng.random() < 0.8 else DEAD for _ in range(256)] for _ in range(5)], dtype=np.int32
    )
    table = TokenTable(tokens)
    for start in range(5):
        expected = []
        for token in tokens:
            state = start if token else DEAD
            for byte in token or b"":
                state = DEAD if state == DEAD else int(transitions[state, byte])
            expected.append(state)
        assert table.moves(transitions, start).tolist() == expected


@pytest.mark.parametrize("tokens", [[], [None], [b"", None]])
def test_a_table_without_text_moves_nowhere(tokens: list[bytes | None]) -> None:
    moves = TokenTable(tokens).moves(np.zeros((1, 256), dtype=np.int32), 0)
    assert moves.tolist() == [DEAD] * len(tokens)


def test_a_constraint_of_too_many_states_for_the_vocabulary_is_refused(monkeypatch):
    monkeypatch.setattr("acgpt.query.constraint.MOST_WORK", 10 * len(LETTERS))
    Constraint(TokenTable(LETTERS), [b"abaaba"])
    with pytest.raises(InputError, match=r"needs more than 10 states, .* for this vocabulary: repeat less"):
        Constraint(TokenTable(LETTERS), [b"abaabaabaab"])


@needs_outlines
@pytest.mark.parametrize("room", [0, 100, 2**25])
def test_a_pattern_reads_the_vocabulary_once_per_state_and_keeps_few_arrays(monkeypatch, room):
    monkeypatch.setattr("acgpt.query.constraint.KEPT_BYTES", room)
    read, moves = [], TokenTable.moves

    def counted(self, transitions, state):
        read.append(state)
        return moves(self, transitions, state)

    monkeypatch.setattr(TokenTable, "moves", counted)
    constraint = Constraint(TokenTable(LETTERS), [b"", b""], ["[ab]{1,100}"])
    assert not read  # nothing is read before it is needed
    assert constraint.lengths(120) == list(range(1, 101))
    assert len(read) == len(set(read)) == 101
    for state in set(read):
        for left in range(1, 101):
            constraint.allowed(state, left)
    caches = constraint._moves.cache_info(), constraint._allowed.cache_info()
    assert max(cache.currsize * len(LETTERS) for cache in caches) <= max(room, len(LETTERS))
    assert check_by_enumeration(constraint, LETTERS, "[ab]{1,100}")


@needs_outlines
@pytest.mark.parametrize(
    "pattern", ["[A-Z][A-Za-z]{1,30}", " [a-z ]{1,60}", "a[a-z]{1,200}", r"[a-z]{1,30}\.", "(?s:.){1,30}"]
)
def test_a_pattern_has_about_as_many_states_as_places(pattern):
    """The automaton that looks for it anywhere in a text would have exponentially many."""
    constraint = Constraint(TokenTable(LETTERS), [b" ", b" x"], [pattern])
    assert len(constraint.transitions) < 700


@needs_outlines
@pytest.mark.parametrize("seed", range(examples(6)))
def test_patterns_between_literals_accept_exactly_the_texts_that_match(seed):
    rng = random.Random(seed)
    literals = [rng.choice(["", "a", "b", "ab"]) for _ in range(3)]
    patterns = [rng.choice(["a*", "(ba)?", "[ab]{1,2}", "a|", None]) for _ in range(2)]
    constraint = Constraint(TokenTable(LETTERS), [literal.encode() for literal in literals], patterns)
    parts = [f"(?:{pattern or '.*'})" for pattern in patterns]
    expression = "".join(a + b for a, b in zip(literals, [*parts, ""], strict=True))
    check_by_enumeration(constraint, LETTERS, expression)
