"""The query: a sequence of tokens and the role of each token.

    tokens    The   cat   sat   on    the   mat
    given      ●                 ●     ●            x_c: the conditioning set, known
    asked            ●     ●                  ●     x_e: the evaluation set, scored or sampled
    (neither: unknown, neither known nor of interest)

Positions count from 1; position 0 is the BOS token, which the layout adds. Templates are turned into queries, layouts
are built from queries, and results refer to their positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from operator import and_, index, not_
from typing import TYPE_CHECKING

from acgpt.errors import QueryError, whole_number

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Query:
    """p(asked tokens | given tokens), over one sequence of token ids.

    Args:
        tokens: Token ids; `None` for a token that is to be sampled, or that is unknown.
        given: For each token, whether it is given: known, and conditioned on.
        asked: For each token, whether it is scored (or sampled). Default: every token that is not given. A token that
            is neither given nor asked is unknown: the model reads its MASK token there.
        start: Token at position 0, for token ids that are read as they are, without BOS. Default: BOS. Only methods
            that say so take another (`Method.any_start`).

    >>> Query([464, None, 3332], given=[True, False, True]).asked_positions
    (2,)
    """

    tokens: tuple[int | None, ...]
    given: tuple[bool, ...]
    asked: tuple[bool, ...]
    start: int | None = field(default=None, repr=False)

    def __init__(
        self,
        tokens: Sequence[int | None],
        given: Sequence[bool],
        asked: Sequence[bool] | None = None,
        start: int | None = None,
    ) -> None:
        try:
            tokens = tuple(tokens)
            if not {*map(type, tokens)} <= {int, type(None)}:
                tokens = tuple([None if t is None else token_id(t) for t in tokens])
        except TypeError as error:
            raise QueryError(f"tokens must be token ids, whole numbers, or None: {error}.") from error
        given = tuple(map(bool, given))
        asked = tuple(map(not_, given)) if asked is None else tuple(map(bool, asked))
        if not len(tokens) == len(given) == len(asked):
            raise QueryError(
                f"tokens, given and asked must have one entry per token; they have {len(tokens)}, {len(given)} and "
                f"{len(asked)}."
            )
        if any(map(and_, given, asked)):
            position = next(p for p, both in enumerate(map(and_, given, asked), start=1) if both)
            raise QueryError(f"the token at position {position} is both given and asked; it can be only one.")
        if None in compress(tokens, given):
            position = next(p for p, g in enumerate(given, start=1) if g and tokens[p - 1] is None)
            raise QueryError(f"the token at position {position} is given but has no id; give its id or ask for it.")
        if min(filter(None, tokens), default=0) < 0:  # `filter` drops None and 0
            position = next(p for p, t in enumerate(tokens, start=1) if t is not None and t < 0)
            raise QueryError(f"the token at position {position} has the negative id {tokens[position - 1]}.")
        if not any(asked):
            raise QueryError("nothing is asked: mark at least one token as asked (or leave one not given).")
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "asked", asked)
        object.__setattr__(self, "start", None if start is None else whole_number("start", start, least=0))

    @classmethod
    def trusted(cls, tokens: Iterable[int | None], given: Iterable[bool], asked: Iterable[bool]) -> Query:
        """Return a query without checking its arguments, for values that were checked before."""
        query = object.__new__(cls)
        for name, values in (("tokens", tokens), ("given", given), ("asked", asked)):
            object.__setattr__(query, name, tuple(values))
        return query

    def __len__(self) -> int:
        """Return the number of tokens T; with BOS the text takes T + 1 positions."""
        return len(self.tokens)

    @cached_property
    def given_positions(self) -> tuple[int, ...]:
        """Positions of the given tokens, counting from 1."""
        return tuple(self.given_at.tolist())

    @cached_property
    def asked_positions(self) -> tuple[int, ...]:
        """Positions of the asked tokens, counting from 1."""
        return tuple(self.asked_at.tolist())

    @cached_property
    def given_at(self) -> np.ndarray:
        """`given_positions` as a read-only array."""
        return positions(self.given)

    @cached_property
    def asked_at(self) -> np.ndarray:
        """`asked_positions` as a read-only array."""
        return positions(self.asked)

    @cached_property
    def ids(self) -> np.ndarray:
        """(T,) token ids, -1 where the token is `None`; read-only."""
        import numpy as np  # imported here: parsing a template, and its errors, do not need it

        whole = None not in self.tokens
        ids = np.array(self.tokens if whole else [-1 if t is None else t for t in self.tokens], dtype=np.int64)
        ids.flags.writeable = False
        return ids

    @cached_property
    def roles(self) -> np.ndarray:
        """(T,) `GIVEN`, `ASKED` or `UNKNOWN` for each token (see `conditioning`); read-only."""
        import numpy as np

        from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN

        roles = np.full(len(self), UNKNOWN)
        roles[self.given_at - 1], roles[self.asked_at - 1] = GIVEN, ASKED
        roles.flags.writeable = False
        return roles

    @property
    def has_unknown(self) -> bool:
        """Whether a token is neither given nor asked."""
        return len(self.given_at) + len(self.asked_at) < len(self)

    @property
    def needs_future(self) -> bool:
        """Whether a given token comes after an asked one. If not, reading left to right sees all given tokens."""
        return any(self.given[self.asked.index(True) :])

    @property
    def blanks(self) -> tuple[tuple[int, int], ...]:
        """Runs of asked tokens as (first, last) positions, both included."""
        return tuple((run.start() + 1, run.end()) for run in re.finditer(b"\x01+", bytes(self.asked)))


def token_id(token: object) -> int:
    """Return a token id as an int, from any integer type; refuse booleans, also those of torch and numpy."""
    if isinstance(token, bool) or str(getattr(token, "dtype", "")).endswith("bool"):
        raise TypeError(f"{token!r} is a boolean")
    return index(token)  # type: ignore[arg-type]


def positions(flags: tuple[bool, ...]) -> np.ndarray:
    """Return the positions where flags are true, counting from 1, as a read-only array."""
    import numpy as np

    array = np.flatnonzero(np.frombuffer(bytes(flags), dtype=np.bool_)) + 1
    array.flags.writeable = False
    return array
