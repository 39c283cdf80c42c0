"""The text of a row as it is drawn, up to the end of the text or a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import numpy as np


class Writer:
    """The text of one row as it is drawn. It ends the row, and says which tokens may end it; see `decoding.Guide`.

    Args:
        bytes_of: Returns the bytes of a token.
        ends: Tokens that end the text.
        stop: Strings before which it ends.
        allowed: (V,) tokens that may be drawn.
        least: Number of tokens before which the text does not end by itself.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        ends: Sequence[int],
        stop: Sequence[str],
        allowed: np.ndarray,
        least: int,
    ) -> None:
        self.bytes_of, self.ends, self.stop, self.least = bytes_of, frozenset(ends), tuple(stop), least
        self.all, self.inner = allowed, allowed.copy()
        self.inner[list(self.ends)] = False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds back half a character
        self.text, self.shown = "", 0
        self.matches = [Match(word) for word in self.stop]
        self.drawn = 0
        self.ended_by, self.word = "", ""

    def allowed(self) -> np.ndarray:
        """Return which tokens may come next."""
        return self.all if self.drawn >= self.least else self.inner

    def advance(self, token: int) -> None:
        """Note that a token has been drawn."""
        self.drawn += 1
        if token in self.ends:
            self.ended_by = "eos"
            return
        begin, new = len(self.text), self.decoder.decode(self.bytes_of(token))
        self.text += new
        ends = [(match.read(new), match.word) for match in self.matches]
        if found := [(begin + end - len(word), word) for end, word in ends if end is not None]:
            at, self.word = min(found)
            self.text, self.ended_by = self.text[:at], "word"

    def news(self, done: bool) -> str:
        """Return the text that is settled and was not returned before: no beginning of a stop string, unless done."""
        held = 0 if done or self.ended_by else max((match.length for match in self.matches), default=0)
        begin, self.shown = self.shown, max(self.shown, len(self.text) - held)
        return self.text[begin : self.shown]


class Match:
    """How much of a word a text ends with, as the text grows: the algorithm of Knuth, Morris and Pratt.

    It takes a time that is linear in the text and the word, however they repeat themselves.

    Args:
        word: The word.

    Attributes:
        length: Length of the longest beginning of the word that the text ends with.
    """

    def __init__(self, word: str) -> None:
        self.word, self.length = word, 0
        self.shorter = [0] * len(word)  # by length - 1: the next shorter beginning that such a beginning ends with
        for end in range(1, len(word)):
            self.shorter[end] = self._longer(self.shorter[end - 1], word[end])

    def _longer(self, length: int, character: str) -> int:
        """Return the length after one more character."""
        while length and (length == len(self.word) or self.word[length] != character):
            length = self.shorter[length - 1]
        return length + (self.word[length] == character)

    def read(self, text: str) -> int | None:
        """Append a text. Return where in it the word ends; `None` if it does not."""
        for end, character in enumerate(text, 1):
            self.length = self._longer(self.length, character)
            if self.length == len(self.word):
                return end
        return None
