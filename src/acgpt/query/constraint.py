r"""Constraints on the text of a gap: which tokens may come next, so that the bytes agree with the given text.

A gap is regenerated together with the given bytes around it that its tokens could merge with (see `healing`):

    text            return x{{_}}s(y)           kept tokens: "return" before, "(", "y", ")" after
    literals        " x", "s"                   bytes that the new tokens must begin and end with
    new tokens      " xs" | " axis"             no: does not begin with " x" | " x", "-axis": yes, the fill is "-axi"

`Constraint` accepts `literal text literal text … literal`: more than two literals if the text between two gaps is too
short to keep a token. A text between literals may have to match a regular expression. It is an automaton over bytes,
run over all tokens of the vocabulary at once, from one state at a time. `allowed(state, tokens)` permits exactly the
tokens after which the automaton can still accept with the remaining number of tokens, so that sampling never reaches a
dead end.

What a constraint needs is bounded: its states times the vocabulary (`MOST_WORK`), and the arrays of vocabulary size
that it keeps (`KEPT_BYTES`), which are computed again if they are needed again.

Shape legend: S states of the automaton, V vocabulary.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from acgpt.errors import InputError

DEAD = -1
MOST_STATES = 512  # of a pattern
MOST_CHARACTERS = 4096  # of a pattern
MOST_STEPS = 2**21  # of the subset construction
MOST_WORK = 2**26  # states times tokens: the vocabulary is read once from each state
KEPT_BYTES = 2**25  # of moves, and of allowed tokens, per constraint
BYTES = [bytes([byte]) for byte in range(256)]
BEGIN, END = "\U0010fffe", "\U0010ffff"  # characters that no text contains
WIDE = re.compile(r"\[:?\^|\\[DSWPp]|\\[xuU]|&&|--|~~|(?<!\\)(?:\\\\)*\.|[^\x00-\x7f]")  # parts that can match BEGIN

# Bytes of UTF-8 after which a character is incomplete: (first byte, last byte, what must follow), as in Unicode's table
# of well-formed byte sequences. A name is a state inside a character; "" is the end of a character.
_UTF8: dict[str, list[tuple[int, int, str]]] = {
    "": [
        (0x00, 0x7F, ""), (0xC2, 0xDF, "1"), (0xE0, 0xE0, "E0"), (0xE1, 0xEC, "2"), (0xED, 0xED, "ED"),
        (0xEE, 0xEF, "2"), (0xF0, 0xF0, "F0"), (0xF1, 0xF3, "3"), (0xF4, 0xF4, "F4"),
    ],
    "1": [(0x80, 0xBF, "")],
    "2": [(0x80, 0xBF, "1")],
    "3": [(0x80, 0xBF, "2")],
    "E0": [(0xA0, 0xBF, "1")],
    "ED": [(0x80, 0x9F, "1")],
    "F0": [(0x90, 0xBF, "2")],
    "F4": [(0x80, 0x8F, "2")],
}  # fmt: skip


class TokenTable:
    """The bytes of all tokens of a vocabulary, arranged so that an automaton can read them all at once.

    Args:
        tokens: Bytes of each token by id; `None` or empty for tokens that no text contains.
    """

    def __init__(self, tokens: Sequence[bytes | None]) -> None:
        self.size = len(tokens)
        texts = [(token or b"", number) for number, token in enumerate(tokens)]
        texts = sorted((pair for pair in texts if pair[0]), key=lambda pair: -len(pair[0]))
        self.ids = np.array([number for _, number in texts], dtype=np.int64)  # the longest tokens first
        lengths = np.array([len(token) for token, _ in texts], dtype=np.int64)
        self.longer = [int((lengths > column).sum()) for column in range(int(lengths.max(initial=0)))]
        self.columns = [  # byte number `column` of all tokens that have one
            np.frombuffer(bytes(token[column] for token, _ in texts[:count]), dtype=np.uint8)
            for column, count in enumerate(self.longer)
        ]

    def moves(self, transitions: np.ndarray, state: int) -> np.ndarray:
        """Return (V,) the state after each token, read from `state`; `DEAD` where it is rejected.

        Args:
            transitions: (S, 256) next states by state and byte; `DEAD` where a byte is rejected.
            state: The state to start from.
        """
        result = np.full(self.size, DEAD, dtype=dtype_of(transitions))  # many of these arrays are kept
        alive, states = np.arange(len(self.ids)), np.full(len(self.ids), state, dtype=np.int32)
        for column, count in zip(self.columns, self.longer, strict=True):
            reading = int(np.searchsorted(alive, count))  # tokens are sorted by length, so these are the first
            result[self.ids[alive[reading:]]] = states[reading:]
            alive, states = alive[:reading], transitions[states[:reading], column[alive[:reading]]]
            survived = states != DEAD
            alive, states = alive[survived], states[survived]
            if not len(alive):
                return result
        result[self.ids[alive]] = states
        return result


class Automaton(NamedTuple):
    """An automaton over bytes, which starts from state 0.

    Args:
        transitions: (S, 256) next states by state and byte; `DEAD` where a byte is rejected.
        accepting: (S,) whether the text may end in a state.
    """

    transitions: np.ndarray
    accepting: np.ndarray


def dtype_of(transitions: np.ndarray) -> np.dtype[Any]:
    """Return the smallest dtype of states, `DEAD` included."""
    return np.min_scalar_type(-len(transitions))


class Constraint:
    """Texts that consist of literals in this order, with other texts between them, as an automaton that reads tokens.

    Args:
        table: The vocabulary.
        literals: The literals, at least one; the first begins the text and the last ends it.
        patterns: A regular expression for each text between two literals, which it must match as a whole; `None` for
            any text. Default: any texts. Needs the package outlines-core. The syntax is that of Rust's regex crate: no
            look-around, no back-references.

    Raises:
        InputError: The package is not installed, it refuses a pattern, or there are too many states.
    """

    start = 0

    def __init__(
        self, table: TokenTable, literals: Sequence[bytes], patterns: Sequence[str | None] | None = None
    ) -> None:
        patterns = patterns or [None] * (len(literals) - 1)
        gaps = [any_text() if pattern is None else compiled(pattern) for pattern in patterns]
        size = max(1, table.size)
        self.table = table
        self.transitions, self.accepting = joined(literals, gaps, MOST_WORK // size)
        # No references to the constraint in the caches: it is freed as soon as it is not used.
        transitions, kept = self.transitions, KEPT_BYTES // size
        moves = lru_cache(max(1, kept // dtype_of(transitions).itemsize))(lambda state: table.moves(transitions, state))
        self._moves = moves
        self._allowed = lru_cache(max(1, kept))(
            lambda state, good: np.unpackbits(np.frombuffer(good, dtype=np.uint8)).astype(np.bool_)[moves(state)]
        )
        self._lock = threading.Lock()
        self._following = np.zeros((0, 0), dtype=np.bool_)  # (S, S) states that a token can lead to, once computed
        self._within: list[np.ndarray] = []  # by number of tokens: (S,) whether exactly so many can lead to the end

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        own = self.transitions.nbytes + self._following.nbytes + sum(row.nbytes for row in self._within)
        moves = self._moves.cache_info().currsize * dtype_of(self.transitions).itemsize
        return own + (moves + self._allowed.cache_info().currsize) * self.table.size

    def accepts(self, state: int) -> bool:
        """Return whether the text may end in a state."""
        return bool(self.accepting[state])

    def moves(self, state: int) -> np.ndarray:
        """Return (V,) the state after each token, `DEAD` where it is not allowed."""
        return self._moves(state)

    def advance(self, state: int, token: int) -> int:
        """Return the state after a token, `DEAD` if it is not allowed."""
        return int(self.moves(state)[token])

    def allowed(self, state: int, tokens: int) -> np.ndarray:
        """Return (V,) whether each token may come next, if exactly `tokens` tokens are left, this one included."""
        return self.allowed_between(state, tokens, tokens)

    def allowed_between(self, state: int, least: int, most: int) -> np.ndarray:
        """Return (V,) whether each token may come next, if `least` to `most` tokens are left, this one included."""
        self._extend(max(0, most - 1))
        good = np.zeros(len(self.transitions) + 1, dtype=np.bool_)  # the last one is for DEAD
        for within in self._within[max(1, least) - 1 : most]:
            good[:-1] |= within
        good[:-1] &= self._following[state]
        allowed: np.ndarray = self._allowed(state, np.packbits(good).tobytes())
        return allowed

    def possible(self, tokens: int, state: int | None = None) -> bool:
        """Return whether exactly `tokens` tokens can lead from a state (default: the start) to the end."""
        self._extend(tokens)
        return bool(self._within[tokens][self.start if state is None else state])

    def lengths(self, most: int) -> list[int]:
        """Return all numbers of tokens up to `most` that can form an accepted text."""
        return [tokens for tokens in range(most + 1) if self.possible(tokens)]

    def _extend(self, tokens: int) -> None:
        """Compute from which states up to `tokens` tokens can lead to the end."""
        if len(self._within) > tokens:
            return
        with self._lock:
            if not self._within:
                self._following = self._successors()
                self._within.append(self.accepting)
            while len(self._within) <= tokens:
                self._within.append((self._following & self._within[-1]).any(axis=1))

    def _successors(self) -> np.ndarray:
        """Return (S, S) which states a token can lead to from each state; from the start, as far as one gets."""
        states = len(self.transitions)
        result = np.zeros((states, states), dtype=np.bool_)
        known, new = {self.start}, [self.start]
        while new:
            state = new.pop()
            reached = np.zeros(states + 1, dtype=np.bool_)
            reached[self.moves(state)] = True
            result[state] = reached[:-1]
            more = [other for other in np.flatnonzero(result[state]).tolist() if other not in known]
            known.update(more)
            new += more
        return result


@lru_cache(maxsize=1)
def any_text() -> Automaton:
    """Return the automaton of all texts: UTF-8."""
    numbers = {name: number for number, name in enumerate(_UTF8)}
    transitions = np.full((len(_UTF8), 256), DEAD, dtype=np.int32)
    for name, rows in _UTF8.items():
        for low, high, then in rows:
            transitions[numbers[name], low : high + 1] = numbers[then]
    return Automaton(transitions, np.array([not name for name in _UTF8]))


def joined(literals: Sequence[bytes], gaps: Sequence[Automaton], most: int) -> Automaton:
    """Return the automaton of literals with texts of other automata between them, by the subset construction.

    A state of the nondeterministic automaton is (2 i, offset): so many bytes of literal i are read; or (2 i + 1,
    state): inside the text after literal i.

    Args:
        literals: The literals.
        gaps: The automata, one less.
        most: Maximum number of states.

    Raises:
        InputError: There are more states.
    """
    Item = tuple[int, int]

    def closed(items: Iterable[Item]) -> frozenset[Item]:
        """Add the start of what follows wherever a literal or a gap is complete."""
        result, new = set(items), list(items)
        while new:
            part, at = new.pop()
            index = part // 2
            complete = gaps[index].accepting[at] if part % 2 else at == len(literals[index]) and index < len(gaps)
            following = part + 1, 0
            if complete and following not in result:
                result.add(following)
                new.append(following)
        return frozenset(result)

    def step(items: frozenset[Item], byte: int) -> frozenset[Item]:
        following: set[Item] = set()
        for part, at in items:
            index = part // 2
            if part % 2:
                then = int(gaps[index].transitions[at, byte])
                if then != DEAD:
                    following.add((part, then))
            elif at < len(literals[index]) and literals[index][at] == byte:
                following.add((part, at + 1))
        return closed(following)

    # Bytes that no literal contains and that all gaps treat alike have the same transitions.
    special = {byte for literal in literals for byte in literal}
    columns = [np.unique(gap.transitions, axis=1, return_inverse=True)[1].ravel().tolist() for gap in gaps]
    classes: dict[tuple[int, ...], list[int]] = {}
    for byte in range(256):
        key = (byte,) if byte in special else (-1, *(column[byte] for column in columns))
        classes.setdefault(key, []).append(byte)

    first = closed([(0, 0)])
    numbers, states, work = {first: 0}, [first], 0
    rows: list[np.ndarray] = []
    while len(rows) < len(states):
        items = states[len(rows)]
        row = np.full(256, DEAD, dtype=np.int32)
        work += len(items) * len(classes)
        for members in classes.values():
            if following := step(items, members[0]):
                if following not in numbers:
                    numbers[following] = len(states)
                    states.append(following)
                row[members] = numbers[following]
        rows.append(row)
        if len(states) > most or work > MOST_STEPS:
            raise InputError(
                f"the gap needs more than {min(most, len(states) - 1)} states, which is too many for this vocabulary: "
                "repeat less in its pattern, or write more text between gaps."
            )
    final = 2 * len(gaps), len(literals[-1])
    return Automaton(np.stack(rows), np.array([final in items for items in states], dtype=np.bool_))


# ---- regular expressions --------------------------------------------------------------------------------------------


def expressions(pattern: str) -> tuple[str, str]:
    r"""Return what is compiled for a regular expression: whether it is one, and its automaton.

    "a)(b" is not a regular expression, but would be inside of parentheses. Repeated zero times it would match "a".

    The library loses texts that go on after a match, such as "1.5" of \d+(\.\d+)?. So the pattern ends with a
    character of its own, and nothing matches before it. The library also builds an automaton that looks for the pattern
    anywhere in a text, which can be exponentially larger: that of [A-Z][A-Za-z]{1,30} must tell in which of the last 30
    places it can have begun. So the pattern begins with a character, too, unless it could match this character.
    """
    begin = "" if WIDE.search(pattern) else BEGIN
    return f"(?:{pattern}){{0}}{END}", f"{begin}(?:{pattern}){END}"


@lru_cache(maxsize=64)
def compiled(pattern: str) -> Automaton:
    """Return the automaton of a regular expression, by outlines-core.

    Raises:
        InputError: The package is not installed, it refuses the pattern, or the pattern has too many states.
    """
    try:
        from outlines_core import Index, Vocabulary
    except ImportError as error:
        raise InputError("patterns in gaps need the package outlines-core: pip install 'acgpt[regex]'.") from error
    if pattern.startswith("^") or (pattern.endswith("$") and not pattern.endswith("\\$")):
        raise InputError(f"the pattern {pattern!r} always matches the whole gap: leave out ^ and $.")
    if len(pattern) > MOST_CHARACTERS:
        raise InputError(f"the pattern has {len(pattern)} characters, more than {MOST_CHARACTERS}: shorten it.")
    # The library wants an id for its end of text, too.
    vocabulary = Vocabulary(257, {token: [number] for number, token in enumerate([*BYTES, END.encode()])})
    empty, expression = expressions(pattern)
    try:
        nothing = Index(empty, vocabulary)
        index = Index(expression, vocabulary)
        if set(nothing.get_transitions()[nothing.get_initial_state()]) != {END.encode()[0], 256}:
            raise ValueError("unbalanced parentheses")
    except Exception as error:  # the library raises ValueError and its own errors, which do not say what is wrong
        raise InputError(
            f"the pattern {pattern!r} cannot be used: write it in the syntax of Rust's regex crate, which has no "
            "look-around and no references to groups."
        ) from error
    listed, final = index.get_transitions(), index.get_final_states()
    start = index.get_initial_state()
    for byte in b"" if expression.startswith("(") else BEGIN.encode():
        start = listed[start][byte]
    return reachable(listed, final, start, pattern)


def reachable(listed: Mapping[int, Mapping[int, int]], final: Collection[int], start: int, pattern: str) -> Automaton:
    """Return the automaton of the states that can be reached from the start, without the character that ends a text.

    Args:
        listed: Next states by state and byte; the character is number 256.
        final: States after this character in which the text is accepted.
        start: The start.
        pattern: The pattern, for errors.
    """
    numbers, states = {start: 0}, [start]
    rows: list[np.ndarray] = []
    while len(rows) < len(states):
        row = np.full(256, DEAD, dtype=np.int32)
        for byte, following in listed.get(states[len(rows)], {}).items():
            if byte < 256 and following in listed:  # bytes of the character lead to a state that has no next ones
                if following not in numbers:
                    numbers[following] = len(states)
                    states.append(following)
                row[byte] = numbers[following]
        rows.append(row)
    if len(states) > MOST_STATES:
        raise InputError(
            f"the pattern {pattern!r} needs {len(states)} states, more than {MOST_STATES}: repeat less, or name the "
            r"characters, [0-9] or [a-z] instead of \d or \w."
        )
    accepting = [listed.get(state, {}).get(256) in final for state in states]
    return Automaton(np.stack(rows), np.array(accepting, dtype=np.bool_))


def pattern_matches(pattern: str, text: bytes) -> bool:
    """Return whether a regular expression, in the syntax of `Constraint`, matches a text as a whole."""
    automaton, state = compiled(pattern), 0
    for byte in text:
        state = int(automaton.transitions[state, byte])
        if state == DEAD:
            return False
    return bool(automaton.accepting[state])
