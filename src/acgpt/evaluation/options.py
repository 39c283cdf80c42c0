"""Options of evaluation, generation and scoring.

This module imports neither torch, transformers nor numpy, so that `acgpt COMMAND --help` is fast.
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
from acgpt.query.sampling import SamplingOptions


@documented
@dataclass(frozen=True)
class AskingOptions(LoadingOptions):
    """Options shared by `acgpt.evaluate` and `acgpt.generate`."""

    split: str | None = option("Split of the corpus. Default: test if it exists, else validation.", metavar="NAME")
    r_max: float | None = option(
        "Maximum share of a text that is given. Default: that of `conditioning`, else 0.6.",
        metavar="R",
        minimum=0,
        maximum=1,
    )
    length: int | None = option(
        "Tokens per text. Default: 1023, or what the model has positions for.", metavar="T", minimum=1
    )
    limit: int | None = option("Use the first N texts only.", metavar="N", minimum=1)
    conditioning: Any | str | None = option(
        "Distribution of conditioning sets, as in a recipe: '{b_max: 4}'. model: that of the model's acgpt.json, with "
        "its r_max. Default: the paper's.",
        python="A mapping or a `Conditioning` is accepted too.",
        metavar="YAML",
    )
    dataset: str | Path | None = option(
        "Evaluation dataset: a file to read, or to create. Default: CORPUS/evaluation/….safetensors.",
        metavar="PATH",
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
        "Method of the model (see acgpt methods). Default: that of its acgpt.json, else gpt.",
        metavar="NAME",
    )
    options: Mapping[str, str] | None = option(
        "Option of the method (see acgpt methods).",
        shell="May be repeated.",
        metavar="KEY=VALUE",
        flags=("--method-option",),
        form="pairs",
    )
    adapter: str | Path | Literal[False] | None = option(
        "PEFT adapter of the model: a folder or a hub id.",
        python="False: no adapter, not even that of the embedded model.",
        shell="none: no adapter, not even that of the embedded model.",
        metavar="NAME",
        flags=("--adapter", "-a"),
        form="adapter",
    )
    batch_tokens: int | None = option(
        "Maximum number of tokens per forward pass. Default: what fits on the device.",
        metavar="N",
        minimum=1,
    )
    compiled: bool = option(
        "Use torch.compile. It speeds up methods of many passes (see acgpt methods) on a GPU.",
        False,
        flags=("--compile",),
    )


@documented
@dataclass(frozen=True)
class EvaluationOptions(AskingOptions):
    """Options of `acgpt.evaluate` and `acgpt evaluate`."""

    seed: int | None = option(
        "Seed of the conditioning sets and of the intervals. Default: 0.",
        metavar="N",
        minimum=0,
        flags=("--seed", "-s"),
    )
    output: str | Path | None = option(
        "Write the result to a JSON file; one of another question is not replaced.",
        python="A stopped evaluation is resumed by the same call.",
        metavar="PATH",
        flags=("--output", "-o"),
    )
    records: str | Path | None = option(
        "Write every asked token and its log-probability to a .safetensors file.", metavar="PATH"
    )


@documented
@dataclass(frozen=True)
class GenerationOptions(AskingOptions):
    """Options of `acgpt.generate` and `acgpt generate`."""

    if_possible: bool = option("No error if the method can answer none of `modes`.", False)
    samples: int = option("Samples per text. Default: 1.", 1, metavar="N", minimum=1, flags=("--samples", "-n"))
    prompt: int | None = option(
        "Number of given tokens in the unconditional mode. Default: 20.", metavar="N", minimum=0
    )
    top_p: float | None = declared(
        SamplingOptions,
        "top_p",
        default=None,
        help="Nucleus sampling: total probability of the tokens to sample from, above 0. Default: 0.95.",
    )
    temperature: float | None = declared(
        SamplingOptions, "temperature", default=None, help="Sampling temperature; 0 is greedy. Default: 0.8."
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
        "Reference texts. documents: long documents, truncated; windows: the whole split. Default: documents if any.",
        metavar="NAME",
    )
    length: int | None = option(
        "Tokens per reference text. Default: that of the generated texts, at most 2048.",
        metavar="T",
        minimum=1,
    )
    skip: int | None = option(
        "Skip the first N tokens of the split. Default: the region of the prompts.", metavar="N", minimum=0
    )
    count: int | None = option("Maximum number of reference texts. Default: 1000.", metavar="N", minimum=1)
    field: str | None = option("Field with the text in a .jsonl file. Default: text.", metavar="NAME")
    features: str | None = option(
        f"Model that computes the features: a folder, a hub id, or default (embedded). Default: {PAPER}.",
        metavar="MODEL",
    )
    seeds: int | None = option("Number of k-means runs, with seeds 0, 1, …. Default: 5.", metavar="N", minimum=1)
    limit: int | None = option(
        "Score the first N texts only, to compare with a smaller generation.",
        metavar="N",
        minimum=1,
    )
    asked_only: bool = option(
        "Score the sampled tokens only, against the original ones. REFERENCE must be the corpus of the prompts.", False
    )
    judge: str | None = option(
        "Model that computes the perplexity of the texts: one with the same tokenizer, or a causal one.",
        metavar="MODEL",
    )
    no_mauve: bool = option("Skip MAUVE, which needs mauve-text and a feature model.", False)
    output: str | Path | None = option(
        "Result: a .json file for one generation (.mauve.json for acgpt report to find it), a folder for several. "
        "Default: beside it.",
        metavar="PATH",
        flags=("--output", "-o"),
    )
    resume: bool = option("Keep existing results of the same files, settings and judge.", False)
    index: str | Path | None = option(
        "JSON file with the names of all results, written last. With it, a lack of samples is no error.",
        metavar="FILE",
    )


def check_compatible(options: ScoringOptions, reference: Path) -> None:
    """Refuse options that have no effect with other options or with this kind of reference.

    Args:
        options: The options.
        reference: Corpus or file that the texts are compared with.

    Raises:
        InputError: There are such options. The message names them.
    """
    corpus_options = ("split", "rule", "length", "skip")
    if options.asked_only:
        refuse(options, (*corpus_options, "count", "field", "no_mauve"), "with `asked_only`")
    if options.no_mauve:
        refuse(options, ("features", "seeds"), "with `no_mauve`")
    if reference.is_dir():
        refuse(options, ("field",), "with a corpus")
    elif reference.is_file():
        refuse(options, (*corpus_options, "limit"), "with a file of texts")


def refuse(options: Options, names: Sequence[str], where: str) -> None:
    """Refuse named options that were given.

    Raises:
        InputError: An option was given.
    """
    values = {name: getattr(options, name) for name in names}
    if given := [f"`{name}`" for name, value in values.items() if value is not None and value is not False]:
        raise InputError(f"{', '.join(given)} cannot be used {where}: leave one of them out.")
