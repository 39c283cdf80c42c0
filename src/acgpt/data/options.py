"""Options of corpus preparation.

This module imports neither torch, transformers nor numpy, so that `acgpt COMMAND --help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from acgpt.common.options import Options, documented, option

SMALLEST = 257  # tokens of a tokenizer: one per byte, and EOS
MAX_HELD_OUT = 0.5  # share of train; more is probably a mistake, such as 99 for 1 %


@documented
@dataclass(frozen=True)
class PreparationOptions(Options):
    """Options of `acgpt.prepare` and `acgpt prepare`."""

    tokenizer: str | None = option(
        "Tokenizer: gpt2 or default (embedded, no download), a folder, a hub id or a .gguf file. Default: gpt2.",
        metavar="NAME",
        flags=("--tokenizer", "-t"),
    )
    train_tokenizer: int | None = option(
        "Train a byte-level BPE tokenizer with N tokens on the train split (its first 512 MB).",
        metavar="N",
        minimum=SMALLEST,
        words=f"at least {SMALLEST} (a token per byte, and EOS)",
    )
    mask_token: bool = option("Add a token <|mask|> for unknown tokens if the tokenizer has none.", False)
    convention: Literal["lines", "documents"] | None = option(
        "Where to put EOS. lines: after each non-blank line. documents: after each document. "
        "Default: documents (wikitext-103: lines).",
        metavar="NAME",
    )
    field: str = option(
        "Field or column with the text in .jsonl and .parquet files. Default: text.", "text", metavar="NAME"
    )
    validation: float | None = option(
        "Share of the train documents to hold out for validation, such as 0.01; for a few text files, pieces of them. "
        "Default: 0 (fineweb: 0.01).",
        metavar="SHARE",
        minimum=0,
        maximum=MAX_HELD_OUT,
        words=f"from 0 to {MAX_HELD_OUT} (0.01 is one in a hundred)",
    )
    seed: int = option(
        "Seed of the choice of validation documents. Default: 0.",
        0,
        metavar="N",
        flags=("--seed", "-s"),
        minimum=0,
        below=2**32,
        words="from 0 to 2³² - 1",
    )
    limit: int | None = option(
        "Use only the first N documents of train (a row, or a text file). Default: all (fineweb: 1500000).",
        metavar="N",
        minimum=1,
    )
    workers: int | None = option(
        "Number of tokenizing processes. Default: one per core, fewer for small inputs.",
        metavar="N",
        flags=("--workers", "-w"),
        minimum=1,
    )
    shard_bytes: int = option(
        "",
        32 << 20,
        python="Size of a shard in bytes. Default: 32 MiB.",
        shell="Size of a shard in MB. Default: 32.",
        metavar="MB",
        flags=("--shard-size",),
        form="megabytes",
    )
    skip_bad: bool = option(
        "Skip and count unusable rows, and the rest of a damaged file, instead of failing at the first.",
        False,
    )
    overwrite: bool = option(
        "Replace a corpus that was prepared with other settings. Other files in the folder stay.", False
    )
