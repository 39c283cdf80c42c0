"""The options of preparing a corpus, each declared once.

This module does not import torch, transformers or numpy, so that the command line lists the options without delay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from acgpt.common.options import Options, documented, option

MOST_HELD_OUT = 0.5  # share of train; a larger one is probably a mistake, such as 0.99 for 1 %


@documented
@dataclass(frozen=True)
class PreparationOptions(Options):
    """The options of `acgpt.prepare` and of `acgpt prepare`."""

    tokenizer: str | None = option(
        "Tokenizer: gpt2, default (that of the embedded model; neither needs a download), a folder, a hub id or a "
        ".gguf file. Default: gpt2.",
        metavar="NAME",
        flags=("--tokenizer", "-t"),
    )
    train_tokenizer: int | None = option(
        "Instead, train a byte-level BPE tokenizer of N tokens on the train split (at most its first 512 MB).",
        metavar="N",
    )
    mask_token: bool = option("Add a mask token <|mask|> for unknown tokens, if the tokenizer has none.", False)
    convention: Literal["lines", "documents"] | None = option(
        "lines: EOS after each line that is not blank. documents: EOS after each document. "
        "Default: documents (wikitext-103: lines).",
        metavar="NAME",
    )
    field: str = option(
        "Field of .jsonl files, or column of .parquet files, that holds the text. Default: text.",
        "text",
        metavar="NAME",
    )
    validation: float | None = option(
        "Share of the train documents to hold out as validation, such as 0.01; of a few text files, pieces are held "
        "out. Default: 0 (fineweb: 0.01).",
        metavar="SHARE",
        minimum=0,
        maximum=MOST_HELD_OUT,
        words=f"from 0 to {MOST_HELD_OUT} (0.01 is one in a hundred)",
    )
    seed: int = option(
        "Seed of the choice of held-out documents. Default: 0.",
        0,
        metavar="N",
        flags=("--seed", "-s"),
        minimum=0,
        below=2**32,
        words="from 0 to 2³² - 1",
    )
    limit: int | None = option(
        "Maximum number of train documents: rows, or text files. Default: all (fineweb: 1500000).",
        metavar="N",
        minimum=1,
    )
    workers: int | None = option(
        "Number of processes that tokenise. Default: one per core, fewer for small sources.",
        metavar="N",
        flags=("--workers", "-w"),
        minimum=1,
    )
    shard_bytes: int = option(
        "",
        32 << 20,
        python="Bytes per shard. Default: 32 MiB.",
        shell="MB per shard. Default: 32.",
        metavar="MB",
        flags=("--shard-size",),
        form="megabytes",
    )
    skip_bad: bool = option(
        "Skip and count unusable rows and the rest of damaged files. Default: the first one is an error.",
        False,
    )
    overwrite: bool = option(
        "Replace a corpus that was made with other settings. Other files in the folder are kept.", False
    )
