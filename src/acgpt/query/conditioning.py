"""Conditioning sets: which tokens of a text are given, which are asked, and which are unknown.

The distribution of section 3 of the paper, with the paper's names of parameters, and three others to mix it with:

    Blocks      |x_c| uniform in [r_min T, r_max T]; B blocks, B uniform in [b_min, b_max]; at random positions
    Infilling   |x_c| as above, all of it at the two ends; the left end's share uniform in [f_min, f_max]
    Empty       nothing is given: plain left-to-right language modelling
    Gaps        |x_c| as above; words, lines and sentences of passages are asked, or the lengths of such gaps

A `Conditioning` is a weighted mixture of such parts (with `Empty`: autoregressive mixing). In each part a share of the
asked tokens can be made unknown. The set of a text depends only on (seed, epoch, item) (see `generator`), so neither
the number of workers nor a restart changes it.

Details that the paper leaves open:

* Rounding: |x_c| is uniform over the whole numbers from ⌈r_min T⌉ to ⌊r_max T⌋, both included (where there is none,
  |x_c| is ⌊r_max T⌋). The left end of an infilling set has f |x_c| tokens, rounded to the nearest. Of |x_e| tokens
  ⌊unknown |x_e|⌋ are unknown, anywhere among them.
* Nothing given: |x_c| = 0 has no blocks, and such a text is read left to right.
* At least one asked token: |x_c| is at most T - 1, even if r_max is 1, so that every text has a loss; and an unknown
  share leaves at least one token asked.
* Blocks: a number of blocks above |x_c| counts as |x_c|; "size" stands for |x_c| itself.
* Placement of the blocks: `gaps` is the paper's rule, by which all arrangements are equally likely. The authors'
  development code (github.com/Yinhan-Lu/Arbitrary-Probability-Model, train/blockwise_sampling.py at 5ba47da) places
  them in `stretches`: each block goes into a free stretch that is chosen uniformly, whatever its length, to a uniform
  place in it, and is cut to fit. What is cut off is lost, so fewer than |x_c| tokens are given. Short stretches fill up
  first, which leaves longer runs of asked tokens than `gaps` does.

Properties, each shown by a test: blocks may touch, so a set can have fewer runs than blocks. With b_min = b_max =
"size" all sets of a size are equally likely. With b_min = 1, tokens at the two ends of a text are given less often than
those in the middle, because fewer positions of a long block cover them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from operator import index
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from acgpt.errors import InputError
from acgpt.query.passages import Passage, draw_passages

Count = int | Literal["size"]
Placement = Literal["gaps", "stretches"]

ALONE = 0.5  # how often the other gaps of a passage are given, where the length of one is asked
ASKED, GIVEN, UNKNOWN = 0, 1, 2  # roles of a token; a boolean conditioning set cast to int is an array of roles


def generator(seed: int, epoch: int, item: int) -> np.random.Generator:
    """Return the random generator of one text in one epoch; it depends only on these three numbers.

    They are the key of a Philox generator, which has an independent stream for each key.

    Args:
        seed: From 0 to 2**32 - 1.
        epoch: From 0 to 2**32 - 1.
        item: Number of the text, from 0 to 2**64 - 1.
    """
    for name, value, bits in (("seed", seed, 32), ("epoch", epoch, 32), ("item", item, 64)):
        if not isinstance(value, int | np.integer) or not 0 <= value < 1 << bits:
            raise InputError(f"{name} must be a whole number from 0 to 2**{bits} - 1, not {value!r}.")
    # The dtype is needed: numpy turns a list of large and small integers into floats, and keys would collide.
    key = np.array([index(seed) << 32 | index(epoch), item], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def first_draws(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return (count, 2) the first two numbers of `generator(seed, epoch, item).random()` for the items 0 … count - 1.

    Philox is a function of key and counter (Salmon et al., 2011), so the first numbers of all streams can be computed
    together: ten rounds of multiplication and exclusive or. A hundred thousand texts take a tenth of a second, so that
    training can know the sizes of an epoch's sets beforehand.
    """
    generator(seed, epoch, count)  # checks the ranges
    word, half = np.uint64(2**32 - 1), np.uint64(32)

    def product(a: np.uint64, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the high and the low 64 bits of a product."""
        low, middle, other = (a & word) * (b & word), (a & word) * (b >> half), (a >> half) * (b & word)
        carry = (low >> half) + (middle & word) + (other & word)
        return (a >> half) * (b >> half) + (middle >> half) + (other >> half) + (carry >> half), a * b

    items, zero = np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64)
    block = (zero + np.uint64(1), zero, zero, zero)  # the counter; it starts at 1 in numpy
    for number in range(10):
        key = np.uint64((index(seed) << 32 | index(epoch)) + number * 0x9E3779B97F4A7C15 & 2**64 - 1)
        other_key = items + np.uint64(number * 0xBB67AE8584CAA73B & 2**64 - 1)
        high, low = product(np.uint64(0xD2E7470EE14C6C93), block[0])
        other_high, other_low = product(np.uint64(0xCA5A826395121157), block[2])
        block = (other_high ^ block[1] ^ key, other_low, high ^ block[3] ^ other_key, low)
    return np.stack([(bits >> np.uint64(11)) * 2.0**-53 for bits in block[:2]], axis=1)


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def floor(x: float) -> int:
    """Return ⌊x⌋ of a share times a length, without rounding errors: 0.29 × 100 is 29."""
    return math.floor(x + 1e-9)


def check_share(name: str, low: float, high: float) -> None:
    """Raise an `InputError` unless 0 ≤ low ≤ high ≤ 1."""
    if not is_number(low) or not is_number(high) or not 0 <= low <= high <= 1:
        raise InputError(
            f"{name}_min and {name}_max must be numbers with 0 ≤ {name}_min ≤ {name}_max ≤ 1, not {low!r} and {high!r}."
        )


@dataclass(frozen=True)
class Sets:
    """Base of all parts; `unknown` is the share of the asked tokens that is made unknown."""

    unknown: float = field(default=0.0, kw_only=True)

    @property
    def exact(self) -> bool:
        """Whether exactly |x_c| tokens are given, never fewer."""
        return True

    def __post_init__(self) -> None:
        if not is_number(self.unknown) or not 0 <= self.unknown < 1:
            raise InputError(
                f"unknown is the share of asked tokens made unknown, from 0 to below 1, not {self.unknown!r}."
            )

    def hidden(self, asked: np.ndarray) -> np.ndarray:
        """Return how many of the asked tokens are made unknown, for arrays of counts; at least one stays asked."""
        hidden: np.ndarray = np.minimum(np.floor(self.unknown * asked + 1e-9), asked - 1).astype(np.int64)
        return hidden


@dataclass(frozen=True)
class Sized(Sets):
    """Base of the sets whose size |x_c| is uniform between two shares of the text (step 1 of the paper's procedure)."""

    r_min: float = 0.0
    r_max: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("r", self.r_min, self.r_max)

    def range(self, length: int) -> tuple[int, int]:
        """Return the smallest and the largest |x_c|; at most all tokens but one."""
        high = min(floor(self.r_max * length), length - 1)
        return min(-floor(-self.r_min * length), high), high


@dataclass(frozen=True)
class Blocks(Sized):
    """|x_c| tokens in B contiguous blocks: the paper's training distribution.

    Args:
        r_min: Smallest share of the text that is given.
        r_max: Largest share of the text that is given.
        b_min: Smallest number of blocks, or "size" for |x_c|.
        b_max: Largest number of blocks, or "size" for |x_c|.
        placement: "gaps": all arrangements of the blocks are equally likely. "stretches": the blocks are placed one
            after the other, and |x_c| is an upper bound (see above).
        unknown: Share of the asked tokens that is made unknown.
    """

    kind: ClassVar[str] = "blocks"

    b_min: Count = 1
    b_max: Count = "size"
    placement: Placement = "gaps"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("b_min", self.b_min), ("b_max", self.b_max)):
            if value != "size" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"{name} must be a whole number from 1, or 'size' for |x_c|, not {value!r}.")
        least, most = (math.inf if bound == "size" else bound for bound in (self.b_min, self.b_max))
        if least > most:
            raise InputError(f"b_min must be at most b_max, not {self.b_min!r} and {self.b_max!r}.")
        if self.placement not in get_args(Placement):
            raise InputError(f"placement must be one of {', '.join(get_args(Placement))}, not {self.placement!r}.")

    @property
    def exact(self) -> bool:
        """Whether exactly |x_c| tokens are given, never fewer."""
        return self.placement == "gaps"

    def place(self, length: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return (length,) booleans with `size` given tokens, or fewer (steps 2 to 4 of the paper's procedure)."""
        if size == 0:
            return np.zeros(length, dtype=bool)
        least, most = (size if bound == "size" else min(bound, size) for bound in (self.b_min, self.b_max))
        count = int(rng.integers(least, most, endpoint=True))
        # One token for each block; each other token goes to a random block.
        sizes = 1 + np.bincount(rng.integers(count, size=size - count), minlength=count)
        # The sizes need no shuffling: all their orders are equally likely.
        if self.placement == "stretches":
            return place_in_stretches(length, sizes, rng)
        # Of B + |x_e| units in a row, B random ones are blocks and the others are asked tokens.
        units = count + length - size
        blocks = rng.choice(units, size=count, replace=False, shuffle=False)
        given, widths = np.zeros(units, dtype=bool), np.ones(units, dtype=np.intp)
        given[blocks], widths[blocks] = True, sizes
        return given.repeat(widths)


def place_in_stretches(length: int, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return (length,) booleans with blocks of these sizes, each placed in a random free stretch and cut to fit it.

    Args:
        length: T.
        sizes: (B,) sizes of the blocks, below T in all.
        rng: Source of randomness.
    """
    steps = np.zeros(length + 1, dtype=np.int8)  # +1 where given tokens begin, -1 where they end
    free = [(0, length)]  # start and end of each free stretch
    for size, (choice, offset) in zip(sizes.tolist(), rng.random((len(sizes), 2)).tolist(), strict=True):
        number = int(choice * len(free))
        start, end = free[number]
        size = min(size, end - start)
        first = start + int(offset * (end - start - size + 1))
        steps[first] += 1
        steps[first + size] -= 1
        left, right = (start, first), (first + size, end)
        free[number : number + 1] = [stretch for stretch in (left, right) if stretch[0] < stretch[1]]
    return steps[:-1].cumsum().astype(bool)


@dataclass(frozen=True)
class Infilling(Sized):
    """|x_c| tokens at the two ends of the text; the middle is asked.

    Args:
        r_min: Smallest share of the text that is given.
        r_max: Largest share of the text that is given.
        f_min: Smallest share of the given tokens at the left end.
        f_max: Largest share of the given tokens at the left end.
        unknown: Share of the asked tokens that is made unknown.
    """

    kind: ClassVar[str] = "infilling"

    f_min: float = 0.2
    f_max: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("f", self.f_min, self.f_max)

    def place(self, length: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return (length,) booleans with `size` given tokens."""
        left = round(rng.uniform(self.f_min, self.f_max) * size)
        given = np.zeros(length, dtype=bool)
        given[:left] = True
        given[length - (size - left) :] = True
        return given


@dataclass(frozen=True)
class Empty(Sets):
    """Nothing is given; `unknown` is the share of the asked tokens that is made unknown."""

    kind: ClassVar[str] = "empty"

    def range(self, length: int) -> tuple[int, int]:
        """Return the smallest and the largest |x_c|: 0."""
        return 0, 0

    def place(self, length: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return (length,) booleans, all false."""
        return np.zeros(length, dtype=bool)


@dataclass(frozen=True)
class Gaps(Sized):
    """All tokens but those of gaps in passages of the text (see `passages`).

    Args:
        r_min: Smallest share of the text that is given.
        r_max: Largest share of the text that is given.
        passages: Number of passages that a text is cut into; each is read by itself.
        lengths: Share of the passages in which the length of a gap is asked, instead of the text of all gaps.
        length_weight: Weight of a length in the training loss, where that of a token is 1.
        unknown: Share of the asked tokens that is made unknown.
    """

    kind: ClassVar[str] = "gaps"

    passages: int = 1
    lengths: float = 0.0
    length_weight: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.passages, int) or isinstance(self.passages, bool) or self.passages < 1:
            raise InputError(f"passages must be a whole number from 1, not {self.passages!r}.")
        if not is_number(self.lengths) or not 0 <= self.lengths <= 1:
            raise InputError(
                f"lengths is the share of passages asked for the length of a gap, from 0 to 1, not {self.lengths!r}."
            )
        if not is_number(self.length_weight) or not 0 < self.length_weight < math.inf:
            raise InputError(f"length_weight must be a positive number, not {self.length_weight!r}.")

    def place(self, length: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return (length,) booleans with `size` given tokens, for a text whose words are not known."""
        return self.draw(np.zeros(length, dtype=np.uint8), size, rng)[0]

    def draw(
        self, kinds: np.ndarray, size: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, list[Passage], list[int | None]]:
        """Draw the passages of a text, and what is asked of each.

        Args:
            kinds: (T,) kinds of the text's tokens, see `passages.token_kinds`.
            size: |x_c|.
            rng: Source of randomness.

        Returns:
            (T,) booleans with `size` given tokens, besides gaps that are given where the length of another is asked;
            the passages; and for each the index of the gap whose length is asked, or `None` if the text of all is.
        """
        passages = draw_passages(kinds, self.passages, len(kinds) - size, rng)
        given = np.ones(len(kinds), dtype=bool)
        for first, count in (gap for passage in passages for gap in passage.gaps):
            given[first : first + count] = False
        questions: list[int | None] = []
        for i, passage in enumerate(passages):
            if not passage.gaps or rng.random() >= self.lengths:
                questions.append(None)
                continue
            number = int(rng.integers(len(passage.gaps)))
            asked, alone, part = passage.gaps[number], rng.random() < ALONE, passage
            if len(passages) == 1:  # its size is known
                part = passage.around(number, rng, alone=alone)
            elif alone:
                part = replace(passage, gaps=(asked,))
            # A batch has room for as many copies as were foreseen.
            if len(part.gaps) == 1 and part.end - part.start - asked[1] <= given[passage.start : passage.end].sum():
                given[part.start : part.end] = True
                given[asked[0] : sum(asked)] = False
            else:
                part = replace(part, gaps=tuple(g for g in passage.gaps if part.start <= g[0] and sum(g) <= part.end))
            passages[i] = part
            questions.append(part.gaps.index(asked))
        return given, passages, questions


Part = Blocks | Infilling | Empty | Gaps
KINDS: dict[str, type[Part]] = {kind.kind: kind for kind in (Blocks, Infilling, Empty, Gaps)}


@dataclass(frozen=True)
class Draw:
    """How one training text is asked.

    Args:
        roles: (T,) int8 roles of its tokens.
        passages: Its passages; `None` if the text is read as a whole.
        questions: For each passage the index of the gap whose length is asked; `None` where the text of all is.
        length_weight: Weight of a length in the training loss.
    """

    roles: np.ndarray
    passages: list[Passage] | None = None
    questions: list[int | None] = field(default_factory=list)
    length_weight: float = 1.0


@dataclass(frozen=True)
class Conditioning:
    """A distribution of conditioning sets: parts and their weights.

    >>> Conditioning.from_dict({"r_max": 0.6, "empty": 0.3}).weights        # autoregressive mixing with 0.3
    (0.7, 0.3)
    """

    parts: tuple[Part, ...] = (Blocks(),)
    weights: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.parts or len(self.parts) != len(self.weights):
            raise InputError("a conditioning distribution needs one or more parts, each with a weight.")
        if any(not is_number(weight) or weight < 0 for weight in self.weights) or not 0 < sum(self.weights) < math.inf:
            raise InputError(f"the weights of a mixture must be at least 0 and not all 0, not {list(self.weights)}.")

    @property
    def has_unknown(self) -> bool:
        """Whether tokens can be unknown."""
        return any(part.unknown and weight for part, weight in zip(self.parts, self.weights, strict=True))

    @property
    def exact(self) -> bool:
        """Whether every set has the |x_c| of `sizes`, never less."""
        return all(part.exact for part in self.parts)

    @property
    def passages(self) -> tuple[int, ...]:
        """For each part, the largest number of sequences that a text of it becomes."""
        return tuple(part.passages if isinstance(part, Gaps) else 1 for part in self.parts)

    @property
    def asks_lengths(self) -> bool:
        """Whether lengths of gaps can be asked."""
        return any(
            isinstance(part, Gaps) and part.lengths > 0 and weight > 0
            for part, weight in zip(self.parts, self.weights, strict=True)
        )

    @property
    def r_max(self) -> float:
        """Largest share of a text that is given; 0 if nothing ever is."""
        return max((float(part.r_max) for part in self.parts if isinstance(part, Sized)), default=0.0)

    def sizes(self, length: int, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of the mixture that each text is drawn from, and its |x_c|.

        Args:
            length: T, the same for every text.
            draws: (n, 2) for each text, the first two numbers of its generator, as in `first_draws`.

        Returns:
            (n,) indices of parts, and (n,) sizes.
        """
        if length < 1:
            raise InputError("a text of no tokens has no token to ask.")
        bounds = np.cumsum(self.weights)
        parts = np.searchsorted(bounds, draws[:, 0] * bounds[-1], side="right")
        low, high = np.array([part.range(length) for part in self.parts])[parts].T
        return parts, low + (draws[:, 1] * (high - low + 1)).astype(np.int64)

    def asked(self, length: int, draws: np.ndarray) -> np.ndarray:
        """Return (n,) numbers of asked tokens, or lower bounds if not `exact`; arguments as in `sizes`."""
        parts, sizes = self.sizes(length, draws)
        asked: np.ndarray = length - sizes
        for number, part in enumerate(self.parts):
            if part.unknown:
                selected = parts == number
                asked[selected] -= part.hidden(asked[selected])
        return asked

    def roles(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Return (length,) int8 roles `GIVEN`, `ASKED` or `UNKNOWN` of a text's tokens; at least one is asked."""
        return self.draw(np.zeros(length, dtype=np.uint8), rng).roles

    def draw(self, kinds: np.ndarray, rng: np.random.Generator) -> Draw:
        """Draw how a text is asked; at least one of its tokens is.

        Args:
            kinds: (T,) kinds of the text's tokens, see `passages.token_kinds`; only `Gaps` reads them.
            rng: Source of randomness.
        """
        (number,), (size,) = self.sizes(len(kinds), rng.random((1, 2)))
        part = self.parts[number]
        draw = Draw(np.empty(0))
        if isinstance(part, Gaps):
            given, passages, questions = part.draw(kinds, int(size), rng)
            draw = Draw(given, passages, questions, part.length_weight)
        else:
            given = part.place(len(kinds), int(size), rng)
            size = given.sum()  # blocks that are cut have fewer tokens than were foreseen
        roles: np.ndarray = given.astype(np.int8)
        if hidden := int(part.hidden(len(kinds) - size)):
            asked = np.flatnonzero(roles == ASKED)
            hidden = min(hidden, max(0, len(asked) - 1))
            roles[rng.choice(asked, size=hidden, replace=False, shuffle=False)] = UNKNOWN
        return replace(draw, roles=roles)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for `from_dict`, as written to `acgpt.json`, run folders and recipes."""
        shares = {part.unknown for part in self.parts}
        common = shares.pop() if len(shares) == 1 else 0.0
        parts = [
            {"kind": part.kind, "weight": weight, **asdict(part)}
            for part, weight in zip(self.parts, self.weights, strict=True)
        ]
        for part in parts:
            if part["unknown"] == common:  # written once, for all parts
                del part["unknown"]
            if part.get("placement") == "gaps":  # not written, so that datasets made before it keep their identity
                del part["placement"]
        return {"parts": parts, "unknown": common}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Conditioning:
        """Return the distribution of a recipe's `conditioning`.

        Either the parameters of `Blocks` and, optionally, the shares of texts that are drawn from `Infilling` (with its
        `f_min` and `f_max`) and from `Empty` instead:

            {r_max: 0.6, infilling: 0.2, empty: 0.1, unknown: 0.05}

        or any mixture, part by part; `unknown` can be set for one part, or at the top for all parts without it:

            {parts: [{kind: blocks, weight: 3, r_max: 0.6}, {kind: blocks, weight: 1, b_max: 2, unknown: 0.2}]}
        """
        if not isinstance(content, Mapping):
            raise InputError(f"conditioning must be a mapping such as {{r_max: 0.6}}, not {content!r}.")
        if "parts" in content:
            check_keys(content, ("parts", "unknown"), "conditioning with parts")
            entries = content["parts"]
            if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
                raise InputError(f"conditioning.parts must be a list of mappings, not {entries!r}.")
            common = {name: content[name] for name in ("unknown",) if name in content}
            parts = tuple(
                part_from_dict({**common, **entry}, f"conditioning.parts[{i}]") for i, entry in enumerate(entries)
            )
            return cls(parts, tuple(entry.get("weight", 1.0) for entry in entries))
        names = {kind: [field.name for field in fields(KINDS[kind])] for kind in ("blocks", "infilling", "empty")}
        check_keys(content, (*names["blocks"], *names["infilling"], "infilling", "empty"), "conditioning")
        weights = {kind: content.get(kind, 0.0) for kind in ("infilling", "empty")}
        if any(not is_number(share) or not 0 <= share <= 1 for share in weights.values()) or sum(weights.values()) > 1:
            raise InputError(f"infilling and empty are shares of the texts, at most 1 together, not {weights}.")
        weights = {"blocks": round(1 - sum(weights.values()), 12), **weights}
        # Create all parts, so that a wrong value is an error even in a part with weight 0.
        parts_by_kind = {
            kind: KINDS[kind](**{name: content[name] for name in names[kind] if name in content}) for kind in weights
        }
        used = [kind for kind in weights if weights[kind] > 0]
        return cls(tuple(parts_by_kind[kind] for kind in used), tuple(float(weights[kind]) for kind in used))


def part_from_dict(entry: Mapping[str, Any], where: str) -> Part:
    """Return one part of a mixture, `{kind: blocks, weight: 1, r_max: 0.6, …}`; `where` is for errors."""
    kind = entry.get("kind", "blocks")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"{where}: kind is one of {', '.join(KINDS)}, not {kind!r}.")
    names = [field.name for field in fields(KINDS[kind])]
    check_keys(entry, ("kind", "weight", *names), f"{where} of kind {kind}")
    try:
        return KINDS[kind](**{name: entry[name] for name in names if name in entry})
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def check_keys(content: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raise an `InputError` for an unknown key, with the closest known one."""
    for key in content:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(set(known)))}."
            if "conditioning" in known and key in {field.name for kind in KINDS.values() for field in fields(kind)}:
                hint = f"use 'conditioning.{key}'."
            raise InputError(f"{where} has no key {key!r}: {hint}")
