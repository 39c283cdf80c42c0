"""Tokenise documents: the conventions for EOS, the held-out documents, and the worker processes.

**Which documents are held out.** With `validation=0.01`, document number `d` of part number `p` (both from 0, in the
order of the sources) goes from train to validation if BLAKE2b("seed/p/d") with a digest of 8 bytes, read as a
big-endian fraction of 2**64, is less than 0.01. It depends on nothing else.

If train consists of text files only, and there are fewer than 100 or none of them would be held out, pieces of them are
held out instead of whole files. The line that begins after `b` bytes of a file is in piece `d = b // 4096`, and a piece
is assigned like a document. Consecutive pieces of the same split form a document.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from acgpt.data.corpus import DTYPES, tokenizer_in
from acgpt.data.rows import Bad, Batch, checked, decode, parse_json
from acgpt.data.shards import Share
from acgpt.data.tokenizer import Vocabulary
from acgpt.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Document:
    """A document of a split, or a piece of a long one, with which the document may begin or end."""

    split: str
    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class Recipe:
    """The rules of a preparation: where EOS goes, and which documents are held out.

    Args:
        convention: "lines": EOS after every line that is not blank. "documents": EOS after every document.
        validation: Share of the train documents to hold out.
        field: Field of a JSON object, or column of a table, that holds the text.
        seed: Seed of the choice of held-out documents.
        piece: Bytes per piece, if pieces of text files are held out instead of whole files.
        limit: Maximum number of train documents.
    """

    convention: str
    validation: float
    field: str
    seed: int
    piece: int | None = None
    limit: int | None = None

    def split_of(self, split: str, part: int, number: int) -> str:
        """Return the split of a document, by the split and number of its part and its own number."""
        if split != "train" or not self.validation:
            return split
        digest = hashlib.blake2b(f"{self.seed}/{part}/{number}".encode(), digest_size=8).digest()
        return "validation" if int.from_bytes(digest, "big") < self.validation * 2**64 else "train"

    def documents(self, part: int, split: str, batch: Batch) -> Iterator[Document | Bad]:
        """Yield the documents of a batch, and a `Bad` for each unusable row."""
        if batch.format == "txt":
            yield from self.stretches(part, split, batch)
            return
        for number, row in enumerate(batch.rows, batch.first):
            text: str | Bad
            if isinstance(row, Bad):
                text = row
            elif batch.format == "jsonl":
                text = parse_json(row, number + 1, self.field)
            else:
                text = checked(row, f"row {number + 1}", self.field)
            yield text if isinstance(text, Bad) else Document(self.split_of(split, part, number), text)

    def stretches(self, part: int, split: str, batch: Batch) -> Iterator[Document | Bad]:
        """Yield the text of a batch of a text file, cut where pieces of it go to another split."""
        whole = self.split_of(split, part, 0)

        def split_at(byte: int) -> str:
            return self.split_of(split, part, byte // self.piece) if self.piece else whole

        lines: list[tuple[str, str]] = []  # split and line
        byte, line = batch.first, batch.line
        for row in batch.rows:
            if isinstance(row, Bad):
                yield row
                byte, line = byte + 1, line + 1
                continue
            for raw in BytesIO(row):
                text = decode(raw, line)
                if isinstance(text, Bad):
                    yield text
                else:
                    lines.append((split_at(byte), text))
                byte, line = byte + len(raw), line + 1
        groups = [(name, "".join(line for _, line in group)) for name, group in groupby(lines, key=itemgetter(0))]
        groups = groups or [(split_at(batch.first), "")]
        continues = not batch.ends and split_at(batch.next) == groups[-1][0]
        for number, (name, text) in enumerate(groups, 1):
            yield Document(name, text, batch.first == 0 or number > 1, ends=not (continues and number == len(groups)))

    def texts(self, document: Document) -> list[str]:
        r"""Return the texts of a document that are tokenised separately.

        Under "lines", these are the lines that are not blank, unchanged but without their ends (`\n` or `\r\n`): the
        spaces at both ends of WikiText's lines are kept. Under "documents", it is the whole text, unless blank.
        """
        if self.convention == "lines":
            return [line.removesuffix("\r") for line in document.text.split("\n") if line.strip()]
        blank = document.begins and document.ends and not document.text.strip()
        return [] if blank else [document.text]


@dataclass(frozen=True)
class Encoded:
    """A tokenised batch: the number of its part, the batch without its rows, what it adds to each split, bad rows."""

    part: int
    batch: Batch
    shares: dict[str, Share]
    bad: list[Bad]


@lru_cache(maxsize=1)
def load_once(vocabulary: Vocabulary) -> PreTrainedTokenizerBase:
    """Load the tokenizer, once per process."""
    return tokenizer_in(vocabulary.folder)


def encode(recipe: Recipe, vocabulary: Vocabulary, item: tuple[int, str, Batch]) -> Encoded:
    """Tokenise a batch, given the number and the split of its part. Special tokens in a text are ordinary text."""
    tokenizer = load_once(vocabulary)
    shares: dict[str, Share] = defaultdict(Share)
    bad: list[Bad] = []
    texts: list[str] = []
    destinations: list[tuple[str, bool]] = []  # for each text: its split, and whether EOS follows
    for document in recipe.documents(*item):
        if isinstance(document, Bad):
            bad.append(document)
            continue
        new_texts = recipe.texts(document)
        texts += new_texts
        destinations += [(document.split, recipe.convention == "lines" or document.ends)] * len(new_texts)
        share = shares[document.split]
        share.documents += document.ends and bool(document.text.strip() or not document.begins)
        share.bytes += len(document.text.encode())
    options: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    encoded = tokenizer(texts, return_attention_mask=False, **options)["input_ids"] if texts else []
    tokens: dict[str, list[int]] = defaultdict(list)
    for ids, (name, ends) in zip(encoded, destinations, strict=True):
        tokens[name] += [*ids, vocabulary.eos_token_id] if ends else ids
    for name in tokens:
        shares[name].tokens = np.array(tokens[name], DTYPES[vocabulary.dtype])
    part, _, batch = item
    return Encoded(part, replace(batch, rows=[]), dict(shares), bad)


def in_order(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Yield the results of a function in the order of the items, computed by worker processes.

    A few items per worker are in flight, which bounds the memory. One worker computes in this process.
    """
    if workers == 1:
        yield from map(function, items)
        return
    from multiprocessing import get_context

    waiting: deque[Future[Result]] = deque()
    executor = ProcessPoolExecutor(workers, get_context("spawn"), initialize_worker)
    try:
        for item in items:
            waiting.append(executor.submit(function, item))
            if len(waiting) >= 2 * workers + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise InputError(
            "a worker process has died. If the memory was full, use fewer `workers`; in a script of your own, call "
            'prepare under `if __name__ == "__main__":`. The same command resumes where this one stopped.'
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def initialize_worker() -> None:
    """Set up a worker process: use one core, ignore Ctrl-C, and end when the parent has ended."""
    import multiprocessing
    import signal
    import threading

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
