"""Reference texts that generated texts are compared with: from a corpus or from a file.

There are two rules for a corpus:

    documents    the first documents with at least `length` tokens, each cut to `length`: the paper's rule for FineWeb
    windows      the split cut into windows of `length` tokens. If there are more than needed, windows that are spread
                 over the whole split are chosen: adjacent windows come from one article, and a few articles are a poor
                 reference. The paper's rule for WikiText-103, paragraphs of at least 1,024 tokens, finds none: the
                 longest paragraph of the test split has 481 words

The region that the prompts were taken from is excluded, as in the paper. `originals` is another reference, for the
asked part only: the tokens of the corpus in the sampled positions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from acgpt.data.corpus import Corpus, Tokens
from acgpt.data.rows import Bad, Reader, decode, lines, parse_json
from acgpt.errors import InputError
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.evaluation.generations import Generation, Generations
from acgpt.evaluation.text_metrics import with_tokens
from acgpt.query.conditioning import Conditioning
from acgpt.query.text import pieces

COUNT = 1000  # maximum number of texts, as in the paper for FineWeb
RULES = ("documents", "windows")
BLOCK = 2**22  # tokens per read when searching for documents


@dataclass(frozen=True)
class Reference:
    """Reference texts.

    Args:
        texts: The texts; none is empty.
        about: Their origin, for results.
    """

    texts: list[str]
    about: dict[str, Any]

    @property
    def hash(self) -> str:
        """SHA-256 of the texts."""
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return a description for results."""
        return {**self.about, "texts": len(self.texts), "hash": self.hash}


def reference_from_corpus(
    corpus: Corpus,
    split: str | None = None,
    *,
    length: int,
    generated: Sequence[Generations] = (),
    rule: str | None = None,
    skip: int | None = None,
    count: int = COUNT,
    allow_none: bool = False,
) -> Reference:
    """Return reference texts of a corpus split, decoded in the same way as generated texts.

    Args:
        corpus: The corpus.
        split: Split of the corpus. Default: test if there is one, else validation.
        length: Tokens per text.
        generated: The generations to compare; the region of their prompts is excluded.
        rule: "documents" or "windows". Default: documents, if the corpus separates them.
        skip: Number of tokens to exclude at the start, instead of that region.
        count: Maximum number of texts.
        allow_none: Accept that there are no texts, if nothing will be compared with them.

    Raises:
        InputError: There are no texts.
    """
    split = split or ("test" if "test" in corpus.splits else "validation")
    tokens, tokenizer = corpus.tokens(split), corpus.tokenizer()
    rule = rule or ("documents" if corpus.manifest["convention"] == "documents" else "windows")
    if rule not in RULES:
        raise InputError(f"there is no rule {rule!r} for a reference: use one of {', '.join(RULES)}.")
    prompts = max((prompt_region(file.record["set"], corpus, split) for file in generated), default=0)
    begin = prompts if skip is None else skip
    eos = corpus.manifest.get("eos_token_id", tokenizer.eos_token_id)
    candidates = documents(tokens, eos, begin) if rule == "documents" else windows(tokens, length, begin, count)
    long_enough = (ids for ids in candidates if len(ids) >= length)
    texts = [decoded(ids[:length], tokenizer) for ids in islice(long_enough, count)]
    about: dict[str, Any] = {"corpus": str(corpus.folder), "corpus_hash": corpus.hash, "split": split, "rule": rule}
    about |= {"length": length, "skip": begin, "overlaps_prompts": bool(texts) and begin < prompts}
    if not texts and not allow_none:
        skipped = f", after the {begin:,} tokens that are skipped" if begin else ""
        raise InputError(
            f"{corpus.folder}, {split}: no {rule} of {length} tokens{skipped}. Use another `split`, a smaller "
            "`length`, or `skip=0`, which may include the texts of the prompts; or generate fewer texts (--limit)."
        )
    return Reference(texts, about)


def prompt_region(dataset: Mapping[str, Any], corpus: Corpus, split: str) -> int:
    """Return the number of tokens, from the start of a split, that an evaluation dataset was cut from."""
    if dataset.get("corpus_hash") != corpus.hash or dataset.get("split") != split:
        return 0
    return int(dataset.get("texts") or 0) * int(dataset.get("length") or 0)


def documents(tokens: Tokens, eos: int, begin: int) -> Iterator[np.ndarray]:
    """Yield the documents that start at or after token `begin`, without their EOS."""
    start, offset = (0 if begin == 0 else None), max(0, begin - 1)  # an EOS marks the start of the next document
    while offset < len(tokens):
        block = tokens[offset : offset + BLOCK]
        for end in (np.flatnonzero(block == eos) + offset).tolist():
            if start is not None:
                yield tokens[start:end]
            start = end + 1
        offset += len(block)
    if start is not None and start < len(tokens):
        yield tokens[start : len(tokens)]


def windows(tokens: Tokens, length: int, begin: int, count: int) -> Iterator[np.ndarray]:
    """Return non-overlapping windows: all of them, or `count` that are spread evenly."""
    starts = range(begin, len(tokens) - length + 1, length)
    count = min(count, len(starts))
    chosen = [starts[number * len(starts) // count] for number in range(count)]
    return (tokens[start : start + length] for start in chosen)


def decoded(ids: Sequence[int] | np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of token ids, including special tokens."""
    return str(tokenizer.decode(list(map(int, ids)), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def reference_from_file(path: Path, field: str = "text", count: int = COUNT) -> Reference:
    """Return the texts of a file.

    Args:
        path: A .jsonl, or a .txt with one text per line; blank lines are skipped.
        field: Field of each line of a .jsonl.
        count: Maximum number of texts.

    Raises:
        InputError: The file is of another kind, cannot be read, or has no text.
    """
    kinds = [suffix.lower() for suffix in path.suffixes]
    kind = next((suffix for suffix in reversed(kinds) if suffix in (".jsonl", ".txt")), None)
    if kind is None:
        raise InputError(f"{path} is neither a prepared corpus nor a .jsonl or .txt file: pass one of these.")
    reader, texts = Reader(path), list[str]()
    try:
        for number, raw in enumerate(lines(reader), 1):
            if raw is None:
                row: str | Bad = Bad(f"line {number}", "it is too long")
            else:
                row = parse_json(raw, number, field) if kind == ".jsonl" else decode(raw, number)
            if isinstance(row, Bad):
                raise InputError(f"{path}, {row.where}: {row.why}. Fix it, or use another file.")
            texts += [row] if row.strip() else []
            if len(texts) == count:
                break
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}. Use another file.") from error
    if reader.damage:
        raise InputError(f"cannot read {path}: {reader.damage}. Use another file.")
    if not texts:
        raise InputError(f"{path} contains no text: use another file.")
    return Reference(texts, {"file": str(path)})


def limit_generations(generated: Generations, corpus: Corpus, limit: int) -> Generations:
    """Return the generations of the first texts only, as if no more had been sampled.

    The record gets the evaluation dataset of these texts, which is built again from the corpus.

    Args:
        generated: The generations.
        corpus: The corpus of the prompts.
        limit: Number of texts.

    Raises:
        InputError: There are fewer texts, or their evaluation dataset cannot be built from this corpus.
    """
    record = generated.record["set"]
    if limit > record["texts"]:
        raise InputError(
            f"{generated.path} has {record['texts']} texts, but the limit is {limit}: use at most {record['texts']}, "
            "or omit this file."
        )
    try:
        if record.get("corpus_hash") != corpus.hash:
            raise InputError("its prompts are from another corpus")
        whole = EvaluationDataset.build(
            corpus.tokens(record["split"]), tokenizer_hash=corpus.manifest["tokenizer_hash"], length=record["length"],
            r_max=record["r_max"], seed=record["seed"], limit=record["texts"],
            training=Conditioning.from_dict(record["conditioning"]), corpus_hash=corpus.hash, split=record["split"],
        )  # fmt: skip
        if whole.hash != record["hash"]:
            raise InputError("its evaluation dataset has other settings")
    except (InputError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{generated.path}: the queries of its first {limit} texts cannot be derived from {corpus.folder} "
            f"({error}). Omit the limit, or pass the corpus of the prompts."
        ) from error
    return replace(generated, record={**generated.record, "set": whole.head(limit).as_dict()}, limit=limit)


def originals(generated: Generations, corpus: Corpus) -> list[Generation]:
    """Return each query once, with the corpus's own tokens in the sampled positions.

    Args:
        generated: The generations.
        corpus: The corpus of the prompts.

    Raises:
        InputError: The prompts are from another corpus.
    """
    dataset = generated.record["set"]
    if (dataset.get("corpus_hash"), generated.record["tokenizer_hash"]) != (
        corpus.hash,
        corpus.manifest["tokenizer_hash"],
    ):
        raise InputError(
            f"the prompts of {generated.path} are from another corpus than {corpus.folder}, so the original texts are "
            "unknown: pass the corpus of the prompts."
        )
    tokens, tokenizer, length = corpus.tokens(dataset["split"]), corpus.tokenizer(), dataset["length"]
    by_query: dict[tuple[int, str], Generation] = {}
    for sample in generated:
        if (sample.item, sample.roles) in by_query:
            continue
        start = sample.item * length
        original = tokens[start : start + len(sample.roles)].tolist()
        runs = re.findall("g+|a+|u+", sample.roles)
        texts = pieces(original, tokenizer, list(accumulate(map(len, runs))))
        fills = [text for text, run in zip(texts, runs, strict=True) if run[0] == "a"]
        by_query[sample.item, sample.roles] = with_tokens(sample, original, fills, "".join(texts))
    return list(by_query.values())
