"""Options of loading, querying, merging and sharing a model.

This module imports neither torch, transformers nor numpy, so that `acgpt COMMAND --help` is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from acgpt.common.options import Options, Range, declared, documented, option
from acgpt.models.ask import FillAsk, ReadingOptions, SearchOptions


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
class ServedOptions(LoadedOptions):
    """Model that answers templates, loaded here or by a server."""

    server: str | None = option(
        "Ask the server at this address (acgpt serve) instead of loading a model; its key is in ACGPT_API_KEY.",
        metavar="URL",
    )


@documented
@dataclass(frozen=True, kw_only=True)
class ScoreOptions(ReadingOptions, ServedOptions):
    """Options of `acgpt score`: settings of `LanguageModel.log_prob`."""

    future: bool | None = declared(
        ReadingOptions, "future", help="Condition on the text after a slot. Default: both are shown."
    )


@documented
@dataclass(frozen=True, kw_only=True)
class RankOptions(ReadingOptions, ServedOptions):
    """Options of `acgpt rank`: settings of `LanguageModel.rank`."""

    future: bool | None = declared(
        ReadingOptions,
        "future",
        help="Compare p(alternative | rest), if the alternatives have the same number of tokens; `future=False`: whole "
        "texts. Default: p(alternative | rest) if the model was trained to read the future.",
    )


@documented
@dataclass(frozen=True, kw_only=True)
class InfillOptions(SearchOptions, ReadingOptions, ServedOptions):
    """Options of `acgpt infill`: settings of `LanguageModel.fill` and `LanguageModel.sample`."""

    future: bool | None = declared(
        ReadingOptions, "future", help="Condition on the text after a slot. Default: if the model was trained to."
    )
    n: int = declared(FillAsk, "n", default=1, help="Samples per template; for gaps, distinct fills. Default: 1.")
    seed: int | None = declared(SearchOptions, "seed", range=Range(minimum=0))


@documented
@dataclass(frozen=True)
class ShowOptions(ModelOptions):
    """Options of `acgpt show`."""

    future: bool | None = declared(
        ReadingOptions,
        "future",
        help="With copies of given tokens, or left to right. Default: with copies; with several adapters, as the "
        "chosen adapter reads.",
    )


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
