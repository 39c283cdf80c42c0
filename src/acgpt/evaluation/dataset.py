"""Evaluation sets: texts and, for every mode, what is given and what is asked of them; made once, shared by all.

Two perplexities can be compared if the same tokens were asked given the same tokens. So the choice is made once and
kept: the chunks of a corpus split, in order, and for each chunk a conditioning set from each distribution of `modes`.
Which set a chunk gets is a function of the seed, the distribution, and the chunk's number, so neither a limit nor a
batch size can change it.

A set is one safetensors file:

    tokens            (texts, length) int32
    roles.infilling   (texts, length) int8     GIVEN, ASKED or UNKNOWN of `conditioning`
    roles.training    (texts, length) int8
    metadata          one entry, `acgpt_evaluation_set`: JSON, the fields of `Origin` and the content's hash

The hash is taken over the content (the tokenizer's hash, tokens, roles), not over the file: results are comparable if
and only if their sets' hashes agree, wherever the sets came from.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from acgpt.common.files import write_whole
from acgpt.errors import InputError
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN, Conditioning, Sized, generator
from acgpt.query.modes import Mode, distributions

if TYPE_CHECKING:
    from acgpt.data.corpus import Corpus, Tokens
    from acgpt.models.metadata import Metadata

FORMAT = "acgpt_evaluation_set"
FORMAT_VERSION = 1
LENGTH, R_MAX = 1023, 0.6  # as in the paper's experiments
# Conditioning sets are drawn as in an epoch of training, in epochs that no training reaches: one a distribution.
EPOCHS = {"training": 2**32 - 1, "infilling": 2**32 - 2}


@dataclass(frozen=True)
class Origin:
    """Where an evaluation set comes from: for people, and to tell whether a saved one is the one that is wanted.

    Args:
        r_max: The largest share of a text that is given.
        seed: Of the conditioning sets.
        conditioning: The training distribution, `Conditioning.as_dict`.
        tokenizer_hash: `metadata.tokenizer_hash` of the tokenizer that made the tokens.
        corpus_hash: Of the prepared corpus, if it came from one.
        split: Of that corpus.
    """

    r_max: float
    seed: int
    conditioning: dict[str, Any]
    tokenizer_hash: str
    corpus_hash: str | None = None
    split: str | None = None


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """N texts of T tokens each, and the roles of their tokens under every conditioning distribution."""

    tokens: np.ndarray  # (N, T) int32
    drawn: Mapping[str, np.ndarray]  # by distribution, (N, T) int8
    origin: Origin

    def __post_init__(self) -> None:
        """Refuse, with a ValueError, arrays that are no evaluation set."""
        arrays = {"tokens": self.tokens, **self.drawn}
        for name, array in arrays.items():
            if array.ndim != 2 or array.shape != self.tokens.shape or not array.size:
                raise ValueError(f"{name} has the shape {array.shape}")
            if array.dtype != (np.int32 if name == "tokens" else np.int8):
                raise ValueError(f"{name} is of type {array.dtype}")
        for name, roles in self.drawn.items():
            if not np.isin(roles, (GIVEN, ASKED, UNKNOWN)).all() or not (roles == ASKED).any(axis=1).all():
                raise ValueError(f"the roles of {name} are none")
        if self.tokens.min() < 0:
            raise ValueError("a token id is negative")

    @classmethod
    def build(
        cls,
        tokens: Tokens | np.ndarray,
        *,
        tokenizer_hash: str,
        length: int = LENGTH,
        r_max: float = R_MAX,
        seed: int = 0,
        limit: int | None = None,
        training: Conditioning | None = None,
        corpus_hash: str | None = None,
        split: str | None = None,
    ) -> EvaluationSet:
        """Cut a split into texts and draw their conditioning sets.

        Args:
            tokens: The split: `Corpus.tokens(…)`, or an array of token ids.
            tokenizer_hash: As in `Origin`.
            length: T, tokens a text; with BOS a text takes T + 1 positions.
            r_max: As in `modes.distributions`.
            seed: From 0 to 2³² - 1.
            limit: Take the first texts only; those get what they would get without a limit.
            training: As in `modes.distributions`.
            corpus_hash: As in `Origin`.
            split: As in `Origin`.
        """
        count = chunks(tokens, length, limit, split or "the split")
        texts = np.asarray(tokens[: count * length]).reshape(count, length)
        if texts.min() < 0 or texts.max() >= 2**31:
            raise InputError(f"the token ids go from {texts.min()} to {texts.max()}: no tokenizer has made them.")
        named = distributions(r_max, training)
        drawn = {
            name: np.stack([named[name].roles(length, generator(seed, epoch, i)) for i in range(count)])
            for name, epoch in EPOCHS.items()
        }
        origin = Origin(float(r_max), seed, named["training"].as_dict(), tokenizer_hash, corpus_hash, split)
        return cls(texts.astype(np.int32), drawn, origin)

    def __len__(self) -> int:
        """N, the number of texts."""
        return len(self.tokens)

    @property
    def length(self) -> int:
        """T, the number of tokens of each text."""
        return int(self.tokens.shape[1])

    def roles(self, mode: Mode) -> np.ndarray:
        """(N, T) the roles that were drawn for this mode; what it asks is where they are `ASKED`."""
        return self.drawn.get(mode.conditioning, np.full(self.tokens.shape, ASKED, dtype=np.int8))

    @cached_property
    def hash(self) -> str:
        """A hash of what is asked given what: results are comparable if and only if it is the same."""
        digest = hashlib.sha256()
        digest.update(
            json.dumps([FORMAT, self.origin.tokenizer_hash, *self.tokens.shape, *sorted(self.drawn)]).encode()
        )
        digest.update(self.tokens.astype("<i4").tobytes())
        for name in sorted(self.drawn):
            digest.update(self.drawn[name].astype("<i1").tobytes())
        return digest.hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """What describes the set, for results."""
        return {"hash": self.hash, "texts": len(self), "length": self.length, **asdict(self.origin)}

    def head(self, limit: int) -> EvaluationSet:
        """The first texts alone: what `build` makes under this limit."""
        drawn = {name: roles[:limit] for name, roles in self.drawn.items()}
        return EvaluationSet(self.tokens[:limit], drawn, self.origin)

    def require_tokenizer(self, tokenizer_hash: str) -> None:
        """Refuse a model whose tokens these are not."""
        if tokenizer_hash != self.origin.tokenizer_hash:
            raise InputError(
                "the evaluation set was made with another tokenizer than the model's, so its tokens would be read as "
                "others. Prepare the corpus with this model's: acgpt prepare … --tokenizer MODEL."
            )

    # ---- as a file -----------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the set into a safetensors file, whole or not at all; its folder is made if need be."""
        arrays = {"tokens": self.tokens, **{f"roles.{name}": roles for name, roles in self.drawn.items()}}
        content = {"format_version": FORMAT_VERSION, **self.as_dict()}
        write_whole(path, save(arrays, metadata={FORMAT: json.dumps(content)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EvaluationSet:
        """Read a set that `save` wrote, and check that it is whole."""
        name = os.fspath(path)
        try:
            with safe_open(name, framework="np") as file:
                metadata = file.metadata() or {}
                if FORMAT not in metadata:
                    raise InputError(f"{name} is a safetensors file, but not an evaluation set of acgpt.")
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no mapping
            content = json.loads(metadata[FORMAT])
            if (version := content["format_version"]) > FORMAT_VERSION:
                raise InputError(
                    f"{name} has format version {version}; this acgpt reads up to {FORMAT_VERSION}. Upgrade acgpt."
                )
            loaded = cls(
                arrays["tokens"],
                {key: arrays[f"roles.{key}"] for key in EPOCHS},
                Origin(**{field.name: content[field.name] for field in fields(Origin)}),
            )
            if loaded.hash != content["hash"]:
                raise ValueError("its content is not what its hash says")
        except FileNotFoundError as error:
            raise InputError(f"there is no evaluation set {name}.") from error
        except InputError:
            raise
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{name} is damaged, or no evaluation set: {error}. Name another, or delete it if it is one of acgpt's."
            ) from error
        return loaded


def own_r_max(said: Metadata | None) -> float | None:
    """The r_max that a model was trained with, by its `acgpt.json`; `None` if that does not say."""
    try:
        return Conditioning.from_dict(said.conditioning).r_max if said and said.conditioning else None
    except InputError:  # written by hand, or by another program
        return None


def own_conditioning(model: Metadata | None, *others: Metadata | None) -> Conditioning:
    """The distribution that a model was trained on, as an evaluation asks it: as training evaluates at its end.

    That is the first part of the model's mixture with a size, with no token unknown: nothing given and unknown tokens
    belong to training. Pass it with its r_max:

        training = own_conditioning(lm.metadata)
        set_of_corpus(corpus, split="test", r_max=training.r_max, training=training)

    Args:
        model: What the model says, `LanguageModel.metadata`.
        others: What further models say that are to be asked the same.

    Raises:
        InputError: One of them names no conditioning, or they name different ones.
    """
    found = []
    for said in (model, *others):
        if said is None or not said.conditioning:
            what = (
                "has no acgpt.json" if said is None else f"(method {said.method}) names no conditioning in acgpt.json"
            )
            raise InputError(f"the model {what}: name one with `r_max` or `conditioning`.")
        sized = [part for part in Conditioning.from_dict(said.conditioning).parts if isinstance(part, Sized)]
        if not sized:
            raise InputError(
                "the model was trained with nothing given, by its acgpt.json: use `r_max` or `conditioning`."
            )
        found.append(Conditioning((replace(sized[0], unknown=0.0),)))
    if any(other != found[0] for other in found):
        shown = "; ".join(dict.fromkeys(json.dumps(each.as_dict()["parts"]) for each in found))
        raise InputError(f"the models were trained on different conditioning ({shown}): name one of them.")
    return found[0]


@dataclass(frozen=True)
class SetChoice:
    """Which evaluation set of a corpus is meant.

    Args:
        split: Of the corpus.
        length: T, tokens a text; with BOS a text takes T + 1 positions.
        r_max: As in `modes.distributions`.
        seed: From 0 to 2³² - 1.
        limit: Take the first texts only; those get what they would get without a limit.
        training: As in `modes.distributions`.
    """

    split: str
    length: int = LENGTH
    r_max: float = R_MAX
    seed: int = 0
    limit: int | None = None
    training: Conditioning | None = None

    @property
    def conditioning(self) -> dict[str, Any]:
        """The training distribution, for the record."""
        return distributions(self.r_max, self.training)["training"].as_dict()

    @property
    def name(self) -> str:
        """The name of its file, without the ending: all that decides what is asked."""
        words = [self.split, str(self.length), f"r{float(self.r_max)}", f"seed{self.seed}"]
        words += [] if self.limit is None else [f"first{self.limit}"]
        if self.training is not None:
            words.append(hashlib.sha256(json.dumps(self.conditioning, sort_keys=True).encode()).hexdigest()[:8])
        return "-".join(words)


def set_of_corpus(
    corpus: Corpus, path: str | os.PathLike[str] | None = None, **choice: Any
) -> tuple[EvaluationSet, Path]:
    """Find the evaluation set of a corpus split as it was saved, or make it, and save it if that can be done.

        questions, path = set_of_corpus(Corpus.open("data/mine"), split="test", r_max=0.4, limit=100)
        questions.hash          # results are comparable if it is the same

    Args:
        corpus: The corpus.
        path: Where the set is kept. Default: in the corpus's folder, under a name that says what it is.
        **choice: As in `SetChoice`: `split`, and if it is to be otherwise length, r_max, seed, limit, training.

    Returns:
        The set, and its file.
    """
    found, path, new = find_or_build(corpus, SetChoice(**choice), path)
    if new:
        keep(found, path)
    return found, path


def keep(evaluation_set: EvaluationSet, path: Path) -> None:
    """Save a set, for the next model; a warning where that cannot be done."""
    try:
        evaluation_set.save(path)
    except OSError as error:
        warnings.warn(
            f"the evaluation set cannot be kept in {path} ({error.strerror or error}): it is made each time, always "
            "the same. `dataset` names another path.",
            stacklevel=2,
        )


def find_or_build(
    corpus: Corpus, choice: SetChoice, path: str | os.PathLike[str] | None = None
) -> tuple[EvaluationSet, Path, bool]:
    """Find the evaluation set of a corpus split as it was saved, or make it.

        questions, path, new = find_or_build(corpus, SetChoice("test", limit=100))
        if new:
            keep(questions, path)

    Args:
        corpus: The corpus.
        choice: Which set is meant.
        path: As in `set_of_corpus`.

    Returns:
        The set, its file, and whether it is new: not there yet, or not as it should be.

    Raises:
        InputError: The file that was named holds another set.
    """
    split, length = choice.split, choice.length
    tokens, tokenizer_hash = corpus.tokens(split), str(corpus.manifest["tokenizer_hash"])
    wanted = Origin(float(choice.r_max), choice.seed, choice.conditioning, tokenizer_hash, corpus.hash, split)
    named, count = path is not None, chunks(tokens, length, choice.limit, f"{split} of {corpus.folder}")
    path = corpus.folder / "evaluation" / f"{choice.name}.safetensors" if path is None else Path(path)
    if path.exists():
        saved = EvaluationSet.load(path)
        if saved.origin == wanted and saved.tokens.shape == (count, length):
            return saved, path, False
        if named:
            raise InputError(
                f"{path} is an evaluation set of another corpus, or was made in another way: name another."
            )
        warnings.warn(f"{path} was made of another corpus, or in another way; it is made again.", stacklevel=2)
    made = EvaluationSet.build(tokens, tokenizer_hash=tokenizer_hash, corpus_hash=corpus.hash, **vars(choice))
    return made, path, True


def chunks(tokens: Tokens | np.ndarray, length: int, limit: int | None, split: str = "the split") -> int:
    """How many texts of this length are taken of a split, which an error calls by its name."""
    if length < 1 or (limit is not None and limit < 1):
        raise InputError("the length of a text and the limit on their number must be at least 1.")
    if len(tokens) < length:
        remedy = "use a smaller `length`" if len(tokens) else "prepare more text (acgpt prepare --validation)"
        raise InputError(f"{split} has {len(tokens)} tokens, and one text takes {length}: {remedy}, or another split.")
    return len(tokens) // length if limit is None else min(len(tokens) // length, limit)
