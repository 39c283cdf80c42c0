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
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from acgpt.data.corpus import DTYPES
from acgpt.data.rows import Bad, Batch, Document
from acgpt.data.shards import Share
from acgpt.data.tokenizer import Vocabulary
from acgpt.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")
Result = TypeVar("Result")


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

    def documents(self, batch: Batch, split: str, part: int) -> Iterator[tuple[str, Document | Bad]]:
        """Yield the documents and the unusable rows of a batch, each with its split."""
        for document in batch.documents(self.field):
            if isinstance(document, Bad):
                yield split, document
            elif self.piece and split == "train" and batch.format == "txt":
                yield from self.stretches(document, batch, part)
            else:
                yield self.split_of(split, part, document.number), document

    def stretches(self, block: Document, batch: Batch, part: int) -> Iterator[tuple[str, Document]]:
        """Cut a block of a text file at the line ends where held-out pieces begin and end; yield split and document."""
        size = self.piece or 1
        lines: list[tuple[str, str]] = []  # split and line
        offset = batch.offset
        for line in re.findall(r"[^\n]*\n|[^\n]+", block.text) or [""]:
            lines.append((self.split_of("train", part, offset // size), line))
            offset += len(line.encode())
        end = batch.offset + (len(row) if isinstance(row := batch.rows[0], bytes) else 0)
        continues = not block.ends and self.split_of("train", part, end // size) == lines[-1][0]
        groups = [(name, "".join(line for _, line in group)) for name, group in groupby(lines, key=itemgetter(0))]
        for number, (name, text) in enumerate(groups):
            begins, last = block.begins or number > 0, number == len(groups) - 1
            yield name, Document(block.number, text, begins, ends=not (last and continues))

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
    """A tokenised batch.

    Args:
        part: Number of its part.
        count: Number of documents.
        next: Number of the row after it.
        done: Share of the part that has been read.
        shares: What it adds to each split.
        bad: Unusable rows.
    """

    part: int
    count: int
    next: int
    done: float
    shares: dict[str, Share]
    bad: list[Bad]


@lru_cache(maxsize=1)
def load_once(vocabulary: Vocabulary) -> PreTrainedTokenizerBase:
    """Load the tokenizer, once per process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(vocabulary.folder, trust_remote_code=False)


def encode(recipe: Recipe, vocabulary: Vocabulary, item: tuple[int, str, Batch]) -> Encoded:
    """Tokenise a batch. The text of a special token is tokenised as ordinary text.

    Args:
        recipe: Convention and held-out share.
        vocabulary: The tokenizer.
        item: Number of the part, its split, and the batch.
    """
    part, split, batch = item
    shares: dict[str, Share] = defaultdict(Share)
    bad: list[Bad] = []
    texts: list[str] = []
    destinations: list[tuple[str, bool]] = []  # for each text: its split, and whether EOS follows
    for name, document in recipe.documents(batch, split, part):
        if isinstance(document, Bad):
            bad.append(document)
            continue
        new_texts = recipe.texts(document)
        texts += new_texts
        destinations += [(name, recipe.convention == "lines" or document.ends)] * len(new_texts)
        shares[name].documents += document.ends and bool(document.text.strip() or not document.begins)
        shares[name].bytes += len(document.text.encode())
    options: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    encoded = load_once(vocabulary)(texts, return_attention_mask=False, **options)["input_ids"] if texts else []
    tokens: dict[str, list[int]] = defaultdict(list)
    for ids, (name, ends) in zip(encoded, destinations, strict=True):
        tokens[name] += [*ids, vocabulary.eos_token_id] if ends else ids
    for name in tokens:
        shares[name].tokens = np.array(tokens[name], DTYPES[vocabulary.dtype])
    return Encoded(part, batch.count, batch.next, batch.done, dict(shares), bad)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, ahead: int | None = None
) -> Iterator[Result]:
    """Yield the results of a function in the order of the items, computed by worker processes.

    Args:
        function: The function.
        items: Its arguments.
        workers: Number of processes; 1 computes in this process.
        ahead: Maximum number of items whose results are not used yet, which bounds the memory. Default: a few per
            worker.
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
            if len(waiting) >= (ahead or 2 * workers + 2):
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
