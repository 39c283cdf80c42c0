"""From sources to a corpus: read, tokenise in parallel, write shards; stop at any moment and go on later.

    parts ──► batches ──► encode, in worker processes ──► one writer a split ──► shards
              (in order)  (a bounded number in flight)    (in order)

Memory is bounded by the batches in flight, whatever the size of the corpus. Results are used in the order of the
sources, so the shards do not depend on the number of workers.

**Going on after an interruption.** Tokens are appended to `train-00007.bin.part`; a full shard is synced to the disk and
renamed. `journal.json` says how far everything is at the end of one batch: the position in the sources, and for each
split its finished shards and the tokens of its unfinished one. It is replaced as a whole, after what it speaks of is on
the disk. Whoever goes on cuts the files back to what the journal says, so the result is the same, byte for byte.
`corpus.json` is written last: a folder that has one is complete.

**Which documents are held out.** With `validation=0.01`, document number `d` of file number `f` (both from 0, in the
order of the sources) is, if it belongs to train, moved to validation when the first 8 bytes of BLAKE2b("seed/f/d"), as a
fraction of 2**64, are less than 0.01. That depends on nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from acgpt import __version__, corpus_tokenizer
from acgpt.corpus import DTYPES, FORMAT_VERSION, MANIFEST, TOKENIZER, Corpus
from acgpt.corpus_shards import JOURNAL, OURS, Share, Writer, sync_folder, write_json
from acgpt.errors import InputError
from acgpt.sources import CONVENTIONS, Bad, Batch, Document, File, HubSplit, Part, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")
Result = TypeVar("Result")

SHARD_BYTES = 32 << 20
CHECKPOINT = 64 << 20  # bytes of text after which the journal is written, if no shard has been filled before
WORTH_A_WORKER = 8 << 20  # bytes of source for which another process pays


# ---- tokens from documents ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How documents become tokens: all that a worker process needs to know.

    Args:
        convention: "lines": EOS after every line that is not blank. "documents": EOS after every document.
        validation: The share of train documents that is held out.
        field: Of a JSON object or a table, what holds the text.
        seed: Of that choice.
    """

    convention: str
    validation: float
    field: str
    seed: int

    def split_of(self, split: str, part: int, number: int) -> str:
        """The split that a document goes to."""
        if split != "train" or not self.validation:
            return split
        digest = hashlib.blake2b(f"{self.seed}/{part}/{number}".encode(), digest_size=8).digest()
        return "validation" if int.from_bytes(digest, "big") < self.validation * 2**64 else "train"

    def texts(self, document: Document) -> list[str]:
        """What is tokenised separately, each followed by EOS (but for a piece that does not end its document).

        A line keeps the white space around it, without its line end (`\\n` or `\\r\\n`); blank ones are left out. A blank
        document is left out too.
        """
        if self.convention == "lines":
            return [line.removesuffix("\r") for line in document.text.split("\n") if not line.isspace() and line]
        blank = document.begins and document.ends and not document.text.strip()
        return [] if blank else [document.text]


@dataclass
class Encoded:
    """A batch as tokens, by split, with the place after it."""

    part: int
    next: int
    done: float
    shares: dict[str, Share]
    bad: list[Bad]


@lru_cache(maxsize=1)
def tokenizer_in(folder: str, tokenizer_hash: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a corpus, loaded once a process; the hash is there to tell apart what the folder held when."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def encode(
    recipe: Recipe, folder: str, tokenizer_hash: str, eos: int, dtype: str, item: tuple[int, str, Batch]
) -> Encoded:
    """Tokenise a batch. What looks like a special token in a text is text."""
    part, split, batch = item
    bad: list[Bad] = []
    texts: list[str] = []
    ends: list[tuple[str, bool]] = []  # for each text: its split, and whether EOS follows
    documents: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for document in batch.documents(recipe.field):
        if isinstance(document, Bad):
            bad.append(document)
            continue
        goes_to = recipe.split_of(split, part, document.number)
        found = recipe.texts(document)
        texts += found
        ends += [(goes_to, recipe.convention == "lines" or document.ends)] * len(found)
        documents[goes_to] = documents.get(goes_to, 0) + (document.ends and bool(found))
        sizes[goes_to] = sizes.get(goes_to, 0) + len(document.text.encode())
    tokens: dict[str, list[int]] = {name: [] for name in documents}
    options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
    encoded = tokenizer_in(folder, tokenizer_hash)(texts, verbose=False, **options)["input_ids"] if texts else []
    for ids, (goes_to, end) in zip(encoded, ends, strict=True):
        tokens[goes_to] += ids
        if end:
            tokens[goes_to].append(eos)
    shares = {name: Share(np.array(tokens[name], dtype), documents[name], sizes[name]) for name in documents}
    return Encoded(part, batch.next, batch.done, shares, bad)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, ahead: int | None = None
) -> Iterator[Result]:
    """The results of `function`, in the order of `items`, at most `ahead` of which are taken before they are used."""
    if workers == 1:
        yield from map(function, items)
        return
    from multiprocessing import get_context

    ahead = ahead or 2 * workers + 2
    waiting: deque[Future[Result]] = deque()
    with ProcessPoolExecutor(workers, get_context("spawn"), be_a_worker) as executor:
        try:
            for item in items:
                waiting.append(executor.submit(function, item))
                if len(waiting) >= ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise InputError(
                "a worker process has died. If the memory was full, use fewer --workers; in a script of your own, call "
                'prepare under `if __name__ == "__main__":`. What was done is kept: the same command goes on from there.'
            ) from error
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def be_a_worker() -> None:
    """In a worker process: one thread, leave Ctrl-C to the parent, and end when it is gone."""
    import multiprocessing
    import signal
    import threading

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


# ---- the preparation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """How far a preparation is.

    Args:
        phase: "sources" (they are checked), "tokenizer" (it is trained), "tokens", and at the end "prepared", or
            "reused" if that had been done before.
        done: Bytes of the sources that have been read.
        total: Bytes of the sources; 0 if that is not known.
        documents: Written so far, by this run or before it.
        tokens: Likewise.
        text: Bytes of text, likewise.
    """

    phase: str
    done: float = 0.0
    total: int = 0
    documents: int = 0
    tokens: int = 0
    text: int = 0


def prepare(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    tokenizer: str = "gpt2",
    train_tokenizer: int | None = None,
    mask_token: bool = False,
    convention: str | None = None,
    field: str = "text",
    validation: float | None = None,
    seed: int = 0,
    workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    skip_bad: bool = False,
    overwrite: bool = False,
    watch: Callable[[Progress], None] | None = None,
) -> Corpus:
    """Turn sources into a corpus of token shards; go on where an interrupted run of the same stopped.

    In a script, call it under `if __name__ == "__main__":`, for it starts processes.

    Args:
        sources: Each a file, folder or glob (`.txt`, `.jsonl`, `.parquet`; see `acgpt.sources`) or a data set by name
            ("wikitext-103", "fineweb"), with `SPLIT=` before it if it is not for train: `"test=heldout.txt"`.
        folder: Where the corpus goes. New, empty, or one that the same call began.
        tokenizer: "gpt2", or a folder or hub id with a tokenizer.
        train_tokenizer: Instead, train a byte-level BPE of so many tokens on the train split (its first 512 MB).
        mask_token: Add a token `<|mask|>` for unknown tokens, if the tokenizer has no mask token.
        convention: "lines" (EOS after each line that is not blank) or "documents" (EOS after each document). By default
            "lines" for wikitext-103, else "documents".
        field: The field of a JSON object, or the column of a table, that holds the text.
        validation: The share of train documents to hold out as the split validation. By default 0.01 for fineweb, else
            0.
        seed: Of the choice of those documents.
        workers: Processes that tokenise; by default one a core, fewer if there is little to do.
        shard_bytes: The size of a shard.
        skip_bad: Leave out and count rows that cannot be used, instead of stopping at the first.
        overwrite: Replace a corpus that was made otherwise. Other files in the folder are left alone.
        watch: Called with the `Progress` now and then.
    """
    watch = watch or (lambda progress: None)
    names = [sources] if isinstance(sources, str | os.PathLike) else sources
    folder = Path(folder)
    check_numbers(train_tokenizer, workers, shard_bytes)
    parts = resolve([os.fspath(name) for name in names], known_revisions(read_previous(folder)))
    recipe = Recipe(*choose(parts, convention, validation, seed), field, seed)
    loaded = None if train_tokenizer else load_tokenizer(tokenizer, mask_token)
    watch(Progress("sources"))
    identity = {
        "tokenizer": f"trained, {train_tokenizer} tokens" if loaded is None else hash_of(loaded),
        "mask_token": mask_token,
        **asdict(recipe),
        "shard_bytes": shard_bytes,
        "sources": [part.describe() for part in parts],
    }
    with writing(folder):
        previous = read_previous(folder)
        if previous is not None and not overwrite:
            compare(folder, previous["recipe"], identity)
            if (folder / MANIFEST).exists():
                corpus = reuse(folder, skip_bad)
                watch(Progress("reused"))
                return corpus
        if previous is None or overwrite or not previous["position"][1]:
            previous = begin(folder, identity)
            if loaded is None:
                watch(Progress("tokenizer"))
                loaded = train_on(parts, recipe, train_tokenizer or 0, mask_token, skip_bad)
            save_tokenizer(loaded, folder)
        work = Preparation(folder, parts, recipe, identity, describe_tokenizer(folder), skip_bad, watch)
        work.restore(previous)
        work.run(workers or default_workers(parts))
        corpus = work.finish()
        watch(Progress("prepared"))
        return corpus


def check_numbers(train_tokenizer: int | None, workers: int | None, shard_bytes: int) -> None:
    """Numbers that make sense."""
    smallest = corpus_tokenizer.SMALLEST
    if train_tokenizer is not None and train_tokenizer < smallest:
        raise InputError(
            f"a byte-level tokenizer has at least {smallest} tokens (the bytes, EOS), not {train_tokenizer}."
        )
    if workers is not None and workers < 1:
        raise InputError(f"it takes at least one worker, not {workers}.")
    if shard_bytes < 1024:
        raise InputError(f"a shard has at least 1,024 bytes, not {shard_bytes}.")


def choose(parts: Sequence[Part], convention: str | None, share: float | None, seed: int) -> tuple[str, float]:
    """The convention and the share of documents to hold out, as asked for or by default, if they make sense here."""
    named = [part for part in parts if isinstance(part, HubSplit)]
    by_lines = [part.title for part in named if part.hub.convention == "lines"]
    convention = convention or ("lines" if by_lines else "documents")
    if convention not in CONVENTIONS:
        raise InputError(f"the convention {convention!r} is not one of {', '.join(CONVENTIONS)}.")
    if by_lines and convention != "lines":
        raise InputError(f"{by_lines[0]} is a data set of lines, not of documents: use --convention lines.")
    splits = {part.split for part in parts}
    if share is None:
        share = 0.0 if "validation" in splits else max([part.hub.validation for part in named], default=0.0)
    if not 0 <= share < 1:
        raise InputError(f"the share of documents to hold out must be from 0 to below 1, not {share}.")
    if share and "validation" in splits:
        raise InputError("the sources have a validation split of their own: leave --validation out, or that source.")
    if share and "train" not in splits:
        raise InputError("there is no train split to hold documents out of: leave --validation out.")
    train = [(number, part) for number, part in enumerate(parts) if part.split == "train"]
    if share and all(isinstance(part, File) and part.format == "txt" for _, part in train):
        recipe = Recipe(convention, share, "", seed)
        if len({recipe.split_of("train", number, 0) for number, _ in train}) < 2:
            raise InputError(
                f"a text file is one document, so {share:.1%} of {len(train)} cannot be held out. Name a file for it, "
                "validation=PATH, or give the documents as .jsonl, one a line."
            )
    return convention, share


def default_workers(parts: Sequence[Part]) -> int:
    """One a core, but no more than there is work for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sizes = [part.size for part in parts]
    return cores if not all(sizes) else min(cores, 1 + sum(sizes) // WORTH_A_WORKER)


# ---- the tokenizer --------------------------------------------------------------------------------------------------


def load_tokenizer(name: str, mask_token: bool) -> PreTrainedTokenizerBase:
    """By name, with a mask token if that was asked for."""
    tokenizer = corpus_tokenizer.load(name)
    if mask_token:
        corpus_tokenizer.add_mask(tokenizer)
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer {name!r} has no end-of-sequence token to put between texts: name another one.")
    return tokenizer


def train_on(
    parts: Sequence[Part], recipe: Recipe, size: int, mask_token: bool, skip_bad: bool
) -> PreTrainedTokenizerBase:
    """Train a tokenizer on the beginning of the train split."""

    def texts() -> Iterator[str]:
        read = 0
        for number, part in enumerate(parts):
            for batch in part.batches(0, recipe.field, recipe.convention) if part.split == "train" else ():
                for document in batch.documents(recipe.field):
                    if isinstance(document, Bad):
                        if not skip_bad:
                            raise unusable(part, document)
                    elif recipe.split_of("train", number, document.number) == "train":
                        yield from recipe.texts(document)
                        read += len(document.text.encode())
                if read >= corpus_tokenizer.TRAINED_ON:
                    return

    tokenizer = corpus_tokenizer.train(texts(), size)
    if len(tokenizer) < size:
        warnings.warn(
            f"the text has too little variety for {size} tokens: the tokenizer has {len(tokenizer)}.", stacklevel=2
        )
    if mask_token:
        corpus_tokenizer.add_mask(tokenizer)
    return tokenizer


def hash_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """`metadata.tokenizer_hash`, which takes importing torch."""
    from acgpt.metadata import tokenizer_hash

    return tokenizer_hash(tokenizer)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Into the corpus, whole or not at all."""
    temporary, final = folder / f"{TOKENIZER}.part", folder / TOKENIZER
    tokenizer.save_pretrained(temporary)
    temporary.rename(final)
    sync_folder(folder)


def describe_tokenizer(folder: Path) -> dict[str, Any]:
    """What the manifest says of the corpus's tokenizer, and the type of tokens."""
    from transformers import AutoTokenizer

    from acgpt.metadata import choose_bos

    tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER)
    size = 1 + max(tokenizer.get_vocab().values())
    return {
        "tokenizer_hash": hash_of(tokenizer),
        "vocabulary_size": size,
        "bos_token_id": choose_bos(None, None, tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "mask_token_id": tokenizer.mask_token_id,
        "dtype": "uint16" if size <= 1 << 16 else "uint32",
    }


# ---- the folder -----------------------------------------------------------------------------------------------------


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make the folder and keep other processes out of it; what the disk refuses becomes an error with a remedy."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            yield
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror or error}. Make room or name another folder; what is there is "
            "safe, and the same command goes on where this one stopped."
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process however that ends. Only on Unix."""
    if os.name != "posix":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise InputError(f"another process is preparing {folder}: wait for it, or name another folder.") from error
    finally:
        os.close(descriptor)


def read_previous(folder: Path) -> dict[str, Any] | None:
    """What an earlier run left: the manifest if it ended, else its journal; `None` in a new or empty folder."""
    for name in (MANIFEST, JOURNAL):
        path = folder / name
        if path.exists():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                content["recipe"]["sources"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path} cannot be read ({error}): remove it and what belongs to it.") from error
            return dict(content)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name one that is new or empty.")
    others = [file.name for file in folder.iterdir() if file.name != f"{JOURNAL}.tmp"] if folder.exists() else []
    if others:
        some = ", ".join(sorted(others)[:3]) + (", …" if len(others) > 3 else "")
        raise InputError(f"{folder} holds files that are no corpus ({some}): name a folder that is new or empty.")
    return None


def known_revisions(previous: dict[str, Any] | None) -> dict[str, str]:
    """The revisions of data sets on the hub that an earlier run chose."""
    sources = previous["recipe"]["sources"] if previous else []
    return {source["path"]: source["revision"] for source in sources if source["format"] == "hub"}


def compare(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse to go on with, or to reuse, what was made in another way."""

    def contents(recipe: dict[str, Any]) -> dict[str, str]:
        described = {json.dumps({k: v for k, v in each.items() if k != "name"}): each for each in recipe["sources"]}
        return {key: f"{each['split']}={each['name']}" for key, each in described.items()}

    differences = [
        f"{key} (there {there.get(key)!r}, here {here[key]!r})"
        for key in here
        if key != "sources" and there.get(key) != here[key]
    ]
    old, new = contents(there), contents(here)
    if list(old) != list(new):
        only_there = ", ".join(old[key] for key in old if key not in new)
        only_here = ", ".join(new[key] for key in new if key not in old)
        found = [f"only there: {only_there}"] * bool(only_there) + [f"only here: {only_here}"] * bool(only_here)
        differences.append(f"sources, by their content ({'; '.join(found) or 'in another order'})")
    if differences:
        raise InputError(
            f"{folder} holds a corpus that was made otherwise; what differs: {', '.join(differences)}. Name another "
            "folder, or replace it with --overwrite."
        )


def reuse(folder: Path, skip_bad: bool) -> Corpus:
    """The finished corpus, checked."""
    corpus = Corpus.open(folder)
    corpus.verify()
    if corpus.manifest["skipped"] and not skip_bad:
        raise InputError(
            f"{folder} was made without {corpus.manifest['skipped']} rows that cannot be used; --skip-bad accepts that."
        )
    (folder / JOURNAL).unlink(missing_ok=True)
    return corpus


def begin(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Make the folder ours and remove what an earlier run left there, in an order that can be interrupted."""
    journal = {"recipe": identity, "position": [0, 0], "skipped": [0] * len(identity["sources"]), "splits": {}}
    write_json(folder / JOURNAL, journal)
    (folder / MANIFEST).unlink(missing_ok=True)
    for file in folder.iterdir():
        if OURS.fullmatch(file.name) and file.name != JOURNAL:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    return journal


def unusable(part: Part, bad: Bad) -> InputError:
    """What to do about a row."""
    return InputError(f"{part.name}, {bad.where}: {bad.why}. Mend it, or leave such rows out with --skip-bad.")


@dataclass
class Preparation:
    """Reads, has tokenised, and writes; knows at the end of every batch where it stands."""

    folder: Path
    parts: Sequence[Part]
    recipe: Recipe
    identity: dict[str, Any]
    tokenizer: dict[str, Any]
    skip_bad: bool
    watch: Callable[[Progress], None]

    def restore(self, journal: dict[str, Any]) -> None:
        """Go back to where a journal was written; begin at the beginning if that was there."""
        self.part, self.row = journal["position"]
        self.skipped: list[int] = journal["skipped"]
        names = dict.fromkeys([part.split for part in self.parts] + ["validation"] * bool(self.recipe.validation))
        dtype = DTYPES[self.tokenizer["dtype"]]
        capacity = self.identity["shard_bytes"] // np.dtype(dtype).itemsize
        self.writers = {name: Writer(self.folder, name, dtype, capacity) for name in names}
        for name, state in journal["splits"].items():
            self.writers[name].restore(state)

    def checkpoint(self) -> None:
        """Bring everything to the disk, then say so in the journal."""
        for writer in self.writers.values():
            writer.sync()
        splits = {name: writer.state() for name, writer in self.writers.items()}
        position = [self.part, self.row]
        state = {"recipe": self.identity, "position": position, "skipped": self.skipped, "splits": splits}
        write_json(self.folder / JOURNAL, state)

    def batches(self) -> Iterator[tuple[int, str, Batch]]:
        """All that is left to read, with the number and the split of its part."""
        begin, start = self.part, self.row  # this runs ahead of what has been written
        for number, part in enumerate(self.parts[begin:], begin):
            for batch in part.batches(start if number == begin else 0, self.recipe.field, self.recipe.convention):
                yield number, part.split, batch

    def run(self, workers: int) -> None:
        """Read, tokenise and write to the end."""
        eos, dtype = self.tokenizer["eos_token_id"], DTYPES[self.tokenizer["dtype"]]
        folder = str(self.folder / TOKENIZER)
        function = partial(encode, self.recipe, folder, self.tokenizer["tokenizer_hash"], eos, dtype)
        sizes = [part.size for part in self.parts]
        total = sum(sizes) if all(sizes) else 0
        written = 0  # bytes of text since the last checkpoint
        for encoded in in_order(function, self.batches(), workers):
            if encoded.bad and not self.skip_bad:
                self.checkpoint()
                raise unusable(self.parts[encoded.part], encoded.bad[0])
            shards = sum(len(writer.shards) for writer in self.writers.values())
            for split, share in encoded.shares.items():
                self.writers[split].write(share)
                written += share.bytes
            self.part, self.row = encoded.part, encoded.next
            self.skipped[encoded.part] += len(encoded.bad)
            if written >= CHECKPOINT or sum(len(writer.shards) for writer in self.writers.values()) > shards:
                self.checkpoint()
                written = 0
            counts = {name: sum(getattr(w, name) for w in self.writers.values()) for name in ("documents", "tokens")}
            text = sum(writer.bytes for writer in self.writers.values())
            done = sum(sizes[: encoded.part]) + encoded.done * sizes[encoded.part]
            self.watch(Progress("tokens", done, total, **counts, text=text))

    def finish(self) -> Corpus:
        """Give the last shards their names, write the manifest, and open what has been made."""
        self.checkpoint()
        for writer in self.writers.values():
            writer.finish()
        splits = {}
        for name, writer in self.writers.items():
            shards = [asdict(shard) for shard in writer.shards]
            counts = {"documents": writer.documents, "tokens": writer.tokens, "bytes": writer.bytes}
            splits[name] = {**counts, "shards": shards}
        sources = zip(self.identity["sources"], self.skipped, strict=True)
        manifest = {
            "format_version": FORMAT_VERSION,
            "acgpt_version": __version__,
            **self.tokenizer,
            "convention": self.recipe.convention,
            **{key: sum(split[key] for split in splits.values()) for key in ("documents", "tokens", "bytes")},
            "skipped": sum(self.skipped),
            "sources": [{**source, "skipped": skipped} for source, skipped in sources],
            "splits": splits,
            "recipe": self.identity,
        }
        if not manifest["tokens"]:
            raise InputError("the sources hold no text: every document is blank.")
        write_json(self.folder / MANIFEST, manifest)
        (self.folder / JOURNAL).unlink()
        return Corpus.open(self.folder)
