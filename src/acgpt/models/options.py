"""The options of loading a model and asking it, each declared once.

This module imports neither torch, transformers nor numpy, so that the command line can list the options at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from acgpt.common.options import Options, declared, documented, option


@documented
@dataclass(frozen=True)
class DeviceOptions(Options):
    """Where a model is computed."""

    device: str = option("auto, cpu, cuda, cuda:1, mps. Default: auto, the best there is.", "auto", metavar="NAME")


@documented
@dataclass(frozen=True)
class LoadingOptions(DeviceOptions):
    """Where a model is computed, and in which precision."""

    dtype: str = option(
        "auto, float32, bfloat16, float16, float64. Default: auto, float32; on CUDA, what the checkpoint has.",
        "auto",
        metavar="NAME",
        form="dtype",
    )


@documented
@dataclass(frozen=True)
class ModelOptions(Options):
    """Which model answers templates, and with which adapters."""

    model: str | None = option(
        "A folder, a Hugging Face hub id or a .gguf file. Default: the embedded SmolLM2-135M-Instruct, with an adapter "
        "that reads the future.",
        metavar="NAME",
        flags=("--model", "-m"),
    )
    adapter: Mapping[str, str] | str | Literal[False] | None = option(
        "A PEFT adapter for the model: a folder or a hub id. May be repeated, with names: infill=…, scattered=…; each "
        "template is then answered by the one that is for such templates (docs/how-to/adapters.md).",
        shell="none: no adapter, for the embedded model too.",
        metavar="[NAME=]PATH",
        flags=("--adapter", "-a"),
        form="adapters",
    )


@documented
@dataclass(frozen=True)
class QuestionOptions(LoadingOptions, ModelOptions):
    """The options of `acgpt score` and `acgpt rank`, and of `acgpt infill` with those below."""

    future: bool | None = option(
        "Use what stands after a slot? Default: if the model says that it can (score shows both).",
        flags=("--future/--no-future",),
    )


@documented
@dataclass(frozen=True)
class SampleOptions(QuestionOptions):
    """The options of `acgpt infill`, and how `LanguageModel.sample` draws."""

    n: int = option("How many samples of each template. Default: 1.", 1, metavar="N", minimum=1, flags=("-n",))
    temperature: float = option("1 is the model's own, the default; 0 is greedy.", 1.0, metavar="X", minimum=0)
    top_p: float = option(
        "Draw from the likeliest tokens that together have probability P, above 0 and at most 1.", 1.0, metavar="P"
    )
    top_k: int | None = option("Draw from the K likeliest tokens.", metavar="K", minimum=1)
    seed: int | None = option(
        "The same one repeats a run. Default: a fresh one.", metavar="N", minimum=0, flags=("--seed", "-s")
    )


@documented
@dataclass(frozen=True)
class MergeOptions(Options):
    """The options of `acgpt.merge` and of `acgpt merge`."""

    dtype: str = declared(
        LoadingOptions,
        "dtype",
        help="Of the weights that are written: float32, bfloat16, float16, float64. Default: auto, as the base has "
        "them (a .gguf file: float32).",
    )


@documented
@dataclass(frozen=True)
class PushOptions(Options):
    """The options of `acgpt.push` and of `acgpt push`."""

    private: bool = option("A repository that only you, or your organisation, can see. Default: public.", False)
    dry_run: bool = option("Say what would be sent, and send nothing.", False)
