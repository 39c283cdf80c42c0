"""The options of the functions that measure models and samples, each declared once.

This module imports neither torch, transformers nor numpy, so that the command line can list the options at once.
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
    """The options that `acgpt.evaluate` and `acgpt.generate` share: what a model is asked, and how."""

    split: str | None = option("Of the corpus. Default: test if there is one, else validation.", metavar="NAME")
    r_max: float | None = option(
        "The largest share of a text that is given. Default: that of `conditioning`, else 0.6.",
        metavar="R",
        minimum=0,
        maximum=1,
    )
    length: int | None = option(
        "Tokens a text. Default: 1023, or as many as the model has positions for.", metavar="T", minimum=1
    )
    limit: int | None = option("The first N texts only.", metavar="N", minimum=1)
    conditioning: Any | str | None = option(
        "The training distribution, if it is not the paper's: '{b_max: 4}', as in a recipe; or model: that of the "
        "model's acgpt.json, with its r_max.",
        python="Also a mapping, or a `Conditioning`.",
        metavar="YAML",
    )
    dataset: str | Path | None = option(
        "Evaluation dataset: a file to read, or to create. Default: CORPUS/evaluation/….safetensors.",
        metavar="PATH",
        renamed_from="sets",
    )
    modes: Sequence[str] = option(
        "Some modes only. Default: all five.",
        (),
        shell="With commas: unconditional,training.",
        metavar="NAMES",
        flags=("--modes", "--mode"),
        form="names",
    )
    method: str | None = option(
        "Ask the model as one of this method (acgpt methods). Default: what its acgpt.json says, else gpt.",
        metavar="NAME",
    )
    options: Mapping[str, str] | None = option(
        "How the method asks, where it leaves a choice (see acgpt methods).",
        shell="May be repeated.",
        metavar="KEY=VALUE",
        flags=("--method-option",),
        form="pairs",
        renamed_from="--how",
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
        "At most so many tokens go through the model at a time. Default: what the device can take.",
        metavar="N",
        minimum=1,
    )
    compiled: bool = option(
        "Put the network through torch.compile: for methods of many passes (see acgpt methods), which it speeds up on "
        "a GPU.",
        False,
        flags=("--compile",),
    )


@documented
@dataclass(frozen=True)
class EvaluationOptions(AskingOptions):
    """The options of `acgpt.evaluate` and of `acgpt evaluate`."""

    seed: int | None = option(
        "Of the conditioning sets and of the intervals. Default: 0.", metavar="N", minimum=0, flags=("--seed", "-s")
    )
    output: str | Path | None = option(
        "Write the JSON object into a file as well.",
        python="An evaluation that was stopped then goes on when it is called again.",
        metavar="PATH",
        flags=("--output", "-o"),
    )
    records: str | Path | None = option(
        "Write every asked token with its log-probability into a .safetensors file.", metavar="PATH"
    )


@documented
@dataclass(frozen=True)
class GenerationOptions(AskingOptions):
    """The options of `acgpt.generate` and of `acgpt generate`."""

    if_possible: bool = option("Not an error if the method can answer none of the modes that were named.", False)
    samples: int = option("Samples of each text. Default: 1.", 1, metavar="N", minimum=1, flags=("--samples", "-n"))
    prompt: int | None = option(
        "Of the unconditional mode: tokens of the text that are given. Default: 20.", metavar="N", minimum=0
    )
    top_p: float | None = option(
        "Draw from the likeliest tokens that together have probability P, above 0 and at most 1. Default: 0.95.",
        metavar="P",
    )
    temperature: float | None = option(
        "1 is the model's own distribution, 0 is greedy. Default: 0.8.", metavar="X", minimum=0
    )
    seed: int = option("Of the draws. Default: 0.", 0, metavar="N", minimum=0, flags=("--seed", "-s"))
    set_seed: int | None = option(
        "Of the conditioning sets, as acgpt evaluate --seed. Default: 0.", metavar="N", minimum=0
    )


@documented
@dataclass(frozen=True)
class ScoringOptions(DeviceOptions):
    """The options of `acgpt.score_samples` and of `acgpt mauve`."""

    split: str | None = declared(AskingOptions, "split")
    rule: str | None = option(
        "documents: those long enough, cut; windows: all of the split. Default: documents where it has them.",
        metavar="NAME",
    )
    length: int | None = option(
        "Tokens of a text of the corpus. Default: as many as the generated texts have, at most 2048.",
        metavar="T",
        minimum=1,
    )
    skip: int | None = option(
        "Leave out so many tokens of the split. Default: the region that the prompts are from.", metavar="N", minimum=0
    )
    count: int | None = option("At most so many texts of reference. Default: 1000.", metavar="N", minimum=1)
    field: str | None = option("Of each line of a .jsonl. Default: text.", metavar="NAME")
    features: str | None = option(
        "The model whose hidden states are compared: a folder, a hub id, or default, the embedded one. "
        f"Default: {PAPER}.",
        metavar="MODEL",
    )
    seeds: int | None = option(
        "So many times k-means, each from another seed, 0 and up. Default: 5.", metavar="N", minimum=1
    )
    limit: int | None = option(
        "Score the first texts only, as if no more had been drawn: to compare with a file of fewer.",
        metavar="N",
        minimum=1,
    )
    asked_only: bool = option(
        "Score what was drawn alone, against what stood there originally; the corpus is that of the prompts.", False
    )
    judge: str | None = option(
        "A model that says how likely it finds the texts: as acgpt evaluate takes it, with the same tokenizer, or a "
        "causal one.",
        metavar="MODEL",
    )
    no_mauve: bool = option("Everything but MAUVE, which needs mauve-text and a model of features.", False)
    features_only: bool = option(
        "Compute the features and keep them in the cache, for a machine that has mauve-text; no more.", False
    )
    output: str | Path | None = option(
        "Where the result goes: a .json for one of GENERATED (.mauve.json, if acgpt report is to find it), a folder "
        "for several. Default: beside it.",
        metavar="PATH",
        flags=("--output", "-o"),
    )
    resume: bool = option(
        "Leave as it is what is there already of the same files, scored in the same way by the same judge.", False
    )
    index: str | Path | None = option(
        "A .json that is written last and names all results; where nothing could be drawn, none, and no error.",
        metavar="FILE",
    )


def check_together(options: ScoringOptions, reference: Path, unused: Sequence[str] = ()) -> None:
    """Refuse options that can do nothing beside others, or with such a reference.

    Args:
        options: What was asked for.
        reference: What the texts are compared with.
        unused: Names of what the caller was given besides, which is for results only.

    Raises:
        InputError: There are such options; they are named.
    """
    of_corpus = ("split", "rule", "length", "skip")
    if options.asked_only:
        refuse(options, (*of_corpus, "count", "field", "no_mauve"), "with `asked_only`")
    if options.no_mauve:
        refuse(options, ("features", "seeds", "features_only"), "with `no_mauve`")
    if options.features_only:
        refuse(options, ("seeds", "judge", *unused, "output", "resume", "index"), "with `features_only`")
    if reference.is_dir():
        refuse(options, ("field",), "with a corpus")
    elif reference.is_file():
        refuse(options, (*of_corpus, "limit"), "with a file of texts")


def refuse(options: Options, names: Sequence[str], where: str) -> None:
    """Refuse those of the named options that were given; what is no option of these was.

    Raises:
        InputError: There are some.
    """
    values = {name: getattr(options, name, True) for name in names}
    if given := [f"`{name}`" for name, value in values.items() if value is not None and value is not False]:
        raise InputError(f"{', '.join(given)} can do nothing {where}: leave one or the other out.")
