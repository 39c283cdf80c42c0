"""Options for loading, querying, merging and sharing models, each declared once.

This module does not import torch, transformers or numpy, so that the command line can list the options quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from acgpt.common.options import Options, declared, documented, option


@documented
@dataclass(frozen=True)
class DeviceOptions(Options):
    """Options for the device of a model."""

    device: str = option("auto, cpu, cuda, cuda:1, mps. Default: auto, the best available.", "auto", metavar="NAME")


@documented
@dataclass(frozen=True)
class LoadingOptions(DeviceOptions):
    """Options for the device and the precision of a model."""

    dtype: str = option(
        "auto, float32, bfloat16, float16, float64. Default: auto, float32; on CUDA, the checkpoint's dtype.",
        "auto",
        metavar="NAME",
        form="dtype",
    )


@documented
@dataclass(frozen=True)
class ModelOptions(Options):
    """Options for the model that answers templates, and its adapters."""

    model: str | None = option(
        "A folder, a Hugging Face hub id or a .gguf file. Default: the embedded SmolLM2-135M-Instruct, with an adapter "
        "that reads the future.",
        metavar="NAME",
        flags=("--model", "-m"),
    )
    adapter: Mapping[str, str] | str | Literal[False] | None = option(
        "A PEFT adapter for the model: a folder or a hub id. May be repeated, with names: infill=…, scattered=…; one "
        "is then chosen for each template (docs/how-to/adapters.md).",
        shell="none: no adapter, not even the embedded model's.",
        metavar="[NAME=]PATH",
        flags=("--adapter", "-a"),
        form="adapters",
    )


@documented
@dataclass(frozen=True)
class QuestionOptions(LoadingOptions, ModelOptions):
    """Options of `acgpt score` and `acgpt rank`; `SampleOptions` adds those of `acgpt infill`."""

    future: bool | None = option(
        "Use the text after a slot. Default: if the model's metadata say that it can (score shows both).",
        flags=("--future/--no-future",),
    )


@documented
@dataclass(frozen=True)
class SampleOptions(QuestionOptions):
    """Options of `acgpt infill` and of `LanguageModel.sample`."""

    n: int = option("Number of samples per template. Default: 1.", 1, metavar="N", minimum=1, flags=("-n",))
    temperature: float = option(
        "Sampling temperature; 1, the default, is the model's distribution, 0 is greedy.", 1.0, metavar="X", minimum=0
    )
    top_p: float = option(
        "Sample from the most probable tokens whose probabilities sum to P, above 0 and at most 1.", 1.0, metavar="P"
    )
    top_k: int | None = option("Sample from the K most probable tokens.", metavar="K", minimum=1)
    seed: int | None = option(
        "Random seed; the same seed repeats a run. Default: a new one.", metavar="N", minimum=0, flags=("--seed", "-s")
    )


@documented
@dataclass(frozen=True)
class MergeOptions(Options):
    """Options of `acgpt.merge` and `acgpt merge`."""

    dtype: str = declared(
        LoadingOptions,
        "dtype",
        help="Data type of the merged weights: float32, bfloat16, float16, float64. Default: auto, the base model's "
        "(float32 for a .gguf file).",
    )


@documented
@dataclass(frozen=True)
class PushOptions(Options):
    """Options of `acgpt.push` and `acgpt push`."""

    private: bool = option("Make the repository private to you or your organisation. Default: public.", False)
    dry_run: bool = option("List what would be uploaded, without uploading.", False)
