"""`acgpt prepare`: text into token shards that a model can be trained and evaluated on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acgpt.cli.ui import PAUSE, ObjectOption, emit, option, silence_libraries, with_options
from acgpt.data.options import PreparationOptions

if TYPE_CHECKING:
    from acgpt.data.corpus import Corpus
    from acgpt.data.prepare import Progress

HELP = {
    "sources": "[SPLIT=]NAME: files, folders or globs of .txt, .jsonl, .parquet; or wikitext-103 or fineweb.",
    "folder": "Where the corpus goes: a new or empty folder, or one that the same command began.",
}


@with_options(PreparationOptions)
def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", show_default=False, help=HELP["sources"])],
    folder: Annotated[Path, option("--output", "-o", metavar="FOLDER", help=HELP["folder"])],
    options: PreparationOptions,
    as_json: ObjectOption = False,
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
    silence_libraries()
    from acgpt.data.prepare import prepare

    start, reused = time.perf_counter(), False
    with bar() as show:

        def watch(progress: Progress) -> None:
            nonlocal reused
            reused = progress.phase == "reused"
            show(progress)

        corpus = prepare(sources, folder, watch=watch, **vars(options))
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
    from acgpt.display.show import Page
    from acgpt.display.table import terminal_table

    page = Page()
    table = terminal_table(("split", "documents", "tokens", "shards"))
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
