"""Options of loading, querying, merging and sharing a model.

This module imports neither torch, transformers nor numpy, so that `acgpt COMMAND --help` is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from acgpt.common.options import Options, Range, declared, documented, option
from acgpt.models.ask import FillAsk, SearchOptions


@documented
@dataclass(frozen=True)
class DeviceOptions(Options):
    """Device of a model."""

    device: str = option("auto, cpu, cuda, cuda:1 or mps. Default: auto, the best available.", "auto", metavar="NAME")


@documented
@dataclass(frozen=True)
class LoadingOptions(DeviceOptions):
    """Device and precision of a model."""

    dtype: str | Any = option(
        "auto, float32, bfloat16, float16 or float64. Default: auto (float32; on CUDA that of the checkpoint).",
        "auto",
        metavar="NAME",
        form="dtype",
    )


@documented
@dataclass(frozen=True)
class ModelOptions(Options):
    """Model that answers templates, and its adapters."""

    model: str | None = option(
        "Model: a folder, a Hugging Face hub id or a .gguf file. Default: the embedded SmolLM2-135M-Instruct with its "
        "adapter.",
        metavar="NAME",
        flags=("--model", "-m"),
    )
    adapter: Mapping[str, str] | str | Literal[False] | None = option(
        "PEFT adapter of the model: a folder or a hub id. Several adapters have names (infill=…, scattered=…), and "
        "each template is routed to one of them: docs/how-to/adapters.md.",
        shell="May be repeated. none: no adapter.",
        metavar="[NAME=]PATH",
        flags=("--adapter", "-a"),
        form="adapters",
    )


@documented
@dataclass(frozen=True)
class LoadedOptions(LoadingOptions, ModelOptions):
    """Model that answers templates, its adapters, device and precision."""


@documented
@dataclass(frozen=True)
class QuestionOptions(LoadedOptions):
    """Options of `acgpt score` and `acgpt rank`."""

    server: str | None = option(
        "Ask the server at this address (acgpt serve) instead of loading a model; its key is in ACGPT_API_KEY.",
        metavar="URL",
    )
    future: bool | None = option(
        "Condition on the text after a slot. Default: if the model was trained to (score shows both).",
        flags=("--future/--no-future",),
    )


@documented
@dataclass(frozen=True, kw_only=True)
class InfillOptions(SearchOptions, QuestionOptions):
    """Options of `acgpt infill`: settings of `LanguageModel.fill` and `LanguageModel.sample`."""

    n: int = declared(FillAsk, "n", default=1, help="Samples per template; for gaps, distinct fills. Default: 1.")
    seed: int | None = declared(SearchOptions, "seed", range=Range(minimum=0))


@documented
@dataclass(frozen=True)
class MergeOptions(Options):
    """Options of `acgpt.merge` and `acgpt merge`."""

    dtype: str | Any = declared(
        LoadingOptions,
        "dtype",
        help="Precision of the merged weights: float32, bfloat16, float16 or float64. Default: auto, that of the base "
        "(.gguf: float32).",
    )


@documented
@dataclass(frozen=True)
class PushOptions(Options):
    """Options of `acgpt.push` and `acgpt push`."""

    private: bool = option("Create a private repository. Default: public.", False)
    dry_run: bool = option("List what would be uploaded, and upload nothing.", False)
