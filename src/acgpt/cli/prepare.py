"""`acgpt prepare`: tokenize text into a corpus for training and evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acgpt.cli.ui import Bars, ObjectOption, emit, option, silence_libraries, with_options
from acgpt.data.options import PreparationOptions

if TYPE_CHECKING:
    from acgpt.data.corpus import Corpus
    from acgpt.data.prepare import Progress

HELP = {
    "sources": "[SPLIT=]NAME: file, folder or glob of .txt, .jsonl or .parquet; or wikitext-103, fineweb.",
    "folder": "Corpus folder: new, empty, or begun by the same command.",
}
LABELS = {"sources": "checking the sources", "tokenizer": "training a tokenizer", "tokens": "tokenizing, MB"}


@with_options(PreparationOptions)
def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", show_default=False, help=HELP["sources"])],
    folder: Annotated[Path, option("--output", "-o", metavar="FOLDER", help=HELP["folder"])],
    options: PreparationOptions,
    as_json: ObjectOption = False,
) -> None:
    r"""Tokenize text into a corpus for training and evaluation.

    acgpt prepare wikitext-103 -o data/wikitext
    acgpt prepare articles.jsonl.zst --validation 0.01 -o data/articles
    acgpt prepare wiki.jsonl test=wiki.test.txt --convention lines -o data/wiki
    acgpt prepare 'books/*.txt' --train-tokenizer 8192 -o data/books
    acgpt prepare 'web/*.parquet' --limit 1500000 --validation 0.01 -o data/web

    A document is a whole text file, a line of a .jsonl file (one field of its
    JSON object), or a row of a .parquet file (one column). .txt and .jsonl may be
    compressed: .gz, .xz, .zst. Text must be UTF-8 and is not changed.

    The same command resumes an interrupted one, with the same result, and checks
    a finished corpus. A different command replaces a corpus without a full shard.

    Keys of --json:
      folder, hash (of tokenizer and shards), reused (bool), seconds,
      tokenizer_hash, vocabulary_size, bos_token_id, eos_token_id, mask_token_id,
      dtype, convention, limit, documents, tokens (with EOS), bytes (of text),
      skipped (unusable rows), damaged (truncated by damage),
      splits: by name, documents, tokens, bytes, shards (how many),
      format_version, acgpt_version
    """
    silence_libraries()
    from acgpt.data.prepare import prepare

    start, reused = time.perf_counter(), False
    with show_progress() as show:

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
def show_progress() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows the progress of a preparation, with a bar of its own for each phase."""
    bars, phase, first = Bars(), "", 0
    update: Callable[..., None]
    with ExitStack() as stack:

        def show(progress: Progress) -> None:
            nonlocal phase, first, update
            if progress.phase not in LABELS:  # the end
                return
            if progress.phase != phase:
                stack.close()
                phase, first = progress.phase, progress.tokens
                update = stack.enter_context(bars(LABELS[phase]))
            update(round(progress.done / 1e6), round(progress.total / 1e6) or None, progress.tokens - first)

        yield show


def print_corpus(corpus: Corpus, reused: bool, seconds: float) -> None:
    """Print the splits as a table, skipped rows and damaged files."""
    from acgpt.display.show import Page
    from acgpt.display.table import terminal_table

    page = Page()
    pieces = corpus.manifest["recipe"].get("piece")
    table = terminal_table(("split", "pieces" if pieces else "documents", "tokens", "shards"))
    for name, split in corpus.splits.items():
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}", f"{len(split.shards):,}")
    page.table(table)
    if pieces:
        page.note(
            "Where documents begin in the text files is not known: pieces of the files are held out. Consecutive ones "
            "of a split count as one."
        )
    for source in corpus.manifest["sources"]:
        if source["skipped"]:
            page.note(f"{source['name']}: {source['skipped']:,} unusable rows skipped", "yellow")
        if source.get("damaged"):
            page.note(f"{source['name']}, {source['damaged']}", "yellow")
    done = "already prepared, checked" if reused else "prepared"
    page.note(f"{corpus.folder}: {done} in {seconds:,.0f} s, vocabulary {corpus.manifest['vocabulary_size']:,}")
