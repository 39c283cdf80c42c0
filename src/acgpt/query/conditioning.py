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
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from itertools import chain
from operator import index
from typing import Any, ClassVar, Literal

import numpy as np

from acgpt.common.options import Options, check_keys, documented, option
from acgpt.errors import InputError
from acgpt.query.passages import Passage, draw_passages

Count = Literal["size"] | int
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


def floor(x: float) -> int:
    """Return ⌊x⌋ of a share times a length, without rounding errors: 0.29 × 100 is 29."""
    return math.floor(x + 1e-9)


@dataclass(frozen=True)
class Sets(Options):
    """Base of all parts."""

    kind: ClassVar[str]

    _: KW_ONLY
    unknown: float = option("Share of the asked tokens that is made unknown.", 0.0, minimum=0, below=1)

    @property
    def exact(self) -> bool:
        """Whether exactly |x_c| tokens are given, never fewer."""
        return True

    def ordered(self, least: str, most: str) -> None:
        """Refuse a lower bound above the upper one. "size" is the largest number of blocks."""
        bounds = getattr(self, least), getattr(self, most)
        low, high = (math.inf if bound == "size" else bound for bound in bounds)
        if low > high:
            raise InputError(f"{least} must be at most {most}, not {bounds[0]!r} and {bounds[1]!r}.")

    def hidden(self, asked: np.ndarray) -> np.ndarray:
        """Return how many of the asked tokens are made unknown, for arrays of counts; at least one stays asked."""
        hidden: np.ndarray = np.minimum(np.floor(self.unknown * asked + 1e-9), asked - 1).astype(np.int64)
        return hidden


@dataclass(frozen=True)
class Sized(Sets):
    """Base of the sets whose size |x_c| is uniform between two shares of the text (step 1 of the paper's procedure)."""

    r_min: float = option("Smallest share of the text that is given.", 0.0, minimum=0, maximum=1)
    r_max: float = option("Largest share of the text that is given.", 0.6, minimum=0, maximum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ordered("r_min", "r_max")

    def range(self, length: int) -> tuple[int, int]:
        """Return the smallest and the largest |x_c|; at most all tokens but one."""
        high = min(floor(self.r_max * length), length - 1)
        return min(-floor(-self.r_min * length), high), high


@documented
@dataclass(frozen=True)
class Blocks(Sized):
    """|x_c| tokens in B contiguous blocks: the paper's training distribution."""

    kind = "blocks"

    b_min: Count = option('Smallest number of blocks, or "size" for |x_c|.', 1, minimum=1)
    b_max: Count = option('Largest number of blocks, or "size" for |x_c|.', "size", minimum=1)
    placement: Placement = option(
        '"gaps": all arrangements of the blocks are equally likely. "stretches": the blocks are placed one after the '
        "other, and |x_c| is an upper bound (see above).",
        "gaps",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ordered("b_min", "b_max")

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


@documented
@dataclass(frozen=True)
class Infilling(Sized):
    """|x_c| tokens at the two ends of the text; the middle is asked."""

    kind = "infilling"

    f_min: float = option("Smallest share of the given tokens at the left end.", 0.2, minimum=0, maximum=1)
    f_max: float = option("Largest share of the given tokens at the left end.", 0.8, minimum=0, maximum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ordered("f_min", "f_max")

    def place(self, length: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return (length,) booleans with `size` given tokens."""
        left = round(rng.uniform(self.f_min, self.f_max) * size)
        given = np.zeros(length, dtype=bool)
        given[:left] = True
        given[length - (size - left) :] = True
        return given


@documented
@dataclass(frozen=True)
class Empty(Sets):
    """Nothing is given."""

    kind = "empty"

    def range(self, length: int) -> tuple[int, int]:
        """Return the smallest and the largest |x_c|: 0."""
        return 0, 0

    def place(self, length: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return (length,) booleans, all false."""
        return np.zeros(length, dtype=bool)


@documented
@dataclass(frozen=True)
class Gaps(Sized):
    """All tokens but those of gaps in passages of the text (see `passages`)."""

    kind = "gaps"

    passages: int = option("Number of passages that a text is cut into; each is read by itself.", 1, minimum=1)
    lengths: float = option(
        "Share of the passages in which the length of a gap is asked, instead of the text of all gaps.",
        0.0,
        minimum=0,
        maximum=1,
    )
    length_weight: float = option(
        "Weight of a length in the training loss, where that of a token is 1.", 10.0, above=0, below=math.inf
    )

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
class Shares(Options):
    """Shares of the texts that are not asked in blocks."""

    infilling: float = option("Share of the texts that are drawn from `Infilling`.", 0.0, minimum=0, maximum=1)
    empty: float = option("Share of the texts that are drawn from `Empty`.", 0.0, minimum=0, maximum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.infilling + self.empty > 1:
            raise InputError(
                "infilling and empty are shares of the texts, and may be at most 1 together, not "
                f"{self.infilling} and {self.empty}."
            )


@dataclass(frozen=True)
class Entry(Options):
    """What a part of a mixture is, besides its parameters."""

    kind: Literal["blocks", "infilling", "empty", "gaps"] = option("Kind of the part.", "blocks")
    weight: float = option("Weight of the part.", 1.0, minimum=0, below=math.inf)


@dataclass(frozen=True)
class Conditioning(Options):
    """A distribution of conditioning sets: parts and their weights.

    >>> Conditioning.from_dict({"r_max": 0.6, "empty": 0.3}).weights        # autoregressive mixing with 0.3
    (0.7, 0.3)
    """

    parts: tuple[Part, ...] = (Blocks(),)
    weights: tuple[float, ...] = option("Weight of each part.", (1.0,), minimum=0, below=math.inf)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.parts or len(self.parts) != len(self.weights):
            raise InputError("a conditioning distribution needs one or more parts, each with a weight.")
        if not any(self.weights):
            raise InputError("the weights of a mixture must not all be 0.")

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
            mixture = [
                part_from_dict({**common, **entry}, f"conditioning.parts[{i}]") for i, entry in enumerate(entries)
            ]
            return cls(tuple(part for part, _ in mixture), tuple(weight for _, weight in mixture))
        kinds: Any = Shares, Blocks, Infilling, Empty
        names = {kind: [item.name for item in fields(kind)] for kind in kinds}
        check_keys(content, list(chain(*names.values())), "conditioning")
        shares, *all_parts = [  # all parts, so that a wrong value is an error even in a part with weight 0
            kind.read({name: content[name] for name in names[kind] if name in content}, "conditioning")
            for kind in kinds
        ]
        weights = (round(1 - shares.infilling - shares.empty, 12), shares.infilling, shares.empty)
        used = [number for number, weight in enumerate(weights) if weight > 0]
        return cls(tuple(all_parts[number] for number in used), tuple(weights[number] for number in used))


def part_from_dict(content: Mapping[str, Any], key: str) -> tuple[Part, float]:
    """Return one part of a mixture, `{kind: blocks, weight: 1, r_max: 0.6, …}`, and its weight; `key` is for errors."""
    own = [item.name for item in fields(Entry)]
    entry = Entry.read({name: content[name] for name in own if name in content}, key)
    kind = KINDS[entry.kind]
    check_keys(content, [*own, *(item.name for item in fields(kind))], f"{key} of kind {entry.kind}")
    return kind.read({name: content[name] for name in content if name not in own}, key), entry.weight
