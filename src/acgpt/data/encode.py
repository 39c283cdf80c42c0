"""Documents become tokens: the conventions, the held-out documents, and the worker processes that tokenise.

**Which documents are held out.** With `validation=0.01`, document number `d` of part number `p` (both from 0, in the
order of the sources) goes from train to validation when BLAKE2b("seed/p/d") with a digest of 8 bytes, read as a
big-endian fraction of 2**64, is less than 0.01. It depends on nothing else.

Where all of train is text files, and fewer than 100, or none of them would be held out, then pieces of them are: the
line that begins after `b` bytes of a file is in its piece `d = b // 4096`, and pieces go where documents would. Pieces
that stay together are a document.
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
    """Where EOS goes, and which documents are held out.

    Args:
        convention: "lines": EOS after every line that is not blank. "documents": EOS after every document.
        validation: The share of train documents that is held out.
        field: Of a JSON object or a table, what holds the text.
        seed: Of the choice of held-out documents.
        piece: Bytes of a piece, where pieces of text files are held out and not whole files.
        limit: Of train, the first so many documents.
    """

    convention: str
    validation: float
    field: str
    seed: int
    piece: int | None = None
    limit: int | None = None

    def split_of(self, split: str, part: int, number: int) -> str:
        """The split that a document of a part goes to."""
        if split != "train" or not self.validation:
            return split
        digest = hashlib.blake2b(f"{self.seed}/{part}/{number}".encode(), digest_size=8).digest()
        return "validation" if int.from_bytes(digest, "big") < self.validation * 2**64 else "train"

    def documents(self, batch: Batch, split: str, part: int) -> Iterator[tuple[str, Document | Bad]]:
        """What a batch of a part holds, each with the split that it goes to."""
        for found in batch.documents(self.field):
            if isinstance(found, Bad):
                yield split, found
            elif self.piece and split == "train" and batch.format == "txt":
                yield from self.stretches(found, batch, part)
            else:
                yield self.split_of(split, part, found.number), found

    def stretches(self, block: Document, batch: Batch, part: int) -> Iterator[tuple[str, Document]]:
        """A block of a text file, cut at the line ends where what is held out begins and ends."""
        size = self.piece or 1
        lines: list[tuple[str, str]] = []  # each with its split
        at = batch.at
        for line in re.findall(r"[^\n]*\n|[^\n]+", block.text) or [""]:
            lines.append((self.split_of("train", part, at // size), line))
            at += len(line.encode())
        after = batch.at + (len(row) if isinstance(row := batch.rows[0], bytes) else 0)
        goes_on = not block.ends and self.split_of("train", part, after // size) == lines[-1][0]
        groups = [(name, "".join(line for _, line in group)) for name, group in groupby(lines, key=itemgetter(0))]
        for number, (name, text) in enumerate(groups):
            begins, last = block.begins or number > 0, number == len(groups) - 1
            yield name, Document(block.number, text, begins, ends=not (last and goes_on))

    def texts(self, document: Document) -> list[str]:
        r"""What is tokenised, each by itself.

        Under "lines", the lines that are not blank, without their ends (`\n` or `\r\n`) and otherwise as they are:
        WikiText's lines begin and end with a space, which counts. Under "documents", the text as it is, unless blank.
        """
        if self.convention == "lines":
            return [line.removesuffix("\r") for line in document.text.split("\n") if line.strip()]
        blank = document.begins and document.ends and not document.text.strip()
        return [] if blank else [document.text]


@dataclass(frozen=True)
class Encoded:
    """A batch as tokens by split, how many documents it had, those that could not be used, and the place after it."""

    part: int
    count: int
    next: int
    done: float
    shares: dict[str, Share]
    bad: list[Bad]


@lru_cache(maxsize=1)
def load_once(vocabulary: Vocabulary) -> PreTrainedTokenizerBase:
    """The tokenizer, once a process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(vocabulary.folder, trust_remote_code=False)


def encode(recipe: Recipe, vocabulary: Vocabulary, item: tuple[int, str, Batch]) -> Encoded:
    """Tokenise a batch of a part, given the part's number and split. A text that spells a special token is text."""
    part, split, batch = item
    shares: dict[str, Share] = defaultdict(Share)
    bad: list[Bad] = []
    texts: list[str] = []
    places: list[tuple[str, bool]] = []  # for each text: its split, and whether EOS follows
    for name, document in recipe.documents(batch, split, part):
        if isinstance(document, Bad):
            bad.append(document)
            continue
        found = recipe.texts(document)
        texts += found
        places += [(name, recipe.convention == "lines" or document.ends)] * len(found)
        shares[name].documents += document.ends and bool(document.text.strip() or not document.begins)
        shares[name].bytes += len(document.text.encode())
    options: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    encoded = load_once(vocabulary)(texts, return_attention_mask=False, **options)["input_ids"] if texts else []
    tokens: dict[str, list[int]] = defaultdict(list)
    for ids, (name, ends) in zip(encoded, places, strict=True):
        tokens[name] += [*ids, vocabulary.eos_token_id] if ends else ids
    for name in tokens:
        shares[name].tokens = np.array(tokens[name], DTYPES[vocabulary.dtype])
    return Encoded(part, batch.count, batch.next, batch.done, dict(shares), bad)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, ahead: int | None = None
) -> Iterator[Result]:
    """The results of `function`, in the order of `items`, computed by so many processes (one: this one).

    No more than `ahead` items are taken before their results are used, by default a few for each worker: that is what
    bounds the memory.
    """
    if workers == 1:
        yield from map(function, items)
        return
    from multiprocessing import get_context

    waiting: deque[Future[Result]] = deque()
    executor = ProcessPoolExecutor(workers, get_context("spawn"), be_a_worker)
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
            'prepare under `if __name__ == "__main__":`. What was done is kept: the same command goes on from there.'
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def be_a_worker() -> None:
    """In a worker process: use one core, leave Ctrl-C to the parent, and end when the parent is gone."""
    import multiprocessing
    import signal
    import threading

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
