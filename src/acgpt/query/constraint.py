r"""Constraints on the text of a gap: which tokens may come next, so that the bytes agree with the given text.

A gap is regenerated together with the given bytes around it that its tokens could merge with (see `healing`):

    text            return x{{_}}s(y)           kept tokens: "return" before, "(", "y", ")" after
    literals        " x", "s"                   bytes that the new tokens must begin and end with
    new tokens      " xs" | " axis"             no: does not begin with " x" | " x", "-axis": yes, the fill is "-axi"

`Literals` accepts `literal any-text literal any-text … literal`: more than two literals if the text between two gaps is
too short to keep a token. `Pattern` accepts a regular expression between the literals. Both are automata over bytes,
run over all tokens of the vocabulary at once. `allowed(state, tokens)` permits exactly the tokens after which the
automaton can still accept with the remaining number of tokens, so that sampling never reaches a dead end.

Shape legend: S states of the automaton, V vocabulary.
"""

from __future__ import annotations

import re
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from acgpt.errors import InputError

DEAD = -1
MOST_STATES = 512  # of a pattern: each state lists the tokens that it allows
BYTES = [bytes([byte]) for byte in range(256)]
LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*(\(\?<?[=!])")
BACK_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*(\\[1-9])")
END = "\U0010ffff"  # a character that no text contains

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
        kind = np.int16 if len(transitions) <= np.iinfo(np.int16).max else np.int32  # many of these arrays are kept
        result = np.full(self.size, DEAD, dtype=kind)
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


class Constraint(ABC):
    """A set of texts, as an automaton over tokens with a start state. States are numbers."""

    start: int = 0

    def __init__(self) -> None:
        self._moves: dict[int, np.ndarray] = {}
        self._allowed: dict[tuple[int, frozenset[int]], np.ndarray] = {}
        self._successors: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        self._within: list[set[int]] = []  # by number of tokens: states from which exactly so many tokens can end

    @abstractmethod
    def compute_moves(self, state: int) -> np.ndarray:
        """Return (V,) the state after each token, `DEAD` where it is not allowed."""

    @abstractmethod
    def accepts(self, state: int) -> bool:
        """Return whether the text may end in a state."""

    def moves(self, state: int) -> np.ndarray:
        """Return (V,) the state after each token; computed once per state."""
        if state not in self._moves:
            self._moves[state] = self.compute_moves(state)
        return self._moves[state]

    def advance(self, state: int, token: int) -> int:
        """Return the state after a token, `DEAD` if it is not allowed."""
        return int(self.moves(state)[token])

    def allowed(self, state: int, tokens: int) -> np.ndarray:
        """Return (V,) whether each token may come next, if exactly `tokens` tokens are left, this one included."""
        return self.allowed_between(state, tokens, tokens)

    def allowed_between(self, state: int, least: int, most: int) -> np.ndarray:
        """Return (V,) whether each token may come next, if `least` to `most` tokens are left, this one included."""
        numbers = range(max(1, least), most + 1)
        key = state, frozenset().union(*(self._reachable(state, tokens - 1) for tokens in numbers))
        if key not in self._allowed:
            self._allowed[key] = np.isin(self.moves(state), list(key[1]))
        return self._allowed[key]

    def possible(self, tokens: int, state: int | None = None) -> bool:
        """Return whether exactly `tokens` tokens can lead from a state (default: the start) to the end."""
        state = self.start if state is None else state
        if tokens == 0:
            return self.accepts(state)
        return bool(self._reachable(state, tokens - 1))

    def lengths(self, most: int) -> list[int]:
        """Return all numbers of tokens up to `most` that can form an accepted text."""
        return [tokens for tokens in range(most + 1) if self.possible(tokens)]

    def _reachable(self, state: int, tokens: int) -> set[int]:
        """Return the successors of a state from which exactly `tokens` tokens can lead to the end."""
        self._extend(tokens)
        return self._within[tokens].intersection(self._following(state))

    def _following(self, state: int) -> list[int]:
        """Return the states that a token can lead to."""
        if state not in self._successors:
            self._successors[state] = np.setdiff1d(self.moves(state), [DEAD])
        following: list[int] = self._successors[state].tolist()
        return following

    def _extend(self, tokens: int) -> None:
        """Compute from which states up to `tokens` tokens can lead to the end."""
        if len(self._within) > tokens:
            return
        with self._lock:  # threads may share a constraint
            if not self._within:
                known, new = {self.start}, [self.start]
                while new:
                    new = [state for state in {s for old in new for s in self._following(old)} if state not in known]
                    known.update(new)
                self._within.append({state for state in known if self.accepts(state)})
            while len(self._within) <= tokens:
                last = self._within[-1]
                self._within.append({s for s in self._successors if not last.isdisjoint(self._following(s))})


class Literals(Constraint):
    """Texts that consist of literals in this order, with any text between them.

    Args:
        table: The vocabulary.
        literals: The literals, at least one; the first begins the text and the last ends it.
    """

    def __init__(self, table: TokenTable, literals: Sequence[bytes]) -> None:
        super().__init__()
        self.table, self.literals = table, tuple(literals)
        self._build()

    def _build(self) -> None:
        """Turn the literals into a deterministic automaton, by the subset construction.

        A state of the nondeterministic automaton is (literal, offset, ""): so many bytes of the literal are read; or
        (literal, 0, name): inside a character of the text before the literal.
        """
        literals = self.literals
        Item = tuple[int, int, str]

        def closed(items: Iterable[Item]) -> frozenset[Item]:
            """Add the start of the next literal wherever one is complete."""
            result = set(items)
            for index, offset, name in list(result):
                while not name and index + 1 < len(literals) and offset == len(literals[index]):
                    index, offset = index + 1, 0
                    result.add((index, offset, name))
            return frozenset(result)

        def step(items: frozenset[Item], byte: int) -> frozenset[Item]:
            following: set[Item] = set()
            for index, offset, name in items:
                if not name and offset < len(literals[index]) and literals[index][offset] == byte:
                    following.add((index, offset + 1, ""))
                if index and offset == 0:  # the text before this literal goes on
                    following.update((index, 0, then) for low, high, then in _UTF8[name] if low <= byte <= high)
            return closed(following)

        # Bytes that no literal contains and that UTF-8 treats alike have the same transitions.
        special = {byte for literal in literals for byte in literal}
        classes: dict[tuple[object, ...], list[int]] = {}
        for byte in range(256):
            kind = tuple(
                next((i for i, (low, high, _) in enumerate(rows) if low <= byte <= high), -1) for rows in _UTF8.values()
            )
            classes.setdefault((byte,) if byte in special else kind, []).append(byte)

        first = closed([(0, 0, "")])
        numbers, states = {first: 0}, [first]
        rows: list[np.ndarray] = []
        while len(rows) < len(states):
            row = np.full(256, DEAD, dtype=np.int32)
            for members in classes.values():
                if following := step(states[len(rows)], members[0]):
                    if following not in numbers:
                        numbers[following] = len(states)
                        states.append(following)
                    row[members] = numbers[following]
            rows.append(row)
        self.transitions = np.stack(rows)
        final = (len(literals) - 1, len(literals[-1]), "")
        self._accepting = frozenset(number for number, items in enumerate(states) if final in items)

    def compute_moves(self, state: int) -> np.ndarray:
        """Run the automaton over all tokens."""
        return self.table.moves(self.transitions, state)

    def accepts(self, state: int) -> bool:
        """Return whether the last literal is complete."""
        return state in self._accepting


class Pattern(Constraint):
    """Texts that match a regular expression as a whole; needs the package outlines-core.

    Args:
        tokens: Bytes of each token by id; `None` for tokens that no text contains.
        pattern: The regular expression, in the syntax of Rust's regex crate: no look-around, no back-references.

    Raises:
        InputError: The package is not installed, or it refuses the pattern.
    """

    def __init__(self, tokens: Sequence[bytes | None], pattern: str) -> None:
        super().__init__()
        check_pattern(pattern)
        from outlines_core import Index, Vocabulary

        self.size = len(tokens)
        by_bytes: dict[bytes, list[int]] = {}
        for number, token in enumerate(tokens):
            if token:
                by_bytes.setdefault(token, []).append(number)
        # The library loses texts that go on after a match, such as "1.5" of \d+(\.\d+)?. So the pattern ends with a
        # character of its own, and nothing matches before it. The library also wants an id for its end of text.
        self._end = self.size
        by_bytes.setdefault(END.encode(), []).append(self._end)
        try:
            index = Index(f"(?:{pattern}){END}", Vocabulary(self.size + 1, by_bytes))
        except Exception as error:  # the library raises ValueError and its own errors
            raise InputError(f"the pattern {pattern!r} cannot be used: {error}") from error
        self._transitions, self._final = index.get_transitions(), index.get_final_states()
        self.start = index.get_initial_state()

    def compute_moves(self, state: int) -> np.ndarray:
        """Look up the transitions of a state."""
        result = np.full(self.size, DEAD, dtype=np.int64)
        for token, following in self._transitions.get(state, {}).items():
            if token < self._end:
                result[token] = following
        return result

    def accepts(self, state: int) -> bool:
        """Return whether the text matches."""
        return self._transitions.get(state, {}).get(self._end) in self._final


def check_pattern(pattern: str) -> None:
    """Check a regular expression by itself: "a)(b" is not one, but would be inside of parentheses.

    Raises:
        InputError: The package outlines-core is not installed, or it refuses the pattern.
    """
    try:
        from outlines_core import Index, Vocabulary
    except ImportError as error:
        raise InputError("patterns in gaps need the package outlines-core: pip install 'acgpt[regex]'.") from error
    if pattern.startswith("^") or (pattern.endswith("$") and not pattern.endswith("\\$")):
        raise InputError(f"the pattern {pattern!r} always matches the whole gap: leave out ^ and $.")
    try:
        index = Index(pattern, Vocabulary(256, {byte: [number] for number, byte in enumerate(BYTES)}))
    except Exception as error:  # the library raises ValueError and its own errors, which do not say what is wrong
        raise InputError(f"the pattern {pattern!r} cannot be used: {pattern_problem(pattern)}.") from error
    if (states := len(index.get_transitions())) > MOST_STATES:
        raise InputError(
            f"the pattern {pattern!r} needs {states} states, more than {MOST_STATES}: repeat less, or name the "
            r"characters, [0-9] or [a-z] instead of \d or \w."
        )


def pattern_problem(pattern: str) -> str:
    """Return what is wrong with a regular expression that the library has refused, in words."""
    if around := LOOK_AROUND.search(pattern):
        return f"look-around, {around[1]}…), is not supported"
    if back := BACK_REFERENCE.search(pattern):
        return f"references to groups, {back[1]}, are not supported"
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(pattern)
    except re.error as error:  # Python and Rust disagree about some escapes, such as \p{L}
        if error.pos is not None and "escape \\" not in error.msg:
            return f"{error.msg} at character {error.pos + 1}"
    except (RecursionError, OverflowError):
        return "it is nested too deeply, or repeats too often"
    return "it is not in the syntax of Rust's regex crate"


def pattern_matches(pattern: str, text: bytes) -> bool:
    """Return whether a regular expression, in the syntax of `Pattern`, matches a text as a whole."""
    constraint = _pattern_of_bytes(pattern)
    state = constraint.start
    for byte in text:
        state = constraint.advance(state, byte)
        if state == DEAD:
            return False
    return constraint.accepts(state)


@lru_cache(maxsize=64)
def _pattern_of_bytes(pattern: str) -> Pattern:
    return Pattern(BYTES, pattern)
