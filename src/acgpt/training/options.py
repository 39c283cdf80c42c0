"""The options of training besides recipe keys, and those of fine-tuning, which are shortcuts for recipe keys.

This module does not import torch, transformers or numpy, so that the command line lists the options without delay. The
shortcuts have the ranges of their keys: see `acgpt.training.recipe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from acgpt.common.options import Options, documented, option


@documented
@dataclass(frozen=True)
class RunOptions(Options):
    """The options of `acgpt train` besides the recipe and its changes."""

    resume: bool = option("Resume the run in the output folder from its last checkpoint, if any.", False)
    minutes: float | None = option(
        "Stop with a checkpoint after N minutes; continue with `resume`.", shell="Exit code: 3.", metavar="N", above=0
    )
    quiet: bool = option("Show no progress.", False, flags=("--quiet", "-q"))


@dataclass(frozen=True)
class TuningKeys(Options):
    """Shortcuts for frequently used recipe keys."""

    base: Path | str | None = option(
        "Model to fine-tune: a folder, a hub id or a .gguf file; 'default' is the embedded SmolLM2-135M-Instruct.",
        metavar="MODEL",
        flags=("--base", "-b"),
    )
    corpus: Path | str | None = option(
        "Folder of the corpus, written by acgpt prepare with the tokenizer of the model.",
        metavar="FOLDER",
        flags=("--corpus", "-c"),
    )
    output: Path | str | None = option("Folder of the run.", metavar="FOLDER", flags=("--output", "-o"))
    rank: int | None = option("Rank of LoRA; alpha is twice the rank.", metavar="N")
    full: bool = option("Train all weights instead of an adapter.", False)
    four_bits: bool = option("Store the frozen weights in 4 bits (needs bitsandbytes).", False, flags=("--4bit",))
    r_max: float | None = option("Maximum share of a text that is given.", metavar="X")
    mix: float | None = option(
        "Share of texts that are read left to right, with nothing given (autoregressive mixing).", metavar="X"
    )
    infilling: float | None = option(
        "Share of texts in which one gap is asked and all other tokens are given.", metavar="X"
    )
    causal: bool = option("Train the causal twin: the same texts in the same order, nothing given.", False)
    steps: int | None = option("Number of optimizer steps.", metavar="N")
    lr: float | None = option("Peak learning rate.", metavar="X")


@documented
@dataclass(frozen=True)
class FinetuningOptions(RunOptions, TuningKeys):
    """The options of `acgpt.finetune` and of `acgpt finetune`."""
