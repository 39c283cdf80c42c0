"""The options of preparing a corpus, each declared once.

This module imports neither torch, transformers nor numpy, so that the command line can list the options at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from acgpt.common.options import Options, documented, option

MOST_HELD_OUT = 0.5  # of train; more is a mistake: 99 for 1 %, say


@documented
@dataclass(frozen=True)
class PreparationOptions(Options):
    """The options of `acgpt.prepare` and of `acgpt prepare`."""

    tokenizer: str | None = option(
        "gpt2 or default, the embedded model's (no download needed); or a folder, a hub id or a .gguf file. "
        "Default: gpt2.",
        metavar="NAME",
        flags=("--tokenizer", "-t"),
    )
    train_tokenizer: int | None = option(
        "Train a byte-level BPE of N tokens on the train split (at most its first 512 MB) instead.", metavar="N"
    )
    mask_token: bool = option("Add a token <|mask|> for unknown tokens, if the tokenizer has none.", False)
    convention: Literal["lines", "documents"] | None = option(
        "lines: EOS after each line that is not blank. documents: EOS after each document. "
        "Default: documents (wikitext-103: lines).",
        metavar="NAME",
    )
    field: str = option("What holds the text in .jsonl and .parquet. Default: text.", "text", metavar="NAME")
    validation: float | None = option(
        "Hold out this share of the train documents, 0.01 say, as validation; of a few text files, pieces. "
        "Default: 0 (fineweb: 0.01).",
        metavar="SHARE",
        minimum=0,
        maximum=MOST_HELD_OUT,
        words=f"from 0 to {MOST_HELD_OUT} (0.01 is one in a hundred)",
    )
    seed: int = option(
        "Of the choice of those documents. Default: 0.",
        0,
        metavar="N",
        flags=("--seed", "-s"),
        minimum=0,
        below=2**32,
        words="from 0 to 2³² - 1",
    )
    limit: int | None = option(
        "Take only the first N documents of train: rows; a text file is one. Default: all (fineweb: 1500000).",
        metavar="N",
        minimum=1,
    )
    workers: int | None = option(
        "Processes that tokenise. Default: one a core, fewer if there is little to do.",
        metavar="N",
        flags=("--workers", "-w"),
        minimum=1,
    )
    shard_bytes: int = option(
        "",
        32 << 20,
        python="Bytes in a shard. Default: 32 MiB.",
        shell="MB in a shard. Default: 32.",
        metavar="MB",
        flags=("--shard-size",),
        form="megabytes",
    )
    skip_bad: bool = option(
        "Leave out and count rows that cannot be used, and the rest of a damaged file; without this, the first one is "
        "an error.",
        False,
    )
    overwrite: bool = option(
        "Replace a corpus that was made otherwise. Other files in the folder are left alone.", False
    )
