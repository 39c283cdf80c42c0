"""Options of `acgpt.evaluate`, `acgpt.generate` and `acgpt.score_samples`, each declared once.

This module imports neither torch, transformers nor numpy, so that the command line can show help without delay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from acgpt.common.options import Options, declared, documented, option
from acgpt.errors import InputError
from acgpt.evaluation.mauve import PAPER
from acgpt.models.options import DeviceOptions, LoadingOptions


@documented
@dataclass(frozen=True)
class AskingOptions(LoadingOptions):
    """Options that `acgpt.evaluate` and `acgpt.generate` share: the evaluation dataset and the method."""

    split: str | None = option("Split of the corpus. Default: test if there is one, else validation.", metavar="NAME")
    r_max: float | None = option(
        "Maximum share of a text that is given. Default: that of `conditioning`, else 0.6.",
        metavar="R",
        minimum=0,
        maximum=1,
    )
    length: int | None = option(
        "Tokens per text. Default: 1023, or as many as the model has positions for.", metavar="T", minimum=1
    )
    limit: int | None = option("Use only the first N texts.", metavar="N", minimum=1)
    conditioning: Any | str | None = option(
        "Training distribution of conditioning sets: '{b_max: 4}', as in a recipe; or model: the one in the model's "
        "acgpt.json, with its r_max. Default: the paper's.",
        python="Also a mapping, or a `Conditioning`.",
        metavar="YAML",
    )
    sets: str | Path | None = option(
        "File of the evaluation dataset, to read or to write. Default: CORPUS/evaluation/….safetensors.", metavar="PATH"
    )
    modes: Sequence[str] = option(
        "Modes to use. Default: all five.",
        (),
        shell="Separated by commas: unconditional,training.",
        metavar="NAMES",
        flags=("--modes", "--mode"),
        form="names",
    )
    method: str | None = option(
        "Method to ask the model with (acgpt methods). Default: the one in its acgpt.json, else gpt.",
        metavar="NAME",
    )
    options: Mapping[str, str] | None = option(
        "Options of the method (see acgpt methods).",
        shell="May be repeated.",
        metavar="KEY=VALUE",
        flags=("--how",),
        form="pairs",
    )
    adapter: str | Path | Literal[False] | None = option(
        "A PEFT adapter for the model: a folder or a hub id.",
        python="False: no adapter, for the embedded model too.",
        shell="none: no adapter, for the embedded model too.",
        metavar="NAME",
        flags=("--adapter", "-a"),
        form="adapter",
    )
    batch_tokens: int | None = option(
        "Maximum number of tokens per forward pass. Default: what fits the device.",
        metavar="N",
        minimum=1,
    )
    compiled: bool = option(
        "Compile the network with torch.compile. It speeds up methods with many passes (see acgpt methods) on a GPU.",
        False,
        flags=("--compile",),
    )


@documented
@dataclass(frozen=True)
class EvaluationOptions(AskingOptions):
    """Options of `acgpt.evaluate` and `acgpt evaluate`."""

    seed: int | None = option(
        "Seed of the conditioning sets and intervals. Default: 0.",
        metavar="N",
        minimum=0,
        flags=("--seed", "-s"),
    )
    output: str | Path | None = option(
        "Also write the JSON object to a file.",
        python="An interrupted evaluation then resumes when it is called again.",
        metavar="PATH",
        flags=("--output", "-o"),
    )
    records: str | Path | None = option(
        "Write every asked token with its log-probability to a .safetensors file.", metavar="PATH"
    )


@documented
@dataclass(frozen=True)
class GenerationOptions(AskingOptions):
    """Options of `acgpt.generate` and `acgpt generate`."""

    if_possible: bool = option("Do not fail if the method can answer none of the chosen modes.", False)
    samples: int = option("Samples per text. Default: 1.", 1, metavar="N", minimum=1, flags=("--samples", "-n"))
    prompt: int | None = option(
        "Tokens of each text that are given in the unconditional mode. Default: 20.", metavar="N", minimum=0
    )
    top_p: float | None = option(
        "Sample from the most likely tokens with total probability P, above 0 and at most 1. Default: 0.95.",
        metavar="P",
    )
    temperature: float | None = option(
        "Sampling temperature: 1 is the model's own distribution, 0 is greedy. Default: 0.8.", metavar="X", minimum=0
    )
    seed: int = option("Seed of the samples. Default: 0.", 0, metavar="N", minimum=0, flags=("--seed", "-s"))
    set_seed: int | None = option(
        "Seed of the conditioning sets, as acgpt evaluate --seed. Default: 0.", metavar="N", minimum=0
    )


@documented
@dataclass(frozen=True)
class ScoringOptions(DeviceOptions):
    """Options of `acgpt.score_samples` and `acgpt mauve`."""

    split: str | None = declared(AskingOptions, "split")
    rule: str | None = option(
        "documents: those that are long enough, cut; windows: the whole split. Default: documents, if there are any.",
        metavar="NAME",
    )
    length: int | None = option(
        "Tokens per reference text of a corpus. Default: as many as the generated texts have, at most 2048.",
        metavar="T",
        minimum=1,
    )
    skip: int | None = option(
        "Tokens to skip at the start of the split. Default: the region of the prompts.",
        metavar="N",
        minimum=0,
    )
    count: int | None = option("Maximum number of reference texts. Default: 1000.", metavar="N", minimum=1)
    field: str | None = option("Field of each line of a .jsonl. Default: text.", metavar="NAME")
    features: str | None = option(
        "Model of features, whose hidden states are compared: a folder, a hub id, or default, the embedded model. "
        f"Default: {PAPER}.",
        metavar="MODEL",
    )
    seeds: int | None = option("Number of k-means runs, with seeds 0, 1, …. Default: 5.", metavar="N", minimum=1)
    limit: int | None = option(
        "Score only the first texts, as if no more had been generated, for comparison with a smaller file.",
        metavar="N",
        minimum=1,
    )
    asked_only: bool = option(
        "Score only the asked parts, against the original ones; the reference must be the corpus of the prompts.", False
    )
    judge: str | None = option(
        "Model that scores the likelihood of the texts: any model of acgpt evaluate with the same tokenizer, or a "
        "causal model.",
        metavar="MODEL",
    )
    no_mauve: bool = option("Compute everything but MAUVE, which needs mauve-text and a model of features.", False)
    features_only: bool = option(
        "Only compute the features and store them in the cache folder, for a machine with mauve-text.", False
    )
    output: str | Path | None = option(
        "Path of the result: a .json for one file (.mauve.json for acgpt report to find it), a folder for several. "
        "Default: beside the generations.",
        metavar="PATH",
        flags=("--output", "-o"),
    )
    resume: bool = option("Keep existing results of the same files with the same settings and judge.", False)
    index: str | Path | None = option(
        "A .json that is written last and lists all results. With it, having no generations is not an error.",
        metavar="FILE",
    )


def check_together(options: ScoringOptions, reference: Path, unused: Sequence[str] = ()) -> None:
    """Refuse options that have no effect in combination with others, or with this kind of reference.

    Args:
        options: The options.
        reference: Path of the reference texts.
        unused: Names of further options of the caller that only affect results.

    Raises:
        InputError: There are such options; the message names them.
    """
    corpus_options = ("split", "rule", "length", "skip")
    if options.asked_only:
        refuse(options, (*corpus_options, "count", "field", "no_mauve"), "with `asked_only`")
    if options.no_mauve:
        refuse(options, ("features", "seeds", "features_only"), "with `no_mauve`")
    if options.features_only:
        refuse(options, ("seeds", "judge", *unused, "output", "resume", "index"), "with `features_only`")
    if reference.is_dir():
        refuse(options, ("field",), "with a corpus")
    elif reference.is_file():
        refuse(options, (*corpus_options, "limit"), "with a file of texts")


def refuse(options: Options, names: Sequence[str], where: str) -> None:
    """Refuse options that the user has set. Names that are not in `options` count as set.

    Raises:
        InputError: Some are set; the message names them.
    """
    values = {name: getattr(options, name, True) for name in names}
    if given := [f"`{name}`" for name, value in values.items() if value is not None and value is not False]:
        raise InputError(f"{', '.join(given)} cannot be combined {where}: omit one or the other.")
