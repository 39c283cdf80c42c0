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
        self.held = max(map(len, self.stop), default=1) - 1  # characters at the end that may begin a stop string
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
        begin = len(self.text)
        self.text += self.decoder.decode(self.bytes_of(token))
        places = [(self.text.find(word, max(0, begin - len(word) + 1)), word) for word in self.stop]
        if found := [(at, word) for at, word in places if at >= 0]:
            at, self.word = min(found)
            self.text, self.ended_by = self.text[:at], "word"

    def news(self, done: bool) -> str:
        """Return the text that is settled and was not returned before: nothing that may be stopped, unless done."""
        held = 0 if done or self.ended_by else self.held
        begin, self.shown = self.shown, max(self.shown, len(self.text) - held)
        return self.text[begin : self.shown]
