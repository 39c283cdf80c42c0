"""Evaluation datasets: texts and, for every mode, which of their tokens are given and asked.

Two perplexities are comparable if the same tokens were asked given the same tokens. The questions are therefore built
once and saved: the consecutive chunks of a corpus split and, for each chunk, a conditioning set from each distribution
of `modes`. The conditioning set of a chunk is a function of the seed, the distribution and the chunk's number, so
neither a limit nor the batch size changes it.

An evaluation dataset is one safetensors file:

    tokens            (texts, length) int32
    roles.infilling   (texts, length) int8     GIVEN, ASKED or UNKNOWN of `conditioning`
    roles.training    (texts, length) int8
    documents         (documents,) int64       tokens with which documents begin, counted over all texts
    metadata          one entry, `acgpt_evaluation_set`: JSON, the fields of `Origin` and the content's hash

The hash covers the questions (tokenizer hash, tokens, roles), not the file. Results are comparable if and only if the
hashes of their evaluation datasets are equal. `documents` is for intervals, and missing where it is not known.
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

from acgpt.common.files import write_atomically
from acgpt.errors import InputError
from acgpt.query.conditioning import ASKED, Conditioning, Sized, generator
from acgpt.query.modes import Mode, distributions

if TYPE_CHECKING:
    from acgpt.data.corpus import Corpus, Tokens
    from acgpt.models.metadata import Metadata

FORMAT = "acgpt_evaluation_set"
FORMAT_VERSION = 1
LENGTH, R_MAX = 1023, 0.6  # as in the paper's experiments
# Conditioning sets are drawn as in an epoch of training. Each distribution uses an epoch that no training reaches.
EPOCHS = {"training": 2**32 - 1, "infilling": 2**32 - 2}


@dataclass(frozen=True)
class Origin:
    """Where an evaluation dataset comes from: for readers, and to check whether a saved dataset is the requested one.

    Args:
        r_max: Upper bound of the share of a text that is given.
        seed: Seed of the conditioning sets.
        conditioning: The training distribution, `Conditioning.as_dict`.
        tokenizer_hash: `metadata.tokenizer_hash` of the tokenizer.
        corpus_hash: Hash of the corpus; `None` if the tokens come from elsewhere.
        split: Split of the corpus.
    """

    r_max: float
    seed: int
    conditioning: dict[str, Any]
    tokenizer_hash: str
    corpus_hash: str | None = None
    split: str | None = None


@dataclass(frozen=True, eq=False)
class EvaluationDataset:
    """An evaluation dataset: N texts of T tokens, and their roles under each conditioning distribution.

    Args:
        tokens: (N, T) int32 token ids.
        sampled_roles: By distribution, (N, T) int8 roles.
        origin: Where it comes from.
        documents: (D,) int64 tokens with which documents begin, counted over all texts in order; `None` if not known.
        path: File of the dataset, if it has one.
        new: Whether it still has to be saved there, see `keep`.
    """

    tokens: np.ndarray
    sampled_roles: Mapping[str, np.ndarray]
    origin: Origin
    documents: np.ndarray | None = None
    path: Path | None = None
    new: bool = False

    def __post_init__(self) -> None:
        """Check the documents, which the hash does not cover; raise a ValueError if they are invalid."""
        if (starts := self.documents) is not None and (
            starts.dtype != np.int64 or starts.ndim != 1 or not len(starts) or starts[0] != 0
            or starts[-1] >= self.tokens.size or (np.diff(starts) <= 0).any()
        ):  # fmt: skip
            raise ValueError("the documents do not begin in order within the texts")

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
        documents: np.ndarray | None = None,
    ) -> EvaluationDataset:
        """Cut a split into texts and draw their conditioning sets.

        Args:
            tokens: The split: `Corpus.tokens(…)`, or an array of token ids.
            tokenizer_hash: See `Origin`.
            length: T, tokens per text. With BOS, a text takes T + 1 positions.
            r_max: See `modes.distributions`.
            seed: Seed of the conditioning sets, from 0 to 2³² - 1.
            limit: Maximum number of texts, from the start. It does not change their conditioning sets.
            training: See `modes.distributions`.
            corpus_hash: See `Origin`.
            split: See `Origin`.
            documents: Tokens of the split with which documents begin (`Corpus.document_starts`), if known.
        """
        count = chunks(tokens, length, limit, split or "the split")
        texts = np.asarray(tokens[: count * length]).reshape(count, length)
        if texts.min() < 0 or texts.max() >= 2**31:
            raise InputError(
                f"the token ids range from {texts.min()} to {texts.max()}: they must be from 0 to 2³¹ - 1."
            )
        named = distributions(r_max, training)
        sampled_roles = {
            name: np.stack([named[name].roles(length, generator(seed, epoch, i)) for i in range(count)])
            for name, epoch in EPOCHS.items()
        }
        origin = Origin(float(r_max), seed, named["training"].as_dict(), tokenizer_hash, corpus_hash, split)
        starts = None if documents is None else documents[documents < count * length]
        return cls(texts.astype(np.int32), sampled_roles, origin, starts)

    def __len__(self) -> int:
        """N, the number of texts."""
        return len(self.tokens)

    @property
    def length(self) -> int:
        """T, the number of tokens per text."""
        return int(self.tokens.shape[1])

    def roles(self, mode: Mode) -> np.ndarray:
        """Return the roles of the tokens in a mode, (N, T). Without conditioning, every token is `ASKED`."""
        return self.sampled_roles.get(mode.conditioning, np.full(self.tokens.shape, ASKED, dtype=np.int8))

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the tokens and roles. Results are comparable if and only if their hashes are equal."""
        digest = hashlib.sha256()
        digest.update(
            json.dumps([FORMAT, self.origin.tokenizer_hash, *self.tokens.shape, *sorted(self.sampled_roles)]).encode()
        )
        digest.update(self.tokens.astype("<i4").tobytes())
        for name in sorted(self.sampled_roles):
            digest.update(self.sampled_roles[name].astype("<i1").tobytes())
        return digest.hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return a description for results: hash, size and origin."""
        documents = None if self.documents is None else len(self.documents)
        size = {"texts": len(self), "length": self.length, "documents": documents}
        return {"hash": self.hash, **size, **asdict(self.origin)}

    def head(self, limit: int) -> EvaluationDataset:
        """Return the dataset of the first texts only, as `build` makes it with this limit."""
        sampled_roles = {name: roles[:limit] for name, roles in self.sampled_roles.items()}
        tokens = self.tokens[:limit]
        starts = None if self.documents is None else self.documents[self.documents < tokens.size]
        return replace(self, tokens=tokens, sampled_roles=sampled_roles, documents=starts)

    @cached_property
    def document_numbers(self) -> np.ndarray | None:
        """(N, T) The number of each token's document, from 0; `None` if documents are not known."""
        if self.documents is None:
            return None
        counts = np.diff(self.documents, append=self.tokens.size)
        return np.arange(len(counts)).repeat(counts).reshape(self.tokens.shape)

    def require_tokenizer(self, tokenizer_hash: str) -> None:
        """Refuse a model with another tokenizer."""
        if tokenizer_hash != self.origin.tokenizer_hash:
            raise InputError(
                "the evaluation dataset was made with another tokenizer than the model's. Prepare the corpus with the "
                "model's tokenizer: acgpt prepare … --tokenizer MODEL."
            )

    # ---- files ---------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the dataset to a safetensors file, atomically; its folder is created if necessary."""
        arrays = {"tokens": self.tokens, **{f"roles.{name}": roles for name, roles in self.sampled_roles.items()}}
        arrays |= {} if self.documents is None else {"documents": self.documents}
        content = {"format_version": FORMAT_VERSION, **self.as_dict()}
        write_atomically(path, save(arrays, metadata={FORMAT: json.dumps(content)}))

    def keep(self) -> None:
        """Save a new dataset in its file for later evaluations; warn if the disk refuses."""
        if not self.new or self.path is None:
            return
        try:
            self.save(self.path)
        except OSError as error:
            warnings.warn(
                f"cannot save the evaluation dataset in {self.path} ({error.strerror or error}): it is built again "
                "each time. Choose another file with `dataset`.",
                stacklevel=2,
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EvaluationDataset:
        """Read a dataset that `save` wrote, and check its hash.

        Raises:
            InputError: The file is missing, damaged, of a newer format, or not an evaluation dataset.
        """
        name = os.fspath(path)
        try:
            with safe_open(name, framework="np") as file:
                metadata = file.metadata() or {}
                if FORMAT not in metadata:
                    raise InputError(f"{name} is a safetensors file, but not an evaluation dataset.")
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a mapping
            content = json.loads(metadata[FORMAT])
            if (version := content["format_version"]) > FORMAT_VERSION:
                raise InputError(
                    f"{name} has format version {version}; this acgpt reads up to {FORMAT_VERSION}. Upgrade acgpt."
                )
            loaded = cls(
                arrays["tokens"],
                {key: arrays[f"roles.{key}"] for key in EPOCHS},
                Origin(**{field.name: content[field.name] for field in fields(Origin)}),
                arrays.get("documents"),
                Path(name),
            )
            if loaded.hash != content["hash"]:
                raise ValueError("its content does not match its hash")
        except FileNotFoundError as error:
            raise InputError(f"there is no evaluation dataset {name}.") from error
        except InputError:
            raise
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{name} is damaged, or not an evaluation dataset: {error}. Choose another file, or delete it if acgpt "
                "wrote it."
            ) from error
        return loaded


def trained_r_max(metadata: Metadata | None) -> float | None:
    """Return the r_max that a model was trained with, from its `acgpt.json`; `None` if it is not stated there.

    For a mixture this is the largest r_max of its parts.
    """
    values = trained_r_maxes(metadata)
    return None if values is None else max(values, default=0.0)


def trained_r_maxes(metadata: Metadata | None) -> list[float] | None:
    """Return the r_max of each part of the mixture that a model was trained on, in order, each value once.

    `None` if the `acgpt.json` of the model does not state it. `trained_conditioning` is the part of the first value.
    """
    if metadata is None or not metadata.conditioning:
        return None
    try:
        parts = Conditioning.from_dict(metadata.conditioning).parts
    except InputError:  # written by hand, or by another program
        return None
    return list(dict.fromkeys(float(part.r_max) for part in parts if isinstance(part, Sized)))


def trained_conditioning(metadata: Metadata | None) -> Conditioning:
    """Return the conditioning distribution that a model was trained on, in the form used for evaluation.

    This is the first part of the model's mixture that has a size, without unknown tokens: empty conditioning sets and
    unknown tokens are for training only. The evaluation at the end of training uses the same. Pass it with its r_max:

        training = trained_conditioning(lm.metadata)
        dataset_of_corpus(corpus, split="test", r_max=training.r_max, training=training)

    Raises:
        InputError: The model states no conditioning.
    """
    stated = None if metadata is None else metadata.conditioning
    parts = Conditioning.from_dict(stated).parts if stated else ()
    sized = [part for part in parts if isinstance(part, Sized)]
    if not sized:
        raise InputError(
            "the model has no acgpt.json that states what was given in training: use `r_max` or `conditioning`."
        )
    return Conditioning((replace(sized[0], unknown=0.0),))


def name_texts(dataset: Mapping[str, Any]) -> str:
    """Name the texts of `EvaluationDataset.as_dict` for people: they are the first ones of their split."""
    name = f"texts 1–{dataset['texts']:,}" if dataset["texts"] > 1 else "text 1"
    return f"{name} of {dataset['split']}" if dataset["split"] else name


def dataset_of_corpus(
    corpus: Corpus,
    path: str | os.PathLike[str] | None = None,
    *,
    split: str,
    length: int = LENGTH,
    r_max: float = R_MAX,
    seed: int = 0,
    limit: int | None = None,
    training: Conditioning | None = None,
    keep: bool = True,
) -> tuple[EvaluationDataset, Path]:
    """Load the saved evaluation dataset of a corpus split, or build and save it.

        dataset, path = dataset_of_corpus(Corpus.open("data/mine"), split="test", r_max=0.4, limit=100)
        dataset.hash          # results are comparable if their hashes are equal

    Args:
        corpus: The corpus.
        path: File of the dataset. Default: in the corpus's folder, with a name that contains the settings.
        split: Split of the corpus; for it and the next five, see `EvaluationDataset.build`.
        length: Tokens per text.
        r_max: Maximum share of a text that is given.
        seed: Seed of the conditioning sets.
        limit: Maximum number of texts.
        training: The training distribution.
        keep: Save a new dataset now. If not, the caller does, by its `keep`.

    Returns:
        The dataset and its file. If the file cannot be written, there is a warning.

    Raises:
        InputError: A path was passed, and its file holds another dataset.
    """
    tokens, tokenizer_hash = corpus.tokens(split), str(corpus.manifest["tokenizer_hash"])
    conditioning = distributions(r_max, training)["training"].as_dict()
    origin = Origin(float(r_max), seed, conditioning, tokenizer_hash, corpus.hash, split)
    by_user, count = path is not None, chunks(tokens, length, limit, f"{split} of {corpus.folder}")
    parts = [split, str(length), f"r{float(r_max)}", f"seed{seed}"]
    parts += [] if limit is None else [f"first{limit}"]
    if training is not None:
        parts.append(hashlib.sha256(json.dumps(conditioning, sort_keys=True).encode()).hexdigest()[:8])
    path = corpus.folder / "evaluation" / f"{'-'.join(parts)}.safetensors" if path is None else Path(path)
    if path.exists():
        saved = EvaluationDataset.load(path)
        if saved.origin == origin and saved.tokens.shape == (count, length):
            return saved, path
        if by_user:
            raise InputError(
                f"{path} is an evaluation dataset of another corpus, or has other settings: choose another file."
            )
        warnings.warn(f"{path} is of another corpus, or has other settings: it is built again.", stacklevel=2)
    built = EvaluationDataset.build(
        tokens, tokenizer_hash=tokenizer_hash, corpus_hash=corpus.hash, split=split, length=length, r_max=r_max,
        seed=seed, limit=limit, training=training, documents=corpus.document_starts(split, count * length),
    )  # fmt: skip
    dataset = replace(built, path=path, new=True)
    if keep:
        dataset.keep()
    return dataset, path


def chunks(tokens: Tokens | np.ndarray, length: int, limit: int | None, split: str = "the split") -> int:
    """Return the number of texts that a split is cut into.

    Args:
        tokens: The split.
        length: Tokens per text.
        limit: Maximum number of texts.
        split: Name of the split, for errors.
    """
    if length < 1 or (limit is not None and limit < 1):
        raise InputError("the length of the texts and the limit must be at least 1.")
    if len(tokens) < length:
        remedy = "use a smaller `length`" if len(tokens) else "prepare more text (acgpt prepare --validation)"
        raise InputError(f"{split} has {len(tokens)} tokens, but a text needs {length}: {remedy}, or another split.")
    return len(tokens) // length if limit is None else min(len(tokens) // length, limit)
