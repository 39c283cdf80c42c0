"""The options of training that are no keys of a recipe, and those of fine-tuning, which are short for keys.

This module imports neither torch, transformers nor numpy, so that the command line can list the options at once. The
ranges of the options that are short for keys are those of the keys: see `acgpt.training.recipe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from acgpt.common.options import Options, documented, option


@documented
@dataclass(frozen=True)
class RunOptions(Options):
    """The options of `acgpt train` beside the recipe and its changes."""

    resume: bool = option("Go on from the last checkpoint of the run in the output folder, if there is one.", False)
    minutes: float | None = option(
        "Stop with a checkpoint after so many minutes; `resume` goes on.", shell="Exit code: 3.", metavar="N", above=0
    )
    quiet: bool = option("Show no progress.", False, flags=("--quiet", "-q"))


@dataclass(frozen=True)
class TuningKeys(Options):
    """Keys of a recipe that most people set."""

    base: Path | str | None = option(
        "The model: a folder, a hub id or a .gguf file; 'default' is the embedded SmolLM2-135M-Instruct.",
        metavar="MODEL",
        flags=("--base", "-b"),
    )
    corpus: Path | str | None = option(
        "A folder that acgpt prepare has written, with this model's tokenizer.",
        metavar="FOLDER",
        flags=("--corpus", "-c"),
    )
    output: Path | str | None = option("The run's folder.", metavar="FOLDER", flags=("--output", "-o"))
    rank: int | None = option("LoRA's rank; alpha is then twice that.", metavar="N")
    full: bool = option("Train all weights instead of an adapter.", False)
    four_bits: bool = option("Hold the frozen weights in 4 bits (needs bitsandbytes).", False, flags=("--4bit",))
    r_max: float | None = option("At most this share of a text is given.", metavar="X")
    mix: float | None = option(
        "So many texts, as a share, are read left to right with nothing given (autoregressive mixing).", metavar="X"
    )
    infilling: float | None = option("So many, as a share, ask for one gap, all else given.", metavar="X")
    causal: bool = option("Train the causal twin: the same texts in the same order, nothing given.", False)
    steps: int | None = option("Optimizer steps.", metavar="N")
    lr: float | None = option("The learning rate at its peak.", metavar="X")


@documented
@dataclass(frozen=True)
class FinetuningOptions(RunOptions, TuningKeys):
    """The options of `acgpt.finetune` and of `acgpt finetune`."""
