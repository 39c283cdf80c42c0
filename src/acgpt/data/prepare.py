"""From sources to a corpus: read, tokenise in parallel, write shards; stop at any moment and go on later.

    parts ──► batches ──► encode, in worker processes ──► one writer a split ──► shards
              (in order)  (a bounded number in flight)    (in order)

Memory is bounded by the batches in flight, whatever the size of the corpus. Results are used in the order of the
sources, so the shards do not depend on the number of workers. `acgpt.data.sources` reads, `acgpt.data.encode`
tokenises, `acgpt.data.shards` writes.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from acgpt.common.files import disk_errors, write_json
from acgpt.common.options import keywords
from acgpt.data import tokenizer as corpus_tokenizer
from acgpt.data.corpus import FORMAT_VERSION, JOURNAL, MANIFEST, Corpus
from acgpt.data.encode import Recipe, encode, in_order
from acgpt.data.options import PreparationOptions
from acgpt.data.rows import Bad, Batch
from acgpt.data.shards import Writer, begin, locked, read_previous
from acgpt.data.sources import File, HubSplit, Part, resolve
from acgpt.data.tokenizer import Vocabulary
from acgpt.errors import InputError
from acgpt.version import __version__

CHECKPOINT = 64 << 20  # bytes of text after which the journal is written, if no shard has been filled before
TRAINED_ON = 512 << 20  # bytes of text that a tokenizer is trained on, at most
PIECE = 1 << 12  # bytes in a piece of a text file that is held out
GOES_ON = (
    "Make room or name another folder; what is there is safe, and the same command goes on where this one stopped."
)
WORTH_A_WORKER = 8 << 20  # bytes of source for which another process pays


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


@keywords(PreparationOptions)
def prepare(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    watch: Callable[[Progress], None] | None = None,
    **keywords: Any,
) -> Corpus:
    """Turn sources into a corpus of token shards; go on where an interrupted run of the same stopped.

    In a script, call it under `if __name__ == "__main__":`, for it starts processes.

    Args:
        sources: Each a file, folder or glob (`.txt`, `.jsonl`, `.parquet`; see `acgpt.data.sources`) or a data set by
            name ("wikitext-103", "fineweb"), with `SPLIT=` before it if it is not for train: `"test=heldout.txt"`.
        folder: Where the corpus goes. New, empty, or one that the same call began.
        **keywords: See `PreparationOptions`.
        watch: Called with the `Progress` now and then.

    Raises:
        InputError: Something that the user can mend.
        OutputError: The folder cannot be written. What is there stays, and the same call goes on.
    """
    chosen = PreparationOptions(**keywords)
    watch = watch or (lambda progress: None)
    names = [sources] if isinstance(sources, str | os.PathLike) else sources
    folder = Path(folder)
    check_options(chosen)
    limit, train_tokenizer, mask_token = chosen.limit, chosen.train_tokenizer, chosen.mask_token
    with disk_errors(folder, GOES_ON):
        revisions = known_revisions(read_previous(folder))
    parts = resolve([os.fspath(name) for name in names], revisions, limit)
    asked = Recipe(chosen.convention or "", chosen.validation or 0.0, chosen.field, chosen.seed, limit=limit)
    recipe = choose(parts, asked, chosen.validation is None)
    loaded = None if train_tokenizer else corpus_tokenizer.load(chosen.tokenizer or "gpt2", mask_token)
    watch(Progress("sources"))
    identity: dict[str, Any] = {
        "tokenizer": f"trained, {train_tokenizer} tokens" if loaded is None else corpus_tokenizer.hash_of(loaded),
        "mask_token": mask_token,
        **{key: value for key, value in asdict(recipe).items() if value is not None},
        "shard_bytes": chosen.shard_bytes,
        "sources": [part.describe() for part in parts],
    }
    with disk_errors(folder, GOES_ON), locked(folder):
        previous = read_previous(folder)
        if previous is not None and not chosen.overwrite:
            finished = (folder / MANIFEST).exists()
            if differ := differences(previous["recipe"], identity):
                if finished or any(split["shards"] for split in previous["splits"].values()):
                    raise made_otherwise(folder, finished, differ)
                previous = None  # some seconds' work that failed, say: this is its correction
            elif finished:
                corpus = reuse(folder, chosen.skip_bad)
                watch(Progress("reused"))
                return corpus
        if previous is None or chosen.overwrite or previous["position"] == [0, 0]:
            previous = begin(folder, identity)
            if loaded is None:
                watch(Progress("tokenizer"))
                texts = training_texts(parts, recipe, chosen.skip_bad)
                loaded = corpus_tokenizer.train(texts, train_tokenizer or 0, mask_token)
            corpus_tokenizer.save(loaded, folder)
        vocabulary = corpus_tokenizer.vocabulary_in(folder, None if train_tokenizer else identity["tokenizer"])
        work = Preparation(folder, parts, recipe, identity, vocabulary, chosen.skip_bad, watch)
        work.restore(previous)
        with closing(work):
            work.run(chosen.workers or default_workers(parts))
            corpus = work.finish()
        watch(Progress("prepared"))
        return corpus


# ---- what is asked for ----------------------------------------------------------------------------------------------


def check_options(options: PreparationOptions) -> None:
    """Refuse what makes no sense, before anything is read."""
    smallest, size = corpus_tokenizer.SMALLEST, options.train_tokenizer
    if options.tokenizer is not None and size is not None:
        raise InputError("a tokenizer is either named or trained: leave out `tokenizer` or `train_tokenizer`.")
    if size is not None and size < smallest:
        raise InputError(f"a byte-level tokenizer has at least {smallest} tokens (one a byte, and EOS), not {size}.")
    if options.shard_bytes < 1024:
        raise InputError(f"a shard has at least 1,024 bytes, not {options.shard_bytes}.")


def choose(parts: Sequence[Part], asked: Recipe, default: bool) -> Recipe:
    """What is done: as asked for, if that makes sense here, and what was left open.

    Args:
        parts: What is read.
        asked: Its `convention` may be empty.
        default: Was the share to hold out left open too?
    """
    named = [part for part in parts if isinstance(part, HubSplit)]
    by_lines = [part.title for part in named if part.hub.convention == "lines"]
    convention = asked.convention or ("lines" if by_lines else "documents")
    if by_lines and convention != "lines":
        raise InputError(f"{by_lines[0]} is a data set of lines, not of documents: use `convention='lines'`.")
    splits, share = {part.split for part in parts}, asked.validation
    if default:
        share = 0.0 if "validation" in splits else max([part.hub.validation for part in named], default=0.0)
    if share and "validation" in splits:
        raise InputError("the sources have a validation split of their own: leave `validation` out, or that source.")
    if share and "train" not in splits:
        raise InputError("there is no train split to hold documents out of: leave `validation` out.")
    recipe = replace(asked, convention=convention, validation=share)
    train = [(number, part) for number, part in enumerate(parts) if part.split == "train"][: asked.limit]
    text_only = all(isinstance(part, File) and part.format == "txt" for _, part in train)
    too_few = len(train) * share < 1 or len({recipe.split_of("train", number, 0) for number, _ in train}) < 2
    return replace(recipe, piece=PIECE) if share and text_only and too_few else recipe


def default_workers(parts: Sequence[Part]) -> int:
    """One a core, but no more than there is work for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sizes = [part.size for part in parts]
    return cores if not all(sizes) else min(cores, 1 + sum(sizes) // WORTH_A_WORKER)


# ---- what an earlier run left ---------------------------------------------------------------------------------------


def known_revisions(previous: dict[str, Any] | None) -> dict[str, str]:
    """The revisions of data sets on the hub that it chose."""
    sources = previous["recipe"]["sources"] if previous else []
    return {source["path"]: source["revision"] for source in sources if source["format"] == "hub"}


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """In what a request differs from the one that a folder was made by."""

    def contents(recipe: dict[str, Any]) -> dict[str, str]:
        sources = {json.dumps({k: v for k, v in each.items() if k != "name"}): each for each in recipe["sources"]}
        return {content: f"{each['split']}={each['name']}" for content, each in sources.items()}

    differ = [
        key if key == "tokenizer" else f"{key} ({there.get(key)!r} there, {here.get(key)!r} here)"
        for key in {**here, **there}
        if key != "sources" and there.get(key) != here.get(key)
    ]
    old, new = contents(there), contents(here)
    if list(old) != list(new):
        only = [f"{name} only there" for content, name in old.items() if content not in new]
        only += [f"{name} only here" for content, name in new.items() if content not in old]
        differ.append(f"the content of the sources ({', '.join(only) or 'their order'})")
    return differ


def made_otherwise(folder: Path, finished: bool, differ: Sequence[str]) -> InputError:
    """What to do about a folder that holds the work of another request."""
    what, way = "a corpus that was made otherwise", "Name another folder, or replace it with `overwrite=True`."
    if not finished:
        what = "the unfinished work of another command"
        way = "Repeat that command to finish it; or name another folder, or begin anew with `overwrite=True`."
    return InputError(f"{folder} holds {what}. What differs: {', '.join(differ)}. {way}")


def reuse(folder: Path, skip_bad: bool) -> Corpus:
    """The finished corpus, checked."""
    corpus = Corpus.open(folder)
    corpus.verify()
    corpus_tokenizer.vocabulary_in(folder, corpus.manifest["tokenizer_hash"])
    if corpus.manifest["skipped"] and not skip_bad:
        lost = f", and what follows in {count} damaged files" if (count := corpus.manifest.get("damaged")) else ""
        skipped = corpus.manifest["skipped"]
        raise InputError(
            f"{folder} was made without {skipped} rows that cannot be used{lost}; `skip_bad=True` accepts that."
        )
    (folder / JOURNAL).unlink(missing_ok=True)
    return corpus


# ---- the work -------------------------------------------------------------------------------------------------------


def unusable(part: Part, bad: Bad) -> InputError:
    """What to do about a row."""
    out = bad.lost or "such rows"
    return InputError(f"{part.name}, {bad.where}: {bad.why}. Mend it, or leave {out} out with `skip_bad=True`.")


def read(
    parts: Sequence[tuple[int, Part]], recipe: Recipe, start: int = 0, taken: int = 0
) -> Iterator[tuple[int, str, Batch]]:
    """What parts hold, each given with its number: the number, the split and a batch at a time.

    Args:
        parts: What is read.
        recipe: Its limit, if it has one, is on the documents of train.
        start: The row of the first part to begin at.
        taken: How many documents of train came before it.
    """
    for number, part in parts:
        left = recipe.limit - taken if recipe.limit is not None and part.split == "train" else None
        for batch in part.batches(start, recipe.field, recipe.convention) if left != 0 else ():
            if left is not None:
                batch = batch.head(left)
                left, taken = left - batch.count, taken + batch.count
            yield number, part.split, batch
            if left == 0:
                break
        start = 0


def training_texts(parts: Sequence[Part], recipe: Recipe, skip_bad: bool) -> Iterator[str]:
    """The beginning of the train split, for a tokenizer to learn from."""
    size = 0
    train = [(number, part) for number, part in enumerate(parts) if part.split == "train"]
    for number, split, batch in read(train, recipe):
        for name, document in recipe.documents(batch, split, number):
            if isinstance(document, Bad):
                if not skip_bad:
                    raise unusable(parts[number], document)
            elif name == "train":
                yield from recipe.texts(document)
                size += len(document.text.encode())
        if size >= TRAINED_ON:
            return


@dataclass
class Preparation:
    """Reads, has tokenised, and writes; knows at the end of every batch where it stands."""

    folder: Path
    parts: Sequence[Part]
    recipe: Recipe
    identity: dict[str, Any]
    vocabulary: Vocabulary
    skip_bad: bool
    watch: Callable[[Progress], None]

    def restore(self, journal: dict[str, Any]) -> None:
        """Go back to where a journal was written."""
        self.part, self.row = journal["position"]
        self.skipped: list[int] = journal["skipped"]
        self.damaged: list[str | None] = journal.get("damaged") or [None] * len(self.parts)
        self.taken: int = journal.get("taken", 0)  # documents of train, where there is a limit on them
        dtype = self.vocabulary.dtype
        capacity = self.identity["shard_bytes"] // np.dtype(dtype).itemsize
        names = dict.fromkeys([part.split for part in self.parts] + ["validation"] * bool(self.recipe.validation))
        self.writers = {name: Writer(self.folder, name, dtype, capacity) for name in names}
        for name, state in journal["splits"].items():
            self.writers[name].restore(state)

    def checkpoint(self) -> None:
        """Bring everything to the disk, then say so in the journal."""
        for writer in self.writers.values():
            writer.sync()
        splits = {name: writer.state() for name, writer in self.writers.items()}
        place = {"position": [self.part, self.row], "taken": self.taken}
        place |= {"skipped": self.skipped, "damaged": self.damaged}
        journal = {"recipe": self.identity, **place, "splits": splits}
        write_json(self.folder / JOURNAL, journal, ensure_ascii=False, locked=True)

    def close(self) -> None:
        """Let go of the files."""
        for writer in self.writers.values():
            writer.close()

    def batches(self) -> Iterator[tuple[int, str, Batch]]:
        """All that is left to read, with the number and the split of its part."""
        # From where things stand now: reading runs ahead of what has been written.
        return read(list(enumerate(self.parts))[self.part :], self.recipe, self.row, self.taken)

    def run(self, workers: int) -> None:
        """Read, tokenise and write to the end."""
        sizes = [part.size for part in self.parts]
        total = sum(sizes) if all(sizes) and self.recipe.limit is None else 0
        writers = self.writers.values()
        shards, text = 0, 0  # at the last checkpoint
        for encoded in in_order(partial(encode, self.recipe, self.vocabulary), self.batches(), workers):
            if encoded.bad and not self.skip_bad:
                self.checkpoint()
                raise unusable(self.parts[encoded.part], encoded.bad[0])
            for split, share in encoded.shares.items():
                self.writers[split].write(share)
            self.skipped[encoded.part] += sum(bad.rows for bad in encoded.bad)
            for bad in encoded.bad:
                if bad.lost:
                    self.damaged[encoded.part] = f"{bad.where}: {bad.why}; {bad.lost} is left out"
            self.taken += encoded.count if self.parts[encoded.part].split == "train" else 0
            self.part, self.row = encoded.part, encoded.next
            now = Progress(
                "tokens",
                done=sum(sizes[: self.part]) + encoded.done * sizes[self.part],
                total=total,
                documents=sum(writer.documents for writer in writers),
                tokens=sum(writer.tokens for writer in writers),
                text=sum(writer.bytes for writer in writers),
            )
            if now.text - text >= CHECKPOINT or sum(len(writer.shards) for writer in writers) > shards:
                self.checkpoint()
                shards, text = sum(len(writer.shards) for writer in writers), now.text
            self.watch(now)

    def finish(self) -> Corpus:
        """Give the last shards their names, write the manifest, and open what has been made."""
        self.checkpoint()
        if not any(writer.tokens for writer in self.writers.values()):
            raise InputError("the sources hold no text: every document is blank.")
        splits: dict[str, dict[str, Any]] = {}
        for name, writer in self.writers.items():
            writer.finish()
            shards = [asdict(shard) for shard in writer.shards]
            counts = {"documents": writer.documents, "tokens": writer.tokens, "bytes": writer.bytes}
            splits[name] = {**counts, "shards": shards}
        for name, what in {"validation": "no document was", "train": "every document was"}.items():
            if self.recipe.validation and not splits[name]["documents"]:
                warnings.warn(
                    f"{what} held out: there are too few for `validation={self.recipe.validation}`. Choose another "
                    "share or `seed`, or name a source for it: validation=PATH.",
                    stacklevel=3,
                )
        vocabulary = {key: value for key, value in asdict(self.vocabulary).items() if key != "folder"}
        outcome = [
            {"skipped": skipped, "damaged": lost} for skipped, lost in zip(self.skipped, self.damaged, strict=True)
        ]
        manifest = {
            "format_version": FORMAT_VERSION,
            "acgpt_version": __version__,
            **vocabulary,
            "dtype": self.vocabulary.dtype,
            "convention": self.recipe.convention,
            "limit": self.recipe.limit,
            **{key: sum(split[key] for split in splits.values()) for key in ("documents", "tokens", "bytes")},
            "skipped": sum(self.skipped),
            "damaged": sum(lost is not None for lost in self.damaged),
            "sources": [{**one, **other} for one, other in zip(self.identity["sources"], outcome, strict=True)],
            "splits": splits,
            "recipe": self.identity,
        }
        write_json(self.folder / MANIFEST, manifest, ensure_ascii=False, locked=True)
        (self.folder / JOURNAL).unlink()
        return Corpus.open(self.folder)
