"""Options of training that are not recipe keys, and options of fine-tuning that are shorthands for recipe keys.

This module imports neither torch, transformers nor numpy, so that `acgpt COMMAND --help` is fast. Shorthands have the
ranges of their keys: see `acgpt.training.recipe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from acgpt.common.options import Options, documented, option


@documented
@dataclass(frozen=True)
class RunOptions(Options):
    """Options of `acgpt train` besides the recipe and its changes."""

    resume: bool = option("Resume from the last checkpoint in the output folder, if any.", False)
    minutes: float | None = option(
        "Stop with a checkpoint after N minutes; `resume` continues.", shell="Exit code: 3.", metavar="N", above=0
    )
    quiet: bool = option("Show no progress.", False, flags=("--quiet", "-q"))


@dataclass(frozen=True)
class TuningKeys(Options):
    """The most common recipe keys."""

    base: Path | str | None = option(
        "Base model: a folder, a hub id or a .gguf file; 'default' is the embedded SmolLM2-135M-Instruct.",
        metavar="MODEL",
        flags=("--base", "-b"),
    )
    corpus: Path | str | None = option(
        "Corpus folder, prepared with the tokenizer of the base model.",
        metavar="FOLDER",
        flags=("--corpus", "-c"),
    )
    output: Path | str | None = option("Folder of the run.", metavar="FOLDER", flags=("--output", "-o"))
    rank: int | None = option("LoRA rank; alpha becomes twice the rank.", metavar="N")
    full: bool = option("Train all weights instead of an adapter.", False)
    four_bits: bool = option("Load the frozen weights in 4 bits (needs bitsandbytes).", False, flags=("--4bit",))
    r_max: float | None = option("Maximum share of a text that is given.", metavar="X")
    mix: float | None = option(
        "Share of texts with nothing given, read left to right (autoregressive mixing).", metavar="X"
    )
    infilling: float | None = option("Share of texts with one gap, everything else given.", metavar="X")
    causal: bool = option("Train the causal twin: same texts, same order, nothing given.", False)
    steps: int | None = option("Optimizer steps.", metavar="N")
    lr: float | None = option("Peak learning rate.", metavar="X")


@documented
@dataclass(frozen=True)
class FinetuningOptions(RunOptions, TuningKeys):
    """Options of `acgpt.finetune` and `acgpt finetune`."""
