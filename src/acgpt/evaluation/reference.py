"""What generated texts are compared with: texts of a corpus, or of a file.

Of a corpus, by one of two rules:

    documents    the first documents that have at least so many tokens, each cut to them: the paper's rule for FineWeb
    windows      the split cut into windows of so many tokens, of which, if there are more than wanted, some are taken
                 that are spread over all of it: neighbours are of one article, and few articles are no reference. The
                 paper's rule for WikiText-103, paragraphs of at least 1,024 tokens, finds none: its longest paragraph
                 in the test split has 481 words

The region from which the generations took what was given is left out, as in the paper. `originals` is another
reference, for what was asked alone: the tokens that stand in the corpus where something was drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from acgpt.data.corpus import Corpus, Tokens
from acgpt.data.rows import Bad, Damaged, Reader, decode, lines, parse_json
from acgpt.errors import InputError
from acgpt.evaluation.dataset import EvaluationSet
from acgpt.evaluation.generations import Generation, Generations
from acgpt.evaluation.text_metrics import with_tokens
from acgpt.query.conditioning import Conditioning
from acgpt.query.text import pieces

COUNT = 1000  # texts at most, as in the paper for FineWeb
RULES = ("documents", "windows")
BLOCK = 2**22  # tokens that are searched at a time


@dataclass(frozen=True)
class Reference:
    """Texts to compare with.

    Args:
        texts: None of them empty.
        about: Where they are from, for results.
    """

    texts: list[str]
    about: dict[str, Any]

    @property
    def hash(self) -> str:
        """Of the texts."""
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """For results."""
        return {**self.about, "texts": len(self.texts), "hash": self.hash}


def of_corpus(
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
    """Texts of a corpus split, decoded as generated texts are.

    Args:
        corpus: The corpus.
        split: By default test if there is one, else validation.
        length: Tokens a text.
        generated: What is compared with them: the region of its prompts is left out.
        rule: "documents" or "windows"; by default documents, where the corpus keeps them apart.
        skip: Leave out so many tokens at the beginning, instead of that region.
        count: At most so many texts.
        allow_none: None is no error: nothing will be compared with them.

    Raises:
        InputError: Nothing is left.
    """
    split = split or ("test" if "test" in corpus.splits else "validation")
    tokens, tokenizer = corpus.tokens(split), corpus.tokenizer()
    rule = rule or ("documents" if corpus.manifest["convention"] == "documents" else "windows")
    if rule not in RULES:
        raise InputError(f"there is no rule {rule!r} for a reference: it is one of {', '.join(RULES)}.")
    prompts = max((region(each.record["set"], corpus, split) for each in generated), default=0)
    begin = prompts if skip is None else skip
    eos = corpus.manifest.get("eos_token_id", tokenizer.eos_token_id)
    found = documents(tokens, eos, begin) if rule == "documents" else windows(tokens, length, begin, count)
    texts = [decoded(ids[:length], tokenizer) for ids in islice((ids for ids in found if len(ids) >= length), count)]
    about: dict[str, Any] = {"corpus": str(corpus.folder), "corpus_hash": corpus.hash, "split": split, "rule": rule}
    about |= {"length": length, "skip": begin, "overlaps_prompts": bool(texts) and begin < prompts}
    if not texts and not allow_none:
        remedy = "another `split`, a smaller `length`" + (
            ", or `skip=0`: the reference then holds the very texts that the prompts are from" if begin else ""
        )
        fewer = (
            " Or generate fewer (acgpt generate --limit), which leaves texts to compare with."
            if skip is None and begin
            else ""
        )
        raise InputError(f"{lack(about)}. Name {remedy}.{fewer}")
    return Reference(texts, about)


def lack(about: Mapping[str, Any]) -> str:
    """That a corpus has no text of reference of this kind."""
    why = f", after the {about['skip']:,} tokens that are left out" if about["skip"] else ""
    return f"{about['corpus']}, {about['split']}: no {about['rule']} of {about['length']} tokens{why}"


def region(of: Mapping[str, Any], corpus: Corpus, split: str) -> int:
    """How many tokens of a split, from its beginning, an evaluation set was made of."""
    if of.get("corpus_hash") != corpus.hash or of.get("split") != split:
        return 0
    return int(of.get("texts") or 0) * int(of.get("length") or 0)


def documents(tokens: Tokens, eos: int, begin: int) -> Iterator[np.ndarray]:
    """The documents that begin at token `begin` or after it, without the EOS that ends them."""
    start, at = (0 if begin == 0 else None), max(0, begin - 1)  # the EOS before a document tells where it begins
    while at < len(tokens):
        block = tokens[at : at + BLOCK]
        for end in (np.flatnonzero(block == eos) + at).tolist():
            if start is not None:
                yield tokens[start:end]
            start = end + 1
        at += len(block)
    if start is not None and start < len(tokens):
        yield tokens[start : len(tokens)]


def windows(tokens: Tokens, length: int, begin: int, count: int) -> Iterator[np.ndarray]:
    """Windows that do not overlap: all, or as many as are wanted, spread evenly."""
    starts = range(begin, len(tokens) - length + 1, length)
    wanted = min(count, len(starts))
    chosen = [starts[number * len(starts) // wanted] for number in range(wanted)]
    return (tokens[start : start + length] for start in chosen)


def decoded(ids: Sequence[int] | np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of token ids, special ones included."""
    return str(tokenizer.decode(list(map(int, ids)), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def of_file(path: Path, field: str = "text", count: int = COUNT) -> Reference:
    """The texts of a file: a field of each line of a .jsonl, each line of a .txt that is not blank."""
    kinds = [suffix.lower() for suffix in path.suffixes]
    kind = next((each for each in reversed(kinds) if each in (".jsonl", ".txt")), None)
    if kind is None:
        raise InputError(f"{path} is neither a prepared corpus nor a .jsonl or .txt of texts: name one.")
    texts: list[str] = []
    try:
        for number, raw in enumerate(lines(Reader(path))):
            if raw is None or raw.strip():
                where = f"line {number + 1}"
                row = Bad(where, "it is too long") if raw is None else parsed(raw, number, where, field, kind)
                if isinstance(row, Bad):
                    raise InputError(f"{path}, {row.where}: {row.why}. Mend it, or name another file.")
                texts += [row] if row.strip() else []
            if len(texts) == count:
                break
    except (OSError, Damaged) as error:
        raise InputError(f"cannot read {path}: {error}. Name another file.") from error
    if not texts:
        raise InputError(f"{path} holds no text: name another file.")
    return Reference(texts, {"file": str(path)})


def parsed(raw: bytes, number: int, where: str, field: str, kind: str) -> str | Bad:
    """The text of one line."""
    if kind == ".jsonl":
        row = parse_json(raw, number, where, field)
        return row if isinstance(row, Bad) else row.text
    try:
        return decode(raw, number + 1)
    except UnicodeDecodeError:
        return Bad(where, "it is not UTF-8")


def limited(generated: Generations, corpus: Corpus, limit: int) -> Generations:
    """The samples of the first texts alone, as if no more had been drawn: of the evaluation set that these are.

    Args:
        generated: What was drawn.
        corpus: The one that the prompts are from.
        limit: How many texts.

    Raises:
        InputError: There are not as many, or what these texts are asked cannot be told from this corpus.
    """
    of = generated.record["set"]
    if limit > of["texts"]:
        raise InputError(
            f"{generated.path} is of {of['texts']} texts, and the limit is {limit}: name at most {of['texts']}, or "
            "leave this file out."
        )
    try:
        if of.get("corpus_hash") != corpus.hash:
            raise InputError("it took its prompts from another corpus")
        whole = EvaluationSet.build(
            corpus.tokens(of["split"]), tokenizer_hash=corpus.manifest["tokenizer_hash"], length=of["length"],
            r_max=of["r_max"], seed=of["seed"], limit=of["texts"], training=Conditioning.from_dict(of["conditioning"]),
            corpus_hash=corpus.hash, split=of["split"],
        )  # fmt: skip
        if whole.hash != of["hash"]:
            raise InputError("its evaluation set was made in another way")
    except (InputError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{generated.path}: what its first {limit} texts are asked cannot be told from {corpus.folder} ({error}). "
            "Leave out the limit, or name the corpus of the prompts."
        ) from error
    return replace(generated, record={**generated.record, "set": whole.head(limit).as_dict()}, limit=limit)


def originals(generated: Generations, corpus: Corpus) -> list[Generation]:
    """Each question once, with the tokens that stand in the corpus where something was drawn.

    Args:
        generated: What was drawn.
        corpus: The one that the prompts are from.

    Raises:
        InputError: The corpus is not the one that the prompts are from.
    """
    about = generated.record["set"]
    if (about.get("corpus_hash"), generated.record["tokenizer_hash"]) != (
        corpus.hash,
        corpus.manifest["tokenizer_hash"],
    ):
        raise InputError(
            f"{generated.path} took its prompts from another corpus than {corpus.folder}, so what stood there "
            "originally is not known: name that corpus."
        )
    tokens, tokenizer, length = corpus.tokens(about["split"]), corpus.tokenizer(), about["length"]
    found: dict[tuple[int, str], Generation] = {}
    for sample in generated:
        if (sample.item, sample.roles) in found:
            continue
        start = sample.item * length
        own = tokens[start : start + len(sample.roles)].tolist()
        given = [(a, b) for a, b, role in zip(own, sample.tokens, sample.roles, strict=False) if role == "g"]
        if len(own) != len(sample.roles) or any(a != b for a, b in given):
            raise InputError(
                f"{generated.path}: what is given of text {sample.item} is not what {corpus.folder} has there, so what "
                "was drawn cannot be compared with what stood there."
            )
        lengths = [(role, len(list(run))) for role, run in groupby(sample.roles)]
        texts = pieces(own, tokenizer, list(accumulate(length for _, length in lengths)))
        fills = [text for text, (role, _) in zip(texts, lengths, strict=True) if role == "a"]
        found[sample.item, sample.roles] = with_tokens(sample, own, fills, "".join(texts))
    return list(found.values())
