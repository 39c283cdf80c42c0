"""`acgpt prepare`: text into token shards that a model can be trained and evaluated on."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acgpt.cli.ui import PAUSE, emit, hush, option

if TYPE_CHECKING:
    from acgpt.data.corpus import Corpus
    from acgpt.data.prepare import Progress

Convention = StrEnum("Convention", ["lines", "documents"])

HELP = {
    "sources": "[SPLIT=]NAME: files, folders or globs of .txt, .jsonl, .parquet; or wikitext-103 or fineweb.",
    "folder": "Where the corpus goes: a new or empty folder, or one that the same command began.",
    "tokenizer": "gpt2 or default, the embedded model's (no download needed); or a folder, a hub id or a .gguf file. "
    "Default: gpt2.",
    "train_tokenizer": "Train a byte-level BPE of N tokens on the train split (at most its first 512 MB) instead.",
    "mask_token": "Add a token <|mask|> for unknown tokens, if the tokenizer has none.",
    "convention": "lines: EOS after each line that is not blank. documents: EOS after each document. "
    "Default: documents (wikitext-103: lines).",
    "field": "What holds the text in .jsonl and .parquet. Default: text.",
    "validation": "Hold out this share of the train documents, 0.01 say, as validation; of a few text files, pieces. "
    "Default: 0 (fineweb: 0.01).",
    "seed": "Of the choice of those documents. Default: 0.",
    "limit": "Take only the first N documents of train: rows; a text file is one. Default: all (fineweb: 1500000).",
    "workers": "Processes that tokenise. Default: one a core, fewer if there is little to do.",
    "shard_size": "MB in a shard. Default: 32.",
    "skip_bad": "Leave out and count rows that cannot be used, and the rest of a damaged file; without this, the first "
    "one is an error.",
    "overwrite": "Replace a corpus that was made otherwise. Other files in the folder are left alone.",
    "json": "For programs: one JSON object in a line, with the keys named above.",
}


def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", show_default=False, help=HELP["sources"])],
    folder: Annotated[Path, option("--output", "-o", metavar="FOLDER", help=HELP["folder"])],
    tokenizer: Annotated[str | None, option("--tokenizer", "-t", metavar="NAME", help=HELP["tokenizer"])] = None,
    train_tokenizer: Annotated[
        int | None, option("--train-tokenizer", metavar="N", help=HELP["train_tokenizer"])
    ] = None,
    mask_token: Annotated[bool, option("--mask-token", help=HELP["mask_token"])] = False,
    convention: Annotated[Convention | None, option("--convention", metavar="NAME", help=HELP["convention"])] = None,
    field: Annotated[str, option("--field", metavar="NAME", help=HELP["field"])] = "text",
    validation: Annotated[float | None, option("--validation", metavar="SHARE", help=HELP["validation"])] = None,
    seed: Annotated[int, option("--seed", "-s", metavar="N", help=HELP["seed"])] = 0,
    limit: Annotated[int | None, option("--limit", metavar="N", help=HELP["limit"])] = None,
    workers: Annotated[int | None, option("--workers", "-w", metavar="N", help=HELP["workers"])] = None,
    shard_size: Annotated[float, option("--shard-size", metavar="MB", help=HELP["shard_size"])] = 32,
    skip_bad: Annotated[bool, option("--skip-bad", help=HELP["skip_bad"])] = False,
    overwrite: Annotated[bool, option("--overwrite", help=HELP["overwrite"])] = False,
    as_json: Annotated[bool, option("--json", help=HELP["json"])] = False,
) -> None:
    r"""Turn text into token shards, to train and evaluate on.

    acgpt prepare wikitext-103 -o data/wikitext
    acgpt prepare articles.jsonl.zst --validation 0.01 -o data/articles
    acgpt prepare wiki.jsonl test=wiki.test.txt --convention lines -o data/wiki
    acgpt prepare 'books/*.txt' --train-tokenizer 8192 -o data/books
    acgpt prepare 'web/*.parquet' --limit 1500000 --validation 0.01 -o data/web

    A document is a text file as a whole, a line of a .jsonl file (one field of
    its JSON object), or a row of a .parquet file (one column). .txt and .jsonl
    may be compressed: .gz, .xz, .zst. Text is UTF-8 and is not changed.

    A command that was interrupted goes on where it stopped when it is repeated,
    and the result is the same; one that has ended checks what is there. Another
    command replaces what one has left that failed before its first shard was
    full.

    Keys of --json:
      folder, hash (of tokenizer and shards), reused (was it there?), seconds,
      tokenizer_hash, vocabulary_size, bos_token_id, eos_token_id, mask_token_id,
      dtype, convention, limit, documents, tokens (with EOS), bytes (of text),
      skipped (rows that cannot be used), damaged (files cut short by damage),
      splits: for each, documents, tokens, bytes, shards (how many),
      format_version, acgpt_version
    """
    if not math.isfinite(shard_size):
        raise typer.BadParameter(f"--shard-size must be a number of MB, not {shard_size}.")
    hush()
    from acgpt.data.prepare import prepare

    start, reused = time.perf_counter(), False
    with bar() as show:

        def watch(progress: Progress) -> None:
            nonlocal reused
            reused = progress.phase == "reused"
            show(progress)

        corpus = prepare(
            sources,
            folder,
            tokenizer=tokenizer,
            train_tokenizer=train_tokenizer,
            mask_token=mask_token,
            convention=convention and convention.value,
            field=field,
            validation=validation,
            seed=seed,
            limit=limit,
            workers=workers,
            shard_bytes=round(shard_size * 2**20),
            skip_bad=skip_bad,
            overwrite=overwrite,
            watch=watch,
        )
    seconds = time.perf_counter() - start
    if as_json:
        emit({**corpus.summary(), "reused": reused, "seconds": seconds})
    else:
        print_corpus(corpus, reused, seconds)


@contextmanager
def bar() -> Iterator[Callable[[Progress], None]]:
    """On a terminal a bar: tokens, documents, speed, and, if the size is known, the time left; else lines, rarely."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    words = {"sources": "checking the sources", "tokenizer": "training a tokenizer", "tokens": "tokenising"}
    texts = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"))
    columns = (*texts, TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("starting", total=None, counts="")
        first: tuple[float, int] | None = None  # when this run first reported, and how much text there was by then
        said = time.monotonic()

        def show(progress: Progress) -> None:
            nonlocal first, said
            counts = ""
            if progress.phase == "tokens":
                first = first or (time.perf_counter(), progress.text)
                seconds = time.perf_counter() - first[0]
                speed = (progress.text - first[1]) / 1e6 / seconds if seconds else 0.0
                counts = f"{progress.tokens:,} tokens, {progress.documents:,} documents, {speed:.1f} MB/s"
            doing = words.get(progress.phase, progress.phase)
            bar.update(task, description=doing, completed=progress.done, total=progress.total or None, counts=counts)
            if bar.disable and time.monotonic() - said >= PAUSE:
                said = time.monotonic()
                share = f"{progress.done / progress.total:.0%}, " if progress.total else ""
                print(f"{doing}: {share}{counts}".rstrip(": "), file=sys.stderr, flush=True)

        yield show


def print_corpus(corpus: Corpus, reused: bool, seconds: float) -> None:
    """The splits as a table, and what else there is to know."""
    from rich.table import Table

    from acgpt.display.show import Page

    page = Page()
    table = Table(box=None, pad_edge=False)
    for name in ("split", "documents", "tokens", "shards"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for name, split in corpus.splits.items():
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}", f"{len(split.shards):,}")
    page.table(table)
    for source in corpus.manifest["sources"]:
        if source["skipped"]:
            page.note(f"{source['name']}: {source['skipped']:,} rows skipped that cannot be used", "yellow")
        if source.get("damaged"):
            page.note(f"{source['name']}, {source['damaged']}", "yellow")
    done = "already prepared, and checked" if reused else "prepared"
    page.note(f"{corpus.folder}: {done} in {seconds:,.0f} s, vocabulary {corpus.manifest['vocabulary_size']:,}")
